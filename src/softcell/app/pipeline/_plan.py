"""The request of a run, its decisions and progress (`plan.json`, from which it is resumed), and its time."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from softcell.app.export.model import PLAN
from softcell.data import datasets
from softcell.data.images import check_memory
from softcell.engine.manifest import MAPPING, TEXT, check_types, collect, now
from softcell.engine.runfolder import RunFolder, entries
from softcell.errors import UserError
from softcell.files import Fields, atomic_write_text, read_json
from softcell.search import resolve
from softcell.search.resource import quantity
from softcell.settings import MAX_RANDOM, at_most, build, is_seed, not_negative, to_dict
from softcell.text import clock, count_of

MIN_BATCH = 4
DEFAULT_PARAMETERS = 2e6
_FLOAT = 4  # bytes of a number in a network


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
        at_most("random", self.random, MAX_RANDOM)
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
        """The name of the field with several budgets, and these budgets, smallest first; None for a single budget."""
        several = {
            name: budgets
            for name, text in (("max_params", self.max_params), ("max_flops", self.max_flops))
            # "1" replaces a missing budget: it is a single one.
            if len(budgets := split_budgets("--" + name.replace("_", "-"), text or "1")) > 1
        }
        if len(several) > 1:
            raise UserError(
                f"several budgets are allowed for --max-params or --max-flops, but got both {self.max_params} and "
                f"{self.max_flops}; set a single budget for one of them"
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
        check_memory(MIN_BATCH, (3, self.image_size, self.image_size), _FLOAT)


def split_budgets(option: str, text: str) -> tuple[str, ...]:
    """The budgets in a text such as `50k,200k,1M`, each without spaces, in increasing order.

    Example:
        >>> from softcell.app.pipeline._plan import split_budgets
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
        raise UserError(f"the budgets of {option} must be in increasing order, but got {text}; pass {ordered}")
    return found


Kind = Literal["plain", "found", "random"]


@dataclass(frozen=True)
class Candidate:
    """A network of the competition. `length`: its expected training time relative to the largest plain network's.

    Example:
        >>> from softcell.app.pipeline._plan import Candidate
        >>> Candidate("plain-1", "plain", {}, {"channels": 16}, parameters=170_000, multiply_adds=16_000_000).title
        'plain, 170,000 parameters'
    """

    name: str
    kind: Kind
    genotype: dict[str, Any]
    settings: dict[str, Any]
    parameters: int
    multiply_adds: int
    length: float = 1.0

    @property
    def title(self) -> str:
        return f"{self.kind}, {count_of(self.parameters, 'parameter')}"


LINKS = "data"
"""In the folder of a run: links to the images, if these are not laid out as CLASS/IMAGE."""
FORMAT = "softcell-plan"
VERSION = 2
OLD = (
    "{file} is the plan of an earlier version of Softcell and cannot be resumed; start a new run. Its finished parts "
    "remain usable: report.html, summary.json, export/ and the run folders"
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
        # Before the folder is created: a rejected request leaves nothing.
        request.check()
        was_there = _make_folder(folder)
        provenance = {"created": now(), **collect()}
        plan = cls(folder, request, provenance=provenance, is_new=True, was_there=was_there)
        plan.save()
        return plan

    @classmethod
    def open(cls, folder: Path) -> Plan:
        file = folder / PLAN
        if not file.exists():
            hint = ""
            if (folder / "run.json").exists():
                hint = f"; resume it with `softcell {RunFolder.open(folder).manifest['kind']} --resume {folder}`"
            raise UserError(f"{folder} is not a folder of `softcell run`: it has no {PLAN}{hint}")
        try:
            data = read_json(file)
        except (OSError, UserError) as error:
            raise UserError(f"{folder} is not a folder of `softcell run`: {file} cannot be read ({error})") from error
        if isinstance(data, dict) and data.get("format") == FORMAT and data.get("version") == 1:
            raise UserError(OLD.format(file=file))
        if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("version") != VERSION:
            raise UserError(f"{file}: must have format={FORMAT!r} and version={VERSION}")
        check_types(data, str(file), _TYPES)
        data = Fields.of(data, str(file))
        request = build(RunRequest, data["request"], str(file))
        # `front` is not among `PARTS`: plans with a single budget have none.
        plan = cls(folder, request, **{key: data[key] for key in ("data", "seconds", *PARTS)}, front=data.get("front"))
        for candidate in (plan.competition or {}).get("candidates", ()):  # names of folders inside this one
            if not re.fullmatch(r"found|(plain|random)-\d+", str(candidate.get("name"))):
                raise UserError(
                    f"{file}: a network must be `found`, `plain-N` or `random-N`, got {candidate.get('name')!r}"
                )
        several = request.front()
        if plan.front is not None and (several is None or not set(plan.front.get("budgets", ())) <= set(several[1])):
            budgets = "which has only one" if several is None else ", ".join(several[1])
            raise UserError(f"{file}: `front` must have budgets of the request, {budgets}")
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
                with suppress(OSError):  # another program has put something into it
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
            raise UserError(f"a run needs a folder, but {folder} is a file; choose another --out")
        if entries(folder):
            raise UserError(
                f"a new run needs an empty folder, but {folder} is not empty; resume a run in it with `softcell run "
                f"--resume {folder}`, or choose another --out"
            )
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"a run needs a writable folder, but {folder} cannot be created or read ({error.strerror or error}); "
            "choose another --out"
        ) from error
    return was_there


