"""Inspects what a run is given: a folder of images, and the user's own model to compare with (`--beside`).

Real folders are nested and have stray files, broken images, splits of any name and classes of one image. What can be
corrected without guessing is corrected in a folder of links inside the run; the images themselves are never touched.

The user's model is an ONNX file or an exported program (.pt2). It accepts float32 pixels in 0..1, [n, c, h, w], and
returns one score per class, in the order of the sorted class names; normalisation is part of the model. It and the
delivered network are measured on the same test images. It does not compete: it was probably trained on
the images that are held out there.
"""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from softcell.app.export.model import PLAN, onnx_session
from softcell.data import Dataset
from softcell.data.dataset import TEST_FRACTION
from softcell.data.images import SUFFIXES, DecodeError, Header, Images, decode, read_header
from softcell.errors import UserError, one_line
from softcell.spaces.teacher import read_program
from softcell.text import count_of

TRAIN, TEST, VALIDATION = ("train", "training"), ("test", "testing"), ("val", "valid", "validation", "dev")
SKIPPED = {"__macosx", "@eadir", "thumbs.db", "desktop.ini"}  # left behind by operating systems
MIN_IMAGES = 2
"""Per class: one for training and one for testing."""
RARE = 10
MIN_TRAINING = 6
"""Training images, so that the tenth that searches and training runs hold back is at least one image."""
SHOWN = 5
MODEL_FORMATS = (".onnx", ".pt2")
BATCH = 64  # images of one call of the user's model
OnStep = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Image:
    """One file: its path, its class, and `train` or `test`."""

    path: Path
    label: str
    part: str
    header: Header | None = None


@dataclass
class Inspection:
    """The result of an inspection. `train` and `test` count the images per class; `notes` are human-readable."""

    source: str
    train: dict[str, int]
    test: dict[str, int]
    sides: tuple[int, int, int]  # of the shorter sides: smallest, median, largest
    channels: int
    broken: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    images: list[Image] = field(default_factory=list)
    needs_links: bool = False

    @property
    def num_train(self) -> int:
        return sum(self.train.values())

    @property
    def most_frequent(self) -> float:
        """The accuracy of always predicting the most frequent class, on the test images (else on all)."""
        counts = self.test or self.train
        return max(counts.values()) / sum(counts.values())

    def lines(self) -> list[str]:
        """The inspection in words."""
        sizes = Counter(self.train)
        (most, high), (least, low) = sizes.most_common()[0], sizes.most_common()[-1]
        small, middle, large = self.sides
        pixels = f"{small}" if small == large else f"{small} to {large} (median {middle:g})"
        kind = "grey" if self.channels == 1 else "colour"
        tested = f"{sum(self.test.values()):,} for testing" if self.test else "a fifth is held out for testing"
        found = [
            f"{count_of(self.num_train, f'{kind} image')} of {count_of(len(self.train), 'class')}, {tested}; "
            f"short side {pixels} pixels",
            f"{low:,} ({least}) to {high:,} ({most}) images per class"
            if low < high
            else f"{count_of(low, 'image')} per class",
        ]
        if self.broken:
            named = ", ".join(f"{name} ({reason})" for name, reason in self.broken[:SHOWN])
            more = f", ...; {PLAN} lists all" if len(self.broken) > SHOWN else ""
            found.append(f"skipped {count_of(len(self.broken), 'broken file')}: {named}{more}")
        return found + self.notes

    def to_dict(self) -> dict[str, Any]:
        return {
            "source": self.source,
            "train": self.train,
            "test": self.test,
            "sides": list(self.sides),
            "channels": self.channels,
            "broken": [list(item) for item in self.broken],
            "notes": self.notes,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Inspection:
        small, middle, large = data["sides"]
        broken = [(name, reason) for name, reason in data["broken"]]
        return cls(
            data["source"], data["train"], data["test"], (small, middle, large), data["channels"], broken, data["notes"]
        )


def inspect_dataset(dataset: Dataset) -> Inspection:
    """The inspection of a dataset, which needs no corrections."""

    def counts(labels: Iterable[int]) -> dict[str, int]:
        found = Counter(labels)
        return {name: found[number] for number, name in enumerate(dataset.classes)}

    side = min(dataset.shape[1:])
    test = {} if dataset.test is None else counts(dataset.test.labels.tolist())
    return Inspection(dataset.source, counts(dataset.train.labels.tolist()), test, (side, side, side), dataset.shape[0])


def inspect_folder(root: Path, on_step: OnStep | None = None) -> Inspection:
    """Finds and reads the images below `root` and decides which are used for training and for testing."""
    root = root.resolve()
    notes: list[str] = []
    base = _unwrapped(root)
    # Plain: the folder can be loaded as it is. Any correction below requires links instead.
    is_plain = base == root
    parts = _parts(base)
    images: list[Image] = []
    ignored = 0
    for part, folder in parts:
        for label in _folders(folder):
            files, others, is_flat = _files(folder / label)
            images += [Image(file, label, part) for file in files]
            ignored += others
            is_plain = is_plain and is_flat
        stray = [entry for entry in _entries(folder) if _is_image(entry)]
        if stray:
            notes.append(f"skipped {count_of(len(stray), 'image')} outside the class folders, such as {stray[0].name}")
            is_plain = False
    if ignored:
        notes.append(f"ignored {count_of(ignored, 'other file')}")
    if not images:
        loose = sum(_is_image(entry) for entry in _entries(root))
        there = f" ({count_of(loose, 'image')} in it, but not in a class folder)" if loose else ""
        raise UserError(
            f"no images in class folders below {root}{there}; arrange them as CLASS/IMAGE or train/CLASS/IMAGE "
            f"({', '.join(sorted(SUFFIXES))})"
        )
    kept, broken = _read(images, root, on_step)
    if not kept:
        name, reason = broken[0]
        raise UserError(
            f"none of the {count_of(len(broken), 'image')} below {root} can be read, such as {name} ({reason}); repair "
            "or replace them"
        )
    is_plain = is_plain and not broken
    merged = {part for part, _ in parts}
    if "val" in merged:
        becomes = "train" if "test" in merged else "test"
        notes.append("val/ is added to the training images" if becomes == "train" else "val/ is used as the test set")
        is_plain = is_plain and becomes == "test"
        kept = [Image(i.path, i.label, becomes, i.header) if i.part == "val" else i for i in kept]
    names = {folder.name for _, folder in parts}
    is_plain = is_plain and (names <= {"train", "test", "val"} or names == {base.name})
    kept, dropped = _usable_classes(kept, notes)
    return _summary(root, kept, broken, notes, needs_links=not is_plain or dropped)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            visible = (e for e in found if not e.name.startswith(".") and e.name.lower() not in SKIPPED)
            return sorted(visible, key=lambda entry: entry.name)
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror or error})") from error


