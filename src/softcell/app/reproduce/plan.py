"""The runs that a paper's tables need, each with its own folder and the command that repeats it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from softcell.app.jobs import has_run
from softcell.app.reproduce.papers import PAPERS, RANDOM_CELLS, TRAINING_SEEDS, Paper, PaperTable, Row
from softcell.arch import Genotype, empty_cells, notation, sample
from softcell.engine import resolve_device
from softcell.engine.runfolder import RUNS
from softcell.errors import UserError, nearest
from softcell.evaluate import TrainRecipe
from softcell.evaluate import resolve as resolve_training
from softcell.evaluate.teacher import TeacherRecipe, resolve_teacher
from softcell.search import SearchRecipe, resolve
from softcell.settings import flat, layered
from softcell.spaces import build_space
from softcell.spaces.base import evaluation_space

Kind = Literal["teacher", "search", "train", "classifier"]
STAGES: dict[Kind, int] = {"teacher": 0, "search": 1, "train": 2, "classifier": 2}
"""Runs of a later stage need those of an earlier one."""
SMALL_SEEDS = 2
SMALL_SEARCH: dict[str, Any] = {"data": "digits", "scale": "small", "epochs": 1, "batch_size": 128}
SMALL_TRAINING: dict[str, Any] = {
    "data": "digits",
    "recipe": "small",
    "epochs": 1,
    "batch_size": 128,
}
SMALL_CLASSIFIER: dict[str, Any] = {"data": "digits", "recipe": "small", "epochs": 1, "batch_size": 128, "lr_every": 1}
CIFAR_SHAPE, CIFAR_CLASSES = (3, 32, 32), 10
MAX_DRAWS = 1000


@dataclass(frozen=True)
class Job:
    """One run. folder: relative to the plan's folder. settings: of its recipe. network: what is trained.

    found: for the training of a found network, the folder of its search. rows: names of the rows that need it.
    """

    kind: Kind
    folder: Path
    title: str
    settings: Mapping[str, Any]
    network: str = ""
    found: Path | None = None
    rows: tuple[str, ...] = ()

    @property
    def seed(self) -> int:
        return int(self.settings["seed"])


Networks = dict[str, dict[str, list[Job]]]
"""The training runs of a row: by name of the training recipe, then by network, one per seed."""


@dataclass(frozen=True)
class Plan:
    """The tables of a paper in a folder. seeds: searches of each row; None for the table's own number."""

    paper: Paper
    tables: tuple[PaperTable, ...]
    folder: Path
    small: bool = False
    seeds: int | None = None
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.seeds is not None and self.seeds < 2:
            raise UserError(f"--seeds must be at least 2 (one seed is not a result), but got {self.seeds}")

    @property
    def where(self) -> dict[str, Any]:
        """Device and precision. Not `auto`, which is timed for each run: all networks of a table have the same one."""
        is_gpu = resolve_device(self.device).type == "cuda"
        return {"device": self.device, "precision": "bfloat16" if is_gpu else "float32"}

    @cached_property
    def jobs(self) -> list[Job]:
        """All runs, in the order in which they run; one that several tables or rows need is listed once."""
        found: dict[Path, Job] = {}
        for table in self.tables:
            for row in table.rows:
                for job in self.jobs_of(table, row):
                    before = found.get(job.folder)
                    rows = (*(before.rows if before else ()), row.name)
                    found[job.folder] = replace(job, rows=tuple(dict.fromkeys(rows)))
        # Stable: runs of one stage keep the order of the tables.
        return sorted(found.values(), key=lambda job: STAGES[job.kind])

    def jobs_of(self, table: PaperTable, row: Row) -> Iterator[Job]:
        """All runs of a row: teacher, searches, training runs."""
        searches = self.searches(table, row)
        if row.search is not None and self._is_guided(row.search):
            yield self.teacher()
        yield from searches
        for networks in self.trainings(table, row).values():
            for jobs in networks.values():
                yield from jobs

    def num_seeds(self, table: PaperTable) -> int:
        return self.seeds or (SMALL_SEEDS if self.small else table.seeds)

    def searches(self, table: PaperTable, row: Row) -> list[Job]:
        """The searches of a row, one per seed."""
        if row.search is None:
            return []
        return [self._search(row.search, seed) for seed in range(self.num_seeds(table))]

    def trainings(self, table: PaperTable, row: Row) -> Networks:
        """The training runs of a row."""
        found: Networks = {}
        for name in row.trainings or table.trainings:
            found[name] = {}
            for number, (network, search) in enumerate(self._networks(table, row)):
                repeated = row.repeats and number == 0
                several = repeated or row.cell is not None or row.classifier is not None
                seeds = (SMALL_SEEDS if self.small else TRAINING_SEEDS) if several else 1
                found[name][network] = [self._training(table, row, name, network, search, s) for s in range(seeds)]
        return found

    def _networks(self, table: PaperTable, row: Row) -> list[tuple[str, Path | None]]:
        """Names of a row's networks; of a found one also the folder of its search."""
        if row.search is not None:
            return [(f"{row.search}-{job.seed}", job.folder) for job in self.searches(table, row)]
        if row.random is not None:
            return [(f"random-{row.random}-{number}", None) for number in range(1, RANDOM_CELLS + 1)]
        if row.classifier is not None:
            return [("-".join(("resnet18", *map(str, row.classifier.values()))), None)]
        assert row.cell is not None
        return [(row.cell, None)]

    def teacher(self) -> Job:
        assert self.paper.teacher is not None
        own = {key: value for key, value in self.paper.teacher.items() if key != "classifier"}
        settings = layered(own, SMALL_CLASSIFIER if self.small else {}, {"seed": 0, **self.where})
        name = str(self.paper.teacher["classifier"])
        return Job("teacher", Path("teacher") / name, f"teacher {name}", settings, name)

    def _is_guided(self, search: str) -> bool:
        return "guide" in self.paper.searches[search]

    def _search(self, name: str, seed: int) -> Job:
        settings = layered(self.paper.searches[name], {"seed": seed, **self.where})
        if self.small:
            settings = layered(settings, self.paper.small, SMALL_SEARCH)
            if settings["method"] == "random":
                settings = layered(settings, {"method_settings": {"samples": 2}})
            # `small` shortens the selection of every search of the paper; most have none.
            if not settings.get("select", {}).get("by"):
                settings.pop("select", None)
        if self._is_guided(name):
            teacher = str(self.folder / self.teacher().folder)
            settings = layered(settings, {"guide": {"teacher": teacher}})
        folder = Path("search") / name / f"seed-{seed}"
        return Job("search", folder, f"search {name}, seed {seed}", settings, name)

    def _training(self, table: PaperTable, row: Row, name: str, network: str, search: Path | None, seed: int) -> Job:
        settings = layered(table.trainings[name].settings, {"seed": seed, **self.where})
        kind: Kind = "train" if row.classifier is None else "classifier"
        if row.classifier is not None:
            small = SMALL_CLASSIFIER if self.small else {}
            settings = layered(settings, small, {"classifier_settings": dict(row.classifier)})
        elif self.small:
            # Digits keep their size.
            settings.pop("image_size", None)
            settings = layered(settings, SMALL_TRAINING, self.paper.small_training)
        folder = Path("train") / name / network / f"seed-{seed}"
        return Job(kind, folder, f"train {network} on {settings['data']}, seed {seed}", settings, network, search)

    def folder_of(self, job: Job) -> Path:
        return self.folder / job.folder

    def genotype(self, job: Job) -> Genotype:
        """The architecture of a training run; for a found one the search must be finished."""
        if job.found is not None:
            return Genotype.load(self.folder / job.found)
        if job.network in CELLS:
            return notation.parse(CELLS[job.network])
        drawn, space, number = job.network.rsplit("-", 2)
        limits = [table.limit for table in self.paper.tables if any(row.random == space for row in table.rows)]
        # A rehearsal has smaller cells (nodes, layers), and all of them are small enough.
        form = self.paper.small.get("space_settings") if self.small else None
        # "any" comes from `stand_in`, whose networks are only measured.
        unlimited = self.small or drawn == "any"
        return random_cell(space, int(number), None if unlimited or not limits else limits[0], form)

    def stand_in(self, job: Job) -> Job:
        """The same training of a random network, for a network that is not found yet."""
        if job.found is None or has_run(self.folder / job.found):
            return job
        space = resolve(self._search(job.found.parent.name, 0).settings).space
        return replace(job, network=f"any-{space}-1", found=None)

    def recipe(self, job: Job) -> SearchRecipe | TrainRecipe | TeacherRecipe:
        """The complete recipe of a run."""
        if job.kind == "search":
            return resolve(job.settings)
        if job.kind == "train":
            return resolve_training(self.genotype(job), job.settings)
        return resolve_teacher("resnet18" if job.kind == "classifier" else job.network, job.settings)

    def command(self, job: Job) -> str:
        """The command that repeats one run."""
        given = {key: value for key, value in flat(job.settings).items() if key not in ("method", "device")}
        words = ["softcell", {"classifier": "teacher"}.get(job.kind, job.kind)]
        if job.kind == "search":
            words.append(str(job.settings["method"]))
        elif job.kind == "train":
            source = self.folder / job.found if job.found is not None else CELLS.get(job.network)
            words.append(str(source) if source else str(self.folder_of(job) / "genotype.json"))
        else:
            words.append("resnet18" if job.kind == "classifier" else job.network)
        for key in ("space", "data", "epochs", "seed"):
            if key in given:
                words += [f"--{key}", str(given.pop(key))]
        for key, value in given.items():
            words += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
        return shlex.join([*words, "--out", str(self.folder_of(job))])


