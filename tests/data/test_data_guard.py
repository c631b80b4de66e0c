"""The seal on the test set."""

import threading

import numpy as np
import pytest
import torch
from PIL import Image

from softcell.data import Batches, Files, Resident, guard, load


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
    with guard.test_set_sealed():
        for read in (sealed.fetch, sealed.fetch_stored):
            with pytest.raises(AssertionError, match="sealed"):
                read(index)
        for workers in (0, 1):
            with pytest.raises(AssertionError, match="sealed"):
                next(loader(sealed, workers).epoch(0))
        with guard.test_set_sealed():
            pass
        with pytest.raises(AssertionError):
            sealed.fetch(index)
    assert sealed.fetch(index).shape == (2, 1, 4, 4)
    assert len(list(loader(sealed).epoch(0))) == 3


def test_training_images_can_be_read_under_the_seal(images):
    with guard.test_set_sealed():
        assert len(list(loader(images(is_test=False)).epoch(0))) == 3


def test_a_loader_that_was_started_before_the_seal_stops(images):
    stream = loader(images(is_test=True), workers=1).epoch(0)
    next(stream)
    with guard.test_set_sealed(), pytest.raises(AssertionError):
        next(stream)


def test_the_seal_holds_in_other_threads_and_ends_after_an_error(images):
    sealed, caught = images(is_test=True), []

    def read():
        try:
            sealed.fetch(torch.arange(1))
        except AssertionError as error:
            caught.append(error)

    def fail_under_the_seal():
        with guard.test_set_sealed():
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
