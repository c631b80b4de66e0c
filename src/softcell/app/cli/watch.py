"""`softcell watch`"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from softcell.app.cli import options as o

EPILOG = o.examples("softcell watch", "softcell watch runs/my-sweep --port 8800", "softcell watch runs/darts-nb201-1")


def watch(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN...]", help="Run folders, or folders with runs in them; else runs/."),
    ] = None,
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Port on this machine; 0: any free.")] = 8477,
    every: Annotated[float, typer.Option(metavar="S", min=0.2, help="Seconds between two looks at the files.")] = 2.0,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
    plugin: o.Plugin = None,
) -> int:
    """Show the report of running searches and trainings as a live page, on this machine only.

    The page is served on 127.0.0.1. To see it from elsewhere, forward the port: ssh -L 8477:localhost:8477 HOST
    """
    from softcell.api import RUNS
    from softcell.app.cli.console import console
    from softcell.app.report.live import LivePage, LiveServer
    from softcell.errors import UserError

    o.load_plugins(plugin)
    roots = runs or [RUNS]
    for root in roots:
        if runs and not root.is_dir():
            raise UserError(f"{root} must be a folder with runs, but there is no such folder; see what is in {RUNS}/")
    with LiveServer(LivePage(roots, every), port) as server:
        screen = console()
        screen.print(f"watching {', '.join(map(str, roots))}: {server.address}  (Ctrl-C ends)", markup=False)
        sys.stdout.flush()  # a log sees the address at once too
        if open_:
            typer.launch(server.address)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            screen.print("stopped; the runs go on")
    return 0
