# mypy: ignore-errors
"""The Triton passes of `derived`: which kernel runs when, on which rows of its tables."""

import functools
import math
from contextlib import nullcontext

import torch
import triton

from softcell.kernels.derived_forward_triton import _add_up, _pools, _start
from softcell.kernels.derived_gradient_triton import _gather, _pulls
from softcell.kernels.derived_layout_triton import (
    Lowered,
    _stages_of,
    at_most,
    border_of,
    overridden,
)
from softcell.kernels.derived_lines_triton import _gather_lines
from softcell.kernels.derived_program import NONE
from softcell.kernels.derived_stages_triton import Lowering, Stages
from softcell.kernels.derived_sums_triton import _known_moments, arrival_sums, finish_slopes, measure
from softcell.kernels.derived_weights_triton import WeightGradients
from softcell.kernels.schedule import Name, Schedule


class Forward(Stages):
    """One forward pass of a program: the order in which kernels fill its planes."""

    def tiles(self, rows):
        return triton.cdiv(rows, self.tile)

    def plan(self):
        p, c = self.program, self.c
        self.allocate()
        self.schedule.new("winners", p.slots * self.rows * c, torch.uint8)
        if self.blocks.weight_factors == 1 and self.numbers:
            self.schedule.new("depthwise", len(self.numbers) * self.rows * self.pitch, self.dtype)
        self.begin()
        partial = None if self.form.known or not p.norms else self._partial(self.tiles(self.rows), p.planes)
        if p.is_raw:
            size = self.rows_in * c
            self.schedule.copy((x, self.given, self.unit(i) * size, size) for i, x in enumerate(self.inputs))
        else:
            self._preprocess()
        size = (self.out_height, self.out_width)
        waiting = []  # nodes that have not been read yet
        for plane in (p.inputs - 1, *p.node_planes):
            if p.is_node(plane):
                waiting.append(plane)
            found = p.round_of(plane)
            if found is None:
                continue
            self._add_up(waiting)
            waiting = []
            x = self.given if plane < p.inputs else self.buffer
            if found.first:
                read = self._activated(found.first, x)
                self._run_stages(found.first, read, self.buffer, partial, size, self.rows)
                self.schedule.free(read.tensor)
            self._pool(found.pools, x, partial)
            self._measure(partial, found.measured, self.rows)
            if found.second:
                read = self._activated(found.second, self.buffer)
                self._run_stages(found.second, read, self.buffer, partial, size, self.rows)
                self.schedule.free(read.tensor)
            self._measure(partial, found.measured_second, self.rows)
        self._add_up(waiting)
        if partial is not None:
            self.schedule.free(partial.tensor)

    def _preprocess(self):
        p = self.program
        partial = None if self.form.known else self._partial(self.tiles(self.rows_in), p.inputs)
        for number in range(p.inputs):
            stages = tuple(s for s in p.preprocess if s.source == -1 - number)
            # A pass with given statistics is not captured, so Python's launch overhead dominates.
            first = number + 1 < p.inputs and not self.form.known
            with self.beside() if first else nullcontext():
                read = self._external(number)
                self._run_stages(stages, read, self.given, partial, (self.height, self.width), self.rows_in)
        self.schedule.join()
        self._measure(partial, tuple(range(p.inputs)), self.rows_in)
        if partial is not None:
            self.schedule.free(partial.tensor)

    def begin(self):
        """Transposed depthwise kernels, and the planes' state [8, planes, c] ([9, planes, c] if shared).

        Mean, 1/√(variance + eps) and variance; the two coefficients of the value, 1 and 0 without a norm; the three of
        the gradient, initially 1, 0 and 0, which the backward pass fills; if ranks share norms, 1 / the total number of
        rows.
        """
        p, c = self.program, self.c
        deep = [s for s in _stages_of(p) if s.depth != NONE]
        jobs = tuple((s.depth, self._depth_at(s), s.taps) for s in deep)
        self.schedule.new("depths", sum(s.taps for s in deep) * c, torch.float32)
        state = self.schedule.new("state", (9 if self.form.shared else 8) * p.planes * c, torch.float32)
        self.split_state(state)
        longest = max(p.planes, *(s.taps for s in deep), 1) * c
        self.schedule.launch(
            _start, (len(jobs) + 8, triton.cdiv(longest, 1024)), self.parameters, self.depths, state,
            self.schedule.table(jobs or ((0,) * 3,)), len(jobs), p.planes * c, C=c, BLOCK=1024,
        )  # fmt: skip
        if self.form.known and p.norms:
            jobs = tuple((norm.plane, norm.scale, norm.shift) for norm in p.norms)
            self.schedule.launch(
                _known_moments, (len(jobs), triton.cdiv(c, 128)), self.running, self.parameters, self.moments,
                self.coefficients, self.schedule.table(jobs), p.planes, p.eps, C=c, BLOCK=128,
            )  # fmt: skip

    def _measure(self, partial, planes, rows):
        if partial is not None and planes:
            measure(self, partial, planes, rows)

    def _add_up(self, planes):
        """Sums into several nodes at a time, because one node does not fill a GPU."""
        if not planes:
            return
        p, c = self.program, self.c
        nodes, jobs = [], []
        for plane in planes:
            begin = len(jobs)
            jobs += [(*self.view(a.plane), a.plane, a.path) for a in p.node_inputs[plane - p.inputs]]
            nodes.append((begin, len(jobs), (plane - p.inputs) * (self.rows if self.form.apart else 1)))
        block = max(1, self.blocks.add_elements // self.block_c)
        self.schedule.launch(
            _add_up, (triton.cdiv(self.rows, block), len(nodes), triton.cdiv(c, self.block_c)), self.buffer,
            self.coefficients, self._scales(), self.schedule.table(nodes),
            self.schedule.table(jobs or ((0, 0, 0, 0, NONE),)), self.rows, size=self.rows * c, planes=p.planes,
            distance=1 if self.form.apart else p.nodes, C=c, CB=self.block_c, BLOCK=block, **self._drops(),
        )  # fmt: skip

    def _pool(self, pools, x, partial):
        if not pools:
            return
        p, c = self.program, self.c
        first = pools[0].source < p.inputs
        height, width = (self.height, self.width) if first else (self.out_height, self.out_width)
        jobs = tuple((*self.view(q.source), q.source, q.plane, self.unit(q.plane), q.slot) for q in pools)
        stats = partial is not None and any(q.plane in self.norms for q in pools)
        self.schedule.launch(
            _pools, (self.tiles(self.rows), len(jobs), triton.cdiv(c, self.block_c)), x, self.coefficients, self.buffer,
            self.winners, partial.tensor if stats else self.parameters, self.schedule.table(jobs), self.rows, height,
            width, self.out_height, self.out_width, self._plane_size(x), self.rows * c, p.planes, C=c, CB=self.block_c,
            STRIDE=pools[0].stride, BLOCK=self.tile, STATS=stats, num_warps=8,
        )  # fmt: skip


class Backward(Lowering):
    """One backward pass of a program, from the gradient of its output to those of parameters and input tensors."""

    def plan(self):
        """`buffer_gradient` begins with the gradients of the nodes, which a run copies there."""
        p = self.program
        self.split_state(Name("state"))
        self.parameter_gradient = Name("parameter_gradient")
        self.schedule.new("parameter_gradient", self.form.num_parameters, torch.float32)  # kernels write every element
        self.weights = WeightGradients(self)
        arrived = []
        for plane in reversed((p.inputs - 1, *p.node_planes)):
            found = p.round_of(plane)
            if found is not None:
                self._arrive(arrived)
                arrived = []
                self._leave(found)
            if p.is_node(plane):
                arrived.append(plane)
        self._leave_inputs()
        with self.beside():
            self.weights.finish(self.parameter_gradient)
        self.schedule.join()

    def _arrive(self, nodes):
        """Sums over the gradients of finished nodes, for the norms of their inputs."""
        p = self.program
        inputs = [a.plane for node in nodes for a in p.node_inputs[node - p.inputs]]
        planes = tuple(plane for plane in inputs if plane in self.norms and plane >= p.inputs)
        if not planes:
            return
        arrival_sums(self, tuple(self._pull_fields(plane) for plane in planes), planes)

    def _leave(self, found):
        """Computes the gradients of a round's sources from those of all their outgoing operations."""
        p = self.program
        inward = found.sources[0] < p.inputs
        if found.second:
            inner = tuple(stage.source for stage in found.second)
            lowered = self._lower_and_weigh(found.second, self.buffer)
            self._gather(inner, found.second, (), lowered, self.buffer, self.gradient, adds=False, stats=inner)
        x, dx = (self.given, self.given_gradient) if inward else (self.buffer, self.gradient)
        lowered = self._lower_and_weigh(found.first, x) if found.first else Lowered(x, 0, 0)
        stats = found.sources if inward and not p.is_raw else ()
        self._gather(found.sources, found.first, found.pools, lowered, x, dx, adds=not inward, stats=stats)

    def _lower_and_weigh(self, stages, x):
        """Gradients of depthwise results [stages, n, h' + 2 border, w' + 2 border, c], and of weights."""
        factors, read, border = self.by_factors(stages), None, border_of(stages)
        if not factors or self.blocks.weight_factors == 2:
            with self.beside():  # only read by gradients of weights
                read = self._activated(stages, x)
        pixels = self.n * (self.out_height + 2 * border) * (self.out_width + 2 * border)
        size = pixels * self.pitch
        to = self.temporary(len(stages) * size, self.dtype)
        dy = self.temporary(len(stages) * self.rows * self.pitch, self.dtype)
        lowered = Lowered(to, size, border)
        if self.blocks.lower_tiles and self.tiles_fit(stages):
            self._lower_tiles(stages, lowered, dy, pixels - self.rows)
        else:
            self._lower(stages, lowered, dy, pixels - self.rows)
        with self.beside():
            if factors:
                dense = self._depthwise_results(stages, read)
                self.weights.add_by_factors(stages, x, dense, dy, lowered)
                if read is not None:
                    self.schedule.free(dense.tensor)
            else:
                self.weights.add(stages, read, dy, (self.out_height, self.out_width), self.rows)
        self.schedule.free(*((dy,) if read is None else (read.tensor, dy)))
        return lowered

    def _depthwise_results(self, stages, read):
        """Depthwise results as maps: kept by the forward pass, or recomputed from `read`."""
        if read is None:
            return self.dense(stages, self.depthwise, self.numbers[stages[0]])
        to = self.temporary(len(stages) * self.rows * self.pitch, self.dtype)
        self.depthwise_lines(stages, read, to)
        return self.dense(stages, to)

    def _gather(self, sources, stages, pools, lowered, x, dx, *, adds, stats):
        p, c = self.program, self.c
        own, jobs, others = [], [], []
        for i, source in enumerate(sources):
            begin, other = len(jobs), len(others)
            jobs += [
                (s.size, s.dilation, s.padding, self._depth_at(s), at)
                for at, s in enumerate(stages)
                if s.source == source
            ]
            for j, node_inputs in enumerate(p.node_inputs):
                for a in node_inputs:
                    if a.plane == source and (source < p.inputs or p.is_node(source)):
                        others.append((*self.gradient_view(p.inputs + j), a.path, 0, -2))
            others += [(0, 0, 0, 0, number, q.slot) for number, q in enumerate(pools) if q.source == source]
            fields = (source, begin, len(jobs), other, len(others), i)
            own.append((*self.view(source), *fields, *self.gradient_view(source)))
        first = sources[0] < p.inputs
        height, width, rows = (
            (self.height, self.width, self.rows_in) if first else (self.out_height, self.out_width, self.rows)
        )
        stride = p.stride if first else 1
        pulled = self._pulls(pools)
        groups, sizes, dilations = self.blocks.gather_groups, {s.size for s in stages}, {s.dilation for s in stages}
        size = sizes.pop() if len(sizes) == 1 else 0
        by_lines = groups > 0 and stride == 1 and size in (3, 5, 7) and dilations <= {1, 2}
        if by_lines:
            tiles = triton.cdiv(self.n * triton.cdiv(height, 4), groups)
            grid = (tiles, len(own), triton.cdiv(width * self.pitch, self.blocks.gather_flat))
            splits = tiles * width
        else:
            splits = tiles = triton.cdiv(rows, self.blocks.gather_rows)
            grid = (tiles, len(own), triton.cdiv(c, self.block_c))
        partial = self._partial(splits, len(sources)) if stats else None
        tensors = (
            x, self.coefficients, self.moments, self.depths, lowered.tensor, self.gradient,
            x if pulled is None else pulled, dx, self._scales(), self.winners,
            self.parameters if partial is None else partial.tensor, self.schedule.table(own),
            self.schedule.table(jobs or ((0,) * 5,)), self.schedule.table(others or ((0,) * 6,)),
        )  # fmt: skip
        sizes = (self.n, self._plane_size(x), self.rows * c, lowered.size, p.planes, len(sources))
        common = {"C": c, "PITCH": self.pitch, "SIZE": size, "DROPS": self.form.drops, "POOLED": bool(pools)}
        common |= {
            "STATS": partial is not None,
            "ADDS": adds,
            "TOGETHER": bool(self.blocks.gather_together and (self.blocks.lines_together or not by_lines)),
            "num_warps": self.blocks.gather_warps,
        }
        if by_lines:
            self.schedule.launch(
                _gather_lines, grid, *tensors, height, width, lowered.border, *sizes, GROUPS=groups,
                DILATION=dilations.pop() if len(dilations) == 1 else 0, FLAT=self.blocks.gather_flat,
                **at_most(self.blocks.gather_registers), **common,
            )  # fmt: skip
        else:
            self.schedule.launch(
                _gather, grid, *tensors, rows, height, width, self.out_height, self.out_width, lowered.border, *sizes,
                CB=self.block_c, STEP=size or 3, STRIDE=stride, BLOCK=self.blocks.gather_rows, **common,
            )  # fmt: skip
        if stages:
            self.schedule.free(lowered.tensor)
        if pulled is not None:
            self.schedule.free(pulled)
        if partial is not None:
            finish_slopes(self, partial, sources, rows)

    def _pulls(self, pools):
        if not pools:
            return None
        p, c = self.program, self.c
        to = self.temporary(len(pools) * self.rows * c, self.dtype)
        jobs = tuple(self._pull_fields(q.plane) for q in pools)
        block = max(1, self.blocks.add_elements // self.block_c)
        self.schedule.launch(
            _pulls, (triton.cdiv(self.rows, block), len(jobs), triton.cdiv(c, self.block_c)), self.gradient,
            self.buffer, self._scales(), self.slopes, to, self.schedule.table(jobs), self.rows, size=self.rows * c,
            planes=p.planes, C=c, CB=self.block_c, BLOCK=block, **self._drops(),
        )  # fmt: skip
        return to

    def _leave_inputs(self):
        """Gradients of the input tensors, [n, h_i, w_i, c_i]."""
        p = self.program
        if p.is_raw:
            for number in range(p.inputs):
                self.schedule.view(
                    f"input{number}_gradient", self.given_gradient, self.unit(number) * self.rows_in * self.c
                )
            return
        for number, x in enumerate(self.inputs):
            stages = tuple(s for s in p.preprocess if s.source == -1 - number)
            size = math.prod(self.form.shapes[number])
            last = number + 1 == p.inputs
            room = max(size, self.form.room) if last else size
            to = self.schedule.new(f"input{number}_gradient", room, self.dtype, zeroed=stages[0].stride != 1)
            more = Name("passed") if last and self.form.passed else None
            dy = self.temporary(len(stages) * self.rows_in * self.pitch, self.dtype)
            if self.blocks.input_tiles and self.tiles_fit(stages) and stages[0].padding == 0:
                self._lower_tiles(stages, Lowered(to, size, 0), dy, 0, x, more)
            else:
                self._lower_input(number, stages, to, dy, more)
            with self.beside():
                self.weights.add(stages, self._external(number), dy, (self.height, self.width), self.rows_in)
            self.schedule.free(dy)


def forward_schedule(program, form, device):
    """The schedule of a forward pass.

    Inputs: parameters, input0…, running if statistics are given, factors if drop-path is active. Outputs: buffer and
    given, state, winners and depths.
    """
    return _scheduled(Forward, program, form, device, overridden())


def backward_schedule(program, form, device):
    """The schedule of a backward pass.

    Inputs: inputs and outputs of the forward pass, buffer_gradient and given_gradient, and passed if the form says so.
    Outputs: parameter_gradient, input0_gradient….
    """
    return _scheduled(Backward, program, form, device, overridden())


# The last argument is only part of the cache key: a plan also depends on `OVERRIDES`.
@functools.lru_cache(maxsize=512)
def _scheduled(kind, program, form, device, _):
    names = ("parameters", "running", "factors", "state", "depths")
    given = {"winners": torch.uint8, **dict.fromkeys(names, torch.float32)}
    own = (
        "given",
        "buffer",
        "depthwise",
        "given_gradient",
        "passed",
        "buffer_gradient",
        *(f"input{i}" for i in range(program.inputs)),
    )
    schedule = Schedule(device, given | dict.fromkeys(own, form.dtype))
    kind(program, form, schedule).plan()
    return schedule