MAX_SLOWDOWN = 30.0
READ_EVERY, WINDOW = 0.2, 2.0
"""Seconds between two readings of the load, and CPU seconds over which it is measured: more time on a busy machine."""


class TooLittleTimeError(UserError):
    """The time left is not enough for the fewest epochs of the smallest network."""


class Load:
    """How busy the machine is now: seconds per CPU second of this thread, over the last `WINDOW` of its CPU seconds.

    1 on an idle machine, 4 if three other threads compete for the same core. Linux counts the time a thread waits for a
    core. This excludes waiting for a disk or for other threads. Elsewhere the wall-clock time of the whole
    process is compared with its CPU time, from `began` on.
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self._samples = [(0.0, 0.0)]  # CPU seconds and seconds of waiting, each since the start of the thread
        self._found, self._read = 1.0, -math.inf

    def slowness(self) -> float:
        now = time.perf_counter()
        if now - self._read >= READ_EVERY:  # it is called several times per training step
            self._found, self._read = self._measured(), now
        return self._found

    def _measured(self) -> float:
        cpu, waited = self._counters()
        # Four samples a quarter of the window apart: the oldest is where the window begins.
        if cpu - self._samples[-1][0] > WINDOW / 4:
            self._samples = [*self._samples[-3:], (cpu, waited)]
        ran, late = cpu - self._samples[0][0], waited - self._samples[0][1]
        return min(MAX_SLOWDOWN, max(1.0, 1.0 + late / max(ran, 1e-3)))

    def _counters(self) -> tuple[float, float]:
        try:
            ran, waited, _ = Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()
            # Kernels without scheduler statistics report zeros.
            if int(ran):
                return int(ran) / 1e9, int(waited) / 1e9
        except (OSError, ValueError):
            pass
        cpu = time.process_time()
        return cpu, max(0.0, time.perf_counter() - self._began - cpu)


FINAL_SHARE = 0.6
"""Minimum share of the time for the final training, unless start-up and shutdown take more than the rest."""
SAFE = 0.97
"""Share of the time that is planned; the end of the process takes seconds on a busy machine."""
NEEDED = 1.0
"""CPU seconds for latency, report, weights and Python files after training; a busy machine takes longer."""
ONNX = 3.5
"""CPU seconds of the ONNX export, which is skipped if there is no time for it."""
MAX_RESERVED = 0.1
"""Maximum share of the time reserved for both; but `NEEDED` is always reserved."""


class RunTime:
    """The time of a whole run: what is reserved for its end, and when the final training begins and ends.

    `for_own`: seconds that measuring the user's own model takes at the end. What is reserved depends on the load and
    changes with it, so that training ends earlier if its machine becomes busy.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.for_own = plan, 0.0
        self._load = Load(plan.began)

    @property
    def slowness(self) -> float:
        return self._load.slowness()

    @property
    def end(self) -> float:
        """Seconds from the start at which the final training must be over: report and exports follow."""
        return SAFE * self.plan.request.time - self.reserved()

    @property
    def share(self) -> float:
        """Minimum share of the time for the final training; more in a run for one of several budgets."""
        return float((self.plan.search or {}).get("share", FINAL_SHARE))

    @property
    def final_from(self) -> float:
        """Latest start of the final training, in seconds from the start."""
        plan = self.plan
        return self.end - max(self.share * plan.request.time, float((plan.choice or {}).get("final", 0.0)))

    def reserved(self) -> float:
        """Seconds for what follows the final training."""
        slow, whole = self.slowness, NEEDED + ONNX
        most = max(whole, MAX_RESERVED * self.plan.request.time)
        return max(NEEDED * slow, min(whole * slow, most)) + self.for_own

    def has_time_for_onnx(self) -> bool:
        return self.plan.used() + ONNX * self.slowness <= self.plan.request.time

    def used_in_words(self) -> str:
        return f"{clock(self.plan.used())} of {clock(self.plan.request.time)} used"
