"""The file that describes a sweep, and its jobs: one per method, space and seed.

    methods: [darts, snas, random]
    spaces: [nb201]
    seeds: 3                      # or a list: [0, 1, 2]
    search: {data: digits, epochs: 10}
    only: {snas: {epochs: 20}}    # settings for one method or space
    train: {epochs: 10}           # train the architectures found; true for the recipe's defaults
    random: 2                     # also train 2 random architectures per space and seed

The progress of a job is recorded only in its run folders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from softcell.app.jobs import has_run
from softcell.arch import sample
from softcell.engine import RunFolder
from softcell.engine.manifest import read_mapping
from softcell.errors import UserError, nearest
from softcell.files import atomic_write_text
from softcell.methods import METHODS
from softcell.recipes import search_recipe, train_recipe
from softcell.registry import load_plugins
from softcell.settings import MAX_RANDOM, MAX_SEEDS, at_most, build, layered, merge
from softcell.spaces import SPACES, build_space
from softcell.trust import Kind

PLAN = "sweep.yaml"
LOG = "log.txt"
ERROR = "error.json"
"""The error of a job's last attempt, written by the command that failed."""
COMMANDS = {"slurm_python", "slurm_setup", "slurm_srun_args", "slurm_additional_parameters", "python", "runtime_env"}
"""Options of submitit and Ray that name programs or are passed on unchecked."""
# The device does not change the result of a run: a sweep may be resumed on another machine.
_ELSEWHERE = {"device", "engine", "threads", "data_root", "plugins"}


