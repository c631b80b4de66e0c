"""Measured times of candidates and networks on this machine: medians of many calls, with their spread.

A latency table has one time per table and candidate: the mean over the sites and edges where the candidate can be, each
at its real size, so that the times of a network's picks add up. `softcell.evaluate.measure_onnx.latency_table` makes it
from the measured times, here and on a device that has no torch. The table also records how well it predicts whole
networks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from softcell.arch import Genotype, Layout, sample
from softcell.engine.timing import Stopwatch
from softcell.evaluate.measure_onnx import latency_table
from softcell.nn.candidates import Spec, get_candidate
from softcell.spaces import Shape, Space
from softcell.spaces.costs import cells_with_sizes

WARM_UP = 0.05
"""Seconds of calls before the first measurement, for allocation, tuning and clocks."""
SAMPLE = 0.002
"""Minimum seconds of one sample; shorter calls are repeated within it, since clocks have limited resolution."""
SAMPLES = 15
OnStep = Callable[[int, int, str], None]
"""Called with the number of measurements done, their total, and a description of the next one."""


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds of one call: the median and the quartiles of `samples` samples of `calls` calls each."""

    median: float
    low: float
    high: float
    samples: int
    calls: int

    def __str__(self) -> str:
        return f"{self.median:.3g} ms ({self.low:.3g} to {self.high:.3g}, quartiles of {self.samples} samples)"


@torch.no_grad()
def measure_module(module: nn.Module, x: Tensor, *, samples: int = SAMPLES) -> Latency:
    """The time of `module(x)` in eval mode on the device of `x`; on CUDA the time of the device, without queueing."""
    was_training = module.training
    module.eval()
    watch = Stopwatch(x.device)

    def seconds(calls: int) -> float:
        with watch:
            for _ in range(calls):
                module(x)
        return watch.timing.seconds

    spent, calls = seconds(1), 1
    while spent < WARM_UP:
        spent += seconds(calls)
        calls = min(2 * calls, 64)
    single = max(min(seconds(calls) / calls for _ in range(2)), 1e-9)
    calls = max(1, round(SAMPLE / single))
    found = sorted(seconds(calls) / calls * 1e3 for _ in range(samples))
    module.train(was_training)
    low, median, high = statistics.quantiles(found, n=4) if samples > 1 else found * 3
    return Latency(median, low, high, samples, calls)


@dataclass(frozen=True, slots=True)
class LatencyTable:
    """Times in milliseconds, per table and candidate, and the fixed time.

    `networks` are (predicted, measured) pairs of whole random networks.
    """

    candidates: dict[str, dict[str, float]]
    fixed: float
    networks: tuple[tuple[float, Latency], ...]

    @property
    def error(self) -> float | None:
        """The mean relative deviation of predictions from measurements; None without networks."""
        if not self.networks:
            return None
        return statistics.fmean(abs(guess / found.median - 1.0) for guess, found in self.networks)

    def to_dict(self, about: dict[str, Any]) -> dict[str, Any]:
        """The content of a file for `--latency-table`."""
        rows = {name: {op: _rounded(time) for op, time in row.items()} for name, row in self.candidates.items()}
        checks = [{"predicted": _rounded(guess), "measured": _rounded(found.median)} for guess, found in self.networks]
        error = None if self.error is None else _rounded(self.error)
        about = {**about, "networks": checks, "mean_deviation": error}
        return {"about": about, "fixed": _rounded(self.fixed), **rows}


def measure_space(
    space: Space,
    shape: Shape,
    num_classes: int,
    device: torch.device,
    *,
    batch: int = 1,
    networks: int = 5,
    samples: int = SAMPLES,
    on_step: OnStep | None = None,
) -> LatencyTable:
    """Measures every candidate of a space at the sizes of its networks, and some whole networks."""
    layout = space.layout()
    places = list(candidate_places(space, shape, num_classes))
    needed = list(dict.fromkeys((op, spec, size) for _, op, spec, size in places))
    done: dict[tuple[str, Spec, tuple[int, ...]], float] = {}
    total = len(needed) + networks
    for number, (op, spec, size) in enumerate(needed):
        _notify(on_step, number, total, f"{op} at {'x'.join(map(str, size))}, stride {spec.stride}")
        module = get_candidate(op).build(spec).to(device)
        done[op, spec, size] = measure_module(module, torch.rand(batch, *size, device=device), samples=samples).median
    checks: list[tuple[Genotype, Latency]] = []
    for number in range(networks):
        _notify(on_step, len(needed) + number, total, f"whole network {number + 1} of {networks}")
        genotype = sample(layout, number)
        network = space.network(genotype, shape, num_classes).to(device)
        found = measure_module(network, torch.rand(batch, *shape, device=device), samples=samples)
        checks.append((genotype, found))
    _notify(on_step, total, total, "")
    measured = [(picks_of(genotype, layout), found.median) for genotype, found in checks]
    keyed = [(table, op, (op, spec, size)) for table, op, spec, size in places]
    candidates, fixed, pairs = latency_table(keyed, done, measured)
    networks_ = tuple((guess, found) for (guess, _), (_, found) in zip(pairs, checks, strict=True))
    return LatencyTable(candidates, fixed, networks_)


def candidate_places(space: Space, shape: Shape, num_classes: int) -> Iterator[tuple[str, str, Spec, tuple[int, ...]]]:
    """(table, candidate, its spec, size of its input) of every edge where the candidate can be."""
    layout = space.layout()
    for name, (cell, nodes) in zip(layout.sites, cells_with_sizes(space, shape, num_classes), strict=True):
        for choice in cell.table.choices:
            # As in the final network, which budgets are for.
            spec = replace(cell.spec_of(choice.source), affine=True, pool_norm=False)
            for op in choice.candidates:
                if not get_candidate(op).zero:
                    yield name, op, spec, tuple(nodes[choice.source][1:])


def picks_of(genotype: Genotype, layout: Layout) -> list[tuple[str, str]]:
    """(table, candidate) of every pick, at every site of the network."""
    return [(table, pick.op) for table in layout.sites for pick in genotype.cells[table].picks]


def _notify(on_step: OnStep | None, number: int, total: int, what: str) -> None:
    if on_step is not None:
        on_step(number, total, what)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
