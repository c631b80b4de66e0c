"""The folder of one run, described by its `run.json`; everything after a run reads it from there."""

import copy
import json
import os
import warnings
from pathlib import Path
from typing import Any, Literal, Self

from softcell.engine.checksums import DIGEST, check_digest, checksums_of, digest_of, mismatch
from softcell.engine.files import HEADING, LISTED, TEMPORARY, atomic_write_text, made_in
from softcell.engine.lock import LOCK
from softcell.engine.migrate import FORMAT, VERSION, migrate
from softcell.engine.provenance import collect, now
from softcell.engine.schema import check_types
from softcell.errors import UserError
from softcell.reading import Fields, read_json

MANIFEST = "run.json"
KINDS = ("search", "train", "teacher")
STATUSES = ("running", "interrupted", "finished", "failed")
_KINDS_OF_FILES = (".json", ".jsonl", ".bin", ".safetensors", ".svg", ".png", ".html", ".txt")
"""What Softcell writes. A list that names anything else was not written by it."""
_KNOWN = [
    "genotype.json",
    "genotype.svg",
    "metrics.jsonl",
    "architecture.jsonl",
    "credit.jsonl",
    "checkpoint.bin",
    "checkpoint.prev.bin",
    "model.safetensors",
    "logits.safetensors",
    "predictions.safetensors",
    "reconstructions.png",
    "curves.svg",
    "loss.svg",
    "entropy.svg",
    "temperature.svg",
    "cost.svg",
    "architecture-*.svg",
    "entropy-*.svg",
    "indicators.json",
    "report.html",
]
"""What runs of earlier versions, which kept no list, are known to have written."""
_PARTS = ("phase-1", "random-*", "tensorboard", "export")
"""Folders inside a run; those that are runs have lists of their own."""


