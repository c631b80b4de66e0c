"""The folder of a run: its `run.json`, its files and their checksums, and running a task in it (`run_in_folder`)."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, Self

from softcell.engine import checkpoint
from softcell.engine.checkpoint import check_data, identity_of
from softcell.engine.distributed import World, broadcast_object, on_main, remember_folder
from softcell.engine.interleave import Running
from softcell.engine.lock import LOCK, free_reserve
from softcell.engine.loop import Outcome, steps_of
from softcell.engine.manifest import (
    DIGEST,
    check_digest,
    check_kind_and_status,
    check_types,
    digest_of,
    migrate,
    now,
)
from softcell.engine.task import Note, OnEvent, Task
from softcell.engine.timing import TimeBudget
from softcell.errors import UserError
from softcell.files import (
    FILE_LIST,
    HEADING,
    TEMPORARY,
    Fields,
    atomic_write_text,
    listed_files,
    make_folder,
    read_json,
)

MANIFEST = "run.json"
SEEDS = "seeds.json"
"""In the folder of several seeds: what each of them reached (`softcell.seeds`)."""
_OWN_SUFFIXES = (".json", ".jsonl", ".bin", ".safetensors", ".svg", ".png", ".html", ".txt")
"""Suffixes of the files that Softcell writes. A list that names others was not written by Softcell."""
_FILES_OF_OLD_RUNS = [
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
"""Files of runs of earlier versions, which kept no list."""
_SUBFOLDERS = ("phase-1", "random-*", "tensorboard", "wandb", "export")
"""Folders inside a run; those that are runs have their own lists."""
_CHECKED_NAMES = ("genotype.json",)
_CHECKED_SUFFIXES = (".jsonl", ".safetensors")
_BLOCK = 1 << 20


class RunFolder:
    """A folder with a manifest; made by `create` or `open`.

    Example:
        >>> from softcell.engine import RunFolder
        >>> folder = RunFolder.open("runs/train")
        >>> folder.manifest["kind"], folder.manifest["status"]
        ('train', 'finished')
    """

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self._manifest = manifest

    @classmethod
    def create(cls, path: str | os.PathLike[str], manifest: dict[str, Any], overwrite: bool = False) -> Self:
        """Make the folder with `manifest` as its `run.json`; a folder that is not empty is rejected.

        With `overwrite`, the files of an earlier run in it are deleted (`clear`) and other files stay; a folder that
        is not a run is still rejected.
        """
        path = Path(path)
        check_kind_and_status(manifest)
        there = entries(path)
        if there:
            if not overwrite:
                raise UserError(
                    f"a new run needs an empty folder, but {path} holds {len(there)} entries. Use "
                    f"--resume to continue the run in it, or another --out."
                )
            clear(path)
        make_folder(path, "a run")
        folder = cls(path, copy.deepcopy(manifest))
        # Before all other files, which are listed only in a folder that has a list (`list_file`).
        atomic_write_text(path / FILE_LIST, f"{HEADING}\n{FILE_LIST}\n")
        folder._write()
        remember_folder(path)
        return folder

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, lenient: bool = False) -> Self:
        """Read the manifest, converted to the current version in memory; only `update` changes the file.

        lenient: accept fields of wrong types, for readers that show what is available.
        """
        path = Path(path)
        file = path / MANIFEST
        try:
            manifest = read_json(file)
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"a run folder must have a {MANIFEST}, but {path} has none; check the path") from None
        except UserError as error:
            raise UserError(f"{error}; restore the file from a backup, or remove the folder") from error
        if isinstance(manifest, dict):
            check_digest(manifest, file)
        manifest = migrate(manifest, str(file))
        check_kind_and_status(manifest)
        if not lenient:
            check_types(manifest, str(file))
        if not isinstance(manifest.get("checksums"), dict):
            manifest["checksums"] = {}
        manifest.pop(DIGEST, None)
        return cls(path, manifest)

    @property
    def manifest(self) -> dict[str, Any]:
        """A copy of the manifest; reading a missing field raises `UserError`."""
        return Fields.of(copy.deepcopy(self._manifest), str(self.path / MANIFEST))

    def update(self, **fields: Any) -> None:
        """Replace top-level fields of the manifest in memory and, in one step, on the disk."""
        unknown = sorted(fields.keys() - self._manifest.keys())
        if unknown:
            raise UserError(f"only fields of a manifest can be updated, but got {', '.join(unknown)}")
        changed = {**self._manifest, **copy.deepcopy(fields)}
        if changed["status"] != "finished":
            changed["checksums"] = {}  # the files of an unfinished run still change
        check_kind_and_status(changed)
        self._manifest = changed
        self._write()

    def finish(self, status: Literal["interrupted", "finished", "failed"], **results: Any) -> None:
        """Record how and when the run ended, and add to its results.

        For a finished run the checksums of its files are recorded too, so all must be written by now.
        """
        sums = _checksums_of(self.path) if status == "finished" else {}
        self.update(status=status, finished=now(), results={**self._manifest["results"], **results}, checksums=sums)

    def verify(self, *names: str) -> None:
        """Raise `UserError` if one of these files was changed after the run had finished."""
        for name in names:
            if (found := mismatch(self.path, self._manifest.get("checksums", {}), name)) is not None:
                raise UserError(found)

    def _write(self) -> None:
        manifest = self._manifest
        if manifest["status"] == "finished":
            # The digest of what a reader will find: JSON turns tuples into lists and all keys into text.
            manifest = {**manifest, DIGEST: digest_of(json.loads(json.dumps(manifest, allow_nan=False)))}
        text = json.dumps(manifest, indent=2, ensure_ascii=False, allow_nan=False)
        atomic_write_text(self.path / MANIFEST, text + "\n")


def entries(path: Path) -> list[Path]:
    """The entries of a folder, except its lock and temporary files that a killed run left behind."""
    if not path.is_dir():
        return []
    # A file of this name without our heading belongs to another program and counts as an entry.
    own_list = FILE_LIST if listed_files(path) else LOCK
    return sorted(e for e in path.iterdir() if e.name not in (LOCK, own_list) and not _is_temporary(e))


def _is_temporary(entry: Path) -> bool:
    return entry.name.startswith(".") and entry.name.endswith(TEMPORARY)


def clear(path: Path) -> None:
    """Delete the files of an earlier run, except its `run.json`, which is replaced; warn about files that stay.

    Its files are those in its list; for a run of an earlier version, those with known names. A folder that Softcell did
    not create is rejected.
    """
    _check_own(path)
    listed = listed_files(path)
    if checkpoint.CURRENT in listed:
        listed.add(checkpoint.PREVIOUS)  # which is never written under its own name, only renamed
    for file in entries(path):
        known = file.name in listed if listed else any(file.match(pattern) for pattern in _FILES_OF_OLD_RUNS)
        if known and file.name != MANIFEST and file.suffix in _OWN_SUFFIXES and (file.is_file() or file.is_symlink()):
            file.unlink()
    for entry in path.iterdir():
        if _is_temporary(entry) and entry.is_file():
            entry.unlink()
    left = [e.name for e in entries(path) if e.name != MANIFEST and not any(e.match(part) for part in _SUBFOLDERS)]
    if left:
        named = ", ".join(left[:8]) + (f" and {len(left) - 8} more" if len(left) > 8 else "")
        warnings.warn(
            f"{path} is overwritten; these entries do not belong to the run and are kept: {named}", stacklevel=3
        )


def _check_own(path: Path) -> None:
    """Raise unless Softcell created the folder: it has the file list of a run, or a readable `run.json`.

    A part of a run that is a link leads to another run, which must not be overwritten.
    """
    if path.is_symlink() and (path.parent / MANIFEST).is_file():
        raise UserError(
            f"{path} is part of a run, but is a link to {path.resolve()}, which is not overwritten; remove the link"
        )
    if not (path / MANIFEST).is_file():
        raise UserError(
            f"only a folder with a {MANIFEST} may be overwritten, but {path} has none: it is not a run. Choose another "
            "--out."
        )
    if MANIFEST in listed_files(path):
        return
    try:
        migrate(json.loads((path / MANIFEST).read_text(encoding="utf-8")), str(path / MANIFEST))
    except (OSError, ValueError, RecursionError) as error:  # a UserError is a ValueError
        raise UserError(
            f"only a folder that Softcell created may be overwritten, but {path / MANIFEST} does not describe a run "
            f"({error}). Choose another --out, or remove the folder yourself."
        ) from error


RUNS = Path("runs")
"""The default location of runs."""


def free_folder(*parts: str) -> Path:
    """`runs/<parts>-<n>` with the first n that is free.

    Example:
        >>> from softcell.engine.runfolder import free_folder
        >>> free_folder("darts", "nb201", "my photos").as_posix()
        'runs/darts-nb201-my-photos-1'
    """
    stem = "-".join(re.sub(r"[^\w.]+", "-", Path(part).name).strip("-.") or "data" for part in parts)
    return next(folder for n in itertools.count(1) if not (folder := RUNS / f"{stem}-{n}").exists())


def output_folder(out: str | Path | None, world: World, *parts: str) -> Path:
    """`out`; if None, a free folder named by `parts`, the same one on all ranks."""
    return Path(out) if out is not None else broadcast_object(free_folder(*parts), world)


def checksum(file: Path) -> str:
    """The SHA-256 of a file's content, in hex."""
    total = hashlib.sha256()
    with open(file, "rb") as stream:
        while block := stream.read(_BLOCK):
            total.update(block)
    return total.hexdigest()


