"""The competition inside a run: which networks enter, how long they train in each round, which stay, which one wins.

Plain residual networks of up to three sizes, random cells and the found cell are trained for short, equal times and
measured on held-out training images. The best third is trained again, longer, and the winner gets the rest of the
run's time. The start of a training run, before its first step, is not part of these times. Cells are sized to the
multiply-adds of the largest plain network and train as long as it does; smaller plain networks train for the same
number of epochs. The largest plain network is in every round: smaller ones learn faster at first, so a short round says
little about which size is best in a training run that is many times longer.

First come the rules, as functions, then `Contest`, which applies them and saves every result in the plan at once.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from softcell.app import jobs
from softcell.app.baseline import random_others
from softcell.app.jobs import has_run
from softcell.app.pipeline._choose import Choice, held_out_share, train_recipe
from softcell.app.pipeline._inspect import Inspection
from softcell.app.pipeline._plain import MIN_EPOCHS, WIDTHS, in_words, meets
from softcell.app.pipeline._plan import Candidate, Kind, Plan, RunTime, TooLittleTimeError
from softcell.app.pipeline._summary import Decision, Result, standard_error
from softcell.app.progress import Screen
from softcell.arch import Genotype
from softcell.engine import DivergedError
from softcell.errors import UserError
from softcell.evaluate import TrainResult
from softcell.settings import build, to_dict
from softcell.spaces import build_space
from softcell.spaces.costs import Cost, count_genotype
from softcell.text import count_of

COMPETITION_SHARE = 0.2
"""Maximum share of the time for the competition if there is no search before it."""
MAX_TRAIN_EPOCHS = 0
"""Maximum epochs of a training run, in addition to its time limit; 0 for no limit."""
FIRST_SHARE = 0.4
"""Share of the competition's time for its first round."""
KEPT = 3
"""One network in `KEPT` reaches the second round, but at least two."""
ENTRY_EPOCHS = 5
"""Minimum epochs of the largest network in the first round; with less time, fewer networks enter."""
SEED_EPOCHS, MAX_SEEDS = 20, 3
"""The last round adds one seed for every `SEED_EPOCHS` epochs that fit into it, up to `MAX_SEEDS`."""
LONGER = 5.0
"""A smaller plain network may win if the final training has fewer epochs than this multiple of those in the round."""
MAX_STARTING = 0.5
"""Maximum share of a round's time reserved for starting its training runs."""
LARGEST = "plain-1"
"""The largest plain network."""