def _is_image(entry: os.DirEntry[str]) -> bool:
    return not entry.is_dir() and os.path.splitext(entry.name)[1].lower() in SUFFIXES


def _folders(folder: Path) -> list[str]:
    return [entry.name for entry in _entries(folder) if entry.is_dir()]


def _unwrapped(root: Path) -> Path:
    """The folder of the classes or splits: archives often unpack to a folder in a folder."""
    while True:
        entries = _entries(root)
        folders = [entry.name for entry in entries if entry.is_dir()]
        if len(folders) != 1 or any(_is_image(entry) for entry in entries) or not _folders(root / folders[0]):
            return root
        root = root / folders[0]


def _parts(base: Path) -> list[tuple[str, Path]]:
    """(train, test or val; folder of class folders); everything is train if there are no splits."""
    found = []
    for part, names in (("train", TRAIN), ("test", TEST), ("val", VALIDATION)):
        for name in _folders(base):
            if name.lower() in names and _folders(base / name):
                found.append((part, base / name))
    return found if any(part == "train" for part, _ in found) else [("train", base)]


def _files(folder: Path) -> tuple[list[Path], int, bool]:
    """Image files anywhere below `folder`, the number of other files, and whether all images are directly in it."""
    images, others, is_flat = [], 0, True
    waiting = [folder]
    while waiting:
        here = waiting.pop(0)
        for entry in _entries(here):
            if entry.is_dir():
                waiting.append(Path(entry.path))
            elif _is_image(entry):
                images.append(Path(entry.path))
                is_flat = is_flat and here == folder
            else:
                others += 1
    return images, others, is_flat


