"""The NAS-Bench-201 space: its networks have the parameters listed in the benchmark's table."""

from __future__ import annotations

import csv
import gzip
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softcell.arch import count
from softcell.arch.notation import from_nb201, to_nb201
from softcell.kernels.cell import Program, mixed_cell
from softcell.nn.stochastic import DropPath
from softcell.spaces import Network, Space, _fused_cell, build_space, execution
from softcell.spaces.execution import fused_networks, is_modules_only

TABLE = "nb201_200epochs.csv.gz"


def table_file() -> Path | None:
    """The benchmark's table: at SOFTCELL_NB201, or next to the repository."""
    given = os.environ.get("SOFTCELL_NB201")
    place = Path(given) if given else Path(__file__).parents[2].parent / "shared" / "data" / "nb201"
    file = place / TABLE if place.is_dir() else place
    return file if file.is_file() else None


@pytest.fixture(scope="module")
def rows() -> list[tuple[str, int]]:
    file = table_file()
    if file is None:
        pytest.skip(f"no table of NAS-Bench-201: set SOFTCELL_NB201 to {TABLE} or its folder")
    with gzip.open(file, "rt", encoding="utf-8", newline="") as stream:
        return [(row["arch"], int(row["params_cifar10"])) for row in csv.DictReader(stream)]


@pytest.fixture(scope="module")
def space() -> Space:
    return build_space("nb201", {"cells_per_stage": 5, "channels": 16})


def parameters(space: Space, text: str) -> int:
    with torch.device("meta"):
        network = space.network(from_nb201(text), (3, 32, 32), 10)
    return sum(p.numel() for p in network.parameters())


def test_a_fixed_sample_of_networks_has_the_parameters_of_the_table(rows: list[tuple[str, int]], space: Space) -> None:
    sample = rows[::521]
    assert len(sample) == 30
    assert {text: parameters(space, text) for text, _ in sample} == dict(sample)


@pytest.mark.exhaustive
def test_all_networks_have_the_parameters_of_the_table(rows: list[tuple[str, int]], space: Space) -> None:
    wrong = [text for text, expected in rows if parameters(space, text) != expected]
    assert not wrong


def test_the_table_holds_every_architecture_of_the_space_once(rows: list[tuple[str, int]], space: Space) -> None:
    known = {text for text, _ in rows}
    assert len(rows) == len(known) == count(space.layout()) == 15_625
    candidates = set(space.layout().tables[0].choices[0].candidates)
    assert all({pick.op for pick in from_nb201(text).cells["cell"].picks} <= candidates for text in known)


def test_parameters_of_two_networks_match_a_manual_count(space: Space) -> None:
    """What surrounds the cells, and what 3×3 convolutions on all six edges add; no table needed."""
    stem, last = 3 * 16 * 9 + 32, 2 * 64 + 64 * 10 + 10
    reductions = sum(a * b * 9 + 2 * b + b * b * 9 + 2 * b + a * b for a, b in ((16, 32), (32, 64)))
    empty = "|none~0|+|none~0|skip_connect~1|+|avg_pool_3x3~0|none~1|none~2|"
    assert parameters(space, empty) == stem + last + reductions
    full = to_nb201(
        from_nb201("+".join("|" + "|".join(f"nor_conv_3x3~{s}" for s in range(t)) + "|" for t in (1, 2, 3)))
    )
    cells = 5 * 6 * sum(c * c * 9 + 2 * c for c in (16, 32, 64))
    assert parameters(space, full) == stem + last + reductions + cells


def test_stages_have_the_published_widths_and_resolutions(space: Space) -> None:
    with torch.device("meta"):
        network = space.network(from_nb201("|none~0|+|none~0|none~1|+|skip_connect~0|none~1|none~2|"), (3, 32, 32), 10)
        features = network.features(torch.empty(1, 3, 32, 32))
    assert [tuple(f.shape[1:]) for f in features] == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]


# --- fused cells ---

POOLED = "|nor_conv_1x1~0|+|avg_pool_3x3~0|skip_connect~1|+|avg_pool_3x3~0|none~1|nor_conv_3x3~2|"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells are fused on the CPU too, by the kernels' plain twins."""
    monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())


