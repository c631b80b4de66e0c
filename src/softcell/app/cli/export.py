"""`softcell export` and `softcell predict`: trained networks as files, and the classes they assign to images."""

from __future__ import annotations

import csv
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.text import Text

from softcell.app.cli import options as o
from softcell.app.cli.output import check_output_path, console, output_path, print_fields
from softcell.app.export import ImageClassifier, Quantised, format_named, read_classifier, ready
from softcell.app.export.graph import CALIBRATION
from softcell.app.progress import counting, working
from softcell.errors import UserError
from softcell.evaluate import ImagePrediction, image_files
from softcell.text import count_of, percent

NOTED = 0.02
"""Loss of accuracy by int8 from which a note is printed."""
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
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a finished training run, or of `softcell run`.")
    ],
    to: Annotated[
        list[str],
        typer.Option(
            help="onnx, onnx-int8 (quantised, with its accuracy compared with float), safetensors (weights and a "
            "description), python (files that need only torch), or torch-export; repeatable."
        ),
    ],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder to write to. Default: RUN/export.")] = None,
    calibration: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Number of training images that onnx-int8 is calibrated on. Default: 256."
        ),
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
            difference = f"largest difference {done.difference:.1e} of the largest value"
            print_fields(screen, checked=f"same {done.output} as the network ({difference})")
    if not quiet:
        print_fields(screen, use=_use(done.format, done.files[0]))


def _compared(found: Quantised) -> dict[str, str]:
    """What int8 loses and gains compared with float."""
    sizes, times = ([*pair] for pair in (found.bytes, found.milliseconds))
    fields = {"accuracy": "not measured: no images were held out of training, and the data has no test split"}
    if found.accuracy is not None and found.agreement is not None:
        before, after = found.accuracy
        images = {
            "holdout": f"{count_of(found.images, 'training image')} held out of training",
            "test": f"{count_of(found.images, 'test image')}, since none were held out of training",
        }
        fields["accuracy"] = (
            f"{percent(after)} in int8, {percent(before)} in float, on {images[found.split]}; same class for "
            f"{percent(found.agreement)}"
        )
        if before - after > NOTED:
            fields["note"] = (
                "int8 loses a lot of accuracy here; calibrate with more images (--calibration), or use --to onnx"
            )
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
            script = file.with_name("predict.py")  # `file` is model.py, which holds only the network
            return f"python {shlex.quote(str(script))} image.jpg, or: from {script.stem} import load, normalise"
        case _:
            return f'softcell.api.Network.from_pretrained("{file.parent}")'


SHOWN = 3
"""Number of classes printed per image; a CSV has one unless --top is given."""
UNREADABLE = 2
"""Exit code if an image cannot be read."""


@commands.command(
    "predict",
    epilog=o.examples(
        "softcell predict runs/train-darts-digits-1 photo.jpg",
        "softcell predict runs/run-photos-1 new-photos --out classes.csv",
        "softcell predict runs/run-photos-1/export/model-int8.onnx a.png b.png --top 5",
    ),
)
def predict(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN",
            help="Folder of a finished training run, of `softcell run` or of an export; or an ONNX file of an export.",
        ),
    ],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE", help="Image files, or folders of them.")],
    top: Annotated[
        int | None, typer.Option(metavar="K", min=1, help="Classes per image. Default: 3, in a CSV 1.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a CSV file. For a folder without --out, the CSV is printed."),
    ] = None,
    device: o.Device = None,
    overwrite: o.OverwriteFile = False,
    plugin: o.Plugin = None,
    trust: o.Trust = False,
    quiet: o.Quiet = False,
) -> int:
    """Classify images with a trained network: class names and probabilities.

    Images are prepared as in training: rotated upright, scaled, cropped and normalised. Unreadable files are listed and
    skipped; the exit code is then 2. With a CSV of a folder whose subfolders are named after
    classes, the accuracy is printed too.
    """
    o.load_plugins(plugin)
    created = None if out is None else check_output_path(out, overwrite)
    files = image_files(images)
    classifier = read_classifier(run, device or "auto")
    if out is not None:
        summary = _Summary(classifier.inputs.classes)
        with counting(console(), "classifying", quiet) as step, _new_file(out) as stream:
            _write_csv(stream, summary.watch(_counted(classifier, files, top or 1, step)), top or 1)
        print_fields(console(), written=output_path(out, created), **summary.fields())
        num_unreadable = summary.unreadable
    elif any(path.is_dir() for path in images):
        summary = _Summary(classifier.inputs.classes)
        _write_csv(sys.stdout, summary.watch(classifier.classify(files, top or 1)), top or 1)
        num_unreadable = summary.unreadable
    else:
        num_unreadable = _print(classifier, files, top or SHOWN)
    if num_unreadable:
        # Otherwise the count may be printed before the last rows if both streams go to the same place.
        sys.stdout.flush()
        print(f"{num_unreadable} of {count_of(len(files), 'image')} cannot be read", file=sys.stderr)
    return UNREADABLE if num_unreadable else 0


