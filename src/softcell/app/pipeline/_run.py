"""One run from images to an exported model: inspect, choose, search, compete, train the winner, report, export.

Every decision is saved in `plan.json` before it takes effect, and every long step runs in a separate run folder, so
that an interrupted run can be resumed at any point. Time is planned from measured steps and corrected as it passes: the
final training gets at least `FINAL_SHARE` of it and ends when the time is up. If time is short, the competition is cut
first (fewer networks), then the search (fewer epochs, or none).
"""

from __future__ import annotations

import shutil
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softcell.app import jobs
from softcell.app.jobs import (
    JobTime,
    SearchTimeoutError,
    describe_length,
    has_run,
    measure_job,
    num_networks,
    shortened,
    stop_when_late,
)
from softcell.app.pipeline._choose import Choice, Chooser, measuring_seconds, search_recipe, train_recipe
from softcell.app.pipeline._competition import (
    COMPETITION_SHARE,
    MAX_TRAIN_EPOCHS,
    Contest,
    StoppedError,
    least_competition,
)
from softcell.app.pipeline._front import Front, read_front, run_front
from softcell.app.pipeline._inspect import (
    Inspection,
    OwnModel,
    check_num_images,
    inspect_dataset,
    inspect_folder,
    make_links,
    read_own,
)
from softcell.app.pipeline._plain import MIN_EPOCHS
from softcell.app.pipeline._plan import LINKS, Candidate, Plan, RunTime
from softcell.app.pipeline._summary import Summary, finish, summarise, verdict
from softcell.app.progress import Screen
from softcell.arch import Genotype
from softcell.data import load
from softcell.data.batches import SmallDataWarning
from softcell.data.catalogue import loaded_once
from softcell.data.dataset import TEST_FRACTION
from softcell.engine import DivergedError, RunFolder, resolve_device
from softcell.engine.checkpoint import replace_recipe
from softcell.engine.lock import free_reserve, locked
from softcell.engine.task import EpochEnded, Event, OnEvent, Stepped
from softcell.errors import UserError
from softcell.evaluate import TrainRecipe, TrainResult
from softcell.machine import num_processes
from softcell.search import SearchRecipe
from softcell.settings import build, to_dict
from softcell.text import Shown, clock, count_of

SEARCH_PART = 0.45
"""Part of the time between measuring and the final training that the search gets; the competition gets the rest."""
MIN_SEARCH_EPOCHS = 3
"""With time for fewer epochs there is no search."""
OVERRUN = 1.1
"""A search is ended once it has taken this multiple of its expected time, so that training keeps its share."""
MAX_SEARCH_EPOCHS = 150
"""A limit besides the time."""
MANY = 10_000
"""Epochs of a job that is measured: more than it will run."""
SAVED_EVERY = 2.0
"""Seconds between two records of the time that was spent."""
LOOKED_AT = 0.15
"""Share of the final training after which its number of epochs is forecast, until it has had enough of them."""


@dataclass(frozen=True, slots=True, repr=False)
class RunResult(Shown):
    """The result of `softcell run`; `summary` is None, and `exit_code` not 0, if a signal interrupted it.

    With several budgets, `front` lists their networks, `summary` describes the largest one, and `verdict` covers each
    of them.

    Example:
        >>> from softcell.app.pipeline import RunResult
        >>> from pathlib import Path
        >>> RunResult(Path("runs/photos"), summary=None, verdict=(), exit_code=130)
        RunResult(runs/photos: interrupted)
    """

    folder: Path
    summary: Summary | None
    verdict: tuple[str, ...]
    exit_code: int
    front: Front | None = None

    def __repr__(self) -> str:
        state = "interrupted" if self.summary is None else " ".join(self.verdict)
        return f"RunResult({self.folder}: {state})"


