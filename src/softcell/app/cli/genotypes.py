"""`softcell show`, `convert`, `random` and `derive`: architectures as drawings, notations, samples and fronts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from softcell.app import report
from softcell.app.cli import inputs
from softcell.app.cli import options as o
from softcell.app.cli.console import check_absent, command, console, percent, print_fields, write
from softcell.app.progress import counting
from softcell.app.report.charts import front_svg
from softcell.arch import Genotype, notation, sample
from softcell.errors import UserError
from softcell.files import atomic_write_text, read_text
from softcell.search.budget import format_cost
from softcell.search.genotypes import is_notation, named_in_file, run_in
from softcell.search.resource import quantity
from softcell.search.selection import OPTIONS, FrontPoint, Kind, derive_front
from softcell.search.supernet import restore
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


@commands.command(
    "derive",
    epilog=o.examples(
        "softcell derive runs/darts-nb201-digits-1 --max-params 20k,50k,200k",
        "softcell derive runs/snas-darts-cifar10-1 --max-flops 100M,300M,600M",
    ),
)
def derive(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a search with its checkpoint.")],
    max_params: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Budgets of parameters, such as 50k,200k,1M.")
    ] = None,
    max_flops: Annotated[
        str | None, typer.Option(metavar="N,N,...", help="Budgets of multiply-adds for one image, such as 100M,600M.")
    ] = None,
    device: o.Device = None,
    data_root: o.DataRoot = None,
    overwrite: o.OverwriteFile = False,
    plugin: o.Plugin = None,
    trust: o.Trust = False,
    quiet: o.Quiet = False,
) -> None:
    """Derive one architecture per budget from one search, and draw accuracy against cost.

    Budgets are those of the network that `softcell train` would build. Each gets the architecture that the search found
    strongest among those within it. Accuracies are measured on the validation split with the supernet's weights
    (BatchNorm recalibrated): they compare architectures roughly, and say little about what a training reaches.
    """
    if (max_params is None) == (max_flops is None):
        raise UserError("give --max-params or --max-flops, one of them, with one budget or several: 50k,200k,1M")
    o.load_plugins(plugin)
    kind: Kind = "flops" if max_params is None else "parameters"
    option = "--" + OPTIONS[kind].replace("_", "-")
    texts = [text.strip() for text in (max_params or max_flops or "").split(",")]
    limits = {quantity(option, text): text for text in texts}
    folder = run_in(run, searched=True)
    files = {limit: folder / f"front-{text}.json" for limit, text in limits.items()}
    summary, drawing = folder / "front.json", folder / "front.svg"
    for file in (*files.values(), summary, drawing):
        check_absent(file, overwrite, "move it away")
    screen = console()
    found = restore(folder, device=device or "auto", data_root=data_root)
    with counting(screen, "measuring", quiet) as step:
        points = derive_front(found, kind, list(limits), on_step=step)
    for point in points:
        atomic_write_text(files[point.limit], point.genotype.dumps())
        print_fields(screen, **{limits[point.limit]: _described(point, found.recipe.measured_split)})
    rows = [
        {"limit": p.limit, "kind": kind, "genotype": files[p.limit].name, **p.costs, "accuracy": p.accuracy}
        for p in points
    ]
    written = {"method": found.recipe.method, "split": found.recipe.measured_split, "points": rows}
    atomic_write_text(summary, json.dumps(written, indent=2) + "\n")
    print_fields(screen, genotypes=", ".join(str(files[point.limit]) for point in points))
    known = [(p.costs[kind], p.accuracy, limits[p.limit]) for p in points if p.accuracy is not None]
    if known:
        title = f"{found.recipe.method} in space {found.recipe.space} on {Path(found.recipe.data).name}"
        name = {"parameters": "parameters", "flops": "multiply-adds"}[kind]
        atomic_write_text(drawing, front_svg(known, title, name, f"accuracy on the {written['split']} split"))
        print_fields(screen, drawing=str(drawing))
    print_fields(screen, next=command("train", files[points[0].limit]))


def _described(point: FrontPoint, split: str) -> str:
    costs = ", ".join(format_cost(kind, point.costs[kind]) for kind in ("parameters", "flops"))
    if point.accuracy is None:
        return f"{costs}; accuracy not measured, the search had no labels"
    return f"{costs}; {percent(point.accuracy)} on the {split} split with the supernet's weights"
