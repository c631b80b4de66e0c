"""The competition inside a run: which networks enter, how long they train in each round, who stays, who wins.

Plain residual networks of up to three sizes, random cells and the found cell are trained for short, equal times and
measured on held-out training images. The best third is trained again, longer, and the winner gets the rest of the
run's time. Cells are sized to the multiply-adds of the largest plain network and train as long as it does; smaller
plain networks train for as many epochs as it does, because equal seconds would favour whatever learns fast at first.
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

    The largest plain network, the found one, the next plain one and two random ones, for a comparison; then the rest.
    """
    ranks: dict[str, int] = {}
    for kind, order in (("plain", (0, 2, 5)), ("found", (1,)), ("random", (3, 4))):
        own = [candidate for candidate in candidates if candidate.kind == kind]
        ranks |= {each.name: order[i] if i < len(order) else 6 + i for i, each in enumerate(own)}
    return sorted(candidates, key=lambda candidate: ranks[candidate.name])


def entrants(candidates: Sequence[Candidate], room: float, epoch: float) -> list[Candidate]:
    """The candidates for whom the first round has time; fewer than two if there is no time for a competition.

    room: seconds for the whole competition. epoch: seconds of an epoch of the largest network.
    """
    entered: list[Candidate] = []
    for candidate in by_importance(candidates):
        lengths = sum(each.length for each in entered) + candidate.length
        share = FIRST_SHARE if num_rounds(len(entered) + 1) > 1 else 1.0
        if share * room / lengths < ENTRY_EPOCHS * epoch:
            break
        entered.append(candidate)
    return entered


def num_rounds(entered: int) -> int:
    """Three networks or fewer are compared in one long round."""
    return 1 if entered <= 3 else 2


def round_time(entered: Sequence[Candidate], room: float, epoch: float, *, is_last: bool) -> tuple[float, int]:
    """Seconds of each training of the largest size in a round, and the number of seeds."""
    whole = (room if is_last else FIRST_SHARE * room) / sum(candidate.length for candidate in entered)
    seeds = min(MOST_SEEDS, max(1, int(whole / (SEED_EPOCHS * epoch)))) if is_last else 1
    return whole / seeds, seeds


def standard_error(first: float, second: float, count: int) -> float:
    """Of the difference of two accuracies, each measured on `count` images."""
    return math.sqrt(max(first * (1 - first) + second * (1 - second), 0.5 / count) / count)


def survivors(results: Sequence[Result], kinds: Mapping[str, Kind]) -> tuple[str, ...]:
    """Who reaches the second round, the best first; the best plain network always does, to be compared with."""
    ranked = sorted(results, key=lambda result: -result.accuracy)  # stable: ties keep the order of entry
    kept = ranked[: max(2, math.ceil(len(results) / KEPT))]
    if not any(kinds[result.name] == "plain" for result in kept):
        kept[-1] = next(result for result in ranked if kinds[result.name] == "plain")
    return tuple(result.name for result in kept)


def decide(results: Sequence[Result], kinds: Mapping[str, Kind], count: int) -> tuple[str, str]:
    """The winner of the last round, and why it won.

    A cell replaces the best plain network only if it is better by more than one standard error: the final training is
    many times longer, and without a clear difference the plain network is the safer choice.
    """
    ranked = sorted(results, key=lambda result: -result.accuracy)
    best = ranked[0]
    plain = next((result for result in ranked if kinds[result.name] == "plain"), best)
    error = standard_error(best.accuracy, plain.accuracy, count)
    if best is plain:
        return best.name, "it was the best"
    lead = f"{(best.accuracy - plain.accuracy) * 100:.1f} points better than {plain.name}"
    if best.accuracy - plain.accuracy > error:
        return best.name, f"it was {lead}, the best plain network"
    return plain.name, (
        f"{best.name} was {lead}, which is within one standard error ({error * 100:.1f} points on "
        f"{count_of(count, 'image')}): the plain network is the safer choice"
    )