def run(plan: Plan, screen: Screen) -> RunResult:
    """Runs or resumes a plan until its end or a signal; returns the result of a finished one.

    Example:
        >>> from pathlib import Path
        >>> from softcell.app.pipeline import Plan, Row, RunRequest, Summary, run
        >>> one = Row("plain-1", "plain", "train", 0.95, 900, 5000, latency=1.5, epochs=50, seconds=90.0)
        >>> summary = Summary(one, "there was no time for a competition", (), (), 0, count=400, most_frequent=0.5)
        >>> request = RunRequest(data="photos")
        >>> plan = Plan(Path("runs/photos"), request, status="finished", summary=summary.to_dict())
        >>> run(plan, screen=None).summary.delivered.accuracy  # a finished run returns its summary again
        0.95
    """
    if plan.status == "finished" and plan.front is not None:
        return _result_of_front(plan, read_front(plan))
    if plan.status == "finished" and plan.summary is not None:
        return _result(plan, Summary.from_dict(plan.summary, plan.folder))
    if num_processes() > 1:
        raise UserError(
            "`softcell run` plans the time of one process; under torchrun use `softcell search` and `train`"
        )
    # Another process may hold the lock; its folder must not be discarded.
    begun = False
    try:
        with locked(plan.folder):
            begun = True
            return _run_alone(plan, screen)
    except UserError:
        if begun and plan.choice is None:  # after the lock is released: a rejected run leaves nothing behind
            plan.discard()
        raise


def _result(plan: Plan, summary: Summary | None, exit_code: int = 0) -> RunResult:
    return RunResult(plan.folder, summary, tuple((plan.summary or {}).get("verdict", ())), exit_code)


def _result_of_front(plan: Plan, front: Front) -> RunResult:
    said = tuple(f"{one.budget}: {' '.join(verdict(one.summary)[1])}" for one in front.entries)
    return RunResult(plan.folder, front.entries[-1].summary, said, 0, front)


def _run_alone(plan: Plan, screen: Screen) -> RunResult:
    try:
        with loaded_once(), warnings.catch_warnings():
            warnings.simplefilter("ignore", SmallDataWarning)  # runs are made for small data
            if plan.request.front() is not None:
                return _result_of_front(plan, run_front(plan, screen, _Run))
            return _result(plan, _Run(plan, screen).whole())
    except StoppedError as stopped:
        plan.status = "interrupted"
        plan.save()
        return _result(plan, None, stopped.exit_code)
    except UserError as error:
        # Without a choice `run` discards the folder, so there is nothing to record.
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


class _TooSlowError(Exception):
    """A training run would have too few epochs; the time left is enough for `smaller`."""

    def __init__(self, smaller: Candidate, epochs: float) -> None:
        super().__init__(smaller.name)
        self.smaller, self.epochs = smaller, epochs


