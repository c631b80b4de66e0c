"""`softcell show`, `convert`, `random`, `info` and `list`: architectures, what they cost, and what is available."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from softcell.app import report
from softcell.app.cli import options as o
from softcell.app.cli.output import against_budget, console, print_fields, search_accuracy, time_of, top5_of, write
from softcell.app.report.runs import read_lines
from softcell.arch import Genotype, count, notation, sample
from softcell.data import datasets
from softcell.errors import UserError
from softcell.evaluate import RECIPES, TrainRecipe, count_genotype
from softcell.files import read_text
from softcell.methods import METHODS
from softcell.nn.candidates import get_candidate, known_candidates
from softcell.registry import refused
from softcell.search import resolve
from softcell.search.budget import ABOUT, format_cost, stated_budget
from softcell.search.genotypes import is_notation, named_epoch, named_in_file
from softcell.search.recipe import SCALES
from softcell.settings import at_most, is_seed, merge, short_name, to_dict
from softcell.spaces import SPACES, Shape, Space, build_space
from softcell.spaces.base import fit_space
from softcell.text import count_of, percent

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
    found = o.named_genotype(genotype)
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
    # Standard input can be read only once, and both lines below need the text.
    content = o.from_stdin(genotype)
    assert content is not None
    found = o.named_genotype(content)
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
        typer.Argument(metavar="SPACE", help="Search space, see `softcell list spaces`. Default: darts."),
    ] = None,
    space: Annotated[str | None, typer.Option(metavar="SPACE", help="The space, given as an option.")] = None,
    seed: Annotated[
        int, typer.Option(metavar="K", min=0, help="Seed of the first architecture; the next one has K + 1.")
    ] = 0,
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
        raise UserError(f"pass the space only once, but got {name!r} and --space {space}; leave out one of them")
    space = name or space or "darts"
    at_most("count", count, 1_000_000)
    # Both ends of the range, before anything is written.
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
    "info",
    epilog=o.examples(
        "softcell info runs/darts-darts-digits-1",
        "softcell info cell.json --cells 14 --channels 48 --input 3x224x224 --classes 1000 --set space.stem=imagenet",
        "softcell info nb201",
    ),
)
def info(
    what: Annotated[
        str, typer.Argument(metavar="GENOTYPE|RUN|SPACE", help="An architecture, a run folder or the name of a space.")
    ],
    cells: Annotated[
        int | None, typer.Option(metavar="N", help="Depth of the network. Default: the run's, or as for CIFAR.")
    ] = None,
    channels: Annotated[
        int | None, typer.Option(metavar="N", help="Initial width. Default: the run's, or as for CIFAR.")
    ] = None,
    input_: Annotated[
        str | None, typer.Option("--input", metavar="CxHxW", help="Size of an image. Default: the run's, or 3x32x32.")
    ] = None,
    classes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of classes. Default: the run's, or 10.")
    ] = None,
    set_: o.SetSpace = None,
    plugin: o.Plugin = None,
    trust: o.Trust = False,
) -> None:
    """Count the parameters, multiply-adds and size of a network, or describe a space.

    A training run is counted at its own size, a search at the size that `softcell train` would use, and anything else
    as a CIFAR network unless options say otherwise.
    """
    o.load_plugins(plugin)
    size = {key: value for key, value in (("cells", cells), ("channels", channels)) if value is not None}
    settings = merge(size, o.space_settings(set_))
    if what in SPACES:
        if input_ is not None:
            raise UserError(f"--input applies to the network of an architecture, but {what} is a space; leave it out")
        _describe_space(console(), what, settings, classes or 10)
    else:
        _describe_network(console(), what, settings, None if input_ is None else o.parse_shape(input_), classes)


def _describe_network(
    out: Console, what: str, settings: dict[str, Any], image: Shape | None, classes: int | None
) -> None:
    folder, manifest, found = o.with_run(what, only_trusted=True)
    untrusted = [] if manifest is None else refused(manifest["recipe"].get("plugins", ()))
    if untrusted and manifest is not None and folder is not None:
        _describe_untrusted(out, manifest, folder, found, untrusted)
        return
    own, own_image, own_classes = o.own_network(what, manifest)
    base = dict(SPACES.get(found.space).evaluation.get("cifar", {})) if own is None else own
    space = fit_space(found, build_space(found.space, merge(base, settings)), settings)
    image, classes = image or own_image or (3, 32, 32), classes or own_classes or 10
    cost = count_genotype(space, found, image, classes)
    _describe_genotype(out, found)
    retrieving = manifest is not None and manifest["recipe"].get("task") == "retrieve"
    outputs = f"embedding of {classes}" if retrieving else count_of(classes, "class")
    print_fields(
        out,
        network=f"{_sizes(space)}, input {'x'.join(map(str, image))}, {outputs}, without auxiliary tower",
        parameters=f"{cost.parameters:,}",
        multiply_adds=f"{cost.multiply_adds:,}",
        size=f"{cost.megabytes:.2f} MB in float32",
    )
    if manifest is not None and folder is not None:
        _describe_run(out, manifest, folder, found.about.get("epochs") if named_epoch(what) is not None else None)


def _describe_genotype(out: Console, found: Genotype) -> None:
    print_fields(out, space=found.space)
    about = {key: value for key, value in found.about.items() if key != ABOUT}
    settings = about.get("settings")
    stated_epochs = settings.get("epochs") if isinstance(settings, Mapping) else None
    if about.get("epochs") in (about.get("epoch"), stated_epochs):
        about.pop("epochs", None)  # listed as `epoch` or among the settings
    if about:
        print_fields(out, **{"found by": ", ".join(f"{key} {_plain(value)}" for key, value in about.items())})
    stated = stated_budget(found)
    if stated is not None:
        # The space of a plugin that is not trusted is unknown.
        sizes = f"{_sizes(build_space(found.space, stated.network))}, " if found.space in SPACES else ""
        counted = f"counted for {sizes}input {'x'.join(map(str, stated.input))}, {count_of(stated.classes, 'class')}"
        for kind, limit in stated.resource.budgets().items():
            cost = stated.found.get(kind)
            known = format_cost(kind, limit) if cost is None else against_budget(kind, cost, limit)
            print_fields(out, budget=f"{known}; {counted}")


def _describe_untrusted(
    out: Console, manifest: dict[str, Any], folder: Path, found: Genotype, untrusted: list[str]
) -> None:
    """What the files of a run say, if its plugins are not trusted and therefore not run."""
    _describe_genotype(out, found)
    results = manifest["results"]
    for key in ("parameters", "multiply_adds"):
        if isinstance(results.get(key), int):
            print_fields(out, **{key: f"{results[key]:,} (as recorded by the run)"})
    _describe_run(out, manifest, folder, None)
    print_fields(
        out,
        not_counted=f"the run names {', '.join(map(str, untrusted))}, which is missing or not trusted and was not run; "
        "read it, then repeat with --trust, or name your copy with --plugin",
    )


def _sizes(space: Space) -> str:
    """The whole numbers among the settings of a space's networks: what makes them deeper or wider."""
    names = [field.name for field in dataclasses.fields(space) if field.name not in space.search_only]  # type: ignore[arg-type]
    # Not `isinstance`: a bool is an int too.
    return ", ".join(f"{name} {value}" for name in names if type(value := getattr(space, name)) is int)


