"""Parts of a run: random architectures, late searches, the verdict, the minimum number of images."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from softcell.app.baseline import random_others
from softcell.app.jobs import SearchTimeoutError, num_networks, shortened, stop_when_late
from softcell.app.pipeline import Beside, Entry, Result, Round, Row, Summary, verdict
from softcell.app.pipeline._choose import held_out_share
from softcell.app.pipeline._inspect import MIN_TRAINING, Inspection, check_num_images, least_images
from softcell.app.pipeline._plan import Kind
from softcell.app.pipeline._summary import standard_error
from softcell.arch import count, sample
from softcell.data import split
from softcell.data.dataset import hold_out_test
from softcell.engine.task import EpochEnded, Event
from softcell.errors import UserError
from softcell.methods import METHODS, Sampler
from softcell.search import SearchRecipe, resolve
from softcell.search.supernet import overfit_warning
from softcell.settings import build
from softcell.spaces import build_space


def random_recipe(epochs: int = 10, samples: int = 4) -> SearchRecipe:
    return resolve({"method": "random", "space": "nb201", "epochs": epochs, "method_settings": {"samples": samples}})


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_random_architectures_differ_from_those_of_random_searches_with_near_seeds(seed: int) -> None:
    layout = build_space("darts").layout()
    kind = METHODS.get("random")
    assert issubclass(kind, Sampler)
    tried = [
        kind(layout, build(kind.Settings, {}, "x"), near).propose(number, []).cells
        for near in (seed - 1, seed, seed + 1)
        for number in range(50)
    ]
    others = random_others(kind(layout, build(kind.Settings, {}, "x"), seed).propose(0, []), layout, seed, 20)
    assert not any(other.cells in tried for other in others)
    assert all(a.cells != b.cells for i, a in enumerate(others) for b in others[:i])


def test_random_architectures_of_a_small_space_repeat_only_when_all_are_used() -> None:
    layout = build_space("nb201", {"candidates": ["skip_connect", "nor_conv_3x3"], "nodes": 2}).layout()
    assert count(layout) == 2
    found = sample(layout, 3)
    for seed in range(8):
        first, second = random_others(found, layout, seed, 2)
        assert first.cells != found.cells
        assert second.cells in (first.cells, found.cells)


def test_a_supernet_is_one_network_and_random_search_trains_its_samples() -> None:
    assert num_networks(random_recipe(samples=7)) == 7
    assert num_networks(resolve({"method": "snas", "space": "nb201"})) == 1


@pytest.mark.parametrize(
    ("done", "epochs", "samples"),
    [(1, 2, 1), (8, 9, 1), (9, 10, 1), (10, 10, 1), (19, 10, 1), (20, 10, 2), (39, 10, 3)],
)
def test_a_random_search_is_shortened_to_whole_architectures(done: int, epochs: int, samples: int) -> None:
    cut = shortened(random_recipe(), done)
    assert (cut.epochs, cut.method_settings) == (epochs, {"samples": samples})


def test_only_a_late_search_ends_and_not_in_its_last_epoch() -> None:
    for recipe, last in ((random_recipe(3, 2), 6), (resolve({"method": "snas", "space": "nb201", "epochs": 3}), 3)):
        for epoch in range(last):
            seen: list[Event] = []
            stop_when_late(seen.append, lambda: False, recipe)(EpochEnded(epoch, {}))
            late = stop_when_late(seen.append, lambda: True, recipe)
            if epoch + 1 == last:
                late(EpochEnded(epoch, {}))
            else:
                with pytest.raises(SearchTimeoutError):
                    late(EpochEnded(epoch, {}))
            assert len(seen) == 2
    # A search that cannot be shortened any more continues to its end.
    stop_when_late(lambda event: None, lambda: True, random_recipe(3, 1))(EpochEnded(1, {}))


def kind_of(name: str) -> Kind:
    return name.split("-")[0]  # type: ignore[return-value]


def results(**accuracies: float | tuple[float, ...]) -> list[Result]:
    """`plain_1=0.5` is the accuracy of plain-1."""
    pairs = ((name.replace("_", "-"), own if isinstance(own, tuple) else (own,)) for name, own in accuracies.items())
    return [Result(name, own, 5, 1.0) for name, own in pairs]


def test_the_standard_error_matches_a_difference_of_two_shares() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(2, 4000, 100, generator=generator) < torch.tensor([0.8, 0.7]).view(2, 1, 1)
    shares = drawn.double().mean(2)
    assert standard_error(0.8, 0.7, 100) == pytest.approx((shares[0] - shares[1]).std().item(), rel=0.05)
    assert standard_error(1.0, 1.0, 100) > 0  # nothing is certain on 100 images


def made(*rounds: list[Result], held_out: int = 10_000, accuracy: float = 0.9, seeds: int = 1) -> Summary:
    names = dict.fromkeys(result.name for own in rounds for result in own)
    entries = tuple(Entry(name, kind_of(name), 1, 1) for name in names)
    played = tuple(Round(2.0, seeds, tuple(own), (own[0].name,)) for own in rounds)
    delivered = Row("plain-1", "plain", "runs/x/train", accuracy, 1, 1, 1.0, 9, 3.0)
    return Summary(delivered, "it was the best", entries, played, held_out, count=400, most_frequent=0.1)


def test_a_search_was_worth_it_only_if_it_beats_the_plain_network_beyond_chance() -> None:
    first = results(plain_1=0.85, found=0.9, random_1=0.8, random_2=0.81)
    worth, lines = verdict(made(first, seeds=2))
    assert worth and "worth it here, as far as 2 seeds can show" in lines[-1]
    worth, lines = verdict(made(first, held_out=30))
    assert not worth and all("no difference can be claimed" in line for line in lines[:2])
    assert "1 seed, 30 held-out images" in lines[0]
    worth, lines = verdict(made(results(plain_1=0.95, found=0.9, random_1=0.8, random_2=0.81)))
    assert not worth and "the plain network is better" in lines[-1]
    worth, lines = verdict(made(results(plain_1=0.9, found=0.9, random_1=0.8, random_2=0.81)))
    assert not worth and "better cell than random ones" in lines[-1] and "not clear" in lines[-1]
    worth, lines = verdict(made(results(plain_1=0.8, found=0.9, random_1=0.95, random_2=0.951)))
    assert not worth  # a search that loses to chance was not worth it, whatever the plain network does
    worth, lines = verdict(made(results(plain_1=0.9, found=0.9, random_1=0.7, random_2=0.95)))
    assert "no difference can be claimed" in lines[0]  # within the spread of random architectures


def with_costs(summary: Summary, **costs: tuple[int, int]) -> Summary:
    """`random_1=(900, 5000)` are the parameters and multiply-adds of random-1."""
    named = {name.replace("_", "-"): own for name, own in costs.items()}
    entries = tuple(Entry(entry.name, entry.kind, *named.get(entry.name, (1000, 9000))) for entry in summary.entries)
    return dataclasses.replace(summary, entries=entries)


def test_the_verdict_names_costs_that_differ_by_more_than_a_tenth() -> None:
    summary = made(results(plain_1=0.85, found=0.9, random_1=0.8, random_2=0.81))
    equal = with_costs(summary, random_1=(1100, 9000), plain_1=(910, 9900))
    assert not any("sizes differ" in line for line in verdict(equal)[1])
    smaller = with_costs(summary, random_1=(640, 9000), random_2=(700, 9100), plain_1=(1200, 5000))
    lines = verdict(smaller)[1]
    assert lines[0].endswith("Their sizes differ: 1,000 parameters against 640 to 700.")
    assert lines[1].endswith("Their sizes differ: 1,000 parameters against 1,200, 9,000 multiply-adds against 5,000.")
    assert smaller.to_dict()["verdict"] == lines  # which reports and summary.json show


def test_the_verdict_uses_the_last_round_that_both_reached() -> None:
    first = results(plain_1=0.5, found=0.6, plain_2=0.4, random_1=0.4, random_2=0.41)
    second = results(plain_1=0.8, found=0.7)
    worth, lines = verdict(made(first, second))
    assert not worth and "round 1" in lines[0] and "round 2" in lines[1] and "10.0 points worse" in lines[1]
    worth, lines = verdict(made(first, results(plain_1=0.8, random_2=0.7)))
    assert worth and "round 1" in lines[1] and "10.0 points better" in lines[1]


def test_without_search_or_competition_the_verdict_claims_nothing() -> None:
    summary = made()
    assert verdict(summary) == (False, ["There was no time for a search, so nothing can be said about one."])
    skipped = dataclasses.replace(summary, entries=(Entry("found", "found", 1, 1),))
    assert "no time for a competition" in verdict(skipped)[1][0]
    alone = made(results(plain_1=0.5, plain_2=0.6))
    assert "no time for a search" in verdict(alone)[1][0]


def test_the_verdict_says_that_a_network_learned_nothing() -> None:
    guessing = dataclasses.replace(made(results(plain_1=0.5, found=0.5), accuracy=0.5), most_frequent=0.5)
    assert "nothing useful" in verdict(guessing)[1][-1]
    single = dataclasses.replace(guessing, delivered=dataclasses.replace(guessing.delivered, accuracy=1.0))
    lines = verdict(dataclasses.replace(single, most_frequent=1.0))[1]
    assert "All test images are of one class" in lines[-1] and not any("nothing useful" in line for line in lines)


def test_the_verdict_compares_with_the_own_model_on_the_test_images() -> None:
    summary = dataclasses.replace(made(results(plain_1=0.5, found=0.5)), beside=Beside("mine.onnx", 0.8))
    assert (
        "mine.onnx (80.0%), on the same 400 test images: 10.0 points better; chance may explain up to"
        in verdict(summary)[1][-1]
    )
    assert Summary.from_dict(summary.to_dict(), Path("runs/x")) == summary
    close = dataclasses.replace(summary, beside=Beside("mine.onnx", 0.91))
    assert "1.0 points worse" in verdict(close)[1][-1] and "no difference can be claimed" in verdict(close)[1][-1]


def test_a_summary_survives_its_file_and_a_moved_folder() -> None:
    summary = made(results(plain_1=(0.5, 0.6), found=(0.6, 0.6)), results(plain_1=0.7, found=0.6))
    stored = summary.to_dict()
    assert stored["version"] == 2 and stored["delivered"]["folder"] == "train" and stored["worth_it"] is False
    assert Summary.from_dict(stored, Path("runs/x")) == summary
    assert Summary.from_dict(stored, Path("moved")).delivered.folder == "moved/train"


def splits_of_runs() -> list[dict[str, float | int]]:
    found = [resolve({"method": name, "scale": "small"}).split for name in METHODS]
    share = held_out_share(MIN_TRAINING)
    return [*found, {"train": 1.0 - share, "holdout": share}]


def test_the_least_number_of_training_images_fills_every_split_and_one_less_does_not() -> None:
    for shares in splits_of_runs():
        split(torch.zeros(MIN_TRAINING, dtype=torch.int64), shares, 0)
    rejected = 0
    for shares in splits_of_runs():
        try:
            split(torch.zeros(MIN_TRAINING - 1, dtype=torch.int64), shares, 0)
        except UserError:
            rejected += 1
    assert rejected


@pytest.mark.parametrize("classes", [2, 3, 5, 30])
def test_the_minimum_number_of_images_is_enough_for_training(classes: int) -> None:
    def left(images: int) -> int:
        labels = torch.arange(images).numpy() % classes
        return len(hold_out_test(labels, tuple(map(str, range(classes))), "here")[0])

    least = least_images(classes)
    assert left(max(least, 2 * classes)) >= MIN_TRAINING
    if least > 2 * classes:
        assert left(least - 1) < MIN_TRAINING


def test_the_error_says_how_many_images_to_add() -> None:
    def found(train: int, test: int = 0) -> Inspection:
        tested = {"a": test, "b": test} if test else {}
        return Inspection("photos", {"a": train, "b": train}, tested, (8, 8, 8), 3)

    check_num_images(found(4))
    check_num_images(found(3, 1))
    with pytest.raises(UserError, match=r"at least 8 images, but photos has 6 \(2 of them .* add 2 or more"):
        check_num_images(found(3))
    with pytest.raises(UserError, match=r"at least 6 training images, but photos has 4 \(a tenth .* add 2 or more"):
        check_num_images(found(2, 5))


@pytest.mark.parametrize("recalibrated", [False, True])
def test_the_overfit_warning_names_no_option_that_a_run_lacks(recalibrated: bool) -> None:
    text = overfit_warning(0.9, 0.1, is_recalibrated=recalibrated)
    assert text is not None and "--keep" not in text
