"""`softcell export --to onnx-int8`: the int8 graph compared with the float network, on real images."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from PIL import Image

from softcell.api import UserError, train
from softcell.app.cli.main import run as softcell
from softcell.app.export import Exported, export, predict, read_classifier, read_model
from softcell.app.export.graph import calibration_data
from softcell.data import load
from softcell.evaluate import stored_training
from softcell.evaluate.train import parts_of

CELL = "|nor_conv_3x3~0|+|skip_connect~0|none~1|+|skip_connect~0|none~1|nor_conv_1x1~2|"
SIZES = {"channels": 8, "cells_per_stage": 1}


@pytest.fixture(scope="module", autouse=True)
def _few_samples() -> Iterator[None]:
    """Times do not matter here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("softcell.app.export.graph.SAMPLES", 3)
        patch.setattr("softcell.evaluate.measure_onnx.WARM_UP", 0.0)
        yield


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network that has learnt most of the digits."""
    folder = tmp_path_factory.mktemp("learnt") / "run"
    train(CELL, data="digits", epochs=3, lr=0.1, batch_size=64, out=folder, space_settings=SIZES, cutout=0)
    return folder


@pytest.fixture(scope="module")
def made(learnt: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return export(learnt, "onnx-int8", tmp_path_factory.mktemp("int8"))


def test_int8_agrees_with_the_network_on_digits(learnt: Path, made: Exported) -> None:
    """On the images that the training held out; the test images stay unread, though the data has some."""
    digits, found = load("digits"), made.quantised
    assert digits.test is not None and found is not None and found.accuracy is not None
    held = parts_of(digits, stored_training(learnt, {})[1])["holdout"]
    pixels, count = digits.train.fetch(held).float() / 255, len(held)
    with torch.no_grad():
        exact = read_model(learnt).normalised()(pixels)
        rounded = read_classifier(made.files[0]).forward(pixels)
    share = float((exact.argmax(1) == rounded.argmax(1)).double().mean())
    assert found.agreement == pytest.approx(share, abs=1 / count) and share >= 0.97
    difference = float((exact - rounded).abs().max() / exact.abs().max())
    assert found.difference == pytest.approx(difference, rel=1e-3) and 0.001 < difference < 0.1
    recorded = json.loads((learnt / "metrics.jsonl").read_text().splitlines()[-1])["val_accuracy"]
    assert recorded > 0.8  # a network that guesses would prove nothing
    assert found.accuracy[0] == pytest.approx(recorded, abs=1 / count)
    assert abs(found.accuracy[1] - found.accuracy[0]) < 0.02
    assert found.bytes[1] < 0.6 * found.bytes[0]
    assert (found.split, found.images, found.calibration_images) == ("holdout", count, 256)


def test_scales_match_the_weights_and_the_training_images(learnt: Path, made: Exported) -> None:
    """Closed forms: max |w| / 127 per channel, and the range on the calibration images / 255."""
    graph, model = onnx.load(made.files[0]).graph, read_model(learnt)
    constants = {one.name: numpy_helper.to_array(one) for one in graph.initializer}
    makers = {node.output[0]: node for node in graph.node}
    folded = [node for node in graph.node if node.op_type == "Conv"]
    for conv in folded:
        source = makers[conv.input[1]]
        weights, scales = (constants[name] for name in source.input[:2])
        assert weights.dtype == np.int8 and scales.shape == (weights.shape[0],)
        assert np.abs(weights).reshape(len(weights), -1).max(1).tolist() == [127] * len(weights)
    data = calibration_data(learnt, model, data=None, data_root=None, calibration=256)
    parts = parts_of(load("digits"), stored_training(learnt, {})[1])
    assert len(parts["holdout"]) > 100 and set(data.calibration.tolist()) <= set(parts["train"].tolist())
    pixels = load("digits").train.fetch(data.calibration).float() / 255
    seen = (pixels - torch.tensor(model.mean).view(-1, 1, 1)) / torch.tensor(model.std).view(-1, 1, 1)
    (first,) = [conv for conv in folded if constants[makers[conv.input[1]].input[0]].shape[1] == 1]
    scale = constants[makers[first.input[0]].input[1]]
    assert float(scale) == pytest.approx(float(seen.max() - seen.min()) / 255, rel=1e-5)


def test_the_record_is_next_to_the_file_and_in_it(made: Exported, learnt: Path) -> None:
    assert made.quantised is not None
    assert [file.name for file in made.files] == ["model-int8.onnx", "model-int8.json"]
    assert sorted(path.name for path in made.files[0].parent.iterdir()) == ["model-int8.json", "model-int8.onnx"]
    known = {entry.key: entry.value for entry in onnx.load(made.files[0]).metadata_props}
    written = json.loads(made.files[1].read_text())
    assert written == json.loads(known["int8"]) == json.loads(json.dumps(made.quantised.to_dict()))
    assert json.loads(known["classes"]) == [str(number) for number in range(10)]
    assert written["accuracy"]["int8"] == made.quantised.accuracy[1]  # type: ignore[index]


def test_a_folder_of_images_is_calibrated_and_measured_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digits = load("digits").train
    for number in range(300):
        label = int(digits.labels[number])
        if label < 3:
            pixels = digits.fetch(torch.tensor([number]))[0, 0].numpy()
            folder = tmp_path / "photos" / f"digit {label}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).resize((11, 9)).convert("RGB").save(folder / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    steps = {"recipe": "small", "image_size": 8, "epochs": 4, "lr": 0.1, "batch_size": 8, "cutout": 0}
    trained = train(CELL, data="photos", out="run", space_settings=SIZES, holdout=0.0, **steps)
    assert softcell(["export", "run", "--to", "onnx-int8", "--calibration", "40", "--quiet"]) == 0
    said = capsys.readouterr().out
    record = json.loads(Path("run/export/model-int8.json").read_text())
    assert record["calibration_images"] == 40 and record["images"] >= 15
    assert record["accuracy"]["float"] == pytest.approx(trained.accuracy) and trained.accuracy > 0.6
    assert record["agreement"] >= 0.9
    assert f"on {record['images']} test images, since none were held out of training; same class for" in said
    assert record["split"] == "test"
    assert "kB in int8" in said and "ms in int8" in said and "calibrated    on 40 training images" in said
    plain, int8 = (predict(place, "photos", top=1) for place in ("run", "run/export/model-int8.onnx"))
    same = [one.classes == other.classes for one, other in zip(plain, int8, strict=True)]
    assert np.mean(same) >= 0.95

    # Images that have changed may have moved from the training to the test set.
    shutil.copytree("photos", "changed")
    next(Path("changed").rglob("*.png")).unlink()
    again = ["export", "run", "--to", "onnx-int8", "--overwrite", "--data"]
    for data, reason in (("changed", "have changed since"), ("digits", "needs the images that run was trained on")):
        assert softcell([*again, data, *(("--data-root", ".") if data == "changed" else ())]) == 2
        assert reason in capsys.readouterr().err
    shutil.move("photos", "moved")
    assert softcell(again[:-1]) == 2
    assert "photos" in capsys.readouterr().err


def test_what_cannot_be_quantised_is_refused(learnt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(learnt, "safetensors", tmp_path / "out")
    with pytest.raises(UserError, match="is an export and does not say where they are"):
        export(tmp_path / "out", "onnx-int8")
    described = json.loads((tmp_path / "out" / "model.json").read_text())
    (tmp_path / "out" / "model.json").write_text(json.dumps({**described, "task": "retrieve"}))
    with pytest.raises(UserError, match="was trained for retrieval"):
        export(tmp_path / "out", "onnx-int8", data="digits")
    assert softcell(["export", str(learnt), "--to", "onnx", "--calibration", "9"]) == 2
    assert "--calibration applies to --to onnx-int8" in capsys.readouterr().err
    assert not (learnt / "export").exists()
