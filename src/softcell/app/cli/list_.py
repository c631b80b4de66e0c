"""`softcell list`"""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from softcell.app.cli import options as o

Kind = Literal["methods", "spaces", "datasets", "recipes", "candidates"]
KINDS: tuple[Kind, ...] = ("methods", "spaces", "datasets", "recipes", "candidates")
EPILOG = o.examples("softcell list", "softcell list methods", "softcell list candidates --plugin my_ops.py")


def list_(
    kind: Annotated[Kind | None, typer.Argument(help="What to list; everything when left out.")] = None,
    plugin: o.Plugin = None,
) -> None:
    """Name the methods, spaces, datasets, recipes and candidate operations there are."""
    from rich.table import Table

    from softcell.app.cli.console import console

    o.load_plugins(plugin)
    screen = console()
    for each in KINDS if kind is None else (kind,):
        rows = entries(each)
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for name, about in rows.items():
            table.add_row(f"  {name}", about)
        if kind is None:
            screen.print(each, style="bold underline")
        screen.print(table, soft_wrap=False)
        if kind is None and each != KINDS[-1]:
            screen.print()


def entries(kind: Kind) -> dict[str, str]:
    """Names with one line on each."""
    from softcell.data import datasets
    from softcell.evaluate import RECIPES
    from softcell.methods import METHODS
    from softcell.nn.candidates import get_candidate, known_candidates
    from softcell.search.recipe import SCALES
    from softcell.spaces import SPACES

    match kind:
        case "methods":
            return {name: METHODS.get(name).about for name in METHODS}
        case "spaces":
            return {name: SPACES.get(name).about for name in SPACES}
        case "datasets":
            return {**datasets(), "PATH": "a folder of class/image files, or an .npz file of images and labels"}
        case "recipes":
            return {
                "small": "search --scale small: sizes of a laptop, the default for digits",
                "paper": "search --scale paper: sizes of the papers, the default for everything else",
                **{
                    f"{name} {scale}": f"search {name} --scale {scale}: {_searching(name, scale)}"
                    for name in METHODS
                    for scale in METHODS.get(name).recipes
                    if scale not in SCALES
                },
                **{f"train {name}": _training(name) for name in RECIPES},
            }
        case "candidates":
            list(SPACES)  # spaces bring their candidates
            return {name: _first_line(get_candidate(name).build.__doc__) for name in known_candidates()}


def _searching(method: str, scale: str) -> str:
    from softcell.search import resolve

    recipe = resolve({"method": method, "scale": scale})
    return f"{recipe.epochs} epochs, batch {recipe.batch_size}"


def _training(name: str) -> str:
    from softcell.evaluate import RECIPES, TrainRecipe

    changed = RECIPES[name]
    epochs, batch = (changed.get(key, getattr(TrainRecipe, key)) for key in ("epochs", "batch_size"))
    return f"train --recipe {name}: {epochs} epochs, batch {batch}"


def _first_line(doc: str | None) -> str:
    return doc.strip().splitlines()[0] if doc else ""
