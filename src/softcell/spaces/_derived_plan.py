"""Plans the program that runs a derived cell's modules together, or raises the reason why they must run separately.

These classes own no parameters: weights and running statistics stay in the modules, under their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from softcell.kernels.backend import compute_type, triton_kernels
from softcell.kernels.derived import derived_cell, derived_nodes
from softcell.kernels.derived_program import NONE, Derived, Form, NodeInput, Norm, Pooling, Round, Stage, interned
from softcell.kernels.schedule import Schedule
from softcell.kernels.shared import shares_norms
from softcell.nn.conv import DilatedConv, FactorisedReduction, ReLUConvBN, SeparableConv
from softcell.nn.norm import update_running
from softcell.nn.stack import flat
from softcell.nn.stochastic import DropPath
from softcell.spaces._fused_cell import running_of
from softcell.spaces._fused_plan import Unfit, pool_of


@dataclass(frozen=True, slots=True)
class Pick:
    """One candidate of a derived cell: its edge, its module, and whether drop-path drops it (identities never)."""

    source: int
    target: int
    module: nn.Module
    dropped: bool = True


@dataclass(frozen=True, slots=True)
class DerivedCell:
    """A program and the modules it reads."""

    program: Derived
    owners: tuple[tuple[nn.Module, str], ...]  # of the parameters, in the order of the program
    norms: tuple[tuple[int, nn.BatchNorm2d], ...]
    drop_path: DropPath

    @property
    def programs(self) -> list[DerivedCell]:
        return [self]

    @property
    def paths(self) -> int:
        return self.program.paths

    @property
    def training(self) -> bool:
        # All norms of a fused cell have the same mode (`remembered_form`), so the first one determines it.
        return self.norms[0][1].training if self.norms else self.drop_path.training

    def parameters(self) -> list[Tensor]:
        """Matrices [c_out, c_in, 1, 1]; depthwise kernels [c · k², 1, 1, 1]; norms: scales, shifts [c, 1, 1, 1]."""
        return [_four_dimensional(getattr(module, name)) for module, name in self.owners]

    def flat_parameters(self) -> Tensor:
        """All parameters concatenated, [size]."""
        if torch.is_grad_enabled():
            return flat(self.parameters())
        # Kernels of one pixel or one channel already have that order; a validation pass has no backward pass.
        return torch.cat([getattr(module, name).flatten() for module, name in self.owners])

    def __call__(self, states: Sequence[Tensor]) -> Tensor:
        """Maps the cell's input tensors [n, c_i, h_i, w_i], not preprocessed, to its concatenated nodes."""
        alone = DerivedPass([self], states[-1])
        [out] = alone.run(self, states)
        alone.finish()
        return out

    def schedules(
        self,
        shapes: Sequence[tuple[int, ...]],
        dtype: torch.dtype,
        device: torch.device,
        *,
        training: bool,
        apart: bool = False,
        passes: bool = False,
    ) -> list[Schedule]:
        """The launches of a training step, or of a pass in evaluation mode, for inputs [n, c_i, h_i, w_i].

        apart: nodes are returned separately, by `DerivedPass.run_nodes`; passes: as in `DerivedPass.run`.
        """
        kernels, program = triton_kernels("derived"), self.program
        rows_last = tuple((n, height, width, c) for n, c, height, width in shapes)
        size = sum(w.numel() for w in self.parameters())
        drops = training and self.drop_path.probability > 0.0 and program.paths > 0
        known = not training and bool(self.norms)
        form = Form.of(dtype, rows_last, size, known=known, drops=drops, shared=shares_norms(), apart=apart)
        found = [kernels.forward_schedule(program, form, device)]
        if not training:
            return found
        return [
            *found,
            kernels.backward_schedule(program, replace(form, passed=passes and program.adds_passed), device),
        ]


class Fused(Protocol):
    """A fused cell of one or more programs, with `paths` that drop-path drops in training."""

    @property
    def programs(self) -> list[DerivedCell]: ...
    @property
    def paths(self) -> int: ...
    @property
    def training(self) -> bool: ...
    @property
    def drop_path(self) -> DropPath: ...


