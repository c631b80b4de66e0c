"""`softcell info`"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from softcell.app.cli import options as o
from softcell.errors import UserError

if TYPE_CHECKING:
    from softcell.arch import Genotype
    from softcell.spaces import Shape

EPILOG = o.examples(
    "softcell info runs/darts-darts-digits-1",
    "softcell info cell.json --cells 14 --channels 48 --input 3x224x224 --classes 1000 --set space.stem=imagenet",
    "softcell info nb201",
)


def info(
    what: Annotated[
        str, typer.Argument(metavar="GENOTYPE|RUN|SPACE", help="An architecture, a run folder or the name of a space.")
    ],
    cells: Annotated[int | None, typer.Option(metavar="N", help="Depth of the network; else as for CIFAR.")] = None,
    channels: Annotated[int | None, typer.Option(metavar="N", help="Width at the start; else as for CIFAR.")] = None,
    input_: Annotated[str | None, typer.Option("--input", metavar="CxHxW", help="Size of an image: 3x32x32.")] = None,
    classes: Annotated[int | None, typer.Option(metavar="N", min=1, help="Number of classes: 10.")] = None,
    set_: o.SetSpace = None,
    plugin: o.Plugin = None,
    trust: o.Trust = False,
) -> None:
    """Count parameters, multiply-adds and bytes of a network, or describe a space.

    A training is counted at its own size, a search as what would be trained, anything else as a CIFAR network unless
    told otherwise.
    """
    from softcell.app.cli.console import console
    from softcell.settings import assignments, merge
    from softcell.spaces import SPACES

    o.load_plugins(plugin)
    given = assignments(set_ or ())
    unknown = sorted(set(given) - {"space"})
    if unknown:
        raise UserError(f"--set takes settings of the space here, as space.nodes=3, but got {unknown[0]!r}")
    size = {key: value for key, value in (("cells", cells), ("channels", channels)) if value is not None}
    settings = merge(size, given.get("space", {}))
    if what in SPACES:
        describe_space(console(), what, settings, classes or 10)
    else:
        describe_network(console(), what, settings, None if input_ is None else shape(input_), classes)


def describe_network(
    out: Console, what: str, settings: dict[str, Any], image: Shape | None, classes: int | None
) -> None:
    from softcell.app.cli import inputs
    from softcell.app.cli.results import facts
    from softcell.evaluate import count_genotype
    from softcell.evaluate.recipe import fit_space
    from softcell.registry import refused
    from softcell.search.genotypes import named_epoch
    from softcell.settings import merge
    from softcell.spaces import SPACES, build_space

    folder, manifest, found = inputs.with_run(what, only_trusted=True)
    untrusted = [] if manifest is None else refused(manifest["recipe"].get("plugins", ()))
    if untrusted and manifest is not None and folder is not None:
        _describe_without(out, manifest, folder, found, untrusted)
        return
    own, own_image, own_classes = inputs.own_network(what, manifest)
    base = dict(SPACES.get(found.space).evaluation.get("cifar", {})) if own is None else own
    space = fit_space(found, build_space(found.space, merge(base, settings)), settings)
    image, classes = image or own_image or (3, 32, 32), classes or own_classes or 10
    cost = count_genotype(space, found, image, classes)
    _describe_genotype(out, found)
    retrieving = manifest is not None and manifest["recipe"].get("task") == "retrieve"
    outputs = f"embedding of {classes}" if retrieving else f"{classes} classes"
    sizes = ", ".join(f"{key} {getattr(space, key)}" for key in _sizes(space))
    facts(
        out,
        network=f"{sizes}, input {'x'.join(map(str, image))}, {outputs}, without auxiliary tower",
        parameters=f"{cost.parameters:,}",
        multiply_adds=f"{cost.multiply_adds:,}",
        size=f"{cost.megabytes:.2f} MB in float32",
    )
    if manifest is not None and folder is not None:
        describe_run(out, manifest, folder, found.about.get("epochs") if named_epoch(what) is not None else None)


def _describe_genotype(out: Console, found: Genotype) -> None:
    from softcell.app.cli.results import facts

    facts(out, space=found.space)
    if found.about:
        facts(out, found_by=", ".join(f"{key} {_plain(value)}" for key, value in found.about.items()))


def _describe_without(
    out: Console, manifest: dict[str, Any], folder: Path, found: Genotype, untrusted: list[str]
) -> None:
    """What the files of a run say themselves, where its plugins are not trusted and so are not run."""
    from softcell.app.cli.results import facts

    _describe_genotype(out, found)
    results = manifest["results"]
    for key in ("parameters", "multiply_adds"):
        if isinstance(results.get(key), int):
            facts(out, **{key: f"{results[key]:,} (as the run says)"})
    describe_run(out, manifest, folder, None)
    facts(
        out,
        not_counted=f"the run names {', '.join(map(str, untrusted))}, which is not here or not trusted and was not "
        "run; read it, then repeat with --trust, or name your copy with --plugin",
    )


def _plain(value: object) -> str:
    """As text; settings as on the command line."""
    return " ".join(f"{key}={one}" for key, one in value.items()) if isinstance(value, dict) else str(value)


def describe_run(out: Console, manifest: dict[str, Any], folder: Path, epoch: int | None) -> None:
    """What a run gave; of a search that was asked for one of its epochs, counted from 1, what it had then."""
    from softcell.app.cli.console import percent
    from softcell.app.cli.results import facts, searched_accuracy, top5_of
    from softcell.app.report.runs import read_lines

    recipe, results = manifest["recipe"], manifest["results"]
    facts(
        out, run=f"{manifest['kind']} in {folder}, {manifest['status']}, data {recipe['data']}, seed {manifest['seed']}"
    )
    if results.get("accuracy") is not None:
        facts(
            out,
            accuracy=f"{percent(results['accuracy'])}{top5_of(results.get('top5'))} on the {results['split']} split "
            f"({results['count']:,} images)",
        )
    elif results.get("recall_at_1") is not None:
        shares = ", ".join(f"@{k} {percent(results[f'recall_at_{k}'])}" for k in (1, 2, 4, 8))
        facts(out, recall=f"{shares} among images of {results['split']} ({results['count']:,} images)")
    elif manifest["kind"] == "search":
        facts(out, **searched_accuracy(read_lines(folder, "metrics.jsonl", [])[:epoch]))


def describe_space(out: Console, name: str, settings: dict[str, Any], classes: int) -> None:
    from softcell.app.cli.results import facts
    from softcell.arch import count
    from softcell.settings import to_dict
    from softcell.spaces import build_space

    space = build_space(name, settings)
    layout = space.layout()
    number = count(layout)
    facts(out, space=f"{name}: {space.about}" if space.about else name)
    facts(out, architectures=f"{number:,}" if number < 10**7 else f"{number:,} (about {number:.1e})")
    for remark in space.remarks(classes):
        facts(out, remark=remark)
    for table in layout.tables:
        sites = len(layout.sites_of(table.name))
        facts(out, table=f"{table.name}: {len(table)} choices, up to {table.width} candidates, read at {sites} sites")
    candidates = dict.fromkeys(op for table in layout.tables for choice in table.choices for op in choice.candidates)
    facts(out, candidates=", ".join(candidates))
    values = {key: value for key, value in to_dict(space).items() if key != "candidates"}
    facts(out, settings=", ".join(f"{key}={value}" for key, value in values.items()))


def shape(text: str) -> Shape:
    """`3x32x32` as channels, height and width."""
    found = re.fullmatch(r"([1-9]\d*)[x×]([1-9]\d*)[x×]([1-9]\d*)", text)
    if found is None:
        raise UserError(f"--input must be CHANNELSxHEIGHTxWIDTH, as 3x32x32, got {text!r}")
    return int(found[1]), int(found[2]), int(found[3])


def _sizes(space: Any) -> list[str]:
    """The whole numbers among a space's settings: what makes a network deeper or wider."""
    import dataclasses

    return [f.name for f in dataclasses.fields(space) if type(getattr(space, f.name)) is int]
