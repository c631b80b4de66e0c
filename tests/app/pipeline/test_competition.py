"""The competition of a run: which networks enter, how long rounds are, which stay, which wins and why."""

from __future__ import annotations

import pytest

from softcell.app.pipeline._competition import (
    ENTRY_EPOCHS,
    FIRST_SHARE,
    LONGER,
    MAX_STARTING,
    SEED_EPOCHS,
    by_importance,
    decide,
    entrants,
    num_rounds,
    round_time,
    survivors,
)
from softcell.app.pipeline._plan import Candidate, Kind
from softcell.app.pipeline._summary import Decision, Result, standard_error


def kind_of(name: str) -> Kind:
    return name.split("-")[0]  # type: ignore[return-value]


def everyone(plain: int = 3, random: int = 3, found: bool = True) -> list[Candidate]:
    names = [f"plain-{i}" for i in range(1, plain + 1)] + ["found"] * found
    names += [f"random-{i}" for i in range(1, random + 1)]
    lengths = {"plain-2": 0.5, "plain-3": 0.25}
    return [Candidate(name, kind_of(name), {}, {}, 1, 1, lengths.get(name, 1.0)) for name in names]


def results(**accuracies: float) -> list[Result]:
    """`plain_1=0.5` is the accuracy of plain-1; 0.0 that of a network that diverged."""
    pairs = ((name.replace("_", "-"), own) for name, own in accuracies.items())
    return [Result(name, (own,), 5 if own else 0, 1.0) for name, own in pairs]


def stay(found: list[Result], *, is_long: bool = True) -> tuple[str, ...]:
    return survivors(found, {result.name: kind_of(result.name) for result in found}, is_long=is_long)


def decided(found: list[Result], longer: float = 2 * LONGER, count: int = 1000) -> Decision:
    return decide(found, {result.name: kind_of(result.name) for result in found}, count, longer)


@pytest.mark.parametrize("start", [0.0, 3.0])
def test_networks_enter_by_importance_and_the_last_are_cut_first(start: float) -> None:
    order = ["plain-1", "found", "random-1", "random-2", "plain-2", "plain-3", "random-3"]
    assert [each.name for each in by_importance(everyone())] == order
    assert [each.name for each in by_importance(everyone(random=5))][-2:] == ["random-4", "random-5"]
    before: list[Candidate] = []
    for room in range(250):
        entered = entrants(everyone(), float(room), epoch=1.0, start=start)
        assert [each.name for each in entered] == order[: len(entered)]  # more time never removes a network
        assert len(entered) >= len(before) or (len(before), len(entered)) == (3, 3)
        before = entered
        if entered:  # everyone gets some epochs in the first round, besides the start
            is_last = num_rounds(len(entered)) == 1
            seconds, seeds = round_time(entered, room, 1.0, is_last=is_last, start=start)
            assert seconds * seeds >= ENTRY_EPOCHS or start * len(entered) > MAX_STARTING * room
    assert len(before) == 7


def test_rounds_use_the_whole_time_and_the_last_one_has_seeds_if_there_is_time() -> None:
    entered = everyone()
    total = sum(each.length for each in entered)
    seconds, seeds = round_time(entered, 100.0, 1.0, is_last=False)
    assert (seconds * total, seeds) == (pytest.approx(FIRST_SHARE * 100), 1)
    pair = everyone(plain=1, random=0)
    for room, expected in ((SEED_EPOCHS, 1), (4 * SEED_EPOCHS, 2), (6 * SEED_EPOCHS, 3), (600 * SEED_EPOCHS, 3)):
        seconds, seeds = round_time(pair, room, 1.0, is_last=True)
        assert seeds == expected and seconds * seeds * 2 == pytest.approx(room)


def test_start_up_counts_towards_a_round_but_not_towards_training_seconds() -> None:
    pair = everyone(plain=1, random=0)
    assert round_time(pair, 30.0, 1.0, is_last=True, start=4.0) == (pytest.approx((30 - 2 * 4) / 2), 1)
    # 100 s: two seeds of two networks start four times, and leave 21 s, which is enough; three seeds do not.
    assert round_time(pair, 100.0, 1.0, is_last=True, start=4.0) == (pytest.approx((100 - 4 * 4) / 4), 2)
    first = everyone()
    lengths = sum(each.length for each in first)
    seconds, _ = round_time(first, 100.0, 1.0, is_last=False, start=1.0)
    assert seconds * lengths + 7 * 1.0 == pytest.approx(FIRST_SHARE * 100)
    assert round_time(pair, 10.0, 1.0, is_last=True, start=50.0)[0] == pytest.approx(MAX_STARTING * 10 / 2)


