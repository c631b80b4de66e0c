"""`softcell info`, `list` and `study`: what a network costs, what is available, and NOS's Table 1."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from softcell.app.cli import inputs
from softcell.app.cli import options as o
from softcell.app.cli.console import console, percent, print_fields
from softcell.app.cli.results import against_budget, search_accuracy, time_of, top5_of
from softcell.app.report.runs import read_lines
from softcell.arch import Genotype, count
from softcell.data import datasets
from softcell.evaluate import RECIPES, TrainRecipe, count_genotype
from softcell.evaluate.teacher import count_classifier
from softcell.methods import METHODS
from softcell.nn.candidates import get_candidate, known_candidates
from softcell.registry import refused
from softcell.search import resolve
from softcell.search.budget import ABOUT, format_cost, stated_budget
from softcell.search.genotypes import named_epoch
from softcell.search.recipe import SCALES
from softcell.settings import merge, to_dict
from softcell.spaces import SPACES, Shape, Space, build_space
from softcell.spaces.base import fit_space
from softcell.text import count_of

commands = typer.Typer()


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
    cells: Annotated[int | None, typer.Option(metavar="N", help="Depth of the network. Default: as for CIFAR.")] = None,
    channels: Annotated[int | None, typer.Option(metavar="N", help="Initial width. Default: as for CIFAR.")] = None,
    input_: Annotated[
        str | None, typer.Option("--input", metavar="CxHxW", help="Size of an image. Default: 3x32x32.")
    ] = None,
    classes: Annotated[int | None, typer.Option(metavar="N", min=1, help="Number of classes. Default: 10.")] = None,
    set_: o.SetSpace = None,
    plugin: o.Plugin = None,
    trust: o.Trust = False,
) -> None:
    """Count the parameters, multiply-adds and size of a network, or describe a space.

    A training is counted at its own size, a search at the size that `softcell train` would use, and anything else as a
    CIFAR network unless options say otherwise.
    """
    o.load_plugins(plugin)
    size = {key: value for key, value in (("cells", cells), ("channels", channels)) if value is not None}
    settings = merge(size, o.space_settings(set_))
    if what in SPACES:
        _describe_space(console(), what, settings, classes or 10)
    else:
        _describe_network(console(), what, settings, None if input_ is None else inputs.shape(input_), classes)


def _describe_network(
    out: Console, what: str, settings: dict[str, Any], image: Shape | None, classes: int | None
) -> None:
    folder, manifest, found = inputs.with_run(what, only_trusted=True)
    untrusted = [] if manifest is None else refused(manifest["recipe"].get("plugins", ()))
    if untrusted and manifest is not None and folder is not None:
        _describe_untrusted(out, manifest, folder, found, untrusted)
        return
    own, own_image, own_classes = inputs.own_network(what, manifest)
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
    if about:
        print_fields(out, found_by=", ".join(f"{key} {_plain(value)}" for key, value in about.items()))
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
    return ", ".join(f"{name} {value}" for name in names if type(value := getattr(space, name)) is int)


def _plain(value: object) -> str:
    """As text; settings as on the command line."""
    return " ".join(f"{key}={one}" for key, one in value.items()) if isinstance(value, dict) else str(value)


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
        print_fields(out, table=f"{table.name}: {choices}, up to {table.width} candidates, read at {sites}")
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
                    batch = "and rate by the data; made for --time"
                found[f"train {name}"] = f"train --recipe {name}: {count_of(epochs, 'epoch')}, batch {batch}"
            return found
        case "candidates":
            list(SPACES)  # spaces register their candidates when they are imported
            builders = {name: get_candidate(name).build for name in known_candidates()}
            return {name: (builder.__doc__ or "").strip().partition("\n")[0] for name, builder in builders.items()}


class _Row(NamedTuple):
    """A row of NOS's Table 1: multiply-adds and parameters in millions (increments), errors on CIFAR-10, CIFAR-100."""

    operation: str | None
    multiply_adds: float
    parameters: float
    errors: tuple[float, float]


WIDTH, CLASSES = 64, 10
"""Of the networks that Table 1 counts."""
PAPER = (
    _Row(None, 555.42, 11.17, (4.95, 23.61)),
    _Row("dynamic_conv_3x3", 3.85, 0.03, (4.63, 22.63)),
    _Row("dynamic_conv_5x5", 7.62, 0.04, (4.78, 23.45)),
    _Row("dil_dynamic_conv_3x3", 3.85, 0.03, (4.97, 24.00)),
    _Row("dil_dynamic_conv_5x5", 7.62, 0.04, (4.92, 23.75)),
    _Row("spatial_attention", 1.08, 0.01, (4.79, 23.51)),
    _Row("channel_attention", 0.40, 0.15, (4.83, 23.20)),
)


@commands.command(
    "study",
    epilog=o.examples(
        "softcell study",
        "softcell study --classes 100",
        "softcell teacher resnet18 --set classifier.operation=spatial_attention --data cifar10   # trains one row",
    ),
)
def study(
    classes: Annotated[int, typer.Option(metavar="N", min=1, help="Number of classes.")] = CLASSES,
    width: Annotated[int, typer.Option(metavar="N", min=1, help="Channels of the first stage.")] = WIDTH,
) -> None:
    """NOS's preliminary study: what each self-calibration operation adds to a ResNet-18 (Table 1).

    One operation follows each of the stages 1 to 3. The command counts parameters, and multiply-adds of convolutions
    and matrix products for one 32x32 image. The paper's counts (64 channels, 10 classes) and errors are printed beside
    them if the network is the same; the paper does not say how it counted. `softcell teacher resnet18 --set
    classifier.operation=...` trains a row.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("\nnetwork", no_wrap=True)
    is_papers = (width, classes) == (WIDTH, CLASSES)
    columns = slice(None) if is_papers else slice(0, 3, 2)  # all columns, or our own
    for title in ("ours\nmult-adds", "paper\nmult-adds", "ours\nparams", "paper\nparams", "paper\nerrors*")[columns]:
        table.add_column(title, justify="right", no_wrap=True)
    shape = (3, 32, 32)
    base = count_classifier("resnet18", {"width": width}, shape, classes)
    for row in PAPER:
        cost = count_classifier("resnet18", {"width": width, "operation": row.operation}, shape, classes)
        sign = "" if row.operation is None else "+"
        adds, parameters = cost.multiply_adds, cost.parameters
        if row.operation is not None:
            adds, parameters = adds - base.multiply_adds, parameters - base.parameters
        numbers = (
            f"{sign}{adds / 1e6:.3f}M",
            f"{sign}{row.multiply_adds:.2f}M",
            f"{sign}{parameters / 1e6:.4f}M",
            f"{sign}{row.parameters:.2f}M",
            f"{row.errors[0]:.2f}/{row.errors[1]:.2f}",
        )
        table.add_row("resnet18" if row.operation is None else f"+ {row.operation}", *numbers[columns])
    screen = console()
    screen.print(table)
    note = "* in percent, on CIFAR-10 and CIFAR-100; our own errors: not measured"
    if not is_papers:
        note = f"The paper counts networks of width {WIDTH} with {CLASSES} classes; run `softcell study` to compare."
    screen.print(note, style="dim")