def _read(images: list[Image], root: Path, on_step: OnStep | None) -> tuple[list[Image], list[tuple[str, str]]]:
    """Decodes every file; returns the readable images, and (name, reason) of the broken ones."""

    def read(image: Image) -> Image | str:
        try:
            header = read_header(image.path)
            # Only whether the pixels can be decoded matters, so a small size is enough.
            decode(image.path, 3, (16, 16))
            return Image(image.path, image.label, image.part, header)
        except DecodeError as error:
            return error.reason
        except UserError as error:
            return str(error)

    kept: list[Image] = []
    broken: list[tuple[str, str]] = []
    with ThreadPoolExecutor() as pool:  # decoders release the interpreter lock
        for number, (image, found) in enumerate(zip(images, pool.map(read, images), strict=True)):
            if isinstance(found, Image):
                kept.append(found)
            else:
                broken.append((str(image.path.relative_to(root)), found))
            if on_step is not None:
                on_step(number + 1, len(images), image.path.name)
    return kept, broken


def _usable_classes(images: list[Image], notes: list[str]) -> tuple[list[Image], bool]:
    """Skips classes with too few images to train or test on, with a note."""
    has_test = any(image.part == "test" for image in images)
    counts = Counter(image.label for image in images if image.part == "train")
    least = 1 if has_test else MIN_IMAGES
    labels = {image.label for image in images}
    small = sorted(label for label in labels if counts[label] < least)
    if small:
        shown = ", ".join(small[:SHOWN]) + (", ..." if len(small) > SHOWN else "")
        notes.append(f"skipped {count_of(len(small), 'class')} with too few training images: {shown}")
    rare = sorted(label for label in labels if least <= counts[label] < RARE)
    if rare:
        few = ", ".join(f"{label} ({counts[label]})" for label in rare[:SHOWN]) + (", ..." if len(rare) > SHOWN else "")
        notes.append(f"fewer than {RARE} training images: {few}")
    if len(labels) - len(small) < 2:
        in_all = MIN_TRAINING if has_test else least_images(2)
        raise UserError(
            f"at least 2 classes must have {count_of(least, 'readable image')} or more, but "
            f"{_large_classes(labels, small)}; a class is a folder of images, and all classes together need {in_all} "
            "images or more"
        )
    usable = [image for image in images if image.label not in small]
    high, low = max(counts.values()), min(counts[label] for label in labels if label not in small)
    if high >= 5 * low:
        notes.append(f"classes are imbalanced, {high / low:.0f} to 1: check the accuracy of each class")
    return usable, bool(small)


def _large_classes(labels: set[str], small: list[str]) -> str:
    """Which classes are large enough, in words."""
    large = sorted(labels - set(small))
    return f"only {large[0]!r} does" if large else f"none of {count_of(len(labels), 'class')} does"


def _summary(
    root: Path, images: list[Image], broken: list[tuple[str, str]], notes: list[str], *, needs_links: bool
) -> Inspection:
    headers = [image.header for image in images if image.header is not None]
    sides = sorted(min(header.height, header.width) for header in headers)
    train, test = (
        dict(sorted(Counter(image.label for image in images if image.part == part).items()))
        for part in ("train", "test")
    )
    channels = 1 if all(header.grey for header in headers) else 3
    return Inspection(
        f"image folder {root.name}",
        train,
        test,
        (sides[0], round(median(sides)), sides[-1]),
        channels,
        broken,
        notes,
        images,
        needs_links,
    )


def make_links(inspection: Inspection, folder: Path) -> Path:
    """A folder CLASS/IMAGE (below train/ and test/ if there is a test set) of links to the usable images."""
    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)
    for number, image in enumerate(inspection.images):
        target = temporary / image.part / image.label if inspection.test else temporary / image.label
        target.mkdir(parents=True, exist_ok=True)
        # Numbered, because files from different subfolders may have the same name.
        link = target / f"{number:06}-{image.path.name}"
        try:
            link.symlink_to(image.path)
        except OSError:  # a file system without links
            shutil.copyfile(image.path, link)
    # Only now, so that an interrupted inspection leaves no half-filled folder.
    temporary.rename(folder)
    return folder


def num_tested(images: int, classes: int) -> int:
    """How many of `images` are held out for testing if there is no test set, as in `softcell.data.dataset`."""
    return max(round(TEST_FRACTION * images), classes)


def least_images(classes: int) -> int:
    """The smallest number of images, if there is no test set."""
    images = MIN_TRAINING
    while images - num_tested(images, classes) < MIN_TRAINING:
        images += 1
    return images


