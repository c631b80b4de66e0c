"""`softcell show`, `convert` and `random`: architectures as drawings, notations and random samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from softcell.app import report
from softcell.app.cli import inputs
from softcell.app.cli import options as o
from softcell.app.cli.console import console, write
from softcell.arch import Genotype, notation, sample
from softcell.errors import UserError
from softcell.files import read_text
from softcell.search.genotypes import is_notation, named_in_file
from softcell.settings import at_most, is_seed
from softcell.spaces import build_space

NB201_CELL = "'|nor_conv_3x3~0|+|none~0|skip_connect~1|+|none~0|none~1|skip_connect~2|'"
commands = typer.Typer()


@commands.command(
    "show",
    epilog=o.examples(
        "softcell show runs/darts-darts-digits-1",
        "softcell show cell.json --svg cell.svg",
        f"softcell show {NB201_CELL}",
    ),
)
def show(
    genotype: o.Architecture,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the drawing as SVG.")] = None,
    title: Annotated[str | None, typer.Option(help="Title of the SVG drawing.")] = None,
    overwrite: o.OverwriteFile = False,
) -> None:
    """Draw an architecture in the terminal or as SVG."""
    found = inputs.genotype(genotype)
    screen = console()
    screen.print(report.to_text(found))
    if svg is not None:
        write(svg, report.to_svg(found, title), overwrite)
        screen.print(f"\ndrawing: {svg}", markup=False)


@commands.command(
    "convert",
    epilog=o.examples(
        "softcell convert runs/darts-darts-digits-1 --to darts",
        "softcell convert genotypes.txt --to json --out cell.json",
        "softcell convert genotypes.py@SNAS_mild --out cell.json",
        f"softcell convert {NB201_CELL}",
    ),
)
def convert(
    genotype: o.Architecture,
    to: Annotated[
        o.Notation | None,
        typer.Option(help="Notation to write. Default: json, or for json the notation of its space."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write here instead of to standard output.")] = None,
    overwrite: o.OverwriteFile = False,
) -> None:
    """Convert an architecture between softcell JSON, DARTS notation and NAS-Bench-201 strings."""
    content = inputs.from_stdin(genotype)
    assert content is not None
    found = inputs.genotype(content)
    text = _render(found, to or _other_notation(content, found))
    if out is None:
        typer.echo(text, nl=not text.endswith("\n"))
    else:
        write(out, text if text.endswith("\n") else text + "\n", overwrite)
        typer.echo(f"written: {out}")


@commands.command(
    "random",
    epilog=o.examples(
        "softcell random nb201 --to nb201 --count 5",
        "softcell random darts --seed 7 > cell.json",
        "softcell random darts --count 10 --out cells/ --set space.nodes=3",
    ),
)
def random(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[SPACE]", help="Search space, see `softcell list spaces`. Default: darts."),
    ] = None,
    space: Annotated[str | None, typer.Option(metavar="SPACE", help="The same as an option.")] = None,
    seed: Annotated[int, typer.Option(metavar="K", min=0, help="Seed of the first one; the next has K + 1.")] = 0,
    count: Annotated[int, typer.Option(metavar="N", min=1, help="Number of architectures.")] = 1,
    to: Annotated[o.Notation, typer.Option(help="Notation; with json and --count, one per line.")] = "json",
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write one file each, SPACE-SEED, instead of standard output.")
    ] = None,
    set_: o.SetSpace = None,
    overwrite: o.OverwriteFile = False,
    plugin: o.Plugin = None,
) -> None:
    """Sample architectures uniformly from a space; the same seed always gives the same one."""
    if None not in (name, space) and name != space:
        raise UserError(f"a space is given once, but got {name!r} and --space {space}; leave out one of them")
    space = name or space or "darts"
    at_most("count", count, 1_000_000)
    for number in (seed, seed + count - 1):
        is_seed("seed", number)
    o.load_plugins(plugin)
    layout = build_space(space, o.space_settings(set_)).layout()
    for number in range(seed, seed + count):
        found = sample(layout, number)
        text = _render(found, to).rstrip("\n")
        if out is not None:
            file = out / f"{space}-{number}.{'json' if to == 'json' else 'txt'}"
            write(file, text + "\n", overwrite)
            typer.echo(f"written: {file}")
        elif to == "json" and count > 1:
            typer.echo(json.dumps(found.to_dict()))
        else:
            typer.echo(text)


def _render(genotype: Genotype, to: o.Notation) -> str:
    match to:
        case "json":
            return genotype.dumps()
        case "darts":
            return notation.to_darts(genotype)
        case "nb201":
            return notation.to_nb201(genotype)


def _other_notation(content: str, genotype: Genotype) -> o.Notation:
    """A notation different from the input's."""
    if is_notation(content):
        is_json = content.lstrip().startswith("{")
    else:
        path, _ = named_in_file(content) or (Path(content), None)
        is_json = not path.is_file() or read_text(path).lstrip().startswith("{")
    return ("nb201" if set(genotype.cells) == {"cell"} else "darts") if is_json else "json"