def random_cell(space: str, number: int, limit: int | None, form: Mapping[str, Any] | None = None) -> Genotype:
    """The `number`-th (from 1) random architecture of a space that can be trained and has at most `limit` parameters.

    Parameters are counted at the size of networks for CIFAR-10. form: settings of the space.
    """
    layout, have = build_space(space, form).layout(), 0
    for seed in range(1, MAX_DRAWS + 1):
        found = sample(layout, seed)
        if empty_cells(found, layout):
            continue
        if limit is None or _parameters(space, seed) <= limit:
            have += 1
            if have == number:
                return found
    within = "" if limit is None else f" with {limit:,} parameters or less"
    raise UserError(f"{MAX_DRAWS} random architectures of {space!r} have no {number} that can be trained{within}")


@cache
def _parameters(space: str, seed: int) -> int:
    return count_parameters(sample(build_space(space).layout(), seed))


def count_parameters(genotype: Genotype) -> int:
    """Parameters of the network for CIFAR-10, without the auxiliary tower (and without the pass that counts FLOPs)."""
    # Shapes are enough: no memory, no random numbers.
    with torch.device("meta"):
        network = evaluation_space(genotype.space, "cifar10").network(genotype, CIFAR_SHAPE, CIFAR_CLASSES)
    return sum(parameter.numel() for parameter in network.parameters())


