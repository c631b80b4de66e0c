from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_calls import CELL, TINY, TINY_TRAIN, Softcell

from softcell.baseline import Baseline, verdict


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def test_found_stands_beside_random_ones_and_everything_names_the_test_split(
    call: Softcell, searched: Path, tmp_path: Path
) -> None:
    answer = call("train", searched, *TINY_TRAIN, "--random", "2", "--out", "out")
    assert answer.code == 0
    assert "on the test split (450 images)" in answer.out
    assert "accuracy on the test split, all trained alike (seed 0)" in answer.out
    assert "mean ± std (n=2)" in answer.out
    runs = [manifest(tmp_path / "out" / name) for name in ("", "random-1", "random-2")]
    assert len({json.dumps(run["recipe"]) for run in runs}) == 1  # trained alike, seed included
    assert len({json.dumps(run["results"]["genotype"]["cells"]) for run in runs}) == 3
    assert {"genotype.svg", "curves.svg", "model.safetensors"} <= {f.name for f in (tmp_path / "out").iterdir()}

    again = call("train", "--resume", "out", "--random", "2")
    assert again.code == 0
    assert "finished already" in again.out
    assert answer.out.splitlines()[-3:] == again.out.splitlines()[-3:]


def test_a_training_is_repeated_from_its_run_json_alone(call: Softcell, tmp_path: Path) -> None:
    assert call("train", CELL, *TINY_TRAIN, "--out", "first", "-q").code == 0
    (tmp_path / "copy.json").write_bytes((tmp_path / "first" / "run.json").read_bytes())
    assert call("train", "--config", "copy.json", "--out", "second", "-q").code == 0
    first, second = manifest(tmp_path / "first")["results"], manifest(tmp_path / "second")["results"]
    assert (first["accuracy"], first["loss"]) == (second["accuracy"], second["loss"])


def test_random_architectures_come_from_the_space_that_was_searched(call: Softcell, tmp_path: Path) -> None:
    narrow = ("--set", "space.nodes=3", "--set", "space.candidates=[none, skip_connect, nor_conv_1x1]")
    assert call("search", *TINY, *narrow, "--epochs", "1", "--out", "found", "-q").code == 0
    assert call("train", "found", *TINY_TRAIN, "--random", "1", "--out", "out", "-q").code == 0
    edges = manifest(tmp_path / "out" / "random-1")["results"]["genotype"]["cells"]["cell"]["edges"]
    assert len(edges) == 3
    assert {op for _, _, op in edges} <= {"none", "skip_connect", "nor_conv_1x1"}


def test_a_plugin_of_the_search_is_known_to_the_training(call: Softcell, tmp_path: Path) -> None:
    (tmp_path / "ops.py").write_text(
        "from torch import nn\n"
        "from softcell.nn.candidates import candidate\n"
        "@candidate('cli_test_bias')\n"
        "def cli_test_bias(spec):\n"
        "    return nn.Conv2d(spec.channels, spec.channels, 1, spec.stride)\n"
    )
    one = ("--set", "space.candidates=[cli_test_bias]")
    assert call("search", *TINY, *one, "--plugin", "ops.py", "--epochs", "1", "--out", "found", "-q").code == 0
    assert call("train", "found", *TINY_TRAIN, "--out", "out", "-q").code == 0
    assert manifest(tmp_path / "out")["recipe"]["plugins"] == [str(tmp_path / "ops.py")]
    assert "cli_test_bias" in call("list", "candidates").out


def test_an_unfinished_search_is_no_genotype(call: Softcell, searched: Path, tmp_path: Path) -> None:
    state = {**manifest(searched), "status": "interrupted"}
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "run.json").write_text(json.dumps(state))
    answer = call("train", "half")
    assert (answer.code, "softcell search --resume half" in answer.error) == (2, True)


def test_train_does_not_take_a_searchs_recipe(call: Softcell, searched: Path) -> None:
    answer = call("train", CELL, "--config", searched)
    assert (answer.code, "is a search run" in answer.error) == (2, True)


class _Result:
    def __init__(self, accuracy: float) -> None:
        self.accuracy = accuracy


def _baseline(*accuracies: float) -> Baseline:
    return Baseline([_Result(a) for a in accuracies], "test", 0)  # type: ignore[misc]


def test_the_spread_is_the_sample_deviation() -> None:
    baseline = _baseline(0.90, 0.92, 0.97)
    assert baseline.mean == pytest.approx(0.93)
    assert baseline.std == pytest.approx((0.0026 / 2) ** 0.5)  # squares 9, 1, 16 in units of 1e-4


@pytest.mark.parametrize(
    ("accuracy", "others", "told"),
    [
        (0.94, (0.90, 0.92, 0.97), "1.0 points above the mean of 3 random, within their spread of 3.6: no difference"),
        (0.80, (0.90, 0.92, 0.97), "13.0 points below the mean of 3 random, more than their spread"),
        (0.99, (0.90,), "nothing follows"),
    ],
)
def test_the_verdict_claims_no_more_than_the_numbers_say(accuracy: float, others: tuple[float, ...], told: str) -> None:
    assert told in verdict(accuracy, _baseline(*others))
