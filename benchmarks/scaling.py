"""`python -m benchmarks.scaling`: expected efficiency of a step on several GPUs. A model, not a measurement.

Counted on this machine, for two ranks: the collectives of one step and their bytes. A step is that of a search, at the
paper's size of the space, or of training DARTS_V2 (20 fused cells of 36 channels, auxiliary head). Inputs: the time of
a step on one GPU (by default from records, with their source), bandwidths and latencies of the links. From these, a
ring all-reduce over n ranks takes

    t(bytes) = 2 (n − 1) / n · bytes / bandwidth + 2 (n − 1) · latency

and the efficiency is step time / (step time + exposed communication). Every GPU processes the batch of the recorded
step. Without overlap, all communication is exposed. With overlap, buckets that are sent during the backward pass of the
weights are hidden behind it as long as it lasts; the last bucket of a pass and the exchange of norm statistics are
always exposed.

python -m benchmarks.scaling
python -m benchmarks.scaling --method darts --space darts --step-ms 27 --norms local --bucket-mb 1
python -m benchmarks.scaling --method train --space darts
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.steps import Case, batch, step, step_state
from softcell.arch import notation
from softcell.engine import reduce
from softcell.engine.distributed import World
from softcell.engine.optim import classification_step
from softcell.kernels.derived import derived_cell_reference
from softcell.kernels.derived_program import Derived, norm_groups
from softcell.kernels.shared import Norms, norms_of
from softcell.nn.norm import running_statistics
from softcell.search import resolve
from softcell.spaces import _derived_plan, build_space, execution
from softcell.spaces.execution import fused_networks
from studies.runs import write_record
from tests.reference.published_genotypes import DARTS_V2

CPU = torch.device("cpu")
RECORDS = Path(__file__).parent / "records"
TRAINING, TRAINED = ("train", "darts"), {"cells": 20, "channels": 36}
STEPS = (("darts", "darts"), ("snas", "darts"), ("entrannas-dst", "darts"), ("darts", "nb201"), TRAINING)
"""Methods and spaces with a recorded step time on one GPU, and training."""
BACKWARD_SHARE = {"bilevel": 1 / 3, "single-level": 2 / 3}
"""Assumed share of the backward pass of the weights in a step: two thirds of a pass; bilevel steps have two passes.

A training step has one."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One sum over ranks of `num_bytes`; `hidden`: it is sent while a backward pass is still running."""

    num_bytes: int
    kind: str
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """The link between `ranks` ranks: the slowest in the ring, in bytes per second each way, and seconds per hop."""

    name: str
    ranks: int
    bandwidth: float
    latency: float


def links(nvlink_gb: float, nvlink_us: float, network_gbit: float, network_us: float, per_machine: int) -> list[Link]:
    inside = [Link(f"{n} GPUs, NVLink", n, nvlink_gb * 1e9, nvlink_us * 1e-6) for n in (2, 4, 8)]
    name = f"2 machines x {per_machine} GPUs, {network_gbit:g} Gb/s"
    return [*inside, Link(name, 2 * per_machine, network_gbit / 8 * 1e9, network_us * 1e-6)]


def ring_seconds(num_bytes: int, link: Link) -> float:
    """Seconds of a ring all-reduce."""
    n = link.ranks
    return 2 * (n - 1) / n * num_bytes / link.bandwidth + 2 * (n - 1) * link.latency


def efficiency(
    collectives: Sequence[Collective], seconds: float, backward: float, link: Link, *, overlap: bool
) -> float:
    """Expected fraction of the ideal speed; seconds: of a step on one GPU, backward: of the weights' backward pass."""
    exposed = sum(ring_seconds(one.num_bytes, link) for one in collectives if not (overlap and one.hidden))
    if overlap:
        exposed += max(0.0, sum(ring_seconds(one.num_bytes, link) for one in collectives if one.hidden) - backward)
    return seconds / (seconds + exposed)


def paper_case(method: str, space: str) -> Case:
    """A search at the paper's size with two small images, since the bytes of a step do not depend on the batch."""
    recipe = resolve({"method": method, "space": space, "scale": "paper", "data": "cifar10"})
    return Case(space, recipe.space_settings, (3, 16, 16), 2, method, recipe.method_settings, recipe.regime)