def _plain(value: object) -> str:
    """As text; settings as on the command line."""
    return " ".join(f"{short_name(key)}={one}" for key, one in value.items()) if isinstance(value, dict) else str(value)


def _describe_run(out: Console, manifest: dict[str, Any], folder: Path, epoch: int | None) -> None:
    """The result of a run; of a search up to `epoch`, counted from 1, if that is given."""
    recipe, results = manifest["recipe"], manifest["results"]
    print_fields(
        out, run=f"{manifest['kind']} in {folder}, {manifest['status']}, data {recipe['data']}, seed {manifest['seed']}"
    )
    if recipe.get("time"):
        print_fields(out, time=time_of(recipe["time"], results.get("time_used")))
    if results.get("accuracy") is not None:
        print_fields(
            out,
            accuracy=f"{percent(results['accuracy'])}{top5_of(results.get('top5'))} on the {results['split']} split "
            f"({count_of(results['count'], 'image')})",
        )
    elif results.get("recall_at_1") is not None:
        shares = ", ".join(f"@{k} {percent(results[f'recall_at_{k}'])}" for k in (1, 2, 4, 8))
        print_fields(out, recall=f"{shares} among images of {results['split']} ({count_of(results['count'], 'image')})")
    elif manifest["kind"] == "search":
        print_fields(out, **search_accuracy(read_lines(folder, "metrics.jsonl", [])[:epoch]))


