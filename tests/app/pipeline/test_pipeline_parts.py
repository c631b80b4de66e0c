"""Draws, early ends, the fewest images and notes of a run, each for itself."""

from __future__ import annotations

import pytest
import torch

from softcell.app.pipeline.draws import random_others
from softcell.app.pipeline.early import TimeIsUpError, ending, num_networks, shortened
from softcell.app.pipeline.enough import LEAST_TRAINING, check_enough, least_images
from softcell.app.pipeline.inspect import Inspection
from softcell.app.pipeline.recipes import HOLDOUT
from softcell.app.pipeline.screen import without_foreign_options
from softcell.arch import count, sample
from softcell.data import split
from softcell.data.dataset import hold_out_test
from softcell.engine.task import EpochEnded, Event, Note
from softcell.errors import UserError
from softcell.methods import METHODS, Sampler
from softcell.search import SearchRecipe, resolve
from softcell.search.validation import overfit_warning
from softcell.settings import build
from softcell.spaces import build_space


def random_recipe(epochs: int = 10, samples: int = 4) -> SearchRecipe:
    return resolve({"method": "random", "space": "nb201", "epochs": epochs, "method_settings": {"samples": samples}})


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_random_ones_are_none_that_a_random_search_of_any_seed_near_draws(seed: int) -> None:
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


def test_of_a_small_space_random_ones_are_all_the_others_before_they_repeat() -> None:
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
def test_a_random_search_is_cut_to_whole_architectures(done: int, epochs: int, samples: int) -> None:
    cut = shortened(random_recipe(), done)
    assert (cut.epochs, cut.method_settings) == (epochs, {"samples": samples})


def test_a_late_search_ends_after_any_epoch_but_the_last_and_one_in_time_does_not() -> None:
    for recipe, last in ((random_recipe(3, 2), 6), (resolve({"method": "snas", "space": "nb201", "epochs": 3}), 3)):
        for epoch in range(last):
            seen: list[Event] = []
            ending(seen.append, lambda: False, recipe)(EpochEnded(epoch, {}))
            late = ending(seen.append, lambda: True, recipe)
            if epoch + 1 == last:
                late(EpochEnded(epoch, {}))
            else:
                with pytest.raises(TimeIsUpError):
                    late(EpochEnded(epoch, {}))
            assert len(seen) == 2
    # Cut to what it is already, it goes on to its end.
    ending(lambda event: None, lambda: True, random_recipe(3, 1))(EpochEnded(1, {}))


def splits_of_runs() -> list[dict[str, float | int]]:
    found = [resolve({"method": name, "scale": "small"}).split for name in METHODS]
    return [*found, {"train": 1.0 - HOLDOUT, "holdout": HOLDOUT}]


def test_the_fewest_training_images_give_every_split_one_and_fewer_do_not() -> None:
    for shares in splits_of_runs():
        split(torch.zeros(LEAST_TRAINING, dtype=torch.int64), shares, 0)
    refused = 0
    for shares in splits_of_runs():
        try:
            split(torch.zeros(LEAST_TRAINING - 1, dtype=torch.int64), shares, 0)
        except UserError:
            refused += 1
    assert refused


@pytest.mark.parametrize("classes", [2, 3, 5, 30])
def test_the_fewest_images_leave_enough_to_train_on(classes: int) -> None:
    def left(images: int) -> int:
        labels = torch.arange(images).numpy() % classes
        return len(hold_out_test(labels, tuple(map(str, range(classes))), "here")[0])

    least = least_images(classes)
    assert left(max(least, 2 * classes)) >= LEAST_TRAINING
    if least > 2 * classes:
        assert left(least - 1) < LEAST_TRAINING


def test_how_many_images_to_add_is_told() -> None:
    def found(train: int, test: int = 0) -> Inspection:
        tested = {"a": test, "b": test} if test else {}
        return Inspection("photos", {"a": train, "b": train}, tested, (8, 8, 8), 3)

    check_enough(found(4))
    check_enough(found(3, 1))
    with pytest.raises(UserError, match=r"at least 8 images, but photos has 6 \(2 of them .* add 2 or more"):
        check_enough(found(3))
    with pytest.raises(UserError, match=r"at least 6 training images, but photos has 4 \(a tenth .* add 2 or more"):
        check_enough(found(2, 5))


@pytest.mark.parametrize("many", [False, True])
def test_notes_name_no_option_that_a_run_has_not(many: bool) -> None:
    text = overfit_warning(0.9, 0.1, many_cells=many)
    assert text is not None and "--keep best" in text
    note = without_foreign_options(Note(text))
    assert isinstance(note, Note) and "--keep" not in note.text
    assert note.text.endswith("may help." if not many else "with BatchNorm recalibrated.")
    assert without_foreign_options(Note("as it is. Really.")) == Note("as it is. Really.")
