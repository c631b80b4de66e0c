"""Writes a model in one of the formats and compares the written file with the network; writes packs of candidates.

A *pack* is a folder with which the candidates of a space are measured on another device: ONNX files, a list of them, a
script (`softcell.evaluate.measure_onnx`) that needs numpy and onnxruntime. Its result is a table for `softcell search
--latency-table`. Candidates are exported as in the final network, each once for every size that it can have there, as
are some whole networks, which show how well the table predicts. A graph that only copies its input measures the
overhead of a call of onnxruntime.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from softcell import __version__
from softcell.app.export import _python as python
from softcell.app.export import graph
from softcell.app.export.graph import (
    CALIBRATION,
    OPSET,
    CalibrationData,
    Quantised,
    calibration_data,
    check_quantisable,
    module_to_program,
    program_to_onnx,
    write_int8,
)
from softcell.app.export.model import INPUT, Model, check_packages, read_model, trained_folder
from softcell.arch import Genotype, sample
from softcell.engine.lock import locked
from softcell.engine.runfolder import checksum
from softcell.errors import UserError
from softcell.evaluate import measure_onnx
from softcell.evaluate.latency import OnStep, candidate_places, picks_of
from softcell.files import atomic_write_bytes, atomic_write_text, fsync_folder
from softcell.nn.candidates import get_candidate
from softcell.spaces import Shape, Space
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
"""Folder for files that have not been checked yet."""
PACK = "pack.json"
SCRIPT = "measure.py"
TABLE = "latency.json"
"""What the script writes next to them."""
PACK_FORMAT, PACK_VERSION = "softcell-latency-pack", 1


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
        >>> str(found.folder), found.model.shape
        ('runs/train/export', (1, 8, 8))
    """

    model: Model
    source: Path
    folder: Path
    images: CalibrationData | None = None
    """For `onnx-int8`."""

    def write(self, to: Format) -> Exported:
        """Writes the network as `to`, one of the formats that were checked."""
        model, names, quantised = self.model, FILES[to], None
        # Building and tracing modules draws random numbers; those of the caller stay the same.
        with locked(self.folder), _staged(self.folder, names) as stage, torch.random.fork_rng(devices=[]):
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
        return Exported(to, _files(self.folder, to), difference, model.output, quantised)


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
    data, data_root: for `onnx-int8`, where the training images are now; None for the run's own path.
    calibration: for `onnx-int8`, the number of training images used to calibrate activation ranges.

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
    target = Path(folder) / "export" if out is None else Path(out)
    for kind in kinds:
        _check_free(source, target, _files(target, kind), overwrite)
    if "onnx" in kinds or "onnx-int8" in kinds:
        check_packages()
    model, images = read_model(source), None
    if "onnx-int8" in kinds:
        check_quantisable(model)
        images = calibration_data(source, model, data=data, data_root=data_root, calibration=calibration)
    weights, wanted = target / WEIGHTS, any(WEIGHTS in FILES[kind] for kind in kinds)
    if wanted and not overwrite and weights.exists() and not _holds(weights, model):
        raise UserError(
            f"{weights} already exists and holds different weights from {source}, which other files there may need: "
            "choose another --out, or --overwrite to replace it"
        )
    return Ready(model, source, target, images)


def _files(folder: Path, kind: Format) -> tuple[Path, ...]:
    return tuple(folder / name for name in FILES[kind])


@contextmanager
def _staged(folder: Path, names: Sequence[str]) -> Iterator[Path]:
    """A temporary folder in `folder` for files that are not checked yet; at the end they move to `folder` itself.

    A failed check leaves none of them there. They move one by one, so a kill in between leaves some, each complete.
    """
    stage = folder / STAGE
    shutil.rmtree(stage, ignore_errors=True)  # left by an export that was killed
    try:
        stage.mkdir()
        yield stage
        for name in names:
            os.replace(stage / name, folder / name)
        fsync_folder(folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror or error}); choose another --out") from error
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


def _check_free(source: Path, folder: Path, files: tuple[Path, ...], overwrite: bool) -> None:
    if folder.resolve() == source.resolve():
        raise UserError(
            f"an export needs a separate folder, but --out is the run {source} itself; choose another --out"
        )
    there = next((parent for parent in (folder, *folder.parents) if parent.exists()), Path())
    if not there.is_dir() or not os.access(there, os.W_OK):
        reason = "is not writable" if there.is_dir() else "is a file"
        raise UserError(f"an export needs a folder, but {there} {reason}; choose another --out")
    # Weights are the same for every format; `ready` checks whether existing ones are those of this network.
    taken = [file for file in files if file.exists() and file.name != WEIGHTS]
    if taken and not overwrite:
        raise UserError(f"{taken[0]} already exists; choose another --out, or --overwrite to replace it")


