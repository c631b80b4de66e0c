"""The manifest of a run, `run.json`: its fields and their types, versions and hardware, its digest, and reading it."""

from __future__ import annotations

import copy
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch

from softcell import __version__
from softcell.errors import UserError
from softcell.files import Fields, parse_json, parse_yaml, read_text
from softcell.machine import total_memory, usable_cores

FORMAT = "softcell-run"
VERSION = 1
KINDS = ("search", "train", "teacher")
STATUSES = ("running", "interrupted", "finished", "failed")
DIGEST = "digest"


def new_manifest(kind: Literal["search", "train", "teacher"], recipe: dict[str, Any], seed: int) -> dict[str, Any]:
    """The manifest of a run that starts now on this machine, from its resolved recipe.

    Example:
        >>> from softcell.engine import new_manifest
        >>> manifest = new_manifest("search", {"epochs": 5}, seed=1)
        >>> manifest["kind"], manifest["recipe"], manifest["seed"]
        ('search', {'epochs': 5}, 1)
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        "kind": kind,
        "status": "running",
        "recipe": recipe,
        "seed": seed,
        "created": now(),
        "finished": None,
        **collect(),
        "results": {},
        "checksums": {},
    }


def digest_of(manifest: Mapping[str, Any]) -> str:
    """The SHA-256 of a manifest's content except `digest`, independent of the layout of its JSON."""
    content = {key: value for key, value in manifest.items() if key != DIGEST}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def check_digest(manifest: Mapping[str, Any], file: Path) -> None:
    """Raise `UserError` if a manifest was changed after the run had finished; an unfinished run has no digest."""
    if DIGEST in manifest and manifest[DIGEST] != digest_of(manifest):
        raise UserError(
            f"{file} was changed or damaged after the run had finished: it does not match its own digest. Restore it "
            f'from a backup; if you changed it on purpose, remove its "{DIGEST}" line.'
        )


def check_kind_and_status(manifest: dict[str, Any]) -> None:
    for name, allowed in (("kind", KINDS), ("status", STATUSES)):
        if manifest.get(name) not in allowed:
            raise UserError(f"a run's {name} must be one of {', '.join(allowed)}, but got {manifest.get(name)!r}")


def migrate(manifest: dict[str, Any], source: str = "the manifest") -> dict[str, Any]:
    """Return a copy of `manifest` in the form of version `VERSION`, the only one so far."""
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f'{source} must be a run\'s manifest with "format": "{FORMAT}", but is not; check the path')
    version = manifest.get("version")
    if type(version) is not int or version < 1:
        raise UserError(f'{source} must have a whole number above 0 as "version", but got {version!r}')
    if version > VERSION:
        raise UserError(
            f"{source} must be of version {VERSION} or older, but is of version {version}. Use the newer Softcell that "
            f"wrote it."
        )
    manifest = copy.deepcopy(manifest)
    recipe = manifest.get("recipe")
    if isinstance(recipe, dict) and recipe.get("engine") == "compile":
        recipe["engine"] = "auto"  # an engine of earlier versions: results differ only by rounding
    return manifest


Test = tuple[Callable[[Any], bool], str]
_ABSENT = object()


