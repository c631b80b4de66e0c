"""`softcell teacher`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from softcell.app.cli import options as o
from softcell.errors import UserError

EPILOG = o.examples(
    "softcell teacher pyramidnet --data cifar10 --data-root ~/data --out teachers/pyramidnet",
    "softcell search nos --data cifar10 --data-root ~/data --guide teachers/pyramidnet",
    "softcell teacher resnet18 --set classifier.width=16 --epochs 5",
    "softcell teacher resnet18 --set classifier.operation=dynamic_conv_3x3 --data cifar10",
    "softcell teacher --resume teachers/pyramidnet",
)


def teacher(
    name: Annotated[
        str | None, typer.Argument(help="pyramidnet (NOS's) or resnet18; with --resume, the run folder will do.")
    ] = None,
    data: o.Data = None,
    data_root: o.DataRoot = None,
    image_size: o.ImageSize = None,
    recipe: Annotated[str | None, typer.Option(help="paper or small; small for digits, else paper.")] = None,
    epochs: o.Epochs = None,
    batch_size: o.BatchSize = None,
    seed: o.Seed = None,
    device: o.Device = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run folder; else runs/teacher-NAME-DATA-N with the next free N.")
    ] = None,
    set_: o.SetTraining = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out; its recipe is kept.")] = False,
    overwrite: o.Overwrite = False,
    deterministic: o.Deterministic = False,
    threads: o.Threads = None,
    precision: o.Precision = None,
    engine: o.Engine = None,
    plugin: o.Plugin = None,
    trust: o.Trust = False,
    quiet: o.Quiet = False,
) -> int:
    """Train a network of fixed architecture, to guide searches with (`softcell search --guide DIR`)."""
    from softcell import api
    from softcell.app.cli import results
    from softcell.app.cli.console import command, console, percent
    from softcell.app.cli.progress import Display
    from softcell.app.cli.search import resumed_folder
    from softcell.evaluate.teacher import resolve_teacher, stored_teacher, train_teacher

    if resume:
        out, name = resumed_folder("teacher", name, out)
    given = o.settings(
        set_,
        plugin,
        data=data,
        data_root=data_root,
        image_size=image_size,
        recipe=recipe,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        device=device,
        deterministic=deterministic,
        threads=threads,
        precision=precision,
        engine=engine,
    )
    going_on = out is not None and resume
    full = stored_teacher(str(out), given) if going_on else resolve_teacher(name or "pyramidnet", given)
    if name not in (None, full.classifier):
        raise UserError(f"a resumed run keeps its network, {full.classifier}, but got {name}; leave the name away")
    screen = console()
    with api.joined(full.device, full.deterministic) as world:
        folder = api.agreed_folder(out, world, "teacher", full.classifier, full.data)
        results.already(screen, folder, resume)
        heading = f"teacher {full.classifier}, recipe {full.recipe}, data {full.data}, seed {full.seed}: {folder}"
        with Display(screen, heading, quiet) as display:
            result = train_teacher(full, folder, resume=resume, overwrite=overwrite, on_event=display)
    if result.exit_code:
        results.interrupted(screen, "teacher", "--resume", str(folder))
        return result.exit_code
    accuracy = "not measured: the data has no test split"
    if result.accuracy is not None:
        accuracy = f"{percent(result.accuracy)}{results.top5_of(result.top5)} on the {result.split} split"
    results.facts(
        screen,
        accuracy=accuracy,
        parameters=f"{result.cost.parameters:,}",
        multiply_adds=f"{result.cost.multiply_adds:,}",
    )
    if not quiet:
        root = () if full.data_root is None else ("--data-root", full.data_root)
        results.facts(screen, next=command("search", "nos", "--data", full.data, *root, "--guide", folder))
    return 0
