"""`softcell export`"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from softcell.app.cli import options as o

EPILOG = o.examples(
    "softcell export runs/train-darts-digits-1 --to onnx",
    "softcell export runs/train-darts-digits-1 --to python --to safetensors --out my-model",
    "softcell export runs/run-photos-1 --to torch-export",
)


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished training, or of `softcell run`.")],
    to: Annotated[
        list[str],
        typer.Option(
            help="onnx, safetensors (weights and a description), python (one file that needs only torch), or "
            "torch-export; may be repeated."
        ),
    ],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder to write to; else RUN/export.")] = None,
    overwrite: o.OverwriteFile = False,
    plugin: o.Plugin = None,
    trust: o.Trust = False,
    quiet: o.Quiet = False,
) -> None:
    """Write a trained network for use elsewhere; what is written is run and compared with the network."""
    from softcell.app.cli.console import console
    from softcell.app.cli.progress import working
    from softcell.app.cli.results import facts
    from softcell.app.export import format_named, ready

    o.load_plugins(plugin)
    screen = console()
    kinds = [format_named(kind) for kind in dict.fromkeys(to)]
    network = ready(run, kinds, out, overwrite=overwrite)  # so that an error stands alone, and nothing is half done
    for kind in kinds:
        with working(screen, f"{kind}: writing and comparing", quiet):
            done = network.write(kind)
        facts(screen, **{kind: ", ".join(str(file) for file in done.files)})
        if kind != "safetensors":
            facts(screen, checked=f"{done.output} as the network's, up to {done.difference:.1e} of the largest")
    if not quiet:
        facts(screen, use=_use(done.format, done.files[0]))


def _use(kind: str, file: Path) -> str:
    """How what was written is loaded, in one line."""
    match kind:
        case "onnx":
            return f'onnxruntime.InferenceSession("{file}").run(None, {{"pixels": images}})  # float32 in 0..1'
        case "torch-export":
            return f'torch.export.load("{file}").module()(images)  # float32 in 0..1'
        case "python":
            return f"python {shlex.quote(str(file))} image.jpg, or: from {file.stem} import load, normalise"
        case _:
            return f'softcell.api.Network.from_pretrained("{file.parent}")'
