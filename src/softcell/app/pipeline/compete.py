"""Runs the competition of a run: its plan, its rounds, who wins, and whether the time still allows for the winner.

The rules are in `softcell.app.pipeline.competition`. Every result is saved in the plan as soon as it is known.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from softcell.app import jobs
from softcell.app.baseline import LEAST_EPOCHS, random_others
from softcell.app.pipeline.choose import Choice, held_out_share, sized, train_recipe
from softcell.app.pipeline.competition import (
    LARGEST,
    LONGER,
    Candidate,
    Decision,
    Result,
    by_importance,
    decide,
    entrants,
    least_competition,
    num_rounds,
    round_time,
    survivors,
)
from softcell.app.pipeline.inspect import Inspection
from softcell.app.pipeline.plan import Plan, RunTime, TooLittleTimeError
from softcell.app.progress import Screen
from softcell.arch import Genotype
from softcell.engine import DivergedError
from softcell.evaluate import TrainResult
from softcell.settings import build, to_dict
from softcell.spaces import build_space
from softcell.text import count_of

COMPETITION_SHARE = 0.2
"""Most of the time for the competition, if there is no search before it."""
MOST_TRAIN_EPOCHS = 0
"""A limit besides the time; 0 for none."""


class StoppedError(Exception):
    """A signal interrupted a job; its state is saved."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class Contest:
    """The competition of one run. `time`: when it must be over."""

    def __init__(self, plan: Plan, screen: Screen, time: RunTime) -> None:
        self.plan, self.screen, self.request, self.time = plan, screen, plan.request, time

    def winner(self, choice: Choice, genotype: Genotype | None, inspection: Inspection) -> Candidate:
        """The winner of the competition; the largest plain network if there is no time for one."""
        plan = self.plan
        if plan.competition is None:
            plan.competition = self.planned(choice, genotype, inspection)
            plan.save()
        state = plan.competition
        candidates = {each["name"]: build(Candidate, each, "plan: candidate") for each in state["candidates"]}
        rounds: list[dict[str, Any]] = state["rounds"]
        while "winner" not in state:
            if not rounds or "kept" in rounds[-1]:
                entered = [candidates[name] for name in (rounds[-1]["kept"] if rounds else state["entered"])]
                is_last = len(rounds) + 1 == num_rounds(len(state["entered"]))
                room = max(min(state["until"], self.time.final_from) - plan.used(), 0.02 * self.request.time)
                seconds, seeds = round_time(entered, room, choice.epoch, is_last=is_last, start=choice.start)
                names = [each.name for each in by_importance(entered)]
                rounds.append({"seconds": seconds, "seeds": seeds, "names": names, "results": {}, "is_last": is_last})
                plan.save()
            self._round(choice, len(rounds), rounds[-1], candidates)
            plan.save()
        return candidates[state["winner"]]

    def planned(self, choice: Choice, genotype: Genotype | None, inspection: Inspection) -> dict[str, Any]:
        classes, limits = len(inspection.train), self.request.limits()
        candidates = list(choice.plain)
        # Cells get the multiply-adds of the largest plain network, so that equal times are a fair comparison.
        most = candidates[0].multiply_adds
        until = min(self.time.final_from, self.plan.used() + COMPETITION_SHARE * self.request.time)
        cells: list[tuple[str, Any, Genotype]] = [] if genotype is None else [("found", "found", genotype)]
        if until - self.plan.used() >= least_competition(choice.start, choice.epoch):  # sizing them takes a second
            layout = build_space(choice.space, choice.network).layout()
            for number, other in enumerate(random_others(genotype, layout, self.request.seed, self.request.random), 1):
                cells.append((f"random-{number}", "random", other))
        for name, kind, cell in cells:
            settings, cost = sized(choice, cell, classes, limits, most)
            candidates.append(Candidate(name, kind, cell.to_dict(), settings, cost.parameters, cost.multiply_adds))
        room = until - self.plan.used()
        entered = entrants(candidates, room, choice.epoch, choice.start)
        names = [each.name for each in entered]
        cut = [each.name for each in by_importance(candidates) if each.name not in names]
        state: dict[str, Any] = {
            "candidates": [to_dict(each) for each in candidates],
            "entered": names,
            "held_out": held_out_share(inspection.num_train),
            "cut": cut,
            "until": until,
            "rounds": [],
        }
        if len(names) < 2:
            made = Decision(candidates[0].name, "there was no time for a competition")
            state |= {**decided(made), "entered": [], "cut": []}
            self.screen.print("", f"no competition: not enough time; {candidates[0].name} is trained", "")
        elif cut:
            self.screen.print("", f"left out, for lack of time: {', '.join(cut)}")
        return state

    def _round(self, choice: Choice, number: int, state: dict[str, Any], candidates: dict[str, Candidate]) -> None:
        """Trains everyone in the round, with every seed, then decides who stays or wins."""
        plan, names, results = self.plan, state["names"], state["results"]
        assert plan.competition is not None
        jobs_left = [(seed, name) for seed in range(state["seeds"]) for name in names]
        of = f"round {number} of {num_rounds(len(plan.competition['entered']))}"
        seeds = f", {count_of(state['seeds'], 'seed')}" if state["seeds"] > 1 else ""
        what = f"{of}: {count_of(len(names), 'network')}, {state['seconds']:.1f} s each{seeds}"
        with self.screen.working(what) as step:
            for done, (seed, name) in enumerate(jobs_left):
                if len(results.get(name, {}).get("accuracies", ())) > seed:
                    continue
                step(done, len(jobs_left), name)
                largest = results.get(LARGEST, {}).get("epochs", 0)
                own = results.setdefault(name, {"accuracies": [], "epochs": 0, "seconds": 0.0})
                try:
                    trained = self._compete_once(choice, candidates[name], number, state["seconds"], seed, largest)
                except DivergedError as error:
                    self.screen.print(f"{name}: the loss became {error.failure.value}, which counts as 0% accuracy")
                    own["accuracies"].append(0.0)
                else:
                    row = trained.metrics[-1]
                    own["accuracies"].append(trained.accuracy)
                    own["epochs"] = row["epoch"] + 1
                    own["seconds"] = round(own["seconds"] + sum(line["seconds"] for line in trained.metrics), 2)
                    plan.competition["count"] = row["val_count"]
                plan.save()
        found = [Result(name, tuple(own["accuracies"]), own["epochs"], own["seconds"]) for name, own in results.items()]
        kinds = {name: candidate.kind for name, candidate in candidates.items()}
        if state["is_last"]:
            made = decide(found, kinds, plan.competition.get("count", 1), self._times_longer(choice, found))
            state["kept"] = [made.winner]
            plan.competition |= decided(made)
        else:
            # A training of the next round takes half of the time that is left for it at most.
            next_round = max(0.0, min(plan.competition["until"], self.time.final_from) - plan.used()) / 2
            is_long = self.time.end - plan.used() - 2 * next_round >= LONGER * next_round
            state["kept"] = list(survivors(found, kinds, is_long=is_long))
        self._show_round(what, found, state["kept"], candidates)

    def _times_longer(self, choice: Choice, found: list[Result]) -> float:
        """Epochs of the largest plain network in the final training, relative to those in the round."""
        own = next((result for result in found if result.name == LARGEST and result.epochs), None)
        seconds = max(0.0, self.time.end - self.plan.used() - choice.start)
        return 0.0 if own is None else seconds * self.paces(choice)[LARGEST] / own.epochs

    def _compete_once(
        self, choice: Choice, candidate: Candidate, number: int, seconds: float, seed: int, epochs: int
    ) -> TrainResult:
        """epochs: those of the largest plain network in this round, at which smaller ones stop; 0 if it is not in."""
        assert self.plan.competition is not None
        folder = self.plan.folder / f"round-{number}" / (f"{candidate.name}-seed-{seed}" if seed else candidate.name)
        genotype = Genotype.from_dict(candidate.genotype)
        recipe = train_recipe(
            self.plan,
            choice,
            genotype,
            candidate.settings,
            epochs=epochs if candidate.kind == "plain" and candidate.name != LARGEST else MOST_TRAIN_EPOCHS,
            expected=seconds / choice.epoch,
            time=seconds,
            holdout=self.plan.competition["held_out"],
            seed=seed,
        )
        result = jobs.train(genotype, recipe, folder, resume=is_begun(folder), startup=choice.start)
        if result.exit_code:
            raise StoppedError(result.exit_code)
        return result

    def _show_round(self, what: str, found: list[Result], kept: list[str], candidates: dict[str, Candidate]) -> None:
        assert self.plan.competition is not None
        images = count_of(self.plan.competition.get("count", 0), "held-out image")
        lines = [f"{what}, on {images} ({self.time.used_in_words()})"]
        for result in sorted(found, key=lambda result: -result.accuracy):
            stays = "" if result.name not in kept else "  wins" if len(kept) == 1 else "  stays"
            costs = f"{count_of(candidates[result.name].parameters, 'parameter')}, {count_of(result.epochs, 'epoch')}"
            lines.append(f"  {result.name:<10} {result.accuracy:>6.1%}  {costs}{stays}")
        self.screen.print("", *lines)

    def paces(self, choice: Choice) -> dict[str, float]:
        """Epochs per second of each network: as measured in its last round, or as forecast for plain ones."""
        assert self.plan.competition is not None
        pace = {each.name: 1 / (each.length * choice.epoch) for each in choice.plain}
        for each in self.plan.competition["rounds"]:
            measured = {name: own for name, own in each["results"].items() if own["epochs"]}
            pace |= {
                name: own["epochs"] * len(own["accuracies"]) / max(own["seconds"], 1e-6)
                for name, own in measured.items()
            }
        return pace

    def affordable(self, choice: Choice, winner: Candidate, seconds: float) -> Candidate:
        """The winner, or the plain network with most epochs if the machine has become too slow for the winner."""
        assert self.plan.competition is not None
        pace = self.paces(choice)
        if seconds * pace[winner.name] >= LEAST_EPOCHS:
            return winner
        fastest = max(choice.plain, key=lambda each: pace[each.name])
        epochs = seconds * pace[fastest.name]
        if epochs < LEAST_EPOCHS:
            raise TooLittleTimeError(
                f"the machine has become too slow: {max(0.0, seconds):.0f} s are left for {LEAST_EPOCHS} epochs or "
                f"more, but only {max(0.0, epochs):.1f} of the smallest network fit; start a new run with more --time"
            )
        self.screen.print(f"{winner.name} replaced by {fastest.name}: fewer than {LEAST_EPOCHS} epochs would be left")
        self.replace(winner, fastest)
        return fastest

    def smaller(self, choice: Choice, winner: Candidate, pace: float, seconds: float) -> Candidate | None:
        """The largest plain network that has `LEAST_EPOCHS` in `seconds`, if `winner` has `pace` epochs per second."""
        for each in choice.plain:
            epochs = (seconds - choice.start) * pace * winner.length / each.length
            if each.length < winner.length and epochs >= LEAST_EPOCHS:
                return each
        return None

    def replace(self, winner: Candidate, other: Candidate) -> None:
        """Records that `other` is trained for lack of time."""
        assert self.plan.competition is not None
        self.plan.competition |= decided(Decision(other.name, f"there was too little time left for {winner.name}"))


def decided(made: Decision) -> dict[str, Any]:
    """What a plan keeps of a decision. Plans of earlier versions have `winner` and `why` alone."""
    return {"winner": made.winner, "why": made.why, "decision": to_dict(made)}


def is_begun(folder: Path) -> bool:
    return (folder / "run.json").is_file()
