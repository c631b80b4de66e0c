"""Searches with IT-NAS: one pass selects, resuming changes nothing, penalties steer, a planted candidate is found."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softcell.api import read_genotype
from softcell.app.report.runs import read_run
from softcell.arch import Cell, Genotype
from softcell.data import load, split
from softcell.data.batches import Feeds
from softcell.engine.task import Note, Stepped
from softcell.errors import UserError
from softcell.methods import METHODS
from softcell.nn.candidates import candidate
from softcell.search import resolve, search
from softcell.spaces import build_space
from softcell.spaces.costs import count_genotype
from tests.helpers.search_toys import remains, same, settings, state_of, write_data


def recipe(data: Path, space: str = "nb201", **changes: Any) -> Any:
    return resolve(settings(space, data, method="itnas", architecture={"optimiser": "weights", "clip": 5.0}), changes)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "data.npz")


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    search(recipe(data, epochs=2), folder)
    return folder


def test_margins_are_in_the_results_and_the_halves_are_halves(finished: Path) -> None:
    manifest = json.loads((finished / "run.json").read_text())
    assert manifest["recipe"]["split"] == {"weights": 0.5, "validation": 0.5}
    assert manifest["recipe"]["regime"] == "single-level"
    selection = manifest["results"]["selection"]
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert selection["images"] == rows[-1]["val_count"], "every image of the validation half, once"
    last = json.loads((finished / "architecture.jsonl").read_text().splitlines()[-1])
    for edge, probabilities in zip(selection["edges"]["cell"], last["tables"]["cell"], strict=True):
        assert edge["margin"] >= 0
        assert edge["standard_error"] > 0
        assert 0 < edge["strength"] <= max(probabilities), "the IT keeps some attention to itself"
    assert selection["close_edges"] == sum(edge["close"] for edge in selection["edges"]["cell"])
    picks = Genotype.load(finished).cells["cell"].picks
    assert [pick.op for pick in picks] == [edge["best"] for edge in selection["edges"]["cell"]]


def test_the_rows_of_every_site_are_in_the_record(finished: Path) -> None:
    lines = [json.loads(line) for line in (finished / "attention.jsonl").read_text().splitlines()]
    architecture = [json.loads(line) for line in (finished / "architecture.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [0, 1]
    for line, other in zip(lines, architecture, strict=True):
        own = line["tables"]["cell"]
        means = torch.tensor(own["mean"], dtype=torch.float64)
        assert own["sites"] == [0, 1, 2] and own["stages"] == [1, 2, 3] and means.shape == (3, 6, 5)
        assert float((means[0] - means[1]).abs().max()) > 1e-4, "rows of single sites, not their mean"
        whole = means.mean(0)
        expected = torch.tensor(other["tables"]["cell"], dtype=torch.float64)
        torch.testing.assert_close(whole / whole.sum(1, keepdim=True), expected, rtol=1e-6, atol=1e-7)
        assert bool((torch.tensor(own["log"], dtype=torch.float64) <= means.log() + 1e-8).all()), "Jensen"


def test_values_and_feed_forward_that_do_not_learn_stay_as_they_began(data: Path, tmp_path: Path) -> None:
    plain = {"learned_values": False, "feed_forward": False, "token_norm": False}
    search(recipe(data, epochs=1, method_settings=plain), tmp_path / "run")
    state = state_of(tmp_path / "run")["method"]
    values = [value for name, value in state.items() if name.endswith("value.weight")]
    assert values and all(torch.equal(v.flatten(1), torch.eye(len(v))) for v in values)
    assert not any(value.any() for name, value in state.items() if ".ffn.2." in name)
    assert not any(".norm." in name for name in state)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["results"]["selection"]["images"]


def test_nothing_is_recorded_without_observation(data: Path, tmp_path: Path) -> None:
    search(recipe(data, epochs=3, validate_every=2), tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "attention.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2]
    rows = [json.loads(line) for line in (tmp_path / "run" / "architecture.jsonl").read_text().splitlines()]
    assert [row.get("read", True) for row in rows] == [False, True, True]
    with pytest.raises(UserError, match="ran none in that epoch; it did after epoch 2 to 3"):
        read_genotype(f"{tmp_path / 'run'}@1")
    assert [row["epoch"] for row in read_run(tmp_path / "run").architecture] == [1, 2]


def test_a_look_at_another_batch_size_selects_the_same(data: Path, finished: Path) -> None:
    """The trained state, looked at in batches of 16 (in the search) and of 5."""
    stored = json.loads((finished / "run.json").read_text())["results"]["selection"]["edges"]["cell"]
    state = state_of(finished)
    space = build_space("nb201", {"cells_per_stage": 1, "channels": 2})
    supernet = space.supernet((1, 8, 8), 3)
    kind = METHODS.get("itnas")
    method = kind.for_supernet(kind.Settings(), supernet)  # type: ignore[type-var]
    supernet.load_state_dict(state["supernet"])
    method.load_state_dict(state["method"])
    before = method.selection.margins().edges["cell"]  # type: ignore[attr-defined]
    assert [m.to_dict() for m in before] == stored, "the state holds what was selected from"
    dataset = load(str(data))
    parts = split(dataset.train, {"weights": 0.5, "validation": 0.5}, 0)
    batches = Feeds(dataset, 5, 0, torch.device("cpu"), torch.float32).plain(dataset.train, parts["validation"])
    supernet.eval()
    ((mix, _),) = method.selection.passes()
    with torch.no_grad():
        for batch in batches.epoch(0):
            supernet(batch.images, mix)
    for old, new in zip(before, method.selection.margins().edges["cell"], strict=True):  # type: ignore[attr-defined]
        assert (old.best, old.runner_up) == (new.best, new.runner_up)
        assert new.margin == pytest.approx(old.margin, rel=1e-3, abs=1e-6)
        assert new.standard_error == pytest.approx(old.standard_error, rel=1e-3)


def test_a_broken_search_ends_as_if_it_never_was(data: Path, finished: Path, tmp_path: Path) -> None:
    def stop(event: object) -> None:
        if isinstance(event, Stepped) and (event.epoch, event.step) == (1, 1):
            os.kill(os.getpid(), signal.SIGTERM)

    broken = search(recipe(data, epochs=2), tmp_path / "broken", on_event=stop)
    assert broken.genotype is None, "it was interrupted within the second epoch"
    search(recipe(data, epochs=2), tmp_path / "broken", resume=True)
    assert remains(tmp_path / "broken") == remains(finished)
    assert same(state_of(tmp_path / "broken"), state_of(finished))


def test_selection_uses_the_validation_half_even_if_accuracy_is_measured_elsewhere(data: Path, tmp_path: Path) -> None:
    parts = {"weights": 32, "validation": 20, "held": 12}
    events: list[object] = []
    search(recipe(data, split=parts, epochs=1), tmp_path / "run", on_event=events.append)
    messages = [event.text for event in events if isinstance(event, Note)]
    assert any("selection from 20 images" in text and "of 6 edges are close" in text for text in messages)
    results = json.loads((tmp_path / "run" / "run.json").read_text())["results"]
    assert (results["selection"]["images"], results["val_split"]) == (20, "held")


def test_a_resource_penalty_moves_attention_to_cheap_candidates(data: Path, tmp_path: Path) -> None:
    costs = {}
    for weight in (0.0, 30.0):
        changes = {"resource": {"weight": weight, "form": "linear"}, "epochs": 2}
        rows = search(recipe(data, **changes), tmp_path / str(weight)).metrics
        costs[weight] = rows[-1]["expected_parameters"]
    assert costs[30.0] < 0.8 * costs[0.0]


class _Noise(nn.Module):
    """Normal noise of the input's shape: it carries nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.randn_like(x)


