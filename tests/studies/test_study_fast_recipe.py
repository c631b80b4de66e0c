"""The study of the recipe `fast` uses only training images, and trains no arm twice."""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from softcell.data import load
from softcell.data.splits import test_set_sealed as sealed
from studies import fast_recipe


def test_a_subset_has_training_images_only(tmp_path: Path) -> None:
    options = argparse.Namespace(data="digits", data_root=None, images=40, held=30, side=0)
    with sealed():
        fast_recipe.write_subset(options, tmp_path / "subset.npz")
    digits, found = load("digits"), np.load(tmp_path / "subset.npz")
    assert (len(found["x_train"]), len(found["x_test"])) == (40, 30)
    rows = {image.tobytes() for image in digits.train.fetch(torch.arange(len(digits.train))).numpy()}
    chosen = [image.tobytes() for name in ("x_train", "x_test") for image in found[name]]
    assert all(image in rows for image in chosen) and len(set(chosen)) == 70


def test_an_arm_is_trained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "record.jsonl"
    sizes = ["--images", "64", "--held", "32", "--channels", "2", "--epochs", "1", "--seeds", "1"]
    for arms in (["base"], ["base", "plain ema=0 lr=0.01"]):
        given = [word for arm in arms for word in ("--arm", arm)]
        monkeypatch.setattr(sys, "argv", ["fast_recipe", *sizes, "--record", str(record), *given])
        fast_recipe.main()
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert [(row["arm"], row["changes"]) for row in rows] == [("base", []), ("plain", ["ema=0", "lr=0.01"])]
    assert all(0 <= row["accuracy"] <= 1 for row in rows)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("plain") and lines[0] == lines[1], "the same figure without a second training"
