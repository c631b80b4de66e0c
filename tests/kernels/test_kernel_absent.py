"""Where Triton is absent: cells run module by module, and each kernel's function runs its plain twin."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import Tensor

from softcell.engine.distributed import World
from softcell.kernels import backend, local, norm, pool, taps
from softcell.nn.attention import LocalAttention
from softcell.search import resolve
from softcell.search.task import warn_if_unfused
from softcell.spaces import execution
from softcell.testing import tiny_space
from tests.helpers.kernel_cells import OneSite, build_cell, fuse, leaving, outcome, random_inputs, require_same
from tests.helpers.kernel_runs import without_tf32
from tests.helpers.picked_cells import inputs_of, picked
from tests.helpers.picked_cells import outcome as outcome_of_picked

FAMILIES: dict[str, Any] = {"compose": taps, "norm": norm, "pool": pool, "taps": taps}
NAMES = {
    "compose": {"compose", "compose_gradient"},
    "norm": {
        "finish_moments",
        "normalise",
        "gradient_sums",
        "normalise_gradient",
        "combine",
        "combine_gradient",
        "distribute_gradient",
    },
    "pool": {"pool", "convolve_and_pool", "gather_gradient"},
    "taps": {"convolve", "masked_input_gradient", "input_gradient", "weight_gradient"},
}
CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """Tensors of the CPU count as a GPU's, and what should be a Triton kernel is a twin that notes that it ran."""
    found: set[tuple[str, str]] = set()

    def kernels(family: str) -> Any:
        def noting(name: str) -> Any:
            twin = getattr(FAMILIES[family], f"{name}_reference")

            def run(*arguments: Any, **options: Any) -> None:
                found.add((family, name))
                twin(*arguments, **options)

            return run

        return types.SimpleNamespace(**{name: noting(name) for name in NAMES[family]})

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for module in FAMILIES.values():
        monkeypatch.setattr(module, "triton_kernels", kernels)
    return found


def lack(monkeypatch: pytest.MonkeyPatch, present: bool = False) -> None:
    monkeypatch.setattr(backend, "has_triton", lambda: present)
    monkeypatch.setattr(execution, "has_triton", lambda: present)


def of_a_cell(device: str = "cpu") -> dict[str, Tensor]:
    cell = build_cell("darts", 1).to(device)
    states, weights = random_inputs(cell, (7, 6), 2, torch.float32)
    inputs = [t.to(device).requires_grad_() for t in (*states, weights)]
    return outcome(cell, fuse(cell)(inputs[:-1], inputs[-1].flatten())[cell.inputs :], inputs)


def of_outputs_apart() -> dict[str, Tensor]:
    x = torch.randn(2, 3, 7, 6, generator=torch.Generator().manual_seed(3), requires_grad=True)
    _, *outputs = leaving("nb201", 0, 0, apart=True)([x])
    (gradient,) = torch.autograd.grad(sum(y.pow(3).sum() for y in outputs), x)  # type: ignore[arg-type]
    return {"apart": gradient}


def of_a_rectified_cell() -> dict[str, Tensor]:
    name = "space 1"
    x, factors = inputs_of(name, 3, 2, (5, 4))
    return outcome_of_picked(picked(name, 3, factors), x, factors, fused=True, dtype=torch.float32)


def test_every_function_runs_its_twin(called: set[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    lack(monkeypatch, present=True)
    expected = of_a_cell() | of_outputs_apart() | of_a_rectified_cell()
    assert called == {(family, name) for family, names in NAMES.items() for name in names}, "cells run all of them"
    called.clear()
    lack(monkeypatch)
    found = of_a_cell() | of_outputs_apart() | of_a_rectified_cell()
    assert not called
    require_same(found, expected, tolerance=0)


def test_local_attention_runs_its_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(local, "triton_kernels", lambda family: pytest.fail("Triton's kernels were requested"))
    lack(monkeypatch)
    torch.manual_seed(0)
    packed, rows, columns = torch.randn(2, 12, 5, 4), torch.randn(2, 2, 3), torch.randn(2, 2, 3)
    torch.testing.assert_close(local.attend_packed(packed, rows, columns), local._plainly(packed, rows, columns))
    assert LocalAttention(8, 3, 4)(torch.randn(2, 8, 6, 6)).isfinite().all()


def test_cells_on_a_gpu_run_their_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    there: Any = types.SimpleNamespace(device=CUDA, dtype=torch.float32, numel=lambda: 1)
    lack(monkeypatch, present=True)
    assert execution.kernels_serve(there)
    lack(monkeypatch)
    assert not execution.kernels_serve(there)


def test_a_search_on_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(device: torch.device = CUDA, *, size: int = 1, space: str = "nb201", **settings: Any) -> list[str]:
        notes: list[str] = []
        supernet = tiny_space(space).supernet((3, 32, 32), 10)
        warn_if_unfused(resolve({"space": space, **settings}), supernet, World(0, size, 0, device), notes.append)
        return notes

    lack(monkeypatch)
    (text,) = said()
    assert "Triton" in text and "module by module" in text and "pip install triton" in text
    assert said(CPU) == [] and said(fused=False) == [] and said(precision="float64") == []
    assert said(size=2) == [text], "cells are fused with several processes too"
    assert said(space="nos") == [text], "parts of these cells are fused"
    assert said(space="proxyless") == [], "no candidate here has a fused form"
    lack(monkeypatch, present=True)
    assert said() == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@without_tf32()
def test_on_a_gpu_nothing_asks_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    lack(monkeypatch)
    for module in (*FAMILIES.values(), local):
        monkeypatch.setattr(module, "triton_kernels", lambda family: pytest.fail("Triton's kernels were requested"))
    twins, plain = of_a_cell("cuda"), of_a_cell("cpu")
    require_same({k: v.cpu() for k, v in twins.items()}, plain, tolerance=1e-3)
    cell = build_cell("darts", 1).cuda()
    states, weights = random_inputs(cell, (7, 6), 2, torch.float32)
    inputs = [t.cuda().requires_grad_() for t in (*states, weights)]
    nodes = cell(inputs[:-1], OneSite(inputs[-1]), 0)[cell.inputs :]
    require_same({k: v.cpu() for k, v in outcome(cell, nodes, inputs).items()}, plain, tolerance=1e-3)
