"""`python -m benchmarks.training` on a CPU compares networks that compute the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import training, training_cpu
from benchmarks.training_cpu import CASES, PLAIN, Small, compared, make_network, plain_network, steps_of
from softcell.arch import notation

TINY = {
    "darts": Small(CASES["darts"].genotype, {"cells": 3, "channels": 4}, (3, 8, 8), 4),
    "nb201": Small(CASES["nb201"].genotype, {"cells_per_stage": 1, "channels": 4}, (3, 8, 8), 4),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_of_all_ways_give_the_same_weights(name: str) -> None:
    made = steps_of(TINY[name])
    images, labels = torch.randn(4, 3, 8, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    for network, step in made.values():
        network.double()
        for _ in range(2):
            step(images, labels)
    ours, *plain = (network.state_dict() for network, _ in made.values())
    for state in plain:
        for key, value in ours.items():
            torch.testing.assert_close(state[key], value, rtol=0, atol=1e-9, msg=lambda text, k=key: f"{k}: {text}")


def test_plain_networks_have_no_module_of_ours_that_torch_has_too() -> None:
    network = make_network(TINY["darts"])
    assert any(type(module) in PLAIN for module in network.modules())
    assert not any(type(module) in PLAIN for module in plain_network(network).modules())


def test_the_ratio_is_that_of_the_faster_plain_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_cpu, "CASES", TINY)
    row = compared("nb201", 2)
    ours, first, last = (row["ways"][way]["cpu_ms"] for way in row["ways"])
    assert next(iter(row["ways"])) == "softcell"
    assert row["ratio_cpu"] == pytest.approx(min(first, last) / ours)


def test_a_cpu_prints_and_records_ratios(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training_cpu, "CASES", TINY)
    monkeypatch.setattr(training, "machine", lambda parser, options: (torch.device("cpu"), 1))
    monkeypatch.setattr(training, "write_record", lambda path, module, **kept: path.write_text(json.dumps(kept)))
    given = ["training", "--network", "nb201", "--rounds", "1", "--out", str(tmp_path / "record.json")]
    monkeypatch.setattr("sys.argv", given)
    training.main()
    (row,) = json.loads((tmp_path / "record.json").read_text())["networks"]
    assert f"{row['ratio_cpu']:.2f}" in capsys.readouterr().out


@pytest.mark.parametrize("more", [["--network", "nos"], ["--way", "fused"]])
def test_what_needs_a_gpu_is_refused_on_a_cpu(
    more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["training", "--device", "cpu", *more])
    with pytest.raises(SystemExit) as ended:
        training.main()
    assert ended.value.code == 2
    assert "--device cuda" in capsys.readouterr().err


def test_dilated_candidates_are_among_the_modules_compared() -> None:
    """DARTS_V2 has some; without them the plain network would have nothing of its own."""
    picks = [pick.op for cell in notation.parse(CASES["darts"].genotype).cells.values() for pick in cell.picks]
    assert any(op.startswith("dil_conv") for op in picks)
