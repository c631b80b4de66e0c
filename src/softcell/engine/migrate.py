"""Brings manifests of older versions to the present one, one version at a time."""

import copy
from collections.abc import Callable
from typing import Any

from softcell.errors import UserError

FORMAT = "softcell-run"
VERSION = 1


def _from_0(old: dict[str, Any]) -> dict[str, Any]:
    """Version 0 had dotted names for the recipe, a field per version, and "done" for "finished"."""
    new = {name: value for name, value in old.items() if not name.startswith(("recipe.", "version_of_"))}
    new["recipe"] = {}
    for name, value in old.items():
        if name.startswith("recipe."):
            *parents, last = name.split(".")[1:]
            place = new["recipe"]
            for parent in parents:
                place = place.setdefault(parent, {})
                if not isinstance(place, dict):
                    raise UserError(f"the manifest has both `{name}` and a value in its place; it is damaged")
            place[last] = value
    new["versions"] = {name: old.get(f"version_of_{name}") for name in ("python", "torch", "numpy", "softcell")}
    new["status"] = "finished" if old.get("status") == "done" else old.get("status")
    for name in ("hardware", "command", "git", "threads", "created", "finished"):
        new.setdefault(name, None)
    new.setdefault("results", {})
    return new


_STEPS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {0: _from_0}


def migrate(manifest: dict[str, Any], source: str = "the manifest") -> dict[str, Any]:
    """Return `manifest` in the form of version `VERSION`; the argument is left as it is."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f'{source} must be a run\'s manifest with "format": "{FORMAT}", but is not; check the path')
    version = manifest.get("version")
    if type(version) is not int or version < 0:
        raise UserError(f'{source} must have a whole number as "version", but got {version!r}')
    if version > VERSION:
        raise UserError(
            f"{source} must be of version {VERSION} or older, but is of version {version}. Use the newer Softcell that "
            f"wrote it."
        )
    manifest = copy.deepcopy(manifest)
    while manifest["version"] < VERSION:
        version = manifest["version"]
        manifest = {**_STEPS[version](manifest), "version": version + 1}
    return manifest
