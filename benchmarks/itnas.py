"""`python -m benchmarks.itnas`: memory and time of a search step of IT-NAS compared with our DARTS, in one run.

Same space, batch and device. Targets: at most 6% more memory than DARTS (paper: 9.0 against 8.5 GB), and with single
paths in the ProxylessNAS chain at most 20% more than SPOS (9.4 against 7.8 GB; mean over random paths). On a GPU these
run module by module, as in the paper, and also fused, as by default.

python -m benchmarks.itnas                       # small size on this machine's device
python -m benchmarks.itnas --space proxyless     # single-path training
python -m benchmarks.itnas --paper               # 8 cells, 16 channels, 32×32 (on a CPU: minutes; try --batch-size 8)
python -m benchmarks.itnas --paper --space nb201 --precision bfloat16   # on a GPU
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.options import machine, step_options
from benchmarks.steps import DRAWS, PAPER, SMALL, Case, batch, once, peak_megabytes, step_state
from softcell.methods.itnas import HALVES
from studies.runs import write_record

LIMITS = {"itnas": 1.06, "itnas, single paths": 1.2}
"""Target, relative to the memory of the first variant."""
BASE = "darts"
Row = tuple[str, dict[str, Any]]
"""A variant's name and its measurements."""
CHAIN = [
    Case("proxyless", {"width": 0.5, "head": 256}, (3, 32, 32), 64),
    Case("proxyless", {}, (3, 224, 224), 64),
]
"""The small and the paper's size."""
SINGLE: dict[str, dict[str, Any]] = {
    "spos": {"method": "spos", "regime": "single-level"},
    "itnas, single paths": {"method": "itnas", "regime": "single-level", "method_settings": {"paths": "single"}},
}
VARIANTS: dict[str, dict[str, Any]] = {
    BASE: {"method": "darts"},
    "darts, single-level": {"method": "darts", "regime": "single-level"},
    "itnas": {"method": "itnas", "regime": "single-level"},
    "itnas without recomputing": {
        "method": "itnas",
        "regime": "single-level",
        "method_settings": {"recompute": False},
    },
}


def cases_of(base: Case, size: int) -> dict[str, Case]:
    variants = SINGLE if base.space == "proxyless" else VARIANTS
    return {name: Case(base.space, base.settings, base.shape, size, **more) for name, more in variants.items()}


def on_cpu(cases: dict[str, Case], rounds: int, progress: Callable[[str], None]) -> Iterator[Row]:
    """Medians of steps after one warm-up; memory from a separate process per variant."""
    device = torch.device("cpu")
    for name, case in cases.items():
        progress(name)
        timings = []
        if rounds and name not in SINGLE:
            data, actors = batch(case, device), step_state(case, device, plain=False)
            once(actors, data, device, case.regime)
            timings = [once(actors, data, device, case.regime) for _ in range(rounds)]
            del actors
        row = {"peak_mb": peak_megabytes(case, device, plain=False)}
        if timings:
            row["ms"] = 1e3 * statistics.median(t.cpu_seconds for t in timings)
        yield name, row


def on_gpu(cases: dict[str, Case], rounds: int, progress: Callable[[str], None], precision: str) -> Iterator[Row]:
    """Captured steps of real search tasks, run sequentially; sampled paths run eagerly."""
    from benchmarks.gpu import made_data, made_search, measure
    from softcell.engine.session import open_session

    more = {}
    if BASE in cases:
        alone = cases["itnas without recomputing"]
        more = {"darts, fused": cases[BASE], "itnas, fused": cases["itnas"], "itnas without recomputing, fused": alone}
    for name, case in {**cases, **more}.items():
        progress(name)
        with (
            made_data(4 * case.batch if case.shape[1] > 32 else 4096, case.shape[1]) as path,
            open_session(device="cuda", seed=0, precision=precision, deterministic=False, threads=0) as session,
        ):
            settings = {
                "space_settings": case.settings,
                "method_settings": case.method_settings,
                "regime": case.regime,
                "engine": "graph",
                "precision": precision,
                "fused": "fused" in name,
                "split": HALVES,
            }
            if name in SINGLE:
                # Paths rarely repeat: benchmarking algorithms for every new convolution would dominate the time.
                torch.backends.cudnn.benchmark = False
            task = made_search(path, case, session, **settings)
            row = measure(task, rounds)
            if name in SINGLE:  # paths differ in size: the mean over the same ones for all methods
                row["peak_gb"] = statistics.fmean(_peaks(task)) / 1e9
        kept = {key: row[key] for key in ("ms", "busy_ms", "kernels", "longest")}
        yield name, {**kept, "peak_mb": 1e3 * row["peak_gb"]}
        del task
        torch.cuda.empty_cache()


def _peaks(task: Any) -> Iterator[int]:
    """The peak memory of each of the first steps, in bytes."""
    from benchmarks.gpu import started

    for one in islice(started(task), DRAWS):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        task.step(one)
        torch.cuda.synchronize()
        yield torch.cuda.max_memory_allocated()


def main() -> None:
    again = "timed steps of each; 0: only memory"
    parser = step_options("python -m benchmarks.itnas", __doc__, rounds=5, rounds_help=again)
    parser.add_argument("--space", default="darts", choices=["darts", "nb201", "proxyless"], help="search space")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, for all variants")
    options = parser.parse_args()
    device, threads = machine(parser, options, least_rounds=0)
    console = Console()
    known = [*PAPER, CHAIN[1]] if options.paper else [*SMALL, CHAIN[0]]
    base = next(case for case in known if case.space == options.space)
    cases = cases_of(base, options.batch_size)
    case = {"space": base.space, "settings": base.settings, "shape": base.shape, "batch": options.batch_size}
    about = {"case": case, "rounds": options.rounds, "device": device.type, "threads": threads}
    first = next(iter(cases))
    rows: list[dict[str, Any]] = []
    with console.status("steps") as status:
        if device.type == "cuda":
            found = on_gpu(cases, options.rounds, status.update, options.precision)
        else:
            found = on_cpu(cases, options.rounds, status.update)
        for name, row in found:
            share = row["peak_mb"] / (rows[0] if rows else row)["peak_mb"]
            limit = LIMITS.get(name)
            met = None if limit is None else share <= limit
            rows.append({"name": name, **row, "memory_share": share, "aimed_at": limit, "met": met})
            if options.out is not None:  # row by row, so that measurements survive a later failure
                write_record(options.out, "benchmarks.itnas", **about, precision=options.precision, rows=rows)
    table = Table(title=f"one search step, {cases[first]}, {device.type}, {threads} threads")
    for column in ("", "ms", "peak MB", f"of {first}", "aimed at"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        aim = "" if row["aimed_at"] is None else f"≤ {row['aimed_at']:.2f}" + (" ✓" if row["met"] else " missed")
        time = f"{row['ms']:.0f}" if "ms" in row else "not measured"
        table.add_row(row["name"], time, f"{row['peak_mb']:.0f}", f"{row['memory_share']:.3f}", aim)
    console.print(table)
    if options.out is not None:
        console.print(f"written: {options.out}")


if __name__ == "__main__":
    main()
