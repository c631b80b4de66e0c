"""`softcell demo`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from softcell.app.cli import options as o

EPILOG = o.examples("softcell demo", "softcell demo --out my-first-search --seed 1")
RANDOM = 3
EPOCHS = 8  # of every training; a slow machine must stay under three minutes


def demo(
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the demo; else runs/demo-N with the next free N. One that was stopped goes on.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="K", min=0, help="Seed of everything random.")] = 0,
    device: o.Device = None,
    threads: o.Threads = None,
    quiet: o.Quiet = False,
) -> int:
    """Search a cell on handwritten digits, draw it, train it beside 3 random ones. Takes under 3 minutes."""
    from softcell.api import free_folder
    from softcell.app.cli.console import console
    from softcell.app.cli.search import run_search
    from softcell.app.cli.train import run_train

    folder = out or free_folder("demo")
    screen = console()
    given = o.settings(None, None, seed=seed, device=device, threads=threads)
    again = ("demo", "--out", str(folder), *(("--seed", str(seed)) if seed else ()))
    search, train = folder / "search", folder / "train"
    screen.print("1. Search a cell on 8x8 handwritten digits (UCI, part of the package)", style="bold")
    code = run_search(given, None, search, resume=_begun(search), overwrite=False, quiet=quiet, hint=False, again=again)
    if code:
        return code
    found = str(search)
    screen.print(f"\n2. Train its network from scratch, and those of {RANDOM} random cells alike", style="bold")
    return run_train(
        None if _begun(train) else found,
        {**given, "epochs": EPOCHS},
        None,
        train,
        random=RANDOM,
        resume=_begun(train),
        overwrite=False,
        quiet=quiet,
        again=again,
    )


def _begun(folder: Path) -> bool:
    return (folder / "run.json").is_file()