def make_plan(
    paper: str,
    number: str | None = None,
    *,
    small: bool = False,
    out: Path | None = None,
    seeds: int | None = None,
    device: str = "auto",
) -> Plan:
    """The plan for one table of a paper, or for all of its tables.

    Example:
        >>> from softcell.app.reproduce import make_plan
        >>> plan = make_plan("snas", "2", small=True)
        >>> plan.folder.as_posix(), plan.jobs[0].title
        ('runs/reproduce-snas-small', 'search snas-mild, seed 0')
    """
    key = re.sub(r"[-_ ]", "", paper.lower())
    if key not in PAPERS:
        raise UserError(f"no plan for a paper {paper!r}; {nearest(paper, PAPERS)}")
    found = PAPERS[key]
    tables = found.tables
    if number is not None:
        by_number = {table.number.lower(): table for table in tables}
        if number.lower() not in by_number:
            raise UserError(
                f"{found.name} has no table {number!r} here; --table must be one of "
                f"{', '.join(table.number for table in tables)}"
            )
        tables = (by_number[number.lower()],)
    folder = out or RUNS / f"reproduce-{key}{'-small' if small else ''}"
    return Plan(found, tables, folder, small, seeds, device)


def chosen_rows(plan: Plan, names: Sequence[str]) -> set[str]:
    """The rows to run: all of them, or those whose names contain one of `names`."""
    every = [row.name for table in plan.tables for row in table.rows]
    if not names:
        return set(every)
    found = {row for row in every for name in names if name.lower() in row.lower()}
    unknown = [name for name in names if not any(name.lower() in row.lower() for row in every)]
    if unknown:
        raise UserError(f"no row contains {unknown[0]!r}; rows are {', '.join(dict.fromkeys(every))}")
    return found


