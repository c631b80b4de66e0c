"""`python -m benchmarks.credit`: the cost of recording SNAS's credits, as a share of a search step.

Steps of two searches that differ only in `method.record_credit` alternate, so that their ratio is robust to other load
on the machine; on a GPU, captured steps of real search tasks are timed. Target: at most 5% of a step.

python -m benchmarks.credit                                  # small size on this machine's device
python -m benchmarks.credit --paper --precision bfloat16     # the paper's size
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.options import machine, step_options
from benchmarks.steps import PAPER, SMALL, Case, batch, once, step_state
from softcell.search.steps import StepState
from studies.runs import write_record

LIMIT = 0.05
"""Target, as a share of a step without credits."""
WAYS = {"without": False, "with": True}


def case_of(base: Case, way: str) -> Case:
    return replace(base, method="snas", method_settings={"record_credit": WAYS[way]}, regime="single-level")


def on_cpu(base: Case, rounds: int) -> dict[str, float]:
    """Median milliseconds of processor time, which does not depend on other load."""
    device = torch.device("cpu")
    data = batch(base, device)
    actors = {way: step_state(case_of(base, way), device, plain=False) for way in WAYS}
    for actor in actors.values():
        once(actor, data, device, "single-level")
    return in_turns(
        {way: partial(_cpu_milliseconds, actor, data, device) for way, actor in actors.items()},
        rounds,
    )


def _cpu_milliseconds(actors: StepState, data: tuple[Tensor, Tensor], device: torch.device) -> float:
    return 1e3 * once(actors, data, device, "single-level").cpu_seconds


def on_gpu(base: Case, rounds: int, precision: str) -> dict[str, float]:
    """Median milliseconds of captured steps, including drop-path and resource penalty, as in the paper."""
    from benchmarks.gpu import made_data, made_search, next_milliseconds, started
    from softcell.engine.capture import WARMUP
    from softcell.engine.session import open_session

    opened = open_session(device="cuda", seed=0, precision=precision, deterministic=False, threads=0)
    with made_data() as path, opened as session:
        steps: dict[str, Callable[[], float]] = {}
        for way in WAYS:
            case = case_of(base, way)
            settings = {"space_settings": case.settings, "method_settings": case.method_settings}
            task = made_search(path, case, session, **settings, engine="graph", precision=precision)
            batches = started(task)
            for one in islice(batches, WARMUP + 3):
                task.step(one)
            steps[way] = partial(next_milliseconds, task, batches)
        return in_turns(steps, rounds)


def in_turns(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {way: [] for way in steps}
    for _ in range(rounds):
        for way, step in steps.items():
            times[way].append(step())
    return {way: statistics.median(values) for way, values in times.items()}


def main() -> None:
    parser = step_options("python -m benchmarks.credit", __doc__, rounds=40, threads=1)
    parser.add_argument("--space", action="append", help="run only this space; may be repeated")
    options = parser.parse_args()
    device, threads = machine(parser, options)
    rows: list[dict[str, Any]] = []
    table = Table(title=f"one search step of SNAS, {device.type}, {threads} threads, {options.precision}")
    for column in ("", "ms without credits", "ms with", "share", "aimed at"):
        table.add_column(column, justify="left" if not column else "right")
    for base in PAPER if options.paper else SMALL:
        if base.space not in (options.space or [base.space]):
            continue
        found = (
            on_gpu(base, options.rounds, options.precision) if device.type == "cuda" else on_cpu(base, options.rounds)
        )
        share = found["with"] / found["without"] - 1
        rows.append({"case": str(base), "ms": found, "share": share, "aimed_at": LIMIT, "met": share <= LIMIT})
        cells = (f"{found['without']:.2f}", f"{found['with']:.2f}", f"{share:+.1%}")
        table.add_row(str(base), *cells, f"≤ {LIMIT:.0%} {'✓' if share <= LIMIT else 'missed'}")
    console = Console()
    console.print(table)
    if options.out is not None:
        about = {"threads": threads, "device": device.type, "precision": options.precision, "rounds": options.rounds}
        write_record(options.out, "benchmarks.credit", **about, rows=rows)
        console.print(f"written: {options.out}")


if __name__ == "__main__":
    main()
