"""Full-attention networks with fused blocks equal their modules: logits, gradients and running statistics."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from softcell.arch import Cell, Genotype, Pick, sample
from softcell.kernels.backend import runs_triton
from softcell.nn import fused_blocks
from softcell.nn.attention import LocalAttention, local_block
from softcell.nn.candidates import Spec
from softcell.nn.fused_blocks import FusedBlocks, fits
from softcell.spaces import Network, execution
from softcell.spaces.cell import PickedChain
from softcell.spaces.execution import fused_networks, is_modules_only
from softcell.spaces.fullattention import FullAttentionSpace
from tests.helpers.fused_passes import two_passes
from tests.helpers.kernel_runs import DEVICE, MARKS

SPACE = FullAttentionSpace(channels=16, layers=2)


def made(seed: int, *, drop: float = 0.5, search_form: bool = False) -> Network:
    """A network in float64, every number random: fresh norms hide a forgotten scale, shift or running value."""
    torch.manual_seed(0)
    network = SPACE.network(sample(SPACE.layout(), seed), (3, 9, 8), 5, search_form=search_form).double().train()
    for norm in (m for m in network.modules() if isinstance(m, nn.BatchNorm2d)):
        assert norm.running_mean is not None and norm.running_var is not None
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        if norm.affine:
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)
    network.use_drop_path(drop)
    return network


def results(network: Network, *, fused: bool, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Two passes; drop-path's factors are the same numbers for the same layers."""
    paths = sum(cell.num_dropped() for cell in network.modules() if isinstance(cell, PickedChain))
    factors = torch.randint(3, (paths, 4), generator=torch.Generator().manual_seed(2)).to(next(network.parameters()))
    used = factors if network.drop_path.probability > 0 else factors[:0]
    return two_passes(network, used, fused=fused, monkeypatch=monkeypatch)


def require_equal(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
    modules = copy.deepcopy(network)
    mine = results(network, fused=True, monkeypatch=monkeypatch)
    theirs = results(modules, fused=False, monkeypatch=monkeypatch)
    assert mine.keys() == theirs.keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(mine[name], expected, rtol=1e-8, atol=1e-10, msg=name)


@pytest.mark.parametrize("search_form", [False, True])
@pytest.mark.parametrize("drop", [0.5, 0.0])
@pytest.mark.parametrize("seed", [0, 4])
def test_fused_blocks_equal_their_modules(
    seed: int, drop: float, search_form: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = made(seed, drop=drop, search_form=search_form)
    assert network.has_fused_cells() == [True] * 5
    require_equal(network, monkeypatch)


@pytest.mark.parametrize(
    ("channels", "heads", "missing"),
    [(48, 8, 0), (48, 4, 2), (96, 8, 2), (96, 4, 4), (128, 8, 0), (80, 4, 0), (160, 4, 4)],
)
def test_heads_filled_up_change_nothing(
    channels: int, heads: int, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fused_blocks, "PADDED_FROM", 2 * 5 * 4 * 9)
    torch.manual_seed(0)
    block = local_block(Spec(channels, channels_in=6), 3, heads).double()
    assert isinstance(block.attention, LocalAttention)
    x, own = torch.randn(2, 6, 5, 4, dtype=torch.float64), list(block.parameters())
    sizes = (channels // 2, 5, 4)
    assert fused_blocks._missing(block.attention, x.new_zeros(2, *sizes)) == missing
    assert fused_blocks._missing(block.attention, x.new_zeros(1, *sizes)) == 0
    found, expected = FusedBlocks([block], torch.float64).run(block, x), block(x)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    gradients = (torch.autograd.grad(y.square().sum(), own) for y in (found, expected))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_layers_with_several_blocks_and_frozen_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block whose norm keeps its statistics runs as a module, and several blocks of a layer are added first."""
    genotype = sample(SPACE.layout(), 0)
    first = genotype.cells["stage1"]
    two = Cell((*first.picks, Pick(1, 2, "local_sa_k7_h4")), output=first.output)
    several = Genotype(genotype.space, {**genotype.cells, "stage1": two})
    network = SPACE.network(several, (3, 9, 8), 5).double().train()
    network.use_drop_path(0.5)
    chain = next(m for m in network.modules() if isinstance(m, PickedChain))
    frozen = chain.edges.module(0)
    assert frozen is not None
    next(m for m in frozen.modules() if isinstance(m, nn.BatchNorm2d)).eval()
    assert not fits(frozen)
    require_equal(network, monkeypatch)


def test_blocks_without_norms_run_as_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    space = replace(SPACE, norm="none")
    network = space.network(sample(space.layout(), 0), (3, 9, 8), 5).double().train()
    assert network.has_fused_cells() == [False] * 5
    network.use_drop_path(0.5)
    require_equal(network, monkeypatch)


def test_evaluation_and_searches_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "kernels_serve", lambda x: True)
    monkeypatch.setattr("softcell.spaces.fullattention.FusedBlocks", lambda *own: pytest.fail("blocks were fused"))
    network, images = made(0), torch.randn(2, 3, 9, 8, dtype=torch.float64)
    with fused_networks():
        network.eval()(images)
    network.train()(images)


@pytest.mark.parametrize("mark", [pytest.param(None, marks=MARKS)])
def test_by_kernels_they_are_as_near_to_float64_as_modules(mark: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    exact = made(0)
    fused, modules = (copy.deepcopy(exact).float().to(DEVICE) for _ in range(2))
    assert runs_triton(next(fused.parameters()))
    mine = results(fused, fused=True, monkeypatch=monkeypatch)
    others = results(modules, fused=False, monkeypatch=monkeypatch)
    theirs = results(exact, fused=False, monkeypatch=monkeypatch)
    assert mine.keys() == theirs.keys()
    for name, expected in theirs.items():
        size = float(expected.double().norm()) + 1e-2
        errors = [float((own[name].cpu().double() - expected.double()).norm()) / size for own in (mine, others)]
        # Rounding decides about ReLUs near 0: modules in float32 are no nearer to float64.
        assert errors[0] <= max(1e-3, 10 * errors[1]), f"{name}: {errors[0]:.2e}, modules {errors[1]:.2e}"
