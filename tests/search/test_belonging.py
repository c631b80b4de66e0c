"""A run is resumed only with its original data, recipe and checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from softcell.api import search, train
from softcell.data import load
from softcell.data.dataset import content_of
from softcell.engine import checkpoint
from softcell.engine.checkpoint import IDENTITY, replace_recipe
from softcell.engine.task import EpochEnded, Event, Note
from softcell.errors import UserError
from softcell.search.supernet import restore

CELL = "|nor_conv_3x3~0|+|none~0|skip_connect~1|+|nor_conv_1x1~0|none~1|avg_pool_3x3~2|"
TINY: dict[str, Any] = {"batch_size": 32, "epochs": 2, "space_settings": {"channels": 2, "cells_per_stage": 1}}
SEARCH = {**TINY, "scale": "small"}


class Stop(Exception):
    """Ends a run between two epochs, as a kill would."""


def stop(event: Event) -> None:
    if isinstance(event, EpochEnded):
        raise Stop


def write(file: Path, change: Callable[[dict[str, Any]], None] = lambda content: None) -> Path:
    draw = np.random.default_rng(0)
    content: dict[str, Any] = {
        "images": draw.integers(0, 256, (60, 8, 8), dtype=np.uint8),
        "labels": np.arange(60) % 3,
    }
    change(content)
    np.savez(file, **content)
    return file


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A search and a training run, each with one of two epochs done; not to be changed."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("stopped")
    data = write(place / "data.npz")
    with pytest.raises(Stop):
        search("darts", space="nb201", data=data, out=place / "search", on_event=stop, **SEARCH)
    with pytest.raises(Stop):
        train(CELL, data=data, recipe="small", out=place / "train", on_event=stop, **TINY)
    yield place
    torch.set_num_threads(before)


@pytest.fixture
def place(stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of both; their data lie where they lay, so that they can be exchanged."""
    shutil.copytree(stopped, tmp_path / "copy")
    for name in ("search", "train"):
        edit(tmp_path / "copy" / name, lambda recipe: recipe.update(data=str(tmp_path / "copy" / "data.npz")))
    return tmp_path / "copy"


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((folder / "run.json").read_text())
    change(manifest["recipe"])
    (folder / "run.json").write_text(json.dumps(manifest))


def resume(folder: Path) -> list[str]:
    """Resumes a run to its end, and gives the notes on the way."""
    notes: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    (search if folder.name == "search" else train)(out=folder, resume=True, on_event=listen)
    return notes


@pytest.mark.parametrize("kind", ["search", "train"])
def test_a_moved_run_with_moved_data_resumes_without_a_note(place: Path, kind: str) -> None:
    assert resume(place / kind) == []


@pytest.mark.parametrize("kind", ["search", "train"])
@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("train pixels", lambda content: content["images"].__setitem__((content["labels"] == 1, 0, 0), 7)),
        ("train labels", lambda content: content.update(labels=content["labels"][::-1].copy())),
    ],
)
def test_resuming_on_changed_data_is_refused(place: Path, kind: str, what: str, change: Any) -> None:
    write(place / "data.npz", change)
    with pytest.raises(UserError, match=rf"on the data it began with.*{what}"):
        resume(place / kind)


def test_one_changed_pixel_is_seen(place: Path) -> None:
    before = content_of(load(place / "data.npz"))
    changed = 0
    for at in range(60):
        write(place / "data.npz", lambda content, at=at: content["images"].__setitem__((at, 3, 3), 99))
        found = content_of(load(place / "data.npz"))
        changed += found["train_pixels"] != before["train_pixels"]
    assert changed == 48, "a fifth is the test set, which is not read before the last epoch"


@pytest.mark.parametrize(
    ("kind", "change", "what"),
    [
        (
            "search",
            lambda recipe: recipe["weights"].update(lr=0.5),
            r"weights\.lr is 0\.1 in the checkpoint and 0\.5 now",
        ),
        ("search", lambda recipe: recipe.update(epochs=7), r"epochs is 2 in the checkpoint and 7 now"),
        ("train", lambda recipe: recipe.update(lr=0.5), r"lr is 0\.05 in the checkpoint and 0\.5 now"),
        ("train", lambda recipe: recipe.update(seed=4), r"seed is 0 in the checkpoint and 4 now"),
    ],
)
def test_resuming_with_a_changed_recipe_is_refused(place: Path, kind: str, change: Any, what: str) -> None:
    edit(place / kind, change)
    with pytest.raises(UserError, match=what):
        resume(place / kind)


