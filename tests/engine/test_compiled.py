"""Compiled regions give what plain ones give; where nothing can be compiled, the reason is told once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from softcell.engine import compiled
from softcell.nn.lite_transformer import LiteTransformer
from softcell.search import resolve, search


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    # The whole of the compiler but its code generator, which needs a C++ compiler and minutes.
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    with torch._dynamo.config.patch(recompile_limit=8, suppress_errors=False):
        yield


@pytest.mark.parametrize("method", ["snas", "itnas"])
def test_a_compiled_search_ends_as_a_plain_one(method: str, tmp_path: Path) -> None:
    losses, notes = {}, []
    for engine in ("eager", "compile"):
        recipe = resolve(
            {
                "space": "nb201",
                "method": method,
                "epochs": 1,
                "engine": engine,
                "batch_size": 256,
                "space_settings": {
                    "cells_per_stage": 1,
                    "channels": 2,
                    "nodes": 2,
                    "candidates": ["none", "nor_conv_1x1"],
                },
            }
        )
        found = search(recipe, tmp_path / engine, on_event=lambda event: notes.append(getattr(event, "text", None)))
        losses[engine] = found.metrics[-1]["train_loss"]
    assert losses["compile"] == pytest.approx(losses["eager"], rel=1e-5)
    assert not [text for text in notes if text and "compile" in text]


def test_lite_transformers_of_one_shape_are_compiled_once_and_whole() -> None:
    outputs = {0: None, **{k: torch.randn(2, 4, 8, 8) for k in (1, 2)}}
    modules = [LiteTransformer((4, 8, 8), 3) for _ in range(3)]
    expected = [module(outputs) for module in modules]
    assert compiled.compile_regions(modules, pytest.fail)
    torch._dynamo.utils.counters.clear()
    for module, plain in zip(modules, expected, strict=True):
        torch.testing.assert_close(module(outputs), plain)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


def test_regions_are_compiled_in_place_and_keep_their_names() -> None:
    network = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    before, x = list(network.state_dict()), torch.randn(2, 3)
    expected = network(x)
    calls: list[str] = []
    assert compiled.compile_regions(network, calls.append)
    assert type(network[0].forward).__name__ != "method", "the region's forward is the compiled one"
    torch.testing.assert_close(network(x), expected)
    assert list(network.state_dict()) == before and calls == []


def test_the_reason_is_told_where_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "no such compiler")
    told: list[str] = []
    network = nn.Sequential(nn.Linear(3, 3))
    plain = network[0].forward
    assert not compiled.compile_regions(network, told.append)
    assert network[0].forward == plain
    assert len(told) == 1 and "no such compiler" in told[0] and "going on without" in told[0]
    assert not compiled.compile_regions([], told.append) and "no regions" in told[1]
