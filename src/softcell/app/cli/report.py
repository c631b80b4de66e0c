"""`softcell report`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from softcell.app.cli import options as o
from softcell.app.cli.places import check_absent

EPILOG = o.examples(
    "softcell report runs/darts-darts-digits-1",
    "softcell report runs/my-sweep --out sweep.html",
    "softcell report runs/train-* --out comparison.html",
)
Runs = Annotated[
    list[Path],
    typer.Argument(metavar="RUN...", help="Run folders, or folders with runs in them.", show_default=False),
]


def report(
    runs: Runs,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where to write; else report.html in the folder given; of several, here."),
    ] = None,
    overwrite: o.OverwriteFile = False,
    plugin: o.Plugin = None,
) -> None:
    """Write one self-contained HTML page on one run or many.

    Every run writes its own report.html already; this makes one page of several, or renews one.
    """
    from softcell.app.cli.console import console
    from softcell.app.report.page import REPORT, write_report
    from softcell.app.report.runs import check_intact, find_runs
    from softcell.errors import UserError

    o.load_plugins(plugin)
    folders = find_runs(runs)
    check_intact(folders)
    own = runs[0] / REPORT if len(runs) == 1 else None
    path = out or own or Path(REPORT)
    if path.is_dir():
        raise UserError(f"--out must be a file, but {path} is a folder; give {path / REPORT}")
    check_absent(path, overwrite or path == own)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_report(folders, path)
    screen = console()
    screen.print(f"report of {len(folders)} {'run' if len(folders) == 1 else 'runs'}: {path}", markup=False)
