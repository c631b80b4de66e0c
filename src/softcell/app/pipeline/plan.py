"""The request of a run, its decisions and its progress: `plan.json`, from which a run is resumed."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from softcell.app.export.model import PLAN
from softcell.data import datasets
from softcell.data.images import check_memory
from softcell.engine.manifest import MAPPING, TEXT, check_types, collect, now
from softcell.engine.runfolder import entries
from softcell.engine.task import OnEvent
from softcell.errors import UserError
from softcell.files import Fields, atomic_write_text, read_json
from softcell.search import resolve
from softcell.search.resource import quantity
from softcell.settings import MOST_RANDOM, at_most, build, is_seed, not_negative, to_dict

LEAST_BATCH = 4
DEFAULT_PARAMETERS = 2e6
_FLOAT = 4  # bytes of a number in a network


class Screen(Protocol):
    """Shows a run to people.

    Example:
        >>> from contextlib import contextmanager
        >>> from softcell.app.pipeline import Screen
        >>> class Quiet:
        ...     def print(self, *lines): ...
        ...     @contextmanager
        ...     def working(self, what):
        ...         yield lambda done, total, name: None
        ...     @contextmanager
        ...     def job(self, heading):
        ...         yield lambda event: None
        >>> screen: Screen = Quiet()
        >>> with screen.working("reading images") as show:
        ...     print(show(1, 2, "cat.jpg"))
        None
    """

    def print(self, *lines: str) -> None:
        """Prints lines."""

    def working(self, what: str) -> AbstractContextManager[Callable[[int, int, str], None]]:
        """Shows work that has no events of its own; yields a function of (done, total, next item)."""

    def job(self, heading: str) -> AbstractContextManager[OnEvent]:
        """Shows a search or training."""


@dataclass(frozen=True)
class RunRequest:
    """What the user asked for; None leaves the choice to the run.

    Example:
        >>> from softcell.app.pipeline import RunRequest
        >>> request = RunRequest(data="photos", time=1800, max_params="1M")
        >>> request.random, request.space  # None: the run chooses
        (3, None)
    """

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
    beside: str | None = None

    def __post_init__(self) -> None:
        if not self.time > 0:
            raise UserError(f"`time > 0` must hold, but got {self.time}")
        at_most("random", self.random, MOST_RANDOM)
        if self.random < 2:
            raise UserError(f"`random >= 2` must hold (one architecture has no spread), but got random={self.random}")
        is_seed("seed", self.seed)
        not_negative("threads", self.threads)
        self.limits()
        self.front()

    def limits(self) -> dict[str, float]:
        """The largest allowed `parameters` and `multiply_adds`; without any limit, `DEFAULT_PARAMETERS`.

        Of several budgets, the largest.
        """
        given = {"parameters": ("--max-params", self.max_params), "multiply_adds": ("--max-flops", self.max_flops)}
        found = {kind: quantity(name, split_budgets(name, value)[-1]) for kind, (name, value) in given.items() if value}
        return found or {"parameters": DEFAULT_PARAMETERS}

    def front(self) -> tuple[str, tuple[str, ...]] | None:
        """The name of the field that has several budgets, and these, the smallest first; None for a single budget."""
        several = {
            name: budgets
            for name, text in (("max_params", self.max_params), ("max_flops", self.max_flops))
            if len(budgets := split_budgets("--" + name.replace("_", "-"), text or "1")) > 1
        }
        if len(several) > 1:
            raise UserError(
                f"several budgets are allowed for --max-params or --max-flops, but got both {self.max_params} and "
                f"{self.max_flops}; give one of them a single budget"
            )
        return next(iter(several.items()), None)

    def path(self) -> Path:
        """The path of the images, if they are files."""
        return (Path(self.data_root or ".") / self.data).expanduser()

    def is_folder(self) -> bool:
        """Whether the data are a folder of images rather than a named dataset."""
        return self.data not in datasets() and self.path().is_dir()

    def check(self) -> None:
        """Raises early for unknown names and for impossible image sizes.

        Only for new runs: a resumed run passed these checks before, perhaps on another machine.
        """
        named = {"method": self.method, "space": self.space, "image_size": self.image_size}
        resolve({"scale": "small", **{key: value for key, value in named.items() if value is not None}})
        if self.image_size is None:
            return
        if self.data in datasets() or self.path().is_file():
            raise UserError(
                f"--image-size applies to folders of images, but --data {self.data} is not one and its images keep "
                "their size; leave it out"
            )
        check_memory(LEAST_BATCH, (3, self.image_size, self.image_size), _FLOAT)


def split_budgets(option: str, text: str) -> tuple[str, ...]:
    """The budgets in a text such as `50k,200k,1M`, each without spaces; they must rise.

    Example:
        >>> from softcell.app.pipeline.plan import split_budgets
        >>> split_budgets("--max-params", "50k, 200k, 1M")
        ('50k', '200k', '1M')
    """
    found = tuple("".join(part.split()) for part in text.split(","))
    if len(found) == 1:
        quantity(option, text)
        return found
    values = [quantity(f"every budget of {option}", part) for part in found]
    if len(set(values)) < len(values):
        raise UserError(
            f"every budget of {option} must differ from the others, but got {text}; leave out the duplicate"
        )
    if values != sorted(values):
        ordered = ",".join(part for _, part in sorted(zip(values, found, strict=True)))
        raise UserError(f"the budgets of {option} must rise, but got {text}; give {ordered}")
    return found


LINKS = "data"
"""In the folder of a run: links to the images, if these are not laid out as CLASS/IMAGE."""
FORMAT = "softcell-plan"
VERSION = 2
OLD = (
    "{file} is the plan of an earlier version of Softcell and cannot be resumed; start a new run. What it has finished "
    "stays usable: report.html, summary.json, export/ and the run folders"
)


PARTS = ("status", "inspection", "choice", "search", "competition", "training", "summary", "provenance")
_PART = (lambda value: value is None or isinstance(value, dict), "a mapping, or null")
_TYPES = {
    "request": MAPPING,
    "provenance": MAPPING,
    "status": TEXT,
    "data": (lambda value: value is None or isinstance(value, str), "text, or null"),
    "seconds": (lambda value: type(value) in (int, float) and 0 <= value < 1e12, "a number of seconds"),
    **dict.fromkeys(("inspection", "choice", "search", "competition", "training", "summary", "front"), _PART),
}


@dataclass
class Plan:
    """The state of a run. `seconds` were spent by earlier processes; decisions are never revised.

    `data` names the images as recipes do. Links inside the folder stay valid when that is moved.

    Example:
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> from softcell.app.pipeline import Plan, RunRequest
        >>> for label in ("cat", "dog"):
        ...     Path("photos", label).mkdir(parents=True)
        ...     for number in range(8):
        ...         Image.new("RGB", (24, 24), (number * 30, 0, 0)).save(f"photos/{label}/{number}.png")
        >>> plan = Plan.create(Path("runs/photos"), RunRequest(data="photos", time=600))
        >>> plan.status, Plan.open(Path("runs/photos")).request.time
        ('running', 600.0)
    """

    folder: Path
    request: RunRequest
    seconds: float = 0.0
    status: str = "running"
    inspection: dict[str, Any] | None = None
    data: str | None = None
    choice: dict[str, Any] | None = None
    search: dict[str, Any] | None = None
    competition: dict[str, Any] | None = None
    training: dict[str, Any] | None = None
    summary: dict[str, Any] | None = None
    front: dict[str, Any] | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    began: float = field(default_factory=time.perf_counter)
    is_new: bool = False
    was_there: bool = False

    @classmethod
    def create(cls, folder: Path, request: RunRequest) -> Plan:
        """The plan of a new run in a new or empty folder."""
        request.check()
        was_there = _make_folder(folder)
        provenance = {"created": now(), **collect()}
        plan = cls(folder, request, provenance=provenance, is_new=True, was_there=was_there)
        plan.save()
        return plan

    @classmethod
    def open(cls, folder: Path) -> Plan:
        file = folder / PLAN
        try:
            data = read_json(file)
        except (OSError, UserError) as error:
            raise UserError(f"{folder} is not a folder of `softcell run`: {file} cannot be read ({error})") from error
        if isinstance(data, dict) and data.get("format") == FORMAT and data.get("version") == 1:
            raise UserError(OLD.format(file=file))
        if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
            raise UserError(f"{file}: must say format={FORMAT!r} and version={VERSION}")
        check_types(data, str(file), _TYPES)
        data = Fields.of(data, str(file))
        request = build(RunRequest, data["request"], str(file))
        plan = cls(folder, request, **{key: data[key] for key in ("data", "seconds", *PARTS)}, front=data.get("front"))
        for candidate in (plan.competition or {}).get("candidates", ()):  # names of folders inside this one
            if not re.fullmatch(r"found|(plain|random)-\d+", str(candidate.get("name"))):
                raise UserError(
                    f"{file}: a network must be `found`, `plain-N` or `random-N`, got {candidate.get('name')!r}"
                )
        several = request.front()
        if plan.front is not None and (several is None or not set(plan.front.get("budgets", ())) <= set(several[1])):
            raise UserError(f"{file}: `front` must have budgets of the request, {request.max_params}")
        if plan.data is not None and (folder / LINKS).is_dir():
            plan.data = str((folder / LINKS).resolve())
        return plan

    def discard(self) -> None:
        """Removes what a run created in its folder, if it failed before its first decision."""
        if self.is_new:
            for links in (LINKS, f"{LINKS}.tmp"):
                shutil.rmtree(self.folder / links, ignore_errors=True)
            (self.folder / PLAN).unlink(missing_ok=True)
            if not self.was_there:
                with suppress(OSError):  # somebody else has put something into it
                    self.folder.rmdir()

    def used(self) -> float:
        """Seconds spent so far, including those of earlier processes; constant once the run is finished."""
        return self.seconds if self.status == "finished" else self.seconds + time.perf_counter() - self.began

    def left(self) -> float:
        return self.request.time - self.used()

    def finish(self) -> None:
        """Stops the clock for good."""
        self.seconds, self.status = self.used(), "finished"
        self.save()

    def save(self) -> None:
        """Writes the state, with the time spent so far."""
        linked = self.data is not None and Path(self.data) == (self.folder / LINKS).resolve()
        state = {
            "format": FORMAT,
            "version": VERSION,
            "request": to_dict(self.request),
            "seconds": round(self.used(), 3),
            **{key: getattr(self, key) for key in PARTS},
            "data": LINKS if linked else self.data,
            **({} if self.front is None else {"front": self.front}),
        }
        atomic_write_text(self.folder / PLAN, json.dumps(state, indent=2, ensure_ascii=False) + "\n")


def _make_folder(folder: Path) -> bool:
    """Creates the folder of a new run; returns whether it existed before."""
    try:
        was_there = folder.exists()
        if was_there and not folder.is_dir():
            raise UserError(f"a run needs a folder, but {folder} is a file; give another --out")
        if entries(folder):
            raise UserError(
                f"a new run needs an empty folder, but {folder} is not empty; resume a run in it with `softcell run "
                f"--resume {folder}`, or give another --out"
            )
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"a run needs a writable folder, but {folder} cannot be created or read ({error.strerror or error}); give "
            "another --out"
        ) from error
    return was_there
