"""The competition inside a run: which networks enter, how long they train in each round, who stays, who wins.

Plain residual networks of up to three sizes, random cells and the found cell are trained for short, equal times and
measured on held-out training images. The best third is trained again, longer, and the winner gets the rest of the
run's time. The start of a training, before its first step, is not part of these times. Cells are sized to the
multiply-adds of the largest plain network and train as long as it does; smaller plain networks train for as many epochs
as it does. The largest plain network is in every round: smaller ones learn faster at first, so a short round says
little about which size is best in a training that is many times longer.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from softcell.text import count_of

FIRST_SHARE = 0.4
"""Share of the competition's time for its first round."""
KEPT = 3
"""One network in `KEPT` reaches the second round, but at least two."""
ENTRY_EPOCHS = 5
"""Least epochs of the largest network in the first round; with less time, fewer networks enter."""
SEED_EPOCHS, MOST_SEEDS = 20, 3
"""The last round adds one seed for every `SEED_EPOCHS` epochs that fit into it, up to `MOST_SEEDS`."""

LONGER = 5.0
"""A smaller plain network may win if the final training has fewer epochs than this multiple of those in the round."""
MOST_STARTING = 0.5
"""Most of a round's time that is set aside for the starts of its trainings."""

LARGEST = "plain-1"
"""The largest plain network."""
Kind = Literal["plain", "found", "random"]


@dataclass(frozen=True)
class Candidate:
    """A network of the competition. `length`: its expected training time relative to the largest plain network's.

    Example:
        >>> from softcell.app.pipeline.competition import Candidate
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


@dataclass(frozen=True)
class Result:
    """A network in one round: its accuracy on the held-out images for every seed, epochs per seed, and all seconds.

    Example:
        >>> from softcell.app.pipeline import Result
        >>> Result("found", accuracies=(0.7, 0.8), epochs=5, seconds=12.0).accuracy  # the mean
        0.75
    """

    name: str
    accuracies: tuple[float, ...]
    epochs: int
    seconds: float

    @property
    def accuracy(self) -> float:
        return statistics.fmean(self.accuracies)


@dataclass(frozen=True)
class Round:
    """`seconds`: of every training of the largest size. `kept`: who stays, the best first; the last round keeps one.

    Example:
        >>> from softcell.app.pipeline import Result, Round
        >>> results = (Result("plain-1", (0.7,), epochs=5, seconds=3.0), Result("found", (0.6,), epochs=5, seconds=3.0))
        >>> Round(3.0, seeds=1, results=results, kept=("plain-1",)).of("found").accuracy
        0.6
    """

    seconds: float
    seeds: int
    results: tuple[Result, ...]
    kept: tuple[str, ...]

    def of(self, name: str) -> Result | None:
        return next((result for result in self.results if result.name == name), None)


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
    the first step of a training.
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
    """Seconds of each training of the largest size in a round, after its start, and the number of seeds."""
    room = room if is_last else FIRST_SHARE * room

    def seconds(seeds: int) -> float:
        trainings = len(entered) * seeds
        return (room - min(trainings * start, MOST_STARTING * room)) / (seeds * _lengths(entered))

    fitting = [seeds for seeds in range(2, MOST_SEEDS + 1) if seconds(seeds) >= SEED_EPOCHS * epoch]
    seeds = max(fitting, default=1) if is_last else 1
    return seconds(seeds), seeds


def _lengths(entered: Sequence[Candidate]) -> float:
    return sum(candidate.length for candidate in entered)


def standard_error(first: float, second: float, count: int) -> float:
    """Of the difference of two accuracies, each measured on `count` images."""
    return math.sqrt(max(first * (1 - first) + second * (1 - second), 0.5 / count) / count)


def survivors(results: Sequence[Result], kinds: Mapping[str, Kind], *, is_long: bool = True) -> tuple[str, ...]:
    """Who reaches the second round, the best first: the best third, and the largest plain network in any case.

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


@dataclass(frozen=True)
class Decision:
    """The winner, and why, in words and as data.

    `rule`: `best` (ahead of all others), `longer` (a smaller plain network was ahead, but the final training is much
    longer), `unclear` (the network ahead leads by one standard error or less), `smaller` or `cell` (a clear lead over
    the largest, or the best, plain network) and `none` (no competition). `ahead` is the network that was ahead, `lead`
    its lead over the plain network that it was compared with, and `error` the standard error of that lead, all as
    shares. `longer`: epochs of the final training relative to those of the round.

    Example:
        >>> from softcell.app.pipeline import Decision
        >>> Decision("plain-1", "it was the best", "best", ahead="plain-1").winner
        'plain-1'
    """

    winner: str
    why: str
    rule: Literal["best", "longer", "unclear", "smaller", "cell", "none"] = "none"
    ahead: str = ""
    lead: float = 0.0
    error: float = 0.0
    longer: float = 0.0


def decide(results: Sequence[Result], kinds: Mapping[str, Kind], count: int, longer: float) -> Decision:
    """The winner of the last round.

    longer: epochs of the final training relative to those of the round. A cell replaces the best plain network only if
    it is better by more than one standard error. So does a smaller plain network with the largest one, and only if
    `longer` is below `LONGER`: without a clear difference the large plain network is the safer choice, and in a much
    longer training it is the better one whatever a short round says.
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
        why = f"it was {words}, the best plain network"
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
            "epochs of the round: small networks are ahead in short trainings alone"
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
