"""Runs a task in a run folder whose `run.json` says at any time how it stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from softcell.engine import checkpoint
from softcell.engine.distributed import World, on_main
from softcell.engine.events import Note, OnEvent
from softcell.engine.files import atomic_write_text
from softcell.engine.identity import check_data, identity_of
from softcell.engine.lanes import Running
from softcell.engine.loop import Outcome, running
from softcell.engine.runfolder import RunFolder
from softcell.engine.task import Task


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
        if world.is_main:  # without the others: it may be this rank alone that failed
            folder.finish("failed")
        raise
    if outcome.status == "interrupted":
        on_main(lambda: folder.finish("interrupted"), world)
    return folder, outcome


def teller(on_event: OnEvent | None, world: World) -> Callable[[str], None]:
    """Passes a text on as a `Note`, from the process that speaks."""

    def tell(text: str) -> None:
        if on_event is not None and world.is_main:
            on_event(Note(text))

    return tell
