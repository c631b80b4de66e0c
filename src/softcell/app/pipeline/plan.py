"""What a run was asked for, what it has decided and where it stands: `plan.json`, from which it goes on."""

from __future__ import annotations

import json
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from softcell.app.export.model import PLAN
from softcell.app.pipeline.wishes import Wishes
from softcell.engine.files import atomic_write_text
from softcell.engine.manifest import MAPPING, TEXT, check_types, collect, now
from softcell.engine.runfolder import entries
from softcell.errors import UserError
from softcell.reading import Fields, read_json
from softcell.settings import build, to_dict

LINKS = "data"
"""In the folder of a run: links to the images, where those do not lie as they should."""
FORMAT = "softcell-plan"
VERSION = 1


_PART = (lambda value: value is None or isinstance(value, dict), "a mapping, or null")
_TYPES = {
    "wishes": MAPPING,
    "provenance": MAPPING,
    "status": TEXT,
    "data": (lambda value: value is None or isinstance(value, str), "text, or null"),
    "seconds": (lambda value: type(value) in (int, float) and 0 <= value < 1e12, "a number of seconds"),
    **dict.fromkeys(("inspection", "choice", "search", "training", "summary"), _PART),
}


@dataclass
class Plan:
    """The state of a run. `seconds` has been spent by earlier processes; steps that were decided are never redone.

    `data` names the images as recipes do; where they are links inside the folder, it follows that wherever it is moved.
    """

    folder: Path
    wishes: Wishes
    seconds: float = 0.0
    status: str = "running"
    inspection: dict[str, Any] | None = None
    data: str | None = None
    choice: dict[str, Any] | None = None
    search: dict[str, Any] | None = None
    training: dict[str, Any] | None = None
    summary: dict[str, Any] | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)
    is_new: bool = False
    was_there: bool = False

    @classmethod
    def create(cls, folder: Path, wishes: Wishes) -> Plan:
        """The plan of a new run in a folder that is new or empty."""
        wishes.check()
        was_there = _made(folder)
        provenance = {"created": now(), **collect()}
        plan = cls(folder, wishes, provenance=provenance, is_new=True, was_there=was_there)
        plan.save()
        return plan

    @classmethod
    def open(cls, folder: Path) -> Plan:
        file = folder / PLAN
        try:
            data = read_json(file)
        except (OSError, UserError) as error:
            raise UserError(f"{folder} is no folder of `softcell run`: {file} cannot be read ({error})") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
            raise UserError(f"{file}: must say format={FORMAT!r} and version={VERSION}")
        keys = ("seconds", "status", "inspection", "data", "choice", "search", "training", "summary", "provenance")
        check_types(data, str(file), _TYPES)
        data = Fields.of(data, str(file))
        plan = cls(folder, build(Wishes, data["wishes"], str(file)), **{key: data[key] for key in keys})
        for job in (plan.training or {}).get("jobs", ()):
            if not re.fullmatch(r"train|plain|random-\d+", str(job.get("name"))):  # it names a folder inside this one
                raise UserError(f"{file}: a training must be `train`, `plain` or `random-N`, got {job.get('name')!r}")
        # Older plans have the place where the links lay at first, which may be gone.
        if plan.data is not None and (folder / LINKS).is_dir():
            plan.data = str((folder / LINKS).resolve())
        return plan

    def discard(self) -> None:
        """Takes back the folder of a run that was refused before anything was decided in it: what it made, no more."""
        if self.is_new:
            for links in (LINKS, f"{LINKS}.tmp"):
                shutil.rmtree(self.folder / links, ignore_errors=True)
            (self.folder / PLAN).unlink(missing_ok=True)
            if not self.was_there:
                with suppress(OSError):  # something else has come into it
                    self.folder.rmdir()

    def used(self) -> float:
        """Seconds spent so far, those of earlier processes included; a finished run spends no more."""
        return self.seconds if self.status == "finished" else self.seconds + time.perf_counter() - self.began

    def left(self) -> float:
        return self.wishes.time - self.used()

    def finish(self) -> None:
        """Stops the clock for good."""
        self.seconds, self.status = self.used(), "finished"
        self.save()

    def save(self) -> None:
        """Writes what is known, with the time spent until now."""
        linked = self.data is not None and Path(self.data) == (self.folder / LINKS).resolve()
        state = {
            "format": FORMAT,
            "version": VERSION,
            "wishes": to_dict(self.wishes),
            "seconds": round(self.used(), 3),
            **{
                key: getattr(self, key)
                for key in ("status", "inspection", "choice", "search", "training", "summary", "provenance")
            },
            "data": LINKS if linked else self.data,
        }
        atomic_write_text(self.folder / PLAN, json.dumps(state, indent=2, ensure_ascii=False) + "\n")


def _made(folder: Path) -> bool:
    """Makes the folder of a new run, and says whether it was there before."""
    try:
        was_there = folder.exists()
        if was_there and not folder.is_dir():
            raise UserError(f"a run needs a folder, but {folder} is a file; give another --out")
        if entries(folder):
            raise UserError(
                f"a new run needs an empty folder, but {folder} is not; `softcell run --resume {folder}` goes on with "
                "a run in it, or give another --out"
            )
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"a run needs a folder it may write, but {folder} cannot be made or read ({error.strerror or error}); give "
            "another --out"
        ) from error
    return was_there
