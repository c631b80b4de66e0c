"""Searches in two phases: logits carry over, a stop inside either resumes bit for bit, and any folder is accepted."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from softcell.engine.task import Event, Note, Stepped
from softcell.errors import UserError
from softcell.methods import Method
from softcell.search import resolve, search
from softcell.search.recipe import load_images
from softcell.search.run import FIRST, LOGITS, first_phase, read_logits, stored_recipe
from softcell.search.supernet import restore
from softcell.seeds import search_seeds
from tests.helpers.search_toys import remains, same, settings, state_of, write_data

TINY = {"channels": 16, "layers": 1, "candidates": ["local_sa_k3_h4", "non_local_sa"]}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("phases") / "data.npz", train=32)


def recipe(data: Path, space: str = "fullattention", **changes: Any) -> Any:
    base = settings("nb201", data, method="fullattention", epochs=1, batch_size=8)
    if space == "fullattention":
        base |= {"space": "fullattention", "space_settings": TINY}
    return resolve(base, {"pretrain": {"epochs": 1, "architecture_lr": 0.3}, **changes})


def test_phase_2_takes_nothing_but_logits_from_phase_1(
    data: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search without a first phase whose logits are set to those of phase 1 ends in the same state, bit for bit:
    weights, statistics of norms, states of both optimisers and random numbers."""

    def with_logits(kind: type[Method], *given: Any) -> Method:
        method = kind(given[1].layout, given[0])
        read_logits(method, whole / FIRST / LOGITS)
        return method

    monkeypatch.setattr(Method, "for_supernet", classmethod(with_logits))
    assert search(recipe(data, pretrain={"epochs": 0}), tmp_path / "alone").exit_code == 0
    assert same(state_of(tmp_path / "alone"), state_of(whole))
    own, theirs = remains(tmp_path / "alone"), remains(whole)
    for name in ("metrics.jsonl", "architecture.jsonl"):
        assert own[name] == theirs[name]
    assert own["results"]["val_accuracy"] == theirs["results"]["val_accuracy"]


