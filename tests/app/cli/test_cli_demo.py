from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from softcell.app import baseline, jobs
from softcell.app.baseline import claim, rank_sum
from softcell.app.cli import run
from softcell.arch import sample
from softcell.evaluate.recipe import resolve as resolve_training
from softcell.search import resolve
from softcell.seeds import SearchedSeeds
from softcell.spaces import build_space
from tests.helpers.cli_calls import Softcell


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"cells": 3, "channels": 2, "nodes": 2}
    monkeypatch.setattr(run, "DEMO_SEARCHES", 2)
    monkeypatch.setattr(run, "DEMO_RANDOM", 2)
    monkeypatch.setattr(
        run, "DEMO_SEARCH", {**run.DEMO_SEARCH, "epochs": 1, "batch_size": 256, "space_settings": sizes}
    )
    monkeypatch.setattr(run, "DEMO_TRAIN", {**run.DEMO_TRAIN, "epochs": 1, "batch_size": 512, "space_settings": sizes})


def test_the_demo_rejects_a_folder_of_another_command(call: Softcell, tmp_path: Path) -> None:
    (tmp_path / "mine" / "search").mkdir(parents=True)
    (tmp_path / "mine" / "search" / "run.json").write_text("{}")
    answer = call("demo", "--out", "mine")
    assert answer.code == 2 and "1. Search" not in answer.out
    assert "a demo needs a new folder" in answer.error and "choose another --out" in answer.error
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.yaml").write_text("methods: [darts]")
    answer = call("demo", "--out", "sweep")
    assert (answer.code, answer.out) == (2, "") and "sweep holds other files" in answer.error


@pytest.mark.usefixtures("tiny")
def test_the_demo_goes_from_searches_to_a_test_against_random_cells(call: Softcell, tmp_path: Path) -> None:
    answer = call("demo", "--threads", "1", "--seed", "1")
    assert answer.code == 0
    assert "concat(2, 3)" in answer.out  # the cell, drawn
    folder = tmp_path / "runs" / "demo-1"
    record = json.loads((folder / "demo.json").read_text("utf-8"))
    names = ["found-2", "found-3", "random-1", "random-2"]
    assert list(record["accuracy"]) == names
    found, random = ([record["accuracy"][name] for name in part] for part in (names[:2], names[2:]))

    # What is printed is computed from what the runs measured on the test split.
    measured = [json.loads((folder / "train" / name / "run.json").read_text("utf-8"))["results"] for name in names]
    assert [one["accuracy"] for one in measured] == found + random
    assert record["p"] == rank_sum(found, random)
    assert claim(found, random) in answer.out and record["claim"] in answer.out
    assert "no difference can be claimed" in answer.out  # 2 beside 2: p is at least 1 / 3
    listed = [line.split()[0] for line in answer.out.splitlines() if line.endswith(" parameters")]
    assert listed == sorted(names, key=lambda name: -record["accuracy"][name])
    assert (folder / "train" / "found-2" / "genotype.svg").is_file()

    # The same folder is resumed: here everything is finished already.
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("model.safetensors")}
    again = call("demo", "--threads", "1", "--seed", "1", "--out", "runs/demo-1")
    assert again.code == 0 and claim(found, random) in again.out
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("model.safetensors")}
    assert len(before) == len(names)

    other = call("demo", "--threads", "1", "--seed", "2", "--out", "runs/demo-1")
    assert (other.code, other.out) == (2, "") and "a demo is resumed with its own seed" in other.error
    assert before == {path: path.stat().st_mtime_ns for path in folder.rglob("model.safetensors")}


def test_a_demo_interrupted_in_a_search_prints_the_command_that_resumes_it(
    call: Softcell, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = SimpleNamespace(genotype=None, metrics=[], exit_code=130)
    monkeypatch.setattr(jobs, "search_seeds", lambda *_, **__: SearchedSeeds(Path("x"), {9: stopped}, {}, None, 130))
    answer = call("demo", "--seed", "3", "--out", "my demo", "--threads", "1", "--device", "cpu")
    assert answer.code == 130
    assert "softcell demo --out 'my demo' --seed 3 --device cpu --threads 1\n" in answer.out


def test_a_demo_interrupted_during_training_prints_the_command_that_resumes_it(
    call: Softcell, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped:
        genotype, exit_code, accuracy = None, 130, None

    monkeypatch.setattr(run, "run_seeds", lambda *_, **__: 0)
    cell = sample(build_space("s4").layout(), 0)
    monkeypatch.setattr(run, "read_genotype", lambda _: cell)
    monkeypatch.setattr(jobs, "train", lambda *_, **__: Stopped())
    answer = call("demo", "--seed", "3", "--out", "my demo")
    assert answer.code == 130
    assert "softcell demo --out 'my demo' --seed 3" in answer.out
    assert "claimed" not in answer.out


def test_the_demo_searches_the_published_space_and_can_reach_a_claim() -> None:
    searched = resolve(run.DEMO_SEARCH)
    layout = build_space(searched.space, searched.space_settings).layout()
    assert layout.tables == build_space("s4").layout().tables  # all its nodes and candidates
    found = sample(layout, 0)
    assert build_space("s4", resolve_training(found, run.DEMO_TRAIN).space_settings).layout().tables == layout.tables
    assert rank_sum([1.0] * run.DEMO_SEARCHES, [0.0] * run.DEMO_RANDOM) < baseline.LEVEL / 5
