"""Laws of splits: disjoint, complete, stratified, seeded, and stable across versions."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from softcell.data import Batches, Files, Resident, fingerprint, load, split, test_set_sealed
from softcell.errors import UserError

labels_of_any_kind = st.lists(st.integers(0, 5), min_size=4, max_size=200).map(torch.tensor)


def counts(labels, part):
    return torch.bincount(labels[part], minlength=int(labels.max()) + 1)


@given(labels_of_any_kind, st.integers(-5, 1 << 40))
@settings(deadline=None)
def test_parts_are_disjoint_sorted_and_cover_everything(labels, seed):
    parts = split(labels, {"a": 0.5, "b": 0.25, "c": 0.25}, seed)
    joined = torch.cat(list(parts.values()))
    assert torch.equal(joined.sort().values, torch.arange(len(labels)))
    assert all(part.dtype == torch.int64 and torch.equal(part, part.sort().values) for part in parts.values())
    for name, share in (("a", 0.5), ("b", 0.25), ("c", 0.25)):
        assert abs(len(parts[name]) - share * len(labels)) < 1


@given(labels_of_any_kind, st.data())
@settings(deadline=None)
def test_counts_are_exact_and_the_rest_is_left_out(labels, data):
    first = data.draw(st.integers(1, len(labels) - 1))
    second = data.draw(st.integers(1, len(labels) - first))
    parts = split(labels, {"a": first, "b": second}, 0)
    joined = torch.cat([parts["a"], parts["b"]])
    assert len(parts["a"]) == first and len(parts["b"]) == second
    assert len(joined.unique()) == len(joined) and joined.max() < len(labels)


@given(st.lists(st.integers(2, 60), min_size=2, max_size=8), st.sampled_from([0.2, 0.5, 0.9]))
@settings(deadline=None)
def test_every_class_is_on_each_side_if_possible(sizes, share):
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    small = min(round(share * len(labels)), len(labels) - 1)
    parts = split(labels, {"a": small, "b": len(labels) - small}, 1)
    for part in parts.values():
        present = (counts(labels, part) > 0).sum().item()
        assert present == min(len(sizes), len(part)) or present == len(sizes)


@given(st.lists(st.integers(20, 60), min_size=2, max_size=8), st.floats(0.2, 0.8))
@settings(deadline=None)
def test_classes_are_spread_in_proportion(sizes, share):
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    parts = split(labels, {"a": share, "b": 1 - share}, 1)
    actual = len(parts["a"]) / len(labels)
    assert ((counts(labels, parts["a"]) - torch.tensor(sizes) * actual).abs() <= 1 + 1e-6).all()


def test_a_class_of_three_is_in_all_of_three_parts():
    labels = torch.tensor([0] * 97 + [1] * 3)
    parts = split(labels, {"train": 0.8, "valid": 0.1, "test": 0.1}, 0)
    assert [counts(labels, part).tolist() for part in parts.values()] == [[79, 1], [9, 1], [9, 1]]


def test_seeds_matter_and_order_of_images_within_a_class_is_random():
    labels = torch.zeros(100, dtype=torch.int64)
    parts = [split(labels, {"a": 0.5, "b": 0.5}, seed)["a"] for seed in range(20)]
    assert len({fingerprint(part) for part in parts}) == 20
    first_half = [int((part < 50).sum()) for part in parts]
    assert 20 < sum(first_half) / 20 < 30 and len(set(first_half)) > 1


def test_a_split_never_changes():
    """Recorded: runs made with one version must find their split again with the next."""
    labels = torch.arange(1000) % 10
    parts = split(Resident(torch.zeros(1000, 1, 1, 1, dtype=torch.uint8), labels), {"a": 0.5, "b": 0.5}, 0)
    assert (fingerprint(parts["a"]), fingerprint(parts["b"])) == ("e84364fcfdcfa474", "367349070e92a99f")


def test_fingerprint_is_of_the_values_and_their_order():
    assert fingerprint(torch.tensor([1, 2])) == fingerprint(torch.tensor([1, 2], dtype=torch.int32))
    assert fingerprint(torch.tensor([1, 2])) != fingerprint(torch.tensor([2, 1]))
    assert len(fingerprint(torch.arange(0))) == 16


@pytest.mark.parametrize(
    ("fractions", "message"),
    [
        ({}, "at least one part"),
        ({"a": 0.7, "b": 0.7}, "must not exceed"),
        ({"a": 11}, "must not exceed"),
        ({"a": 0.0}, "'a' is 0.0"),
        ({"a": -1}, "'a' is -1"),
        ({"a": 1.5}, "pass a count as an int"),
        ({"a": True}, "'a' is True"),
        ({"a": float("nan")}, "'a' is nan"),
        ({"a": 0.96, "b": 0.04}, "'b' would get none .* add images"),
    ],
)
def test_wrong_parts_are_named(fractions, message):
    with pytest.raises(UserError, match=message):
        split(torch.arange(10) % 2, fractions, 0)


@pytest.fixture(params=["memory", "files"])
def images(request, tmp_path):
    """Builds three images flagged as asked."""

    def build(is_test):
        if request.param == "memory":
            return Resident(
                torch.zeros(3, 1, 4, 4, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64), is_test=is_test
            )
        names = ["a.png", "b.png", "c.png"]
        for name in names:
            Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / name)
        labels = torch.zeros(3, dtype=torch.int64)
        return Files(tmp_path, names, labels, channels=1, size=(4, 4), is_test=is_test)

    return build


def loader(images, workers=0):
    return Batches(
        images,
        torch.arange(3),
        1,
        seed=0,
        mean=(0.5,),
        std=(0.5,),
        augment=None,
        shuffle=False,
        device="cpu",
        drop_last=False,
        workers=workers,
    )


def test_sealed_test_images_cannot_be_read(images):
    sealed, index = images(is_test=True), torch.arange(2)
    with test_set_sealed():
        for read in (sealed.fetch, sealed.fetch_stored):
            with pytest.raises(AssertionError, match="sealed"):
                read(index)
        for workers in (0, 1):
            with pytest.raises(AssertionError, match="sealed"):
                next(loader(sealed, workers).epoch(0))
        with test_set_sealed():
            pass
        with pytest.raises(AssertionError):
            sealed.fetch(index)
    assert sealed.fetch(index).shape == (2, 1, 4, 4)
    assert len(list(loader(sealed).epoch(0))) == 3


def test_training_images_can_be_read_under_the_seal(images):
    with test_set_sealed():
        assert len(list(loader(images(is_test=False)).epoch(0))) == 3


def test_a_loader_that_was_started_before_the_seal_stops(images):
    stream = loader(images(is_test=True), workers=1).epoch(0)
    next(stream)
    with test_set_sealed(), pytest.raises(AssertionError):
        next(stream)


def test_the_seal_holds_in_other_threads_and_ends_after_an_error(images):
    sealed, caught = images(is_test=True), []

    def read():
        try:
            sealed.fetch(torch.arange(1))
        except AssertionError as error:
            caught.append(error)

    def fail_under_the_seal():
        with test_set_sealed():
            thread = threading.Thread(target=read)
            thread.start()
            thread.join()
            raise KeyError

    with pytest.raises(KeyError):
        fail_under_the_seal()
    assert len(caught) == 1
    sealed.fetch(torch.arange(1))


def test_the_flag_survives_a_move_and_loaded_test_sets_have_it():
    digits = load("digits")
    assert digits.test.is_test and not digits.train.is_test
    assert digits.test.to("meta").is_test
