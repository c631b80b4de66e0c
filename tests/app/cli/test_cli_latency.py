"""`softcell latency`: which network is measured, and what is printed about it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from softcell.app.cli.latency import _search_options
from softcell.app.cli.main import run
from softcell.engine.manifest import read_mapping
from softcell.evaluate import latency as subject
from softcell.recipes import train_recipe
from softcell.spaces import build_space
from tests.helpers.cli_calls import CELL, TINY, TINY_TRAIN, Softcell
from tests.helpers.unsealed import unsealed

FAST = ("--samples", "2", "--threads", "1")


@pytest.fixture(autouse=True)
def _cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times do not matter here."""
    monkeypatch.setattr(subject, "WARM_UP", 0.0)
    monkeypatch.setattr(subject, "SAMPLE", 0.0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert run(["train", CELL, *TINY_TRAIN, "--out", str(folder), "--quiet"]) == 0
    return folder


def with_status(run_: Path, place: Path, status: str) -> Path:
    """A copy of the run with another status."""
    shutil.copytree(run_, place)
    manifest = json.loads((place / "run.json").read_text())
    (place / "run.json").write_text(json.dumps({**unsealed(manifest), "status": status}))
    if status != "finished":
        (place / "model.safetensors").unlink()
    return place


@pytest.mark.parametrize("status", ["finished", "interrupted", "failed", "running"])
def test_a_training_run_is_measured_with_its_own_network(
    call: Softcell, trained: Path, tmp_path: Path, status: str
) -> None:
    answer = call("latency", with_status(trained, tmp_path / "run", status), *FAST)
    assert answer.code == 0, answer.error
    assert "cells_per_stage 1, channels 2, nodes 4" in answer.out
    assert "input 1x8x8, 10 outputs" in answer.out


@pytest.mark.parametrize(
    ("options", "network"),
    [
        (("--input", "3x12x16"), "channels 2, nodes 4, input 3x12x16, 10 outputs"),
        (("--classes", "7"), "channels 2, nodes 4, input 1x8x8, 7 outputs"),
        (("--channels", "3"), "channels 3, nodes 4, input 1x8x8, 10 outputs"),
        (("--set", "space.cells_per_stage=2"), "cells_per_stage 2, channels 2, nodes 4, input 1x8x8"),
        (("--recipe", "cifar"), "cells_per_stage 5, channels 16, nodes 4, input 3x32x32, 10 outputs"),
        (("--recipe", "cifar", "--channels", "2", "--input", "1x8x8"), "cells_per_stage 5, channels 2"),
    ],
)
def test_options_override_single_settings_of_a_training(
    call: Softcell, trained: Path, options: tuple[str, ...], network: str
) -> None:
    answer = call("latency", trained, *FAST, *options)
    assert answer.code == 0, answer.error
    assert network in answer.out


def test_a_search_is_measured_as_the_network_that_would_be_trained(call: Softcell, searched: Path) -> None:
    answer = call("latency", searched, *FAST)
    assert answer.code == 0, answer.error
    expected = train_recipe(str(searched), {})[1].space_settings
    sizes = f"cells_per_stage {expected['cells_per_stage']}, channels {expected['channels']}, "
    assert re.search(f"{sizes}nodes 4, input 1x8x8, 10 outputs", answer.out)
    assert re.search(f"{sizes}.*input 1x8x8, 10 classes", call("info", searched).out)  # counts the same network
    assert "input 3x8x8" in call("latency", searched, "--input", "3x8x8", *FAST).out


def test_a_search_is_measured_at_the_size_of_a_given_recipe(call: Softcell, searched: Path) -> None:
    assert "channels 16, nodes 4, input 1x8x8" in call("latency", searched, "--recipe", "small", *FAST).out
    assert "cells_per_stage 5" in call("latency", searched, "--recipe", "cifar", "--input", "3x8x8", *FAST).out


@pytest.mark.parametrize("option", [("--out", "x.yaml"), ("--networks", "3")])
def test_options_of_a_table_are_rejected_for_a_network(call: Softcell, option: tuple[str, str]) -> None:
    answer = call("latency", CELL, *option)
    assert answer.code == 2
    assert f"{option[0]} applies to the table of a space" in answer.error


def test_new_folders_are_named_and_output_paths_are_checked_before_measuring(call: Softcell, tmp_path: Path) -> None:
    small = ("latency", "nb201", "--recipe", "small", "--channels", "2", "--networks", "0", *FAST)
    (tmp_path / "my plugin.py").touch()
    answer = call(*small, "--plugin", "my plugin.py", "--out", "new/deep/a.yaml")
    assert answer.code == 0, answer.error
    assert next_of(answer.out)[-6:-4] == ["--plugin", "my plugin.py"]
    assert "new/deep/a.yaml (created the folder new)" in answer.out
    assert "is new" not in call(*small, "--out", "new/deep/b.yaml").out
    (tmp_path / "file").touch()
    for out, reason in (
        ("new/deep/a.yaml", "already exists"),
        ("new", "is a folder"),
        ("file/a.yaml", "file is not a folder"),
    ):
        answer = call(*small, "--out", out)
        assert answer.code == 2
        assert reason in answer.error
        assert answer.out == ""


def next_of(text: str) -> list[str]:
    """The words of the command that is printed behind `next`, without `softcell`."""
    found = re.search(r"^next +softcell (.*)$", text, re.MULTILINE)
    assert found is not None, text
    return shlex.split(found[1])


@pytest.mark.parametrize(
    "options",
    [
        ("--recipe", "small"),
        ("--recipe", "small", "--channels", "2"),
        ("--input", "3x6x6", "--set", "space.nodes=3", "--channels", "2"),
    ],
)
def test_the_suggested_search_is_for_the_measured_network(
    call: Softcell, tmp_path: Path, options: tuple[str, ...]
) -> None:
    rng = np.random.default_rng(0)
    for kind in ("one", "two"):
        (tmp_path / "photos" / kind).mkdir(parents=True)
        for number in range(12):
            pixels = rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / kind / f"{number}.png")
    answer = call("latency", "nb201", *options, "--networks", "1", *FAST, "--out", "ms.yaml")
    assert answer.code == 0, answer.error
    words = ["photos" if word == "IMAGES-WITH-CLASSES" else word for word in next_of(answer.out)]
    own = [word for word in TINY if word not in ("--space", "nb201")]
    answer = call(*words, *own, "--epochs", "1", "--out", "found")
    assert answer.code == 0, answer.error
    assert "was measured for another network" not in answer.out + answer.error
    network = json.loads((tmp_path / "found" / "run.json").read_text())["recipe"]
    assert network["data"] == ("photos" if "3x6x6" in options else "digits")


