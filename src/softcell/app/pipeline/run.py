"""One run from images to an exported model: inspect, choose, search, train beside baselines, summarise, report, export.

Every decision is saved in `plan.json` before it takes effect, and every long step runs in a run folder of its own, so
that an interrupted run can be resumed at any point. Time is planned from measured steps: the search gets its share, and
the remaining time is divided among trainings of equal length. Random architectures that no longer fit are skipped with
a message.
"""

from __future__ import annotations

import math
import os
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from softcell.app import jobs
from softcell.app.pipeline.choose import (
    HOLDOUT,
    Choice,
    cheaper,
    choose,
    explained,
    fit,
    plain_network,
    random_others,
    search_recipe,
    train_recipe,
)
from softcell.app.pipeline.inspect import Inspection, check_num_images, inspect_dataset, inspect_folder, make_links
from softcell.app.pipeline.plan import LINKS, Plan, Screen
from softcell.app.pipeline.summary import Summary, finish, summarise
from softcell.app.pipeline.time_budget import (
    JobTime,
    SearchTimeoutError,
    describe_length,
    measure_job,
    num_networks,
    shortened,
    slowness,
    stop_when_late,
)
from softcell.arch import Genotype
from softcell.data import load
from softcell.data.batches import SmallDataWarning
from softcell.data.catalogue import loaded_once
from softcell.data.dataset import TEST_FRACTION
from softcell.engine import DivergedError, RunFolder, resolve_device
from softcell.engine.checkpoint import replace_recipe
from softcell.engine.lock import free_reserve, locked
from softcell.engine.task import EpochEnded, Event, OnEvent
from softcell.errors import UserError
from softcell.evaluate import TrainRecipe, count_genotype
from softcell.search import SearchRecipe
from softcell.settings import build
from softcell.spaces import build_space
from softcell.text import clock, count_of

