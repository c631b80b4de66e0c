"""`python -m benchmarks.supernet`: alternating captured search steps with different settings of fused cells.

One search for each setting (`CellSettings` in `softcell.kernels.backend`), all in one process and from one seed, in
bfloat16 with a batch of 64 at the paper's size. Their steps alternate, so that ratios do not depend on other load on
the machine.
`difference` is the relative distance of the weights from those of the first setting after a few steps. "chosen, again"
shows the noise between two runs of one setting. `--rounding`, which runs on a CPU, shows how much bfloat16 steps
diverge if normalised values change as little as a different summation order changes them.

python -m benchmarks.supernet --minutes 2 --out supernet.json
python -m benchmarks.supernet --rounding
python -m benchmarks.supernet --space nb201 --settings chosen "one stream" '{"splits": 128}'
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.steps import PAPER, Case
from softcell.kernels.backend import cell_settings, default_settings, triton_kernels
from softcell.kernels.warm_up import SWITCH, warm_up_by_run
from softcell.search.dry_pass import without_effects
from softcell.search.task import SearchTask
from studies.runs import write_record

UNIT = 2.0**-24
"""Half the distance of float32 numbers just above 1: the smallest change from a different summation order."""
COMPARED_STEPS = 3
"""Steps after which weights are compared; rounding differences grow with more steps."""
TAPS = ("convolve", "input", "weight")
"""Fields that are entries of `taps_triton.SHAPES`: maximum columns, warps, stages."""
FEWER = {"moments_values": 2048, "moments_warps": 4, "sums_values": 1024, "splits": 64, "reads_ahead": False}
BEFORE = dict.fromkeys(("batch_kernels", "copies_along", "block_norms", "mixes_together", "pools_together"), False)
"""Steps before row 11 of the first table in benchmarks/NOTES.md."""
CHANGES: dict[str, dict[str, Any]] = {
    "chosen": {},
    "early launch": {"early_launch": True},
    "fewer reads": FEWER,
    "one stream": {"second_stream": False},
    "fewer reads, one stream": {**FEWER, "second_stream": False},
    "chosen, again": {},
    "torch batches": {"batch_kernels": False},
    "separate copies": {"copies_along": False},
    "module norms": {"block_norms": False},
    "separate mixes": {"mixes_together": False},
    "separate pools": {"pools_together": False},
    "row 10": BEFORE,
    "2 stages": {"convolve": (128, 4, 2), "input": (64, 4, 2), "weight": (128, 4, 2)},
    "64 columns": {"convolve": (64, 4, 3), "weight": (64, 4, 3)},
}
"""Fields of `CellSettings`, and entries of `SHAPES`, that differ from the chosen ones; the most important first."""
MEASURED = {"nb201": tuple(CHANGES)[:6], "darts": tuple(CHANGES)[:4]}
"""Settings measured by default: as many as fit into two minutes, including compilation."""
SEVERAL = ("chosen", "early launch")
"""Settings that are also measured with several concurrent searches."""


@contextmanager
def changed(changes: dict[str, Any]) -> Iterator[None]:
    """Steps inside this context are captured with these changes."""
    shapes = triton_kernels("taps").SHAPES
    before = dict(shapes)
    shapes.update({name: tuple(value) for name, value in changes.items() if name in TAPS})
    try:
        with cell_settings(**{name: value for name, value in changes.items() if name not in TAPS}):
            yield
    finally:
        shapes.update(before)


def compile_all_settings(settings: dict[str, Any], data: str, case: Case, session: Any) -> None:
    """Compile the kernels of all settings at once, so that workers start only once."""
    from benchmarks.gpu import VARIANTS, made_search, started

    task = made_search(data, case, session, **VARIANTS["fused bf16"])
    assert isinstance(task, SearchTask)
    batch = next(started(task))

    def run() -> None:
        for changes in settings.values():
            with changed(changes):
                task.rehearse(batch)

    began = time.perf_counter()
    with without_effects(task):
        missing = warm_up_by_run(run)
    print(f"{case.space}: {missing} kernels compiled in {time.perf_counter() - began:.1f} s", flush=True)


class Captured:
    """A search with separate settings, whose step has been captured."""

    def __init__(self, changes: dict[str, Any], data: str, case: Case, session: Any) -> None:
        from benchmarks.gpu import VARIANTS, made_search, started
        from softcell.engine.capture import WARMUP, CapturedStep

        torch.manual_seed(0)
        began, failures = time.perf_counter(), CapturedStep.failures
        self.changes, self.times = changes, list[float]()
        with changed(changes):
            task = made_search(data, case, session, **VARIANTS["fused bf16"])
            assert isinstance(task, SearchTask)
            self.task = task
            self._batches = started(self.task)
            for number in range(WARMUP + 3):
                self.task.step(next(self._batches))
                if number + 1 == COMPARED_STEPS:
                    self.weights = torch.cat([p.detach().flatten() for p in self.task.supernet.parameters()])
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - began
        self.failed = CapturedStep.failures > failures

    def again(self) -> None:
        """Capture once more: a failed capture of one step ends those of all others."""
        with changed(self.changes):
            self.task.step(next(self._batches))

    def step(self) -> None:
        from benchmarks.gpu import next_milliseconds

        self.times.append(next_milliseconds(self.task, self._batches))

    def profiled(self) -> dict[str, Any]:
        from benchmarks.gpu import _busy, _kernels, _longest

        events = _kernels(lambda: self.task.step(next(self._batches)))
        return {"busy_ms": _busy(events) / 1e3, "kernels": len(events), "longest": _longest(events)}


def relative(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).norm() / theirs.norm())


def steps(case: Case, settings: dict[str, Any], data: str, session: Any, rounds: int, end: float) -> list[Any]:
    """One row per setting; settings are skipped when no time is left."""
    from benchmarks.gpu import forget

    compile_all_settings(settings, data, case, session)
    searches: dict[str, Captured] = {}
    for name, changes in settings.items():
        if searches and time.monotonic() > end:
            print(f"{case.space}, {name}: no time left", flush=True)
            continue
        search = Captured(changes, data, case, session)
        if search.failed:
            print(f"{case.space}, {name}: NOT CAPTURED, left out", flush=True)
            for other in searches.values():
                other.again()
            continue
        searches[name] = search
        print(f"{case.space}, {name}: captured after {search.seconds:.1f} s", flush=True)
    for _ in range(rounds):
        for search in searches.values():
            search.step()
    first = next(iter(searches.values()))
    rows = [
        {
            "space": case.space,
            "setting": name,
            "changes": settings[name],
            "ms": statistics.median(search.times),
            "ratio": statistics.median(a / b for a, b in zip(search.times, first.times, strict=True)),
            "difference": relative(search.weights, first.weights),
            "first_s": search.seconds,
            **search.profiled(),
        }
        for name, search in searches.items()
    ]
    searches.clear()
    forget()
    return rows


def rounding(case: Case, data: str) -> list[dict[str, Any]]:
    """Relative distance of weights after each of a few steps on a CPU if normalised values are changed by `UNIT`.

    Normalised values are computed in float32, changed and rounded to bfloat16.
    """
    from benchmarks.gpu import VARIANTS, made_search, started
    from softcell.engine.session import open_session

    exact = F.batch_norm

    def weights_of(unit: float) -> list[Tensor]:
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(1)

        def changed_norm(x: Tensor, *given: Any, **named: Any) -> Tensor:
            factors = 1.0 + unit * torch.randn(1, x.shape[1], 1, 1, generator=generator)
            return (exact(x.float(), *given, **named) * factors).to(x.dtype)

        opened = open_session(device="cpu", seed=0, precision="bfloat16", deterministic=False, threads=0)
        with opened as session, patch.object(F, "batch_norm", changed_norm):
            task = made_search(data, case, session, device="cpu", **{**VARIANTS["modules bf16"], "engine": "eager"})
            assert isinstance(task, SearchTask)
            batches, found = started(task), []
            for _ in range(COMPARED_STEPS):
                task.step(next(batches))
                found.append(torch.cat([p.detach().flatten() for p in task.supernet.parameters()]))
        return found

    theirs, again, mine = weights_of(0.0), weights_of(0.0), weights_of(UNIT)
    return [
        {"space": case.space, "step": number, "repeated": relative(b, a), "changed": relative(c, a)}
        for number, (a, b, c) in enumerate(zip(theirs, again, mine, strict=True), 1)
    ]


def shown(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="one captured search step (architecture and weights), bfloat16, batch 64")
    for column in ("", "ms", "× chosen", "busy ms", "kernels", "difference"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        numbers = (f"{row['ms']:.2f}", f"{row['ratio']:.3f}", f"{row['busy_ms']:.2f}", str(row["kernels"]))
        table.add_row(f"{row['space']}, {row['setting']}", *numbers, f"{row['difference']:.1e}")
    return table


def main(arguments: list[str] | None = None) -> None:
    from benchmarks.gpu import forget, made_data, together
    from softcell.engine.session import open_session

    parser = argparse.ArgumentParser(prog="python -m benchmarks.supernet", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--space", nargs=1, choices=("nb201", "darts"), help="only this space (default: both)")
    parser.add_argument("--settings", nargs="*", help="names of CHANGES or JSON objects")
    parser.add_argument("--rounds", type=int, default=40, help="timed steps per setting")
    parser.add_argument("--at-once", type=int, default=4, help="number of searches that share the device; 0: skip")
    parser.add_argument("--minutes", type=float, default=2.0, help="time limit; remaining measurements are skipped")
    parser.add_argument(
        "--rounding", action="store_true", help="measure the effect of rounding on weights instead of times, on a CPU"
    )
    parser.add_argument("--out", type=Path, help="where to write the JSON record")
    given = parser.parse_args(arguments)
    cases = {case.space: case for case in PAPER}
    if given.rounding:
        with made_data(512) as data:
            found = rounding(cases[(given.space or ["nb201"])[0]], data)
        for row in found:
            print(json.dumps(row))
        if given.out is not None:
            write_record(given.out, "benchmarks.supernet", rounding=found)
        return
    began = time.monotonic()
    rows: list[dict[str, Any]] = []
    shared: list[dict[str, Any]] = []

    def write() -> None:
        if given.out is not None:  # after each part, so that an interrupted run keeps its measurements
            write_record(given.out, "benchmarks.supernet", chosen=str(default_settings), rows=rows, together=shared)

    opened = open_session(device="cuda", seed=0, precision="float32", deterministic=False, threads=0)
    with opened as session, made_data() as data:
        os.environ[SWITCH] = "0"  # all kernels are compiled before the first search
        spaces = given.space or ["nb201", "darts"]
        for space, share in zip(spaces, (0.4, 0.85)[-len(spaces) :], strict=True):
            names = given.settings or MEASURED[space]
            settings = {name: CHANGES[name] if name in CHANGES else json.loads(name) for name in names}
            end = began + 60 * given.minutes * share
            rows += steps(cases[space], settings, data, session, given.rounds, end)
            write()
            Console(width=110).print(shown([row for row in rows if row["space"] == space]))
            for name in (name for name in SEVERAL if name in settings and given.at_once):
                # 9 of 60 seconds per minute: the time left by the shares above.
                if time.monotonic() > end + 9 * given.minutes:
                    print(f"{space}, {name}, {given.at_once} at once: no time left", flush=True)
                    continue
                with changed(settings[name]):
                    each = together(data, cases[space], session, given.at_once, 2.0)
                forget()
                shared.append({"space": space, "setting": name, "searches": given.at_once, "ms_per_step": each})
                print(f"{space}, {name}, {given.at_once} at once: {each:.2f} ms per step", flush=True)
                write()


if __name__ == "__main__":
    main()
