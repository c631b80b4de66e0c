"""Gradients of outputs of fused cells that several cells, a tower, a loss or a hook read.

TRITON_INTERPRET=1 pytest tests/spaces/test_derived_readers.py
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softcell.arch import notation
from softcell.kernels import derived
from softcell.spaces import Network, build_space, execution
from softcell.spaces.execution import fused_networks, is_modules_only, modules_only
from tests.helpers.kernel_runs import DEVICE, INTERPRETED, MARKS
from tests.helpers.twin_kernels import use_twin_kernels
from tests.reference.published_genotypes import DARTS_V2


def network_of(cells: int, dtype: torch.dtype, *, auxiliary: bool = True) -> Network:
    torch.manual_seed(0)
    network = build_space("darts", {"cells": cells, "channels": 4}).network(
        notation.parse(DARTS_V2), (3, 16, 16), 10, auxiliary=auxiliary
    )
    network.drop_path.probability = 0.0
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    return network.to(dtype).train()


def gradients(network: Network, images: Tensor, *, fused: bool, reads: str) -> list[Tensor]:
    """Of outputs of cells and of parameters, computed together; reads: what the loss reads."""
    with fused_networks() if fused else modules_only():
        maps = network.features(images)
        loss = network.head(maps[-1]).square().sum()
    if reads == "maps":
        loss = loss + sum((x.square().mean() for x in maps), start=loss.new_zeros(()))
    wanted = [*maps, *(p for p in network.parameters() if p.requires_grad)]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((a.double().cpu() - b.cpu()).norm() / (b.norm().cpu() + 1e-9)) for a, b in pairs)


@pytest.fixture
def rooms(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether backward passes of cells continued in the buffer that a reader of their nodes had begun."""
    found: list[bool] = []
    begins = derived._begins

    def noted(*given: Any) -> bool:
        found.append(begins(*given))
        return found[-1]

    monkeypatch.setattr(derived, "_begins", noted)
    return found


class TestTwinKernels:
    """On a CPU and in float64, through everything but the kernels."""

    @pytest.fixture(autouse=True)
    def _on_a_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use_twin_kernels(monkeypatch)

    @pytest.mark.parametrize("cells", [3, 4, 5, 6])
    def test_networks_with_a_tower_equal_their_modules(self, cells: int, rooms: list[bool]) -> None:
        network = network_of(cells, torch.float64)
        modules, images = copy.deepcopy(network), torch.randn(2, 3, 16, 16, dtype=torch.float64)
        found = []
        for own, context in ((network, fused_networks()), (modules, modules_only())):
            with context:
                logits, auxiliary = own.forward_with_auxiliary(images)
                assert auxiliary is not None
                loss = logits.square().sum() + auxiliary.square().sum()
            found.append(list(torch.autograd.grad(loss, list(own.parameters()))))
        assert largest_error(*found) < 1e-8
        # The tower at the end is another reader of the last cell, which no cell passes on to it.
        assert rooms == [True] * (cells - 1)

    @pytest.mark.parametrize("reads", ["logits", "maps"])
    def test_gradients_of_maps_are_complete(self, reads: str, rooms: list[bool]) -> None:
        """With a loss on maps they have a further reader, and cells continue in a buffer of their own."""
        network = network_of(5, torch.float64, auxiliary=False)
        modules, images = copy.deepcopy(network), torch.randn(2, 3, 16, 16, dtype=torch.float64)
        mine = gradients(network, images, fused=True, reads=reads)
        assert largest_error(mine, gradients(modules, images, fused=False, reads=reads)) < 1e-8
        # The maps are the outputs of the first, the third and the last of five cells.
        assert rooms == ([True] * 4 if reads == "logits" else [True, False, True, False])

    @pytest.mark.parametrize("kind", ["replaced", "scaled in place", "seen"])
    def test_hooks_on_maps(self, kind: str) -> None:
        network = network_of(4, torch.float64, auxiliary=False)
        modules, images = copy.deepcopy(network), torch.randn(2, 3, 16, 16, dtype=torch.float64)

        def hook(gradient: Tensor) -> Tensor | None:
            if kind == "replaced":
                return 2 * gradient
            if kind == "scaled in place":
                gradient *= 2
            return None

        found = []
        for own, context in ((network, fused_networks()), (modules, modules_only())):
            with context:
                maps = own.features(images)
                for x in maps[:-1]:
                    x.register_hook(hook)  # type: ignore[no-untyped-call]
                    x.retain_grad()
                loss = own.head(maps[-1]).square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            kept = [x.grad for x in maps[:-1] if x.grad is not None]
            found.append([*kept, *(p.grad for p in own.parameters() if p.grad is not None)])
        assert largest_error(*found) < 1e-8

    def test_a_graph_that_is_kept_gives_the_same_again(self) -> None:
        network, images = network_of(4, torch.float64), torch.randn(2, 3, 16, 16, dtype=torch.float64)
        with fused_networks():
            maps = network.features(images)
            loss = network.head(maps[-1]).square().sum()
        wanted = [p for name, p in network.named_parameters() if not name.startswith("auxiliary")]
        first = torch.autograd.grad(loss, wanted, retain_graph=True)
        # The pass ends at a map: the cell before it does not run.
        torch.autograd.grad(loss, maps[0], retain_graph=True)
        for a, b in zip(first, torch.autograd.grad(loss, wanted), strict=True):
            assert torch.equal(a, b)

    def test_a_frozen_stem_and_no_gradients(self) -> None:
        network, images = network_of(3, torch.float64), torch.randn(2, 3, 16, 16, dtype=torch.float64)
        modules = copy.deepcopy(network)
        for own in (network, modules):
            for name, parameter in own.named_parameters():
                parameter.requires_grad = not name.startswith("stem")
        mine = gradients(network, images, fused=True, reads="logits")
        assert largest_error(mine, gradients(modules, images, fused=False, reads="logits")) < 1e-8
        for own in (network.eval(), modules.eval()):
            own.load_state_dict(network.state_dict())
        with torch.no_grad(), fused_networks():
            found = network(images)
        with torch.no_grad(), modules_only():
            torch.testing.assert_close(found, modules(images))


class TestKernels:
    pytestmark = MARKS

    @pytest.mark.parametrize("reads", ["logits", "maps"])
    def test_gradients_of_maps_are_not_modified_later(
        self, reads: str, rooms: list[bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A cell adds to the gradients of its nodes, but not where the gradient of its output arrived."""
        monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
        network = network_of(4 if INTERPRETED else 6, torch.float32, auxiliary=False).to(DEVICE)
        exact, images = copy.deepcopy(network).double(), torch.randn(2, 3, 16, 16, device=DEVICE)
        mine = gradients(network, images, fused=True, reads=reads)
        assert largest_error(mine, gradients(exact, images.double(), fused=False, reads=reads)) < 1e-2
        assert any(rooms)