class _Run:
    def __init__(self, plan: Plan, screen: Screen) -> None:
        self.plan, self.screen, self.request = plan, screen, plan.request
        resolve_device(plan.request.device)  # raises if there is no such device, before any work
        self.is_folder = plan.request.is_folder()
        self.root = plan.request.path()
        self.own: OwnModel | None = None
        self.time = RunTime(plan)
        self.contest = Contest(plan, screen, self.time)

    def whole(self) -> Summary:
        plan = self.plan
        plan.status = "running"
        inspection = self.inspect()
        self.read_beside(inspection)
        choice = self.choose(inspection)
        genotype = self.search(choice)
        winner = self.contest.winner(choice, genotype, inspection)
        trained = self.train(choice, winner)
        summary = summarise(plan, self.screen, trained, inspection, self.own)
        finish(plan, self.screen, self.time)
        plan.finish()
        return summary

    def inspect(self) -> Inspection:
        plan = self.plan
        if plan.inspection is not None:
            return Inspection.from_dict(plan.inspection)
        with self.screen.working("inspecting the images") as step:
            if self.is_folder:
                found = inspect_folder(self.root, step)
                images = make_links(found, plan.folder / LINKS) if found.needs_links else self.root
                plan.data = str(images.resolve())
            else:
                found = inspect_dataset(load(self.request.data, self.request.data_root))
                plan.data = self.request.data
        plan.inspection = found.to_dict()
        plan.save()
        self.screen.print("data", *(f"  {line}" for line in found.lines()), "")
        check_num_images(found)
        return found

    def read_beside(self, inspection: Inspection) -> None:
        """Reads the user's own model, if there is one, and checks that it fits the images."""
        if self.request.beside is None:
            return
        self.own = read_own(self.request.beside)
        side = None if self.is_folder else inspection.sides[1]
        each = self.own.check(inspection.channels, side, len(inspection.train))
        self.time.for_own = 1.5 * each * (sum(inspection.test.values()) or TEST_FRACTION * inspection.num_train)

    def choose(self, inspection: Inspection) -> Choice:
        """Chooses image size and networks from measured steps, and plans the search."""
        plan = self.plan
        if plan.choice is not None:
            return build(Choice, plan.choice, "plan: choice")
        choice = Chooser(plan, self.screen, self.time).choose(inspection)
        plan.choice = to_dict(choice)
        is_shared = plan.search is not None  # with several budgets, what they have in common is known and was shown
        plan.search = plan.search or self._plan_search(choice)
        plan.save()
        if not is_shared:
            self.screen.print("choice", *(f"  {line}" for line in choice.why), "")
        if self.request.front() is not None:
            return choice
        between = max(0.0, self.time.final_from - plan.used() - plan.search.get("expected", 0.0))
        between = min(between, COMPETITION_SHARE * self.request.time)
        competing = f"plain, found and random networks on held-out images, about {clock(between)}"
        final = choice.final
        if between < least_competition(choice.start, choice.epoch):
            competing = "none: the time is too short for one"
            final = max(final, self.time.end - plan.used())
        epochs = count_of(int(final / choice.epoch), "epoch")
        self.screen.print(
            f"plan for {clock(self.request.time)}, from measured steps",
            f"  search       {plan.search['length']}",
            f"  competition  {competing}",
            f"  training     the winner, about {clock(final)} ({epochs} of {choice.plain[0].name})",
            "",
        )
        return choice

    def _measure_search(self, choice: Choice) -> JobTime:
        recipe = search_recipe(self.plan, choice, MANY)
        split = recipe.split
        evaluated = float(split["validation"]) / float(split["weights"])
        return measure_job(
            lambda folder, watch: jobs.search(recipe, folder, on_event=watch),
            self.plan.folder / "measuring",
            measuring_seconds(self.request),
            evaluated=evaluated,
            tested=0.0,
        )

    def _plan_search(self, choice: Choice) -> dict[str, Any]:
        """The recipe of the search and its expected time; only its `length` in words if there is no time for one."""
        plan, why = self.plan, "none: the time is too short for one"
        room = self.time.final_from - plan.used()
        # What is found must be compared with the largest plain network, at least.
        if (1 - SEARCH_PART) * room < least_competition(choice.start, choice.epoch) or room < 4 * measuring_seconds(
            self.request
        ):
            return {"length": f"{why} and a comparison"}
        with self.screen.working("timing search steps"):
            measured = self._measure_search(choice)
        networks = num_networks(search_recipe(plan, choice, MANY))
        room = SEARCH_PART * (self.time.final_from - plan.used())
        epochs = min(MAX_SEARCH_EPOCHS, measured.epochs_in(room) // networks)
        if epochs < MIN_SEARCH_EPOCHS:
            least = measured.total(MIN_SEARCH_EPOCHS * networks)
            return {"length": f"{why} ({MIN_SEARCH_EPOCHS} epochs take {least:.0f} s)"}
        recipe, expected = search_recipe(plan, choice, epochs), measured.total(epochs * networks)
        length = f"{describe_length(recipe)}, {measured.epoch:.1f} s per epoch, about {clock(expected)}"
        return {"recipe": recipe.to_dict(), "expected": expected, "length": length}

    def search(self, choice: Choice) -> Genotype | None:
        """The found cell; None if there was no time for a search."""
        plan = self.plan
        assert plan.search is not None
        if "genotype" in plan.search:
            return Genotype.from_dict(plan.search["genotype"])
        if "recipe" not in plan.search:
            return None
        folder = plan.folder / "search"
        # The folder may have been moved: `plan.data` is where its images are now.
        recipe = build(SearchRecipe, {**plan.search["recipe"], "data": plan.data}, "plan: search")
        heading = (
            f"search {choice.method} in space {choice.space}, {describe_length(recipe)} ({self.time.used_in_words()})"
        )
        # The search also ends early enough to leave time for a competition.
        latest = self.time.final_from - least_competition(choice.start, choice.epoch)
        if plan.search.get("shortened"):
            # Manifest and checkpoint too: a search is only resumed with the recipe of its checkpoint. Removed from the
            # plan afterwards, so that a run killed in between does this again.
            RunFolder.open(folder).update(recipe=recipe.to_dict())
            replace_recipe(folder, recipe.to_dict())
            del plan.search["shortened"]
        # Stored once: a resumed search does not get its time again.
        until = plan.search.setdefault("until", min(plan.used() + OVERRUN * plan.search["expected"], latest))
        plan.save()
        try:
            with self.screen.job(heading) as shown:
                watched = self._saving(stop_when_late(shown, lambda: plan.used() > until, recipe))
                result = jobs.search(recipe, folder, resume=has_run(folder), on_event=watched)
        except SearchTimeoutError as late:
            # Steps became slower than measured. The search ends here and keeps what it has learned.
            run = RunFolder.open(folder)
            # The recipe of the run, not the planned one: it holds the precision that was chosen.
            shorter = shortened(build(SearchRecipe, run.manifest["recipe"], "run.json: recipe"), late.epochs)
            self.screen.print(
                f"search shortened from {describe_length(recipe)} to {describe_length(shorter)}: its time is up"
            )
            plan.search |= {"recipe": shorter.to_dict(), "shortened": True}
            plan.save()
            return self.search(choice)
        if result.genotype is None:
            raise StoppedError(result.exit_code)
        return result.genotype

    def train(self, choice: Choice, winner: Candidate) -> TrainResult:
        """The final training, on all training images, until time is up; then the test set is read once."""
        plan, folder = self.plan, self.plan.folder / "train"
        if plan.training is None:
            seconds = self.time.end - plan.used()
            winner = self.contest.affordable(choice, winner, seconds)
            recipe = train_recipe(
                plan,
                choice,
                Genotype.from_dict(winner.genotype),
                winner.settings,
                epochs=MAX_TRAIN_EPOCHS,
                expected=(seconds - choice.start) * self.contest.paces(choice).get(winner.name, 0.0),
                time=seconds,
                is_tested=True,
            )
            plan.training = {"name": winner.name, "recipe": recipe.to_dict(), "until": plan.used() + seconds}
            plan.save()
        genotype = Genotype.from_dict(winner.genotype)
        # As in `search`: where the images are now.
        recipe = build(TrainRecipe, {**plan.training["recipe"], "data": plan.data}, "plan: train")
        heading = f"train {winner.name} ({winner.title}) for {clock(recipe.time)} ({self.time.used_in_words()})"
        self.screen.print("")
        until = plan.training.get("until", self.time.end)
        try:
            with self.screen.job(heading) as shown:
                watched = self._saving(self._stop_when_slow(shown, choice, winner))
                result = jobs.train(
                    genotype,
                    recipe,
                    folder,
                    resume=has_run(folder),
                    on_event=watched,
                    # The end moves with the load of the machine, and the training follows it.
                    later=lambda: self.time.end - until,
                )
        except _TooSlowError as slow:
            smaller, epochs = slow.smaller, slow.epochs
            self.screen.print(f"{winner.name} replaced by {smaller.name}: the machine is slower than measured, and")
            self.screen.print(f"only {epochs:.1f} of at least {MIN_EPOCHS} epochs would be possible")
            self.contest.replace(winner, smaller)
            # Until the plan is saved, a resumed run trains the winner again, in a new folder.
            shutil.rmtree(folder)
            plan.training = None
            plan.save()
            return self.train(choice, smaller)
        if result.exit_code:
            raise StoppedError(result.exit_code)
        if result.accuracy is None:
            raise UserError(f"{self.request.data} has no test images to measure the network on; add a test set")
        return result

    def _stop_when_slow(self, listener: OnEvent, choice: Choice, winner: Candidate) -> OnEvent:
        """Forwards events; stops training that will have too few epochs, if a smaller network would have enough."""
        first: tuple[float, float] | None = None  # seconds and epochs after the first step, which includes the start

        def on_event(event: Event) -> None:
            nonlocal first
            listener(event)
            if not isinstance(event, Stepped):
                return
            used, done = self.plan.used(), event.epoch + event.step / event.steps
            if first is None:
                first = used, done
            passed, left = used - first[0], self.time.end - used
            if done >= MIN_EPOCHS or passed <= LOOKED_AT * (passed + left):
                return
            pace = (done - first[1]) / passed
            if done + pace * left < MIN_EPOCHS:
                smaller = self.contest.smaller(choice, winner, pace, left)
                if smaller is not None:
                    raise _TooSlowError(smaller, done + pace * left)

        return on_event

    def _saving(self, shown: OnEvent) -> OnEvent:
        """Forwards events, and saves the time spent now and then, so that a killed run keeps it."""
        saved = self.plan.used()

        def on_event(event: Event) -> None:
            nonlocal saved
            shown(event)
            if isinstance(event, EpochEnded) and self.plan.used() - saved > SAVED_EVERY:
                saved = self.plan.used()
                self.plan.save()

        return on_event