def small_network(text: str = POOLED, **settings: Any) -> Network:
    torch.manual_seed(0)
    small = build_space("nb201", {"cells_per_stage": 2, "channels": 3, **settings})
    return small.network(from_nb201(text), (3, 8, 8), 5).double()


def steps(network: Network, *, training: bool) -> dict[str, Tensor]:
    """Logits, gradients and buffers after two passes."""
    torch.manual_seed(1)
    network.train(training)
    for _ in range(2):
        network.zero_grad()
        logits = network(torch.randn(4, 3, 8, 8, dtype=torch.float64))
        logits.square().sum().backward()
    found = {"logits": logits.detach()}
    found |= {name: p.grad for name, p in network.named_parameters() if p.grad is not None}
    return found | dict(network.named_buffers())


@pytest.mark.parametrize("training", [True, False])
def test_a_fused_network_equals_its_modules(training: bool, served: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fused, modules = small_network(), small_network()
    ran = 0

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal ran
        ran += 1
        return mixed_cell(*given, **named)

    monkeypatch.setattr(_fused_cell, "mixed_cell", counted)
    with fused_networks():
        mine = steps(fused, training=training)
    assert ran == 2 * 6
    theirs = steps(modules, training=training)
    assert ran == 2 * 6, "without the context modules run"
    assert mine.keys() == theirs.keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(mine[name], expected, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("frozen_first", [False, True])
def test_norms_of_a_fused_network_may_be_frozen_at_any_time(frozen_first: bool, served: None) -> None:
    fused, modules = small_network().train(), small_network().train()
    for frozen in (frozen_first, not frozen_first, frozen_first):
        x, found = torch.randn(4, 3, 8, 8, dtype=torch.float64), []
        for network in (fused, modules):
            for cell in network.cells:  # type: ignore[union-attr]
                norms = [module for module in cell.modules() if isinstance(module, nn.BatchNorm2d)]
                norms[-1].train(not frozen)
            with fused_networks() if network is fused else nullcontext():
                found.append([network(x), *network.buffers()])
        for mine, expected in zip(*found, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-8, atol=1e-10)
        for cell in fused.cells:  # type: ignore[union-attr]
            assert (cell.fused_affine() is None) is frozen  # type: ignore[operator]


def test_cells_of_a_pass_draw_their_factors_together(served: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each choice of a cell gets a factor of its own, identities none."""
    network = small_network()
    network.use_drop_path(0.5)
    drawn: list[int] = []

    def factors(drop_path: DropPath, x: Tensor, paths: int) -> Tensor:
        drawn.append(paths)
        return torch.arange(1.0, paths + 1, dtype=x.dtype)[:, None].expand(paths, len(x))

    given: list[Tensor] = []

    def noted(program: Program, *rest: Any, **named: Any) -> Any:
        given.append(rest[4])
        return mixed_cell(program, *rest, **named)

    monkeypatch.setattr(DropPath, "factors", factors)
    monkeypatch.setattr(_fused_cell, "mixed_cell", noted)
    with fused_networks():
        network.train()(torch.randn(4, 3, 8, 8, dtype=torch.float64))
        network.eval()(torch.randn(4, 3, 8, 8, dtype=torch.float64))
        assert drawn == [4 * 6]
        assert [None if one is None else one[:, 0].tolist() for one in given] == [
            *([1.0, *range(4 * i + 1, 4 * i + 5)] for i in range(6)),
            *[None] * 6,
        ]
        network.use_drop_path(0.0)
        network.train()(torch.randn(4, 3, 8, 8, dtype=torch.float64))
    assert drawn == [4 * 6]


def test_search_forms_and_cells_without_convolutions_run_module_by_module(served: None) -> None:
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    skips = small_network("|skip_connect~0|+|avg_pool_3x3~0|skip_connect~1|+|none~0|none~1|skip_connect~2|")
    small = build_space("nb201", {"cells_per_stage": 1, "channels": 4, "bottleneck": 2})
    narrow = small.network(from_nb201(POOLED), (3, 8, 8), 5, search_form=True).double()
    for network in (skips, narrow):
        network.eval()
        with fused_networks():
            mine = network(x)
        torch.testing.assert_close(mine, network(x), rtol=0, atol=0)
        assert all(cell.fused_affine() is None for cell in network.cells)  # type: ignore[union-attr, operator]
