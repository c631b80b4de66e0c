"""Runs a task in a run folder whose `run.json` says at any time how it stands."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from softcell.engine import checkpoint
from softcell.engine.distributed import World, on_main
from softcell.engine.events import Note, OnEvent
from softcell.engine.files import atomic_write_text
from softcell.engine.identity import check_data, identity_of
from softcell.engine.lanes import Running
from softcell.engine.lock import free_reserve
from softcell.engine.loop import Outcome, running
from softcell.engine.runfolder import RunFolder
from softcell.engine.task import Task
from softcell.errors import UserError


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
) -> Running[tuple[RunFolder, Outcome]]:
    """Makes (or reopens) the folder, runs `task` in it and records a failure or an interruption.

    manifest: makes that of a new run. files: texts by name that the folder must hold before the first step. made: the
    folder of a new run is there already.
    """

    def prepare() -> tuple[RunFolder, dict[str, Any]]:
        fresh = manifest()
        if not (resume or made):
            return RunFolder.create(out, fresh, overwrite), identity_of(fresh)
        opened = RunFolder.open(out)
        if not checkpoint.exists(out):  # otherwise that says what the run began with
            check_data(identity_of(opened.manifest)["data"], identity_of(fresh)["data"], out)
        opened.update(status="running")
        return opened, identity_of(fresh)

    folder, identity = on_main(prepare, world)
    for name, text in files.items():
        on_main(lambda name=name, text=text: atomic_write_text(out / name, text), world)  # type: ignore[misc]
    try:
        outcome = yield from running(task, out, world, resume=resume, on_event=on_event, identity=identity)
    except Exception:
        record_failure(folder, world)
        raise
    if outcome.status == "interrupted":
        on_main(lambda: folder.finish("interrupted"), world)
    return folder, outcome


def record_failure(folder: RunFolder, world: World) -> None:
    """Notes in the manifest that the run failed, without the other ranks: it may be one alone that did.

    On a full disk the space that the lock keeps is used for it. What went wrong at first is what matters to the user,
    so that a manifest which still cannot be written is no second error.
    """
    if world.is_main:
        free_reserve(folder.path)
        with suppress(UserError, OSError):
            folder.finish("failed")


@contextmanager
def failure_recorded(folder: RunFolder, world: World) -> Iterator[None]:
    """Around what a run does after its last epoch, which may fail too."""
    try:
        yield
    except Exception:
        record_failure(folder, world)
        raise


def notifier(on_event: OnEvent | None, world: World) -> Callable[[str], None]:
    """Passes a text on as a `Note`, from the process that speaks."""

    def notify(text: str) -> None:
        if on_event is not None and world.is_main:
            on_event(Note(text))

    return notify
