"""Keeps the last two states of a run in a folder; at any moment at least one of them can be loaded.

A file is `MAGIC`, a header (version, payload length, SHA-256) and the payload, which is what `torch.save`
writes. The digest covers the other header fields too: a flipped bit in the version must not pass for a newer
version.
"""

from __future__ import annotations

import functools
import hashlib
import io
import os
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import softcell
from softcell.engine.manifest import versions
from softcell.errors import UserError
from softcell.files import atomic_write_bytes, fsync_folder, write_temporary
from softcell.settings import flat

CURRENT = "checkpoint.bin"
PREVIOUS = "checkpoint.prev.bin"
MAGIC = b"SOFTCELL"
VERSION = 1
_HEADER = struct.Struct("<8sIQ32s")  # magic, version, payload length, digest


@dataclass(frozen=True, slots=True)
class Loaded:
    """A restored state, and a note for the user if it is not the newest one."""

    state: dict[str, Any]
    note: str | None


class _Bad(Exception):
    """Why a checkpoint file cannot be used."""


def save(folder: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Make `state` the current checkpoint of `folder`; the one before stays as the previous one.

    Args:
        folder: an existing folder.
        state: tensors (any shape and device), numbers, strings, bools and None in dicts, lists and tuples.
    """
    folder = Path(folder)
    current = folder / CURRENT
    temporary = write_temporary(current, _encode(state))
    # A damaged current file must not replace the good previous one, hence the check before the rename.
    if _is_good(current):
        os.replace(current, folder / PREVIOUS)
    # A crash between the two renames leaves only the previous file, which `load_latest` then takes.
    os.replace(temporary, current)
    fsync_folder(folder)


def exists(folder: str | os.PathLike[str]) -> bool:
    """Whether `folder` has a checkpoint, intact or not."""
    return (Path(folder) / CURRENT).exists() or (Path(folder) / PREVIOUS).exists()


def load_latest(folder: str | os.PathLike[str]) -> Loaded | None:
    """Return the newest intact state of `folder` on the CPU, or None when there has never been one."""
    folder = Path(folder)
    current, previous = folder / CURRENT, folder / PREVIOUS
    if not exists(folder):
        return None
    try:
        return Loaded(_decode(current), None)
    except _Bad as error:
        fault = str(error)
    try:
        state = _decode(previous)
    except _Bad as error:
        raise UserError(
            f"a run needs one intact checkpoint to be resumed, but {current} {fault} and {previous} {error}. Restore "
            f"one of them from a backup, or start again in another folder."
        ) from None
    return Loaded(state, f"{current} {fault}: resuming from the previous checkpoint, {previous.name}.")


def save_file(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Make `state` the content of the file at `path` in one step, in the format of a checkpoint."""
    atomic_write_bytes(path, _encode(state))


def load_file(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the state in the file at `path`, on the CPU; None where there is none or it is damaged."""
    try:
        return _decode(Path(path))
    except _Bad:
        return None


def _encode(state: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(_plain(state, "state"), buffer)
    payload = buffer.getvalue()
    return _HEADER.pack(MAGIC, VERSION, len(payload), _digest(VERSION, payload)) + payload


def _digest(version: int, payload: bytes) -> bytes:
    return hashlib.sha256(struct.pack("<IQ", version, len(payload)) + payload).digest()


def _is_good(path: Path) -> bool:
    try:
        _payload(path)
    except _Bad:
        return False
    return True


def _payload(path: Path) -> bytes:
    """Return the verified payload, or raise `_Bad`."""
    if path.exists() and not path.is_file():
        raise _Bad("is not a regular file")
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise _Bad("is missing (the run was probably killed while saving)") from None
    except OSError as error:
        raise _Bad(f"cannot be read ({error.strerror or error})") from error
    if len(data) < _HEADER.size:
        raise _Bad(f"is truncated ({len(data)} bytes, less than its header)")
    magic, version, length, digest = _HEADER.unpack_from(data)
    payload = data[_HEADER.size :]
    if magic != MAGIC:
        raise _Bad("does not begin like a Softcell checkpoint")
    if len(payload) != length:
        raise _Bad(f"has a payload of {len(payload)} bytes where its header says {length}")
    if _digest(version, payload) != digest:
        raise _Bad("does not match its own checksum")
    # After the digest, which covers the version: a damaged number must not pass for a newer format. Not `_Bad`:
    # an older checkpoint must not replace one that only a newer Softcell can read.
    if version > VERSION:
        raise UserError(
            f"a checkpoint must be of version {VERSION} or older, but {path} is of version {version}. Resume with the "
            f"newer Softcell that wrote it."
        )
    return payload


def _decode(path: Path) -> dict[str, Any]:
    payload = _payload(path)
    try:
        # weights_only: a checkpoint may come from an untrusted source, and a pickle can run code.
        state = torch.load(io.BytesIO(payload), weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, TypeError) as error:
        raise _Bad(f"is intact but cannot be unpacked by torch {torch.__version__} ({error})") from error
    if not isinstance(state, dict):
        raise _Bad("is intact but does not hold the state of a run")
    return state


def _plain(value: Any, where: str) -> Any:
    """Copy the containers of `value`; reject what `torch.load(weights_only=True)` would reject later."""
    if isinstance(value, Mapping):
        return {_key(key, where): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(item, f"{where}[{index}]") for index, item in enumerate(value))
    if type(value) in (Tensor, torch.nn.Parameter):
        tensor = value.detach()
        # torch.save writes the whole storage of a view: a row of a data set would drag the set along.
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        return tensor if whole else tensor.clone()
    # Exact types: numpy.float64 is a float by inheritance, but does not come back.
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    raise TypeError(
        f"a checkpoint holds tensors, numbers, strings, bools, None, dicts, lists and tuples, but {where} is a "
        f"{type(value).__module__}.{type(value).__qualname__}; convert it first"
    )


def _key(key: Any, where: str) -> Any:
    if type(key) not in (str, int, float, bool, bytes, tuple, type(None)):
        raise TypeError(f"the keys of a checkpoint are plain values, but {where} has the key {key!r}")
    return key


IDENTITY = "identity"
_LOCATIONS = {"data", "data_root", "plugins"}
"""Settings that hold paths. Files may be moved: their contents are compared instead."""
_ROUNDING = {"device", "threads", "precision", "engine", "fused", "deterministic"}
"""Settings that change results by rounding only: a difference is a note, not an error."""
_DEFAULTS_OF_OLD_RUNS: dict[str, Any] = {
    "select.by": "method",
    "select.measure": "accuracy",
    "select.epochs": 5,
    "select.images": 0,
    "select.lr": None,
    "select.norms": "batch",
    "time": 0.0,
    "ema": 0.0,
    "per_step": False,
    "flip": None,
    "auto": [],
    "test": True,
    "space_settings.partial_channels": 1,
    "method_settings.unsampled": "nothing",
    "architecture.after": 0.0,
    "norms": "shared",
}
"""Settings that old recipes lack, with the values that describe what those runs did."""
_MAPPINGS = ("recipe", "splits", "data", "code")
_ABSENT = object()


@functools.cache
def code_digest() -> str:
    """The first 12 hex digits of the SHA-256 of Softcell's own source files, by name and content."""
    root, total = Path(softcell.__file__).parent, hashlib.sha256()
    # Sorted and by relative names, so that the digest does not depend on the place of installation.
    for file in sorted(root.rglob("*.py")):
        total.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return total.hexdigest()[:12]


def identity_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The identity of the run with this manifest: recipe, seed, kind of run, data and code.

    Without it the weights, generators and schedules of one run would load silently into another of the same shapes:
    with another seed, another learning rate, or on other images.
    """
    data = manifest["results"].get("data")
    return {
        "kind": manifest["kind"],
        "seed": manifest["seed"],
        "recipe": flat({key: value for key, value in manifest["recipe"].items() if key not in _LOCATIONS}),
        "splits": dict(manifest["results"].get("splits", {})),
        "data": dict(data.get("fingerprint", {})) if isinstance(data, Mapping) else {},
        "code": {**versions(), "source": code_digest()},
    }


def check_identity(state: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> list[str]:
    """Raise `UserError` if the checkpoint `state` belongs to another run than `now`; return notes for the user."""
    stored = state.get(IDENTITY)
    if stored is None:
        return [
            f"the checkpoint in {folder} was written by an earlier version of Softcell, which did not store the recipe "
            "and data it belongs to: they are not checked"
        ]
    if not isinstance(stored, Mapping) or not all(isinstance(stored.get(key), Mapping) for key in _MAPPINGS):
        raise UserError(f"the checkpoint in {folder} does not identify its run: the file is damaged; start a new run")
    notes = check_data(stored["data"], now["data"], folder)
    added = {key: value for key, value in _DEFAULTS_OF_OLD_RUNS.items() if key in now["recipe"]}
    recipe = _changes({**added, **stored["recipe"]}, now["recipe"])
    hard = _differences(stored, now, ("kind", "seed"))
    # The seed is a setting too, but is among the differences already.
    hard += [text for key, text in recipe.items() if key.partition(".")[0] not in _ROUNDING | {"seed"}]
    hard = hard or _differences(stored, now, ("splits",))  # which follow from data, recipe and seed
    if hard:
        raise UserError(
            f"a run must be resumed with the recipe, seed and data it began with, but the checkpoint in {folder} "
            f"differs from the run: {_listed(hard)}. Put the original run.json and checkpoint back, or start a new run."
        )
    soft = [text for key, text in recipe.items() if key.partition(".")[0] in _ROUNDING]
    if soft:
        notes.append(f"the run began with other settings ({_listed(soft)}): results may differ in rounding")
    code = _changes(stored["code"], now["code"])
    if code:
        notes.append(f"the run began with another version of the code ({_listed(list(code.values()))}); it continues")
    return notes


def check_data(stored: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> list[str]:
    """Raise `UserError` if the fingerprints of the data differ; different file times are only a note."""
    # Runs of earlier versions have no fingerprint.
    if not stored or not now:
        return []
    changed = [key for key in now if key in stored and stored[key] != now[key]]
    hard = [key for key in changed if not key.endswith("times")]
    if hard:
        raise UserError(
            f"a run must be resumed on the data it began with, but for the run in {folder} these differ: "
            f"{', '.join(key.replace('_', ' ') for key in hard)}. Put the original data back, or start a new run."
        )
    if changed:
        return [
            "the modification times of the image files have changed since the run began; their names, sizes and "
            "sampled contents have not"
        ]
    return []


def replace_recipe(folder: Path, recipe: Mapping[str, Any]) -> None:
    """Make the checkpoint in `folder` belong to another `recipe`: for changes that Softcell itself makes to a run."""
    loaded = load_latest(folder)
    if loaded is not None and IDENTITY in loaded.state:
        kept = {key: value for key, value in recipe.items() if key not in _LOCATIONS}
        save(folder, {**loaded.state, IDENTITY: {**loaded.state[IDENTITY], "recipe": flat(kept)}})


def _differences(stored: Mapping[str, Any], now: Mapping[str, Any], keys: tuple[str, ...]) -> list[str]:
    return [text for key in keys for text in _changes({key: stored.get(key)}, {key: now.get(key)}).values()]


def _changes(stored: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """The differences of two flat mappings, by key, as text."""
    found = {}
    for key in dict.fromkeys((*stored, *now)):
        before, after = stored.get(key, _ABSENT), now.get(key, _ABSENT)
        if before is _ABSENT or after is _ABSENT or before != after:
            shown = ["not set" if value is _ABSENT else repr(value) for value in (before, after)]
            found[key] = f"{key} is {shown[0]} in the checkpoint and {shown[1]} now"
    return found


def _listed(texts: list[str]) -> str:
    return "; ".join(texts[:4]) + (f"; and {len(texts) - 4} more" if len(texts) > 4 else "")
