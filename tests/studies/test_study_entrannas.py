"""The commands that make the records in `results/`: they stop in time, resume, and say what is not measured."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from softcell.errors import UserError
from softcell.search import resolve, search
from softcell.search.supernet import restore
from studies import entrannas, entrannas_dst, entrannas_engines, entrannas_sparsity
from studies.gap import FILE, measure_gap
from studies.runs import spread
from tests.helpers.search_toys import settings, write_data


def test_searches_resume_and_are_recorded_when_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, out = write_data(tmp_path / "data.npz", train=32), tmp_path / "out"
    given = ["--data", str(data), "--scale", "small", "--epochs", "1", "--batch-size", "16", "--device", "cpu"]
    given += ["--methods", "entrannas", "--runs", str(tmp_path / "runs"), "--out", str(out)]
    for minutes, finished in (("0", False), ("1e-9", False), ("60", True)):
        monkeypatch.setattr(sys, "argv", ["evidence", *given, "--minutes", minutes])
        entrannas.main()
        record = json.loads((out / "search-data.json").read_text())
        (row,) = record["rows"]
        if not finished:
            assert row["result"] == record["summary"]["entrannas"] == "not measured"
            continue
        assert row["epochs_done"] == 1
        found = row["result"]
        assert found["gap_bn"] == found["supernet_accuracy_bn"] - found["derived_accuracy_bn"]
        assert found["gap"] == found["supernet_accuracy"] - found["derived_accuracy"]
        assert record["summary"]["entrannas"]["parameters"]["mean"] == found["parameters"] > 100_000
        assert found["gpu_days"] is None, "it ran on a CPU"
        assert record["summary"]["entrannas"]["seconds"]["n"] == 1
        assert record["command"][:3] == ["python", "-m", "studies.entrannas"]
        assert "<svg" in (out / row["drawing"]).read_text()


def test_darts_is_measured_in_the_same_setting() -> None:
    names = ("data_root", "scale", "epochs", "batch_size", "device", "precision", "engine", "child_every")
    options = Namespace(data="cifar10", **dict.fromkeys(names))
    ours, theirs = (entrannas.recipe_of(method, 0, options) for method in ("entrannas", "darts"))
    for key in entrannas.SHARED_SETTING:
        assert getattr(ours, key) == getattr(theirs, key)
    assert (theirs.batch_size, theirs.epochs, theirs.method) == (256, 50, "darts")


def test_a_sweep_that_was_not_run_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["x", "--out", str(out), "--runs", str(tmp_path / "runs"), "--minutes", "0"])
    entrannas_sparsity.main()
    record = json.loads(out.read_text())
    assert set(record["summary"].values()) == {"not measured"}
    assert len(record["rows"]) == 8


def test_a_spread_names_how_many_there_were() -> None:
    assert spread([1.0, 3.0]) == {"n": 2, "mean": 2.0, "std": pytest.approx(2**0.5)}
    assert spread([1.0]) == {"n": 1, "mean": 1.0, "std": None}


@pytest.mark.exhaustive
def test_arms_of_dst_are_resumed_and_recorded_with_the_size_of_their_networks(tmp_path: Path) -> None:
    data, out = write_data(tmp_path / "data.npz", train=32), tmp_path / "dst.json"
    given = ["--data", str(data), "--scale", "small", "--epochs", "1", "--batch-size", "16", "--device", "cpu"]
    given += ["--arms", "linear-0.1", "schedule=constant,init_threshold=9", "--runs", str(tmp_path / "runs")]
    given += ["--set", "space.channels=2", "--set", "space.nodes=2"]
    entrannas_dst.main([*given, "--out", str(out), "--minutes", "0"])
    assert set(json.loads(out.read_text())["summary"].values()) == {"not measured"}
    entrannas_dst.main([*given, "--out", str(out)])
    record = json.loads(out.read_text())
    dense, sparse = record["rows"]
    # Equal logits give equal strengths: a threshold of 0.05 keeps nearly all connections, one of 0.9999 hardly any.
    assert dense["result"]["connections_per_node"] > 16 > 12 > sparse["result"]["connections_per_node"]
    assert dense["result"]["parameters"] > 2 * sparse["result"]["parameters"]
    assert dense["curve"][-1]["parameters"] == dense["result"]["parameters"]
    assert 0.9 < sparse["curve"][0]["threshold_normal_2"] < 1 and dense["settings"]["schedule"] == "linear"
    for row in (dense, sparse):
        found = row["result"]
        assert found["gap_bn"] == found["supernet_accuracy_bn"] - found["derived_accuracy_bn"]
        assert "<svg" in (tmp_path / row["drawing"]).read_text()


def test_arms_must_be_known(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        entrannas_dst.main(["--arms", "quick", "--out", str(tmp_path / "dst.json"), "--minutes", "0"])
    with pytest.raises(UserError, match="thresholds"):
        entrannas_dst.main(["--arms", "thresholds=3", "--out", str(tmp_path / "dst.json"), "--minutes", "0"])


def test_engines_of_an_arm_are_found_in_the_space() -> None:
    sites = ("normal", "normal", "reduce", "normal", "normal", "reduce", "normal", "normal")
    assert entrannas_engines.engines_of("last", sites) == {"engines": "last"}
    assert entrannas_engines.engines_of("normal", sites) == {"engines": [0, 1, 2, 3, 4, 6, 7]}
    assert entrannas_engines.engines_of("0,5", sites) == {"engines": [0, 5]}


@pytest.mark.exhaustive
def test_engines_are_compared(tmp_path: Path) -> None:
    data, out = write_data(tmp_path / "data.npz", train=32), tmp_path / "engines.json"
    given = ["--data", str(data), "--scale", "small", "--epochs", "1", "--batch-size", "16", "--device", "cpu"]
    given += [
        "--arms",
        "first",
        "normal",
        "--set",
        "space.channels=2",
        "--set",
        "space.nodes=2",
        "--runs",
        str(tmp_path / "runs"),
    ]
    entrannas_engines.main([*given, "--out", str(out)])
    record = json.loads(out.read_text())
    assert [row["settings"]["engines"] for row in record["rows"]] == ["first", [0, 1, 3]]
    for row in record["rows"]:
        assert row["result"]["recipe"]["space_settings"]["channels"] == 2
        assert record["summary"][row["arm"]]["parameters"]["mean"] == row["result"]["parameters"]
        assert "mean_threshold" not in row["result"], "which only DST has"
    with pytest.raises(SystemExit):
        entrannas_engines.main([*given, "--arms", "middle", "--out", str(out)])


@pytest.fixture
def searched(tmp_path: Path) -> Path:
    """DST with thresholds just below 1: one connection per node, so that engine cells are the derived cells."""
    data = write_data(tmp_path / "data.npz", train=96)
    given = settings("darts", data, method="entrannas-dst", epochs=2, child_every=2)
    search(resolve({**given, "method_settings": {"init_threshold": 30.0}}), tmp_path / "run")
    return tmp_path / "run"


def test_a_supernet_that_is_its_derived_network_has_no_gap(searched: Path) -> None:
    """With stale statistics on one side alone there would be one."""
    found = measure_gap(searched, "cpu", None)
    results = json.loads((searched / "run.json").read_text())["results"]
    assert found["gap_bn"] == 0
    assert found["derived_accuracy_bn"] == results["child_accuracy_bn"]
    assert results["child_accuracy"] != results["child_accuracy_bn"], "else this would show nothing"


def test_one_basis_changes_no_run_and_is_measured_once(searched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = restore(searched, device="cpu").supernet.state_dict()
    found = measure_gap(searched, "cpu", None)
    after = restore(searched, device="cpu").supernet.state_dict()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    monkeypatch.setattr("studies.gap.restore", None)
    assert measure_gap(searched, "cpu", None) == found
    stored = json.loads((searched / FILE).read_text())
    (searched / FILE).write_text(json.dumps({**stored, "run": -1}))
    with pytest.raises(TypeError):  # of another run in this folder: measured again
        measure_gap(searched, "cpu", None)
