# mypy: ignore-errors
"""Launches the stages of `derived` and the propagation of gradients back through their norms and matrices.

Stages run pixel by pixel, by lines, or with separate depthwise and matrix kernels. Gradients are propagated block by
block, or by programs that loop over rows.
"""

from dataclasses import replace

import torch
import triton

from softcell.kernels.backend import padded
from softcell.kernels.derived_forward_triton import _point_tiles, _stages
from softcell.kernels.derived_gradient_triton import _lower, _lower_tiles
from softcell.kernels.derived_layout_triton import MULTIPROCESSORS, Pass, at_most, by_size, points, side_for
from softcell.kernels.derived_lines_triton import _pull_lines, _stage_lines
from softcell.kernels.derived_program import NONE, consumers, nodes_read
from softcell.kernels.schedule import Name


class Stages(Pass):
    """The part of a pass that runs stages: matrix · depthwise(x) of the maps in `Read`, into planes of y."""

    def _run_stages(self, stages, read, y, partial, size, rows):
        """size: of the output."""
        # A pass with given statistics is not captured, so Python's launch overhead dominates.
        lines = 0 if self.form.known and self.blocks.stage_lines == 2 else self.blocks.stage_lines
        for group in by_size(stages):
            fits = group[0].size in (3, 5, 7) and group[0].stride == 1 and all(s.dilation in (1, 2) for s in group)
            whole = size[0] % 4 == 0 and rows % self.tile == 0
            if lines == 1 and fits and whole:
                self._run_lines(group, read, y, partial, size, rows)
            elif (lines == 2 and fits) or self.keeps(group):
                self._run_apart(group, read, y, partial, size, rows)
            else:
                self._run_group(group, read, y, partial, size, rows)

    def keeps(self, stages):
        """Whether their depthwise results are kept for the backward pass."""
        return self.blocks.weight_factors == 1 and stages[0] in self.numbers

    def _kept_of(self, stages):
        return self.schedule.view(
            f"depthwise{self.numbers[stages[0]]}", self.depthwise, self.numbers[stages[0]] * self.rows * self.pitch
        )

    def _stage_jobs(self, stages, windows, block_n):
        """What `_stages` reads: windows, weights, output locations, and their first columns."""
        return tuple(
            (*window, stage.matrix // self.weights_unit, stage.width // self.columns_unit, self.unit(stage.plane),
             stage.plane, stage.column // self.columns_unit, first // 16)
            for stage, window in zip(stages, windows, strict=True)
            for first in range(0, stage.width, block_n)
        )  # fmt: skip

    def _run_lines(self, stages, read, y, partial, size, rows):
        c, dilations = self.c, {stage.dilation for stage in stages}
        block_n = min(256, padded(max(stage.width for stage in stages)))
        jobs = self._stage_jobs(stages, [(*read.window(s), self._depth_at(s)) for s in stages], block_n)
        keeps = self.keeps(stages)  # jobs and stages have the same numbers here: stages are at most as wide as a block
        self.schedule.launch(
            _stage_lines, (rows // self.tile, len(jobs)), read.tensor, self.parameters, self.depths, y,
            y if partial is None else partial.tensor, self._kept_of(stages) if keeps else y, self.schedule.table(jobs),
            read.tall, read.wide, *size, read.size, self._plane_size(y), rows * self.pitch, self.program.planes, C=c,
            PITCH=read.pitch, WEIGHTS=self.weights_unit, COLUMNS=self.columns_unit, SIZE=stages[0].size,
            DILATION=dilations.pop() if len(dilations) == 1 else 0, SITES=self.tile // 4, BLOCK_N=block_n,
            BLOCK_K=min(self.blocks.stage_depth, padded(c)), STATS=partial is not None, KEEPS=keeps,
            PRECISION=self.precision, num_warps=self.blocks.stage_warps, num_stages=1,
            **at_most(self.blocks.stage_registers),
        )  # fmt: skip

    def _run_apart(self, stages, read, y, partial, size, rows):
        """One launch for the depthwise convolutions, then one for the matrices."""
        keeps = self.keeps(stages)
        to = self._kept_of(stages) if keeps else self.temporary(len(stages) * rows * self.pitch, self.dtype)
        self.depthwise_lines(stages, read, to)
        if self.blocks.point_tiles and self.tiles_fit(stages):
            self._run_tiles(stages, to, y, partial, rows)
        else:
            # Rows of a dense map are treated as maps of one pixel, whose positions need no arithmetic.
            self._run_group(points(stages), replace(self.dense(stages, to), tall=1, wide=1), y, partial, (1, 1), rows)
        if not keeps:
            self.schedule.free(to)

    def _run_tiles(self, stages, to, y, partial, rows):
        """Multiplies depthwise results `to` with matrices, by programs that loop over blocks of rows."""
        c, b, block_n = self.c, self.blocks, side_for(self.c, self.blocks.point_side)
        jobs = tuple(
            (i, s.matrix // self.weights_unit, self.unit(s.plane), s.plane, first // 16)
            for i, s in enumerate(stages)
            for first in range(0, c, block_n)
        )
        programs = min(triton.cdiv(rows, self.tile), max(1, MULTIPROCESSORS * b.point_tile_programs // len(jobs)))
        self.schedule.launch(
            _point_tiles, (programs, len(jobs)), to, self.parameters, y, y if partial is None else partial.tensor,
            self.schedule.table(jobs), rows, programs, rows * self.pitch, self._plane_size(y), self.program.planes, C=c,
            PITCH=self.pitch, WEIGHTS=self.weights_unit, BLOCK_M=self.tile, BLOCK_N=block_n, BLOCK_K=padded(c),
            STAGES=b.point_tile_stages, STATS=partial is not None, EVEN=rows % self.tile == 0, PRECISION=self.precision,
            num_warps=8,
        )  # fmt: skip

    def _run_group(self, stages, read, y, partial, size, rows):
        p, c = self.program, self.c
        external = stages[0].source < 0
        widest, windowed = max(stage.width for stage in stages), stages[0].size > 1
        if windowed:
            block_n, depth = min(256, padded(widest)), self.blocks.stage_depth
        else:
            depth = self.blocks.input_depth if external else self.blocks.point_depth
            block_n = side_for(widest, self.blocks.point_side)
        jobs = self._stage_jobs(stages, [(*read.window(s), self._depth_at(s)) for s in stages], block_n)
        self.schedule.launch(
            _stages, (triton.cdiv(rows, self.tile), len(jobs)), read.tensor, self.parameters, self.depths, y,
            y if partial is None else partial.tensor, self.schedule.table(jobs), rows, read.tall, read.wide, size[0],
            size[1], read.size, self._plane_size(y), p.inputs if external else p.planes, C=c, FAN_IN=stages[0].fan_in,
            PITCH=read.pitch, WEIGHTS=self.weights_unit, COLUMNS=self.columns_unit, SIZE=stages[0].size,
            STRIDE=stages[0].stride, BLOCK_M=self.tile, BLOCK_N=block_n, BLOCK_K=min(depth, padded(stages[0].fan_in)),
            EXTERNAL=external, STATS=partial is not None, PRODUCTS=bool(self.blocks.product_sums),
            EVEN=rows % self.tile == 0, PRECISION=self.precision, num_warps=8 if external else self.blocks.stage_warps,
            **at_most(0 if external else self.blocks.stage_registers),
        )  # fmt: skip


class Lowering(Pass):
    """The part of a backward pass from gradients of planes to those of the inputs of their stages' matrices."""

    def __init__(self, program, form, schedule):
        super().__init__(program, form, schedule)
        self.gradient = Name("buffer_gradient")
        self.given_gradient = self.gradient if program.stride == 1 else Name("given_gradient")
        self.extra = nodes_read(program)

    def gradient_view(self, plane):
        """`view` of the complete gradient of a plane's value.

        A node that a round reads has a separate map at the end of the buffer: gradients that arrive from outside may
        still be read there, so nothing is added in place.
        """
        if plane in self.extra:
            return self.units() + self.extra.index(plane), 0, 1
        return self.view(plane)

    def _pull_fields(self, plane, column=0):
        """Where the gradient of a plane's value is read: at its node if it has one, otherwise where it was gathered."""
        p = self.program
        place = consumers(p).get(plane)
        if place is None:
            return *self.view(plane), NONE, self.unit(plane), plane, column // self.columns_unit
        j, i = place
        return (
            *self.gradient_view(p.inputs + j),
            p.node_inputs[j][i].path,
            self.unit(plane),
            plane,
            column // self.columns_unit,
        )

    def _lower_tiles(self, stages, lowered, dy, outside, x=None, more=None):
        """Computes ∂y of stages and gradients of depthwise results; `outside` is the number of border pixels.

        x: an input tensor, whose gradient is computed instead; more: is added to it.
        """
        b, c, fan_in, external = self.blocks, self.c, stages[0].fan_in, x is not None
        # With several blocks of channels, each of them would recompute ∂y.
        pulled = external or c > b.tile_pulled
        g, y, rows, size = self.gradient, self.buffer, self.rows, (self.out_height, self.out_width)
        if external:
            g, y, rows, size = self.given_gradient, self.given, self.rows_in, (self.height, self.width)
        drops = self.form.drops and not external
        if pulled:
            self._pull(stages, g, y, dy, size, drops)
        block_k = min(b.lower_columns if external else b.lower_inner, padded(fan_in)) if pulled else padded(c)
        jobs = tuple(
            (*self._pull_fields(s.plane), s.matrix // self.weights_unit, i, first // 16)
            for i, s in enumerate(stages)
            for first in range(0, fan_in, block_k)
        )
        aligned = (rows if external else size[0] * size[1]) % b.lower_rows == 0
        aligned = aligned and (external or b.lower_rows % size[1] == 0)
        programs = min(triton.cdiv(rows, b.lower_rows), max(1, MULTIPROCESSORS * b.tile_programs // len(jobs)))
        # Rows of `more` are prefetched as well: three of 128 rows in float32 take 256 KB of shared memory.
        large = more is not None and b.lower_rows > 64 and self.dtype == torch.float32
        in_flight = min(2, b.tile_stages) if large else b.tile_stages
        self.schedule.launch(
            _lower_tiles, (programs + triton.cdiv(outside, b.lower_rows), len(jobs)), g, y, self.parameters,
            self._scales(), self.slopes, x or y, more or y, lowered.tensor, dy, self.schedule.table(jobs), rows,
            programs, self.n, size=self._plane_size(y), planes=self.program.planes, HEIGHT=size[0], WIDTH=size[1],
            BORDER=lowered.border, to_size=lowered.size, dy_size=rows * self.pitch, C=c, FAN_IN=fan_in,
            PITCH=fan_in if external else self.pitch, DY_PITCH=self.pitch, EXTERNAL=external, WEIGHTS=self.weights_unit,
            BLOCK_M=b.lower_rows, BLOCK_N=padded(c), BLOCK_K=block_k, STAGES=in_flight, PULLED=pulled,
            ALIGNED=aligned, DROPS=drops, ADDS=more is not None, PRECISION=self.precision, num_warps=b.lower_warps,
            **at_most(b.tile_registers),
        )  # fmt: skip

    def _lower(self, stages, lowered, dy, outside):
        """`_lower_tiles` of inner stages, with a program for each block of rows and channels."""
        p, c, border, block = self.program, self.c, lowered.border, self.blocks.lower_rows
        block_k = min(self.blocks.lower_inner, padded(c))
        apart = self._pull_dense(
            stages, self.gradient, self.buffer, dy, (self.out_height, self.out_width), self.form.drops
        )
        jobs = tuple(
            (*self._pull_fields(s.plane, s.column), s.matrix // self.weights_unit, s.width // self.columns_unit, i,
             first // 16, border)
            for i, s in enumerate(stages)
            for first in range(0, s.fan_in, block_k)
        )  # fmt: skip
        self.schedule.launch(
            _lower, (triton.cdiv(self.rows, block) + triton.cdiv(outside, block), len(jobs)), self.gradient,
            self.buffer, self.parameters, self._scales(), self.slopes, *(lowered.tensor,) * 3, dy,
            self.schedule.table(jobs), self.rows, size=self.rows * c, planes=p.planes, HEIGHT=0, WIDTH=0,
            OUT_HEIGHT=self.out_height, OUT_WIDTH=self.out_width, BORDER=border, to_size=lowered.size,
            dy_size=self.rows * self.pitch, C=c, FAN_IN=c, PITCH=self.pitch, DY_PITCH=self.pitch,
            WEIGHTS=self.weights_unit, COLUMNS=self.columns_unit, STRIDE=1, BLOCK_M=block, BLOCK_K=block_k,
            EXTERNAL=False, ADDS=False, PRECISION=self.precision, num_warps=self.blocks.lower_warps, **apart,
            **at_most(self.blocks.lower_registers), **self._drops(),
        )  # fmt: skip

    def _lower_input(self, number, stages, to, dy, more=None):
        """Computes ∂y of stages, and the gradient of the input tensor that they read, plus `more`."""
        p, c, shape, stride = self.program, self.c, self.form.shapes[number], stages[0].stride
        block_k = min(self.blocks.lower_columns, padded(stages[0].fan_in))
        jobs = tuple(
            (*self._pull_fields(s.plane, s.column), s.matrix // self.weights_unit, s.width // self.columns_unit, i,
             first // 16, -s.padding)
            for i, s in enumerate(stages)
            for first in range(0, s.fan_in, block_k)
        )  # fmt: skip
        fan_in, block = stages[0].fan_in, self.blocks.lower_rows
        apart = self._pull_dense(stages, self.given_gradient, self.given, dy, (self.height, self.width), False)
        self.schedule.launch(
            _lower, (triton.cdiv(self.rows_in, block), len(jobs)), self.given_gradient, self.given, self.parameters,
            self._scales(), self.slopes, self.inputs[number], more or to, to, dy, self.schedule.table(jobs),
            self.rows_in, self.height * self.width, self.n, self._plane_size(self.given), p.planes, shape[1], shape[2],
            self.height, self.width, 0, 0, self.rows_in * self.pitch, C=c, FAN_IN=fan_in, PITCH=fan_in,
            DY_PITCH=self.pitch, WEIGHTS=self.weights_unit, COLUMNS=self.columns_unit, STRIDE=stride, BLOCK_M=block,
            BLOCK_K=block_k, DROPS=False, EXTERNAL=True, ADDS=more is not None, PRECISION=self.precision,
            num_warps=self.blocks.lower_warps, **apart, **at_most(self.blocks.lower_registers),
        )  # fmt: skip

    def _pull_dense(self, stages, gradient, y, dy, size, drops):
        """Writes ∂y of stages before `_lower` if `lower_apart` is set; returns its extra arguments."""
        c, b = self.c, self.blocks
        depth = min(b.lower_pulled if b.lower_apart else b.lower_depth, padded(c))
        known = {"PULLED": bool(b.lower_apart), "WHOLE": self.columns_unit == c, "BLOCK_N": depth}
        if not b.lower_apart:
            return known | {"num_stages": 1}
        self._pull(stages, gradient, y, dy, size, drops)
        return known | {"num_stages": 1 if depth >= c else b.lower_stages}

    def _pull(self, stages, gradient, y, dy, size, drops):
        """Launches the kernel that writes ∂y of stages."""
        self.schedule.launch(
            _pull_lines, self.flat_grid(self.n * size[0], len(stages), size[1] * self.pitch), gradient, y,
            self._scales(), self.slopes, dy, self.schedule.table(tuple(self._pull_fields(s.plane) for s in stages)),
            self.n, *size, self._plane_size(y), self.program.planes, size[0] * size[1] * self.n * self.pitch, C=self.c,
            PITCH=self.pitch, DROPS=drops, **self._flat(),
        )  # fmt: skip
