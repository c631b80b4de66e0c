"""CUB-200-2011 in its official layout, in small."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from softcell.data import load
from softcell.errors import UserError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four classes of three pictures each, of one colour per class; the third of each is for testing."""
    folder = tmp_path / "CUB_200_2011"
    tables: dict[str, list[str]] = {"images": [], "image_class_labels": [], "train_test_split": [], "classes": []}
    for kind in range(1, 5):
        tables["classes"].append(f"{kind} {kind:03}.Bird")
        for number in range(3):
            key, name = len(tables["images"]) + 1, f"{kind:03}.Bird/{number}.jpg"
            (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((20, 30, 3), 50 * kind, np.uint8)).save(folder / "images" / name)
            tables["images"].append(f"{key} {name}")
            tables["image_class_labels"].append(f"{key} {kind}")
            tables["train_test_split"].append(f"{key} {int(number < 2)}")
    for name, lines in tables.items():
        (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.parametrize("inside", [False, True])
def test_the_official_split_and_classes_are_kept(root: Path, inside: bool) -> None:
    data = load("cub200", root / "CUB_200_2011" if inside else root, image_size=14)
    assert data.classes == tuple(f"{k:03}.Bird" for k in range(1, 5)) and data.shape == (3, 14, 14)
    assert data.test is not None
    assert data.train.labels.tolist() == [0, 0, 1, 1, 2, 2, 3, 3] and data.test.labels.tolist() == [0, 1, 2, 3]
    means = data.test.fetch(torch.arange(4)).float().mean((1, 2, 3))
    torch.testing.assert_close(means, torch.tensor([50.0, 100.0, 150.0, 200.0]), rtol=0, atol=2.0)


def test_what_is_missing_or_wrong_is_named(root: Path) -> None:
    folder = root / "CUB_200_2011"
    labels = folder / "image_class_labels.txt"
    good = labels.read_text()
    labels.write_text(good.replace("3 1\n", "3 9\n", 1))
    with pytest.raises(UserError, match="image 3 has the class '9'"):
        load("cub200", root)
    labels.write_text(good + "99 1\n")
    with pytest.raises(UserError, match="must name the same images"):
        load("cub200", root)
    labels.write_text("nonsense\n")
    with pytest.raises(UserError, match="line 1"):
        load("cub200", root)
    labels.unlink()
    with pytest.raises(UserError, match=r"image_class_labels\.txt is missing"):
        load("cub200", root)
