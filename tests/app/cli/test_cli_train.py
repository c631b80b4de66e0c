from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from softcell.app.baseline import Baseline, verdict
from tests.helpers.cli_calls import CELL, TINY, TINY_TRAIN, Softcell
from tests.helpers.unsealed import unsealed


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def test_the_found_network_is_compared_with_random_ones_on_the_test_split(
    call: Softcell, searched: Path, tmp_path: Path
) -> None:
    answer = call("train", searched, *TINY_TRAIN, "--random", "2", "--out", "out")
    assert answer.code == 0
    assert "on the test split (450 images)" in answer.out
    assert "accuracy on the test split, all trained with the same recipe (seed 0)" in answer.out
    assert "mean ± std (n=2)" in answer.out
    runs = [manifest(tmp_path / "out" / name) for name in ("", "random-1", "random-2")]
    assert len({json.dumps(run["recipe"]) for run in runs}) == 1  # trained alike, seed included
    assert len({json.dumps(run["results"]["genotype"]["cells"]) for run in runs}) == 3
    assert {"genotype.svg", "curves.svg", "model.safetensors"} <= {f.name for f in (tmp_path / "out").iterdir()}

    again = call("train", "--resume", "out", "--random", "2")
    assert again.code == 0
    assert "already finished" in again.out
    assert answer.out.splitlines()[-3:] == again.out.splitlines()[-3:]


def test_a_training_run_is_repeated_from_its_run_json_alone(call: Softcell, tmp_path: Path) -> None:
    assert call("train", CELL, *TINY_TRAIN, "--out", "first", "-q").code == 0
    (tmp_path / "copy.json").write_bytes((tmp_path / "first" / "run.json").read_bytes())
    assert call("train", "--config", "copy.json", "--out", "second", "-q").code == 0
    first, second = manifest(tmp_path / "first")["results"], manifest(tmp_path / "second")["results"]
    assert (first["accuracy"], first["loss"]) == (second["accuracy"], second["loss"])


def test_random_architectures_come_from_the_space_that_was_searched(call: Softcell, tmp_path: Path) -> None:
    narrow = ("--set", "space.nodes=3", "--set", "space.candidates=[none, skip_connect, nor_conv_1x1]", "--seed", "1")
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


def test_an_unfinished_search_has_no_genotype(call: Softcell, searched: Path, tmp_path: Path) -> None:
    state = {**unsealed(manifest(searched)), "status": "interrupted"}
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "run.json").write_text(json.dumps(state))
    answer = call("train", "half")
    assert (answer.code, "softcell search --resume half" in answer.error) == (2, True)


def test_train_rejects_the_recipe_of_a_search(call: Softcell, searched: Path) -> None:
    answer = call("train", CELL, "--config", searched)
    assert (answer.code, "was created by `softcell search`" in answer.error) == (2, True)


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
    ("accuracy", "others", "expected"),
    [
        (
            0.94,
            (0.90, 0.92, 0.97),
            "1.0 points above the mean of 3 random architectures, within their spread of 3.6: no difference",
        ),
        (0.80, (0.90, 0.92, 0.97), "13.0 points below the mean of 3 random architectures, more than their spread"),
        (0.99, (0.90,), "proves nothing"),
    ],
)
def test_the_verdict_claims_no_more_than_the_numbers_say(
    accuracy: float, others: tuple[float, ...], expected: str
) -> None:
    assert expected in verdict(accuracy, _baseline(*others))


@pytest.fixture
def own_data(tmp_path: Path) -> Path:
    """A folder of labelled images, in `own`."""
    rng = np.random.default_rng(0)
    for number, pixels in enumerate(rng.integers(0, 256, (60, 10, 10, 3), dtype=np.uint8)):
        place = tmp_path / "own" / f"class-{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / f"{number}.png")
    return tmp_path


