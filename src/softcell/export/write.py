"""Writes a model in one of the formats, and runs what was written beside the network before it is called done."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from softcell import __version__
from softcell.engine.checksums import checksum
from softcell.engine.files import TEMPORARY, atomic_write_text, fsync_folder
from softcell.errors import UserError
from softcell.export import graph, python
from softcell.export.model import Model, read_model, trained_folder
from softcell.spaces.pretrained import FORMAT, MODEL, VERSION, WEIGHTS, read_description
from softcell.trust import trusting

Format = Literal["onnx", "safetensors", "python", "torch-export"]
FORMATS: tuple[Format, ...] = get_args(Format)
FILES: dict[Format, tuple[str, ...]] = {
    "onnx": ("model.onnx",),
    "safetensors": (WEIGHTS, MODEL),
    "python": ("model.py", WEIGHTS),
    "torch-export": ("model.pt2",),
}


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written; `difference` is the largest seen between its output and the network's, relative to that."""

    format: Format
    files: tuple[Path, ...]
    difference: float
    output: str = "logits"


@dataclass(frozen=True, slots=True)
class Ready:
    """A trained network that was read, with a place that is free for its files."""

    model: Model
    source: Path
    place: Path

    def write(self, to: Format) -> Exported:
        """Writes it as `to`, which is one of those it was made ready for."""
        model, files = self.model, _files(self.place, to)
        with _folder(self.place), torch.random.fork_rng(devices=[]):
            match to:
                case "onnx":
                    difference = _placed(files[0], lambda path: graph.write_onnx(model, path), model, graph.check_onnx)
                case "torch-export":
                    difference = _placed(
                        files[0],
                        lambda path: torch.export.save(graph.to_program(model), path),
                        model,
                        graph.check_program,
                    )
                case "safetensors":
                    difference = _write_weights(model, files[0])
                    known = {"checksums": {WEIGHTS: checksum(files[0])}}
                    described = json.dumps({**_description(self.source), **known}, indent=2, ensure_ascii=False)
                    atomic_write_text(files[1], described + "\n")
                case "python":
                    _write_weights(model, files[1])
                    difference = _placed(
                        files[0],
                        lambda path: path.write_text(python.to_python(model), encoding="utf-8"),
                        model,
                        python.check_python,
                    )
        return Exported(to, files, difference, model.output)


def export(
    folder: str | Path, to: Format, out: str | Path | None = None, *, overwrite: bool = False, trust: bool = False
) -> Exported:
    """Writes the trained network of a run as `to` into the folder `out` (else into `export` in `folder`).

    trust: run plugins that the folder names.
    """
    to = format_named(to)
    with trusting(trust):
        return ready(folder, [to], out, overwrite=overwrite).write(to)


def ready(folder: str | Path, kinds: Sequence[Format], out: str | Path | None, *, overwrite: bool) -> Ready:
    """Reads the network and looks at everything that may be wrong with what was asked for, before anything is done."""
    source = trained_folder(folder)
    place = Path(folder) / "export" if out is None else Path(out)
    for kind in kinds:
        _check_free(source, place, _files(place, kind), overwrite)
    if "onnx" in kinds:
        graph.check_packages()
    model = read_model(source)
    weights, wanted = place / WEIGHTS, any(WEIGHTS in FILES[kind] for kind in kinds)
    if wanted and not overwrite and weights.exists() and not _holds(weights, model):
        raise UserError(
            f"{weights} exists already and holds other weights than those of {source}; files beside it may need them: "
            "give another --out, or --overwrite to replace it"
        )
    return Ready(model, source, place)


def _files(place: Path, kind: Format) -> tuple[Path, ...]:
    return tuple(place / name for name in FILES[kind])


@contextmanager
def _folder(place: Path) -> Iterator[None]:
    """The folder is there inside; when nothing comes of it, it goes again."""
    new = not place.exists()
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{place} cannot be made ({error.strerror or error}); choose another --out") from error
    try:
        yield
    except BaseException:
        if new and not any(place.iterdir()):
            place.rmdir()
        raise


def format_named(name: str) -> Format:
    """A format by its name; anything else is a `UserError`."""
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
    # Weights are the same whatever they are written for; whether those that lie there are this network's is seen later.
    taken = [file for file in files if file.exists() and file.name != WEIGHTS]
    if taken and not overwrite:
        raise UserError(f"{taken[0]} exists already; give another --out, or --overwrite to replace it")


def _placed(file: Path, write: Any, model: Model, check: Any) -> float:
    """Writes beside the final name, checks there, and only then puts it in place."""
    temporary = file.with_name(f"{TEMPORARY.strip('.')}-{os.getpid()}-{file.name}")
    try:
        write(temporary)
        difference: float = check(temporary, model)
        os.replace(temporary, file)
        fsync_folder(file.parent)
        return difference
    finally:
        temporary.unlink(missing_ok=True)


def _write_weights(model: Model, file: Path) -> float:
    state = {name: tensor.contiguous() for name, tensor in model.network.state_dict().items()}
    temporary = file.with_name(f".{file.name}{TEMPORARY}")
    save_file(state, temporary)
    if not _holds(temporary, model):
        raise RuntimeError(f"{file} does not hold the weights that were written")
    os.replace(temporary, file)
    fsync_folder(file.parent)
    return 0.0


def _holds(file: Path, model: Model) -> bool:
    """Whether a file has exactly the weights of a network."""
    state = model.network.state_dict()
    try:
        stored = load_file(file)
    except (SafetensorError, OSError):
        return False
    return stored.keys() == state.keys() and all(torch.equal(stored[name], state[name]) for name in state)


def _description(source: Path) -> dict[str, Any]:
    made_by = {"made_by": f"softcell {__version__}"}
    return {"format": FORMAT, "version": VERSION, **read_description(source), **made_by}
