"""`softcell derive`"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from softcell.app.cli import options as o
from softcell.app.cli.console import check_absent, command, console, percent, print_fields
from softcell.app.progress import counting
from softcell.app.report.charts import front_svg
from softcell.errors import UserError
from softcell.files import atomic_write_text
from softcell.search.budget import format_cost
from softcell.search.genotypes import run_in
from softcell.search.resource import quantity
from softcell.search.restored import restore
from softcell.search.selection import OPTIONS, FrontPoint, Kind, derive_front

commands = typer.Typer()


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
