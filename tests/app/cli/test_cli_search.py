from __future__ import annotations

import json
import os
import signal
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from softcell.app.cli import search as search_command
from softcell.app.cli.search import _training_data
from softcell.engine import loop
from softcell.engine.task import Event, Finished
from softcell.search.recipe import resolve
from tests.helpers.cli_calls import CELL, TINY, TINY_TRAIN, Softcell, process


def rows(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in lines]


def cells(folder: Path) -> Any:
    return json.loads((folder / "genotype.json").read_text())["cells"]


def test_a_search_leaves_a_run_folder_with_drawings(searched: Path) -> None:
    expected = {
        "run.json",
        "metrics.jsonl",
        "architecture.jsonl",
        "genotype.json",
        "checkpoint.bin",
        "genotype.svg",
        "curves.svg",
        "loss.svg",
        "entropy.svg",
        "architecture-cell.svg",
    }
    assert expected <= {file.name for file in searched.iterdir()}
    for file in searched.glob("*.svg"):
        ET.parse(file)
    assert json.loads((searched / "run.json").read_text())["status"] == "finished"


def test_each_epoch_is_one_line_and_accuracies_name_their_split(call: Softcell) -> None:
    answer = call("search", *TINY, "--epochs", "2")
    lines = [line for line in answer.out.splitlines() if line.startswith("epoch")]
    assert [line[:9] for line in lines] == ["epoch 1/2", "epoch 2/2"]
    assert all("validation" in line and "entropy" in line and "train" in line for line in lines)
    assert "on the validation split" in answer.out
    assert "softcell train runs/darts-nb201-digits-1\n" in answer.out


@pytest.mark.parametrize(
    ("limit", "verdict"),
    [("90M", "within the budget of 90M parameters"), ("74k", "EXCEEDS the budget of 74k parameters")],
)
def test_a_budget_is_shown_with_the_cost_found(limit: str, verdict: str, call: Softcell) -> None:
    answer = call("search", "darts", *TINY, "--epochs", "1", "--max-params", limit, "--set", "child_every=1")
    assert answer.code == 0
    (line,) = [line for line in answer.out.splitlines() if line.startswith("budget")]
    assert "k parameters, " in line and line.endswith(verdict)
    (child,) = [line for line in answer.out.splitlines() if line.startswith("child ")]
    (folder,) = Path("runs").iterdir()
    results = json.loads((folder / "run.json").read_text())["results"]
    recalibrated, plain = (f"{results[key]:.1%}" for key in ("child_accuracy_bn", "child_accuracy"))
    assert child.split()[1] == recalibrated and f"BatchNorm recalibrated; {plain} " in child  # top-5 may follow
    assert child.endswith("with the supernet's)")


def test_default_folders_are_numbered_and_never_overwritten(call: Softcell, tmp_path: Path) -> None:
    for _ in range(2):
        assert call("search", *TINY, "--epochs", "1", "-q").code == 0
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [f"darts-nb201-digits-{n}" for n in (1, 2)]


def test_a_run_is_repeated_from_its_run_json_alone(call: Softcell, searched: Path, tmp_path: Path) -> None:
    (tmp_path / "copy.json").write_bytes((searched / "run.json").read_bytes())
    assert call("search", "--config", "copy.json", "--out", "again", "-q").code == 0
    assert rows(tmp_path / "again") == rows(searched)
    assert cells(tmp_path / "again") == cells(searched)


def test_a_later_setting_wins_over_the_configuration(call: Softcell, searched: Path, tmp_path: Path) -> None:
    assert call("search", "--config", searched, "--seed", "5", "--epochs", "1", "--out", "other", "-q").code == 0
    recipe = json.loads((tmp_path / "other" / "run.json").read_text())["recipe"]
    assert (recipe["seed"], recipe["epochs"], recipe["space_settings"]["channels"]) == (5, 1, 2)


