"""`softcell export`"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from softcell.app.cli import options as o
from softcell.app.cli.console import console, print_fields
from softcell.app.export import format_named, ready
from softcell.app.progress import working

commands = typer.Typer()


@commands.command(
    "export",
    epilog=o.examples(
        "softcell export runs/train-darts-digits-1 --to onnx",
        "softcell export runs/train-darts-digits-1 --to python --to safetensors --out my-model",
        "softcell export runs/run-photos-1 --to torch-export",
    ),
)
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished training, or of `softcell run`.")],
    to: Annotated[
        list[str],
        typer.Option(
            help="onnx, safetensors (weights and a description), python (one file that needs only torch), or "
            "torch-export; repeatable."
        ),
    ],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder to write to. Default: RUN/export.")] = None,
    overwrite: o.OverwriteFile = False,
    plugin: o.Plugin = None,
    trust: o.Trust = False,
    quiet: o.Quiet = False,
) -> None:
    """Export a trained network and check the result against the original."""
    o.load_plugins(plugin)
    screen = console()
    kinds = [format_named(kind) for kind in dict.fromkeys(to)]
    network = ready(run, kinds, out, overwrite=overwrite)  # raises before anything is printed or written
    for kind in kinds:
        with working(screen, f"{kind}: writing and checking", quiet):
            done = network.write(kind)
        print_fields(screen, **{kind: ", ".join(str(file) for file in done.files)})
        if kind != "safetensors":
            difference = f"{done.difference:.1e} of the largest value"
            print_fields(screen, checked=f"{done.output} equal to the network's within {difference}")
    if not quiet:
        print_fields(screen, use=_use(done.format, done.files[0]))


def _use(kind: str, file: Path) -> str:
    """How to load what was written, in one line."""
    match kind:
        case "onnx":
            return f'onnxruntime.InferenceSession("{file}").run(None, {{"pixels": images}})  # float32 in 0..1'
        case "torch-export":
            return f'torch.export.load("{file}").module()(images)  # float32 in 0..1'
        case "python":
            return f"python {shlex.quote(str(file))} image.jpg, or: from {file.stem} import load, normalise"
        case _:
            return f'softcell.api.Network.from_pretrained("{file.parent}")'
