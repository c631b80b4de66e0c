"""`python -m benchmarks.entrannas`: a search step of EnTranNAS compared with our DARTS, in one run.

Same space, batch and device; step time and peak memory relative to DARTS. On a GPU, captured steps of real search
tasks are timed with a fixed architecture (a derivation that has just changed runs its first steps eagerly).

python -m benchmarks.entrannas            # small size on this machine's device
python -m benchmarks.entrannas --paper    # 8 cells, 16 channels, 32×32 (on a CPU: minutes)
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.options import machine, step_options
from benchmarks.steps import PAPER, SMALL, Case, batch, once, peak_megabytes, step_state
from studies.runs import write_record

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "darts": ("darts", {}),
    "entrannas": ("entrannas", {"share_features": False}),
    "entrannas, shared": ("entrannas", {"share_features": True}),
    "entrannas, shared, bottleneck 4": ("entrannas", {"share_features": True, "bottleneck": 4}),
    "entrannas-dst at its dense start, shared": ("entrannas-dst", {"share_features": True}),
}
LIMITS = {"entrannas, shared": 1 / 3, "entrannas, shared, bottleneck 4": 1 / 5}
"""Targets, relative to DARTS."""


def case_of(base: Case, name: str, size: int) -> Case:
    method, settings = VARIANTS[name]
    return Case(base.space, {**base.settings, **settings}, base.shape, size, method)


def on_cpu(base: Case, size: int, rounds: int, progress: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Medians of alternating steps after one warm-up each; memory from a separate process per variant."""
    device = torch.device("cpu")
    cases = {name: case_of(base, name, size) for name in VARIANTS}
    data = batch(next(iter(cases.values())), device)
    actors = {name: step_state(case, device, plain=False) for name, case in cases.items()}
    for actor in actors.values():
        once(actor, data, device)
    timings: dict[str, list[Any]] = {name: [] for name in actors}
    for number in range(rounds):
        progress(f"round {number + 1} of {rounds}")
        for name, actor in actors.items():
            timings[name].append(once(actor, data, device))
    del actors
    found = {}
    for name, case in cases.items():
        progress(f"memory of {name}")
        found[name] = {
            # Processor time does not depend on other load.
            "ms": 1e3 * statistics.median(t.cpu_seconds for t in timings[name]),
            "wall_ms": 1e3 * statistics.median(t.wall_seconds for t in timings[name]),
            "peak_mb": peak_megabytes(case, device, plain=False),
        }
    return found


def on_gpu(
    base: Case, size: int, rounds: int, progress: Callable[[str], None], **engine: Any
) -> dict[str, dict[str, Any]]:
    """Captured steps of real search tasks, run sequentially."""
    from benchmarks.gpu import made_data, made_search, measure
    from softcell.engine.session import open_session

    found = {}
    for name in VARIANTS:
        progress(name)
        case = case_of(base, name, size)
        precision = engine["precision"]
        with (
            made_data() as path,
            open_session(device="cuda", seed=0, precision=precision, deterministic=False, threads=0) as session,
        ):
            # A rate that changes nothing: every new derivation would run its first steps eagerly.
            settings = {"space_settings": case.settings, "architecture": {"lr": 1e-12}, "engine": "graph", **engine}
            row = measure(made_search(path, case, session, **settings), rounds)
            alone = measure(made_search(path, case, session, **{**settings, "engine": "eager"}), min(rounds, 3))
        found[name] = {"ms": row["ms"], "busy_ms": row["busy_ms"], "eager_ms": alone["ms"]}
        found[name] |= {"peak_mb": 1e3 * row["peak_gb"], "kernels": row["kernels"], "longest": row["longest"][:12]}
        torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = step_options("python -m benchmarks.entrannas", __doc__, rounds=7)
    parser.add_argument("--batch-size", type=int, default=64, help="images per step, for all variants")
    parser.add_argument("--modules", action="store_true", help="on a GPU, run without fused cells")
    options = parser.parse_args()
    device, threads = machine(parser, options)
    console, base = Console(), (PAPER if options.paper else SMALL)[0]
    engine = {"precision": options.precision, "fused": not options.modules}
    with console.status("steps") as status:
        if device.type == "cuda":
            found = on_gpu(base, options.batch_size, options.rounds, status.update, **engine)
        else:
            found = on_cpu(base, options.batch_size, options.rounds, status.update)
    own = found["darts"]
    table = Table(title=f"one search step, {base}, batch {options.batch_size}, {device.type}, {threads} threads")
    for column in ("", "ms", "of DARTS", "peak MB", "of DARTS", "aimed at"):
        table.add_column(column, justify="left" if not column else "right")
    rows = []
    for name, row in found.items():
        shares = {"time_share": row["ms"] / own["ms"], "memory_share": row["peak_mb"] / own["peak_mb"]}
        limit = LIMITS.get(name)
        met = None if limit is None else max(shares.values()) <= limit
        rows.append({"name": name, **row, **shares, "aimed_at": limit, "met": met})
        table.add_row(
            name,
            f"{row['ms']:.1f}",
            f"{shares['time_share']:.3f}",
            f"{row['peak_mb']:.0f}",
            f"{shares['memory_share']:.3f}",
            "" if limit is None else f"≤ {limit:.3f}" + (" ✓" if met else " missed"),
        )
    console.print(table)
    if options.out is not None:
        case = {"space": base.space, "settings": base.settings, "shape": base.shape, "batch": options.batch_size}
        how = engine if device.type == "cuda" else None
        about = {"threads": threads, "device": device.type, "engine": how, "case": case, "rounds": options.rounds}
        write_record(options.out, "benchmarks.entrannas", **about, rows=rows)
        console.print(f"written: {options.out}")


if __name__ == "__main__":
    main()