def by_importance(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The order in which networks enter while there is time; those at the end are cut first.

    The largest plain network, the found one and two random ones, for a comparison; then the rest. Smaller plain
    networks seldom win (see `decide`).
    """
    ranks: dict[str, int] = {}
    for kind, order in (("plain", (0, 4, 5)), ("found", (1,)), ("random", (2, 3))):
        own = [candidate for candidate in candidates if candidate.kind == kind]
        ranks |= {each.name: order[i] if i < len(order) else 6 + i for i, each in enumerate(own)}
    return sorted(candidates, key=lambda candidate: ranks[candidate.name])


def entrants(candidates: Sequence[Candidate], room: float, epoch: float, start: float = 0.0) -> list[Candidate]:
    """The candidates for whom the first round has time; fewer than two if there is no time for a competition.

    room: seconds for the whole competition. epoch: seconds of an epoch of the largest network. start: seconds before
    the first step of a training run.
    """
    entered: list[Candidate] = []
    for candidate in by_importance(candidates):
        more = [*entered, candidate]
        share = FIRST_SHARE if num_rounds(len(more)) > 1 else 1.0
        if (share * room - len(more) * start) / _lengths(more) < ENTRY_EPOCHS * epoch:
            break
        entered = more
    return entered


def least_competition(start: float, epoch: float) -> float:
    """Seconds of a competition of two networks; start and epoch as in `entrants`."""
    return 2 * (start + ENTRY_EPOCHS * epoch)


def num_rounds(entered: int) -> int:
    """Three networks or fewer are compared in one long round."""
    return 1 if entered <= 3 else 2


def round_time(
    entered: Sequence[Candidate], room: float, epoch: float, *, is_last: bool, start: float = 0.0
) -> tuple[float, int]:
    """Seconds of each training run of the largest size in a round, after its start, and the number of seeds."""
    room = room if is_last else FIRST_SHARE * room

    def seconds(seeds: int) -> float:
        num_runs = len(entered) * seeds
        return (room - min(num_runs * start, MAX_STARTING * room)) / (seeds * _lengths(entered))

    fitting = [seeds for seeds in range(2, MAX_SEEDS + 1) if seconds(seeds) >= SEED_EPOCHS * epoch]
    seeds = max(fitting, default=1) if is_last else 1
    return seconds(seeds), seeds


def _lengths(entered: Sequence[Candidate]) -> float:
    return sum(candidate.length for candidate in entered)


def survivors(results: Sequence[Result], kinds: Mapping[str, Kind], *, is_long: bool = True) -> tuple[str, ...]:
    """The networks that reach the second round, best first: the best third, and the largest plain network in any case.

    is_long: the final training has at least `LONGER` times the epochs of the second round. Smaller plain networks
    cannot win then and are left out. Otherwise the best plain network stays too.
    """
    base = _base(results, kinds)
    ranked = sorted(results, key=lambda result: -result.accuracy)  # stable: ties keep the order of entry
    if is_long:
        ranked = [result for result in ranked if kinds[result.name] != "plain" or result is base]
    best = next(result for result in ranked if kinds[result.name] == "plain")
    others = [result for result in ranked if result not in (best, base)]
    places = max(2, math.ceil(len(results) / KEPT)) - len({best.name, base.name})
    kept = [best, base, *others[: max(1, places)]]  # at least one to compare them with
    return tuple(result.name for result in ranked if result in kept)


def _base(results: Sequence[Result], kinds: Mapping[str, Kind]) -> Result:
    """The largest plain network; if it diverged, the best other one."""
    plain = [result for result in results if kinds[result.name] == "plain"]
    largest = next((result for result in plain if result.name == LARGEST and result.epochs), None)
    return largest or max(plain, key=lambda result: result.accuracy)


def decide(results: Sequence[Result], kinds: Mapping[str, Kind], count: int, longer: float) -> Decision:
    """The winner of the last round.

    longer: epochs of the final training relative to those of the round. A cell replaces the best plain network only if
    it is better by more than one standard error. So does a smaller plain network with the largest one, and only if
    `longer` is below `LONGER`: without a clear difference the large plain network is the safer choice, and in a much
    longer training run it is the better one, regardless of a short round.
    """
    ranked = sorted(results, key=lambda result: -result.accuracy)
    base = _base(results, kinds)
    plain = next(result for result in ranked if kinds[result.name] == "plain")
    ahead, against = ranked[0], plain if kinds[ranked[0].name] != "plain" else base
    lead, error = ahead.accuracy - against.accuracy, standard_error(ahead.accuracy, against.accuracy, count)
    if ahead is base:
        return Decision(base.name, "it was the best", "best", base.name, longer=longer)
    words = f"{lead * 100:.1f} points better than {against.name}"
    if kinds[ahead.name] != "plain" and lead > error:
        why = (
            f"it was {words}, the best plain network, which is more than one standard error ({error * 100:.1f} points "
            f"on {count_of(count, 'image')})"
        )
        return Decision(ahead.name, why, "cell", ahead.name, lead, error, longer)
    if kinds[ahead.name] != "plain":
        why = (
            f"{ahead.name} was {words}, which is within one standard error ({error * 100:.1f} points on "
            f"{count_of(count, 'image')}): the plain network is the safer choice"
        )
        # Among plain networks the same rules apply.
        rest = decide([result for result in results if kinds[result.name] == "plain"], kinds, count, longer)
        why += "" if rest.winner == plain.name else f". {rest.why}"
        return Decision(rest.winner, why, "unclear", ahead.name, lead, error, longer)
    if longer >= LONGER:
        why = (
            f"{ahead.name} was {words}, but it is smaller, and the final training has about {longer:.0f} times the "
            "epochs of the round: small networks lead only in short training runs"
        )
        return Decision(base.name, why, "longer", ahead.name, lead, error, longer)
    if lead > error:
        why = f"it was {words}, which is larger, and the final training is only {longer:.1f} times as long as the round"
        return Decision(ahead.name, why, "smaller", ahead.name, lead, error, longer)
    why = (
        f"{ahead.name} was {words}, which is within one standard error ({error * 100:.1f} points on "
        f"{count_of(count, 'image')}): the larger network is the safer choice"
    )
    return Decision(base.name, why, "unclear", ahead.name, lead, error, longer)


def sized(
    choice: Choice, genotype: Genotype, num_classes: int, limits: Mapping[str, float], most_multiply_adds: float
) -> tuple[dict[str, Any], Cost]:
    """The settings and costs of the widest network of `genotype`, up to the chosen width, that meets the limits.

    most_multiply_adds: not a limit but the size of the networks that it is compared with; the narrowest may have more.
    """
    known: dict[int, Cost] = {}
    most = choice.network.get("channels")  # None in spaces of a fixed width

    def settings(channels: int) -> dict[str, Any]:
        return {**choice.network, "channels": channels} if channels else choice.network

    def is_allowed(channels: int) -> bool:
        try:
            build_space(choice.space, settings(channels))
        except UserError:  # attention needs a multiple of its heads
            return False
        return True

    # 0 stands for the fixed width of the space.
    widths = [0] if most is None else [channels for channels in WIDTHS if channels <= most and is_allowed(channels)]

    def cost(channels: int) -> Cost:
        if channels not in known:
            space = build_space(choice.space, settings(channels))
            known[channels] = count_genotype(space, genotype, choice.shape, num_classes)
        return known[channels]

    # Costs grow with the width, so the widest is found by bisection.
    fitting = bisect_right(widths, False, key=lambda channels: not meets(cost(channels), limits))
    if not fitting:
        least = in_words(asdict(cost(widths[0])), limits)
        raise UserError(
            f"no network of space {choice.space} fits {in_words(limits, limits)}; the narrowest has {least}: raise the "
            "budget, or choose another --space or a smaller --image-size"
        )
    fair = [channels for channels in widths[:fitting] if cost(channels).multiply_adds <= most_multiply_adds]
    channels = fair[-1] if fair else widths[0]
    return settings(channels), cost(channels)


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
            # A round without `kept` was interrupted: it continues.
            if not rounds or "kept" in rounds[-1]:
                entered = [candidates[name] for name in (rounds[-1]["kept"] if rounds else state["entered"])]
                is_last = len(rounds) + 1 == num_rounds(len(state["entered"]))
                # A resumed or slow run may be past its time, but a round needs some: a time of 0 means no limit.
                room = max(min(state["until"], self.time.final_from) - plan.used(), 0.02 * self.request.time)
                seconds, seeds = round_time(entered, room, choice.epoch, is_last=is_last, start=choice.start)
                names = [each.name for each in by_importance(entered)]
                # Saved before it runs: a resumed round has the same seconds, seeds and networks.
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
            self.screen.print("", f"no competition: not enough time; training {candidates[0].name} instead", "")
        elif cut:
            self.screen.print("", f"skipped, not enough time: {', '.join(cut)}")
        return state

    def _round(self, choice: Choice, number: int, state: dict[str, Any], candidates: dict[str, Candidate]) -> None:
        """Trains all networks in the round, with every seed, then decides which stay or win."""
        plan, names, results = self.plan, state["names"], state["results"]
        assert plan.competition is not None
        jobs_left = [(seed, name) for seed in range(state["seeds"]) for name in names]
        of = f"round {number} of {num_rounds(len(plan.competition['entered']))}"
        seeds = f", {count_of(state['seeds'], 'seed')}" if state["seeds"] > 1 else ""
        what = f"{of}: {count_of(len(names), 'network')}, {state['seconds']:.1f} s each{seeds}"
        with self.screen.working(what) as step:
            for done, (seed, name) in enumerate(jobs_left):
                # Measured before the run was interrupted: every finished seed has left one accuracy.
                if len(results.get(name, {}).get("accuracies", ())) > seed:
                    continue
                step(done, len(jobs_left), name)
                # The largest plain network comes first in every round, so its epochs are known to the smaller ones.
                largest = results.get(LARGEST, {}).get("epochs", 0)
                own = results.setdefault(name, {"accuracies": [], "epochs": 0, "seconds": 0.0})
                try:
                    trained = self._compete_once(choice, candidates[name], number, state["seconds"], seed, largest)
                except DivergedError as error:
                    self.screen.print(f"{name}: the loss became {error.failure.value}, which counts as 0% accuracy")
                    own["accuracies"].append(0.0)
                    own["diverged"] = own.get("diverged", 0) + 1
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
            # There is no count if every network has diverged.
            made = decide(found, kinds, plan.competition.get("count", 1), self._times_longer(choice, found))
            state["kept"] = [made.winner]
            plan.competition |= decided(made)
        else:
            # A training run of the next round takes at most half of the time left for the round.
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
            epochs=epochs if candidate.kind == "plain" and candidate.name != LARGEST else MAX_TRAIN_EPOCHS,
            expected=seconds / choice.epoch,
            time=seconds,
            holdout=self.plan.competition["held_out"],
            seed=seed,
        )
        result = jobs.train(genotype, recipe, folder, resume=has_run(folder), startup=choice.start)
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
                # Seeds that diverged have no seconds.
                name: own["epochs"] * (len(own["accuracies"]) - own.get("diverged", 0)) / max(own["seconds"], 1e-6)
                for name, own in measured.items()
            }
        return pace

    def affordable(self, choice: Choice, winner: Candidate, seconds: float) -> Candidate:
        """The winner, or the plain network with most epochs if the machine has become too slow for the winner."""
        assert self.plan.competition is not None
        pace = self.paces(choice)
        if seconds * pace[winner.name] >= MIN_EPOCHS:
            return winner
        fastest = max(choice.plain, key=lambda each: pace[each.name])
        epochs = seconds * pace[fastest.name]
        if epochs < MIN_EPOCHS:
            raise TooLittleTimeError(
                f"the machine has become too slow: {max(0.0, seconds):.0f} s are left for {MIN_EPOCHS} epochs or "
                f"more, but only {max(0.0, epochs):.1f} of the smallest network fit; start a new run with more --time"
            )
        self.screen.print(f"{winner.name} replaced by {fastest.name}: fewer than {MIN_EPOCHS} epochs would be left")
        self.replace(winner, fastest)
        return fastest

    def smaller(self, choice: Choice, winner: Candidate, pace: float, seconds: float) -> Candidate | None:
        """The largest plain network that has `MIN_EPOCHS` in `seconds`, if `winner` has `pace` epochs per second."""
        for each in choice.plain:
            epochs = (seconds - choice.start) * pace * winner.length / each.length
            if each.length < winner.length and epochs >= MIN_EPOCHS:
                return each
        return None

    def replace(self, winner: Candidate, other: Candidate) -> None:
        """Records that `other` is trained for lack of time."""
        assert self.plan.competition is not None
        self.plan.competition |= decided(Decision(other.name, f"there was too little time left for {winner.name}"))


def decided(made: Decision) -> dict[str, Any]:
    """What a plan keeps of a decision. Plans of earlier versions have only `winner` and `why`."""
    return {"winner": made.winner, "why": made.why, "decision": to_dict(made)}
