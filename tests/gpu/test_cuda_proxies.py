"""Zero-cost proxies on a CUDA device: the scores of the CPU, without waiting for the device."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from softcell.arch import sample
from softcell.methods.proxies import SUPERNET_PROXIES, Proxy, fisher, grad_norm, grasp, score_untrained, snip, zico
from softcell.spaces.execution import modules_only
from softcell.testing import tiny_space

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
]
DEVICE = "cuda"


def network(space: str, device: str) -> nn.Module:
    chosen = tiny_space(space)
    torch.manual_seed(0)
    return chosen.network(sample(chosen.layout(), 1), (3, 16, 16), 4).double().to(device)


def batch(device: str) -> tuple[Tensor, Tensor]:
    images = torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return images.to(device), (torch.arange(8) % 4).to(device)


@pytest.mark.parametrize("space", ["nb201", "darts", "nos", "fullattention"])
@pytest.mark.parametrize("proxy", SUPERNET_PROXIES)
def test_a_score_is_that_of_the_cpu(proxy: Proxy, space: str) -> None:
    expected = score_untrained(network(space, "cpu"), proxy, *batch("cpu"))
    found = score_untrained(network(space, DEVICE), proxy, *batch(DEVICE))
    # Jacobian covariance is -inf for these networks of NOS and full attention; SynFlow is NaN for the latter.
    assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize("function", [grad_norm, snip, grasp, fisher, zico])
def test_scores_of_gradients_never_wait(function: Callable[..., Tensor]) -> None:
    scored, (images, labels) = network("nb201", DEVICE).train(), batch(DEVICE)
    with modules_only():
        function(scored, scored, images, labels)
        try:
            torch.cuda.set_sync_debug_mode("error")
            found = function(scored, scored, images, labels)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert found.device.type == DEVICE and found.isfinite()
