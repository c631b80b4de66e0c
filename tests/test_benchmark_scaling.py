"""The model of several GPUs: its formula by hand-computed values, its counts against tensor sizes, its label."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import scaling
from benchmarks.scaling import (
    Collective,
    Link,
    counted,
    counted_training,
    efficiency,
    links,
    recorded_ms,
    ring_seconds,
)
from benchmarks.steps import Case, step_state
from softcell.arch import notation
from softcell.kernels.derived_program import norm_groups
from softcell.nn.norm import running_statistics
from softcell.spaces import build_space
from softcell.spaces.darts import DartsNetwork
from tests.reference.published_genotypes import DARTS_V2

SMALL = Case("nb201", {"cells_per_stage": 1, "channels": 2}, (3, 8, 8), 2, "darts")
FOUR = Link("four", 4, 1e9, 1e-5)


def test_a_ring_sends_twice_all_but_one_part_and_waits_at_every_hop() -> None:
    # 2 · 3/4 · 8 MB / 1 GB/s = 12 ms, and 6 hops of 10 µs.
    assert ring_seconds(8_000_000, FOUR) == pytest.approx(0.012 + 6e-5)
    assert ring_seconds(0, Link("two", 2, 1e9, 1e-5)) == pytest.approx(2e-5)


def test_efficiency_matches_hand_computed_values_without_and_with_overlap() -> None:
    """12.06 ms are sent during the backward pass, 6.06 ms after it, 0.06 ms are statistics; a step takes 100 ms."""
    step = [Collective(8_000_000, "gradients", True), Collective(4_000_000, "gradients"), Collective(0, "norms")]
    assert efficiency(step, 0.1, 0.05, FOUR, overlap=False) == pytest.approx(100 / 118.18)
    assert efficiency(step, 0.1, 0.05, FOUR, overlap=True) == pytest.approx(100 / 106.12), "the first is hidden"
    assert efficiency(step, 0.1, 0.01, FOUR, overlap=True) == pytest.approx(100 / 108.18), (
        "hidden only while the backward pass lasts"
    )


def test_two_machines_are_one_ring_over_the_network() -> None:
    *inside, between = links(450.0, 3.0, 100.0, 10.0, 8)
    assert [link.ranks for link in inside] == [2, 4, 8]
    assert (between.ranks, between.bandwidth) == (16, 12.5e9)


@pytest.mark.parametrize("norms", ["local", "shared"])
def test_counted_bytes_match_weights_architecture_and_statistics(norms: scaling.Norms) -> None:
    found = counted(SMALL, norms, 1000)
    state = step_state(SMALL, torch.device("cpu"), plain=False)
    tensors = [*state.supernet.parameters(), *state.method.parameters()]
    expected = sum(tensor.numel() for tensor in tensors)
    if norms == "local":
        expected += sum(tensor.numel() for tensor in running_statistics([state.supernet]))
    assert sum(one.num_bytes for one in found if one.kind == "gradients") == 4 * expected
    assert any(one.hidden for one in found), "small buckets are sent during the backward pass"
    assert any(one.kind == "norms" for one in found) == (norms == "shared")
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("norms", ["local", "shared"])
def test_counted_bytes_of_a_training_run_match_weights_and_statistics(norms: scaling.Norms) -> None:
    sizes = {"cells": 3, "channels": 4}
    found = counted_training(sizes, norms, 2**30)
    network = build_space("darts", sizes).network(notation.parse(DARTS_V2), (3, 32, 32), 10, auxiliary=True)
    expected = sum(tensor.numel() for tensor in network.parameters())
    if norms == "local":
        expected += sum(tensor.numel() for tensor in running_statistics([network]))
    assert [one.num_bytes for one in found if one.kind == "gradients"] == [4 * expected]
    statistics = [one.num_bytes for one in found if one.kind == "norms"]
    if norms == "local":
        assert not statistics
        return
    # Forward two ranks' rows (mean, squares, a count), backward two sums; a norm outside of cells sends rows twice.
    norms_of = {name: m for name, m in network.named_modules() if isinstance(m, torch.nn.BatchNorm2d)}
    outside = [m.num_features for name, m in norms_of.items() if name.split(".")[0] in ("stem", "auxiliary")]
    inside = sum(m.num_features for m in norms_of.values()) - sum(outside)
    assert isinstance(network, DartsNetwork)
    groups = sum(len(norm_groups(cell.program)[0]) for i in range(3) if (cell := network._fused(i)) is not None)
    assert sum(statistics) == 4 * (6 * inside + 2 * groups + 8 * sum(outside) + 4 * len(outside))


def test_default_times_match_the_records() -> None:
    rows = json.loads((scaling.RECORDS / "methods-h200-2026-11-16.json").read_text())["rows"]
    (ms,) = [row["ways"]["recorded bf16"]["ms"] for row in rows if (row["method"], row["space"]) == ("snas", "darts")]
    assert recorded_ms("snas", "darts") == (ms, "methods-h200-2026-11-16.json")
    steps = json.loads((scaling.RECORDS / "derived-h200-2026-11-19.json").read_text())["steps"]
    assert recorded_ms(*scaling.TRAINING) == (steps[0]["ms"], "derived-h200-2026-11-19.json")
    assert (steps[0]["way"], steps[0]["setting"]) == ("fused", "rows 22 to 26"), "the default since that record"
    assert all(recorded_ms(*step) for step in scaling.STEPS)
    assert recorded_ms("nos", "nos") is None


def test_the_table_says_that_it_is_a_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "counted", lambda *given: [Collective(4, "gradients")])
    scaling.main(["--method", "darts", "--space", "nb201"])
    assert "MODEL, NOT MEASURED" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--method", "nos", "--space", "nos"], "pass --step-ms"),
        (["--method", "nos"], "given together"),
        (["--step-ms", "0"], "--step-ms must be positive, but is 0.0"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        scaling.main(arguments)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
