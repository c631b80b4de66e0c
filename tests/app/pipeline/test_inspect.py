from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from PIL import Image

from softcell.app.pipeline._inspect import Inspection, inspect_dataset, inspect_folder, make_links
from softcell.data import load
from softcell.errors import UserError
from tests.helpers.pipeline_images import MODES, folder, paint


def test_a_tidy_folder_is_used_unchanged(tmp_path: Path) -> None:
    found = inspect_folder(folder(tmp_path / "a", count=12, labels=3))
    assert found.train == {"class-0": 12, "class-1": 12, "class-2": 12}
    assert not found.needs_links and not found.broken and not found.notes
    assert found.sides == (20, 20, 20) and found.channels == 3
    assert Inspection.from_dict(found.to_dict()).lines() == found.lines()


@pytest.mark.parametrize("split", [("train", "test"), ("train", "val")])
def test_a_tidy_split_is_used_unchanged(tmp_path: Path, split: tuple[str, str]) -> None:
    for part in split:
        folder(tmp_path / "a" / part, count=3)
    found = inspect_folder(tmp_path / "a")
    assert not found.needs_links
    assert found.train == found.test == {"class-0": 3, "class-1": 3}


def test_every_broken_file_is_named_and_skipped(tmp_path: Path) -> None:
    root = folder(tmp_path / "a")
    (root / "class-0" / "empty.jpg").write_bytes(b"")
    whole = (root / "class-1" / "0.png").read_bytes()
    (root / "class-1" / "cut.png").write_bytes(whole[: len(whole) // 2])
    noise = Image.effect_noise((64, 64), 90).convert("RGB")
    noise.save(root / "class-1" / "half.jpg")  # a header that can be read, and half of the pixels
    whole = (root / "class-1" / "half.jpg").read_bytes()
    (root / "class-1" / "half.jpg").write_bytes(whole[: len(whole) // 2])
    found = inspect_folder(root)
    assert found.broken == [
        ("class-0/empty.jpg", "UnidentifiedImageError"),
        ("class-1/cut.png", "OSError"),
        ("class-1/half.jpg", "OSError"),
    ]
    text = "\n".join(found.lines())
    assert "3 broken files" in text and all(name in text for name, _ in found.broken) and "plan.json" not in text
    links = make_links(found, tmp_path / "links")
    assert len(load(links).train) + len(load(links).test) == 24


def test_only_some_of_many_broken_files_are_shown_but_all_are_saved(tmp_path: Path) -> None:
    root = folder(tmp_path / "a")
    for number in range(7):
        (root / "class-0" / f"bad-{number}.png").write_bytes(b"x")
    found = inspect_folder(root)
    (line,) = (line for line in found.lines() if "broken" in line)
    assert line.startswith("skipped 7 broken files: class-0/bad-0.png (") and "bad-4.png" in line
    assert "bad-5.png" not in line and line.endswith("plan.json lists all")
    assert [name for name, _ in found.to_dict()["broken"]] == [f"class-0/bad-{number}.png" for number in range(7)]


def test_every_mode_is_read(tmp_path: Path) -> None:
    root = folder(tmp_path / "a")
    for number, mode in enumerate(MODES):
        paint(root / "class-0" / f"mode-{number}.png", 0, number, mode=mode)
    Image.new("CMYK", (20, 20)).save(root / "class-1" / "print.jpg")
    found = inspect_folder(root)
    assert not found.broken
    assert found.train == {"class-0": 12 + len(MODES), "class-1": 13}


def test_untidy_folders_are_corrected_by_links_and_left_unchanged(tmp_path: Path) -> None:
    root = tmp_path / "archive" / "photos" / "photos"  # an archive in an archive
    folder(root)
    paint(root / "class-0" / "monday" / "deep.png", 0, 1)
    paint(root / "class-0" / "tuesday" / "deep.png", 0, 2)  # the same name twice
    paint(root / "class-1" / "UPPER.PNG", 1, 1)
    paint(root / "alone" / "one.png", 2, 1)
    paint(root / "stray.png", 0, 3)
    (root / "class-0" / "notes.txt").write_text("hello")
    (root / ".hidden").mkdir()
    (root / "__MACOSX").mkdir()
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    found = inspect_folder(tmp_path / "archive")
    assert found.train == {"class-0": 14, "class-1": 13}
    text = "\n".join(found.lines())
    assert "alone" in text and "stray.png" in text and "ignored 1 other file" in text
    assert found.needs_links
    dataset = load(make_links(found, tmp_path / "links"))
    assert dataset.classes == ("class-0", "class-1")
    shutil.rmtree(tmp_path / "links")
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before


def test_split_names_of_all_kinds_are_known(tmp_path: Path) -> None:
    root = tmp_path / "a"
    for part, count in (("Training", 4), ("valid", 2), ("Test", 3)):
        folder(root / part, count=count)
    paint(root / "Test" / "unknown" / "0.png", 1, 0)
    found = inspect_folder(root)
    assert found.train == {"class-0": 6, "class-1": 6}
    assert found.test == {"class-0": 3, "class-1": 3}
    text = "\n".join(found.lines())
    assert "val/ is added to the training images" in text and "unknown" in text
    dataset = load(make_links(found, tmp_path / "links"))
    assert dataset.test is not None
    assert (len(dataset.train), len(dataset.test)) == (12, 6)


def test_a_class_called_train_is_a_class(tmp_path: Path) -> None:
    root = tmp_path / "vehicles"
    for label, name in enumerate(("train", "car")):
        for number in range(3):
            paint(root / name / f"{number}.png", label, number)
    assert inspect_folder(root).train == {"car": 3, "train": 3}


def test_imbalanced_and_rare_classes_are_noted(tmp_path: Path) -> None:
    root = folder(tmp_path / "a", count=20)
    for number in range(2):
        paint(root / "rare" / f"{number}.png", 2, number)
    found = inspect_folder(root)
    text = "\n".join(found.lines())
    assert "10 to 1" in text and "fewer than 10 training images: rare (2)" in text
    assert found.most_frequent == 20 / 42


def test_nothing_to_use_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no images"):
        inspect_folder(tmp_path)
    paint(tmp_path / "only" / "0.png", 0, 0)
    paint(tmp_path / "only" / "1.png", 0, 1)
    expected = "at least 2 classes must have 2 readable images or more, but only 'only' does; .* together need 8 images"
    with pytest.raises(UserError, match=expected):
        inspect_folder(tmp_path)
    for number in range(3):
        paint(tmp_path / "flat" / f"{number}.png", 0, number)
    with pytest.raises(UserError, match="3 images in it, but not in a class folder"):
        inspect_folder(tmp_path / "flat")
    for name in ("a", "b"):
        (tmp_path / "broken" / name).mkdir(parents=True)
        (tmp_path / "broken" / name / "0.png").write_bytes(b"not an image")
    with pytest.raises(UserError, match=r"none of the 2 images below .*broken can be read, such as a/0.png \("):
        inspect_folder(tmp_path / "broken")


def test_a_dataset_by_name_gives_the_same_facts() -> None:
    found = inspect_dataset(load("digits"))
    assert sum(found.train.values()) + sum(found.test.values()) == 1797
    assert found.sides == (8, 8, 8) and found.channels == 1
