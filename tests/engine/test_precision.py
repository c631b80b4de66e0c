"""Computing in bfloat16 while weights stay in float32."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from softcell.engine.session import in_precision
from softcell.nn.pool import AveragePool
from softcell.search import resolve, search


def test_a_step_computes_in_bfloat16_and_keeps_float32_weights() -> None:
    layer, seen = nn.Linear(4, 4), []

    def step(x: torch.Tensor) -> None:
        seen.append(layer(x).dtype)

    for precision in ("float32", "bfloat16"):
        in_precision(step, precision, torch.device("cpu"))(torch.randn(2, 4))
    assert seen == [torch.float32, torch.bfloat16]
    assert layer.weight.dtype == torch.float32


@pytest.mark.parametrize("method", ["darts", "random"])
def test_a_search_in_bfloat16_ends_near_one_in_float32(tmp_path: Path, method: str) -> None:
    losses = {}
    for precision in ("float32", "bfloat16"):
        settings = {"samples": 1} if method == "random" else {}
        recipe = resolve(
            {"method": method, "space": "nb201", "epochs": 1, "precision": precision, "method_settings": settings}
        )
        found = search(recipe, tmp_path / precision)
        losses[precision] = found.metrics[-1]["train_loss"]
    assert losses["float32"] != losses["bfloat16"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none")
@pytest.mark.parametrize("stride", [1, 2])
def test_the_average_pool_has_the_gradient_of_the_cpu_on_a_gpu(stride: int) -> None:
    pool = AveragePool(3, stride, 1, count_include_pad=False)
    x = torch.randn(2, 4, 8, 6, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    here, there = x.clone().requires_grad_(), x.cuda().requires_grad_()
    grad = torch.randn_like(F.avg_pool2d(x, 3, stride, 1))
    (expected,) = torch.autograd.grad(pool(here), here, grad)
    (found,) = torch.autograd.grad(pool(there), there, grad.cuda())
    torch.testing.assert_close(found.cpu(), expected)
