"""A seeded subset of the classes of a dataset, against loops over single images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from softcell.data import Dataset, Files, Images, load
from softcell.data.dataset import SomeClasses
from softcell.data.splits import test_set_sealed
from softcell.errors import UserError


def write_folder(root: Path, counts: dict[str, int]) -> None:
    """Images of one grey each: 10 · class + number."""
    for number, (name, count) in enumerate(counts.items()):
        (root / name).mkdir(parents=True)
        for image in range(count):
            value = 10 * number + image
            Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(root / name / f"{image}.png")


def contents(images: Images, classes: tuple[str, ...]) -> list[tuple[str, int]]:
    """Class by name and first pixel of every image."""
    pixels = images.fetch(torch.arange(len(images)))
    labels = images.labels.tolist()
    return [(classes[label], int(image[0, 0, 0])) for image, label in zip(pixels, labels, strict=True)]


def check(part: Dataset, whole: Dataset, number: int) -> None:
    """A loop over the whole finds the same images, in the same order, with the same names of classes."""
    assert len(part.classes) == part.num_classes == number and set(part.classes) < set(whole.classes)
    assert list(part.classes) == [name for name in whole.classes if name in part.classes]
    for mine, theirs in ((part.train, whole.train), (part.test, whole.test)):
        assert mine is not None and theirs is not None and mine.is_test == theirs.is_test
        expected = [one for one in contents(theirs, whole.classes) if one[0] in part.classes]
        assert contents(mine, part.classes) == expected
        assert set(mine.labels.tolist()) == set(range(number))


def test_some_classes_of_digits_are_those_images_numbered_from_0() -> None:
    whole, part = load("digits"), load("digits", some=SomeClasses(4, seed=3))
    check(part, whole, 4)
    assert "4 of 10 classes, drawn with seed 3" in part.source and (part.mean, part.std) == (whole.mean, whole.std)


@pytest.mark.parametrize("limit", [0, 2**30])
@pytest.mark.parametrize("name", ["imagenet", "photos"])
def test_some_classes_of_files_are_the_same_in_memory_or_not(name: str, limit: int, tmp_path: Path) -> None:
    root = tmp_path / name
    counts = {f"c{number}": 2 + number % 3 for number in range(7)}
    write_folder(root / "train", counts)
    write_folder(root / "val", counts)
    given = {"root": tmp_path, "image_size": 8, "memory_limit": limit}
    whole, part = load(name, **given), load(name, **given, some=SomeClasses(3))  # type: ignore[arg-type]
    check(part, whole, 3)
    assert isinstance(part.train, Files) == (limit == 0)
    if isinstance(part.train, Files):
        assert str(tmp_path).encode() not in part.train.layout(), "data may be moved between two halves of a run"


def test_every_seed_draws_its_own_classes_and_always_the_same() -> None:
    names = tuple(f"c{number}" for number in range(1000))
    draws = [SomeClasses(100, seed).draw(names, "imagenet") for seed in range(20)]
    assert draws[7] == SomeClasses(100, 7).draw(names, "imagenet")
    assert all(len(set(one)) == 100 and one == sorted(one) for one in draws)
    assert len({tuple(one) for one in draws}) == 20
    # 20 draws of a tenth: a class is in 2 of them on average, distributed as binomial(20, 1/10).
    often = np.bincount(np.concatenate(draws), minlength=1000)
    assert often.sum() == 2000 and abs(float(often.var()) - 1.8) < 0.5


def test_the_test_set_of_some_classes_stays_sealed() -> None:
    part = load("digits", some=SomeClasses(2))
    assert part.test is not None
    with test_set_sealed(), pytest.raises(Exception, match="test"):
        part.test.fetch(torch.arange(1))


@pytest.mark.parametrize("number", [1, 11])
def test_more_classes_than_there_are_is_refused(number: int) -> None:
    with pytest.raises(UserError, match=rf"`2 <= classes <= 10` must hold.*classes of digits.*classes={number}"):
        load("digits", some=SomeClasses(number))
