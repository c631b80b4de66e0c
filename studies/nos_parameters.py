"""The range of parameters of NOS networks: random genotypes, counted from the shapes of their parts.

    python -m studies.nos_parameters --number 1000

A network is a fixed skeleton plus one module per pick and cell, so each kind of module is built once (without
memory) and the rest is addition; `count_genotype` on the whole network returns the same (tested).
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter

import torch

from softcell.arch import Genotype, sample
from softcell.nn.candidates import Spec, get_candidate
from softcell.spaces.base import Shape, evaluation_space
from softcell.spaces.costs import count_genotype
from softcell.spaces.darts import Stem, plan_cells, spec_of
from softcell.spaces.nos import NosSpace


class ParameterCount:
    """Parameters of evaluation networks of one size."""

    def __init__(self, space: NosSpace, shape: Shape, num_classes: int) -> None:
        self._known: dict[tuple[str, Spec], int] = {}
        layout = space.layout()
        with torch.device("meta"):
            stem = Stem(space, shape[0]).channels
        plans = plan_cells(space, stem, {table.name: len(table.output) for table in layout.tables})
        # How often the specs of a node's edges occur: cells of one kind and width count together.
        self._specs = [(plan.table, spec_of(plan, search_form=False)) for plan in plans]
        first = sample(layout, 0)
        self._fixed = count_genotype(space, first, shape, num_classes).parameters - self._picks(first)

    def __call__(self, genotype: Genotype) -> int:
        return self._fixed + self._picks(genotype)

    def _picks(self, genotype: Genotype) -> int:
        wanted = Counter(
            (pick.op, spec(pick.source)) for table, spec in self._specs for pick in genotype.cells[table].picks
        )
        return sum(times * self._module(op, spec) for (op, spec), times in wanted.items())

    def _module(self, op: str, spec: Spec) -> int:
        if (op, spec) not in self._known:
            with torch.device("meta"):
                self._known[op, spec] = sum(p.numel() for p in get_candidate(op).build(spec).parameters())
        return self._known[op, spec]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.nos_parameters", description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=1000)
    options = parser.parse_args(arguments)
    if options.number < 1:
        parser.error(f"--number must be at least 1, got {options.number}")
    sizes: tuple[tuple[str, Shape, int], ...] = (("cifar10", (3, 32, 32), 10), ("imagenet", (3, 224, 224), 1000))
    for data, shape, classes in sizes:
        space = evaluation_space("nos", data)
        assert isinstance(space, NosSpace)
        counted, layout = ParameterCount(space, shape, classes), space.layout()
        found = sorted(counted(sample(layout, seed)) for seed in range(options.number))
        print(
            f"{data}: {space.cells} cells, {space.channels} channels, {options.number} random genotypes (seeds 0 to "
            f"{options.number - 1}): {found[0] / 1e6:.3f}M to {found[-1] / 1e6:.3f}M parameters, median "
            f"{statistics.median(found) / 1e6:.3f}M, without auxiliary tower"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