def test_the_checkpoint_of_another_seed_is_refused(place: Path, tmp_path: Path) -> None:
    with pytest.raises(Stop):
        search(
            "darts",
            space="nb201",
            scale="small",
            data=place / "data.npz",
            out=tmp_path / "other",
            on_event=stop,
            seed=1,
            **TINY,
        )
    shutil.copy(tmp_path / "other" / checkpoint.CURRENT, place / "search")
    with pytest.raises(UserError, match="seed is 1 in the checkpoint and 0 now"):
        resume(place / "search")
    with pytest.raises(UserError, match="seed is 1 in the checkpoint and 0 now"):
        restore(place / "search", device="cpu")


@pytest.mark.parametrize("known", [True, False])
def test_the_checkpoint_of_another_method_is_refused(place: Path, known: bool) -> None:
    shutil.copy(place / "train" / checkpoint.CURRENT, place / "search")
    if not known:
        forget(place / "search")
    with pytest.raises(UserError, match="kind is 'train'" if known else "does not fit this run"):
        resume(place / "search")
    with pytest.raises(UserError, match="kind is 'train'" if known else "does not fit the search"):
        restore(place / "search", device="cpu")


def forget(folder: Path) -> None:
    """Makes the checkpoint one of an earlier version, which knew nothing of what it belongs to."""
    loaded = checkpoint.load_latest(folder)
    assert loaded is not None
    checkpoint.save(folder, {key: value for key, value in loaded.state.items() if key != IDENTITY})


@pytest.mark.parametrize("kind", ["search", "train"])
def test_a_checkpoint_of_an_earlier_version_resumes_with_a_note(place: Path, kind: str) -> None:
    forget(place / kind)
    (note,) = resume(place / kind)
    assert "earlier version" in note and "not checked" in note


def test_other_code_is_a_note_with_both_versions(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "code_digest", lambda: "0123456789ab")
    (note,) = resume(place / "search")
    assert "another version of the code" in note and "'0123456789ab' now" in note


def test_other_threads_are_a_note(place: Path) -> None:
    edit(place / "train", lambda recipe: recipe.update(deterministic=True))
    (note,) = resume(place / "train")
    assert "deterministic is False in the checkpoint and True now" in note and "rounding" in note


def test_data_are_compared_before_there_is_a_checkpoint(place: Path) -> None:
    for name in (checkpoint.CURRENT, checkpoint.PREVIOUS):
        (place / "search" / name).unlink(missing_ok=True)
    write(place / "data.npz", lambda content: content["images"].fill(3))
    with pytest.raises(UserError, match="on the data it began with"):
        resume(place / "search")


def test_a_change_that_softcell_makes_itself_is_amended(place: Path) -> None:
    edit(place / "search", lambda recipe: recipe.update(epochs=1))
    replace_recipe(place / "search", json.loads((place / "search" / "run.json").read_text())["recipe"])
    assert resume(place / "search") == []


def test_files_are_compared_by_names_sizes_and_samples_and_times_are_only_a_note(tmp_path: Path) -> None:
    root = tmp_path / "images"
    draw = np.random.default_rng(0)
    for index in range(12):
        (root / f"class-{index % 2}").mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(root / f"class-{index % 2}" / f"{index}.bmp")

    def content() -> dict[str, str]:
        return content_of(load(root, image_size=8, memory_limit=0))

    before = content()
    assert set(before) == {"train_files", "train_labels", "train_times"}
    assert content() == before
    file = root / "class-0" / "4.bmp"
    bytes_ = file.read_bytes()
    file.write_bytes(bytes_)
    found = content()
    assert [key for key in before if before[key] != found[key]] == ["train_times"]
    (note,) = checkpoint.check_data(before, found, root)
    assert "modification times" in note
    file.write_bytes(bytes_[:-1] + bytes([bytes_[-1] ^ 1]))
    with pytest.raises(UserError, match="train files"):
        checkpoint.check_data(before, content(), root)
