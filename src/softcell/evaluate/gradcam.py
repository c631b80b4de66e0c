"""Where a network looked: Grad-CAM (Selvaraju et al., 2017) of the feature map that the classifier reads."""

from __future__ import annotations

import torch
from torch import Tensor

from softcell.spaces import Network


def grad_cam(network: Network, images: Tensor, classes: Tensor) -> Tensor | None:
    """How much each place of the last cell's output speaks for a class, [n, h, w] in 0..1.

    images: [n, c, h', w'], normalised. classes: int64 [n], the class to be explained for each image.
    None where the last cell has no places to tell apart. A map without any positive evidence is all 0.
    """
    assert not network.training, "batch-norm must not mix the images of a batch"
    with torch.enable_grad():
        last = network.features(images)[-1].detach()
        if last.dim() != 4 or last.shape[2] * last.shape[3] < 2:
            return None
        last.requires_grad_()
        scores = network.head(last).gather(1, classes[:, None]).sum()  # images do not mix: one backward pass for all
        (gradient,) = torch.autograd.grad(scores, last)
    importance = gradient.mean(dim=(2, 3), keepdim=True)  # eq. 1: alpha [n, channels, 1, 1]
    heat = torch.relu((importance * last.detach()).sum(dim=1))  # eq. 2
    return heat / heat.amax(dim=(1, 2), keepdim=True).clamp_min(torch.finfo(heat.dtype).tiny)
