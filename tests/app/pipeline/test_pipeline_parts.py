"""Parts of a run: random architectures, late searches, the smallest number of images."""

from __future__ import annotations

import pytest
import torch

from softcell.app.pipeline.choose import HOLDOUT, random_others
from softcell.app.pipeline.inspect import LEAST_TRAINING, Inspection, check_num_images, least_images
from softcell.app.pipeline.time_budget import SearchTimeoutError, num_networks, shortened, stop_when_late
from softcell.arch import count, sample
from softcell.data import split
from softcell.data.dataset import hold_out_test
from softcell.engine.task import EpochEnded, Event
from softcell.errors import UserError
from softcell.methods import METHODS, Sampler
from softcell.search import SearchRecipe, resolve
from softcell.search.validation import overfit_warning
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


def splits_of_runs() -> list[dict[str, float | int]]:
    found = [resolve({"method": name, "scale": "small"}).split for name in METHODS]
    return [*found, {"train": 1.0 - HOLDOUT, "holdout": HOLDOUT}]


def test_the_least_number_of_training_images_fills_every_split_and_one_less_does_not() -> None:
    for shares in splits_of_runs():
        split(torch.zeros(LEAST_TRAINING, dtype=torch.int64), shares, 0)
    rejected = 0
    for shares in splits_of_runs():
        try:
            split(torch.zeros(LEAST_TRAINING - 1, dtype=torch.int64), shares, 0)
        except UserError:
            rejected += 1
    assert rejected


@pytest.mark.parametrize("classes", [2, 3, 5, 30])
def test_the_least_number_of_images_leaves_enough_for_training(classes: int) -> None:
    def left(images: int) -> int:
        labels = torch.arange(images).numpy() % classes
        return len(hold_out_test(labels, tuple(map(str, range(classes))), "here")[0])

    least = least_images(classes)
    assert left(max(least, 2 * classes)) >= LEAST_TRAINING
    if least > 2 * classes:
        assert left(least - 1) < LEAST_TRAINING


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


@pytest.mark.parametrize("many", [False, True])
def test_the_overfit_warning_names_no_option_that_a_run_lacks(many: bool) -> None:
    text = overfit_warning(0.9, 0.1, many_cells=many)
    assert text is not None and "--keep" not in text