def counted(case: Case, norms: Norms, bucket_bytes: int) -> list[Collective]:
    """The collectives of one search step. Cells run fused, with the plain twins of the kernels."""
    state = step_state(case, CPU, plain=False)
    state.world, state.norms = World(0, 2, 0, CPU), norms
    with _two_ranks(bucket_bytes) as found, norms_of(norms):
        step(state, batch(case, CPU), case.regime)
    return found


def counted_training(settings: dict[str, Any], norms: Norms, bucket_bytes: int) -> list[Collective]:
    """The collectives of one training step of DARTS_V2 with fused cells; settings: of the space."""
    torch.manual_seed(0)
    network = build_space("darts", settings).network(notation.parse(DARTS_V2), (3, 32, 32), 10, auxiliary=True).train()
    optimiser = torch.optim.SGD(network.parameters(), lr=0.025, momentum=0.9)
    images, labels = torch.randn(2, 3, 32, 32), torch.tensor([0, 1])
    also = running_statistics([network]) if norms == "local" else []
    with _two_ranks(bucket_bytes) as found, norms_of(norms), fused_networks():
        classification_step(network, optimiser, images, labels, World(0, 2, 0, CPU), clip=5.0, auxiliary=0.4, also=also)
    return found


@contextmanager
def _two_ranks(bucket_bytes: int) -> Iterator[list[Collective]]:
    """A context with two ranks and fused cells; yields the list that collects collectives.

    The group is torch's fake one: its collectives do nothing.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    found: list[Collective] = []
    all_reduce, serve, finish = dist.all_reduce, execution.kernels_serve, reduce._Buckets.finish
    original = reduce.GRADIENT_BUCKET_BYTES
    ending = False

    def cell(program: Derived, *given: Any, shared: bool = False, **aliases: Any) -> tuple[Tensor, ...]:
        """Records the messages that kernels would send: the twin's backward pass sends twice the bytes."""
        if shared:
            forward, backward = norm_groups(program)
            sizes = [2 * (2 * program.channels * norms + 1) for norms in forward]  # a row of each of two ranks
            sizes += [2 * program.channels * norms for norms in backward]
            found.extend(Collective(4 * size, "norms") for size in sizes)
        return derived_cell_reference(program, *given, **aliases)

    def listed(tensor: Tensor, *given: Any, **options: Any) -> Any:
        of_gradients = bool(options.get("async_op"))
        size = tensor.numel() * tensor.element_size()
        found.append(Collective(size, "gradients" if of_gradients else "norms", of_gradients and not ending))
        return all_reduce(tensor, *given, **options)

    def last(self: Any, also: Sequence[Tensor]) -> Any:
        nonlocal ending
        ending = True
        result = finish(self, also)
        ending = False
        return result

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    dist.all_reduce, reduce._Buckets.finish = listed, last  # type: ignore[method-assign]
    execution.kernels_serve = lambda x: True
    reduce.GRADIENT_BUCKET_BYTES = bucket_bytes
    try:
        with patch.object(_derived_plan, "derived_cell", cell):
            yield found
    finally:
        reduce.GRADIENT_BUCKET_BYTES = original
        dist.all_reduce, reduce._Buckets.finish = all_reduce, finish  # type: ignore[method-assign]
        execution.kernels_serve = serve
        dist.destroy_process_group()


def recorded_ms(method: str, space: str) -> tuple[float, str] | None:
    """The recorded time of a fused, captured bfloat16 step on one GPU, and its source."""
    if (method, space) == TRAINING:
        file = "derived-h200-2026-11-19.json"
        rows = json.loads((RECORDS / file).read_text())["steps"]
        # The current default was measured under this name.
        (ms,) = [row["ms"] for row in rows if row["setting"] == "rows 22 to 26"]
        return ms, file
    file = "methods-h200-2026-11-16.json"
    for row in json.loads((RECORDS / file).read_text())["rows"]:
        if (row["method"], row["space"]) == (method, space):
            return row["ways"]["recorded bf16"]["ms"], file
    file = "h200-2026-11-15-all.json"
    for row in json.loads((RECORDS / file).read_text())["steps"]:
        if method == "darts" and (row["space"], row["variant"]) == (space, "fused bf16"):
            return row["ms"], file
    return None


