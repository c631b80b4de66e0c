"""What a run was asked for, what it has decided and where it stands: `plan.json`, from which it goes on."""

from __future__ import annotations

import json
import re
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from softcell.engine.files import atomic_write_text
from softcell.engine.provenance import collect, now
from softcell.errors import UserError
from softcell.search.resource import quantity
from softcell.settings import build, to_dict

PLAN = "plan.json"
FORMAT = "softcell-plan"
VERSION = 1
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parse_time(text: str) -> float:
    """`30m`, `1h30m` or `90s` as seconds."""
    found = re.fullmatch(r"\s*(?:([0-9.]+)h)?\s*(?:([0-9.]+)m)?\s*(?:([0-9.]+)s)?\s*", text)
    try:
        seconds = (
            sum(float(part) * _UNITS[unit] for part, unit in zip(found.groups(), "hms", strict=True) if part)
            if found
            else 0.0
        )
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise UserError(f"--time must be a duration such as 30m, 90s or 1h30m, got {text!r}")
    return seconds


@dataclass(frozen=True)
class Wishes:
    """What was asked for; None leaves the choice to the run."""

    data: str
    time: float = 1800.0
    max_params: str | None = None
    max_flops: str | None = None
    random: int = 3
    seed: int = 0
    device: str = "auto"
    threads: int = 0
    data_root: str | None = None
    space: str | None = None
    method: str | None = None
    image_size: int | None = None

    def __post_init__(self) -> None:
        if not self.time > 0:
            raise UserError(f"`time > 0` must hold, but got {self.time}")
        if self.random < 2:
            raise UserError(f"`random >= 2` must hold (one architecture has no spread), but got random={self.random}")
        for name in ("seed", "threads"):
            if getattr(self, name) < 0:
                raise UserError(f"`{name} >= 0` must hold, but got {name}={getattr(self, name)}")
        self.limits()

    def limits(self) -> dict[str, float]:
        """`parameters` and `multiply_adds` that must not be exceeded."""
        given = {"parameters": ("--max-params", self.max_params), "multiply_adds": ("--max-flops", self.max_flops)}
        return {kind: quantity(name, value) for kind, (name, value) in given.items() if value is not None}


@dataclass
class Plan:
    """The state of a run. `seconds` has been spent by earlier processes; steps that were decided are never redone."""

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
        if folder.exists() and any(folder.iterdir()):
            raise UserError(
                f"a new run needs an empty folder, but {folder} is not; `softcell run --resume {folder}` goes on with "
                "a run in it, or give another --out"
            )
        was_there = folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        provenance = {"created": now(), **collect()}
        plan = cls(folder, wishes, provenance=provenance, is_new=True, was_there=was_there)
        plan.save()
        return plan

    @classmethod
    def open(cls, folder: Path) -> Plan:
        file = folder / PLAN
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise UserError(f"{folder} is no folder of `softcell run`: {file} cannot be read ({error})") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
            raise UserError(f"{file}: must say format={FORMAT!r} and version={VERSION}")
        keys = ("seconds", "status", "inspection", "data", "choice", "search", "training", "summary", "provenance")
        return cls(folder, build(Wishes, data["wishes"], str(file)), **{key: data[key] for key in keys})

    def discard(self) -> None:
        """Takes back the folder of a run that was refused before anything was decided in it."""
        if self.is_new:
            for entry in self.folder.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry, ignore_errors=True)
                else:
                    entry.unlink()
            if not self.was_there:
                self.folder.rmdir()

    def used(self) -> float:
        """Seconds spent so far, those of earlier processes included."""
        return self.seconds + time.perf_counter() - self.began

    def left(self) -> float:
        return self.wishes.time - self.used()

    def save(self) -> None:
        """Writes what is known, with the time spent until now."""
        state = {
            "format": FORMAT,
            "version": VERSION,
            "wishes": to_dict(self.wishes),
            "seconds": round(self.used(), 3),
            **{
                key: getattr(self, key)
                for key in ("status", "inspection", "data", "choice", "search", "training", "summary", "provenance")
            },
        }
        atomic_write_text(self.folder / PLAN, json.dumps(state, indent=2, ensure_ascii=False) + "\n")