def new_manifest(kind: Literal["search", "train", "teacher"], recipe: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the manifest of a run that starts now on this machine, from its resolved recipe."""
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


class RunFolder:
    """A folder with a manifest; made by `create` or `open`."""

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self._manifest = manifest

    @classmethod
    def create(cls, path: str | os.PathLike[str], manifest: dict[str, Any], overwrite: bool = False) -> Self:
        """Make the folder with `manifest` as its `run.json`; a folder that holds anything is refused.

        With `overwrite`, an earlier run in it loses the files that it is known to have made (`clear`); whatever else is
        there stays, and a folder that holds something else than a run is refused still.
        """
        path = Path(path)
        _check(manifest)
        if path.exists() and not path.is_dir():
            raise UserError(f"a run needs a folder, but {path} is a file; give another --out")
        there = entries(path)
        if there:
            if not overwrite:
                raise UserError(
                    f"a new run needs an empty folder, but {path} holds {len(there)} entries. Use "
                    f"--resume to go on with the run in it, or another --out."
                )
            clear(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"a run needs a folder it may write, but {path} cannot be made ({error.strerror or error}); give "
                "another --out"
            ) from error
        folder = cls(path, copy.deepcopy(manifest))
        atomic_write_text(path / LISTED, f"{HEADING}\n{LISTED}\n")
        folder._write()
        return folder

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, lenient: bool = False) -> Self:
        """Read the manifest, brought to the present version in memory; `update` alone changes the file.

        lenient: fields of wrong types are let through, for readers that show whatever there is.
        """
        path = Path(path)
        file = path / MANIFEST
        try:
            manifest = read_json(file)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"a run's folder has a {MANIFEST}, but {path} has none; check the path") from None
        except UserError as error:
            raise UserError(f"{file} must be readable JSON, but is not: {error}") from error
        if isinstance(manifest, dict):
            check_digest(manifest, file)
        manifest = migrate(manifest, str(file))
        _check(manifest)
        if not lenient:
            check_types(manifest, str(file))
        if not isinstance(manifest.get("checksums"), dict):
            manifest["checksums"] = {}
        manifest.pop(DIGEST, None)
        return cls(path, manifest)

    @property
    def manifest(self) -> dict[str, Any]:
        """A copy of the manifest; a field that is asked for and missing is a `UserError`."""
        return Fields.of(copy.deepcopy(self._manifest), str(self.path / MANIFEST))

    def update(self, **fields: Any) -> None:
        """Replace top-level fields of the manifest in memory and, in one step, on the disk."""
        unknown = sorted(fields.keys() - self._manifest.keys())
        if unknown:
            raise UserError(f"update changes fields that a manifest has, but got {', '.join(unknown)}")
        changed = {**self._manifest, **copy.deepcopy(fields)}
        if changed["status"] != "finished":
            changed["checksums"] = {}  # the files of a run that continues change
        _check(changed)
        self._manifest = changed
        self._write()

    def finish(self, status: Literal["interrupted", "finished", "failed"], **results: Any) -> None:
        """Record how the run ended, when, and what came out (added to the results so far).

        Of a finished run also the checksums of its files, which must all be written by now.
        """
        sums = checksums_of(self.path) if status == "finished" else {}
        self.update(status=status, finished=now(), results={**self._manifest["results"], **results}, checksums=sums)

    def verify(self, *names: str) -> None:
        """Raise `UserError` where one of these files was changed after the run had finished."""
        for name in names:
            if (found := mismatch(self.path, self._manifest.get("checksums", {}), name)) is not None:
                raise UserError(found)

    def _write(self) -> None:
        manifest = self._manifest
        if manifest["status"] == "finished":
            # Of what a reader will find: JSON turns tuples into lists and all keys into text.
            manifest = {**manifest, DIGEST: digest_of(json.loads(json.dumps(manifest, allow_nan=False)))}
        text = json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False)
        atomic_write_text(self.path / MANIFEST, text + "\n")


def _check(manifest: dict[str, Any]) -> None:
    for name, allowed in (("kind", KINDS), ("status", STATUSES)):
        if manifest.get(name) not in allowed:
            raise UserError(f"a run's {name} must be one of {', '.join(allowed)}, but got {manifest.get(name)!r}")


def entries(path: Path) -> list[Path]:
    """What lies in a folder, apart from its lock and from what a run that was killed at its birth left half-written."""
    if not path.is_dir():
        return []
    own_list = LISTED if made_in(path) else LOCK
    return sorted(e for e in path.iterdir() if e.name not in (LOCK, own_list) and not _is_temporary(e))


def _is_temporary(entry: Path) -> bool:
    return entry.name.startswith(".") and entry.name.endswith(TEMPORARY)


def clear(path: Path) -> None:
    """Deletes the files of an earlier run, apart from its `run.json`, which is replaced; what else is there is named.

    Those are the files in its list, or, of a run of an earlier version, files with the names that it gave. A folder
    that Softcell did not make is refused.
    """
    _check_own(path)
    listed = made_in(path)
    for file in entries(path):
        known = file.name in listed if listed else any(file.match(pattern) for pattern in _KNOWN)
        if known and file.name != MANIFEST and file.suffix in _KINDS_OF_FILES and (file.is_file() or file.is_symlink()):
            file.unlink()
    for entry in path.iterdir():
        if _is_temporary(entry) and entry.is_file():
            entry.unlink()
    left = [e.name for e in entries(path) if e.name != MANIFEST and not any(e.match(part) for part in _PARTS)]
    if left:
        named = ", ".join(left[:8]) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
        warnings.warn(f"{path} is overwritten; not made by the run, and left alone: {named}", stacklevel=3)


def _check_own(path: Path) -> None:
    """Raises unless a folder was made by Softcell: it has the list of a run, or a readable `run.json`.

    Parts of a run lie inside it: one that is a link leads to another run, which nobody has asked to overwrite.
    """
    if path.is_symlink() and (path.parent / MANIFEST).is_file():
        raise UserError(
            f"{path} is a part of a run, but leads to {path.resolve()}, which is left alone; remove the link"
        )
    if not (path / MANIFEST).is_file():
        raise UserError(
            f"only a folder with a {MANIFEST} may be overwritten, but {path} has none: it is not a run. Give another "
            "--out."
        )
    if MANIFEST in made_in(path):
        return
    try:
        migrate(json.loads((path / MANIFEST).read_text(encoding="utf-8")), str(path / MANIFEST))
    except (OSError, ValueError, RecursionError) as error:  # a UserError is a ValueError
        raise UserError(
            f"only a folder that Softcell made may be overwritten, but {path / MANIFEST} is not that of a run "
            f"({error}). Give another --out, or remove the folder yourself."
        ) from error