def modelled(
    method: str, space: str, norms: Norms, step_ms: float, source: str, connected: Sequence[Link], bucket_bytes: int
) -> dict[str, Any]:
    """Figures of one search or training run: bytes and collectives per step, and the efficiency for every link."""
    seconds, passes = step_ms / 1e3, "single-level"
    if (method, space) == TRAINING:
        collectives = counted_training(TRAINED, norms, bucket_bytes)
    else:
        case = paper_case(method, space)
        collectives = counted(case, norms, bucket_bytes)
        passes = "single-level" if case.regime == "single-level" else "bilevel"
    backward = seconds * BACKWARD_SHARE[passes]
    sums = {
        kind: {
            "collectives": sum(one.kind == kind for one in collectives),
            "bytes": sum(one.num_bytes for one in collectives if one.kind == kind),
        }
        for kind in ("gradients", "norms")
    }
    return {
        "method": method, "space": space, "norms": norms, "step_ms": step_ms, "source": source, **sums,
        "efficiency": {
            link.name: {
                "without overlap": efficiency(collectives, seconds, backward, link, overlap=False),
                "with overlap": efficiency(collectives, seconds, backward, link, overlap=True),
            }
            for link in connected
        },
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--method", help="with --space: only this method; train: DARTS_V2 (default: all with a recorded time)"
    )
    parser.add_argument("--space")
    parser.add_argument("--step-ms", type=float, help="time of a step on one GPU instead of the recorded one")
    parser.add_argument("--norms", choices=get_args(Norms), help="only this setting (default: both)")
    parser.add_argument(
        "--bucket-mb", type=float, default=reduce.GRADIENT_BUCKET_BYTES / 2**20, help="size of gradient buckets"
    )
    parser.add_argument("--nvlink-gb", type=float, default=450.0, help="GB/s each way (default: data sheet of an H200)")
    parser.add_argument("--nvlink-us", type=float, default=3.0, help="assumed microseconds per hop")
    parser.add_argument("--network-gbit", type=float, default=100.0, help="Gb/s between machines")
    parser.add_argument("--network-us", type=float, default=10.0, help="assumed microseconds per hop")
    parser.add_argument("--gpus-per-machine", type=int, default=8)
    parser.add_argument("--out", type=Path, help="where to write the JSON record")
    options = parser.parse_args(arguments)
    numbers = ("step_ms", "bucket_mb", "nvlink_gb", "nvlink_us", "network_gbit", "network_us", "gpus_per_machine")
    for name in numbers:
        value = getattr(options, name)
        if value is not None and not value > 0:
            parser.error(f"--{name.replace('_', '-')} must be positive, but is {value}")
    if (options.method is None) != (options.space is None):
        parser.error("--method and --space must be given together")
    chosen = STEPS if options.method is None else ((options.method, options.space),)
    network = (options.network_gbit, options.network_us, options.gpus_per_machine)
    connected = links(options.nvlink_gb, options.nvlink_us, *network)
    table = Table(title="MODEL, NOT MEASURED: expected efficiency, without and with overlap", title_justify="left")
    columns = ("step", "norms", "step, ms", "gradients", "norms' sums", *(link.name for link in connected))
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < 2 else "right")
    rows = []
    for method, space in chosen:
        known = (options.step_ms, "given") if options.step_ms is not None else recorded_ms(method, space)
        if known is None:
            parser.error(f"no time of a step of {method} in {space} is recorded; measure it and pass --step-ms")
        for norms in get_args(Norms) if options.norms is None else (options.norms,):
            step_ms, source = known
            row = modelled(method, space, norms, step_ms, source, connected, int(options.bucket_mb * 2**20))
            rows.append(row)
            table.add_row(
                f"{method}, {space}",
                norms,
                f"{row['step_ms']:.1f}",
                *(
                    f"{row[kind]['bytes'] / 1e6:.2f} MB in {row[kind]['collectives']}"
                    for kind in ("gradients", "norms")
                ),
                *(" ".join(f"{100 * share:.0f} %" for share in found.values()) for found in row["efficiency"].values()),
            )
    console = Console()
    console.print(table)
    sources = ", ".join(sorted({row["source"] for row in rows}))
    console.print(f"bytes counted here; step times: {sources}; links and latencies as given; same batch per GPU")
    if options.out is not None:
        assumed = {"links": [asdict(link) for link in connected], "backward_share": BACKWARD_SHARE}
        write_record(options.out, "benchmarks.scaling", what="model, not measured", **assumed, rows=rows)


if __name__ == "__main__":
    main()