def test_the_best_third_stays_and_the_largest_plain_network_with_them() -> None:
    found = results(plain_1=0.5, found=0.7, plain_2=0.6, random_1=0.8, random_2=0.4, plain_3=0.3, random_3=0.75)
    assert stay(found) == ("random-1", "random-3", "plain-1")  # smaller plain networks cannot win
    assert stay(found, is_long=False) == ("random-1", "plain-2", "plain-1")  # the best plain one may
    found = results(plain_1=0.9, found=0.7, plain_2=0.6, random_1=0.8, random_2=0.4, plain_3=0.3, random_3=0.75)
    assert stay(found) == stay(found, is_long=False) == ("plain-1", "random-1", "random-3")
    found = results(plain_1=0.5, found=0.4, plain_2=0.65, random_1=0.3)
    assert stay(found) == ("plain-1", "found")
    assert stay(found, is_long=False) == ("plain-2", "plain-1", "found")  # there is a cell to compare them with
    tied = results(plain_1=0.5, found=0.5, plain_2=0.5, random_1=0.5)
    assert stay(tied) == ("plain-1", "found")  # the order of entry decides
    diverged = results(plain_1=0.0, found=0.7, plain_2=0.6, random_1=0.65)
    assert stay(diverged) == ("found", "plain-2")  # the best other plain network replaces it


def test_a_cell_wins_only_by_more_than_a_standard_error() -> None:
    for lead, winner, rule in ((0.03, "found", "cell"), (0.01, "plain-1", "unclear")):
        error = standard_error(0.65 + lead, 0.65, 1000)
        assert (lead > error) == (winner == "found")
        for longer in (1.0, 100.0):
            made = decided(results(plain_1=0.65, found=0.65 + lead, random_1=0.5), longer)
            assert (made.winner, made.rule, made.ahead) == (winner, rule, "found") and "plain-1" in made.why
            assert f"one standard error ({100 * error:.1f} points on 1,000 images)" in made.why
            assert (made.lead, made.error) == (pytest.approx(lead), pytest.approx(error))
    assert "safer choice" in made.why


def test_a_cell_must_beat_the_best_plain_network_of_any_size() -> None:
    made = decided(results(plain_1=0.6, plain_2=0.7, found=0.705))
    assert (made.winner, made.rule, made.ahead) == ("plain-1", "unclear", "found")
    assert "better than plain-2" in made.why and "the final training has about 10 times" in made.why
    assert decided(results(plain_1=0.6, plain_2=0.7, found=0.705), longer=2.0).winner == "plain-2"
    assert decided(results(plain_1=0.6, plain_2=0.7, found=0.75)).winner == "found"


def test_a_smaller_plain_network_wins_only_if_it_is_clearly_better_and_the_final_training_is_short() -> None:
    clear, unclear = results(plain_1=0.6, plain_2=0.64, found=0.5), results(plain_1=0.6, plain_2=0.61, found=0.5)
    cases = [
        (clear, 0.99 * LONGER, "plain-2", "smaller"),
        (clear, LONGER, "plain-1", "longer"),
        (unclear, 0.99 * LONGER, "plain-1", "unclear"),
        (unclear, LONGER, "plain-1", "longer"),
    ]
    for found, longer, winner, rule in cases:
        made = decided(found, longer)
        assert (made.winner, made.rule, made.ahead) == (winner, rule, "plain-2"), (longer, made)
        assert made.longer == longer and made.lead == pytest.approx(found[1].accuracy - 0.6)
    assert "about 5 times the epochs of the round" in decided(clear, LONGER).why
    assert "only 2.0 times as long" in decided(clear, 2.0).why
    assert "within one standard error" in decided(unclear, 2.0).why
    best = decided(results(plain_1=0.6, plain_2=0.5, found=0.5), 2.0)
    assert best == Decision("plain-1", "it was the best", "best", "plain-1", longer=2.0)


def test_a_largest_network_that_diverged_does_not_win() -> None:
    made = decided(results(plain_1=0.0, plain_2=0.6, plain_3=0.5, found=0.55))
    assert (made.winner, made.rule) == ("plain-2", "best")