SEARCH_SHARE = 0.3
"""Share of the time for the search; the rest is for trainings."""
OVERRUN = 1.2
"""A search is ended once it has taken this multiple of its expected time, so that trainings keep theirs."""
SAFE = 0.97
"""Share of the time that is planned, because measured steps are only a forecast."""
ENDING = 12.0
"""CPU seconds for latencies, report and exports after the trainings; a busy machine takes longer."""
MOST_RESERVED = 45.0
MOST_SEARCH_EPOCHS, MOST_TRAIN_EPOCHS = 150, 300
MANY = 10_000
"""Epochs of a job that is measured: more than it will run."""
MEASURING = 0.01
"""Share of the time for measuring one job, within these bounds in seconds:"""
MEASURING_BOUNDS = (0.3, 6.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """`exit_code` is not 0 if a signal interrupted the run; `summary` is there if it was completed.

    Example:
        >>> from softcell.app.pipeline import Outcome
        >>> Outcome(exit_code=130, summary=None).exit_code  # interrupted by Ctrl-C
        130
    """

    exit_code: int
    summary: Summary | None


class _StoppedError(Exception):
    """A signal interrupted a job; its state is saved."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def run(plan: Plan, screen: Screen) -> Outcome:
    """Runs or resumes a plan until its end or a signal; returns the result of a finished one.

    Example:
        >>> from pathlib import Path
        >>> from softcell.app.pipeline import Plan, Row, RunRequest, Summary, run
        >>> def row(name, accuracy):
        ...     return Row(name, name, accuracy, parameters=1, multiply_adds=1, latency=1.0, epochs=1, seconds=1.0)
        >>> draws = (row("random-1", 0.80), row("random-2", 0.84))
        >>> summary = Summary(row("train", 0.95), draws, row("plain", 0.90), count=400, most_frequent=0.5)
        >>> request = RunRequest(data="photos")
        >>> plan = Plan(Path("runs/photos"), request, status="finished", summary=summary.to_dict())
        >>> run(plan, screen=None).summary.found.accuracy  # a finished run returns its summary again
        0.95
    """
    if plan.status == "finished" and plan.summary is not None:
        return Outcome(0, Summary.from_dict(plan.summary, plan.folder))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "`softcell run` plans the time of one process; under torchrun use `softcell search` and `train`"
        )
    begun = False
    try:
        with locked(plan.folder):
            begun = True
            return _run_alone(plan, screen)
    except UserError:
        if begun and plan.choice is None:  # after the lock is released: nothing of a rejected run stays
            plan.discard()
        raise


def _run_alone(plan: Plan, screen: Screen) -> Outcome:
    try:
        with loaded_once(), warnings.catch_warnings():
            warnings.simplefilter("ignore", SmallDataWarning)  # runs are made for small data
            return Outcome(0, _Run(plan, screen).whole())
    except _StoppedError as stopped:
        plan.status = "interrupted"
        plan.save()
        return Outcome(stopped.exit_code, None)
    except UserError as error:
        if plan.choice is not None:
            _record(plan, "failed")
        if isinstance(error, DivergedError):
            raise UserError(_diverged(error)) from error
        raise
    except BaseException as error:
        _record(plan, "interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        raise


def _record(plan: Plan, status: str) -> None:
    """Records how a run ended. Errors on a full disk are ignored: the user needs to see the first error."""
    plan.status = status
    free_reserve(plan.folder)
    with suppress(UserError, OSError):
        plan.save()


def _diverged(error: DivergedError) -> str:
    """Advice for `softcell run`, which has no options for learning rates."""
    failure = error.failure
    return (
        f"every loss must be finite, but it became {failure.value} in epoch {error.epoch + 1} at step {failure.step}, "
        "and resuming would repeat it. Start a new run with another --seed, --method or --image-size; or search and "
        "train separately with smaller learning rates: `softcell search --set weights.lr=...`, `softcell train "
        "--set lr=...`"
    )


class _Run:
    def __init__(self, plan: Plan, screen: Screen) -> None:
        self.plan, self.screen, self.request = plan, screen, plan.request
        self.device = resolve_device(plan.request.device)
        self.is_folder = plan.request.is_folder()
        self.root = plan.request.path()

    @property
    def usable(self) -> float:
        """Seconds until which jobs may run: the time less a margin and the time for report and exports."""
        return SAFE * self.request.time - self._reserved()

    def _reserved(self) -> float:
        return min(MOST_RESERVED, max(ENDING * slowness(self.plan.began), 0.03 * self.request.time))

    def whole(self) -> Summary:
        plan = self.plan
        plan.status = "running"
        inspection = self.inspect()
        choice = self.choose(inspection)
        genotype = self.search(choice)
        rows = self.train(choice, genotype, inspection)
        summary = summarise(plan, self.screen, rows, inspection)
        finish(plan, self.screen, summary)
        plan.finish()
        return summary

    def inspect(self) -> Inspection:
        plan = self.plan
        if plan.inspection is not None:
            return Inspection.from_dict(plan.inspection)
        with self.screen.working("inspecting the images") as step:
            if self.is_folder:
                found = inspect_folder(self.root, step)
                place = make_links(found, plan.folder / LINKS) if found.needs_links else self.root
                plan.data = str(place.resolve())
            else:
                found = inspect_dataset(load(self.request.data, self.request.data_root))
                plan.data = self.request.data
        plan.inspection = found.to_dict()
        plan.save()
        self.screen.print("data", *(f"  {line}" for line in found.lines()), "")
        check_num_images(found)
        return found

    def choose(self, inspection: Inspection) -> Choice:
        """Chooses what to search and measures its steps; falls back to something cheaper if not even one epoch fits."""
        plan = self.plan
        if plan.choice is not None:
            return Choice.from_dict(plan.choice)
        is_gpu = self.device.type == "cuda"
        choice = choose(inspection, self.request, is_gpu=is_gpu, is_resizable=self.is_folder)
        while True:
            with self.screen.working(f"measuring the steps of a search at {choice.shape[1]}x{choice.shape[2]}"):
                measured = self._measure_search(choice)
            room = self.usable - plan.used()
            networks = num_networks(search_recipe(plan, choice, MANY))
            epochs = min(MOST_SEARCH_EPOCHS, measured.epochs_in(SEARCH_SHARE * room) // networks)
            smaller = cheaper(choice, is_resizable=self.is_folder and self.request.image_size is None)
            if epochs >= 1 and (epochs >= 5 or smaller is None or plan.used() > 0.2 * self.request.time):
                break
            if smaller is None or room <= 0:
                raise UserError(self._too_short(measured, networks, room))
            choice = smaller
        choice = explained(choice, inspection, self.request, is_gpu=is_gpu)
        plan.choice = choice.to_dict()
        expected, recipe = measured.total(epochs * networks), search_recipe(plan, choice, epochs)
        plan.search = {"recipe": recipe.to_dict(), "expected": expected}
        plan.save()
        self.screen.print("choice", *(f"  {line}" for line in choice.why), "")
        rest = self.usable - plan.used() - expected
        self.screen.print(
            f"plan for {clock(self.request.time)}, from measured steps",
            f"  search   {describe_length(recipe)}, {measured.epoch:.1f} s per epoch, about {clock(expected)}",
            f"  train    the found network, a plain one and {self.request.random} random ones, about {clock(rest)}",
            "",
        )
        return choice

    def _too_short(self, measured: JobTime, networks: int, room: float) -> str:
        """Why the time is too short, and how much is needed."""
        used, reserved, least = self.plan.used(), self._reserved(), measured.total(networks)
        jobs = (
            6 * (least + networks * measured.epoch) / SEARCH_SHARE
        )  # twice the shortest search, with trainings in proportion
        minutes = math.ceil((used + reserved + jobs) / SAFE / 60)
        why = (
            f"starting and inspecting the images took {used:.0f} s, and latencies, report and exports need about "
            f"{reserved:.0f} s more"
            if room <= 0
            else f"the shortest search takes {least:.1f} s here, but only {SEARCH_SHARE * room:.1f} s of the remaining "
            f"{room:.0f} s are for the search"
        )
        return f"--time {self.request.time:.0f}s is too short: {why}; give at least --time {minutes}m"

    def _measure_search(self, choice: Choice) -> JobTime:
        recipe = search_recipe(self.plan, choice, MANY)
        split = recipe.split
        evaluated = float(split["validation"]) / float(split["weights"])
        scratch = self.plan.folder / "measuring"
        return measure_job(
            lambda folder, watch: jobs.search(recipe, out=folder, on_event=watch),
            scratch,
            self._measuring_seconds(),
            evaluated=evaluated,
            tested=0.0,
        )

    def _measuring_seconds(self) -> float:
        low, high = MEASURING_BOUNDS
        return min(high, max(low, MEASURING * self.request.time))

    def search(self, choice: Choice) -> Genotype:
        plan = self.plan
        assert plan.search is not None
        folder = plan.folder / "search"
        recipe = build(SearchRecipe, {**plan.search["recipe"], "data": plan.data}, "plan: search")
        heading = f"search {choice.method} in space {choice.space}, {describe_length(recipe)} ({self._time_used()})"
        until = plan.search.setdefault("until", plan.used() + OVERRUN * plan.search["expected"])
        plan.save()
        try:
            with self.screen.job(heading) as shown:
                watched = self._saving(stop_when_late(shown, lambda: plan.used() > until, recipe))
                result = jobs.search(recipe, out=folder, resume=_begun(folder), on_event=watched)
        except SearchTimeoutError as late:
            # Steps became slower than measured. The search ends here and keeps what it has learned.
            shorter = shortened(recipe, late.epochs)
            self.screen.print(
                f"search shortened from {describe_length(recipe)} to {describe_length(shorter)}: its time is up"
            )
            plan.search["recipe"] = shorter.to_dict()
            RunFolder.open(folder).update(recipe=shorter.to_dict())
            replace_recipe(folder, shorter.to_dict())
            plan.save()
            return self.search(choice)
        if result.genotype is None:
            raise _StoppedError(result.exit_code)
        return result.genotype

    def train(self, choice: Choice, genotype: Genotype, inspection: Inspection) -> list[dict[str, Any]]:
        """Trains the found network, the plain one and the random ones, in this order, for the same number of epochs."""
        plan = self.plan
        if plan.training is None:
            plan.training = self._plan_training(choice, genotype, inspection)
            plan.save()
        jobs: list[dict[str, Any]] = plan.training["jobs"]
        for job in jobs:
            if "row" not in job and not self._is_too_late(job):
                self._train_one(job)
            plan.save()
        return [job["row"] for job in jobs if "row" in job]

    def _plan_training(self, choice: Choice, genotype: Genotype, inspection: Inspection) -> dict[str, Any]:
        request, limits, classes = self.request, self.request.limits(), len(inspection.train)
        layout = build_space(choice.space, choice.network).layout()
        found = fit(choice, genotype, classes, limits)
        cost = count_genotype(build_space(choice.space, found), genotype, choice.shape, classes)
        networks: list[tuple[str, Genotype, dict[str, Any]]] = [("train", genotype, found)]
        networks.append(("plain", *plain_network(cost, choice.shape, classes, limits)))
        for number, other in enumerate(random_others(genotype, layout, request.seed, request.random), 1):
            networks.append((f"random-{number}", other, fit(choice, other, classes, limits)))
        jobs: list[dict[str, Any]] = []
        with self.screen.working("measuring the steps of the trainings") as step:
            for number, (name, each, settings) in enumerate(networks):
                step(number, len(networks), name)
                measured = self._measure_training(choice, each, settings)
                times = asdict(measured)
                jobs.append({"name": name, "genotype": each.to_dict(), "settings": settings, "pace": times})
        room = self.usable - self.plan.used()
        per_epoch = sum(job["pace"]["epoch"] for job in jobs)
        around = sum(job["pace"]["startup"] + job["pace"]["tail"] for job in jobs)
        epochs = min(MOST_TRAIN_EPOCHS, max(1, int((room - around) / per_epoch)))
        for job in jobs:
            each = Genotype.from_dict(job["genotype"])
            job["recipe"] = train_recipe(self.plan, choice, each, job["settings"], epochs).to_dict()
            job["expected"] = JobTime(**job["pace"]).total(epochs)
        total = sum(job["expected"] for job in jobs)
        self.screen.print(
            "",
            f"plan for the remaining {clock(max(0.0, self.plan.left()))}, from measured steps: "
            f"{count_of(epochs, 'epoch')} each, about {clock(total)}",
            *(f"  {job['name']:<10} {clock(job['expected'])}" for job in jobs),
            "",
        )
        return {"epochs": epochs, "jobs": jobs}

    def _measure_training(self, choice: Choice, genotype: Genotype, settings: dict[str, Any]) -> JobTime:
        recipe = train_recipe(self.plan, choice, genotype, settings, MANY)
        return measure_job(
            lambda folder, watch: jobs.train(genotype, recipe, out=folder, on_event=watch),
            self.plan.folder / "measuring",
            self._measuring_seconds(),
            evaluated=HOLDOUT / (1.0 - HOLDOUT),
            tested=TEST_FRACTION,
        )

    def _is_too_late(self, job: dict[str, Any]) -> bool:
        """Whether a random architecture, the third or a later one, no longer fits into the time and is skipped."""
        number = job["name"].removeprefix("random-")
        if not number.isdigit() or int(number) <= 2 or _begun(self.plan.folder / job["name"]):
            return False
        if self.plan.used() + job["expected"] <= self.usable + 0.02 * self.request.time:
            return False
        self.screen.print(f"{job['name']} skipped: not enough time left")
        return True

    def _train_one(self, job: dict[str, Any]) -> None:
        plan = self.plan
        folder, genotype = plan.folder / job["name"], Genotype.from_dict(job["genotype"])
        recipe = build(TrainRecipe, {**job["recipe"], "data": plan.data}, f"plan: {job['name']}")
        titles = {"train": "the found network", "plain": "a plain residual network of similar size"}
        title = titles.get(job["name"], f"random architecture {job['name'].removeprefix('random-')}")
        heading = f"train {title}, {count_of(recipe.epochs, 'epoch')} ({self._time_used()})"
        began, resumed = plan.used(), _begun(folder)
        with self.screen.job(heading) as shown:
            result = jobs.train(genotype, recipe, out=folder, resume=resumed, on_event=self._saving(shown))
        if result.exit_code:
            raise _StoppedError(result.exit_code)
        if result.accuracy is None:
            raise UserError(f"{self.request.data} has no test images, so networks cannot be compared; add a test set")
        job["row"] = {
            "name": job["name"],
            "accuracy": result.accuracy,
            "parameters": result.cost.parameters,
            "multiply_adds": result.cost.multiply_adds,
            "epochs": recipe.epochs,
            "seconds": round(sum(line["seconds"] for line in result.metrics), 1),
        }
        took = plan.used() - began
        self.screen.print(f"  {result.accuracy:.1%} on the test split, {count_of(result.cost.parameters, 'parameter')}")
        if took > 1.0 and not resumed:
            self._correct(took / job["expected"])

    def _correct(self, factor: float) -> None:
        """Corrects the forecast of the remaining trainings by the time of a whole one: machines get warm and busy."""
        assert self.plan.training is not None
        for other in self.plan.training["jobs"]:
            if "row" not in other:
                other["expected"] *= min(2.0, max(0.5, factor))

    def _time_used(self) -> str:
        return f"{clock(self.plan.used())} of {clock(self.request.time)} used"

    def _saving(self, shown: OnEvent) -> OnEvent:
        """Forwards events, and saves the time spent after every epoch, so that a killed run keeps it."""

        def on_event(event: Event) -> None:
            shown(event)
            if isinstance(event, EpochEnded):
                self.plan.save()

        return on_event


def _begun(folder: Path) -> bool:
    return (folder / "run.json").is_file()