def _write_weights(model: Model, file: Path) -> float:
    # safetensors accepts only contiguous tensors.
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


def check_pack_folder(folder: Path, overwrite: bool) -> None:
    """Raises before the work if a pack cannot be written there, or a package for ONNX is missing."""
    check_packages()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--pack must name a folder, but {folder} is a file")
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / PACK).is_file():
            raise UserError(
                f"--pack must name a new or empty folder, but {folder} has other files; choose another name"
            )
        if not overwrite:
            raise UserError(f"{folder} already has a pack; choose another name, or --overwrite to replace it")
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"{folder} cannot be written because {there} is not a writable folder; choose another path")


def write_pack(
    space: Space,
    shape: Shape,
    num_classes: int,
    folder: Path,
    *,
    genotypes: Sequence[Genotype] = (),
    networks: int = 5,
    batch: int = 1,
    about: Mapping[str, Any] | None = None,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Writes the pack of a space to `folder`, all of it or nothing, and returns the content of `pack.json`.

    genotypes: architectures whose networks are measured in addition to `networks` random ones.
    """
    layout, places = space.layout(), list(candidate_places(space, shape, num_classes))
    needed = list(dict.fromkeys((op, spec, size) for _, op, spec, size in places))
    chosen = [*genotypes, *(sample(layout, seed) for seed in range(networks))]
    total = len(needed) + len(chosen)
    # Next to the folder, because `os.replace` works only within one file system.
    stage = folder.absolute().with_name(f".{folder.name}.tmp")
    shutil.rmtree(stage, ignore_errors=True)  # left by a command that was killed
    files: dict[str, list[int]] = {}
    written = hashlib.sha256()

    def add(name: str, content: bytes, size: Sequence[int]) -> None:
        (stage / name).write_bytes(content)
        files[name] = [batch, *size]
        written.update(hashlib.sha256(content).digest())

    try:
        stage.mkdir(parents=True)
        names, baselines = {}, {}
        for number, (op, spec, size) in enumerate(needed):
            described = "x".join(map(str, size))
            _step(on_step, number, total, f"{op} at {described}, stride {spec.stride}")
            copy = f"copy-{described}.onnx"
            if copy not in files:
                add(copy, _copying(size), size)
            name = f"candidate-{number:03}-{op}-{described}-stride-{spec.stride}.onnx"
            # Building a module draws its initial weights; the caller's random numbers stay the same.
            with torch.random.fork_rng(devices=[]):
                module = get_candidate(op).build(spec).eval()
            add(name, _onnx(module, size), size)
            names[op, spec, size], baselines[name] = name, copy
        listed = []
        for number, genotype in enumerate(chosen):
            _step(on_step, len(needed) + number, total, f"whole network {number + 1} of {len(chosen)}")
            name = f"network-{number:03}.onnx"
            with torch.random.fork_rng(devices=[]):
                network = space.network(genotype, shape, num_classes).eval()
            add(name, _onnx(network, shape), shape)
            listed.append({"file": name, "picks": picks_of(genotype, layout)})
        _step(on_step, total, total, "")
        pack = {
            "format": PACK_FORMAT,
            "version": PACK_VERSION,
            # The script resumes only with times that were measured with the same files.
            "digest": written.hexdigest()[:32],
            "about": {"unit": "ms", "batch": batch, **(about or {})},
            "files": files,
            "baselines": baselines,
            "places": [(table, op, names[op, spec, size]) for table, op, spec, size in places],
            "networks": listed,
        }
        (stage / PACK).write_text(json.dumps(pack, indent=1) + "\n", encoding="utf-8")
        (stage / SCRIPT).write_text(inspect.getsource(measure_onnx), encoding="utf-8")
        if folder.is_dir():
            shutil.rmtree(folder)  # empty, or a pack that may be replaced
        os.replace(stage, folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror or error}); choose another path") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return pack


def _onnx(module: torch.nn.Module, size: Sequence[int]) -> bytes:
    channels, height, width = size
    proto = program_to_onnx(module_to_program(module, (channels, height, width)), "output")
    content: bytes = proto.SerializeToString()
    return content


def _copying(size: Sequence[int]) -> bytes:
    """A graph whose output is its input."""
    from onnx import TensorProto, helper

    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *size]) for name in (INPUT, "output")]
    graph = helper.make_graph([helper.make_node("Identity", [INPUT], ["output"])], "copy", ends[:1], ends[1:])
    opset = [helper.make_opsetid("", OPSET)]
    # The format that torch's exporter writes; older versions of onnxruntime reject the latest one.
    content: bytes = helper.make_model(graph, opset_imports=opset, ir_version=10).SerializeToString()
    return content


def _step(on_step: OnStep | None, number: int, total: int, what: str) -> None:
    if on_step is not None:
        on_step(number, total, what)