def check_num_images(inspection: Inspection) -> None:
    """Raises if a split would be empty; the error says how many images to add."""
    images, classes = inspection.num_train, len(inspection.train)
    least, which = (MIN_TRAINING, "training images") if inspection.test else (least_images(classes), "images")
    if images >= least:
        return
    why = "" if inspection.test else f"{num_tested(images, classes)} of them would be used for testing, and "
    raise UserError(
        f"a run with {count_of(classes, 'class')} needs at least {least} {which}, but {inspection.source} has {images} "
        f"({why}a tenth of the training images is held back for validation); add {least - images} or more. Useful "
        "results need dozens per class"
    )


@dataclass(frozen=True)
class OwnModel:
    """`forward` maps pixels in 0..1, [n, *shape], to scores [n, classes]."""

    file: Path
    forward: Callable[[Tensor], Tensor]
    shape: tuple[int, int, int]

    @torch.no_grad()
    def accuracy(self, images: Images) -> float:
        """The share of `images` whose class has the highest score."""
        correct = 0
        for first in range(0, len(images), BATCH):
            indices = torch.arange(first, min(first + BATCH, len(images)))
            scores = self.scores(images.fetch(indices))
            correct += int((scores.argmax(1) == images.labels[indices]).sum())
        return correct / len(images)

    def scores(self, pixels: Tensor) -> Tensor:
        """Scores [n, classes] of `pixels` uint8 [n, c, h, w]; grey images are repeated for a model of colours."""
        images = (pixels.float() / 255).expand(-1, max(self.shape[0], pixels.shape[1]), -1, -1).contiguous()
        try:
            scores = self.forward(images)
        except Exception as error:  # a foreign model may fail in any way
            raise UserError(
                f"--beside {self.file} must accept float32 pixels in 0..1 of shape {list(images.shape)}, but failed: "
                f"{one_line(error)}; export it for any batch size"
            ) from error
        if not isinstance(scores, Tensor) or scores.dim() != 2 or scores.shape[0] != len(pixels):
            raise UserError(f"--beside {self.file} must return one row of scores per image, [n, classes]")
        return scores

    @torch.no_grad()
    def check(self, channels: int, side: int | None, num_classes: int) -> float:
        """Raises unless the model fits the images and classes; returns its time for one image in seconds.

        side: of the images in pixels; None if they can be resized.
        """
        height, width = self.shape[1:]
        if height != width or side not in (None, height):
            rule = "square images" if side is None else f"the run's images of {side}x{side} pixels"
            raise UserError(f"--beside {self.file} must accept {rule}, but accepts {height}x{width}")
        if self.shape[0] != channels and channels != 1:
            raise UserError(
                f"--beside {self.file} accepts images of {self.shape[0]} channels, but those of the run have {channels}"
            )
        pixels = torch.zeros(BATCH, channels, *self.shape[1:], dtype=torch.uint8)
        # Not timed: the first call also sets the model up.
        self.scores(pixels[:2])
        began = time.perf_counter()
        found = self.scores(pixels).shape[1]
        if found != num_classes:
            raise UserError(
                f"--beside {self.file} returns scores for {found} classes, but the images have {num_classes}"
            )
        return (time.perf_counter() - began) / BATCH


def read_own(path: str | Path) -> OwnModel:
    """The model in a file. An exported program may run code while it is read, so it must be trusted (`--trust`)."""
    file = Path(path).expanduser()
    if file.suffix.lower() not in MODEL_FORMATS or not file.is_file():
        raise UserError(
            f"--beside must name an existing file that ends in {' or '.join(MODEL_FORMATS)}, but got {path}"
        )
    if file.suffix.lower() == ".onnx":
        session = onnx_session(file)
        given, wanted = session.get_inputs()[0], session.get_outputs()[0].name

        def forward(images: Tensor) -> Tensor:
            return torch.from_numpy(session.run([wanted], {given.name: images.numpy()})[0])

        return OwnModel(file, forward, _shape(file, given.shape))
    program, _ = read_program(file, "--beside")
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
    own = next((node for node in inputs if node.name in program.graph_signature.user_inputs), None)
    if own is None:
        raise UserError(f"--beside {file} must accept images, but has no input")
    return OwnModel(file, program.module(), _shape(file, list(own.meta["val"].shape)))


def _shape(file: Path, sides: list[Any]) -> tuple[int, int, int]:
    """(c, h, w) of a model's input [n, c, h, w]; only n may be of any size."""
    fixed = [side for side in sides[1:] if isinstance(side, int)]
    if len(sides) != 4 or len(fixed) != 3:
        raise UserError(
            f"--beside {file} must accept images [n, channels, height, width] of one size, but its input is {sides}"
        )
    channels, height, width = fixed
    return channels, height, width