def test_a_table_that_is_called_json_is_json(call: Softcell, tmp_path: Path) -> None:
    options = ("--recipe", "small", "--channels", "2", "--networks", "1")
    assert call("latency", "nb201", *options, *FAST, "--out", "ms.json").code == 0
    table = json.loads((tmp_path / "ms.json").read_text())
    assert read_mapping(tmp_path / "ms.json") == table
    assert table["cell"]["nor_conv_3x3"] > 0 and "fixed" in table


def test_the_suggested_search_names_data_of_the_right_shape() -> None:
    cifar = build_space("nb201", {"cells_per_stage": 5, "channels": 16})
    placeholder = ("--space", "nb201", "--data", "IMAGES-WITH-CLASSES")
    assert _search_options(cifar, (3, 32, 32), None) == (*placeholder, "--image-size", "32")
    assert _search_options(cifar, (3, 24, 32), None) == placeholder
    large = build_space("darts", {"cells": 14, "channels": 48, "stem": "imagenet"})
    assert _search_options(large, (3, 224, 224), "imagenet") == ("--space", "darts", "--data", "imagenet")
    assert _search_options(large, (3, 64, 64), "imagenet")[5:8] == ("64", "--set", "resource.network.cells=14")
    assert "resource.network.stem=imagenet" in _search_options(large, (3, 64, 64), "imagenet")
