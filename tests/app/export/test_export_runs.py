"""Exports of training runs, from Python and the command line."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from softcell.api import Network, export, load_network, train
from softcell.app.cli.main import run
from softcell.app.export import FORMATS, graph, read_model, write
from softcell.app.export import _python as python
from softcell.app.export._source import Sources
from softcell.data import load
from softcell.errors import UserError
from tests.helpers.unsealed import unseal, unsealed

CELL = "|nor_conv_3x3~0|+|none~0|skip_connect~1|+|nor_conv_1x1~0|none~1|avg_pool_3x3~2|"

EXACT = tuple(kind for kind in FORMATS if kind != "onnx-int8")
"""Formats whose output is the network's up to rounding in float32."""


def test_two_lines_load_a_network(trained: Path) -> None:
    network = Network.from_pretrained(trained)
    x = torch.rand(2, 1, 8, 8)
    assert torch.equal(network(x), load_network(trained)(x))
    assert not network.training
    model = read_model(trained)
    assert network.inputs is not None
    assert network.inputs.classes == tuple(str(digit) for digit in range(10))
    torch.testing.assert_close(network(network.normalise(x)), model.normalised()(x))
    network.inputs = None
    with pytest.raises(ValueError, match="loaded from its folder"):
        network.normalise(x)


