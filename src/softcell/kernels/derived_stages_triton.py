# mypy: ignore-errors
"""Launches the stages of `derived`: pixel by pixel, by lines, or with separate depthwise and matrix kernels."""

from dataclasses import replace

import triton

from softcell.kernels.backend import padded
from softcell.kernels.derived_forward_triton import _stages
from softcell.kernels.derived_layout_triton import MULTIPROCESSORS, Pass, at_most, by_size, points, side_for
from softcell.kernels.derived_lines_triton import _stage_lines
from softcell.kernels.derived_tiles_triton import _point_tiles


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
