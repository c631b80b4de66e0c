"""Grad-CAM (Selvaraju et al., 2017) of the feature map that a network's classifier reads, and of candidates.

`candidate_cams` gives Grad-CAM of the feature maps of every candidate of one choice of a supernet (IT-NAS, Figure 4).
In calibrating cells (NOS), attentions and dynamic kernels have no feature map of their own; the map that they add to
their node is used.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from softcell.arch import Live, Mix, Table, WeightMix
from softcell.spaces import Network, Supernet
from softcell.spaces.block import calibrates, watching


def grad_cam(network: Network, images: Tensor, classes: Tensor) -> Tensor | None:
    """The evidence for a class at each position of the last cell's output, [n, h, w] in 0..1.

    images: [n, c, h', w'], normalised. classes: int64 [n], the class to be explained for each image.
    None if the last cell's output has a single position. A map without positive evidence is all 0.
    """
    assert not network.training, "batch-norm must not mix the images of a batch"
    with torch.enable_grad():
        last = network.features(images)[-1].detach()
        if last.dim() != 4 or last.shape[2] * last.shape[3] < 2:
            return None
        last.requires_grad_()
        scores = network.head(last).gather(1, classes[:, None]).sum()  # images do not mix: one backward pass for all
        (gradient,) = torch.autograd.grad(scores, last)
    return _heat(gradient, last.detach())


class _Watched(Mix):
    """A mix that keeps the outputs of one choice at one site, and their combination."""

    def __init__(self, mix: Mix, site: int, choice: int) -> None:
        self._mix, self._place = mix, (site, choice)
        self.outputs: dict[int, Tensor] = {}
        self.combined: Tensor | None = None

    def live(self, site: int) -> Live | None:
        # Plain weights exist for all candidates, picked or not.
        watched = site == self._place[0] and isinstance(self._mix, WeightMix)
        return None if watched else self._mix.live(site)

    def meet(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> None:
        self._mix.meet(site, choice, self._kept(site, choice, outputs))

    def combine(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> Tensor | None:
        result = self._mix.combine(site, choice, self._kept(site, choice, outputs))
        if (site, choice) == self._place:
            self.combined = result
        return result

    def compete(self, site: int, outputs: Mapping[int, Mapping[int, Tensor | None]]) -> Tensor | None:
        if isinstance(self._mix, WeightMix):
            return super().compete(site, outputs)
        return self._mix.compete(site, {choice: self._kept(site, choice, own) for choice, own in outputs.items()})

    def _kept(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> Mapping[int, Tensor | None]:
        if (site, choice) != self._place:
            return outputs
        for k, x in outputs.items():
            if x is not None and k not in self.outputs:
                # Identity and shared pools give the same tensor to other edges: only the use by this edge counts.
                self.outputs[k] = x.view_as(x)
        return {k: None if x is None else self.outputs[k] for k, x in outputs.items()}


def candidate_cams(
    supernet: Supernet, mix: Mix, site: int, choice: int, images: Tensor, classes: Tensor
) -> dict[int, Tensor]:
    """The evidence for a class at each position of each candidate's output, at one site and choice, [n, h, w] in 0..1.

    images: [n, c, h', w'], normalised. classes: int64 [n]. Candidates that output zeros are left out. Under plain
    weights, all candidates have the gradient of their weighted sum, up to their own weight, which a map in 0..1 does
    not show; so a candidate of weight 0 has a map too.
    """
    assert not supernet.training, "batch-norm must not mix the images of a batch"
    table = supernet.layout.table(supernet.layout.sites[site])
    if calibrates(table):
        return _calibrating_cams(supernet, mix, table, site, choice, images, classes)
    watched = _Watched(mix, site, choice)
    with torch.enable_grad():
        scores = supernet(images.clone().requires_grad_(), watched).gather(1, classes[:, None]).sum()
        maps = watched.outputs
        if isinstance(mix, WeightMix) and watched.combined is not None:
            gradients = list(torch.autograd.grad(scores, [watched.combined], allow_unused=True)) * len(maps)
        else:
            gradients = list(torch.autograd.grad(scores, list(maps.values()), allow_unused=True))
    return {
        k: _heat(torch.zeros_like(x) if gradient is None else gradient, x.detach())
        for (k, x), gradient in zip(maps.items(), gradients, strict=True)
    }


def _calibrating_cams(
    supernet: Supernet, mix: Mix, table: Table, site: int, choice: int, images: Tensor, classes: Tensor
) -> dict[int, Tensor]:
    """`candidate_cams` where features, attentions and kernels arrive at a node (NOS, Eq 2-5).

    The map of a candidate is what it adds to its node: o(x) of a feature, base ⊙ A of an attention and base ⊛ D of a
    kernel, where base is the sum of the node's features, in both tiers. Its gradient is that of the sum it is added to:
    of base for a feature, which the node's calibrations read too, and of the node's value for the others. The weight,
    one positive number for all of an image, is left out: a map in 0..1 does not show it. Methods that make weights out
    of maps are explained with the weights as they are.
    """
    with torch.enable_grad(), watching(table, site, choice) as watch:
        scores = supernet(images.clone().requires_grad_(), mix).gather(1, classes[:, None]).sum()
        if watch.features is None or watch.value is None:
            return {}  # no feature arrives at the node
        to_features, to_value = torch.autograd.grad(
            scores, [watch.features, watch.value], allow_unused=True, materialize_grads=True
        )
    with torch.no_grad():
        return {k: _heat(to_features if is_feature else to_value, x) for k, (x, is_feature) in watch.added().items()}


def _heat(gradient: Tensor, maps: Tensor) -> Tensor:
    """Grad-CAM [n, h, w] in 0..1 from maps [n, c, h, w] and the gradient of a class's score."""
    importance = gradient.mean(dim=(2, 3), keepdim=True)  # eq. 1: alpha [n, channels, 1, 1]
    heat = torch.relu((importance * maps).sum(dim=1))  # eq. 2
    return heat / heat.amax(dim=(1, 2), keepdim=True).clamp_min(torch.finfo(heat.dtype).tiny)