def test_a_file_states_the_length_of_its_training(trained: Path, tmp_path: Path) -> None:
    assert read_model(trained).about["training"] == "1 epoch, recipe small, seed 0"
    timed = unseal(Path(shutil.copytree(trained, tmp_path / "timed")))
    manifest = json.loads((timed / "run.json").read_text(encoding="utf-8"))
    manifest["recipe"] |= {"epochs": 0, "time": 90.0}  # as after `softcell train --time 90s`
    (timed / "run.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert read_model(timed).about["training"] == "1:30, recipe small, seed 0"


def test_command_writes_every_format_and_each_gives_the_networks_logits(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = [word for kind in EXACT for word in ("--to", kind)]
    assert run(["export", str(trained), *wanted, "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    files = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert files == ["model.json", "model.onnx", "model.pt2", "model.py", "model.safetensors", "predict.py"]
    assert all(str(tmp_path / "out" / name) in shown for name in files)
    model = read_model(trained)
    assert graph.check_onnx(tmp_path / "out" / "model.onnx", model) < 1e-5
    assert graph.check_program(tmp_path / "out" / "model.pt2", model) < 1e-6
    assert python.check_python(tmp_path / "out" / "predict.py", model) < 1e-6
    again = Network.from_pretrained(tmp_path / "out")  # without the run it came from
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(again(x), model.network(x))
    assert read_model(tmp_path / "out").classes == model.classes == tuple("0123456789")
    known = {entry.key: entry.value for entry in onnx.load(tmp_path / "out" / "model.onnx").metadata_props}
    assert json.loads(known["classes"]) == list("0123456789")
    assert json.loads(known["shape"]) == [1, 8, 8]
    assert "test split" in known["accuracy"]


def test_a_retrieval_is_exported_as_an_embedding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_, out = tmp_path / "run", tmp_path / "out"
    sizes = {"channels": 2, "cells_per_stage": 1}
    own = {"task": "retrieve", "embedding": 7, "space_settings": sizes}
    cell = "|nor_conv_1x1~0|+|none~0|skip_connect~1|+|none~0|none~1|skip_connect~2|"
    trained = train(cell, data="digits", epochs=1, out=run_, batch_size=256, **own)
    assert trained.accuracy is None and trained.recall is not None
    again = train(cell, out=run_, resume=True)  # a finished run gives its result at once
    assert again.recall == trained.recall and again.accuracy is None
    assert run(["export", str(run_), *(w for kind in EXACT for w in ("--to", kind)), "--out", str(out)]) == 0
    assert "same embedding as the network" in capsys.readouterr().out
    for words in (["export", str(run_), "--to", "onnx-int8", "--out", str(out)], ["predict", str(run_), "a.png"]):
        assert run(words) == 2
        assert "trained for retrieval" in capsys.readouterr().err
    model = read_model(out)
    assert (model.output, model.classes) == ("embedding", tuple("01234"))
    assert graph.check_onnx(out / "model.onnx", model) < 1e-5
    found = onnx.load(out / "model.onnx")
    assert [o.name for o in found.graph.output] == ["embedding"]
    known = {entry.key: entry.value for entry in found.metadata_props}
    assert json.loads(known["seen_classes"]) == list("01234") and "unseen classes" in known["recall at 1"]
    x = torch.rand(3, 1, 8, 8)
    assert Network.from_pretrained(out)(x).shape == (3, 7)
    assert torch.equal(Network.from_pretrained(out)(x), Network.from_pretrained(run_)(x))
    names = [str(tmp_path / f"{shade}.png") for shade in ("dark", "light", "dark-too")]
    shades = (0, 255, 5)
    for name, shade in zip(names, shades, strict=True):
        Image.fromarray(np.tri(8, 8, dtype=np.uint8) * 80 + np.uint8(shade // 2)).save(name)
    written = python.import_file(out / "predict.py")
    found_by_file = written.embed(torch.cat([written.read_image(name) for name in names]), written.load())
    likeness = (found_by_file @ found_by_file.T)[0]
    assert float(likeness[0]) == pytest.approx(1.0) and float(likeness[2]) > float(likeness[1])
    monkeypatch.setattr(sys, "argv", ["predict.py", *names])
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(out / "predict.py"), run_name="__main__")
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == [names[2], names[1]]
    for arguments, answered in ((["nowhere.png", *names], []), ([names[0], "nowhere.png", names[2]], [names[2]])):
        monkeypatch.setattr(sys, "argv", ["predict.py", *arguments])
        with pytest.raises(SystemExit, match=r"^2$"):
            runpy.run_path(str(out / "predict.py"), run_name="__main__")
        said = capsys.readouterr()
        assert [line.split()[1] for line in said.out.splitlines()] == answered
        assert said.err == "nowhere.png cannot be read as an image: No such file or directory\n"
    monkeypatch.setattr(sys, "argv", ["predict.py", names[0]])  # with nothing to compare it with
    with pytest.raises(SystemExit, match=r"^2$"):
        runpy.run_path(str(out / "predict.py"), run_name="__main__")
    assert "usage: predict.py [-h] QUERY IMAGE" in capsys.readouterr().err


def test_pictures_are_prepared_as_the_test_set_was(tmp_path: Path) -> None:
    """ImageNet is seen without the margin that training crops from."""
    rng = np.random.default_rng(0)
    for part in ("train", "val"):
        for kind in ("n01", "n02"):
            (tmp_path / "data" / part / kind).mkdir(parents=True)
            for number in range(2):
                pixels = rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "data" / part / kind / f"{number}.png")
    given = {"data": "imagenet", "data_root": str(tmp_path / "data"), "image_size": 28, "batch_size": 4}
    train(CELL, epochs=1, out=tmp_path / "run", space_settings={"channels": 2, "cells_per_stage": 1}, **given)
    for kind in ("python", "onnx"):
        export(tmp_path / "run", kind, tmp_path / "out")
    known = {entry.key: entry.value for entry in onnx.load(tmp_path / "out" / "model.onnx").metadata_props}
    assert (json.loads(known["scaled_to"]), json.loads(known["whole"])) == ([32, 32], False)
    written, test = python.import_file(tmp_path / "out" / "predict.py"), load("imagenet", tmp_path / "data", 28).test
    assert test is not None
    for number, name in enumerate(("n01/0", "n01/1", "n02/0", "n02/1")):
        read = written.read_image(tmp_path / "data" / "val" / f"{name}.png")
        assert torch.equal(read, test.fetch(torch.tensor([number])) / 255)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "I;16", "P"])
def test_pictures_of_any_mode_are_read_as_the_test_set_was(mode: str, tmp_path: Path) -> None:
    """Transparency is laid over white, and 16 bits are scaled to eight."""
    rng = np.random.default_rng(0)
    for kind in ("one", "two"):
        (tmp_path / "data" / kind).mkdir(parents=True)
        for number in range(4):
            if mode == "I;16":
                image = Image.fromarray(rng.integers(0, 65536, (9, 12), dtype=np.uint16))
            else:
                image = Image.fromarray(rng.integers(0, 256, (9, 12, 4), dtype=np.uint8)).convert(mode)
            image.save(tmp_path / "data" / kind / f"{number}.png", **({"transparency": 3} if mode == "P" else {}))
    given = {"data": str(tmp_path / "data"), "image_size": 8, "batch_size": 4}
    train(CELL, epochs=1, out=tmp_path / "run", space_settings={"channels": 2, "cells_per_stage": 1}, **given)
    export(tmp_path / "run", "python", tmp_path / "out")
    written, data = python.import_file(tmp_path / "out" / "predict.py"), load(tmp_path / "data", image_size=8)
    assert data.test is not None
    read = {tuple(written.read_image(file).flatten().tolist()) for file in (tmp_path / "data").rglob("*.png")}
    for images in (data.train, data.test):
        seen = images.fetch(torch.arange(len(images))) / 255
        assert all(tuple(one.flatten().tolist()) in read for one in seen)


@pytest.mark.parametrize(("name", "part"), [("model.py", "def make_network("), ("predict.py", "def load(")])
def test_a_file_that_exists_is_kept_without_overwrite(trained: Path, tmp_path: Path, name: str, part: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match="already exists"):
        export(trained, "python", tmp_path)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(name, "mine")]
    export(trained, "python", tmp_path, overwrite=True)
    assert part in (tmp_path / name).read_text()


def test_weights_of_another_network_are_kept_without_overwrite(trained: Path, tmp_path: Path) -> None:
    export(trained, "python", tmp_path)
    export(trained, "safetensors", tmp_path)  # the same weights, which need no leave
    kept = (tmp_path / "model.safetensors").read_bytes()
    other = {name: value + 1 for name, value in load_file(trained / "model.safetensors").items()}
    unseal(shutil.copytree(trained, tmp_path / "other"))
    save_file(other, tmp_path / "other" / "model.safetensors")
    (tmp_path / "model.json").unlink()
    with pytest.raises(UserError, match="already exists and holds different weights"):
        export(tmp_path / "other", "safetensors", tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == kept
    assert not (tmp_path / "model.json").exists()
    export(tmp_path / "other", "torch-export", tmp_path)  # which has its weights inside
    export(tmp_path / "other", "safetensors", tmp_path, overwrite=True)
    stored = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(stored[name], other[name]) for name in other)
    (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
    (tmp_path / "model.py").unlink()
    (tmp_path / "predict.py").unlink()
    with pytest.raises(UserError, match="holds different weights"):
        export(trained, "python", tmp_path)


def test_an_interrupted_export_leaves_no_files(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(graph, "write_onnx", stop)
    with pytest.raises(KeyboardInterrupt):
        export(trained, "onnx", tmp_path / "new" / "out")
    assert not (tmp_path / "new" / "out").exists()
    (tmp_path / "old").mkdir()
    with pytest.raises(KeyboardInterrupt):
        export(trained, "onnx", tmp_path / "old")
    assert list((tmp_path / "old").iterdir()) == [], "a folder that was there stays"


def test_a_file_that_differs_from_the_network_is_not_written(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {
        "to_predict": ("return (pixels - mean) / std", "return pixels"),
        "to_python": ("nn.ReLU()", "nn.GELU()"),
    }
    for name, change in changes.items():
        right = getattr(python, name)(read_model(trained))
        wrong = right.replace(*change)
        assert wrong != right
        with monkeypatch.context() as patched:
            patched.setattr(write.python, name, lambda model, text=wrong: text)
            with pytest.raises(RuntimeError, match="differs from the network"):
                export(trained, "python", tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_exports_that_are_impossible_are_refused_with_a_reason(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def error(*words: str | Path) -> str:
        assert run(["export", *map(str, words)]) == 2
        said = capsys.readouterr()
        assert said.out == "", "nothing is begun before what was asked for is known to be possible"
        return said.err

    assert "no_such" in error(tmp_path / "no_such", "--to", "onnx")
    assert "torch-export" in error(trained, "--to", "tflite")
    assert "--out is the run" in error(trained, "--to", "python", "--out", trained)
    copy = tmp_path / "a copy"
    shutil.copytree(trained, copy)
    (tmp_path / "file").touch()
    assert "is a file" in error(trained, "--to", "python", "--out", tmp_path / "file" / "deep")
    (copy / "model.safetensors").write_bytes(b"broken")
    assert "SHA-256 differs" in error(copy, "--to", "onnx")
    unseal(copy)
    assert "not the weights" in error(copy, "--to", "onnx")
    (copy / "model.safetensors").unlink()
    assert "has no weights (model.safetensors)" in error(copy, "--to", "onnx")
    manifest = unsealed(json.loads((copy / "run.json").read_text()))
    (copy / "run.json").write_text(json.dumps({**manifest, "kind": "search"}))
    assert f"`softcell train '{copy}'`" in error(copy, "--to", "onnx")
    (copy / "run.json").write_text(json.dumps({**manifest, "status": "interrupted"}))
    assert f"`softcell train --resume '{copy}'` resumes it" in error(copy, "--to", "onnx")
    (copy / "model.json").write_text('{"format": "softcell-model", "version": 99}')
    assert "version" in error(copy, "--to", "onnx")


def test_a_whole_run_is_exported_and_an_unfinished_one_names_the_command_to_resume(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tmp_path / "my photos"
    whole.mkdir()
    (whole / "plan.json").write_text("{}")
    way_out = f"`softcell run --resume '{whole}'` resumes it"
    assert run(["export", str(whole), "--to", "python"]) == 2
    assert way_out in capsys.readouterr().err
    shutil.copytree(trained, whole / "train")
    manifest = unsealed(json.loads((whole / "train" / "run.json").read_text()))
    (whole / "train" / "run.json").write_text(json.dumps({**manifest, "status": "interrupted"}))
    assert run(["export", str(whole), "--to", "python"]) == 2
    assert way_out in capsys.readouterr().err
    (whole / "train" / "run.json").write_text(json.dumps(manifest))
    assert run(["export", str(whole), "--to", "python"]) == 0
    assert {file.name for file in (whole / "export").iterdir()} == {"model.py", "predict.py", "model.safetensors"}
    assert not (whole / "train" / "export").exists()


def test_no_format_is_written_if_another_would_be_refused(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("mine")
    assert run(["export", str(trained), "--to", "python", "--to", "onnx", "--out", str(tmp_path)]) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]


def test_without_onnxscript_the_error_names_the_extra(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UserError, match=r"softcell\[onnx\]"):
        export(trained, "onnx", tmp_path)


def test_definitions_of_the_same_name_are_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files with a helper `_scale` each: both come along under different names, each called by its own class."""
    shared = "from torch import nn\n\ndef _scale(x):\n    return x * {factor}\n\n"
    one = shared.format(factor=2) + "class One(nn.Module):\n    def forward(self, x):\n        return _scale(x)\n"
    two = (
        shared.format(factor=3)
        + "import name_one as other\n\nclass Two(nn.Module):\n    def forward(self, x):\n"
        + "        return _scale(x) + other._scale(x)\n"
    )
    (tmp_path / "name_one.py").write_text(one)
    (tmp_path / "name_two.py").write_text(two)
    monkeypatch.syspath_prepend(str(tmp_path))
    import name_one
    import name_two

    text = "\n\n".join(Sources([("name_one", "One"), ("name_two", "Two")]).ordered())
    space: dict[str, object] = {"nn": torch.nn, "Part": torch.nn.Module}
    exec(text, space)
    x = torch.ones(())
    assert float(space["One"]()(x)) == float(name_one.One()(x)) == 2.0  # type: ignore[operator]
    assert float(space["Two"]()(x)) == float(name_two.Two()(x)) == 5.0  # type: ignore[operator]


def test_files_have_the_permissions_of_the_umask(trained: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        files = [file for kind in ("python", "safetensors") for file in export(trained, kind, tmp_path / "out").files]
    finally:
        os.umask(before)
    assert {file.name for file in files} == {"model.py", "predict.py", "model.safetensors", "model.json"}
    assert {file.stat().st_mode & 0o777 for file in files} == {0o640}
