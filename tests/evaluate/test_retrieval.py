"""Zero-shot retrieval: Proxy-NCA against its equation, Recall@k against brute force, and whole training runs."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from softcell.arch import sample
from softcell.data import Augment, load, test_set_sealed
from softcell.engine.task import Event, Stepped
from softcell.errors import UserError
from softcell.evaluate import RECIPES, load_network, resolve, train
from softcell.evaluate._retrieval import recall_at, zero_shot
from softcell.evaluate.train import augment_of
from softcell.nn.objective import ProxyNCA
from softcell.spaces import SPACES, build_space


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"data": "cifar10"}, (96, 500, 0.04, 4e-4, 0.0, "sgd", None)),
        ({"data": "cifar100"}, (96, 500, 0.04, 4e-4, 0.0, "sgd", None)),
        ({"data": "imagenet"}, (112, 200, 0.04, 3e-5, 0.1, "sgd", None)),
        ({"data": "cub200"}, (112, 200, 0.02, 5e-4, 0.0, "sgd", None)),  # 448, as the dataset itself is
        ({"data": "cub200-boxes", "task": "retrieve"}, (112, 50, 4e-3, 0.0, 0.0, "adam", 227)),
        ({"data": "birds", "task": "retrieve"}, (96, 50, 4e-3, 0.0, 0.0, "adam", None)),
    ],
)
def test_full_attention_is_trained_as_in_its_paper(given: dict[str, str], expected: tuple[object, ...]) -> None:
    """§IV-C to F: channels, epochs, learning rate, weight decay, label smoothing, optimiser, image size."""
    recipe = resolve(sample(build_space("fullattention").layout(), 0), given)
    found = (recipe.space_settings["channels"], recipe.epochs, recipe.lr, recipe.weight_decay, recipe.label_smoothing)
    assert (*found, recipe.optimiser, recipe.image_size) == expected
    assert (recipe.lr_min, recipe.schedule, recipe.momentum) == (0.0, "cosine", 0.9)
    assert (recipe.drop_path, recipe.cutout, recipe.auxiliary, recipe.jitter, recipe.holdout) == (0, 0, 0, 0, 0)


def test_photographs_are_cropped_by_windows_to_retrieve_and_by_resized_crops_to_classify(tmp_path: Path) -> None:
    """§IV-F: resized, then cropped at random; birds themselves come with random resized crops."""
    birds = replace(load(str(write(tmp_path / "data.npz", 4))), augment=Augment(resized_crop=True, flip=True))
    genotype = sample(build_space("fullattention").layout(), 0)
    for task, augment in (("retrieve", Augment(window=True, flip=True)), ("classify", birds.augment)):
        assert augment_of(birds, resolve(genotype, {"data": "cub200", "task": task})) == augment


def literal(embeddings: Tensor, labels: Tensor, proxies: Tensor) -> Tensor:
    """Eq 6, image by image and proxy by proxy."""
    total = torch.zeros((), dtype=embeddings.dtype)
    for x, y in zip(embeddings, labels.tolist(), strict=True):
        x = x / x.norm()
        distances = [((x - p / p.norm()) ** 2).sum() for p in proxies]
        others = sum(torch.exp(-d) for z, d in enumerate(distances) if z != y)
        total = total - torch.log(torch.exp(-distances[y]) / others)
    return total / len(labels)


def test_proxy_nca_equals_its_equation_forward_and_backward() -> None:
    torch.manual_seed(0)
    criterion = ProxyNCA(5, 3).double()
    x = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 1, 2, 3, 4, 0, 2])
    wanted = [x, criterion.proxies]
    mine, twin = criterion(x, labels), literal(x, labels, criterion.proxies)
    torch.testing.assert_close(mine, twin)
    for a, b in zip(torch.autograd.grad(mine, wanted), torch.autograd.grad(twin, wanted), strict=True):
        torch.testing.assert_close(a, b)


def brute_force(embeddings: Tensor, labels: Tensor, k: int) -> float:
    x = [row / row.norm() for row in embeddings.double()]
    hits = 0
    for i in range(len(x)):
        nearest = sorted((j for j in range(len(x)) if j != i), key=lambda j: (-float(x[i] @ x[j]), j))
        hits += any(labels[j] == labels[i] for j in nearest[:k])
    return hits / len(x)


@settings(max_examples=40, deadline=None)
@given(n=st.integers(2, 25), classes=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_recall_equals_brute_force(n: int, classes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(n, 4, generator=generator)
    labels = torch.randint(classes, (n,), generator=generator)
    for k, share in recall_at(embeddings, labels).items():
        assert share == pytest.approx(brute_force(embeddings, labels, k))


def test_recall_matches_hand_computed_values() -> None:
    """Two pairs: in the first both are nearest to each other, in the second a stranger lies between."""
    angles = torch.tensor([0.0, 0.01, 1.0, 1.5, 1.2])
    embeddings = torch.stack([angles.cos(), angles.sin()], 1)
    assert recall_at(embeddings, torch.tensor([0, 0, 1, 1, 2]), (1, 2)) == {1: 0.4, 2: 0.8}


def write(path: Path, classes: int) -> Path:
    rng = np.random.default_rng(0)
    labels = np.arange(10 * classes) % classes
    images = rng.integers(0, 40, (len(labels), 8, 8), dtype=np.uint8)
    for image, label in zip(images, labels, strict=True):
        image[label : label + 2] += 200
    np.savez(path, x_train=images, y_train=labels, x_test=images[: 3 * classes], y_test=labels[: 3 * classes])
    return path


def test_all_images_of_the_first_half_are_learnt_from_and_those_of_the_second_are_sealed(tmp_path: Path) -> None:
    whole = load(str(write(tmp_path / "data.npz", 5)))
    parted = zero_shot(whole)
    assert whole.test is not None and parted.test is not None
    everything = [
        (int(label), image.tolist())
        for images in (whole.train, whole.test)
        for label, image in zip(images.labels, images.fetch(torch.arange(len(images))), strict=True)
    ]
    for images, classes in ((parted.train, {0, 1}), (parted.test, {2, 3, 4})):
        found = zip(images.labels.tolist(), images.fetch(torch.arange(len(images))).tolist(), strict=True)
        assert list(found) == [one for one in everything if one[0] in classes]
    assert "all 26 images of the first 2 classes for training, all 39 of the other 3" in parted.source
    with test_set_sealed():
        parted.train.fetch(torch.arange(26))
        with pytest.raises(AssertionError, match="sealed"):
            parted.test.fetch(torch.arange(1))


@pytest.mark.parametrize("space", ["nb201", "fullattention"])
def test_any_architecture_learns_to_retrieve_and_resumes_bit_for_bit(space: str, tmp_path: Path) -> None:
    sizes = {"nb201": {"cells_per_stage": 1, "channels": 4}, "fullattention": {"channels": 16, "layers": 1}}[space]
    genotype = sample(build_space(space, sizes).layout(), 0)
    data = write(tmp_path / "data.npz", 6)
    own = {"data": str(data), "task": "retrieve", "space": sizes, "epochs": 2, "batch_size": 10, "device": "cpu"}
    recipe = resolve(genotype, {**own, "threads": 1, "precision": "float32", "embedding": 5})
    assert (recipe.optimiser, recipe.lr, recipe.recipe) == ("adam", 4e-3, "retrieve")
    whole = train(genotype, recipe, tmp_path / "whole")

    def stop(event: Event) -> None:
        if isinstance(event, Stepped):
            os.kill(os.getpid(), signal.SIGTERM)

    assert train(genotype, recipe, tmp_path / "halved", on_event=stop).exit_code != 0
    again = train(genotype, recipe, tmp_path / "halved", resume=True)
    assert again.recall == whole.recall and set(whole.recall or ()) == {1, 2, 4, 8}
    results = json.loads((tmp_path / "whole" / "run.json").read_text())["results"]
    assert results["count"] == 3 * 10 + 3 * 3 and results["split"] == "unseen classes"
    assert all("train_accuracy" not in row for row in whole.metrics)
    assert load_network(tmp_path / "whole")(torch.zeros(2, 1, 8, 8)).shape == (2, 5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("space", sorted(SPACES))
def test_networks_of_every_space_learn_to_retrieve(space: str, tmp_path: Path) -> None:
    sizes = dict(SPACES.get(space).tiny)
    genotype = sample(build_space(space, sizes).layout(), 0)
    own = {"data": str(write(tmp_path / "data.npz", 4)), "task": "retrieve", "space": sizes, "epochs": 1}
    recipe = resolve(genotype, {**own, "batch_size": 10, "device": "cpu", "threads": 1, "precision": "float32"})
    recall = train(genotype, recipe, tmp_path / "run").recall
    assert recall is not None and list(recall) == [1, 2, 4, 8] and sorted(recall.values()) == list(recall.values())


def test_too_few_classes_are_refused(tmp_path: Path) -> None:
    genotype = sample(build_space("nb201").layout(), 0)
    recipe = resolve(genotype, {"data": str(write(tmp_path / "data.npz", 3)), "task": "retrieve", "device": "cpu"})
    with pytest.raises(UserError, match="at least 4 classes"):
        train(genotype, recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_nothing_is_held_back_in_retrieval() -> None:
    genotype = sample(build_space("nb201").layout(), 0)
    with pytest.raises(UserError, match=r"`holdout = 0` must hold, but got holdout=0\.2"):
        resolve(genotype, {"data": "birds", "task": "retrieve", "holdout": 0.2})


def test_retrieval_has_the_documented_schedule_and_mirrors_its_windows() -> None:
    """What the paper leaves open and its page settles: a cosine from 4e-3 to 0, windows mirrored, gradients clipped."""
    genotype = sample(build_space("nb201", {}).layout(), 0)
    recipe = resolve(genotype, {"task": "retrieve", "data": "cub200"})
    assert (recipe.optimiser, recipe.lr, recipe.lr_min, recipe.schedule) == ("adam", 4e-3, 0.0, "cosine")
    assert (recipe.epochs, recipe.warmup, recipe.clip) == (50, 0, 5.0)
    birds = replace(load("digits"), augment=Augment(resized_crop=True, flip=True))  # as those of CUB-200-2011
    found = augment_of(birds, recipe)
    assert found.flip and found.window and not found.resized_crop


def test_recipes_clip_as_documented() -> None:
    for name in RECIPES:
        genotype = sample(build_space("darts", {}).layout(), 0)
        expected = 0.0 if name == "dna-imagenet" else 5.0  # DNA's training does not clip
        assert resolve(genotype, {"recipe": name, "data": "cifar10"}).clip == expected, name