def test_a_training_run_uses_the_data_of_its_search_and_the_network_of_its_budget(
    call: Softcell, own_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`softcell train RUN` is what a search says comes next: that network on those images, typed from anywhere."""
    network = ("--set", "resource.network.channels=4", "--set", "resource.network.cells_per_stage=1")
    asked = ("--data", "own", "--image-size", "6", "--scale", "small", "--batch-size", "16", "--max-params", "1M")
    found = call("search", "--space", "nb201", *asked, *network, "--epochs", "1", "--threads", "1", "--out", "found")
    assert "next          softcell train found\n" in found.out, found.error
    counted = manifest(own_data / "found")["results"]["derived_parameters"]

    described = call("info", "found").out
    assert f"{counted:,.0f}" in described and "input 3x6x6, 3 classes" in described

    (own_data / "elsewhere").mkdir()
    monkeypatch.chdir(own_data / "elsewhere")
    short = ("--epochs", "1", "--batch-size", "16", "--threads", "1", "-q")
    assert call("train", "../found", *short, "--out", "trained").code == 0
    trained = manifest(own_data / "elsewhere" / "trained")
    assert trained["results"]["parameters"] == counted
    assert trained["results"]["data"]["shape"] == [3, 6, 6]
    assert Path(trained["recipe"]["data_root"]) == own_data

    assert call("train", "../found", "--data", "digits", *short, "--out", "other").code == 0
    recipe = manifest(own_data / "elsewhere" / "other")["recipe"]
    assert (recipe["data"], recipe["data_root"], recipe["image_size"]) == ("digits", None, None)


def test_settings_of_a_supernet_are_not_used_in_training(call: Softcell, searched: Path, tmp_path: Path) -> None:
    """Otherwise training runs of one architecture would differ in settings that none of them uses."""
    shared = ("--set", "space.share_features=true")
    assert call("search", *TINY, *shared, "--epochs", "1", "--out", "found", "-q").code == 0
    for name, source in (("a", "found"), ("b", searched)):
        assert call("train", source, *TINY_TRAIN, "--out", name, "-q").code == 0
    first, second = (manifest(tmp_path / name)["recipe"]["space_settings"] for name in "ab")
    assert first == second


def test_info_shows_the_accuracy_of_a_search_after_an_epoch(call: Softcell, searched: Path) -> None:
    rows = [json.loads(line)["val_accuracy"] for line in (searched / "metrics.jsonl").read_text().splitlines()]
    assert rows[0] != rows[1]
    for source, value in ((searched, rows[1]), (f"{searched}@1", rows[0]), (f"{searched}@last", rows[1])):
        shown = call("info", source).out
        assert f"supernet      {100 * value:.1f}% " in shown  # top-5 may follow
        assert "on the validation split" in shown


def test_a_run_whose_folder_is_called_like_a_space_is_found(
    call: Softcell, searched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(searched, tmp_path / "darts")
    monkeypatch.chdir(tmp_path)
    answer = call("info", "darts@1")
    assert answer.code == 0 and "epoch 1" in answer.out and "space         nb201" in answer.out
    assert "did you mean the space 'darts'?" in call("info", "dart").error


def test_info_shows_the_best_of_architectures_trained_one_by_one(call: Softcell, tmp_path: Path) -> None:
    few = ("--set", "method.samples=3", "--epochs", "1", "--seed", "1", "--out", "drawn", "-q")
    assert call("search", "random", *TINY, *few).code == 0
    rows = [json.loads(line) for line in (tmp_path / "drawn" / "architecture.jsonl").read_text().splitlines()]
    scores = [row["val_accuracy"] for row in rows]
    assert max(scores) > scores[-1], "the last one is not the best"
    assert manifest(tmp_path / "drawn")["results"]["val_accuracy"] == max(scores)
    said = call("info", "drawn").out
    assert f"accuracy      {100 * max(scores):.1f}% on the validation split, the best one" in said
    assert "supernet" not in said
    assert call("show", "drawn@last").out == call("show", "drawn").out


def test_a_folder_of_several_runs_asks_for_one_of_them(call: Softcell, searched: Path, tmp_path: Path) -> None:
    shutil.copytree(searched, tmp_path / "whole" / "search")
    (tmp_path / "whole" / "plan.json").write_text("{}")
    assert call("show", "whole").out == call("show", "whole@last").out == call("show", searched).out
    assert call("info", "whole").code == 0
    assert call("search", *TINY, "--epochs", "1", "--seeds", "2", "--out", "seeds", "-q").code == 0
    best = json.loads((tmp_path / "seeds" / "seeds.json").read_text())["best"]
    assert call("show", "seeds@1").out == call("show", f"seeds/seed-{best}").out


def test_a_run_that_has_no_architecture_says_why(call: Softcell, searched: Path, tmp_path: Path) -> None:
    for name, change in (("teacher", {"kind": "teacher"}), ("lost", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({**unsealed(manifest(searched)), **change}))
    assert "is a teacher run, which has no genotype" in call("train", "teacher").error
    assert "genotype.json of this search is missing" in call("train", "lost").error
    assert "must name an epoch of a search" in call("show", "teacher@1").error
