"""The folder of one run, described by its `run.json`; everything after a run reads it from there."""

import copy
import json
import os
from pathlib import Path
from typing import Any, Literal, Self

from softcell.engine.checksums import DIGEST, check_digest, checksums_of, digest_of, mismatch
from softcell.engine.files import TEMPORARY, atomic_write_text
from softcell.engine.migrate import FORMAT, VERSION, migrate
from softcell.engine.provenance import collect, now
from softcell.errors import UserError

MANIFEST = "run.json"
KINDS = ("search", "train", "teacher")
STATUSES = ("running", "interrupted", "finished", "failed")
# What an overwritten run is cleared of: the kinds of files Softcell writes. Others may be the user's own.
_OWN_SUFFIXES = (".json", ".jsonl", ".bin", ".safetensors", ".svg", TEMPORARY)
_OWN_NAMES = ("report.html",)


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

        With `overwrite`, an earlier run in it loses its files at the top level (those with a suffix of
        `_OWN_SUFFIXES`, and the report); a folder that holds something else than a run is refused still.
        """
        path = Path(path)
        _check(manifest)
        if path.exists() and not path.is_dir():
            raise UserError(f"a run needs a folder, but {path} is a file; give another --out")
        # What a run killed at its birth left half-written is nobody's.
        if path.exists() and any(not entry.name.endswith(TEMPORARY) for entry in path.iterdir()):
            if not overwrite:
                raise UserError(
                    f"a new run needs an empty folder, but {path} holds {len(list(path.iterdir()))} entries. Use "
                    f"--resume to go on with the run in it, or another --out."
                )
            if not (path / MANIFEST).is_file():
                raise UserError(
                    f"only a folder with a {MANIFEST} may be overwritten, but {path} has none: it is not a run. Give "
                    f"another --out."
                )
            _clear(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"a run needs a folder it may write, but {path} cannot be made ({error.strerror or error}); give "
                "another --out"
            ) from error
        folder = cls(path, copy.deepcopy(manifest))
        folder._write()
        return folder

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Read the manifest, brought to the present version in memory; `update` alone changes the file."""
        path = Path(path)
        file = path / MANIFEST
        try:
            manifest = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"a run's folder has a {MANIFEST}, but {path} has none; check the path") from None
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"{file} must be readable JSON, but is not: {error}") from error
        if isinstance(manifest, dict):
            check_digest(manifest, file)
        manifest = migrate(manifest, str(file))
        _check(manifest)
        manifest.setdefault("checksums", {})
        manifest.pop(DIGEST, None)
        return cls(path, manifest)

    @property
    def manifest(self) -> dict[str, Any]:
        """A copy of the manifest."""
        return copy.deepcopy(self._manifest)

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


def _clear(path: Path) -> None:
    for file in path.iterdir():
        own = file.suffix in _OWN_SUFFIXES or file.name in _OWN_NAMES
        if file.is_file() and own and file.name != MANIFEST:
            file.unlink()
