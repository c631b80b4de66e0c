"""Datasets from .npz files, and from arrays, tensors and torch datasets of a program."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from softcell.data import arrays, keep_arrays, load
from softcell.errors import UserError

NUM = 30
LABELS = np.arange(NUM) % 3


def grey():
    return np.random.default_rng(0).integers(0, 256, (NUM, 5, 7), dtype=np.uint8)


def colour():
    return np.random.default_rng(0).integers(0, 256, (NUM, 3, 5, 7), dtype=np.uint8)


def read(path, **arrays):
    np.savez(path, **arrays)
    return load(path)


def everything(dataset):
    """All images, in the order of the file: the held-out ones are found by their bytes."""
    return torch.cat([part.fetch(torch.arange(len(part))) for part in (dataset.train, dataset.test)]).numpy()


def as_set(pixels):
    return sorted(picture.tobytes() for picture in pixels)


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (grey(), grey()[:, None]),
        (grey()[..., None], grey()[:, None]),
        (grey()[:, None], grey()[:, None]),
        (colour(), colour()),
        (colour().transpose(0, 2, 3, 1), colour()),
        (grey().astype(np.int64), grey()[:, None]),
        (grey().astype(np.float32), grey()[:, None]),
        (grey() / 255, grey()[:, None]),
        ((grey() / 255).astype(np.float32), grey()[:, None]),
        (grey() > 127, (grey()[:, None] > 127) * np.uint8(255)),
    ],
)
def test_layouts_and_types_are_understood(tmp_path, stored, expected):
    found = read(tmp_path / "a.npz", images=stored, labels=LABELS)
    assert as_set(everything(found)) == as_set(expected)
    assert found.shape == expected.shape[1:] and found.name == "a" and not found.augment.flip


def test_a_test_set_in_the_file_is_used_and_scaled_like_the_training_set(tmp_path):
    dark = np.full((4, 5, 7), 1.0)  # in 0..255 like the training images, though it looks like 0..1
    found = read(
        tmp_path / "a.npz",
        x_train=grey().astype(float),
        y_train=LABELS[:, None],
        x_test=dark,
        y_test=np.array([0, 1, 2, 2], np.uint8),
        classes=np.array(["cat", "dog", "eel"]),
    )
    assert found.test.fetch(torch.arange(4)).unique().tolist() == [1]
    assert found.test.is_test and len(found.train) == NUM and found.classes == ("cat", "dog", "eel")


def test_without_a_test_set_a_stratified_fifth_is_held_out_and_stays_the_same(tmp_path):
    first = read(tmp_path / "a.npz", images=grey(), labels=LABELS)
    again = read(tmp_path / "b.npz", images=grey(), labels=LABELS)
    assert torch.bincount(first.test.labels).tolist() == [2, 2, 2]
    assert torch.bincount(first.train.labels).tolist() == [8, 8, 8]
    assert first.test.is_test and "stratified 6 of 30" in first.source
    assert first.source.split("split ")[1] == again.source.split("split ")[1]
    assert np.array_equal(everything(first), everything(again))


def test_a_constant_channel_has_a_floored_std(tmp_path):
    found = read(tmp_path / "a.npz", images=np.full((6, 4, 4), 255, np.uint8), labels=np.arange(6) % 2)
    assert found.mean == (1.0,) and found.std == (1 / 255,)


GOOD = {"images": grey(), "labels": LABELS}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": np.zeros((NUM, 5))}, r"\[N, H, W\]"),
        ({"images": np.zeros((NUM, 5, 7, 4))}, "C = 1 or 3"),
        ({"images": np.zeros((NUM, 3, 7, 3))}, "in one place"),
        ({"images": np.zeros((0, 5, 7)), "labels": LABELS[:0]}, "at least one image"),
        ({"images": grey() * 2.0}, r"0\.\.255"),
        ({"images": grey() - 1.0}, r"-1\.\."),
        ({"images": grey() * np.nan}, "nan"),
        ({"images": np.full((NUM, 5, 7), "a")}, "numbers"),
        ({"images": grey().astype(np.uint16) * 257}, r"0\.\.65535"),
        ({"labels": LABELS[:-1]}, "one whole number per image"),
        ({"labels": LABELS.astype(float)}, "whole number"),
        ({"labels": np.eye(3)[LABELS]}, "whole number"),
        ({"labels": LABELS + 1}, "0..K-1"),
        ({"labels": LABELS - 1}, "0..K-1"),
        ({"labels": LABELS * 0}, "K >= 2"),
        ({"classes": np.array(["a", "b"])}, "2 names in 'classes'"),
        ({"labels": np.array([5] + [0, 1, 2, 3, 4] * 5 + [1, 2, 3, 4])}, "at least 2 images, but class '5'"),
        ({"labels": None}, "lacks"),
        ({"x_test": grey()}, "lacks"),
        ({"x_test": grey()[:, :4], "y_test": LABELS}, "one shape"),
        ({"x_test": grey(), "y_test": LABELS + 1}, r"0\.\.2, but 'y_test'"),
        ({"images": np.array([{}] * NUM, dtype=object)}, "plain arrays"),
    ],
)
def test_wrong_content_is_named(tmp_path, changes, message):
    arrays = {key: value for key, value in {**GOOD, **changes}.items() if value is not None}
    with pytest.raises(UserError, match=message) as caught:
        read(tmp_path / "bad.npz", **arrays)
    assert "bad.npz" in str(caught.value)


def test_damaged_files_are_named(tmp_path):
    path = tmp_path / "bad.npz"
    np.savez_compressed(path, **GOOD)
    whole = path.read_bytes()
    middle = len(whole) // 2
    for damaged in (b"", whole[:20], whole[:middle], whole[:100] + bytes(50) + whole[150:], b"hello"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"bad\.npz"):
            load(path)


class Pictures(torch.utils.data.Dataset[tuple[Any, int]]):
    """A torch dataset: images as PIL pictures, tensors or arrays."""

    classes: ClassVar = ["cat", "dog"]

    def __init__(self, pixels: NDArray[np.uint8], kind: str = "array") -> None:
        self.pixels, self.kind = pixels, kind

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        one = self.pixels[index]
        kinds: dict[str, Any] = {
            "array": one,
            "picture": Image.fromarray(one),
            "tensor": torch.from_numpy(one).permute(2, 0, 1) / 255,
        }
        return kinds[self.kind], index % 2


def colours(count: int = 20) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (count, 6, 6, 3), dtype=np.uint8)


@pytest.mark.parametrize("kind", ["array", "picture", "tensor"])
def test_a_torch_dataset_is_kept_with_its_pixels_labels_and_class_names(kind: str, tmp_path: Path) -> None:
    pixels = colours()
    file = keep_arrays({"train": Pictures(pixels, kind), "test": Pictures(pixels[:4], kind)}, tmp_path)
    found = load(file)
    assert file.name.startswith("pictures-") and found.classes == ("cat", "dog")
    assert torch.equal(found.train.fetch(torch.arange(20)), torch.from_numpy(pixels).permute(0, 3, 1, 2))
    assert found.test is not None and found.test.labels.tolist() == [0, 1, 0, 1]


def test_the_file_is_named_by_its_content_and_left_alone_if_it_exists(tmp_path: Path) -> None:
    pixels, labels = colours(), torch.arange(20) % 2
    file = keep_arrays((pixels, labels), tmp_path)
    before = file.stat().st_mtime_ns
    same: list[Any] = [(torch.from_numpy(pixels), labels), {"images": pixels, "labels": labels.numpy()}]
    same += [{"train": (pixels, labels.tolist())}, (pixels / np.float64(255), labels)]
    assert {keep_arrays(data, tmp_path) for data in same} == {file}
    assert file.stat().st_mtime_ns == before and [*tmp_path.iterdir()] == [file]
    assert file.stat().st_mode & 0o044, "others may read what they may read of the run"
    other = {keep_arrays(data, tmp_path) for data in ((255 - pixels, labels), (pixels, 1 - labels))}
    other |= {keep_arrays({"train": (pixels, labels), "classes": ("a", "b")}, tmp_path)}
    assert len({file, *other}) == 4
    subset = torch.utils.data.Subset(Pictures(pixels), range(10))
    assert keep_arrays(subset, tmp_path).name.startswith("pictures-")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (lambda: np.zeros((4, 8, 8)), "data must be .* but got ndarray"),
        (lambda: (np.zeros((4, 8, 8)),), "tuple of 1 items"),
        (lambda: {"train": (colours(), [0, 1] * 10), "valid": 1}, "the key 'valid'"),
        (lambda: (torch.randn(4, 8, 8), [0, 1, 0, 1]), "must be 0..255, or floats in 0..1.* the given data"),
        (lambda: (colours(), ["cat", "dog"] * 10), "one whole number per image"),
        (lambda: Pictures(colours(0)), "at least one image"),
        (lambda: ["a", 1], "one whole number|no array|must be"),
        (lambda: {"images": colours()}, "lacks .'labels'."),
    ],
)
def test_data_that_cannot_be_kept_are_refused_with_the_rule(data: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        keep_arrays(data(), tmp_path)
    assert not [*tmp_path.iterdir()]


def test_a_torch_dataset_beyond_memory_or_of_several_sizes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Growing(Pictures):
        def __getitem__(self, index: int) -> tuple[Any, int]:
            return np.zeros((4 + index, 4), np.uint8), 0

    with pytest.raises(UserError, match=r"image 0 is \[4, 4\] and image 1 \[5, 4\]"):
        keep_arrays(Growing(colours()), tmp_path)
    monkeypatch.setattr(arrays, "MAX_BYTES", 100)
    with pytest.raises(UserError, match=r"up to 0 GiB.*folder of CLASS/IMAGE"):
        keep_arrays(Pictures(colours()), tmp_path)
