"""One run from images to a model in use: inspect, choose, search, train beside baselines, summarise, report, export.

Every decision is kept in `plan.json` before it is acted on, every long step runs in a run folder that can be resumed,
so a run that is stopped anywhere goes on from there. Time is planned from measured steps: the search gets its share,
and what is left when it ends is divided among trainings of equal length; random architectures that would not fit any
more are left out, and said so.
"""

from __future__ import annotations

import math
import os
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softcell.api import search_with, train_with
from softcell.app.pipeline.choose import Choice, cheaper, choose, explained, fit, plain_network
from softcell.app.pipeline.draws import random_others
from softcell.app.pipeline.early import TimeIsUpError, ending, extent, num_networks, shortened
from softcell.app.pipeline.ending import finish, summarise
from softcell.app.pipeline.enough import check_enough
from softcell.app.pipeline.inspect import Inspection, counted, inspect_dataset, inspect_folder, make_links
from softcell.app.pipeline.pace import Pace, probe, slowness
from softcell.app.pipeline.plan import LINKS, Plan
from softcell.app.pipeline.recipes import HOLDOUT, search_recipe, train_recipe
from softcell.app.pipeline.screen import Screen, clock, without_foreign_options
from softcell.app.pipeline.summary import Summary
from softcell.arch import Genotype
from softcell.data import load
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

SEARCH_SHARE = 0.3
"""Of the time: the search; the rest is for trainings."""
OVERRUN = 1.2
"""Times its expected length a search may take before it is ended early, to the good of the trainings."""
SAFE = 0.97
"""Plans are made for this share of the time, since measured steps are a forecast."""
ENDING = 12.0
"""Seconds of the processor for what comes after the trainings: latencies, report, exports. On a busy machine the clock
takes more."""
MOST_RESERVED = 45.0
MOST_SEARCH_EPOCHS, MOST_TRAIN_EPOCHS = 150, 300
MANY = 10_000
"""Epochs of a job whose pace is measured: more than it will see."""
PROBE = 0.01
"""Of the time, for measuring the pace of one job; at least and at most:"""
PROBE_BOUNDS = (0.3, 6.0)


@dataclass(frozen=True, slots=True)
class Outcome:
    """`exit_code` is not 0 where a signal ended the run early; `summary` is there when it reached its end."""

    exit_code: int
    summary: Summary | None


