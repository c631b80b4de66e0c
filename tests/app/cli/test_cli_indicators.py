"""`softcell indicators` and `softcell gradcam` on a tiny search."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from softcell.app.cli.main import run
from softcell.app.cli.supernet import _pictures
from softcell.search.supernet import restore
from tests.helpers.cli_calls import TINY, Softcell


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("itnas") / "run"
    less = ("--set", "split.weights=128", "--set", "split.validation=64")
    assert run(["search", "itnas", *TINY, *less, "--epochs", "1", "--out", str(folder), "--quiet"]) == 0
    return folder


def test_indicators_are_compared_and_written(call: Softcell, found: Path, tmp_path: Path) -> None:
    answer = call("indicators", found, "--by", "attention", "--by", "perturbation", "--images", "32", "--out", "i.json")
    assert answer.code == 0, answer.error
    assert "cell 0->1" in answer.out
    assert "attention ~ perturbation" in answer.out
    record = json.loads((tmp_path / "i.json").read_text())
    assert set(record["values"]) == {"attention", "perturbation", "perturbation_loss"}
    assert len(record["values"]["attention"]["cell"]) == 6
    assert record["images"] == record["baseline"]["images"] == 32
    assert f"{record['baseline']['accuracy']:.1%} of 32 images, BatchNorm recalibrated" in answer.out
    again = call("indicators", found, "--out", "i.json")
    assert again.code == 2
    assert "already exists" in again.error


def test_ties_and_a_supernet_at_chance_are_noted(call: Softcell, tmp_path: Path) -> None:
    few = ("--set", "split.weights=128", "--set", "split.validation=64")
    nothing = ("--set", "weights.lr=1e-9", "--set", "weights.lr_min=0")
    searched = call("search", "spos", *TINY, *few, *nothing, "--epochs", "1", "--out", "spos", "--quiet")
    assert searched.code == 0, searched.error
    answer = call("indicators", "spos", "--by", "alpha", "--by", "perturbation")
    assert answer.code == 0, answer.error
    lines = [line.split("  ") for line in answer.out.splitlines() if line.startswith("cell ")]
    assert [[word.strip() for word in line if word.strip()][1:] for line in lines] == [["tie of 5", "–", "–"]] * 6
    assert "`tied` in the JSON lists them" in answer.out
    assert " of 64 images, BatchNorm recalibrated" in answer.out and "perturbation is meaningless" in answer.out
    record = json.loads((tmp_path / "spos/indicators.json").read_text())
    assert record["baseline"]["at_chance"] and record["images"] == 64, "512 were asked for"
    assert record["saying_nothing"] == ["perturbation", "perturbation_loss"]
    assert record["edges"][0]["best"] == {"alpha": None, "perturbation": None, "perturbation_loss": None}
    assert len(record["edges"][0]["tied"]["alpha"]) == 5


def test_gradcam_draws_images_and_pictures(call: Softcell, found: Path, tmp_path: Path) -> None:
    Image.new("L", (20, 12), 128).save(tmp_path / "grey.png")
    answer = call(
        "gradcam", found, "--picture", "grey.png", "--image", "3", "--cell", "0", "--edge", "0->2", "--out", "c.png"
    )
    assert answer.code == 0, answer.error
    assert "* selected" in answer.out
    assert "cell 0 (cell), edge 0->2" in answer.out
    with Image.open(tmp_path / "c.png") as drawn:
        assert drawn.width > 5 * 128
    answer = call("gradcam", found, "--picture", "grey.png", "--out", "new/deep/c.png")
    assert answer.code == 0, answer.error
    assert "new/deep/c.png (created the folder new)" in answer.out
    assert (tmp_path / "new" / "deep" / "c.png").is_file()


def test_gradcam_draws_attentions_and_kernels_of_a_second_tier(call: Softcell, tmp_path: Path) -> None:
    sizes = [f"space.{name}" for name in ("channels=2", "nodes=1")]
    few = [*sizes, "split.weights=128", "split.validation=64"]
    settings = [word for one in few for word in ("--set", one)]
    searched = call("search", "nos", *settings, "--epochs", "1", "--out", "nos", "--quiet")
    assert searched.code == 0, searched.error
    answer = call("gradcam", "nos", "--edge", "2->3", "--image", "0", "--out", "c.png")
    assert answer.code == 0, answer.error
    for op in ("sep_conv_3x3", "spatial_attention", "channel_attention", "dynamic_conv_5x5"):
        assert op in answer.out


@pytest.mark.parametrize(("scaled", "whole"), [(None, False), ((10, 10), False), ((8, 8), True), ((10, 10), True)])
def test_a_picture_is_prepared_like_the_dataset(
    found: Path, tmp_path: Path, scaled: tuple[int, int] | None, whole: bool
) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (12, 20), dtype=np.uint8))
    picture.save(tmp_path / "noise.png")
    restored = restore(found)
    dataset = replace(restored.dataset, scaled_to=scaled, whole=whole)
    pixels, _, _ = _pictures(replace(restored, dataset=dataset), None, [tmp_path / "noise.png"])
    side = 8 if scaled is None else scaled[0]
    fitted = picture.resize((side, side), Image.Resampling.BILINEAR)
    if not whole:
        fitted = ImageOps.fit(picture, (side, side), Image.Resampling.BILINEAR)
    edge = (side - 8) // 2
    assert np.array_equal(pixels[0, 0].numpy(), np.array(fitted)[edge : edge + 8, edge : edge + 8])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cell", "7"), "--cell must be 0 to 2"),
        (("--edge", "3->1"), "--edge must be one of 0->1"),
        (("--class", "cat"), "--class must be one of"),
        (("--image", "99999"), "--image must be below"),
        (("--picture", "missing.png"), "--picture must be an image file, but there is no file missing.png"),
        (("--picture", "."), "--picture must be an image file, but . is a folder"),
        (("--out", "x.svg"), "must end in .png"),
    ],
)
def test_gradcam_says_what_is_wrong(call: Softcell, found: Path, arguments: tuple[str, ...], message: str) -> None:
    answer = call("gradcam", found, "--out", "x.png", *arguments)
    assert answer.code == 2
    assert message in answer.error
