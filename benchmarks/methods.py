"""`python -m benchmarks.methods`: a search step of every method in its paper's space and size, on a GPU.

Steps of real search tasks, eager and captured, in float32 and bfloat16, in one run; the very first step, which
compiles kernels; and several searches that share the device.

python -m benchmarks.methods --rounds 20 --out record.json
python -m benchmarks.methods --method nos --method fullattention
python -m benchmarks.methods --method nos --way "recorded bf16" --seconds 0    # one mode, one search at a time
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.options import machine, step_options
from benchmarks.steps import Case
from studies.runs import NOT_MEASURED, write_record

SPACE_OF = {
    "darts": "darts",
    "snas": "darts",
    "entrannas-dst": "darts",
    "itnas": "nb201",
    "nos": "nos",
    "fullattention": "fullattention",
}
"""The search space of the method's paper."""
WAYS: dict[str, dict[str, Any]] = {
    "eager": {"engine": "eager", "precision": "float32"},
    "recorded": {"engine": "graph", "precision": "float32"},
    "recorded bf16": {"engine": "graph", "precision": "bfloat16"},
}
AT_ONCE = 4


def measured(method: str, rounds: int, seconds: float, modes: Sequence[str] = tuple(WAYS)) -> dict[str, Any]:
    """The cost of a step in some modes, and in the last of all modes when several searches share the device.

    Args:
        seconds: how long they share it; 0: not measured.
    """
    from benchmarks.gpu import forget, made_data, made_search, measure, together
    from softcell.engine.session import open_session

    case = Case(SPACE_OF[method], {}, (3, 32, 32), 64, method)
    opened = open_session(device="cuda", seed=0, precision="float32", deterministic=False, threads=0)
    ways: dict[str, Any] = {}
    with opened as session, made_data() as data:
        for way in modes:
            forget()
            ways[way] = measure(made_search(data, case, session, **WAYS[way]), rounds)
        forget()
        shared = together(data, case, session, AT_ONCE, seconds) if seconds > 0 else None
    about = {"method": method, "space": case.space, "batch": case.batch}
    return {**about, "ways": ways, "together": {"searches": AT_ONCE, "ms_per_step": shared}}


def cells_of(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    ways, shared = row["ways"], row["together"]["ms_per_step"]
    last = ways[next(way for way in reversed(WAYS) if way in ways)]
    return [
        f"{row['method']}, {row['space']}",
        *(f"{ways[way]['ms']:.1f}" if way in ways else NOT_MEASURED for way in WAYS),
        f"{ways['eager']['ms'] / last['ms']:.1f}" if "eager" in ways else NOT_MEASURED,
        f"{last['busy_ms']:.1f}",
        str(last["kernels"]),
        f"{max(way['first_ms'] for way in ways.values()) / 1e3:.1f}",
        NOT_MEASURED if shared is None else f"{shared:.1f}",
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = step_options("python -m benchmarks.methods", __doc__, rounds=20, one_size=True)
    parser.add_argument(
        "--method", action="append", choices=tuple(SPACE_OF), help="run only this method; may be repeated"
    )
    parser.add_argument("--way", action="append", choices=tuple(WAYS), help="only this mode; may be repeated")
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="how long several searches share the device; 0: skip that"
    )
    options = parser.parse_args(arguments)
    device, threads = machine(parser, options)
    if device.type != "cuda":
        parser.error("recorded steps need a CUDA device; `python -m benchmarks` measures on a CPU")
    console, rows = Console(), list[dict[str, Any]]()
    table = Table(title="one search step (architecture and weights), batch 64, CIFAR size")
    times = [f"{way}, ms" for way in WAYS]
    for column in ("", *times, "× eager", "busy ms", "kernels", "first, s", f"{AT_ONCE} at once, ms per step"):
        table.add_column(column, justify="right" if column else "left")
    for method in options.method or SPACE_OF:
        rows.append(measured(method, options.rounds, options.seconds, options.way or tuple(WAYS)))
        table.add_row(*cells_of(rows[-1]))
        console.print(f"{method}: " + ", ".join(f"{way} {ms['ms']:.1f} ms" for way, ms in rows[-1]["ways"].items()))
        if options.out is not None:  # after each, so that an interrupted run keeps its measurements
            write_record(options.out, "benchmarks.methods", threads=threads, rounds=options.rounds, rows=rows)
    console.print(table)
    if options.out is not None:
        console.print(f"written: {options.out}")


if __name__ == "__main__":
    main()
