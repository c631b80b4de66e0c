"""Both phases of a full-attention search on a CUDA device: recorded, never waiting, unaffected by other searches."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gpu_steps import continue_without_waiting, search_task, session, warmed

from softcell.arch import WeightMix
from softcell.engine.checkpoint import load_latest
from softcell.nn.attention import NonLocalAttention
from softcell.search import resolve, search
from softcell.search.run import FIRST
from softcell.seeds import search_seeds
from softcell.spaces import build_space
from softcell.spaces.execution import modules_only

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SMALL = {"layers": 1, "candidates": ["local_sa_k3_h4", "local_sa_k7_h8", "non_local_sa"]}
GIVEN: dict[str, Any] = {"method": "fullattention", "data": "digits", "space_settings": SMALL, "device": "cuda"}


@pytest.mark.parametrize("objective", ["context", "classify"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_step_of_either_phase_never_waits_and_can_be_recorded(objective: str, precision: str) -> None:
    recipe = resolve(GIVEN, {"objective": objective, "pretrain": {"epochs": 0}, "precision": precision})
    notes: list[Any] = []
    with session(precision) as opened:
        task = search_task(recipe, opened, notes)
        task.begin_epoch(0)
        ready = warmed(task, epoch=0)
        before = [p.detach().clone() for p in (*task.method.parameters(), *task.objective.parameters())]
        continue_without_waiting(task, ready)
        after = [*task.method.parameters(), *task.objective.parameters()]
        assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True)), "a recorded step learns"
    assert notes == []


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-3)])
def test_blocks_of_a_layer_together_are_the_blocks(dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    space = build_space("fullattention", {"layers": 2})
    supernet = space.supernet((3, 16, 16), 4).to("cuda", dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
    layout = space.layout()
    alpha = {table.name: torch.rand(table.shape, dtype=dtype, device="cuda") for table in layout.tables}
    x = torch.randn(4, 3, 16, 16, dtype=dtype, device="cuda").to(memory_format=torch.channels_last)
    state = {name: buffer.clone() for name, buffer in supernet.state_dict().items()}
    found = []
    for around in (modules_only, nullcontext):
        supernet.load_state_dict(state)
        with around():
            y = supernet(x, WeightMix(layout, alpha))
        found.append([y, *torch.autograd.grad(y.sin().sum(), list(supernet.parameters())), *supernet.buffers()])
        found[-1] = [part.detach().double() for part in found[-1]]
    for plain, together in zip(*found, strict=True):
        assert float((together - plain).norm()) <= tolerance * (float(plain.norm()) + 1)  # some are 0 but for rounding


@pytest.mark.parametrize("side", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("low", [0.0, -120.0])
def test_non_local_attention_has_the_gradients_of_its_formula_in_bfloat16(side: int, low: float) -> None:
    """Also where all logits are far below 0, and in memory that holds NaN: cuDNN's form has NaN for gradients there."""
    torch.manual_seed(0)
    width, n = 16, 8
    packed = 0.5 * torch.randn(n, 3 * width, side, side, device="cuda")
    packed[:, 0], packed[:, width] = 1.0, low  # the first product of every query with every key
    packed = packed.bfloat16().to(memory_format=torch.channels_last)
    pull = torch.randn(n, width, side, side, device="cuda").bfloat16()
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        x = packed.to(dtype, copy=True).requires_grad_()
        if dtype == torch.bfloat16:
            y = NonLocalAttention(width).attend(x)
        else:
            q, k, v = x.flatten(2).chunk(3, 1)
            y = (v @ torch.softmax(q.transpose(1, 2) @ k, 2).transpose(1, 2)).view(pull.shape)
        found.append([y.detach(), *torch.autograd.grad(y, x, pull.to(dtype))])
    for exact, rounded in zip(*found, strict=True):
        assert bool(rounded.isfinite().all())
        # The gradient of the first number of a query is low times a sum that is 0 but for rounding.
        assert float((rounded.double() - exact)[:, 1:].norm()) <= 0.03 * float(exact[:, 1:].norm())


def test_non_local_attention_never_uses_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed, own = [], torch.nn.functional.scaled_dot_product_attention

    def noting(*given: Any, **how: Any) -> torch.Tensor:
        allowed.append((torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()))
        return own(*given, **how)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    NonLocalAttention(8).attend(torch.randn(2, 24, 4, 4, device="cuda"))
    assert allowed == [(False, True)] and torch.backends.cuda.cudnn_sdp_enabled() == before


def test_concurrent_two_phase_searches_equal_separate_ones(tmp_path: Path) -> None:
    given = {**GIVEN, "epochs": 1, "pretrain": {"epochs": 1}, "deterministic": True, "precision": "float32"}
    result = search_seeds(resolve(given), tmp_path / "all", [0, 1])
    assert not result.errors
    for seed in (0, 1):
        search(resolve(given, {"seed": seed}), tmp_path / f"alone-{seed}")
        for part in ((), (FIRST,)):
            together = load_latest((tmp_path / "all" / f"seed-{seed}").joinpath(*part))
            alone = load_latest((tmp_path / f"alone-{seed}").joinpath(*part))
            assert together is not None and alone is not None
            for name in ("supernet", "method", "objective"):
                for key, value in alone.state["task"][name].items():
                    assert torch.equal(together.state["task"][name][key], value), (seed, part, name, key)
