"""Writes a model in one of the formats and compares the written file with the network."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from softcell import __version__
from softcell.app.export import graph, python
from softcell.app.export.model import Model, read_model, trained_folder
from softcell.app.export.quantise import (
    CALIBRATION,
    CalibrationData,
    Quantised,
    calibration_data,
    check_quantisable,
    write_int8,
)
from softcell.engine.lock import locked
from softcell.engine.runfolder import checksum
from softcell.errors import UserError
from softcell.files import atomic_write_bytes, atomic_write_text, fsync_folder
from softcell.spaces.pretrained import FORMAT, MODEL, VERSION, WEIGHTS, read_description
from softcell.trust import trusting

Format = Literal["onnx", "onnx-int8", "safetensors", "python", "torch-export"]
FORMATS: tuple[Format, ...] = get_args(Format)
FILES: dict[Format, tuple[str, ...]] = {
    "onnx": ("model.onnx",),
    "onnx-int8": ("model-int8.onnx", "model-int8.json"),
    "safetensors": (WEIGHTS, MODEL),
    "python": ("model.py", "predict.py", WEIGHTS),
    "torch-export": ("model.pt2",),
}
STAGE = ".export.tmp"
"""Folder for files that are not checked yet."""


@dataclass(frozen=True, slots=True)
class Exported:
    """The written files; `difference` is the largest relative difference of their output from the network's.

    `quantised` compares an int8 graph with its float one; its `difference` is NaN without images to measure on.

    Example:
        >>> from softcell.app.export import export
        >>> exported = export("runs/train", "safetensors", out="exported")
        >>> exported.format, [file.name for file in exported.files]
        ('safetensors', ['model.safetensors', 'model.json'])
    """

    format: Format
    files: tuple[Path, ...]
    difference: float
    output: str = "logits"
    quantised: Quantised | None = None


@dataclass(frozen=True, slots=True)
class Ready:
    """A trained network and the folder for its files, both checked.

    Example:
        >>> from softcell.app.export import ready
        >>> found = ready("runs/train", ["safetensors"], None, overwrite=False)
        >>> str(found.place), found.model.shape
        ('runs/train/export', (1, 8, 8))
    """

    model: Model
    source: Path
    place: Path
    images: CalibrationData | None = None
    """For `onnx-int8`."""

    def write(self, to: Format) -> Exported:
        """Writes the network as `to`, one of the formats that were checked."""
        model, names, quantised = self.model, FILES[to], None
        with locked(self.place), _staged(self.place, names) as stage, torch.random.fork_rng(devices=[]):
            match to:
                case "onnx":
                    graph.write_onnx(model, stage / names[0])
                    difference = graph.check_onnx(stage / names[0], model)
                case "onnx-int8":
                    assert self.images is not None
                    quantised = write_int8(model, self.images, *(stage / name for name in names))
                    difference = math.nan if quantised.difference is None else quantised.difference
                case "torch-export":
                    graph.write_program(model, stage / names[0])
                    difference = graph.check_program(stage / names[0], model)
                case "safetensors":
                    difference = _write_weights(model, stage / WEIGHTS)
                    known = {"checksums": {WEIGHTS: checksum(stage / WEIGHTS)}}
                    described = json.dumps({**_description(self.source), **known}, indent=2, ensure_ascii=False)
                    atomic_write_text(stage / MODEL, described + "\n")
                case "python":
                    _write_weights(model, stage / WEIGHTS)
                    atomic_write_text(stage / names[0], python.to_python(model))
                    atomic_write_text(stage / names[1], python.to_predict(model))
                    difference = python.check_python(stage / names[1], model)
        return Exported(to, _files(self.place, to), difference, model.output, quantised)


def export(
    folder: str | Path,
    to: Format,
    out: str | Path | None = None,
    *,
    overwrite: bool = False,
    trust: bool = False,
    data: str | None = None,
    data_root: str | None = None,
    calibration: int = CALIBRATION,
) -> Exported:
    """Writes the trained network of a run as `to` into the folder `out` (else into `export` in `folder`).

    trust: run plugins that the folder names.
    data, data_root: for `onnx-int8`, where the training images are now; those of the run when None.
    calibration: for `onnx-int8`, the number of training images that give the ranges of activations.

    Example:
        >>> from softcell.api import Network
        >>> from softcell.app.export import export
        >>> exported = export("runs/train", "safetensors", out="exported")
        >>> exported.difference  # between the network that was written and the trained one
        0.0
        >>> Network.from_pretrained("exported").num_classes
        10
    """
    to = format_named(to)
    with trusting(trust):
        found = ready(folder, [to], out, overwrite=overwrite, data=data, data_root=data_root, calibration=calibration)
        return found.write(to)


def ready(
    folder: str | Path,
    kinds: Sequence[Format],
    out: str | Path | None,
    *,
    overwrite: bool,
    data: str | None = None,
    data_root: str | None = None,
    calibration: int = CALIBRATION,
) -> Ready:
    """Reads the network and checks the request before anything is written.

    Example:
        >>> from softcell.app.export import ready
        >>> from softcell.errors import UserError
        >>> try:
        ...     ready("runs/search", ["onnx"], None, overwrite=False)
        ... except UserError as error:
        ...     print("refused")
        refused
    """
    source = trained_folder(folder)
    place = Path(folder) / "export" if out is None else Path(out)
    for kind in kinds:
        _check_free(source, place, _files(place, kind), overwrite)
    if "onnx" in kinds or "onnx-int8" in kinds:
        graph.check_packages()
    model, images = read_model(source), None
    if "onnx-int8" in kinds:
        check_quantisable(model)
        images = calibration_data(source, model, data=data, data_root=data_root, calibration=calibration)
    weights, wanted = place / WEIGHTS, any(WEIGHTS in FILES[kind] for kind in kinds)
    if wanted and not overwrite and weights.exists() and not _holds(weights, model):
        raise UserError(
            f"{weights} already exists and holds other weights than {source}, which files beside it may need: "
            "give another --out, or --overwrite to replace it"
        )
    return Ready(model, source, place, images)


def _files(place: Path, kind: Format) -> tuple[Path, ...]:
    return tuple(place / name for name in FILES[kind])


@contextmanager
def _staged(place: Path, names: Sequence[str]) -> Iterator[Path]:
    """A folder inside `place` for files that are not checked yet; at the end all of them move to `place`, or none."""
    stage = place / STAGE
    shutil.rmtree(stage, ignore_errors=True)  # left by an export that was killed
    try:
        stage.mkdir()
        yield stage
        for name in names:
            os.replace(stage / name, place / name)
        fsync_folder(place)
    except OSError as error:
        raise UserError(f"{place} cannot be written ({error.strerror or error}); choose another --out") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def format_named(name: str) -> Format:
    """A format by its name; anything else is a `UserError`.

    Example:
        >>> from softcell.app.export import format_named
        >>> format_named("onnx")
        'onnx'
    """
    for known in FORMATS:
        if name == known:
            return known
    raise UserError(f"--to must be one of {', '.join(FORMATS)}, got {name!r}")


def _check_free(source: Path, place: Path, files: tuple[Path, ...], overwrite: bool) -> None:
    if place.resolve() == source.resolve():
        raise UserError(
            f"an export needs a folder of its own, but --out is the run {source} itself; give another --out"
        )
    there = next((parent for parent in (place, *place.parents) if parent.exists()), Path())
    if not there.is_dir() or not os.access(there, os.W_OK):
        reason = "may not be written to" if there.is_dir() else "is a file"
        raise UserError(f"an export needs a folder, but {there} {reason}; give another --out")
    # Weights are the same for every format; `ready` checks whether existing ones are those of this network.
    taken = [file for file in files if file.exists() and file.name != WEIGHTS]
    if taken and not overwrite:
        raise UserError(f"{taken[0]} already exists; give another --out, or --overwrite to replace it")


def _write_weights(model: Model, file: Path) -> float:
    state = {name: tensor.contiguous() for name, tensor in model.network.state_dict().items()}
    atomic_write_bytes(file, save(state))
    if not _holds(file, model):
        raise RuntimeError(f"{file} does not hold the weights that were written")
    return 0.0


def _holds(file: Path, model: Model) -> bool:
    """Whether a file holds exactly the weights of a network."""
    state = model.network.state_dict()
    try:
        stored = load_file(file)
    except (SafetensorError, OSError):
        return False
    return stored.keys() == state.keys() and all(torch.equal(stored[name], state[name]) for name in state)


def _description(source: Path) -> dict[str, Any]:
    made_by = {"made_by": f"softcell {__version__}"}
    return {"format": FORMAT, "version": VERSION, **read_description(source), **made_by}
