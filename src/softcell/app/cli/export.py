"""`softcell export`"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from softcell.app.cli import options as o
from softcell.app.cli.console import console, percent, print_fields
from softcell.app.export import Quantised, format_named, ready
from softcell.app.export.quantise import CALIBRATION
from softcell.app.progress import working
from softcell.errors import UserError
from softcell.text import count_of

NOTED = 0.02
"""Loss of accuracy by int8 that is worth a note."""
commands = typer.Typer()


@commands.command(
    "export",
    epilog=o.examples(
        "softcell export runs/train-darts-digits-1 --to onnx",
        "softcell export runs/train-darts-digits-1 --to python --to safetensors --out my-model",
        "softcell export runs/run-photos-1 --to torch-export",
        "softcell export runs/run-photos-1 --to onnx --to onnx-int8 --calibration 500 --out device",
    ),
)
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished training, or of `softcell run`.")],
    to: Annotated[
        list[str],
        typer.Option(
            help="onnx, onnx-int8 (quantised, with its accuracy beside float), safetensors (weights and a "
            "description), python (one file that needs only torch), or torch-export; repeatable."
        ),
    ],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder to write to. Default: RUN/export.")] = None,
    calibration: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Training images that give onnx-int8 its ranges. Default: 256."),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Where the training images are now, for onnx-int8. Default: the run's data.")
    ] = None,
    data_root: o.DataRoot = None,
    overwrite: o.OverwriteFile = False,
    plugin: o.Plugin = None,
    trust: o.Trust = False,
    quiet: o.Quiet = False,
) -> None:
    """Export a trained network and check the result against the original."""
    o.load_plugins(plugin)
    screen = console()
    kinds = [format_named(kind) for kind in dict.fromkeys(to)]
    for option, value in (("--calibration", calibration), ("--data", data), ("--data-root", data_root)):
        if value is not None and "onnx-int8" not in kinds:
            raise UserError(f"{option} applies to --to onnx-int8, which reads training images; leave it out")
    network = ready(  # raises before anything is printed or written
        run, kinds, out, overwrite=overwrite, data=data, data_root=data_root, calibration=calibration or CALIBRATION
    )
    for kind in kinds:
        with working(screen, f"{kind}: writing and checking", quiet):
            done = network.write(kind)
        print_fields(screen, **{kind: ", ".join(str(file) for file in done.files)})
        if done.quantised is not None:
            print_fields(screen, **_compared(done.quantised))
        elif kind != "safetensors":
            difference = f"{done.difference:.1e} of the largest value"
            print_fields(screen, checked=f"{done.output} equal to the network's within {difference}")
    if not quiet:
        print_fields(screen, use=_use(done.format, done.files[0]))


def _compared(found: Quantised) -> dict[str, str]:
    """What int8 costs and gains, beside float."""
    sizes, times = ([*pair] for pair in (found.bytes, found.milliseconds))
    fields = {"accuracy": "not measured: the training held out no images, and the data has no test split"}
    if found.accuracy is not None and found.agreement is not None:
        before, after = found.accuracy
        images = {
            "holdout": f"{count_of(found.images, 'training image')} that the training held out",
            "test": f"{count_of(found.images, 'test image')}, since the training held out none",
        }
        fields["accuracy"] = (
            f"{percent(after)} in int8, {percent(before)} in float, on {images[found.split]}; the same class for "
            f"{percent(found.agreement)}"
        )
        if before - after > NOTED:
            fields["note"] = "int8 loses much here; calibrate with more images (--calibration), or use --to onnx"
    fields["size"] = f"{sizes[1] / 1e3:,.0f} kB in int8, {sizes[0] / 1e3:,.0f} kB in float"
    fields["latency"] = (
        f"{times[1]:.3g} ms in int8, {times[0]:.3g} ms in float, for one image on one CPU thread of this machine"
    )
    fields["calibrated"] = f"on {count_of(found.calibration_images, 'training image')}"
    return fields


def _use(kind: str, file: Path) -> str:
    """How to load what was written, in one line."""
    match kind:
        case "onnx" | "onnx-int8":
            return f'onnxruntime.InferenceSession("{file}").run(None, {{"pixels": images}})  # float32 in 0..1'
        case "torch-export":
            return f'torch.export.load("{file}").module()(images)  # float32 in 0..1'
        case "python":
            return f"python {shlex.quote(str(file))} image.jpg, or: from {file.stem} import load, normalise"
        case _:
            return f'softcell.api.Network.from_pretrained("{file.parent}")'
