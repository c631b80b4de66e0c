"""A small CUB-200-2011 in its official layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from softcell.api import export
from softcell.app.export._python import import_file
from softcell.arch import sample
from softcell.data import load
from softcell.data.images import gathered, square_around
from softcell.engine import RunFolder
from softcell.errors import UserError
from softcell.evaluate import resolve, train
from softcell.spaces import build_space


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


def boxed(root: Path, line: str) -> None:
    """A bright bird of 8 x 4 pixels in every picture of 30 x 20, its left top corner at (20, 6); `line` is its box."""
    folder = root / "CUB_200_2011"
    for picture in sorted((folder / "images").rglob("*.jpg")):
        pixels = np.zeros((20, 30, 3), np.uint8)
        pixels[6:10, 20:28] = 255
        Image.fromarray(pixels).save(picture, quality=100, subsampling=0)
    (folder / "bounding_boxes.txt").write_text("".join(f"{key} {line}\n" for key in range(1, 13)))


@pytest.mark.parametrize("limit", [0, 10**9])
def test_only_the_square_around_the_bounding_box_is_seen(root: Path, limit: int) -> None:
    """The bird fills the width of what is seen, and half of its height."""
    boxed(root, "20.0 6.0 8.0 4.0")
    data = load("cub200-boxes", root, image_size=8, memory_limit=limit)
    assert (data.name, data.shape) == ("cub200-boxes", (3, 8, 8)) and "bounding box" in data.source
    seen = data.train.fetch(torch.arange(len(data.train))).float().mean(1)
    expected = torch.zeros(8, 8)
    expected[2:6] = 255.0
    torch.testing.assert_close(seen, expected.expand(8, 8, 8), rtol=0, atol=40.0)  # what JPEG leaves of edges
    assert data.test is not None
    twice = gathered([(data.test, torch.tensor([3, 0])), (data.train, torch.tensor([1]))], is_test=False)
    assert twice.labels.tolist() == [3, 0, 0] and not twice.is_test
    again = torch.cat([data.test.fetch_stored(torch.tensor([3, 0])), data.train.fetch_stored(torch.tensor([1]))])
    assert torch.equal(twice.fetch_stored(torch.arange(3)), again)
    whole = load("cub200", root, image_size=8, memory_limit=limit)
    assert float(whole.train.fetch(torch.arange(1)).float().mean()) < 60


def test_squares_around_boxes_stay_in_the_image() -> None:
    assert square_around((20.0, 6.0, 8.0, 4.0), 30, 20, 1.0) == (20, 4, 28, 12)
    assert square_around((24.0, 0.0, 6.0, 6.0), 30, 20, 2.0) == (18, 0, 30, 12)  # moved in from the corner
    assert square_around((0.0, 0.0, 30.0, 20.0), 30, 20, 8 / 7) == (5, 0, 25, 20)  # no longer than the short side
    assert square_around((5.0, 5.0, 0.2, 0.2), 30, 20, 1.0) == (5, 5, 6, 6)


def test_wrong_boxes_are_named(root: Path) -> None:
    with pytest.raises(UserError, match=r"bounding_boxes\.txt is missing"):
        load("cub200-boxes", root, image_size=8)
    boxed(root, "20.0 6.0 8.0")
    with pytest.raises(UserError, match=r"image 1 must have four numbers"):
        load("cub200-boxes", root, image_size=8)
    boxed(root, "20.0 6.0 0.0 4.0")
    with pytest.raises(UserError, match=r"a width and a height"):
        load("cub200-boxes", root, image_size=8)
    (root / "CUB_200_2011" / "bounding_boxes.txt").write_text("1 1 1 2 2\n")
    with pytest.raises(UserError, match=r"image 2 has no bounding box"):
        load("cub200-boxes", root, image_size=8)
    assert load("cub200", root, image_size=8).shape == (3, 8, 8)


def split_as(root: Path, change: dict[int, str]) -> None:
    """Every third picture is for testing, but for those that are changed."""
    parts = {key: str(int(key % 3 != 0)) for key in range(1, 13)} | change
    text = "".join(f"{key} {part}\n" for key, part in parts.items())
    (root / "CUB_200_2011" / "train_test_split.txt").write_text(text)


def test_parts_other_than_training_and_testing_are_refused(root: Path) -> None:
    split_as(root, {5: "2"})
    with pytest.raises(UserError, match=r"train_test_split\.txt, line 5: image 5 must have 1 .* but has '2'"):
        load("cub200", root, image_size=8)
    split_as(root, dict.fromkeys(range(1, 13), "0"))
    with pytest.raises(UserError, match=r"at least one image must be for training \(1\), but none of 12 is"):
        load("cub200", root, image_size=8)


def test_without_test_images_there_is_no_test_set_and_training_ends_well(root: Path, tmp_path: Path) -> None:
    split_as(root, dict.fromkeys(range(1, 13), "1"))
    data = load("cub200", root, image_size=8)
    assert data.test is None and len(data.train) == 12
    genotype = sample(build_space("nb201", {}).layout(), 0)
    recipe = resolve(
        genotype,
        {"data": "cub200", "data_root": str(root), "image_size": 8, "epochs": 1, "batch_size": 4, "device": "cpu"},
        {"space": {"cells_per_stage": 1, "channels": 4}},
    )
    result = train(genotype, recipe, tmp_path / "run")
    assert (result.accuracy, result.exit_code) == (None, 0)
    assert RunFolder.open(tmp_path / "run").manifest["status"] == "finished"


@pytest.mark.parametrize("box", ["30 6 8 4", "20 20 8 4", "-8 6 8 4", "20 -5 8 4"])
def test_boxes_outside_their_image_are_refused(root: Path, box: str) -> None:
    boxed(root, "20.0 6.0 8.0 4.0")
    file = root / "CUB_200_2011" / "bounding_boxes.txt"
    file.write_text(file.read_text().replace("7 20.0 6.0 8.0 4.0", f"7 {box}"))
    with pytest.raises(UserError, match=f"the box of image 7 must be in the image, which is 30x20, but is at {box} "):
        load("cub200-boxes", root, image_size=8)
    file.write_text(file.read_text().replace(f"7 {box}", "7 -2 -2 8 4"))  # in part is enough
    assert load("cub200-boxes", root, image_size=8).shape == (3, 8, 8)


def noise(root: Path) -> list[Path]:
    """Pictures of 30 x 20 in which every pixel counts; by their number, from 1."""
    folder, rng = root / "CUB_200_2011", np.random.default_rng(0)
    files = [folder / "images" / line.split()[1] for line in (folder / "images.txt").read_text().splitlines()]
    for file in files:
        Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(file)
    return files


def squared(file: Path, side: int) -> torch.Tensor:
    with Image.open(file) as image:
        return torch.from_numpy(np.array(image.resize((side, side), Image.Resampling.BILINEAR))).permute(2, 0, 1)


@pytest.mark.parametrize("limit", [0, 10**9])
def test_whole_images_are_scaled_for_any_aspect_ratio(root: Path, limit: int) -> None:
    """Full-attention NAS, §IV-E: each image is resized; §IV-F: resized, and a part of it seen."""
    files = noise(root)
    plain = load("cub200", root, image_size=14, memory_limit=limit)
    assert (plain.scaled_to, plain.whole) == ((14, 14), True) and plain.test is not None
    for number in range(4):  # the third picture of each class
        assert torch.equal(plain.test.fetch(torch.tensor([number]))[0], squared(files[3 * number + 2], 14))
    wider = load("cub200", root, image_size=14, memory_limit=limit, scaled_to=16)
    assert wider.shape == (3, 14, 14) and wider.scaled_to == (16, 16)
    joined = gathered([(wider.train, torch.tensor([0, 1]))], is_test=False)
    for images in (wider.train, joined):
        assert torch.equal(images.fetch_stored(torch.tensor([1]))[0], squared(files[1], 16))
        assert torch.equal(images.fetch(torch.tensor([1]))[0], squared(files[1], 16)[:, 1:15, 1:15])
    with pytest.raises(UserError, match="at least the image size, 14, but got 12"):
        load("cub200", root, image_size=14, scaled_to=12)
    with pytest.raises(UserError, match="scaled_to applies to cub200 only, but got 12 for digits"):
        load("digits", scaled_to=12)


def test_birds_are_retrieved_out_of_256_pixels_and_classified_by_all_that_is_seen() -> None:
    genotype = sample(build_space("nb201", {}).layout(), 0)
    for given, expected in (
        ({"data": "cub200", "task": "retrieve"}, 256),
        ({"data": "cub200-boxes", "task": "retrieve"}, 256),
        ({"data": "cub200", "task": "retrieve", "image_size": 14}, 16),
        ({"data": "cub200"}, None),
        ({"data": "photos", "task": "retrieve"}, None),
    ):
        assert resolve(genotype, given).scaled_to == expected


@pytest.mark.parametrize("task", ["classify", "retrieve"])
def test_an_exported_file_prepares_pictures_as_training_did(root: Path, tmp_path: Path, task: str) -> None:
    files, genotype = noise(root), sample(build_space("nb201", {}).layout(), 0)
    given = {"data": "cub200", "data_root": str(root), "image_size": 14, "epochs": 1, "batch_size": 4, "device": "cpu"}
    recipe = resolve(genotype, {**given, "task": task}, {"space": {"cells_per_stage": 1, "channels": 4}})
    train(genotype, recipe, tmp_path / "run")
    export(tmp_path / "run", "python", tmp_path / "out")
    written = import_file(tmp_path / "out" / "predict.py")
    side = 16 if task == "retrieve" else 14
    for file in files[:3]:
        seen = squared(file, side)[:, (side - 14) // 2 :, (side - 14) // 2 :][:, :14, :14]
        assert torch.equal(written.read_image(file)[0], seen / 255)
