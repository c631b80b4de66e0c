from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn

from softcell.app.cli.main import run
from softcell.arch import sample
from softcell.evaluate import latency as subject
from softcell.evaluate.latency import Latency, LatencyTable, measure_module, measure_space
from softcell.search.resource import latency, read_latencies
from softcell.spaces import SPACES, build_space
from softcell.testing import tiny_space

CPU = torch.device("cpu")


class Slow(nn.Module):
    """Takes 4 ms, and much longer the first times, as compilation and allocation do."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.modes: set[bool] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.modes.add(self.training)
        time.sleep(0.04 if self.calls <= 2 else 0.004)
        return x


def test_a_module_is_measured_warm_in_eval_mode_and_left_as_it_was() -> None:
    module = Slow().train()
    found = measure_module(module, torch.zeros(1), samples=5)
    assert 3.9 <= found.low <= found.median <= found.high
    assert found.median < 20.0  # the two slow calls are not in it
    assert module.modes == {False} and module.training


def test_a_call_shorter_than_the_clocks_grain_is_repeated_within_a_sample() -> None:
    found = measure_module(nn.Identity(), torch.zeros(1), samples=3)
    assert found.calls > 50
    assert 0.0 < found.median < 1.0


@pytest.mark.parametrize("name", tuple(SPACES))
def test_every_space_gives_a_table_of_all_its_candidates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "WARM_UP", 0.0)
    monkeypatch.setattr(subject, "SAMPLE", 0.0)
    space = tiny_space(name)
    seen: list[tuple[int, int]] = []
    table = measure_space(
        space, (3, 6, 5), 4, CPU, networks=1, samples=2, on_step=lambda done, total, _: seen.append((done, total))
    )
    for part in space.layout().tables:
        named = {op for choice in part.choices for op in choice.candidates} - {"none"}
        assert set(table.candidates[part.name]) == named
    assert seen[-1][0] == seen[-1][1] == len(seen) - 1


def test_times_add_up_over_the_sites_of_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """With times that are known, the table must predict a whole network exactly, `fixed` included."""
    space = build_space("nb201", {"channels": 2, "cells_per_stage": 1})
    known = {"skip_connect": 1.0, "nor_conv_1x1": 2.0, "nor_conv_3x3": 4.0, "avg_pool_3x3": 8.0}
    names = iter([*known] * 3)  # three widths, candidates in the order of the space
    asked: list[str] = []

    def fake(module: nn.Module, x: Tensor, *, samples: int) -> Latency:
        if isinstance(module, nn.Module) and hasattr(module, "genotype"):
            picks = [pick.op for pick in module.genotype.cells["cell"].picks]
            value = 5.0 + 3 * sum(known.get(op, 0.0) for op in picks)
        else:
            asked.append(next(names))
            value = known[asked[-1]]
        return Latency(value, value, value, samples, 1)

    monkeypatch.setattr(subject, "measure_module", fake)
    table = measure_space(space, (3, 8, 8), 4, CPU, networks=3, samples=2)
    assert sorted(asked) == sorted([*known] * 3)
    assert table.candidates == {"cell": known}
    assert table.fixed == pytest.approx(5.0)
    assert table.error == pytest.approx(0.0)
    read = {key: value for key, value in table.to_dict({}).items() if key != "about"}
    genotype = sample(space.layout(), 7)
    assert latency(genotype, space.layout(), read) == pytest.approx(
        5.0 + 3 * sum(known.get(pick.op, 0.0) for pick in genotype.cells["cell"].picks)
    )


def test_command_writes_a_table_that_a_search_takes_as_its_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ms.yaml"
    small = ["--channels", "2", "--set", "space.cells_per_stage=1", "--input", "1x8x8", "--threads", "1"]
    measured = ["latency", "nb201", *small, "--networks", "1", "--samples", "2", "--out", str(file)]
    assert run(measured) == 0
    assert "mean prediction error" in capsys.readouterr().out
    assert run(measured) == 2  # the file exists
    table = yaml.safe_load(file.read_text())
    assert set(table) == {"about", "fixed", "cell"}
    assert set(read_latencies(str(file))) == {"fixed", "cell"}
    out = tmp_path / "search"
    search = ["search", "--space", "nb201", "--epochs", "1", "--batch-size", "256", "--set", "space.channels=2", "-q"]
    limit = ["--latency-table", str(file), "--max-latency", "1000000", "--threads", "1", "--out", str(out)]
    assert run([*search, *limit]) == 0
    results = json.loads((out / "run.json").read_text())["results"]
    assert results["budget_met"] is True
    assert results["derived_latency"] >= table["fixed"]


def test_a_network_is_measured_and_wrong_words_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    cell = "|nor_conv_3x3~0|+|none~0|none~1|+|none~0|none~1|skip_connect~2|"
    small = ["--channels", "2", "--set", "space.cells_per_stage=1", "--input", "1x8x8", "--samples", "2"]
    assert run(["latency", cell, *small, "--batch", "3"]) == 0
    shown = capsys.readouterr().out
    assert "quartiles of 2 samples" in shown and "images per second" in shown
    assert run(["latency", cell, "--out", "x.yaml"]) == 2
    assert run(["latency", "no-such-thing"]) == 2
    assert run(["latency", "nb201", "--recipe", "tiny"]) == 2


def test_a_table_without_networks_claims_no_accuracy() -> None:
    assert LatencyTable({"cell": {"skip_connect": 1.0}}, 0.0, ()).error is None


@pytest.mark.gpu
def test_the_devices_own_time_is_taken_on_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda")
    large, small = (torch.rand(size, size, device=device) for size in (4096, 64))
    product = type("Product", (nn.Module,), {"forward": lambda self, x: x @ x})
    assert measure_module(product(), large).median > 3 * measure_module(product(), small).median
