"""`softcell derive`, `indicators` and `gradcam`: inspect the supernet of a search."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from softcell.api import compare_indicators
from softcell.app.cli import options as o
from softcell.app.cli.output import check_absent, check_output_path, command, console, output_path, print_fields, write
from softcell.app.progress import counting, working
from softcell.app.report.charts import front_svg
from softcell.app.report.heatmaps import cam_grid
from softcell.arch import Table
from softcell.data.images import centre_view, decode
from softcell.errors import UserError
from softcell.evaluate.predictions import candidate_cams
from softcell.files import atomic_write_bytes, atomic_write_text, list_file
from softcell.search.budget import format_cost
from softcell.search.genotypes import run_in
from softcell.search.resource import quantity
from softcell.search.selection import OPTIONS, FrontPoint, Kind, derive_front
from softcell.search.supernet import Restored, restore
from softcell.text import count_of, percent

SHOWN = 3  # images of the validation split, unless others are named
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
    (BatchNorm recalibrated): they compare architectures roughly, and say little about the accuracy after training.
    """
    if (max_params is None) == (max_flops is None):
        raise UserError("pass either --max-params or --max-flops, with one or more budgets, such as 50k,200k,1M")
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


@commands.command(
    "indicators",
    epilog=o.examples(
        "softcell indicators runs/itnas-nb201-digits-1",
        "softcell indicators runs/darts-nb201-cifar10-1 --by alpha --by attention --epochs 5",
        "softcell indicators runs/snas-darts-digits-1 --by perturbation --images 2000 --out indicators.json",
    ),
)
def indicators(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a search, whose supernet is examined.")],
    by: Annotated[
        list[str] | None,
        typer.Option(
            help="alpha, attention (IT-NAS), perturbation (DARTS-PT) or discretisation; repeatable. Default: the first "
            "three."
        ),
    ] = None,
    images: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Largest number of validation images to measure candidates on."),
    ] = 512,
    epochs: Annotated[
        int, typer.Option(metavar="N", min=1, help="Epochs for indicators trained on another method's frozen supernet.")
    ] = 1,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON file to write. Default: indicators.json in the run.")
    ] = None,
    device: o.Device = None,
    data_root: o.DataRoot = None,
    overwrite: o.OverwriteFile = False,
    plugin: o.Plugin = None,
    trust: o.Trust = False,
    quiet: o.Quiet = False,
) -> None:
    """Compare how indicators rate the candidates of a trained supernet, edge by edge.

    alpha: the probabilities of the search's own method. attention: the attention of IT-NAS's indicator token, from one
    pass over the validation split. perturbation: the accuracy that the supernet loses without a candidate
    (perturbation_loss: how much its loss rises). discretisation: the accuracy that it has when an edge keeps only that
    candidate (IT-NAS, Figure 3; only on request). Attention on another method's supernet, and alpha on one of IT-NAS
    (only on request), are trained on it first with its weights frozen.
    """
    o.load_plugins(plugin)
    screen, target = console(), out or run / "indicators.json"
    check_absent(target, overwrite, "choose another name with --out")
    if out is None:
        # Only listed files of a run folder are deleted when the run is replaced with --overwrite.
        list_file(target)
    with working(screen, "measuring candidates", quiet):
        found = compare_indicators(run, by, images=images, epochs=epochs, device=device or "auto", data_root=data_root)
    names = list(found["values"])
    width = max(len(e["table"]) + len(e["edge"]) for e in found["edges"]) + 3
    screen.print(" " * width + "".join(f"{name:<20}" for name in names), style="bold")
    for edge in found["edges"]:
        place = f"{edge['table']} {edge['edge']}"
        screen.print(f"{place:<{width}}" + "".join(f"{_best(edge, name):<20}" for name in names), markup=False)
    for pair in found["edges"][0]["tau"]:
        known = [edge["tau"][pair] for edge in found["edges"] if edge["tau"][pair] is not None]
        mean = f"{sum(known) / len(known):.2f} (mean of {count_of(len(known), 'edge')})" if known else "not defined"
        print_fields(screen, kendalls_tau=f"{pair}: {mean}")
    for label, text in _remarks(found):
        print_fields(screen, **{label: text})
    write(target, json.dumps(found, indent=2) + "\n", overwrite)
    print_fields(screen, written=str(target))


def _best(edge: Mapping[str, Any], name: str) -> str:
    """The best candidate of an edge, or how many candidates are tied for it; a dash if the indicator has no value."""
    if name in edge["tied"]:
        return f"tie of {len(edge['tied'][name])}"
    return edge["best"][name] or "–"