def test_yaml_accepts_short_settings_of_the_space(call: Softcell, tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("space: nb201\nspace_settings: {channels: 2}\nepochs: 1\nbatch_size: 128\n")
    assert call("search", "--config", "my.yaml", "--set", "space.nodes=3", "--out", "run", "-q").code == 0
    recipe = json.loads((tmp_path / "run" / "run.json").read_text())["recipe"]
    assert (recipe["space"], recipe["space_settings"]["nodes"], recipe["space_settings"]["channels"]) == ("nb201", 3, 2)


def test_resuming_a_finished_run_shows_its_result(call: Softcell, searched: Path) -> None:
    before = (searched / "run.json").read_bytes()
    for arguments in (("--resume", searched), ("--resume", "--out", searched)):
        answer = call("search", *arguments)
        assert answer.code == 0
        assert "already finished" in answer.out
        assert str(searched / "genotype.json") in answer.out
    assert (searched / "run.json").read_bytes() == before


def test_a_resumed_run_rejects_other_settings(call: Softcell, searched: Path) -> None:
    answer = call("search", "--resume", searched, "--seed", "3")
    assert (answer.code, "seed: 0 -> 3" in answer.error) == (2, True)


def test_an_existing_run_is_overwritten_only_on_request(call: Softcell, tmp_path: Path) -> None:
    first = ("search", *TINY, "--epochs", "1", "--out", "run", "-q")
    assert call(*first).code == 0
    rejected = call(*first, "--seed", "1")
    assert (rejected.code, "another --out" in rejected.error) == (2, True)
    assert call(*first, "--seed", "1", "--overwrite").code == 0
    assert json.loads((tmp_path / "run" / "run.json").read_text())["seed"] == 1


def test_random_search_shows_the_best_on_the_validation_split(call: Softcell) -> None:
    answer = call("search", "random", *TINY, "--epochs", "1", "--set", "method.samples=2")
    assert answer.code == 0
    assert "architecture 2" in answer.out
    assert "on the validation split, the best one" in answer.out


def test_other_ranks_print_nothing(call: Softcell, searched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    answer = call("search", "--resume", searched)
    assert (answer.code, answer.out) == (0, "")


def test_ctrl_c_then_resume_gives_what_an_unbroken_search_gives(call: Softcell, tmp_path: Path) -> None:
    arguments = (
        "search",
        *TINY,
        "--batch-size",
        "128",
        "--set",
        "split.weights=256",
        "--set",
        "split.validation=128",
        "--epochs",
        "6",
    )
    broken = process(*arguments, "--out", "broken", cwd=tmp_path)
    assert broken.stdout is not None
    for line in broken.stdout:
        if line.startswith("epoch 2/"):
            broken.send_signal(signal.SIGINT)
            break
    out, error = broken.communicate(timeout=60)
    assert broken.returncode == 130
    assert error == ""
    assert "softcell search --resume broken" in out
    assert json.loads((tmp_path / "broken" / "run.json").read_text())["status"] == "interrupted"
    assert len(rows(tmp_path / "broken")) < 6

    offered = call("search", "--resume")
    assert offered.code == 2
    assert call("search", "--resume", "broken", "-q").code == 0
    assert call(*arguments, "--out", "unbroken", "-q").code == 0
    assert rows(tmp_path / "broken") == rows(tmp_path / "unbroken")
    assert cells(tmp_path / "broken") == cells(tmp_path / "unbroken")


def test_several_seeds_are_searched_compared_and_resumed(call: Softcell, tmp_path: Path) -> None:
    asked = ("search", "--seeds", "2", "--epochs", "1", *TINY, "--out", tmp_path / "several")
    answer = call(*asked)
    assert answer.code == 0, answer.error
    assert "(best)" in answer.out and "mean ± std (n=2)" in answer.out
    assert (tmp_path / "several" / "seed-1" / "genotype.svg").exists()
    again = call("search", "--resume", tmp_path / "several")
    assert again.code == 0 and "mean ± std (n=2)" in again.out
    (tmp_path / "other.yaml").write_text("epochs: 7\n")
    rejected = call("search", "--resume", tmp_path / "several", "--config", "other.yaml")
    assert rejected.code == 2 and "epochs: 1 -> 7" in rejected.error
    rejected = call("search", "--seeds", "0", *TINY)
    assert rejected.code == 2 and "--seeds must be at least 1" in rejected.error
    rejected = call("search", "--seeds", "2", "--at-once", "0", *TINY)
    assert rejected.code == 2 and "--at-once must be at least 1, but is 0" in rejected.error
    assert call(*asked).code == 2, "the folder is taken"


def test_interrupted_seeds_print_how_to_resume(call: Softcell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop._Loop, "_emit_step", lambda self, steps: os.kill(os.getpid(), signal.SIGTERM))
    asked = ("--seeds", "2", "--keep", "best", "--at-once", "2", "--epochs", "1", *TINY)
    answer = call("search", *asked, "--out", tmp_path / "several")
    assert answer.code == 128 + signal.SIGTERM
    expected = f"softcell search --resume {tmp_path / 'several'} --keep best --at-once 2"
    assert expected.replace(" ", "") in "".join(answer.out.split())


@pytest.mark.parametrize(
    "words",
    [
        ("search", *TINY, "--epochs", "1", "--seeds", "2", "--at-once", "1"),
        ("train", CELL, *TINY_TRAIN, "--seeds", "2", "--at-once", "1"),
        ("train", CELL, *TINY_TRAIN, "--random", "2", "--at-once", "2"),
    ],
    ids=lambda words: f"{words[0]} {words[-4]}",
)
def test_runs_that_a_signal_kept_from_starting_are_resumed(
    words: tuple[str, ...], call: Softcell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emit = loop._Loop._emit

    def strike(self: Any, event: Event) -> None:
        emit(self, event)
        if isinstance(event, Finished):
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(loop._Loop, "_emit", strike)
        answer = call(*words, "--out", "out")
    assert answer.code == 128 + signal.SIGTERM
    assert f"softcell {words[0]} --resume out" in answer.out
    last = "random-2" if "--random" in words else "seed-1"
    assert not (tmp_path / "out" / last).exists()
    again = call(words[0], "--resume", "out", *(("--random", "2") if "--random" in words else ()))
    assert again.code == 0, again.error
    assert json.loads((tmp_path / "out" / last / "run.json").read_text())["status"] == "finished"


def test_the_suggested_training_after_a_search_without_labels(call: Softcell, tmp_path: Path) -> None:
    """The same data where it has classes, images with classes where it has none."""
    answer = call("search", "--set", "objective=context", "--epochs", "1", *TINY, "--out", tmp_path / "digits")
    assert answer.code == 0, answer.error
    assert f"softcell train {tmp_path / 'digits'}\n" in answer.out and "IMAGES-WITH-CLASSES" not in answer.out
    for place in ("any/photos", "sorted/a", "sorted/b", "split/train/a", "split/train/b"):
        (tmp_path / place).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / place / "1.png")
    unsorted = resolve({"objective": "context", "data": str(tmp_path / "any")})
    assert _training_data(unsorted) == ("--data", "IMAGES-WITH-CLASSES")
    for folder in ("sorted", "split"):
        own = resolve({"objective": "context", "data": folder, "data_root": str(tmp_path)})
        assert _training_data(own) == (), "taken over from the search"


def test_processes_that_torchrun_starts_again_resume_their_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_command, "restarted_folder", lambda: tmp_path)
    assert search_command.resumed("search", "darts", None, False, True) == ("darts", tmp_path, True, False)
    kept = ("darts", None, False, True)  # several seeds choose their folders themselves
    assert search_command.resumed("search", *kept, restarts=False) == kept
    named = search_command.resumed("train", "runs/x", None, True, False, restarts=False)
    assert named == (None, Path("runs/x"), True, False)
