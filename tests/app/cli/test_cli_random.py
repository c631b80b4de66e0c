"""`train --random`: random architectures that share a device with the found one. Each equals a separate run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from softcell import api
from softcell.app.baseline import FOUND, draw_random, train_with_random
from softcell.app.process import ERROR_FILE, read_error
from softcell.arch import Genotype
from softcell.engine.task import Event, OnEvent, Started, Stepped
from softcell.errors import UserError
from softcell.evaluate import TrainRecipe
from softcell.evaluate.train import train
from softcell.recipes import train_recipe
from softcell.seeds import num_sharing
from tests.helpers.cli_calls import CELL, TINY_TRAIN, Softcell

NAMES = (FOUND, "random-1", "random-2")
SMALL = {"space_settings": {"channels": 2}, "batch_size": 128, "epochs": 2, "threads": 1, "device": "cpu"}


def place_of(out: Path, name: str) -> Path:
    return out if name == FOUND else out / name


def require_same_run(mine: Path, theirs: Path) -> None:
    """The same weights, and the same metrics but for the time they took."""
    weights = [(folder / "model.safetensors").read_bytes() for folder in (mine, theirs)]
    assert weights[0] == weights[1], mine
    rows = [
        [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in file]
        for file in ((folder / "metrics.jsonl").open() for folder in (mine, theirs))
    ]
    assert rows[0] == rows[1] and rows[0], mine


@pytest.fixture(scope="module")
def networks() -> tuple[dict[str, Genotype], TrainRecipe]:
    """Dropped paths draw random numbers in every step."""
    found, recipe = train_recipe(CELL, {**SMALL, "drop_path": 0.3})
    return dict(zip(NAMES, [found, *draw_random(found, recipe, 2)], strict=True)), recipe


@pytest.fixture(scope="module")
def separate(networks: tuple[dict[str, Genotype], TrainRecipe], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("separate")
    for name, genotype in networks[0].items():
        train(genotype, networks[1], folder / name)
    return folder


def test_networks_that_share_a_device_equal_separate_ones(
    networks: tuple[dict[str, Genotype], TrainRecipe], separate: Path, tmp_path: Path
) -> None:
    cells, recipe = networks
    heard: list[str] = []

    def listener(name: str, _: Path) -> OnEvent:
        return lambda event: heard.append(name) if isinstance(event, Stepped) else None

    torch.manual_seed(5)
    before = torch.get_rng_state()
    found, *others = cells.values()
    ran = train_with_random(found, others, recipe, tmp_path / "out", at_once=3, on_event=listener)
    assert torch.equal(torch.get_rng_state(), before)
    assert (ran.exit_code, ran.errors, tuple(ran.results)) == (0, {}, NAMES)
    assert heard[:6] == [*NAMES, *NAMES], "they take turns"
    for name in NAMES:
        require_same_run(place_of(tmp_path / "out", name), separate / name)
        assert (place_of(tmp_path / "out", name) / "report.html").exists()


def test_interrupted_networks_are_resumed_bit_for_bit(
    networks: tuple[dict[str, Genotype], TrainRecipe], separate: Path, tmp_path: Path
) -> None:
    cells, recipe = networks
    found, *others = cells.values()

    def strike(name: str, _: Path) -> OnEvent:
        def listen(event: Event) -> None:
            if name == "random-1" and isinstance(event, Stepped) and (event.epoch, event.step) == (1, 2):
                os.kill(os.getpid(), signal.SIGTERM)

        return listen

    broken = train_with_random(found, others, recipe, tmp_path, at_once=2, on_event=strike)
    assert broken.exit_code == 143
    assert {name: one.exit_code for name, one in broken.results.items()} == {"found": 143, "random-1": 143}
    resumed = train_with_random(found, others, recipe, tmp_path, at_once=3, resume=True)
    assert resumed.exit_code == 0
    for name in NAMES:
        require_same_run(place_of(tmp_path, name), separate / name)
    train_with_random(
        found, others, recipe, tmp_path, at_once=3, resume=True, on_event=lambda name, _: pytest.fail(name)
    )


def test_one_that_fails_does_not_stop_the_others_and_is_resumed(
    networks: tuple[dict[str, Genotype], TrainRecipe], separate: Path, tmp_path: Path
) -> None:
    cells, recipe = networks
    found, *others = cells.values()

    def fail(name: str, _: Path) -> OnEvent:
        def listen(event: Event) -> None:
            if name == "random-1" and isinstance(event, Stepped) and event.epoch == 1:
                raise RuntimeError("out of luck")

        return listen

    ran = train_with_random(found, others, recipe, tmp_path, at_once=3, on_event=fail)
    assert ran.exit_code == 1 and [str(error) for error in ran.errors.values()] == ["out of luck"]
    assert set(ran.results) == {FOUND, "random-2"}
    assert train_with_random(found, others, recipe, tmp_path, at_once=3, resume=True).exit_code == 0
    for name in NAMES:
        require_same_run(place_of(tmp_path, name), separate / name)


def test_nothing_is_trained_in_a_folder_that_the_found_network_cannot_have(
    networks: tuple[dict[str, Genotype], TrainRecipe], tmp_path: Path
) -> None:
    cells, recipe = networks
    found, *others = cells.values()
    (tmp_path / "mine.txt").write_text("a file of the user")
    with pytest.raises(UserError, match="empty folder"):
        train_with_random(found, others, recipe, tmp_path, at_once=3)
    assert [file.name for file in tmp_path.iterdir() if file.is_dir()] == []


def test_the_command_shares_the_device_and_resumes(call: Softcell, tmp_path: Path) -> None:
    together = call("train", CELL, *TINY_TRAIN, "--random", "2", "--at-once", "3", "--out", "out")
    alone = call("train", CELL, *TINY_TRAIN, "--random", "2", "--out", "alone")
    assert together.code == alone.code == 0
    for name in NAMES:
        require_same_run(place_of(tmp_path / "out", name), place_of(tmp_path / "alone", name))
        assert f"{name}  epoch 1/1" in together.out
    assert "mean ± std (n=2)" in together.out
    assert together.out.splitlines()[-4:] == alone.out.splitlines()[-4:], "the comparison"
    report, last = tmp_path / "out" / "report.html", tmp_path / "out" / "random-2" / "report.html"
    assert report.stat().st_mtime_ns > last.stat().st_mtime_ns, "the report has the results of all"
    again = call("train", "--resume", "out", "--random", "2", "--at-once", "3")
    assert again.code == 0 and "already finished" in again.out
    assert again.out.splitlines()[-4:] == together.out.splitlines()[-4:]


def test_the_command_says_what_failed_and_how_to_resume(
    call: Softcell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def strike(display: Any, label: str, *_: Any) -> OnEvent:
        def listen(event: Event) -> None:
            if label == "random-2" and isinstance(event, Started):
                raise RuntimeError("out of luck")
            if label == FOUND and isinstance(event, Stepped) and event.step == 2 and is_hit:
                os.kill(os.getpid(), signal.SIGINT)

        return listen

    monkeypatch.setattr("softcell.app.cli.train.listener_beside", strike)
    is_hit = False
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    failed = call("train", CELL, *TINY_TRAIN, "--random", "2", "--at-once", "3", "--out", "failed")
    assert failed.code == 1 and "random-2" in failed.out and "failed: out of luck" in failed.out
    assert "mean" not in failed.out, "a comparison without the one that failed would be biased"
    assert read_error(tmp_path / "error.json") == "random-2: out of luck"
    is_hit = True
    stopped = call("train", CELL, *TINY_TRAIN, "--random", "1", "--at-once", "2", "--out", "stopped")
    assert stopped.code == 130
    assert "softcell train --resume stopped --random 1 --at-once 2" in stopped.out


def test_training_runs_share_a_gpu_unless_their_time_is_limited() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [num_sharing(4, device, None) for device in (cpu, cuda)] == [1, 4]
    assert num_sharing(4, cuda, None, time=60.0) == 1
    assert [num_sharing(4, device, 2, time=60.0) for device in (cpu, cuda)] == [2, 2]


def test_random_architectures_share_a_gpu_by_default(call: Softcell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU is simulated: the command finds one, and trains nothing."""
    asked: list[int] = []

    def sharing(*_: Any, together: int, **__: Any) -> int:
        asked.append(together)
        return 0

    monkeypatch.setattr("softcell.app.cli.train._train_sharing", sharing)
    monkeypatch.setattr("softcell.engine.session.resolve_device", lambda name: torch.device("cuda"))
    assert call("train", CELL, *TINY_TRAIN, "--random", "3", "--out", "out").code == 0
    assert asked == [4]


def test_a_random_architecture_is_a_run_like_any_other(tmp_path: Path) -> None:
    found, recipe = train_recipe(CELL, {**SMALL, "epochs": 1})
    ran = train_with_random(found, draw_random(found, recipe, 1), recipe, tmp_path, at_once=2)
    assert api.train(out=tmp_path / "random-1", resume=True).accuracy == ran.results["random-1"].accuracy