CELLS = {
    # Liu et al., 2019: second order, CIFAR-10
    "DARTS_V2": (
        "Genotype(normal=[('sep_conv_3x3', 0), ('sep_conv_3x3', 1), ('sep_conv_3x3', 0), ('sep_conv_3x3', 1), "
        "('sep_conv_3x3', 1), ('skip_connect', 0), ('skip_connect', 0), ('dil_conv_3x3', 2)], "
        "normal_concat=range(2, 6), reduce=[('max_pool_3x3', 0), ('max_pool_3x3', 1), ('skip_connect', 2), "
        "('max_pool_3x3', 1), ('max_pool_3x3', 0), ('skip_connect', 2), ('skip_connect', 2), ('max_pool_3x3', 1)], "
        "reduce_concat=range(2, 6))"
    ),
    # Xu et al., 2020: CIFAR-10
    "PC-DARTS": (
        "Genotype(normal=[('sep_conv_3x3', 1), ('skip_connect', 0), ('sep_conv_3x3', 0), ('dil_conv_3x3', 1), "
        "('sep_conv_5x5', 0), ('sep_conv_3x3', 1), ('avg_pool_3x3', 0), ('dil_conv_3x3', 1)], "
        "normal_concat=range(2, 6), reduce=[('sep_conv_5x5', 1), ('max_pool_3x3', 0), ('sep_conv_5x5', 1), "
        "('sep_conv_5x5', 2), ('sep_conv_3x3', 0), ('sep_conv_3x3', 3), ('sep_conv_3x3', 1), ('sep_conv_3x3', 2)], "
        "reduce_concat=range(2, 6))"
    ),
    # Dong, Yang, 2019: GDAS_V1 of the authors' repository
    "GDAS": (
        "Genotype(normal=[('skip_connect', 0), ('skip_connect', 1), ('skip_connect', 0), ('sep_conv_5x5', 2), "
        "('sep_conv_3x3', 3), ('skip_connect', 0), ('sep_conv_5x5', 4), ('sep_conv_3x3', 3)], "
        "normal_concat=range(2, 6), reduce=[('sep_conv_5x5', 0), ('sep_conv_3x3', 1), ('sep_conv_5x5', 2), "
        "('sep_conv_5x5', 1), ('dil_conv_5x5', 2), ('sep_conv_3x3', 1), ('sep_conv_5x5', 0), ('sep_conv_5x5', 1)], "
        "reduce_concat=range(2, 6))"
    ),
    # Xie et al., 2019: the cells of Table 2, one edge for every pair of nodes (`edge_all` of the authors' repository)
    "SNAS-mild": (
        "Genotype(normal=[('sep_conv_3x3', 0), ('sep_conv_3x3', 1), ('skip_connect', 0), ('dil_conv_3x3', 1),"
        " ('none', 2), ('skip_connect', 0), ('skip_connect', 1), ('none', 3), ('none', 2), ('skip_connect', "
        "0), ('sep_conv_3x3', 1), ('none', 4), ('none', 3), ('none', 2)], normal_concat=range(2, 6), "
        "reduce=[('max_pool_3x3', 0), ('max_pool_3x3', 1), ('none', 0), ('max_pool_3x3', 1), ('skip_connect',"
        " 2), ('none', 0), ('max_pool_3x3', 1), ('skip_connect', 2), ('none', 3), ('max_pool_3x3', 0), "
        "('dil_conv_5x5', 2), ('none', 1), ('none', 3), ('none', 4)], reduce_concat=range(2, 6))"
    ),
    "SNAS-moderate": (
        "Genotype(normal=[('dil_conv_5x5', 0), ('skip_connect', 1), ('sep_conv_3x3', 0), ('skip_connect', 1),"
        " ('none', 2), ('skip_connect', 0), ('none', 3), ('none', 2), ('skip_connect', 1), ('sep_conv_3x3', "
        "0), ('dil_conv_5x5', 1), ('none', 4), ('none', 3), ('none', 2)], normal_concat=range(2, 6), "
        "reduce=[('max_pool_3x3', 0), ('max_pool_3x3', 1), ('sep_conv_5x5', 0), ('none', 2), ('dil_conv_5x5',"
        " 1), ('none', 3), ('none', 2), ('sep_conv_5x5', 0), ('sep_conv_5x5', 1), ('none', 4), ('none', 3), "
        "('none', 2), ('sep_conv_5x5', 0), ('sep_conv_5x5', 1)], reduce_concat=range(2, 6))"
    ),
    "SNAS-aggressive": (
        "Genotype(normal=[('sep_conv_5x5', 0), ('skip_connect', 1), ('skip_connect', 0), ('skip_connect', 1),"
        " ('none', 2), ('dil_conv_5x5', 1), ('skip_connect', 0), ('none', 2), ('none', 3), ('skip_connect', "
        "0), ('dil_conv_5x5', 1), ('none', 2), ('none', 3), ('none', 4)], normal_concat=range(2, 6), "
        "reduce=[('sep_conv_5x5', 0), ('none', 1), ('sep_conv_5x5', 0), ('none', 1), ('none', 2), ('none', "
        "0), ('none', 1), ('none', 2), ('none', 3), ('none', 0), ('none', 1), ('none', 2), ('none', 3), "
        "('none', 4)], reduce_concat=range(2, 6))"
    ),
}
"""Cells that papers have published, in the notation of DARTS: they are trained in addition to found ones."""