def test_attention_leaves_uniform_and_finds_the_planted_candidate(tmp_path: Path) -> None:
    """Cells of one edge; of four candidates one passes the image on and three make noise, wherever it stands."""
    for number in range(3):
        candidate(f"noise_{number}")(lambda spec: _Noise())
    images = write_data(tmp_path / "data.npz", train=192)
    for place in (0, 2):
        names = ["noise_0", "noise_1", "noise_2"]
        names.insert(place, "skip_connect")
        given = settings("nb201", images, method="itnas", epochs=8, batch_size=32)
        given["space_settings"] = {"cells_per_stage": 1, "channels": 4, "nodes": 2, "candidates": names}
        result = search(resolve(given, {"architecture": {"optimiser": "weights"}}), tmp_path / str(place))
        found = json.loads((result.folder / "run.json").read_text())["results"]["selection"]["edges"]["cell"][0]
        assert found["best"] == "skip_connect"
        assert not found["close"]
        assert found["strength"] > 1.5 * 0.2, "uniform is one fifth, the IT being the fifth token"
        assert result.metrics[-1]["val_accuracy"] > 0.5


def test_single_path_training_of_a_chain_ends_in_a_selection_and_leaves_norms_alone(data: Path, tmp_path: Path) -> None:
    chain = {"width": 0.25, "depths": (2, 1, 1, 1, 1, 1), "head": 8, "kernels": (3,)}
    given = {**settings("nb201", data, method="itnas"), "space": "proxyless", "space_settings": chain}
    more = {"method_settings": {"paths": "single"}, "architecture": {"optimiser": "weights"}, "epochs": 1}
    whole = search(resolve(given, more), tmp_path / "run")
    results = json.loads((tmp_path / "run" / "run.json").read_text())["results"]
    assert results["selection"]["images"] == whole.metrics[-1]["val_count"]
    edges = results["selection"]["edges"]["chain"]
    assert len(edges) == 7
    assert all(edge["margin"] >= 0 for edge in edges)
    state = state_of(tmp_path / "run")["supernet"]
    tracked = [int(value) for name, value in state.items() if name.endswith("num_batches_tracked")]
    assert max(tracked) == 2, "two steps trained: recalibrated statistics are restored"


