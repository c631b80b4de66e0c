"""`softcell random`"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from softcell.app.cli import options as o

EPILOG = o.examples(
    "softcell random --space nb201 --to nb201 --count 5",
    "softcell random --space darts --seed 7 > cell.json",
    "softcell random --space darts --count 10 --out cells/ --set space.nodes=3",
)


def random(
    space: Annotated[str, typer.Option(help="Search space, see `softcell list spaces`.")] = "darts",
    seed: Annotated[int, typer.Option(metavar="K", min=0, help="Seed of the first one; the next has K + 1.")] = 0,
    count: Annotated[int, typer.Option(metavar="N", min=1, help="How many architectures.")] = 1,
    to: Annotated[o.Notation, typer.Option(help="Notation; several in json are one per line.")] = "json",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write one file each, SPACE-SEED, instead of standard output.")
    ] = None,
    set_: o.SetSpace = None,
    overwrite: o.OverwriteFile = False,
    plugin: o.Plugin = None,
) -> None:
    """Sample architectures uniformly from a space; the same seed gives the same one everywhere."""
    from softcell.app.cli.console import write
    from softcell.app.cli.convert import render
    from softcell.arch import sample
    from softcell.errors import UserError
    from softcell.settings import assignments, at_most, is_seed
    from softcell.spaces import build_space

    at_most("count", count, 1_000_000)
    for number in (seed, seed + count - 1):
        is_seed("seed", number)
    o.load_plugins(plugin)
    given = assignments(set_ or ())
    unknown = sorted(set(given) - {"space"})
    if unknown:
        raise UserError(f"--set takes settings of the space here, as space.nodes=3, but got {unknown[0]!r}")
    layout = build_space(space, given.get("space")).layout()
    for number in range(seed, seed + count):
        found = sample(layout, number)
        text = render(found, to).rstrip("\n")
        if out is not None:
            file = out / f"{space}-{number}.{'json' if to == 'json' else 'txt'}"
            write(file, text + "\n", overwrite)
            typer.echo(f"written: {file}")
        elif to == "json" and count > 1:
            typer.echo(json.dumps(found.to_dict()))
        else:
            typer.echo(text)
