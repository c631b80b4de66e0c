"""Compiled regions give what plain ones give; where nothing can be compiled, the reason is told once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from softcell.engine import compiled
from softcell.kernels.mix import weighted_sum
from softcell.methods.itnas.transformer import LiteTransformer
from softcell.search import resolve, search

PATIENCE = "engine=compile: the first steps take minutes, in which cells are compiled"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    # The whole of the compiler but its code generator, which needs a C++ compiler and minutes.
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    loggers = [logging.getLogger(name) for name in ("torch._dynamo", "torch._inductor")]
    before = [list(logger.handlers) for logger in loggers]
    with torch._dynamo.config.patch(recompile_limit=8, suppress_errors=False):
        yield
    for logger, handlers in zip(loggers, before, strict=True):
        logger.handlers = handlers


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
                "split": {"weights": 512, "validation": 256},  # whole batches: one shape to compile for
                "space_settings": {
                    "cells_per_stage": 1,
                    "channels": 2,
                    "nodes": 2,
                    "candidates": ["none", "nor_conv_1x1"],
                },
            }
        )
        folder = tmp_path / f"run-{len(losses)}"  # its name may stand in a note
        found = search(recipe, folder, on_event=lambda event: notes.append(getattr(event, "text", None)))
        losses[engine] = found.metrics[-1]["train_loss"]
    assert losses["compile"] == pytest.approx(losses["eager"], rel=1e-5)
    plain = [text.replace(str(tmp_path), "") for text in notes if text]
    assert [text for text in plain if "compile" in text] == [PATIENCE], "and nothing that went wrong"


def test_lite_transformers_of_one_shape_are_compiled_once_and_whole() -> None:
    outputs = {0: None, **{k: torch.randn(2, 4, 8, 8) for k in (1, 2)}}
    modules = [LiteTransformer((4, 8, 8), 3) for _ in range(3)]
    expected = [module(outputs) for module in modules]
    assert compiled.compile_regions(modules, [].append)
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
    assert list(network.state_dict()) == before and calls == [PATIENCE]


class Chooses(nn.Module):
    """Another graph for every number that it is called with."""

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return x * number


def test_what_the_compiler_gives_up_is_told_once_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiled, "VARIANTS", 2)
    told: list[str] = []
    region = Chooses()
    with torch._dynamo.config.patch(recompile_limit=2):
        assert compiled.compile_regions([region], told.append)
        for number in range(2, 9):
            assert region(torch.ones(3), number).tolist() == [number] * 3
    first, second = told
    assert first == PATIENCE and "gave up" in second and "recompile_limit" in second and "\n" not in second
    assert "dynamo" not in capfd.readouterr().err


def test_whoever_asks_for_the_logs_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_LOGS", "recompiles")
    before = list(logging.getLogger("torch._dynamo").handlers)
    assert compiled.compile_regions([Chooses()], [].append)
    assert logging.getLogger("torch._dynamo").handlers == before


def test_a_weighted_sum_stays_in_the_graph() -> None:
    """One graph per number of terms, whatever their weights; gradients are those of the plain sum."""
    torch._dynamo.utils.counters.clear()
    run = torch.compile(weighted_sum, backend="aot_eager", dynamic=False)
    for number in (1, 2, 5, 5, 2):
        x = [torch.randn(2, 3, requires_grad=True) for _ in range(number)]
        weights = torch.rand(number, requires_grad=True)
        found, expected = (
            [y, *torch.autograd.grad(y.square().sum(), [weights, *x])]
            for y in (run(x, weights), weighted_sum(x, weights))
        )
        torch.testing.assert_close(found, expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    assert not torch._dynamo.utils.counters["graph_break"]


def test_the_reason_is_told_where_nothing_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "no such compiler")
    told: list[str] = []
    network = nn.Sequential(nn.Linear(3, 3))
    plain = network[0].forward
    assert not compiled.compile_regions(network, told.append)
    assert network[0].forward == plain
    assert len(told) == 1 and "no such compiler" in told[0] and "going on without" in told[0]
    assert not compiled.compile_regions([], told.append) and "no regions" in told[1]