@dataclass(frozen=True)
class Plan:
    """The content of the file. A number of `seeds` means 0 to that number less 1; `cluster` is for the launcher.

    Example:
        >>> from pathlib import Path
        >>> from softcell.app.sweep import Plan, jobs_of
        >>> plan = Plan(methods=("darts", "snas"), spaces=("nb201",), seeds=2, search={"epochs": 3})
        >>> [job.folder.name for job in jobs_of(plan, Path("runs/sweep"))]
        ['darts-nb201-seed0', 'snas-nb201-seed0', 'darts-nb201-seed1', 'snas-nb201-seed1']
    """

    methods: tuple[str, ...]
    spaces: tuple[str, ...] = ("darts",)
    seeds: int | tuple[int, ...] = 3
    search: dict[str, Any] = field(default_factory=dict)
    only: dict[str, Any] = field(default_factory=dict)
    train: bool | dict[str, Any] = False
    random: int = 0
    plugins: tuple[str, ...] = ()
    cluster: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.seeds, int) and self.seeds > MAX_SEEDS:
            raise UserError(
                f"sweep: a number of `seeds` must be at most {MAX_SEEDS:,}, but got {self.seeds}; write "
                f"[{self.seeds}] to use that as a seed"
            )
        if isinstance(self.seeds, int) and self.seeds < 1:
            raise UserError(
                f"sweep: a number of `seeds` must be at least 1, but got {self.seeds}; or list them: [0, 1]"
            )
        for name, values in (("methods", self.methods), ("spaces", self.spaces), ("seeds", self.all_seeds)):
            if not values:
                raise UserError(f"sweep: `{name}` must name at least one")
            double = next((value for value in values if list(values).count(value) > 1), None)
            if double is not None:
                raise UserError(f"sweep: duplicate entry {double!r} in `{name}`; remove one")
        at_most("random", self.random, MAX_RANDOM)
        if self.random < 0:
            raise UserError("sweep: `random` must not be negative")
        if self.random and self.train is False:
            raise UserError(
                "sweep: `random` trains random architectures in addition to those found, so it requires `train`"
            )
        for name, settings in self.only.items():
            if name not in (*self.methods, *self.spaces):
                raise UserError(f"sweep.only: {name!r} is not a method or space of this sweep")
            if not isinstance(settings, Mapping):
                raise UserError(f"sweep.only.{name} must be a mapping of settings, got {settings!r}")
        self._check_own("search", self.search)
        self._check_own("train", self.train if isinstance(self.train, dict) else {})
        for name, settings in self.only.items():
            self._check_own(f"only.{name}", settings)

    def _check_own(self, where: str, settings: Mapping[str, Any]) -> None:
        """Rejects settings that the sweep sets for every job: they would be replaced silently."""
        for key in ("method", "space", "seed"):
            value = settings.get(key)
            if value is not None and not isinstance(
                value, Mapping
            ):  # `space: {cells: 5}` is short for settings of the space
                raise UserError(
                    f"sweep.{where}: `{key}` is set by the sweep for each job; leave it out there and write "
                    f"`{key}s: [{value}]` at the top of the file"
                )
        if self.plugins and settings.get("plugins"):
            raise UserError(f"sweep.{where}: `plugins` is already given at the top of the file; list all of them there")

    @property
    def all_seeds(self) -> tuple[int, ...]:
        return tuple(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds


@dataclass(frozen=True)
class Job:
    """One method in one space with one seed: a search and, on request, the training of its architecture.

    Example:
        >>> from pathlib import Path
        >>> from softcell.app.sweep import Plan, jobs_of
        >>> job = jobs_of(Plan(methods=("darts",), spaces=("nb201",), seeds=(4,)), Path("runs/sweep"))[0]
        >>> job.folder.name, job.search["method"], job.train
        ('darts-nb201-seed4', 'darts', None)
    """

    folder: Path
    search: dict[str, Any]
    train: dict[str, Any] | None
    random: int

    @property
    def name(self) -> str:
        return self.folder.name

    def write(self) -> None:
        """Writes the settings where the job's commands read them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, settings in (("search", self.search), ("train", self.train)):
            if settings is not None:
                atomic_write_text(self.folder / f"{name}.json", json.dumps(settings, indent=2, default=str) + "\n")

    def is_finished(self) -> bool:
        """Whether all its runs are finished, according to their folders."""
        return all(is_finished(folder) for folder in self.runs())

    def runs(self) -> list[Path]:
        """The run folders that a complete job has."""
        if self.train is None:
            return [self.folder / "search"]
        beside = [self.folder / "train" / f"random-{k}" for k in range(1, self.random + 1)]
        return [self.folder / "search", self.folder / "train", *beside]

    def check(self) -> None:
        """Raises if a run in the folder has other settings than the file now gives."""
        run_folder = self.folder / "search"
        if has_run(run_folder):
            _check_same(run_folder, search_recipe(self.search).to_dict())
        run_folder = self.folder / "train"
        if self.train is not None and has_run(run_folder):
            _check_same(run_folder, train_recipe(self.folder / "search", self.train)[1].to_dict())


def is_finished(folder: Path) -> bool:
    """Whether `folder` holds a finished, readable run."""
    try:
        return str(RunFolder.open(folder).manifest["status"]) == "finished"
    except UserError:
        return False


def _check_same(folder: Path, wanted: Mapping[str, Any]) -> None:
    stored = RunFolder.open(folder).manifest["recipe"]
    # For "auto" the run has recorded its own choice.
    left = {key for key, value in wanted.items() if value == "auto"} | _ELSEWHERE
    different = [key for key in wanted if key not in left and stored.get(key) != wanted[key]]
    if different:
        changes = ", ".join(f"{key}: {stored.get(key)} -> {wanted[key]}" for key in different)
        raise UserError(
            f"finished runs are never repeated, but {folder} has other settings ({changes}); choose another --out, or "
            "move it away"
        )


def read_plan(path: str | Path, *, only_read: bool = False) -> Plan:
    """The plan in a YAML file or in the folder of a sweep. Its plugins are loaded unless `only_read`.

    Example:
        >>> from pathlib import Path
        >>> from softcell.app.sweep import read_plan
        >>> file = Path("sweep.yaml")
        >>> _ = file.write_text("{methods: [darts, random], spaces: [nb201], seeds: 2}")
        >>> read_plan(file).methods
        ('darts', 'random')
    """
    file = Path(path)
    if file.is_dir():
        file = file / PLAN
    if not file.is_file():
        raise UserError(
            f"{file} must be a YAML file that describes a sweep, or the folder of one; there is no such file"
        )
    plan = build(Plan, read_mapping(file), where="sweep")
    if not only_read:
        load_plugins(plan.plugins, f"the sweep in {file}")
    return plan


def code_of(plan: Plan) -> list[tuple[Path, Kind]]:
    """The files of a plan that run code: plugins, and teachers that are exported programs."""
    parts = [plan.search, *plan.only.values(), plan.train if isinstance(plan.train, dict) else {}]
    named = [part["plugins"] for part in parts if isinstance(part.get("plugins"), list)]
    plugins = [*plan.plugins, *(str(path) for paths in named for path in paths)]
    guides = [part["guide"] for part in parts if isinstance(part.get("guide"), Mapping)]
    teachers = [Path(str(guide["teacher"])) for guide in guides if guide.get("teacher") is not None]
    found: list[tuple[Path, Kind]] = [(Path(path), "plugin") for path in plugins]
    return found + [(path, "program") for path in teachers if path.suffix.lower() == ".pt2" and path.is_file()]


def plain_options(plan: Plan) -> dict[str, Any]:
    """The launcher options of the file. None may run code, since anyone may have written the file.

    Submitit and Ray also accept shell commands (`slurm_setup`, `runtime_env`); these must be given on the command line.
    """
    for key, value in plan.cluster.items():
        is_plain = value is None or isinstance(value, bool | int | float)
        is_plain = is_plain or (isinstance(value, str) and value.isprintable())
        if not is_plain or key in COMMANDS:
            raise UserError(
                f"sweep.cluster.{key} in a file must be a number or a word and must not run code, got {value!r}; if "
                f"you trust it, move it to the command line: --cluster {key}=..."
            )
    return dict(plan.cluster)


def folders_of(plan: Plan, out: Path) -> list[Path]:
    """The folders of all jobs, without running any code."""
    return [
        out.resolve() / f"{method}-{space}-seed{seed}"
        for seed in plan.all_seeds
        for space in plan.spaces
        for method in plan.methods
    ]


def jobs_of(plan: Plan, out: Path) -> list[Job]:
    """All jobs below `out`, seed by seed, so that an interrupted sweep covers all methods and spaces.

    Every recipe is checked before anything runs.

    Example:
        >>> from pathlib import Path
        >>> from softcell.app.sweep import Plan, jobs_of
        >>> len(jobs_of(Plan(methods=("darts", "random"), spaces=("nb201",), seeds=3), Path("runs/sweep")))
        6
    """
    out = out.resolve()
    for name in plan.methods:
        if name not in METHODS:
            raise UserError(f"sweep.methods: no method {name!r}; {nearest(name, METHODS)}")
    for name in plan.spaces:
        if name not in SPACES:
            raise UserError(f"sweep.spaces: no space {name!r}; {nearest(name, SPACES)}")
    plugins = {"plugins": [str(Path(path).resolve()) for path in plan.plugins]} if plan.plugins else {}
    jobs = []
    for seed in plan.all_seeds:
        for space in plan.spaces:
            for method in plan.methods:
                own = [plan.only.get(name, {}) for name in (space, method)]
                named = {"method": method, "space": space, "seed": seed}
                search = merge(*(layered(part) for part in (plan.search, *own, plugins)), named)
                recipe = search_recipe(search)
                train = None
                if plan.train is not False:
                    given = {} if plan.train is True else plan.train
                    where = {key: getattr(recipe, key) for key in ("data", "data_root", "image_size", "device")}
                    where = {key: value for key, value in where.items() if value is not None}
                    train = merge(where, layered(given), plugins, {"seed": seed})
                    # Any architecture serves to check the settings of training before one has been found.
                    some = sample(build_space(space, recipe.space_settings).layout(), 0)
                    train_recipe(some, train)
                # The random architectures are the same for all methods, so only the first method trains them.
                random = plan.random if method == plan.methods[0] else 0
                jobs.append(Job(out / f"{method}-{space}-seed{seed}", search, train, random))
    for job in jobs:
        job.check()
    return jobs