@pytest.mark.exhaustive
def test_attention_selects_within_a_budget_what_no_other_chain_beats(data: Path, tmp_path: Path) -> None:
    """All 192 chains, counted one by one: none within the limit has a larger sum of attention."""
    chain = {"width": 0.25, "depths": (2, 1, 1, 1, 1, 1), "head": 8, "kernels": (3,)}
    given = {**settings("nb201", data, method="itnas"), "space": "proxyless", "space_settings": chain}
    more = {"method_settings": {"paths": "single"}, "architecture": {"optimiser": "weights"}, "epochs": 1}
    free = search(resolve(given, more), tmp_path / "free")
    sizes = {"network": {key: chain[key] for key in ("width", "head", "kernels")}}
    rows = json.loads((tmp_path / "free" / "attention.jsonl").read_text().splitlines()[-1])["tables"]["chain"]["mean"]
    space = build_space("proxyless", chain)
    layout = space.layout()
    (table,) = layout.tables
    counted = {}
    for picks in layout.rule.enumerate(table):  # type: ignore[attr-defined]
        genotype = replace(free.genotype, cells={"chain": Cell(picks, table.output)})
        value = sum(
            rows[0][i][c.candidates.index(p.op)] for i, (c, p) in enumerate(zip(table.choices, picks, strict=True))
        )
        counted[genotype] = value, count_genotype(space, genotype, (1, 8, 8), 3).multiply_adds
    cheap, dear = min(cost for _, cost in counted.values()), counted[free.genotype][1]
    assert len(counted) == 192 and cheap < dear
    for share in (0.3, 0.7):
        limit = cheap + share * (dear - cheap)
        best = max(value for value, cost in counted.values() if cost <= limit)
        out = tmp_path / str(share)
        found = search(resolve(given, more, {"resource": {"max_flops": limit, **sizes}}), out)
        value, cost = counted[found.genotype]
        assert cost <= limit and value == pytest.approx(best, abs=1e-6)
        results = json.loads((out / "run.json").read_text())["results"]
        assert results["budget_met"] is True and results["derived_flops"] == cost
        own = Genotype.from_dict({**free.genotype.to_dict(), "cells": results["within_budget"]["own"]})
        assert own == free.genotype and results["within_budget"]["own_flops"] == dear
    two = {"resource": {"max_flops": dear, "max_params": 10_000, **sizes}}
    with pytest.raises(UserError, match="supports one limit"):
        search(resolve(given, more, two), tmp_path / "two")
    with pytest.raises(UserError, match="keeps some of its edges"):
        search(recipe(data, "darts", method_settings={"paths": "single"}, resource={"max_flops": 1e6}), tmp_path / "no")
