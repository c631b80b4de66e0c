"""Comparison with the user's own model: loaded, checked before any training, and measured on the test images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from softcell.app.pipeline import Plan, RunRequest, run
from softcell.app.pipeline._inspect import OwnModel, read_own
from softcell.data import load
from softcell.errors import UserError
from softcell.trust import UntrustedError, trusting


class Brightness(nn.Module):
    """Scores of 10 classes from the mean pixel, so that the answer is known."""

    def forward(self, pixels: Tensor) -> Tensor:
        return -(pixels.mean((1, 2, 3))[:, None] * 9 - torch.arange(10.0)).abs()


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    batch = torch.export.Dim("n", min=1, max=4096)
    program = torch.export.export(Brightness(), (torch.rand(3, 1, 8, 8),), dynamic_shapes=({0: batch},))
    file = tmp_path_factory.mktemp("own") / "mine.pt2"
    torch.export.save(program, file)
    return file


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTCELL_STATE", str(tmp_path / "state"))


@pytest.mark.usefixtures("state")
def test_a_run_with_an_untrusted_program_is_rejected_before_anything_is_trained(program: Path, tmp_path: Path) -> None:
    plan = Plan.create(tmp_path / "run", RunRequest("digits", beside=str(program)))
    with pytest.raises(UntrustedError, match=r"--beside names .*mine.pt2"):
        run(plan, Silent())  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


class Silent:
    def print(self, *lines: str) -> None: ...

    def working(self, what: str) -> Silent:
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.usefixtures("state")
def test_a_trusted_program_is_measured_on_the_test_images(program: Path) -> None:
    with trusting():
        own = read_own(program)
    assert own.shape == (1, 8, 8) and own.check(1, 8, 10) > 0
    digits = load("digits")
    assert digits.test is not None
    pixels = digits.test.fetch(torch.arange(len(digits.test))).double() / 255
    expected = (pixels.mean((1, 2, 3)) * 9).round()  # the nearest of 0..9
    share = (expected == digits.test.labels).double().mean().item()
    assert own.accuracy(digits.test) == pytest.approx(share, abs=2 / len(digits.test))  # rounding


def test_an_own_model_must_fit_the_images() -> None:
    def model(shape: tuple[int, int, int], classes: int = 10) -> OwnModel:
        return OwnModel(Path("mine.onnx"), lambda images: torch.zeros(len(images), classes), shape)

    model((3, 8, 8)).check(1, None, 10)  # grey images are repeated for a model of colours
    with pytest.raises(UserError, match="accepts images of 1 channels, but those of the run have 3"):
        model((1, 8, 8)).check(3, None, 10)
    with pytest.raises(UserError, match="scores for 10 classes, but the images have 7"):
        model((1, 8, 8)).check(1, 8, 7)
    with pytest.raises(UserError, match="images of 8x8 pixels, but accepts 16x16"):
        model((1, 16, 16)).check(1, 8, 10)
    with pytest.raises(UserError, match="square images, but accepts 16x8"):
        model((1, 16, 8)).check(1, None, 10)
    broken = OwnModel(Path("mine.onnx"), lambda images: images[:, 7], (1, 8, 8))
    with pytest.raises(UserError, match="but failed: index 7 is out of bounds"):
        broken.check(1, 8, 10)
    flat = OwnModel(Path("mine.onnx"), lambda images: images.flatten(), (1, 8, 8))
    with pytest.raises(UserError, match="one row of scores per image"):
        flat.check(1, 8, 10)


@pytest.mark.parametrize("name", ["missing.onnx", "weights.safetensors"])
def test_other_files_are_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match=r"ends in \.onnx or \.pt2"):
        read_own(tmp_path / name)


def test_an_onnx_file_is_run_with_its_own_names(tmp_path: Path) -> None:
    onnx, _ = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    made = onnx.helper
    node = made.make_node("ReduceMean", ["picture"], ["scores"], axes=[2, 3], keepdims=0)
    given = made.make_tensor_value_info("picture", 1, ["n", 3, 8, 8])
    graph = made.make_graph([node], "own", [given], [made.make_tensor_value_info("scores", 1, ["n", 3])])
    model = made.make_model(graph, opset_imports=[made.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, tmp_path / "mine.onnx")
    own = read_own(tmp_path / "mine.onnx")
    assert own.shape == (3, 8, 8)
    pixels = torch.randint(0, 256, (5, 3, 8, 8), dtype=torch.uint8)
    torch.testing.assert_close(own.scores(pixels), pixels.float().mean((2, 3)) / 255)
