"""Parts of fused derived cells: programs whose inputs are nodes, whose nodes are read one by one, or without norms.

The twin against modules in float64, and the kernels against the twin, on a GPU or by the interpreter:
TRITON_INTERPRET=1 pytest tests/kernels/test_kernel_derived_parts.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from softcell.kernels.derived import derived_nodes, derived_nodes_reference
from softcell.kernels.derived_program import norm_groups
from softcell.nn.candidates import Spec, get_candidate
from softcell.nn.conv import ReLUConvBN
from softcell.nn.stochastic import DropPath
from softcell.spaces._derived_plan import DerivedCell, Pick, plan_derived
from tests.helpers.kernel_runs import DEVICE, INTERPRETED, MARKS

SAME = "skip_connect"


@dataclass(frozen=True)
class Part:
    """Edges (source, target, operation), and the numbers of those that are never dropped."""

    edges: tuple[tuple[int, int, str], ...]
    inputs: int = 2
    nodes: int = 3
    stride: int = 1
    undropped: tuple[int, ...] = ()
    preprocessed: bool = False
    pool_norm: bool = False


PARTS = {
    "every kind": Part(
        (
            (0, 2, SAME),
            (1, 2, "sep_conv_3x3"),
            (0, 3, "max_pool_3x3"),
            (2, 3, "dil_conv_3x3"),
            (1, 3, "avg_pool_3x3"),
            (2, 4, "sep_conv_5x5"),
            (0, 4, "nor_conv_1x1"),
            (3, 4, SAME),
        ),
        undropped=(1, 5),
    ),
    "an input is a node": Part(
        ((1, 2, SAME), (0, 3, "sep_conv_3x3"), (1, 3, "dil_conv_3x3"), (1, 4, SAME), (0, 4, SAME))
    ),
    "one input, one size": Part(((0, 1, "sep_conv_3x3"), (0, 1, "dil_conv_3x3"), (1, 2, "sep_conv_3x3")), 1, 2),
    "strides": Part(((0, 2, "sep_conv_3x3"), (1, 3, "max_pool_3x3"), (0, 3, SAME), (2, 4, "dil_conv_3x3")), stride=2),
    "only pools": Part(((0, 1, "avg_pool_3x3"), (0, 2, "max_pool_3x3"), (1, 3, "avg_pool_3x3"), (0, 3, SAME)), 1),
    "pools with norms": Part(((0, 1, "avg_pool_3x3"), (1, 2, "max_pool_3x3")), 1, 2, pool_norm=True),
    "only sums inside": Part(((0, 3, SAME), (1, 3, SAME), (2, 4, SAME), (3, 4, SAME), (3, 5, "avg_pool_3x3")), 3),
    "a preprocessed input is a node": Part(
        ((0, 2, SAME), (0, 3, "sep_conv_3x3"), (1, 3, "max_pool_3x3"), (3, 4, "dil_conv_5x5")),
        preprocessed=True,
        undropped=(3,),
    ),
}
WIDTHS = (7, 9)


class Modules(nn.Module):
    """A part module by module, and its fused form."""

    def __init__(self, part: Part, channels: int) -> None:
        super().__init__()
        self.part, self.channels, self.drop_path = part, channels, DropPath(0.3)
        self.before = nn.ModuleList(ReLUConvBN(c, channels, 1) for c in WIDTHS if part.preprocessed)
        self.edges = nn.ModuleList(
            get_candidate(op).build(
                Spec(channels, part.stride if source < part.inputs else 1, pool_norm=part.pool_norm)
            )
            for source, _, op in part.edges
        )
        for norm in self.modules():
            if isinstance(norm, nn.BatchNorm2d):
                nn.init.normal_(norm.weight)
                nn.init.normal_(norm.bias)

    def drops(self, number: int) -> bool:
        return number not in self.part.undropped and not isinstance(self.edges[number], nn.Identity)

    def plan(self) -> DerivedCell:
        part = self.part
        picks = [
            Pick(source, target, module, dropped=number not in part.undropped)
            for number, ((source, target, _), module) in enumerate(zip(part.edges, self.edges, strict=True))
        ]
        before = list(self.before) or [None] * part.inputs
        return plan_derived(before, picks, part.nodes, self.channels, part.stride, self.drop_path)

    def forward(self, states: list[Tensor], factors: Tensor | None) -> list[Tensor]:
        values = [module(x) for module, x in zip(self.before, states, strict=True)] if self.before else list(states)
        rows = iter(() if factors is None else factors)
        for node in range(self.part.inputs, self.part.inputs + self.part.nodes):
            total: Tensor | None = None
            for number, (source, target, _) in enumerate(self.part.edges):
                if target != node:
                    continue
                value = self.edges[number](values[source])
                if factors is not None and self.drops(number):
                    value = value * next(rows).view(-1, 1, 1, 1)
                total = value if total is None else total + value
            assert total is not None
            values.append(total)
        return values[self.part.inputs :]


def inputs_of(part: Part, channels: int, n: int, size: tuple[int, int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    widths = WIDTHS if part.preprocessed else (channels,) * part.inputs
    return [torch.randn(n, c, *size, generator=generator).double() for c in widths]


def factors_of(cell: Modules, n: int) -> Tensor:
    return torch.rand(cell.plan().paths, n, generator=torch.Generator().manual_seed(3)).double() + 0.5


def pull(nodes: list[Tensor], learned: list[Tensor], skips: int | None) -> list[Tensor]:
    """Gradients of a random linear function of the nodes; skips: the one that it does not read."""
    generator = torch.Generator().manual_seed(4)
    grads = [torch.randn(x.shape, generator=generator).to(x) for x in nodes]
    kept = [i for i in range(len(nodes)) if i != skips]
    found = torch.autograd.grad([nodes[i] for i in kept], learned, [grads[i] for i in kept], allow_unused=True)
    return [torch.zeros_like(x) if one is None else one for x, one in zip(learned, found, strict=True)]


def relative(a: Tensor, b: Tensor) -> float:
    wide = b.detach().double().cpu()
    return float(
        (a.detach().double().cpu() - wide).norm() / max(float(wide.norm()), 1e-2 * max(wide.numel(), 1) ** 0.5)
    )


def by_program(
    cell: Modules, states: list[Tensor], factors: Tensor | None, dtype: torch.dtype, *, plain: bool, skips: int | None
) -> list[Tensor]:
    """Nodes, gradients of the flat parameters and of the inputs; in evaluation mode by running statistics."""
    fused, wide = cell.plan(), torch.promote_types(dtype, torch.float32)
    device = states[0].device
    parameters = (
        (fused.flat_parameters().detach() if fused.owners else torch.zeros(0)).to(device, wide).requires_grad_()
    )
    known = not fused.training and bool(fused.norms)
    shape = (2, fused.program.planes, cell.channels)
    running = torch.rand(shape, generator=torch.Generator().manual_seed(5)).to(device, wide) + 0.5 if known else None
    given = [x.to(dtype).requires_grad_() for x in states]
    run = derived_nodes_reference if plain else derived_nodes
    dropped = None if factors is None or not fused.paths else factors.to(device, wide)
    nodes, _ = run(fused.program, dtype, parameters, running, dropped, *given)
    return [*nodes, *pull(nodes, [parameters, *given] if fused.owners else given, skips)]


@pytest.mark.parametrize("drops", [True, False])
@pytest.mark.parametrize("name", list(PARTS))
def test_twin_of_a_part_equals_its_modules(name: str, drops: bool) -> None:
    torch.manual_seed(0)
    cell = Modules(PARTS[name], 4).double().train()
    states, factors = inputs_of(cell.part, 4, 3, (6, 5)), factors_of(cell, 3) if drops else None
    mine = by_program(cell, states, factors, torch.float64, plain=True, skips=None)
    given = [x.clone().requires_grad_() for x in states]
    nodes = cell(given, factors)
    learned = [owner.get_parameter(field) for owner, field in cell.plan().owners]
    theirs = pull(nodes, [*learned, *given], None)
    flat = [torch.cat([one.flatten() for one in theirs[: len(learned)]])] if learned else []
    for a, b in zip(mine, [*nodes, *flat, *theirs[len(learned) :]], strict=True):
        torch.testing.assert_close(a, b)


def test_norm_groups_leave_out_inputs_that_are_not_preprocessed() -> None:
    assert norm_groups(Modules(PARTS["one input, one size"], 4).plan().program) == ([2, 1, 1, 1], [1, 1, 2, 1])
    assert norm_groups(Modules(PARTS["a preprocessed input is a node"], 4).plan().program)[0][0] == 2


@pytest.fixture
def nan_memory() -> Iterator[None]:
    """New tensors hold NaN, so that a value which no kernel writes is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


