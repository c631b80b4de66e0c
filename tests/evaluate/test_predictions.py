"""Stored test predictions of a training run, and Grad-CAM against its definition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from torch import Tensor

from softcell.arch import sample
from softcell.data import Batch, Files, load
from softcell.engine import RunFolder, distributed
from softcell.engine.metrics import measure
from softcell.errors import UserError
from softcell.evaluate import classify, load_network, resolve, train
from softcell.evaluate.predictions import NUM_WORST, PREDICTIONS, Predictions, grad_cam, predict, read_predictions
from softcell.spaces import Inputs, build_space

SPACE = build_space("nb201", {"cells_per_stage": 1, "channels": 4})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    genotype = sample(SPACE.layout(), 3)
    small = {"epochs": 1, "batch_size": 128, "threads": 1, "space": {"cells_per_stage": 1, "channels": 4}}
    folder = tmp_path_factory.mktemp("predictions") / "run"
    train(genotype, resolve(genotype, {"data": "digits", **small}), folder)
    return folder


def test_the_predictions_of_a_training_run_match_its_network(trained: Path) -> None:
    found, data = read_predictions(trained), load("digits")
    assert found is not None and data.test is not None
    pixels = data.test.fetch(torch.arange(len(data.test))).float() / 255
    network = load_network(trained)
    with torch.no_grad():
        chances = network((pixels - torch.tensor(data.mean)) / torch.tensor(data.std)).softmax(1)
    assert torch.equal(found["labels"].long(), data.test.labels)
    torch.testing.assert_close(found["confidence"], chances.amax(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["truth"], chances[torch.arange(450), data.test.labels], rtol=1e-4, atol=1e-4)
    results = RunFolder.open(trained).manifest["results"]
    assert (found["predicted"] == found["labels"]).double().mean().item() == pytest.approx(results["accuracy"])
    worst = found["worst"].long()
    assert len(worst) == NUM_WORST
    assert bool((found["predicted"][worst] != found["labels"][worst]).all())
    assert torch.equal(found["images"], data.test.fetch(worst))
    assert found["heat"].shape == (NUM_WORST, 2, 2)
    assert bool((found["heat"].amax((1, 2)) == 1).all()) and float(found["heat"].min()) >= 0


def test_predicting_measures_as_measuring_does_and_ranks_share_the_images() -> None:
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(10, 3, generator=generator), torch.arange(10) % 3
    world = distributed.World(0, 1, 0, torch.device("cpu"))
    parts = [torch.tensor([7, 0, 3]), torch.tensor([], dtype=torch.int64), torch.tensor([1, 2, 4, 5, 6, 8, 9])]
    batches = [Batch(images[part], labels[part], part) for part in parts]
    measured, answers = predict(lambda x: x, batches, 10, world)
    assert measured == measure(lambda x: x, batches, world)
    assert torch.equal(answers.predicted.long(), images.argmax(1))
    torch.testing.assert_close(answers.truth, images.softmax(1)[torch.arange(10), labels])


def test_the_most_wrong_come_first_and_right_answers_never() -> None:
    answers = Predictions(
        labels=torch.tensor([0, 0, 1, 1]),
        predicted=torch.tensor([0, 1, 0, 0]),
        confidence=torch.tensor([0.9, 0.6, 0.8, 0.6]),
        truth=torch.tensor([0.9, 0.3, 0.1, 0.3]),
    )
    assert answers.worst(9).tolist() == [2, 1, 3]
    assert answers.worst(1).tolist() == [2]


def test_grad_cam_is_the_weighted_sum_of_the_last_maps() -> None:
    torch.manual_seed(0)
    network = SPACE.network(sample(SPACE.layout(), 1), (3, 16, 16), 5).eval()
    images, classes = torch.randn(4, 3, 16, 16), torch.tensor([4, 1, 0, 2])
    heat = grad_cam(network, images, classes)
    assert heat is not None
    with torch.no_grad():
        maps = network.features(images)[-1]
    assert int((heat.amax((1, 2)) == 1).sum()) > 0  # some have evidence for their class
    for i in range(4):  # one image at a time, with the gradient by finite differences
        alpha = _slopes(network.head, maps[i : i + 1], int(classes[i])).mean((2, 3))[0]
        expected = torch.relu(sum(alpha[c] * maps[i, c] for c in range(maps.shape[1])))
        torch.testing.assert_close(heat[i], expected / expected.max().clamp_min(1e-30), rtol=2e-3, atol=2e-3)


def _slopes(head: torch.nn.Module, maps: Tensor, label: int) -> Tensor:
    """d head(maps)[label] / d maps, numerically in float64."""
    import copy

    exact, flat, step = copy.deepcopy(head.__self__).double(), maps.double().flatten(), 1e-5  # type: ignore[attr-defined]
    moved = flat.repeat(2 * len(flat), 1)
    moved[: len(flat)] += step * torch.eye(len(flat), dtype=torch.float64)
    moved[len(flat) :] -= step * torch.eye(len(flat), dtype=torch.float64)
    with torch.no_grad():
        scores = exact.head(moved.view(-1, *maps.shape[1:]))[:, label]
    return ((scores[: len(flat)] - scores[len(flat) :]) / (2 * step)).view(maps.shape)


def test_one_place_is_nothing_to_look_at() -> None:
    network = SPACE.network(sample(SPACE.layout(), 1), (1, 4, 4), 3).eval()
    assert grad_cam(network, torch.randn(2, 1, 4, 4), torch.tensor([0, 1])) is None


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    assert read_predictions(tmp_path) is None
    (tmp_path / PREDICTIONS).write_bytes(b"{")
    with pytest.raises(UserError, match="safetensors"):
        read_predictions(tmp_path)
    (tmp_path / PREDICTIONS).write_bytes(safetensors.torch.save({"labels": torch.zeros(3)}))
    with pytest.raises(UserError, match="does not have the tensors"):
        read_predictions(tmp_path)


def test_large_images_are_kept_small() -> None:
    from softcell.evaluate.predictions import _small

    large = torch.full((2, 3, 256, 128), 7, dtype=torch.uint8)
    assert _small(large).shape == (2, 3, 128, 64)
    assert int(_small(large).max()) == 7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_answers_on_a_gpu_match_the_cpu(tmp_path: Path) -> None:
    network = SPACE.network(sample(SPACE.layout(), 3), (3, 16, 16), 5).eval()
    images, labels = torch.randn(40, 3, 16, 16), torch.arange(40) % 5
    found = []
    for device in ("cpu", "cuda"):
        batch = Batch(images.to(device), labels.to(device), torch.arange(40, device=device))
        world = distributed.World(0, 1, 0, torch.device(device))
        _, answers = predict(network.to(device), [batch], 40, world)
        heat = grad_cam(network, batch.images, batch.labels)
        assert heat is not None
        found.append((answers, heat.cpu()))
    torch.testing.assert_close(found[0][0].truth, found[1][0].truth, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("scaled_to", [None, (12, 14)])
def test_a_network_sees_files_as_a_dataset_of_files_shows_them(
    tmp_path: Path, whole: bool, scaled_to: tuple[int, int] | None
) -> None:
    rng = np.random.default_rng(0)
    names = [f"{number}.png" for number in range(5)]
    for name in names:
        Image.fromarray(rng.integers(0, 256, (30, 21, 3), dtype=np.uint8)).save(tmp_path / name)
    data = Files(
        tmp_path, names, torch.zeros(5).long(), channels=3, size=(8, 10), stored=scaled_to or (8, 10), whole=whole
    )
    seen: list[Tensor] = []

    def forward(pixels: Tensor) -> Tensor:
        seen.append(pixels)
        return torch.eye(5)[: len(pixels)]

    inputs = Inputs(tuple("abcde"), (0.5,) * 3, (0.5,) * 3, scaled_to, whole)
    files = [tmp_path / names[0], tmp_path / "lost.png", *(tmp_path / name for name in names[1:])]
    found = list(classify(forward, files, (3, 8, 10), inputs, top=9, batch_size=4))
    assert [len(pixels) for pixels in seen] == [3, 2]  # the lost file leaves its place empty
    assert torch.equal(torch.cat(seen), data.fetch(torch.arange(5)).float() / 255)
    assert [one.classes[:1] for one in found] == [("a",), (), ("b",), ("c",), ("a",), ("b",)]
    assert found[0].probabilities == pytest.approx(torch.eye(5)[0].softmax(0).tolist())


def test_images_that_no_file_can_have_and_wrong_outputs_are_refused(tmp_path: Path) -> None:
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    inputs = Inputs(("a", "b"), (0.5,), (0.5,))
    for shape, top, outputs, reason in (
        ((4, 8, 8), 1, 2, "image files have 1 or 3 channels"),
        ((1, 8, 8), 0, 2, "`top >= 1` must hold"),
        ((1, 8, 8), 1, 3, "one output per class"),
    ):
        with pytest.raises(UserError, match=reason):
            list(classify(lambda x, n=outputs: torch.zeros(1, n), [tmp_path / "a.png"], shape, inputs, top=top))