def _remarks(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the table is based on, as pairs of a name and a text."""
    remarks: list[tuple[str, str]] = []
    baseline = found["baseline"]
    if baseline is not None:
        recalibrated = baseline["norms"] != "running statistics"
        how = "BatchNorm recalibrated" if recalibrated else "with the running statistics of BatchNorm"
        images = count_of(baseline["images"], "image")
        remarks.append(("baseline", f"{percent(baseline['accuracy'])} of {images}, {how}"))
        if baseline["at_chance"]:
            remarks.append(
                (
                    "note",
                    f"guessing may reach {percent(baseline['guessing'])} on these images, so this supernet has no "
                    "accuracy to lose and perturbation is meaningless; search longer, or use more --images",
                )
            )
    if any(edge["tied"] for edge in found["edges"]):
        remarks.append(("note", "in a tie several candidates share the highest value; `tied` in the JSON lists them"))
    return remarks


@commands.command(
    "gradcam",
    epilog=o.examples(
        "softcell gradcam runs/itnas-darts-digits-1",
        "softcell gradcam runs/itnas-nb201-cifar10-1 --cell 14 --edge '0->3' --image 3 --image 7 --out cams.png",
        "softcell gradcam runs/itnas-nb201-cifar10-1 --picture cat.jpg --class cat",
    ),
)
def gradcam(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a search.")],
    cell: Annotated[int | None, typer.Option(metavar="N", help="Number of the cell. Default: the last.")] = None,
    edge: Annotated[
        str | None, typer.Option(metavar="A->B", help="Edge (or layer of a chain). Default: the last of the cell.")
    ] = None,
    image: Annotated[
        list[int] | None, typer.Option(metavar="N", min=0, help="An image of the validation split; repeatable.")
    ] = None,
    picture: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="An image file; repeatable.")] = None,
    class_: Annotated[
        str | None,
        typer.Option("--class", help="Class to explain. Default: the label of --image, the prediction for --picture."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PNG file to write. Default: in the run folder.")
    ] = None,
    device: o.Device = None,
    data_root: o.DataRoot = None,
    overwrite: o.OverwriteFile = False,
    plugin: o.Plugin = None,
    trust: o.Trust = False,
) -> None:
    """Draw Grad-CAM heat maps of every candidate of one edge or layer."""
    if out is not None and out.suffix.lower() != ".png":
        raise UserError(f"the picture is a PNG, so --out must end in .png, but got {out}")
    for path in picture or ():
        if not path.is_file():
            reason = f"{path} is a folder" if path.is_dir() else f"there is no file {path}"
            raise UserError(f"--picture must be an image file, but {reason}")
    o.load_plugins(plugin)
    found = restore(run, device=device or "auto", data_root=data_root)
    layout = found.supernet.layout
    site = len(layout.sites) - 1 if cell is None else cell
    if not 0 <= site < len(layout.sites):
        raise UserError(f"--cell must be 0 to {len(layout.sites) - 1}, got {site}")
    table = layout.table(layout.sites[site])
    choice = _edge(table, edge)
    target = out or run / f"gradcam-{site}-{str(table.choices[choice]).replace('->', '-')}.png"
    created = check_output_path(target, overwrite)
    pixels, titles, labels = _pictures(found, image, picture)
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (found.dataset.mean, found.dataset.std))
    dtype = next(found.supernet.parameters()).dtype
    inputs = ((pixels / 255 - mean) / std).to(found.device, dtype)
    # Methods that train single paths must run all candidates of this edge.
    mix = found.mix((table.name, choice))
    with torch.no_grad():
        predicted = found.supernet(inputs, mix).argmax(1).cpu()
    # A picture has the label -1: its prediction is explained.
    explained = torch.where(labels >= 0, labels, predicted)
    if class_ is not None:
        classes = found.dataset.classes
        if class_ not in classes:
            raise UserError(f"--class must be one of {', '.join(classes[:20])}, got {class_!r}")
        explained = torch.full_like(explained, classes.index(class_))
    names = [found.dataset.classes[i] for i in explained.tolist()]
    heats = candidate_cams(found.supernet, mix, site, choice, inputs, explained.to(found.device))
    if not heats:
        raise UserError(f"no candidate of {table.choices[choice]} in cell {site} produces a feature map")
    row = found.method.probabilities()[table.name][choice].detach().cpu()
    ops = table.choices[choice].candidates
    best = ops[max(heats, key=lambda k: (float(row[k]), -k))]
    where = f"cell {site} ({table.name}), edge {table.choices[choice]}"
    drawn = cam_grid(
        pixels,
        {ops[k]: heat.float().cpu() for k, heat in heats.items()},
        [f"{title}: {name}" for title, name in zip(titles, names, strict=True)],
        best,
        f"{found.recipe.method} in {found.recipe.space}, {where}; * selected",
    )
    buffer = io.BytesIO()
    drawn.save(buffer, "PNG")
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_bytes(target, buffer.getvalue())
    screen = console()
    print_fields(screen, weights=f"{where}, by method {found.recipe.method}")
    for k in heats:
        mark = "  * selected" if ops[k] == best else ""
        screen.print(f"{ops[k]:<22}{float(row[k]):.4f}{mark}", markup=False)
    print_fields(screen, picture=output_path(target, created))


def _edge(table: Table, name: str | None) -> int:
    known = [str(choice) for choice in table.choices]
    if name is None:
        return len(known) - 1
    if name.replace(" ", "") not in known:
        raise UserError(f"--edge must be one of {', '.join(known)}, got {name!r}")
    return known.index(name.replace(" ", ""))


def _pictures(found: Restored, image: list[int] | None, picture: list[Path] | None) -> tuple[Tensor, list[str], Tensor]:
    """Pixels uint8 [n, c, h, w], a title for each image, and labels int64 [n]; -1 where unknown."""
    part, (channels, height, width) = found.parts[found.recipe.measured_split], found.dataset.shape
    numbers = image if image is not None else ([] if picture else list(range(min(SHOWN, len(part)))))
    for number in numbers:
        if number >= len(part):
            raise UserError(f"--image must be below {len(part)}, the images of the validation split, got {number}")
    chosen = part[torch.tensor(numbers, dtype=torch.int64)].cpu()
    pixels, labels = [found.dataset.train.fetch(chosen).cpu()] if numbers else [], found.dataset.train.labels.cpu()
    titles, known = [f"image {n}" for n in numbers], labels[chosen].tolist() if numbers else []
    for path in picture or ():
        read = decode(path, channels, found.dataset.scaled_to or (height, width), whole=found.dataset.whole)
        pixels.append(centre_view(torch.from_numpy(read.copy())[None], found.dataset.shape))
        titles.append(path.name)
        known.append(-1)
    return torch.cat(pixels), titles, torch.tensor(known)
