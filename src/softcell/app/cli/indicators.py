"""`softcell indicators`"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from softcell.app.cli import options as o
from softcell.app.cli.places import check_absent

EPILOG = o.examples(
    "softcell indicators runs/itnas-nb201-digits-1",
    "softcell indicators runs/darts-nb201-cifar10-1 --by alpha --by attention --epochs 5",
    "softcell indicators runs/snas-darts-digits-1 --by perturbation --images 2000 --out indicators.json",
)


def indicators(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a search; its supernet is looked at.")],
    by: Annotated[
        list[str] | None,
        typer.Option(
            help="alpha, attention (IT-NAS), perturbation (DARTS-PT), discretisation; repeatable; else the first three."
        ),
    ] = None,
    images: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Validation images that candidates are measured on, at most."),
    ] = 512,
    epochs: Annotated[
        int, typer.Option(metavar="N", min=1, help="Epochs of what is trained on another method's frozen supernet.")
    ] = 1,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to write the JSON; else into the run.")
    ] = None,
    device: o.Device = None,
    data_root: o.DataRoot = None,
    overwrite: o.OverwriteFile = False,
    plugin: o.Plugin = None,
    trust: o.Trust = False,
    quiet: o.Quiet = False,
) -> None:
    """Compare what indicators say of the candidates of one trained supernet, edge by edge.

    alpha are the probabilities of the search's own method; attention is that of IT-NAS's indicator token, from one pass
    over the validation split; perturbation is the accuracy that the supernet loses without a candidate, discretisation
    the accuracy that it has once an edge keeps that candidate alone (IT-NAS, Figure 3; only if asked for). Attention on
    another method's supernet, and alpha on one of IT-NAS (only if asked for), are trained on it first, weights frozen.
    """
    from softcell.api import compare_indicators
    from softcell.app.cli.console import console, write
    from softcell.app.cli.progress import working
    from softcell.app.cli.results import facts
    from softcell.engine.files import list_file

    o.load_plugins(plugin)
    screen, target = console(), out or run / "indicators.json"
    check_absent(target, overwrite, "give another name with --out")
    if out is None:
        list_file(target)
    with working(screen, "looking at candidates", quiet):
        found = compare_indicators(run, by, images=images, epochs=epochs, device=device or "auto", data_root=data_root)
    names = list(found["values"])
    width = max(len(e["table"]) + len(e["edge"]) for e in found["edges"]) + 3
    screen.print(" " * width + "".join(f"{name:<20}" for name in names), style="bold")
    for edge in found["edges"]:
        place = f"{edge['table']} {edge['edge']}"
        screen.print(f"{place:<{width}}" + "".join(f"{_best(edge, name):<20}" for name in names), markup=False)
    for pair in found["edges"][0]["tau"]:
        known = [edge["tau"][pair] for edge in found["edges"] if edge["tau"][pair] is not None]
        mean = f"{sum(known) / len(known):.2f} (mean of {len(known)} edges)" if known else "not defined"
        facts(screen, **{"tau": f"{pair}: {mean}"})
    for label, text in _remarks(found):
        facts(screen, **{label: text})
    write(target, json.dumps(found, indent=2) + "\n", overwrite)
    facts(screen, written=str(target))


def _best(edge: Mapping[str, Any], name: str) -> str:
    """The best candidate of an edge, how many share that place, or that the indicator says nothing."""
    if name in edge["tied"]:
        return f"tie of {len(edge['tied'][name])}"
    return edge["best"][name] or "–"


def _remarks(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the table above rests on, as pairs of a name and a text."""
    from softcell.app.cli.console import percent

    rests: list[tuple[str, str]] = []
    baseline = found["baseline"]
    if baseline is not None:
        how = "with norms measured anew" if baseline["norms"] == "measured anew" else "by running statistics of norms"
        rests.append(("baseline", f"{percent(baseline['accuracy'])} of {baseline['images']} images, {how}"))
        if baseline["at_chance"]:
            rests.append(
                (
                    "note",
                    f"a supernet that guesses may reach {percent(baseline['guessing'])} of these images: this one has "
                    "nothing to lose, and perturbation says nothing; search longer, or look at more --images",
                )
            )
    if any(edge["tied"] for edge in found["edges"]):
        rests.append(("note", "a tie has several candidates of the same highest value; `tied` in the JSON names them"))
    return rests
