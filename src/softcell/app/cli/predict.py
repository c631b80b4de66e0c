"""`softcell predict`"""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.text import Text

from softcell.app.cli import options as o
from softcell.app.cli.console import check_output_path, console, output_path, percent, print_fields
from softcell.app.export import ImageClassifier, read_classifier
from softcell.app.progress import counting
from softcell.errors import UserError
from softcell.evaluate import ImagePrediction, image_files
from softcell.text import count_of

SHOWN = 3
"""Classes that are printed for an image; a CSV has one unless --top says otherwise."""
UNREADABLE = 2
"""Exit code if some image cannot be read."""
commands = typer.Typer()


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
            help="Folder of a finished training, of `softcell run` or of an export; or an ONNX file of an export.",
        ),
    ],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Image files, or folders of them.")],
    top: Annotated[
        int | None, typer.Option(metavar="K", min=1, help="Classes per image. Default: 3, in a CSV 1.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a CSV. A folder without --out prints it instead.")
    ] = None,
    device: o.Device = None,
    overwrite: o.OverwriteFile = False,
    plugin: o.Plugin = None,
    trust: o.Trust = False,
    quiet: o.Quiet = False,
) -> int:
    """Classify images with a trained network: class names and probabilities.

    Images are prepared as those of the training: turned upright, scaled, cropped and normalised. Files that cannot be
    read are named and skipped; the exit code is then 2. In a CSV of a folder whose subfolders are named like classes,
    the accuracy is printed too.
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
        table.writerow(row if stream is not sys.stdout else map(_printable, row))


def _counted(
    classifier: ImageClassifier, files: list[Path], top: int, step: Callable[[int, int, str], None]
) -> Iterator[ImagePrediction]:
    for number, found in enumerate(classifier.classify(files, top)):
        step(number, len(files), found.file.name)
        yield found


class _Summary:
    """Counts predictions: how many files are unreadable, how many images lie in the folder of their class."""

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
                f"{percent(self.right / self.named)} of the {self.named:,}{among} images in a folder named like a class"
            )
        return known


@contextmanager
def _new_file(path: Path) -> Iterator[TextIO]:
    """A text file that replaces `path` when it is complete; an error or Ctrl-C leaves no part of it."""
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