def _print(classifier: ImageClassifier, files: list[Path], top: int) -> int:
    """Prints the classes of every image and returns the number of unreadable ones."""
    screen, num_unreadable = console(), 0
    for found in classifier.classify(files, top):
        if found.error is not None:
            print(_printable(found.error), file=sys.stderr)
            num_unreadable += 1
            continue
        if len(files) > 1:
            screen.print(Text(_printable(str(found.file)), "bold"))
        for name, chance in zip(found.classes, found.probabilities, strict=True):
            screen.print(Text(f"{chance:6.1%}  {_printable(name)}"))
    return num_unreadable


def _write_csv(stream: TextIO, predictions: Iterable[ImagePrediction], top: int) -> None:
    """One row per readable image: file, class, probability, and class_2, probability_2 and so on for `top` above 1."""
    table = csv.writer(stream, lineterminator="\n")
    more = (f"{name}_{k}" for k in range(2, top + 1) for name in ("class", "probability"))
    table.writerow(("file", "class", "probability", *more))
    for found in predictions:
        if found.error is not None:
            print(_printable(found.error), file=sys.stderr)
            continue
        pairs = zip(found.classes, found.probabilities, strict=True)
        row = (str(found.file), *(value for name, chance in pairs for value in (name, f"{chance:.6f}")))
        # A file is opened with `surrogateescape`; standard output may reject surrogates.
        table.writerow(row if stream is not sys.stdout else map(_printable, row))


def _counted(
    classifier: ImageClassifier, files: list[Path], top: int, step: Callable[[int, int, str], None]
) -> Iterator[ImagePrediction]:
    for number, found in enumerate(classifier.classify(files, top)):
        step(number, len(files), found.file.name)
        yield found


class _Summary:
    """Counts predictions: how many files are unreadable, how many images are in the folder of their class."""

    def __init__(self, classes: tuple[str, ...]) -> None:
        self._classes = set(classes)
        self.read = self.unreadable = self.named = self.right = 0

    def watch(self, predictions: Iterable[ImagePrediction]) -> Iterator[ImagePrediction]:
        for found in predictions:
            self.unreadable += found.error is not None
            self.read += found.error is None
            if found.error is None and found.file.parent.name in self._classes:
                self.named += 1
                self.right += found.classes[0] == found.file.parent.name
            yield found

    def fields(self) -> dict[str, str]:
        known = {"images": f"{self.read:,}"}
        if self.named:
            among = "" if self.named == self.read else f" of {self.read:,}"
            known["accuracy"] = (
                f"{percent(self.right / self.named)} of the {self.named:,}{among} images in folders named after classes"
            )
        return known


@contextmanager
def _new_file(path: Path) -> Iterator[TextIO]:
    """A text file that replaces `path` when it is complete; an error or Ctrl-C leaves no part of it."""
    # In the same folder, because `os.replace` is atomic only within one file system.
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Names of files need not be valid Unicode; surrogates become the bytes that they stand for.
        with open(temporary, "w", encoding="utf-8", errors="surrogateescape", newline="") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}); choose another --out") from error
    finally:
        temporary.unlink(missing_ok=True)


def _printable(text: str) -> str:
    """Without surrogates, which a terminal cannot show."""
    return os.fsencode(text).decode("utf-8", "replace")