class TestKernels:
    pytestmark = MARKS

    def test_inputs_that_are_nodes_are_kept_in_the_buffer_only(self) -> None:
        """And read from any layout: nodes of another part have gaps between pixels."""
        cell = Modules(PARTS["every kind"], 5).to(DEVICE)
        fused, states = cell.plan(), [x.float().to(DEVICE) for x in inputs_of(cell.part, 5, 3, (7, 6))]
        wide = torch.cat(states, 1).to(memory_format=torch.channels_last)
        found = []
        for given in (states, list(torch.split(wide, 5, 1))):
            own = [x.requires_grad_() if x.is_leaf else x for x in given]
            nodes, _ = derived_nodes(fused.program, torch.float32, fused.flat_parameters(), None, None, *own)
            kept = [x for x in nodes[0].grad_fn.saved_tensors if x is not None]  # type: ignore[union-attr]
            assert not {x.untyped_storage().data_ptr() for x in own} & {x.untyped_storage().data_ptr() for x in kept}
            assert sum(x.dim() == 4 for x in kept) == 0
            found.append(nodes)
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)

    @pytest.mark.parametrize("skips", [None, 0])
    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize("name", list(PARTS))
    def test_kernels_of_a_part_equal_their_twin_in_float64(
        self, name: str, training: bool, skips: int | None, nan_memory: None
    ) -> None:
        """skips: a node whose gradient does not arrive."""
        channels, size = (5, (7, 6)) if INTERPRETED else (36, (16, 16))
        torch.manual_seed(0)
        cell = Modules(PARTS[name], channels).to(DEVICE).train(training)
        states, factors = inputs_of(cell.part, channels, 3, size), factors_of(cell, 3) if training else None
        own = [x.to(DEVICE) for x in states]
        mine = by_program(cell, own, factors, torch.float32, plain=False, skips=skips)
        theirs = by_program(cell.double().cpu(), states, factors, torch.float64, plain=True, skips=skips)
        errors = [relative(a, b) for a, b in zip(mine, theirs, strict=True)]
        assert all(error <= 1e-5 for error in errors), errors