class DerivedPass:
    """One pass through fused cells. Small operations run once for all cells, since each launch takes microseconds.

    Drop-path factors are drawn at the beginning. Running statistics are updated by `finish`; if norms use them, they
    are collected at the beginning.
    """

    def __init__(self, cells: Sequence[Fused], x: Tensor) -> None:
        """x: any tensor of the batch, [n, ...]."""
        self._factors: dict[int, Tensor] = {}
        self._measured: list[tuple[DerivedCell, Tensor]] = []
        programs = [program for cell in cells for program in cell.programs]
        self._running = running_of([one for one in programs if one.norms and not one.training])
        dropping = [cell for cell in cells if cell.training and cell.paths]
        if dropping and dropping[0].drop_path.probability > 0.0:
            counts = [cell.paths for cell in dropping]
            drawn = torch.split(dropping[0].drop_path.factors(x, sum(counts)), counts)
            self._factors = {id(cell): factors for cell, factors in zip(dropping, drawn, strict=True)}

    def factors_of(self, cell: Fused) -> Tensor | None:
        """Drop-path's factors [paths, n] of a cell; None: nothing is dropped."""
        return self._factors.get(id(cell))

    def run(
        self, cell: DerivedCell, states: Sequence[Tensor], readers: int = 1, *, passes: bool = False
    ) -> list[Tensor]:
        """Maps the cell's input tensors [n, c_i, h_i, w_i], not preprocessed, to its concatenated nodes.

        readers: how often they are returned; passes: so is the last input tensor, for its later readers
        (`derived_cell`).
        """
        dtype = compute_type(states[-1])
        with torch.autocast(states[-1].device.type, enabled=False):
            parameters, running, shared = self._given(cell, states[-1], dtype)
            factors = self.factors_of(cell)
            *found, moments = derived_cell(
                cell.program,
                dtype,
                parameters,
                running,
                factors,
                *states,
                shared=shared,
                readers=readers,
                passes=passes,
            )
        self._note(cell, moments, found[0].numel() <= found[0].shape[1] and not shared, found[0].shape)
        return found

    def run_nodes(self, cell: DerivedCell, states: Sequence[Tensor], factors: Tensor | None) -> list[Tensor]:
        """Runs a part of a cell: maps the input tensors of its program to its nodes, each [n, c, h, w].

        factors [paths, n]: of drop-path, or None.
        """
        dtype = compute_type(states[-1])
        with torch.autocast(states[-1].device.type, enabled=False):
            parameters, running, shared = self._given(cell, states[-1], dtype)
            nodes, moments = derived_nodes(cell.program, dtype, parameters, running, factors, *states, shared=shared)
        self._note(cell, moments, nodes[0].numel() <= nodes[0].shape[1] and not shared, nodes[0].shape)
        return nodes

    def _given(self, cell: DerivedCell, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, bool]:
        """Flat parameters [size], running statistics [2, planes, c] if used, and whether ranks share norms."""
        exact = torch.promote_types(dtype, torch.float32)
        parameters = cell.flat_parameters() if cell.owners else x.new_empty(0, dtype=exact)
        return parameters, self._running.get(id(cell)), bool(cell.norms) and cell.training and shares_norms()

    def _note(self, cell: DerivedCell, moments: Tensor, too_few: bool, shape: torch.Size) -> None:
        if cell.training and cell.norms:
            if too_few:  # not checked if ranks share norms: a check would stall the device
                raise ValueError(f"training needs more than 1 value per channel, but got {tuple(shape)}")
            self._measured.append((cell, moments))

    def finish(self) -> None:
        """Update the running statistics of all norms of cells in training."""
        found: dict[float | None, tuple[list[nn.BatchNorm2d], list[Tensor], list[Tensor]]] = {}
        for cell, moments in self._measured:
            mean, _, variance = (of.unbind() for of in moments.unbind())
            for plane, norm in cell.norms:
                norms, means, variances = found.setdefault(norm.momentum, ([], [], []))
                norms.append(norm)
                means.append(mean[plane])
                variances.append(variance[plane])
        for group in found.values():
            update_running(*group)


def plan_derived(
    preprocess: Sequence[nn.Module | None],
    picks: Sequence[Pick],
    nodes: int,
    channels: int,
    stride: int,
    drop_path: DropPath,
) -> DerivedCell:
    """The fused form of a cell of `nodes` inner nodes; raises `Unfit` with the reason if there is none.

    preprocess: one module per input tensor, or None for each; the tensors are then the input nodes, `channels` wide.
    stride: of all outgoing operations of an input node.
    """
    return _Planner(list(preprocess), list(picks), nodes, channels, stride, drop_path).build()