class _StoppedError(Exception):
    """A signal ended a job; its state is saved."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def run(plan: Plan, screen: Screen) -> Outcome:
    """Goes on with a plan to its end, or to a signal; of a finished one it gives what came out."""
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
        if begun and plan.choice is None:  # when the lock is gone: nothing of a refused run stays
            plan.discard()
        raise


def _run_alone(plan: Plan, screen: Screen) -> Outcome:
    try:
        with loaded_once(), warnings.catch_warnings():
            # Small data is what this is for: a batch cut to the images there are is no news.
            warnings.filterwarnings("ignore", message="batch_size=")
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
    """Notes how a run ended, on a full disk too; what went wrong at first is what the user has to hear of."""
    plan.status = status
    free_reserve(plan.folder)
    with suppress(UserError, OSError):
        plan.save()


def _diverged(error: DivergedError) -> str:
    """A run chooses rates itself and has no option for them: what can be done about a loss here is something else."""
    failure = error.failure
    return (
        f"every loss must be finite, but it became {failure.value} in epoch {error.epoch + 1} at step {failure.step}, "
        "and going on would lead there again. Start anew with another --seed, --method or --image-size; or search and "
        "train by hand with smaller rates: `softcell search --set weights.lr=...`, `softcell train --set lr=...`"
    )


class _Run:
    def __init__(self, plan: Plan, screen: Screen) -> None:
        self.plan, self.screen, self.wishes = plan, screen, plan.wishes
        self.device = resolve_device(plan.wishes.device)
        self.is_folder = plan.wishes.is_folder()
        self.root = plan.wishes.place()

    @property
    def usable(self) -> float:
        """Seconds up to which jobs may run: the time, less a margin and what report and export need."""
        return SAFE * self.wishes.time - self._reserved()

    def _reserved(self) -> float:
        return min(MOST_RESERVED, max(ENDING * slowness(self.plan.began), 0.03 * self.wishes.time))

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
        with self.screen.working("looking at the images") as step:
            if self.is_folder:
                found = inspect_folder(self.root, step)
                place = make_links(found, plan.folder / LINKS) if found.needs_links else self.root
                plan.data = str(place.resolve())
            else:
                found = inspect_dataset(load(self.wishes.data, self.wishes.data_root))
                plan.data = self.wishes.data
        plan.inspection = found.to_dict()
        plan.save()
        self.screen.say("data", *(f"  {line}" for line in found.lines()), "")
        check_enough(found)
        return found

    def choose(self, inspection: Inspection) -> Choice:
        """Decides what is searched, and measures its steps: where not even one epoch fits, something cheaper."""
        plan = self.plan
        if plan.choice is not None:
            return Choice.from_dict(plan.choice)
        is_gpu = self.device.type == "cuda"
        choice = choose(inspection, self.wishes, is_gpu=is_gpu, is_resizable=self.is_folder)
        while True:
            with self.screen.working(f"measuring the steps of a search at {choice.shape[1]}x{choice.shape[2]}"):
                pace = self._search_pace(choice)
            room = self.usable - plan.used()
            networks = num_networks(search_recipe(plan, choice, MANY))
            epochs = min(MOST_SEARCH_EPOCHS, pace.epochs_in(SEARCH_SHARE * room) // networks)
            smaller = cheaper(choice, is_resizable=self.is_folder and self.wishes.image_size is None)
            if epochs >= 1 and (epochs >= 5 or smaller is None or plan.used() > 0.2 * self.wishes.time):
                break
            if smaller is None or room <= 0:
                raise UserError(self._too_short(pace, networks, room))
            choice = smaller
        choice = explained(choice, inspection, self.wishes, is_gpu=is_gpu)
        plan.choice = choice.to_dict()
        expected, recipe = pace.total(epochs * networks), search_recipe(plan, choice, epochs)
        plan.search = {"recipe": recipe.to_dict(), "expected": expected}
        plan.save()
        self.screen.say("choice", *(f"  {line}" for line in choice.why), "")
        rest = self.usable - plan.used() - expected
        self.screen.say(
            f"plan for {clock(self.wishes.time)}, from measured steps",
            f"  search   {extent(recipe)}, each {pace.epoch:.1f} s, about {clock(expected)}",
            f"  train    the found network, a plain one and {self.wishes.random} random ones, all alike, about "
            f"{clock(rest)}",
            "",
        )
        return choice

    def _too_short(self, pace: Pace, networks: int, room: float) -> str:
        """Why the time does not do, and how much would."""
        used, reserved, least = self.plan.used(), self._reserved(), pace.total(networks)
        jobs = 6 * (least + networks * pace.epoch) / SEARCH_SHARE  # twice the least search, and trainings in proportion
        enough = math.ceil((used + reserved + jobs) / SAFE / 60)
        why = (
            f"starting and looking at the images took {used:.0f} s, and latencies, report and exports need about "
            f"{reserved:.0f} s more"
            if room <= 0
            else f"the smallest search takes {least:.1f} s here, and of the {room:.0f} s that are left for jobs "
            f"{SEARCH_SHARE * room:.1f} s are the search's"
        )
        return f"--time {self.wishes.time:.0f}s is too short: {why}; give at least --time {enough}m"

    def _search_pace(self, choice: Choice) -> Pace:
        recipe = search_recipe(self.plan, choice, MANY)
        split = recipe.split
        evaluated = float(split["validation"]) / float(split["weights"])
        scratch = self.plan.folder / "measuring"
        return probe(
            lambda folder, watch: search_with(recipe, folder, on_event=watch),
            scratch,
            self._probe_seconds(),
            evaluated=evaluated,
            tested=0.0,
        )

    def _probe_seconds(self) -> float:
        low, high = PROBE_BOUNDS
        return min(high, max(low, PROBE * self.wishes.time))

    def search(self, choice: Choice) -> Genotype:
        plan = self.plan
        assert plan.search is not None
        folder = plan.folder / "search"
        recipe = build(SearchRecipe, {**plan.search["recipe"], "data": plan.data}, "plan: search")
        heading = f"search {choice.method} in space {choice.space}, {extent(recipe)} ({self._standing()})"
        until = plan.search.setdefault("until", plan.used() + OVERRUN * plan.search["expected"])
        plan.save()
        try:
            with self.screen.job(heading) as shown:
                watched = self._saving(ending(shown, lambda: plan.used() > until, recipe))
                result = search_with(recipe, folder, resume=_begun(folder), on_event=watched)
        except TimeIsUpError as late:
            # Steps have become slower than those that were measured. What was learned is kept: the search ends here.
            shorter = shortened(recipe, late.epochs)
            self.screen.say(f"the search is cut from {extent(recipe)} to {extent(shorter)}: its time is up")
            plan.search["recipe"] = shorter.to_dict()
            RunFolder.open(folder).update(recipe=shorter.to_dict())
            replace_recipe(folder, shorter.to_dict())
            plan.save()
            return self.search(choice)
        if result.genotype is None:
            raise _StoppedError(result.exit_code)
        return result.genotype

    def train(self, choice: Choice, genotype: Genotype, inspection: Inspection) -> list[dict[str, Any]]:
        """Trains the found network, the plain one and the random ones, in this order, all for as many epochs."""
        plan = self.plan
        if plan.training is None:
            plan.training = self._plan_training(choice, genotype, inspection)
            plan.save()
        jobs: list[dict[str, Any]] = plan.training["jobs"]
        for job in jobs:
            if "row" not in job and not self._comes_too_late(job):
                self._train_one(job)
            plan.save()
        return [job["row"] for job in jobs if "row" in job]

    def _plan_training(self, choice: Choice, genotype: Genotype, inspection: Inspection) -> dict[str, Any]:
        wishes, limits, classes = self.wishes, self.wishes.limits(), len(inspection.train)
        layout = build_space(choice.space, choice.network).layout()
        found = fit(choice, genotype, classes, limits)
        cost = count_genotype(build_space(choice.space, found), genotype, choice.shape, classes)
        networks: list[tuple[str, Genotype, dict[str, Any]]] = [("train", genotype, found)]
        networks.append(("plain", *plain_network(cost, choice.shape, classes, limits)))
        for number, other in enumerate(random_others(genotype, layout, wishes.seed, wishes.random), 1):
            networks.append((f"random-{number}", other, fit(choice, other, classes, limits)))
        jobs: list[dict[str, Any]] = []
        with self.screen.working("measuring the steps of the trainings") as step:
            for number, (name, each, settings) in enumerate(networks):
                step(number, len(networks), name)
                pace = self._train_pace(choice, each, settings)
                jobs.append({"name": name, "genotype": each.to_dict(), "settings": settings, "pace": _numbers(pace)})
        room = self.usable - self.plan.used()
        per_epoch = sum(job["pace"]["epoch"] for job in jobs)
        around = sum(job["pace"]["startup"] + job["pace"]["tail"] for job in jobs)
        epochs = min(MOST_TRAIN_EPOCHS, max(1, int((room - around) / per_epoch)))
        for job in jobs:
            each = Genotype.from_dict(job["genotype"])
            job["recipe"] = train_recipe(self.plan, choice, each, job["settings"], epochs).to_dict()
            job["expected"] = Pace(**job["pace"]).total(epochs)
        total = sum(job["expected"] for job in jobs)
        self.screen.say(
            "",
            f"plan for the {clock(max(0.0, self.plan.left()))} left, from measured steps: "
            f"{counted(epochs, 'epoch')} each, about {clock(total)}",
            *(f"  {job['name']:<10} {clock(job['expected'])}" for job in jobs),
            "",
        )
        return {"epochs": epochs, "jobs": jobs}

    def _train_pace(self, choice: Choice, genotype: Genotype, settings: dict[str, Any]) -> Pace:
        recipe = train_recipe(self.plan, choice, genotype, settings, MANY)
        return probe(
            lambda folder, watch: train_with(genotype, recipe, folder, on_event=watch),
            self.plan.folder / "measuring",
            self._probe_seconds(),
            evaluated=HOLDOUT / (1.0 - HOLDOUT),
            tested=TEST_FRACTION,
        )

    def _comes_too_late(self, job: dict[str, Any]) -> bool:
        """Whether a random architecture, the third or a later one, would end after the time; it is then left out."""
        number = job["name"].removeprefix("random-")
        if not number.isdigit() or int(number) <= 2 or _begun(self.plan.folder / job["name"]):
            return False
        if self.plan.used() + job["expected"] <= self.usable + 0.02 * self.wishes.time:
            return False
        self.screen.say(f"{job['name']} is left out: the time would not do for it")
        return True

    def _train_one(self, job: dict[str, Any]) -> None:
        plan = self.plan
        folder, genotype = plan.folder / job["name"], Genotype.from_dict(job["genotype"])
        recipe = build(TrainRecipe, {**job["recipe"], "data": plan.data}, f"plan: {job['name']}")
        titles = {"train": "the found network", "plain": "a plain residual network of similar size"}
        title = titles.get(job["name"], f"random architecture {job['name'].removeprefix('random-')}")
        heading = f"train {title}, {counted(recipe.epochs, 'epoch')} ({self._standing()})"
        began, resumed = plan.used(), _begun(folder)
        with self.screen.job(heading) as shown:
            result = train_with(genotype, recipe, folder, resume=resumed, on_event=self._saving(shown))
        if result.exit_code:
            raise _StoppedError(result.exit_code)
        if result.accuracy is None:
            raise UserError(f"{self.wishes.data} has no test images, so networks cannot be compared; add a test set")
        job["row"] = {
            "name": job["name"],
            "accuracy": result.accuracy,
            "parameters": result.cost.parameters,
            "multiply_adds": result.cost.multiply_adds,
            "epochs": recipe.epochs,
            "seconds": round(sum(line["seconds"] for line in result.metrics), 1),
        }
        took = plan.used() - began
        self.screen.say(f"  {result.accuracy:.1%} on the test split, {result.cost.parameters:,} parameters")
        if took > 1.0 and not resumed:
            self._correct(took / job["expected"])

    def _correct(self, factor: float) -> None:
        """What a whole training took corrects the forecast of those that wait: machines get warm and busy."""
        assert self.plan.training is not None
        for other in self.plan.training["jobs"]:
            if "row" not in other:
                other["expected"] *= min(2.0, max(0.5, factor))

    def _standing(self) -> str:
        return f"{clock(self.plan.used())} of {clock(self.wishes.time)} used"

    def _saving(self, shown: OnEvent) -> OnEvent:
        """Passes events on, and keeps the time spent after every epoch: a killed run has not forgotten it."""

        def event(happened: Event) -> None:
            shown(without_foreign_options(happened))
            if isinstance(happened, EpochEnded):
                self.plan.save()

        return event


def _begun(folder: Path) -> bool:
    return (folder / "run.json").is_file()


def _numbers(pace: Pace) -> dict[str, float]:
    return {"startup": pace.startup, "epoch": pace.epoch, "tail": pace.tail}