def test_phase_2_starts_from_the_logits_of_phase_1(data: Path, tmp_path: Path) -> None:
    """With a rate of next to nothing the logits stay where phase 1 left them."""
    still = {"architecture": {"lr": 1e-30, "weight_decay": 0.0}}
    notes: list[str] = []

    def hear(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)

    result = search(recipe(data, **still), tmp_path / "both", on_event=hear)
    assert [note.split(":")[0] for note in notes] == ["phase 1 of 2", "phase 2 of 2"]
    logits = load_file(tmp_path / "both" / FIRST / LOGITS)
    assert any(table.abs().max() > 0.1 for table in logits.values())
    (row,) = [json.loads(line) for line in (tmp_path / "both" / "architecture.jsonl").read_text().splitlines()]
    for name, table in row["tables"].items():
        torch.testing.assert_close(torch.tensor(table), torch.softmax(logits[f"alpha.{name}"], 1).double().float())
    assert result.genotype is not None and "val_accuracy" in result.metrics[-1]
    first = [json.loads(line) for line in (tmp_path / "both" / FIRST / "metrics.jsonl").read_text().splitlines()]
    assert "val_loss" in first[0] and not any("accuracy" in key for key in first[0])
    picture = Image.open(tmp_path / "both" / FIRST / "reconstructions.png")
    assert picture.size == (8 * 100, 3 * 100)  # 8 images of 96 pixels in frames; original, shown, filled in
    original, shown, filled = torch.from_numpy(np.array(picture)).split(100)
    mean = shown[original != shown].unique()
    assert len(mean) == 1, "one colour hides"
    hidden = shown == mean  # a few pixels have that colour by themselves
    assert 0 < (original != shown).float().mean() <= 0.25
    assert torch.equal(filled[~hidden], original[~hidden]) and not torch.equal(filled[hidden], original[hidden])
    assert not torch.equal(filled[hidden], shown[hidden])


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search in two phases that was never stopped."""
    folder = tmp_path_factory.mktemp("never-stopped") / "whole"
    assert search(recipe(data), folder).exit_code == 0
    return folder


@pytest.mark.parametrize("phase", [1, 2])
def test_a_search_stopped_inside_either_phase_resumes_bit_for_bit(
    phase: int, data: Path, whole: Path, tmp_path: Path
) -> None:
    seen: list[int] = []

    def stop(event: Event) -> None:
        if isinstance(event, Stepped):
            seen.append(1)
            if len(seen) == (1 if phase == 1 else 3):  # two steps in an epoch
                os.kill(os.getpid(), signal.SIGINT)

    halved = search(recipe(data), tmp_path / "halved", on_event=stop)
    assert halved.genotype is None and halved.exit_code != 0
    assert (tmp_path / "halved" / FIRST / LOGITS).exists() == (phase == 2)
    assert json.loads((tmp_path / "halved" / "run.json").read_text())["status"] == "interrupted"
    assert search(recipe(data), tmp_path / "halved", resume=True).exit_code == 0
    assert remains(tmp_path / "halved") == remains(whole)
    assert remains(tmp_path / "halved" / FIRST) == remains(whole / FIRST)


def test_a_search_that_is_overwritten_leaves_nothing_of_its_first_phase(
    data: Path, whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    with pytest.raises(UserError, match="needs an empty folder"):
        search(recipe(data, pretrain={"epochs": 0}), folder)
    assert (folder / FIRST / LOGITS).exists()
    search(recipe(data, pretrain={"epochs": 0}), folder, overwrite=True)
    assert not (folder / FIRST).exists()


def test_the_best_of_several_seeds_comes_from_phase_2(data: Path, tmp_path: Path) -> None:
    result = search_seeds(recipe(data), tmp_path / "seeds", [0, 1], keep="best")
    assert result.exit_code == 0 and result.best in (0, 1)
    scores = {seed: one.metrics[-1]["val_accuracy"] for seed, one in result.results.items()}
    assert scores[result.best] == max(scores.values())
    kept = {file.parent for file in (tmp_path / "seeds").rglob("checkpoint*.bin")}
    best = tmp_path / "seeds" / f"seed-{result.best}"
    assert kept == {best, best / FIRST}


def test_without_labels_the_best_of_several_seeds_has_the_least_loss(data: Path, tmp_path: Path) -> None:
    alone = {"objective": "context", "pretrain": {"epochs": 0}, "method": "darts", "method_settings": {}}
    result = search_seeds(recipe(data, "nb201", **alone), tmp_path / "seeds", [0, 1, 2], keep="best")
    losses = {seed: one.metrics[-1]["val_loss"] for seed, one in result.results.items()}
    assert result.best == min(losses, key=lambda seed: losses[seed])
    assert {file.parent.name for file in (tmp_path / "seeds").rglob("checkpoint.bin")} == {f"seed-{result.best}"}
    listed = json.loads((tmp_path / "seeds" / "seeds.json").read_text())["seeds"]
    assert {one["seed"]: one["val_loss"] for one in listed} == losses and listed[0]["val_accuracy"] is None


@pytest.mark.parametrize(("method", "space"), [("darts", "nb201"), ("snas", "fullattention")])
def test_other_methods_and_spaces_learn_from_context_too(method: str, space: str, data: Path, tmp_path: Path) -> None:
    alone = {"objective": "context", "pretrain": {"epochs": 0}, "method": method, "method_settings": {}}
    result = search(recipe(data, space, **alone), tmp_path / "run")
    assert result.genotype is not None and result.metrics[-1]["val_loss"] > 0


def test_phase_1_learns_from_any_folder_of_images(data: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(24):
        file = tmp_path / "photos" / ("." if number % 2 else "deep/er") / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (12, 9 + number % 3, 3), dtype=np.uint8)).save(file)
    both = recipe(data, pretrain={"epochs": 1, "data": str(tmp_path / "photos"), "image_size": 8})
    assert search(both, tmp_path / "run").exit_code == 0
    first = json.loads((tmp_path / "run" / FIRST / "run.json").read_text())
    assert first["recipe"]["data"] == str(tmp_path / "photos")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="at least 2 images"):
        search(recipe(data, pretrain={"epochs": 1, "data": str(empty)}), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_phase_1_learns_only_from_some_classes(tmp_path: Path) -> None:
    """The classes are sampled from the seed and recorded; phase 2 uses all classes."""
    data = write_data(tmp_path / "five.npz", classes=5, train=40)
    both = recipe(data, pretrain={"epochs": 1, "classes": 2}, seed=1)
    assert (first_phase(both).classes, both.classes) == (2, None)
    assert search(both, tmp_path / "run").exit_code == 0
    first = json.loads((tmp_path / "run" / FIRST / "run.json").read_text())
    second = json.loads((tmp_path / "run" / "run.json").read_text())
    taken = first["results"]["data"]["classes"]
    assert len(taken) == first["results"]["data"]["num_classes"] == first["recipe"]["classes"] == 2
    assert taken == list(load_images(first_phase(both)).classes)
    images = load_images(first_phase(both)).train
    assert len(images) == 16 and set(images.labels.tolist()) == {0, 1}, "8 images of each class"
    assert second["results"]["data"]["num_classes"] == 5 and "classes" not in second["results"]["data"]
    assert second["recipe"]["pretrain"]["classes"] == 2 and second["recipe"]["classes"] is None
    with pytest.raises(UserError, match="pretrain"):
        stored_recipe(tmp_path / "run", {"pretrain": {"classes": 3}})
    with pytest.raises(UserError, match="`2 <= classes <= 5` must hold"):
        search(recipe(data, pretrain={"epochs": 1, "classes": 6}), tmp_path / "too-many")
    assert not (tmp_path / "too-many").exists()


def test_some_classes_need_labels_and_a_phase(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"pretrain\.classes=2 \(--classes\) needs a first phase"):
        recipe(data, pretrain={"epochs": 0, "classes": 2})
    with pytest.raises(UserError, match=r"`pretrain\.classes >= 2`"):
        recipe(data, pretrain={"epochs": 1, "classes": 1})
    with pytest.raises(UserError, match=r"`classes >= 2`"):
        recipe(data, classes=1)
    (tmp_path / "photos").mkdir()
    for number in range(8):
        Image.new("RGB", (8, 8)).save(tmp_path / "photos" / f"{number}.png")
    loose = {"epochs": 1, "data": str(tmp_path / "photos"), "image_size": 8, "classes": 2}
    with pytest.raises(UserError, match="must be in the folder of its class"):
        search(recipe(data, pretrain=loose), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_whole_search_learns_from_some_classes(data: Path, tmp_path: Path) -> None:
    alone = recipe(data, classes=2, pretrain={"epochs": 0})
    result = search(alone, tmp_path / "run")
    assert result.genotype is not None
    found = restore(tmp_path / "run", device="cpu")
    assert found.dataset.num_classes == 2 and found.supernet.num_classes == 2


def test_ablations_are_settings(data: Path) -> None:
    alone = recipe(data, pretrain={"epochs": 0}, method_settings={"init_scale": 1e-3})
    assert alone.pretrain.epochs == 0 and alone.method_settings["init_scale"] == 1e-3
    tied = recipe(data, space_settings={**TINY, "tied": True})
    assert tied.space_settings["tied"] and first_phase(tied).space_settings["tied"]


def test_the_papers_recipe() -> None:
    both = resolve({"method": "fullattention", "data": "cifar10"})
    first = first_phase(both)
    assert (both.epochs, both.architecture.lr, both.weights.lr, both.weights.lr_min) == (50, 1e-4, 0.025, 0.0)
    assert (first.epochs, first.architecture.lr, first.architecture.weight_decay) == (20, 3e-4, 1e-3)
    assert (first.objective, first.data, both.batch_size, both.regime) == ("context", "cifar10", 64, "bilevel")
    assert both.space == "fullattention" and both.space_settings["channels"] == 16


def test_what_cannot_be_combined_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"pretrain\.epochs=0"):
        recipe(data, objective="context")
    bred = {"generations": 1}
    with pytest.raises(UserError, match=r"evolution\.generations=0"):
        recipe(data, objective="context", pretrain={"epochs": 0}, evolution=bred)
    assert not first_phase(recipe(data, evolution=bred)).evolution.is_on
    with pytest.raises(UserError, match="compares networks by accuracy"):
        search(recipe(data, method="random", method_settings={}), tmp_path / "random")
    with pytest.raises(UserError, match=r"'spos' has none; set pretrain\.epochs=0"):
        search(recipe(data, method="spos", method_settings={}), tmp_path / "spos")
    assert not list(tmp_path.iterdir()), "no folder is begun"


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"guide": {"teacher": "nowhere.pt"}}, "no teacher at"),
        ({"resource": {"preset": "mild", "latency_table": "nothere.yaml", "max_latency": 3.0}}, "latency"),
    ],
)
def test_what_is_wrong_with_phase_2_is_refused_before_phase_1(
    wrong: dict[str, Any], said: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        search(recipe(data, **wrong), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_search_whose_first_phase_fails_has_failed(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(RuntimeError, match="no power"):
        search(recipe(data), out, on_event=failing)
    assert [json.loads((out / p / "run.json").read_text())["status"] for p in ("", FIRST)] == ["failed", "failed"]


def failing(event: Event) -> None:
    if isinstance(event, Stepped):
        raise RuntimeError("no power")


def test_named_data_of_phase_1_are_in_the_data_root_of_the_search() -> None:
    def root(**own: Any) -> str | None:
        given = {"method": "fullattention", "data": "cifar10", "data_root": "here"}
        return first_phase(resolve(given, {"pretrain": {"epochs": 1, **own}})).data_root

    assert root() == root(data="cifar100") == "here"
    assert root(data="photos") is None, "a path is a path"
    assert root(data="cifar100", data_root="there") == root(data_root="there") == "there"


@pytest.mark.parametrize("method", ["snas", "itnas"])
def test_other_methods_search_this_space_in_two_phases(method: str, data: Path, tmp_path: Path) -> None:
    own = {"method": method, "method_settings": {}, "pretrain": {"epochs": 1}}
    result = search(recipe(data, **own), tmp_path / "run")
    assert result.genotype is not None and result.genotype.space == "fullattention"
    assert (tmp_path / "run" / FIRST / LOGITS).exists()


def test_a_budget_steers_this_space_in_its_second_phase(data: Path, tmp_path: Path) -> None:
    budget = {"max_flops": "1M", "network": {"channels": 16, "layers": 1}}
    result = search(recipe(data, resource=budget), tmp_path / "run")
    assert result.genotype is not None and result.metrics[-1]["expected_flops"] > 0
    first = json.loads((tmp_path / "run" / FIRST / "metrics.jsonl").read_text().splitlines()[0])
    assert not any(key.startswith("expected") for key in first)
