"""`softcell predict`: classes of image files, as the run itself would give them."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from PIL import Image

from softcell.api import export, train
from softcell.app.cli.main import run as softcell
from softcell.app.export import predict, read_classifier
from softcell.data import load
from softcell.errors import UserError
from softcell.evaluate.predictions import read_predictions


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of ten digits in folders named like their classes."""
    root = tmp_path_factory.mktemp("digits")
    images = load("digits").train
    for number in range(10):
        folder = root / str(int(images.labels[number]))
        folder.mkdir(exist_ok=True)
        Image.fromarray(images.fetch(torch.tensor([number]))[0, 0].numpy()).save(folder / f"{number}.png")
    return root


def test_predictions_are_those_that_the_training_made_for_its_test_images(tmp_path: Path) -> None:
    """Pictures of several sizes and modes, one of them turned by EXIF: every step of the preparation matters."""
    rng = np.random.default_rng(0)
    for part, count in (("train", 6), ("test", 5)):
        for kind in ("bright", "dark"):
            folder = tmp_path / "photos" / part / kind
            folder.mkdir(parents=True)
            for number in range(count):
                size = (20 + 7 * number, 41 - 3 * number)
                pixels = rng.integers(0, 128, (*size, 3), dtype=np.uint8) + (127 if kind == "bright" else 0)
                image, exif = Image.fromarray(pixels.astype(np.uint8)), Image.Exif()
                exif[0x0112] = 6 if number == 1 else 1
                image.convert("RGBA" if number == 2 else "RGB").save(folder / f"{number}.png", exif=exif)
    sizes = {"channels": 4, "cells_per_stage": 1}
    cell = "|nor_conv_3x3~0|+|skip_connect~0|none~1|+|skip_connect~0|none~1|nor_conv_1x1~2|"
    steps = {"batch_size": 3, "epochs": 4, "lr": 0.1, "image_size": 8}  # enough for logits that depend on the image
    result = train(cell, data=tmp_path / "photos", out=tmp_path / "run", space_settings=sizes, **steps)
    expected = read_predictions(result.folder)
    assert expected is not None
    found = predict(result.folder, tmp_path / "photos" / "test", top=2)
    assert [one.file.parent.name for one in found] == ["bright"] * 5 + ["dark"] * 5
    names = ["bright", "dark"]
    assert [names.index(one.classes[0]) for one in found] == expected["predicted"].tolist()
    confidence = torch.tensor([one.probabilities[0] for one in found])
    assert len(expected["confidence"].round(decimals=4).unique()) > 6
    torch.testing.assert_close(confidence, expected["confidence"], rtol=1e-4, atol=1e-5)
    assert all(sum(one.probabilities) == pytest.approx(1.0) for one in found)


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model.onnx` alone; not to be changed."""
    place = tmp_path_factory.mktemp("onnx")
    export(trained, "onnx", place)
    return place


def test_an_export_predicts_the_same_as_its_run(trained: Path, exported: Path, digits: Path, tmp_path: Path) -> None:
    export(trained, "safetensors", tmp_path / "out")
    expected = predict(trained, digits, top=10)
    for place in (tmp_path / "out", exported, exported / "model.onnx"):
        found = predict(place, digits, top=10)
        assert [one.classes for one in found] == [one.classes for one in expected]
        for one, other in zip(expected, found, strict=True):
            assert other.probabilities == pytest.approx(one.probabilities, abs=1e-5)


def test_an_exported_graph_has_no_path_of_this_machine(exported: Path) -> None:
    content = (exported / "model.onnx").read_bytes()
    assert str(Path(__file__).parents[3]).encode() not in content and b".py" not in content


def test_images_are_printed_with_names_and_probabilities(
    trained: Path, digits: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted(map(str, digits.rglob("*.png")))[:2]
    first = predict(trained, files[0])[0]
    assert softcell(["predict", str(trained), files[0]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"{p:6.1%}  {name}" for p, name in zip(first.probabilities, first.classes, strict=True)]
    assert softcell(["predict", str(trained), *files, "--top", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [files[0], lines[0]]


def test_a_folder_becomes_a_csv_and_unreadable_files_are_named(
    trained: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mixed/new").mkdir(parents=True)
    for number, file in enumerate(sorted(digits.rglob("*.png"))):
        folder = Path("mixed", file.parent.name) if number < 4 else Path("mixed/new")
        folder.mkdir(exist_ok=True)
        (folder / file.name).write_bytes(file.read_bytes())
    odd = os.fsdecode(b"mixed/new/\xff.png")
    Path(odd).write_bytes(file.read_bytes())
    Path("mixed/new/text.jpg").write_text("no picture")
    Path("mixed/notes.txt").write_text("no picture either")
    known = {str(one.file): one for one in predict(trained, "mixed") if one.error is None}
    assert len(known) == 11
    assert softcell(["predict", str(trained), "mixed", "--out", "made/all.csv", "-q"]) == 2
    said = capsys.readouterr()
    assert "mixed/new/text.jpg cannot be read as an image" in said.err and "notes.txt" not in said.err
    assert said.err.endswith("1 of 12 images cannot be read\n")
    right = sum(one.classes[0] == one.file.parent.name for one in known.values())
    assert f"{25 * right:.1f}% of the 4 of 11 images" in said.out.replace("100%", "100.0%")
    with open("made/all.csv", encoding="utf-8", errors="surrogateescape", newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert {row["file"] for row in rows} == {*known} and odd in known
    for row in rows:
        assert row["class"] == known[row["file"]].classes[0]
        assert float(row["probability"]) == pytest.approx(known[row["file"]].probabilities[0], abs=1e-6)
    assert softcell(["predict", str(trained), "mixed", "--top", "2"]) == 2  # printed without --out
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "file,class,probability,class_2,probability_2" and len(lines) == 11


def test_a_csv_is_written_whole_or_not_at_all(
    trained: Path, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "all.csv"
    target.write_text("before")
    asked = ["predict", str(trained), *[str(digits)] * 4, "--out", str(target), "-q"]  # 40 images, two batches
    assert softcell(asked) == 2  # it exists
    seen: list[list[str]] = []

    def stop(_: object, pixels: torch.Tensor) -> torch.Tensor:
        seen.append(sorted(os.listdir(tmp_path)))
        if len(seen) == 2:
            raise KeyboardInterrupt
        return torch.zeros(len(pixels), 10)

    monkeypatch.setattr("softcell.app.export.model.Normalised.forward", stop)
    assert softcell([*asked, "--overwrite"]) == 130
    assert seen == [[".all.csv.tmp", "all.csv"]] * 2
    assert target.read_text() == "before" and os.listdir(tmp_path) == ["all.csv"]


def test_arrays_are_refused_with_what_takes_them(trained: Path) -> None:
    with pytest.raises(UserError, match=r"files or folders, but got ndarray; .*Network\.from_pretrained"):
        predict(trained, [np.zeros((8, 8), np.uint8)])  # type: ignore[list-item]


def test_a_retrieval_has_no_classes_to_predict(trained: Path, exported: Path, digits: Path, tmp_path: Path) -> None:
    export(trained, "safetensors", tmp_path)
    known = onnx.load(exported / "model.onnx")
    next(entry for entry in known.metadata_props if entry.key == "classes").key = "seen_classes"
    onnx.save(known, tmp_path / "model.onnx")
    described = json.loads((tmp_path / "model.json").read_text())
    (tmp_path / "model.json").write_text(json.dumps({**described, "task": "retrieve"}))
    for place in (tmp_path, tmp_path / "model.onnx"):
        with pytest.raises(UserError, match="was trained for retrieval and returns embeddings"):
            predict(place, digits)


def test_wrong_arguments_are_refused_in_one_line(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("text.onnx").write_text("no graph")
    Image.new("L", (8, 8)).save("a.png")
    for arguments, reason in (
        ((trained, "empty"), "a folder must hold images"),
        ((trained, "a.png", "--top", "0"), "--top"),
        (("nowhere", "a.png"), "nowhere"),
        (("nowhere.onnx", "a.png"), "nowhere.onnx must be an ONNX file, but cannot be read"),
        (("text.onnx", "a.png"), "onnxruntime cannot load it"),
        ((trained, "a.png", "--out", "empty"), "empty is a folder"),
    ):
        assert softcell(["predict", *map(str, arguments)]) == 2
        said = capsys.readouterr()
        assert said.out == "" and reason in said.err and said.err.count("\n") == 1, said.err


def test_an_onnx_file_without_its_facts_is_refused(exported: Path, tmp_path: Path) -> None:
    known = onnx.load(exported / "model.onnx")
    (mean,) = [entry for entry in known.metadata_props if entry.key == "mean"]
    for value, reason in (("[0.5", "`mean` in the metadata must be JSON"), ('["x"]', "mean")):
        mean.value = value
        onnx.save(known, tmp_path / "changed.onnx")
        with pytest.raises(UserError, match=reason):
            read_classifier(tmp_path / "changed.onnx")