def _describe_space(out: Console, name: str, settings: dict[str, Any], classes: int) -> None:
    space = build_space(name, settings)
    layout = space.layout()
    number = count(layout)
    print_fields(out, space=f"{name}: {space.about}" if space.about else name)
    print_fields(out, architectures=f"{number:,}" if number < 10**7 else f"{number:,} (about {number:.1e})")
    for remark in space.remarks(classes):
        print_fields(out, remark=remark)
    for table in layout.tables:
        choices, sites = count_of(len(table), "choice"), count_of(len(layout.sites_of(table.name)), "site")
        print_fields(out, table=f"{table.name}: {choices}, up to {table.width} candidates, used at {sites}")
    candidates = dict.fromkeys(op for table in layout.tables for choice in table.choices for op in choice.candidates)
    print_fields(out, candidates=", ".join(candidates))
    values = {key: value for key, value in to_dict(space).items() if key != "candidates"}
    print_fields(out, settings=", ".join(f"{key}={value}" for key, value in values.items()))


Kind = Literal["methods", "spaces", "datasets", "recipes", "candidates"]
KINDS: tuple[Kind, ...] = ("methods", "spaces", "datasets", "recipes", "candidates")


@commands.command(
    "list", epilog=o.examples("softcell list", "softcell list methods", "softcell list candidates --plugin my_ops.py")
)
def list_(
    kind: Annotated[Kind | None, typer.Argument(help="What to list. Default: everything.")] = None,
    plugin: o.Plugin = None,
) -> None:
    """List the available methods, spaces, datasets, recipes and candidate operations."""
    o.load_plugins(plugin)
    screen = console()
    for each in KINDS if kind is None else (kind,):
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column()
        for name, about in _entries(each).items():
            table.add_row(f"  {name}", about)
        if kind is None:
            screen.print(each, style="bold underline")
        screen.print(table, soft_wrap=False)
        if kind is None and each != KINDS[-1]:
            screen.print()


def _entries(kind: Kind) -> dict[str, str]:
    """Names, with one line about each."""
    match kind:
        case "methods":
            return {name: METHODS.get(name).about for name in METHODS}
        case "spaces":
            return {name: SPACES.get(name).about for name in SPACES}
        case "datasets":
            return {**datasets(), "PATH": "a folder of CLASS/IMAGE files, or an .npz file of images and labels"}
        case "recipes":
            found = {
                "small": "search --scale small: sizes for a laptop, the default for digits",
                "paper": "search --scale paper: sizes of the papers, the default for all other data",
            }
            for name in METHODS:
                for scale in METHODS.get(name).recipes:
                    if scale not in SCALES:
                        recipe = resolve({"method": name, "scale": scale})
                        extent = f"{count_of(recipe.epochs, 'epoch')}, batch {recipe.batch_size}"
                        found[f"{name} {scale}"] = f"search {name} --scale {scale}: {extent}"
            for name, changes in RECIPES.items():
                epochs, batch = (changes.get(key, getattr(TrainRecipe, key)) for key in ("epochs", "batch_size"))
                if "batch_size" in changes.get("auto", ()):
                    batch = "size and learning rate depend on the data; use with --time"
                found[f"train {name}"] = f"train --recipe {name}: {count_of(epochs, 'epoch')}, batch {batch}"
            return found
        case "candidates":
            list(SPACES)  # spaces register their candidates when they are imported
            builders = {name: get_candidate(name).build for name in known_candidates()}
            return {name: (builder.__doc__ or "").strip().partition("\n")[0] for name, builder in builders.items()}
