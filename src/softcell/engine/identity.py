"""What a checkpoint belongs to: recipe, seed, kind of run, data and code. Resuming compares it with the run at hand.

Weights, generators and schedules of one run would load into another one of the same shapes without any complaint: of
another seed, of another learning rate, on other images. So a checkpoint carries its identity.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import softcell
from softcell.engine import checkpoint
from softcell.engine.provenance import versions
from softcell.errors import UserError
from softcell.settings import flat

KEY = "identity"
_PLACES = {"data", "data_root", "plugins"}
"""Settings that say where files lie. They may be moved: their contents are compared instead."""
_ROUNDING = {"device", "threads", "precision", "engine", "fused", "deterministic"}
"""Settings that change results by rounding alone: a difference is a note."""
_ADDED: dict[str, Any] = {
    "select.by": "method",
    "select.measure": "accuracy",
    "select.epochs": 5,
    "select.images": 0,
    "select.lr": None,
    "select.norms": "batch",
}
"""Settings that recipes did not have at first, with the values that mean what was done then."""
_MAPPINGS = ("recipe", "splits", "data", "code")
_ABSENT = object()


@functools.cache
def code_digest() -> str:
    """The first 12 hex digits of the SHA-256 of Softcell's own source files, by name and content."""
    root, total = Path(softcell.__file__).parent, hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        total.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return total.hexdigest()[:12]


def identity_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint of the run with this manifest carries."""
    data = manifest["results"].get("data")
    return {
        "kind": manifest["kind"],
        "seed": manifest["seed"],
        "recipe": flat({key: value for key, value in manifest["recipe"].items() if key not in _PLACES}),
        "splits": dict(manifest["results"].get("splits", {})),
        "data": dict(data.get("fingerprint", {})) if isinstance(data, Mapping) else {},
        "code": {**versions(), "source": code_digest()},
    }


def check_identity(state: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> list[str]:
    """Raises `UserError` where the checkpoint `state` is not of the run `now`; returns what is worth a note."""
    stored = state.get(KEY)
    if stored is None:
        return [
            f"the checkpoint in {folder} was written by an earlier version of Softcell and does not say which recipe "
            "and data it belongs to: this is not checked"
        ]
    if not isinstance(stored, Mapping) or not all(isinstance(stored.get(key), Mapping) for key in _MAPPINGS):
        raise UserError(f"the checkpoint in {folder} says nothing readable of the run it belongs to; start a new run")
    notes = check_data(stored["data"], now["data"], folder)
    added = {key: value for key, value in _ADDED.items() if key in now["recipe"]}
    recipe = _changes({**added, **stored["recipe"]}, now["recipe"])
    hard = _differences(stored, now, ("kind", "seed"))
    hard += [text for key, text in recipe.items() if key.partition(".")[0] not in _ROUNDING | {"seed"}]
    hard = hard or _differences(stored, now, ("splits",))  # which follow from data, recipe and seed
    if hard:
        raise UserError(
            f"a run is resumed with the recipe, seed and data it began with, but the checkpoint in {folder} differs "
            f"from the run: {_listed(hard)}. Put the original run.json and checkpoint back, or start a new run."
        )
    soft = [text for key, text in recipe.items() if key.partition(".")[0] in _ROUNDING]
    if soft:
        notes.append(f"the run began with other settings ({_listed(soft)}): results may differ in rounding")
    code = _changes(stored["code"], now["code"])
    if code:
        notes.append(f"the run began with another version of the code ({_listed(list(code.values()))}); it continues")
    return notes


def check_data(stored: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> list[str]:
    """Raises `UserError` where fingerprints of data differ in content; other file times are a note."""
    if not stored or not now:
        return []
    changed = [key for key in now if key in stored and stored[key] != now[key]]
    hard = [key for key in changed if not key.endswith("times")]
    if hard:
        raise UserError(
            f"a run is resumed on the data it began with, but for the run in {folder} these differ: "
            f"{', '.join(key.replace('_', ' ') for key in hard)}. Put the original data back, or start a new run."
        )
    if changed:
        return [
            "the image files have other modification times than when the run began; their names, sizes and sampled "
            "contents are the same"
        ]
    return []


def amend(folder: Path, recipe: Mapping[str, Any]) -> None:
    """Lets the checkpoint in `folder` belong to another `recipe`: for changes that Softcell itself makes to a run."""
    loaded = checkpoint.load_latest(folder)
    if loaded is not None and KEY in loaded.state:
        kept = {key: value for key, value in recipe.items() if key not in _PLACES}
        checkpoint.save(folder, {**loaded.state, KEY: {**loaded.state[KEY], "recipe": flat(kept)}})


def _differences(stored: Mapping[str, Any], now: Mapping[str, Any], keys: tuple[str, ...]) -> list[str]:
    return [text for key in keys for text in _changes({key: stored.get(key)}, {key: now.get(key)}).values()]


def _changes(stored: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """By key how two flat mappings differ, in words."""
    found = {}
    for key in dict.fromkeys((*stored, *now)):
        before, after = stored.get(key, _ABSENT), now.get(key, _ABSENT)
        if before is _ABSENT or after is _ABSENT or before != after:
            shown = ["not set" if value is _ABSENT else repr(value) for value in (before, after)]
            found[key] = f"{key} is {shown[0]} in the checkpoint and {shown[1]} now"
    return found


def _listed(texts: list[str]) -> str:
    return "; ".join(texts[:4]) + (f"; and {len(texts) - 4} more" if len(texts) > 4 else "")
