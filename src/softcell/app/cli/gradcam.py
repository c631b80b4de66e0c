"""`softcell gradcam`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from softcell.app.cli import options as o
from softcell.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from softcell.arch import Table
    from softcell.search.restored import Restored

EPILOG = o.examples(
    "softcell gradcam runs/itnas-darts-digits-1",
    "softcell gradcam runs/itnas-nb201-cifar10-1 --cell 14 --edge '0->3' --image 3 --image 7 --out cams.png",
    "softcell gradcam runs/itnas-nb201-cifar10-1 --picture cat.jpg --class cat",
)
SHOWN = 3


def gradcam(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a search.")],
    cell: Annotated[int | None, typer.Option(metavar="N", help="Which cell; else the last.")] = None,
    edge: Annotated[
        str | None, typer.Option(metavar="A->B", help="Which edge (or layer of a chain); else the last of the cell.")
    ] = None,
    image: Annotated[
        list[int] | None, typer.Option(metavar="N", min=0, help="An image of the validation split; may be repeated.")
    ] = None,
    picture: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="A picture; may be repeated.")] = None,
    class_: Annotated[
        str | None,
        typer.Option("--class", help="The class to explain; else an image's own, a picture's predicted one."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write the PNG; else into the run.")] = None,
    device: o.Device = None,
    data_root: o.DataRoot = None,
    overwrite: o.OverwriteFile = False,
    plugin: o.Plugin = None,
    trust: o.Trust = False,
) -> None:
    """Show where each candidate of a layer looks in a picture: Grad-CAM of every candidate's feature map."""
    import io

    import torch

    from softcell.app.cli.console import console
    from softcell.app.cli.places import free_place, placed
    from softcell.app.cli.results import facts
    from softcell.app.report.images import cam_grid
    from softcell.engine.files import atomic_write_bytes
    from softcell.evaluate.gradcam import candidate_cams
    from softcell.search.restored import restore

    if out is not None and out.suffix.lower() != ".png":
        raise UserError(f"the picture is a PNG, so that --out must end in .png, but got {out}")
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
    made = free_place(target, overwrite)
    pixels, titles, labels = _pictures(found, image, picture)
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (found.dataset.mean, found.dataset.std))
    dtype = next(found.supernet.parameters()).dtype
    inputs = ((pixels / 255 - mean) / std).to(found.device, dtype)
    mix = found.mix((table.name, choice))
    with torch.no_grad():
        said = found.supernet(inputs, mix).argmax(1).cpu()
    wanted = torch.where(labels >= 0, labels, said)
    if class_ is not None:
        wanted = torch.full_like(wanted, _class(found.dataset.classes, class_))
    names = [found.dataset.classes[i] for i in wanted.tolist()]
    heats = candidate_cams(found.supernet, mix, site, choice, inputs, wanted.to(found.device))
    if not heats:
        raise UserError(f"no candidate of {table.choices[choice]} in cell {site} makes a map")
    row = found.method.probabilities()[table.name][choice].detach().cpu()
    ops = table.choices[choice].candidates
    best = ops[max(heats, key=lambda k: (float(row[k]), -k))]
    drawn = cam_grid(
        pixels,
        {ops[k]: heat.float().cpu() for k, heat in heats.items()},
        [f"{title}: {name}" for title, name in zip(titles, names, strict=True)],
        best,
        f"{found.recipe.method} in {found.recipe.space}, cell {site} ({table.name}), edge {table.choices[choice]}; "
        "* selected",
    )
    buffer = io.BytesIO()
    drawn.save(buffer, "PNG")
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_bytes(target, buffer.getvalue())
    screen = console()
    for k in heats:
        mark = "  * selected" if ops[k] == best else ""
        screen.print(f"{ops[k]:<22}{float(row[k]):.4f}{mark}", markup=False)
    facts(screen, picture=placed(target, made))


def _edge(table: Table, wanted: str | None) -> int:
    known = [str(choice) for choice in table.choices]
    if wanted is None:
        return len(known) - 1
    if wanted.replace(" ", "") not in known:
        raise UserError(f"--edge must be one of {', '.join(known)}, got {wanted!r}")
    return known.index(wanted.replace(" ", ""))


def _class(classes: tuple[str, ...], wanted: str) -> int:
    if wanted in classes:
        return classes.index(wanted)
    raise UserError(f"--class must be one of {', '.join(classes[:20])}, got {wanted!r}")


def _pictures(found: Restored, image: list[int] | None, picture: list[Path] | None) -> tuple[Tensor, list[str], Tensor]:
    """Pixels uint8 [n, c, h, w], a title each, and labels int64 [n]; -1 where nobody knows."""
    import torch

    from softcell.data.decode import decode
    from softcell.data.images import centre_view

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