def _is_whole(value: Any) -> bool:
    # The exact type, since `true` is an int by inheritance.
    return type(value) is int and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _all(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(test, value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _or_none(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or test(value)


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(type(n) is int and 0 < n < 2**20 for n in value)


MAPPING: Test = (lambda value: isinstance(value, Mapping), "a mapping")
TEXT: Test = (_is_text, "text")
WHOLE: Test = (_is_whole, "a whole number of 0 or more")
NUMBER: Test = (_or_none(_is_number), "a finite number, or null")
TEXTS: Test = (_all(_is_text), "a list of texts")
NUMBERS: Test = (_all(_is_number), "a list of numbers")
TYPES: dict[str, Test] = {
    "recipe": MAPPING,
    "results": MAPPING,
    "checksums": MAPPING,
    "seed": WHOLE,
    "recipe.method": TEXT,
    "recipe.space": TEXT,
    "recipe.data": TEXT,
    "recipe.data_root": (_or_none(_is_text), "text, or null"),
    "recipe.recipe": TEXT,
    "recipe.task": TEXT,
    "recipe.classifier": TEXT,
    "recipe.epochs": WHOLE,
    "recipe.time": NUMBER,
    "recipe.space_settings": MAPPING,
    "recipe.method_settings": MAPPING,
    "recipe.classifier_settings": MAPPING,
    "recipe.resource": MAPPING,
    "recipe.plugins": TEXTS,
    "results.splits": MAPPING,
    "results.genotype": MAPPING,
    "results.guide": MAPPING,
    "results.guide.digest": TEXT,
    "results.parameters": WHOLE,
    "results.multiply_adds": WHOLE,
    "results.count": WHOLE,
    "results.split": TEXT,
    "results.accuracy": NUMBER,
    "results.loss": NUMBER,
    "results.val_accuracy": NUMBER,
    "results.time_used": NUMBER,
    "results.recall_at_1": NUMBER,
    "results.recall_at_2": NUMBER,
    "results.recall_at_4": NUMBER,
    "results.recall_at_8": NUMBER,
    "results.data": MAPPING,
    "results.data.shape": (_is_shape, "three whole numbers above 0"),
    "results.data.classes": TEXTS,
    "results.data.num_classes": WHOLE,
    "results.data.outputs": WHOLE,
    "results.data.mean": NUMBERS,
    "results.data.std": NUMBERS,
    "results.data.source": TEXT,
    "results.data.fingerprint": MAPPING,
    "results.data.scaled_to": (lambda value: _is_shape([1, *value]) if isinstance(value, list) else False, "two sizes"),
    "results.data.whole": (lambda value: isinstance(value, bool), "true or false"),
}


def check_types(manifest: Mapping[str, Any], where: str, types: Mapping[str, Test] | None = None) -> None:
    """Raise `UserError` if a field of `manifest` is present and has a wrong type."""
    for name, (test, kind) in (TYPES if types is None else types).items():
        value: Any = manifest
        for part in name.split("."):
            value = value.get(part, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        if value is not _ABSENT and not test(value):
            raise UserError(f"{where}: `{name}` must be {kind}, got {value!r:.80}; the file is damaged")


def read_config(path: str | Path) -> dict[str, Any]:
    """Settings from a YAML or JSON file, or the recipe inside a `run.json`.

    Example:
        >>> from pathlib import Path
        >>> from softcell.search import read_config
        >>> _ = Path("recipe.yaml").write_text("{method: snas, epochs: 2}")
        >>> read_config("recipe.yaml")
        {'method': 'snas', 'epochs': 2}
    """
    data = read_mapping(path)
    return stored_fields(data, path)["recipe"] if data.get("format") == FORMAT else data


def stored_fields(data: dict[str, Any], path: str | Path) -> Fields:
    """The manifest in `data`, migrated to the current version and checked for wrong types."""
    manifest = migrate(data, str(path))
    check_types(manifest, str(path))
    return Fields.of(manifest, str(path))


def read_mapping(
    path: str | Path, *, option: str = "--config", holds: str = "a recipe must be a mapping of settings"
) -> dict[str, Any]:
    """The content of a YAML or JSON file, or of the `run.json` of a folder; `option` and `holds` are for errors."""
    file = Path(path)
    if file.is_dir():
        file = file / "run.json"
    try:
        text = read_text(file)
    except (FileNotFoundError, UserError) as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise UserError(f"{option} must name a YAML or JSON file that can be read, got {path} ({why})") from error
    data = parse_json(text, str(file)) if file.suffix == ".json" else parse_yaml(text, str(file))
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise UserError(f"{file}: {holds}, got {type(data).__name__}")
    if Path(path).is_dir() and data.get("format") == FORMAT:
        check_digest(data, file)
    return data


def now() -> str:
    """Return the time in UTC, as ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str | None]:
    """Return the versions of Python, torch, numpy and Softcell."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # the build too, which the installed version may leave out
        "numpy": _installed("numpy"),
        "softcell": __version__,  # of the code that runs, installed or not
    }


def hardware() -> dict[str, Any]:
    """Return the CPU's name, the cores this process may use, the bytes of memory, the CUDA devices' names."""
    return {"cpu": _cpu_name(), "cores": usable_cores(), "memory": total_memory(), "gpus": _gpus()}


def commit(folder: str | os.PathLike[str] = ".") -> dict[str, Any] | None:
    """Return `{"commit": hash, "dirty": bool}` of the git checkout around `folder`, or None without one."""
    head = _git(["rev-parse", "HEAD"], folder)
    if head is None:
        return None
    changes = _git(["status", "--porcelain", "--untracked-files=no"], folder)
    return {"commit": head.strip(), "dirty": None if changes is None else bool(changes.strip())}


def collect() -> dict[str, Any]:
    """Versions, hardware, command line, commit and number of threads, as fields of a manifest; None if unknown."""
    return {
        "versions": versions(),
        "hardware": hardware(),
        "command": list(sys.argv),
        "git": commit(),
        "threads": torch.get_num_threads(),
    }


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine() or None


def _gpus() -> list[str]:
    if not torch.cuda.is_available():
        return []
    try:
        return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError):
        return []  # a driver that is present but broken


def _git(arguments: list[str], folder: str | os.PathLike[str]) -> str | None:
    try:
        answer = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return answer.stdout