def _checksums_of(folder: Path) -> dict[str, str]:
    """The checksums of the results in a run's folder, by file name.

    They are recorded in `run.json` and verified wherever a file is read: a flipped bit in trained weights, or another
    architecture in `genotype.json`, would otherwise pass for the run's result. Checkpoints have their own
    checksums. Runs of earlier versions have no checksums and are not verified.
    """
    results = (file for file in folder.iterdir() if file.name in _CHECKED_NAMES or file.suffix in _CHECKED_SUFFIXES)
    return {file.name: checksum(file) for file in sorted(results) if file.is_file()}


def mismatch(folder: Path, known: Mapping[str, Any], name: str) -> str | None:
    """An error message if `name` in `folder` does not match its checksum in `known`; None otherwise.

    A missing file, or one without a checksum, is not an error here: its reader decides.
    """
    wanted, file = known.get(name), folder / name
    if wanted is None or not file.is_file() or checksum(file) == wanted:
        return None
    copied = (
        "to use your own version of it, copy it out of the run folder and pass that file"
        if name in _CHECKED_NAMES
        else "restore it from a backup, or repeat the run"
    )
    return f"{file} was changed after the run had finished: its SHA-256 differs from the one in run.json; {copied}."


def run_in_folder(
    task: Task,
    out: Path,
    world: World,
    manifest: Callable[[], dict[str, Any]],
    *,
    files: Mapping[str, str],
    resume: bool,
    overwrite: bool,
    on_event: OnEvent | None,
    made: bool = False,
    budget: TimeBudget | None = None,
) -> Running[tuple[RunFolder, Outcome]]:
    """Creates or reopens the folder, runs `task` in it, and records a failure or an interruption.

    manifest: creates the manifest of a new run. files: texts by file name, written before the first step. made: the
    folder of a new run exists already. budget: ends the run when its time is up.
    """

    def prepare() -> tuple[RunFolder, dict[str, Any]]:
        fresh = manifest()
        if not (resume or made):
            return RunFolder.create(out, fresh, overwrite), identity_of(fresh)
        opened = RunFolder.open(out)
        if not checkpoint.exists(out):  # a checkpoint is compared by the loop
            check_data(identity_of(opened.manifest)["data"], identity_of(fresh)["data"], out)
        opened.update(status="running")
        return opened, identity_of(fresh)

    folder, identity = on_main(prepare, world)
    for name, text in files.items():
        on_main(lambda name=name, text=text: atomic_write_text(out / name, text), world)  # type: ignore[misc]
    try:
        steps = steps_of(task, out, world, resume=resume, on_event=on_event, identity=identity, budget=budget)
        outcome: Outcome = yield steps
    except Exception:
        record_failure(folder, world)
        raise
    if outcome.status == "interrupted":
        on_main(lambda: folder.finish("interrupted"), world)
    return folder, outcome


def record_failure(folder: RunFolder, world: World) -> None:
    """Record in the manifest that the run failed, without the other ranks: only one may have failed.

    On a full disk the space that the lock reserves is used. If the manifest still cannot be written, that is ignored:
    the first error is the one that matters.
    """
    if world.is_main:
        free_reserve(folder.path)
        with suppress(UserError, OSError):
            folder.finish("failed")


@contextmanager
def failure_recorded(folder: RunFolder, world: World) -> Iterator[None]:
    """Record a failure of what a run does after its last epoch."""
    try:
        yield
    except Exception:
        record_failure(folder, world)
        raise


def notifier(on_event: OnEvent | None, world: World) -> Callable[[str], None]:
    """A `notify` that sends each text as a `Note` event, on rank 0 only."""

    def notify(text: str) -> None:
        if on_event is not None and world.is_main:
            on_event(Note(text))

    return notify