class _Planner:
    def __init__(
        self,
        preprocess: list[nn.Module | None],
        picks: list[Pick],
        nodes: int,
        channels: int,
        stride: int,
        drop_path: DropPath,
    ) -> None:
        self.preprocess, self.picks, self.nodes, self.channels = preprocess, picks, nodes, channels
        self.stride, self.drop_path, self.inputs = stride, drop_path, len(preprocess)
        self.planes = self.inputs + nodes
        self.matrices: list[nn.Conv2d] = []
        self.depths: list[nn.Conv2d] = []
        self.norms: list[tuple[int, nn.BatchNorm2d]] = []
        self.slots = 0
        self.result: dict[int, int] = {}  # output plane of each pick

    def build(self) -> DerivedCell:
        # Each pick has a separate plane: a shared norm would update its running statistics once per edge.
        learned = [id(pick.module) for pick in self.picks if any(True for _ in pick.module.buffers())]
        if len(set(learned)) < len(learned):
            raise Unfit("edges share a module")
        known = [(i, module) for i, module in enumerate(self.preprocess) if module is not None]
        assert len(known) in (0, self.inputs), "all inputs are preprocessed or none"
        before = [s for i, module in known for s in self._input_stages(i, module)]
        drafts = [self._round(sources) for sources in self._rounds()]
        if len({(n.eps, n.momentum, n.track_running_stats) for _, n in self.norms}) > 1:
            raise Unfit("the batch-norms differ in eps, momentum or statistics")
        if not all(norm.track_running_stats for _, norm in self.norms):
            raise Unfit("a batch-norm keeps no running statistics")
        matrix_at = _offsets(self.matrices, 0)
        matrices = sum(conv.weight.numel() for conv in self.matrices)
        depth_at = _offsets(self.depths, matrices)
        at = matrices + sum(conv.weight.numel() for conv in self.depths)
        norms: list[Norm] = []
        owners: list[tuple[nn.Module, str]] = [(conv, "weight") for conv in (*self.matrices, *self.depths)]
        for plane, norm in self.norms:
            if norm.affine:
                norms.append(Norm(plane, at, at + self.channels))
                owners += [(norm, "weight"), (norm, "bias")]
                at += 2 * self.channels
            else:
                norms.append(Norm(plane, NONE, NONE))

        def placed(stages: Sequence[tuple[Stage, int, int]]) -> tuple[Stage, ...]:
            return tuple(
                Stage(
                    s.source, s.plane, s.size, s.dilation, s.padding, s.stride, matrix_at[matrix],
                    NONE if depth == NONE else depth_at[depth], s.fan_in, s.width, s.column,
                )
                for s, matrix, depth in stages
            )  # fmt: skip

        rounds = tuple(
            Round(sources, placed(first), placed(second), pools, measured, measured_second)
            for sources, first, second, pools, measured, measured_second in drafts
        )
        node_inputs, paths = self._node_inputs()
        program = Derived(
            self.channels,
            self.inputs,
            self.nodes,
            self.planes,
            self.stride,
            self.slots,
            paths,
            placed(before),
            rounds,
            node_inputs,
            tuple(norms),
            self.norms[0][1].eps if self.norms else 0.0,
        )
        return DerivedCell(interned(program), tuple(owners), tuple(self.norms), self.drop_path)

    def _rounds(self) -> list[tuple[int, ...]]:
        """All inputs are one round; each inner node with outgoing edges is another."""
        inner = sorted({pick.source for pick in self.picks if pick.source >= self.inputs})
        return [tuple(range(self.inputs)), *((node,) for node in inner)]

    def _node_inputs(self) -> tuple[tuple[tuple[NodeInput, ...], ...], int]:
        """The inputs of every inner node. Identities are never dropped (DARTS)."""
        paths = 0
        found: list[list[NodeInput]] = [[] for _ in range(self.nodes)]
        for number, pick in enumerate(self.picks):
            if isinstance(pick.module, nn.Identity):
                if self._stride(pick.source) != 1:
                    raise Unfit("an outgoing identity of a node has stride 2")
                found[pick.target - self.inputs].append(NodeInput(pick.source))
                continue
            found[pick.target - self.inputs].append(NodeInput(self.result[number], paths if pick.dropped else NONE))
            paths += pick.dropped
        return tuple(tuple(own) for own in found), paths

    def _stride(self, source: int) -> int:
        return self.stride if source < self.inputs else 1

    def _input_stages(self, number: int, module: nn.Module) -> list[tuple[Stage, int, int]]:
        source, plane = -1 - number, number
        if type(module) is ReLUConvBN:
            conv, norm = module[1], module[2]
            assert isinstance(conv, nn.Conv2d)
            if conv.kernel_size != (1, 1) or conv.stride != (1, 1) or conv.out_channels != self.channels:
                raise Unfit("an input is preprocessed by something other than a 1×1 convolution")
            self._norm(plane, norm)
            return [self._point(source, plane, conv, 0, 1, 0)]
        if type(module) is FactorisedReduction:
            return self._reduction(source, plane, module)
        raise Unfit(f"{type(module).__name__} has no fused form as preprocessing")

    def _round(self, sources: tuple[int, ...]):  # type: ignore[no-untyped-def]
        first, second, pools, measured, measured_second = [], [], [], [], []
        again: list[tuple[int, int, nn.Module]] = []  # number of a pick, plane, module: planes that are convolved again
        for number, pick in enumerate(self.picks):
            if pick.source not in sources or isinstance(pick.module, nn.Identity):
                continue
            module, plane = pick.module, self._plane()
            kind = type(module)
            if kind is SeparableConv:
                first.append(self._pair(pick.source, plane, module[1], module[2], module[3]))  # type: ignore[index]
                measured.append(plane)
                again.append((number, plane, module))
                continue
            self.result[number] = plane
            if kind is DilatedConv:
                first.append(self._pair(pick.source, plane, module[1], module[2], module[3]))  # type: ignore[index]
            elif kind is ReLUConvBN and module[1].kernel_size == (1, 1):  # type: ignore[index]
                conv, norm = module[1], module[2]  # type: ignore[index]
                self._norm(plane, norm)
                first.append(self._point(pick.source, plane, conv, 0, conv.stride[0], 0))
            elif kind is FactorisedReduction:
                first += self._reduction(pick.source, plane, module)  # type: ignore[arg-type]
            else:
                pools.append(self._pool(pick.source, plane, module))
                if pool_of(module)[1] is None:  # type: ignore[index]
                    continue
            measured.append(plane)
        # After all first convolutions, so that the weights of kernels that run together are adjacent.
        for number, plane, module in again:
            self.result[number] = outer = self._plane()
            second.append(self._pair(plane, outer, module[5], module[6], module[7]))  # type: ignore[index]
            measured_second.append(outer)
        strides = {stage.stride for stage, _, _ in first} | {pool.stride for pool in pools}
        if strides - {self._stride(sources[0])}:
            raise Unfit(f"outgoing operations of nodes {sources} have strides {sorted(strides)}")
        return sources, first, second, tuple(pools), tuple(measured), tuple(measured_second)

    def _plane(self) -> int:
        self.planes += 1
        return self.planes - 1

    def _norm(self, plane: int, norm: nn.Module) -> None:
        if not isinstance(norm, nn.BatchNorm2d) or norm.num_features != self.channels:
            raise Unfit("a convolution is followed by no batch-norm, or one of another width")
        self.norms.append((plane, norm))

    def _pair(
        self, source: int, plane: int, depthwise: nn.Module, pointwise: nn.Module, norm: nn.Module
    ) -> tuple[Stage, int, int]:
        assert isinstance(depthwise, nn.Conv2d) and isinstance(pointwise, nn.Conv2d)
        if depthwise.bias is not None or pointwise.bias is not None or pointwise.out_channels != self.channels:
            raise Unfit("a convolution has a bias or another width")
        self._norm(plane, norm)
        self.matrices.append(pointwise)
        self.depths.append(depthwise)
        size, padding = depthwise.kernel_size[0], depthwise.padding
        assert not isinstance(padding, str)
        stage = Stage(
            source,
            plane,
            size,
            depthwise.dilation[0],
            padding[0],
            depthwise.stride[0],
            0,
            0,
            self.channels,
            self.channels,
        )
        return stage, len(self.matrices) - 1, len(self.depths) - 1

    def _point(
        self, source: int, plane: int, conv: nn.Conv2d, padding: int, stride: int, column: int
    ) -> tuple[Stage, int, int]:
        if conv.bias is not None:
            raise Unfit("a convolution has a bias")
        self.matrices.append(conv)
        stage = Stage(source, plane, 1, 1, padding, stride, 0, NONE, conv.in_channels, conv.out_channels, column)
        return stage, len(self.matrices) - 1, NONE

    def _reduction(self, source: int, plane: int, module: FactorisedReduction) -> list[tuple[Stage, int, int]]:
        """Two pointwise convolutions of stride 2; the second is shifted by one pixel, which is a padding of −1."""
        if not isinstance(module.even, nn.Conv2d) or module.norm.num_features != self.channels:
            raise Unfit("a factorised reduction of a single channel, or of another width")
        assert isinstance(module.odd, nn.Conv2d)
        self._norm(plane, module.norm)
        even = self._point(source, plane, module.even, 0, 2, 0)
        return [even, self._point(source, plane, module.odd, -1, 2, module.even.out_channels)]

    def _pool(self, source: int, plane: int, module: nn.Module) -> Pooling:
        found = pool_of(module)
        if found is None:
            raise Unfit(f"{type(module).__name__} has no fused form")
        inner, norm = found
        if norm is not None:
            self._norm(plane, norm)
        largest = isinstance(inner, nn.MaxPool2d)
        slot = self.slots if largest else NONE
        self.slots += largest
        stride = inner.stride if isinstance(inner.stride, int) else inner.stride[0]
        return Pooling(source, plane, largest, slot, stride)


def _four_dimensional(weight: Tensor) -> Tensor:
    """In the layout of `flat`: a vector, or a depthwise kernel [c, 1, k, k] in its storage order, as 1×1 kernels."""
    return weight.reshape(-1, 1, 1, 1) if weight.dim() == 1 or weight.shape[1] == 1 else weight


def _offsets(convolutions: Sequence[nn.Conv2d], start: int) -> list[int]:
    found = []
    for conv in convolutions:
        found.append(start)
        start += conv.weight.numel()
    return found
