# mypy: ignore-errors
"""Gradients of the weights of `derived`: kernels, and the plan of their partial sums.

They are derived from the gradient of the dense kernel depthwise[tap, k] · matrix[n, k], computed by tensor cores.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from softcell.kernels.backend import padded
from softcell.kernels.derived_layout_triton import MULTIPROCESSORS, by_size, points, side_for
from softcell.kernels.derived_program import NONE


@triton.jit(do_not_specialize=["rows", "rows_each"])
def _weight_gradient(
    dy_ptr, x_ptr, to_ptr, jobs_ptr, rows, rows_each, TALL: tl.constexpr, WIDE: tl.constexpr, OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr, dy_size, x_size, to_size, DY_PITCH: tl.constexpr, FAN_IN: tl.constexpr,
    X_PITCH: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EXTERNAL: tl.constexpr, WHOLE: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ over rows of ∂y[n] · x[tap, k]: the gradient of a dense kernel.

    Taps and channels are one axis of SIZE² · X_PITCH columns, so that only the last block is partly filled. There may
    be padding columns between the channels of two taps; their sums are not stored. WHOLE: all stages write planes
    starting at the first column. ALIGNED: blocks are complete lines of one image, so that addresses increase by a
    constant from block to block.
    """
    job = jobs_ptr + tl.program_id(0) * 10
    unit, column, columns = tl.load(job), tl.load(job + 1) * COLUMNS, tl.load(job + 2) * COLUMNS
    source, dilation, shift, padding = tl.load(job + 3), tl.load(job + 4), tl.load(job + 5), tl.load(job + 6)
    to = tl.load(job + 7)
    n = tl.load(job + 8) * 16 + tl.arange(0, BLOCK_N)
    k = tl.load(job + 9) * 16 + tl.arange(0, BLOCK_K)
    tap = k // X_PITCH
    channel = k % X_PITCH
    away = ((tap // SIZE) * WIDE + tap % SIZE) * dilation * X_PITCH + channel
    k_ok = k < SIZE * SIZE * X_PITCH
    if WHOLE:
        column = 0
    # Columns beyond the last one belong to another stage or are padding; masking them would make loads narrower.
    n_ok = column + n < DY_PITCH
    area: tl.constexpr = OUT_HEIGHT * OUT_WIDTH
    begin = tl.program_id(1) * rows_each
    end = tl.minimum(begin + rows_each, rows)
    dy_base = dy_ptr + unit.to(tl.int64) * dy_size + column
    base = x_ptr + source.to(tl.int64) * x_size
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    inner = tl.arange(0, BLOCK_M)
    dy_at = dy_base + (inner * DY_PITCH)[:, None] + n[None, :]
    places = ((inner // OUT_WIDTH * WIDE + inner % OUT_WIDTH) * STRIDE + shift) * X_PITCH
    x_at = base + places[:, None] + away[None, :]
    for start in range(begin, end, BLOCK_M):
        if ALIGNED:
            image = start // area
            line = (start - image * area) // OUT_WIDTH * STRIDE
            dy = tl.load(dy_at + start * DY_PITCH, mask=n_ok[None, :], other=0.0)
            x = tl.load(x_at + (image * TALL + line) * WIDE * X_PITCH, mask=k_ok[None, :], other=0.0)
        else:
            m = start + inner
            m_ok = m < end
            image = m // area
            inside = m - image * area
            h = (inside // OUT_WIDTH) * STRIDE
            w = (inside % OUT_WIDTH) * STRIDE
            row = (image * TALL + h) * WIDE + w + shift
            ok = m_ok[:, None] & k_ok[None, :]
            if EXTERNAL and STRIDE > 1:
                ok = ok & ((h - padding < TALL) & (w - padding < WIDE))[:, None]
            dy = tl.load(dy_at + start * DY_PITCH, mask=m_ok[:, None] & n_ok[None, :], other=0.0)
            x = tl.load(base + (row * X_PITCH)[:, None] + away[None, :], mask=ok, other=0.0)
        if EXTERNAL:
            x = tl.maximum(x, 0.0).to(x.dtype)
        total = tl.dot(tl.trans(dy), x, total, input_precision=PRECISION)
    at = to_ptr + tl.program_id(1).to(tl.int64) * to_size + to + (n * FAN_IN)[:, None]
    at += (tap * columns * FAN_IN + channel)[None, :]
    tl.store(at, total, mask=(n < columns)[:, None] & (k_ok & (channel < FAN_IN))[None, :])


@triton.jit
def _sum_splits(sums_ptr, to_ptr, jobs_ptr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Adds the splits of partial sums: of dense kernels into the first split, of matrices into their gradients."""
    job = jobs_ptr + tl.program_id(0) * 6
    start, length, apart, splits = tl.load(job), tl.load(job + 1), tl.load(job + 2), tl.load(job + 3)
    i = tl.load(job + 4) * BLOCK + tl.arange(0, BLOCK)
    to = tl.load(job + 5)
    ok = i < length
    total = tl.zeros((SPLITS, BLOCK), dtype=tl.float32)
    for begin in range(0, splits, SPLITS):
        split = begin + tl.arange(0, SPLITS)
        at = sums_ptr + start + (split * apart)[:, None] + i[None, :]
        total += tl.load(at, mask=(split < splits)[:, None] & ok[None, :], other=0.0)
    found = tl.sum(total, 0)
    if to >= 0:
        tl.store(to_ptr + to + i, found, mask=ok)
    else:
        tl.debug_barrier()  # all of the first split has been read before
        tl.store(sums_ptr + start + i, found, mask=ok)


@triton.jit
def _finish_weights(
    dense_ptr, w_ptr, depth_ptr, to_ptr, jobs_ptr, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Computes the gradients of both factors from that of the dense kernel, depthwise[tap, k] · matrix[n, k]."""
    job = jobs_ptr + tl.program_id(0) * 5
    dense, matrix, depth, start = tl.load(job), tl.load(job + 1), tl.load(job + 2), tl.load(job + 3) * C
    taps = tl.load(job + 4)
    n = tl.arange(0, BLOCK_N)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    k_ok = k < C
    ok = (n < C)[:, None] & k_ok[None, :]
    inner = (n * C)[:, None] + k[None, :]
    weight = tl.load(w_ptr + matrix + inner, mask=ok, other=0.0)
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for tap in range(taps):
        gradient = tl.load(dense_ptr + dense + tap * C * C + inner, mask=ok, other=0.0)
        scale = tl.load(depth_ptr + start + tap * C + k, mask=k_ok, other=0.0)
        total += gradient * scale[None, :]
        tl.store(to_ptr + depth + k * taps + tap, tl.sum(gradient * weight, 0), mask=k_ok)
    tl.store(to_ptr + matrix + inner, total, mask=ok)


@triton.jit
def _products(
    u0, u1, u2, z0, z1, z2, z3, at, line, ok, last: tl.constexpr, STRAIGHT: tl.constexpr, DILATION: tl.constexpr
):  # fmt: skip
    """Adds the products of four lines z with a column of vertically adjacent gradients, for three taps."""
    for v in tl.static_range(4 + 2 * DILATION):
        below = line + v
        if last > 0:
            below = tl.minimum(below, last)
        x = tl.load(at + below * STRAIGHT, mask=ok, other=0.0).to(tl.float32)
        for number in tl.static_range(4):
            z = (z0, z1, z2, z3)[number]
            # Tap r of line l contributes to line l - r · DILATION, counted from the topmost one.
            if v == number + 2 * DILATION:
                u0 += x * z
            if v == number + DILATION:
                u1 += x * z
            if v == number:
                u2 += x * z
    return u0, u1, u2


@triton.jit
def _value(at, a, b, ok):
    """ReLU(z) as it was read by windows."""
    y = tl.load(at, mask=ok, other=0.0)
    z = tl.where(ok, tl.maximum(y.to(tl.float32) * a + b, 0.0), 0.0)
    return z.to(y.dtype).to(tl.float32)


@triton.jit(do_not_specialize=["samples", "planes", "groups_each"])
def _depth_gradient(
    x_ptr, coefficients_ptr, lowered_ptr, to_ptr, jobs_ptr, samples, groups_each, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, BORDER: tl.constexpr, x_size, lowered_size, planes, C: tl.constexpr, PITCH: tl.constexpr,
    DILATION: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """The depthwise gradient: Σ over pixels of ReLU(z) · (gradient of the depthwise result) at 3×3 taps, by column.

    A program adds groups of four lines. Threads are spread over FLAT values of a line, so nothing is summed across
    threads. DILATION: that of all windows, 0 if it is 1 or 2.
    """
    job = jobs_ptr + tl.program_id(1) * 8
    unit, column, distance, plane = tl.load(job), tl.load(job + 1) * C, tl.load(job + 2) * C, tl.load(job + 3)
    dilation, padding, lowered, to = tl.load(job + 4), tl.load(job + 5), tl.load(job + 6), tl.load(job + 7)
    if DILATION > 0:
        dilation = DILATION
    groups: tl.constexpr = (HEIGHT + 3) // 4
    straight: tl.constexpr = (WIDTH + 2 * BORDER) * PITCH
    last: tl.constexpr = HEIGHT + 2 * BORDER - 1 if HEIGHT % 4 else 0
    f = tl.program_id(2) * FLAT + tl.arange(0, FLAT)
    f_ok = f < WIDTH * PITCH
    j = f // PITCH
    c = f % PITCH
    c_ok = f_ok & (c < C)
    a = tl.load(coefficients_ptr + plane * C + c, mask=c_ok, other=0.0)
    b = tl.load(coefficients_ptr + (planes + plane) * C + c, mask=c_ok, other=0.0)
    base = x_ptr + unit.to(tl.int64) * x_size + column + (j * distance + c)
    below = lowered_ptr + lowered.to(tl.int64) * lowered_size + (padding + BORDER) * PITCH + f
    u0 = tl.zeros((FLAT,), dtype=tl.float32)
    u1, u2, u3, u4, u5, u6, u7, u8 = u0, u0, u0, u0, u0, u0, u0, u0
    begin = tl.program_id(0) * groups_each
    end = tl.minimum(begin + groups_each, samples * groups)
    for g in range(begin, end):
        image = g // groups
        i = g % groups * 4
        at = base + ((image * HEIGHT + i) * WIDTH) * distance
        z0 = _value(at, a, b, c_ok)
        z1 = _value(at + WIDTH * distance, a, b, c_ok & (i + 1 < HEIGHT))
        z2 = _value(at + 2 * WIDTH * distance, a, b, c_ok & (i + 2 < HEIGHT))
        z3 = _value(at + 3 * WIDTH * distance, a, b, c_ok & (i + 3 < HEIGHT))
        line = i + padding + BORDER - 2 * dilation
        at = below + image * ((HEIGHT + 2 * BORDER) * straight)
        step = dilation * PITCH
        if DILATION > 0:
            u0, u3, u6 = _products(u0, u3, u6, z0, z1, z2, z3, at, line, f_ok, last, straight, DILATION)
            u1, u4, u7 = _products(u1, u4, u7, z0, z1, z2, z3, at - step, line, f_ok, last, straight, DILATION)
            u2, u5, u8 = _products(u2, u5, u8, z0, z1, z2, z3, at - 2 * step, line, f_ok, last, straight, DILATION)
        elif dilation == 1:
            u0, u3, u6 = _products(u0, u3, u6, z0, z1, z2, z3, at, line, f_ok, last, straight, 1)
            u1, u4, u7 = _products(u1, u4, u7, z0, z1, z2, z3, at - step, line, f_ok, last, straight, 1)
            u2, u5, u8 = _products(u2, u5, u8, z0, z1, z2, z3, at - 2 * step, line, f_ok, last, straight, 1)
        else:
            u0, u3, u6 = _products(u0, u3, u6, z0, z1, z2, z3, at, line, f_ok, last, straight, 2)
            u1, u4, u7 = _products(u1, u4, u7, z0, z1, z2, z3, at - step, line, f_ok, last, straight, 2)
            u2, u5, u8 = _products(u2, u5, u8, z0, z1, z2, z3, at - 2 * step, line, f_ok, last, straight, 2)
    at = to_ptr + to + (tl.program_id(0) * WIDTH + j) * (9 * C) + c
    for tap in tl.static_range(9):
        tl.store(at + tap * C, (u0, u1, u2, u3, u4, u5, u6, u7, u8)[tap], mask=c_ok)


@triton.jit
def _finish_depths(
    sums_ptr, to_ptr, jobs_ptr, C: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Adds the splits of depthwise gradients, (tap, channel), into gradients of parameters, (channel, tap)."""
    job = jobs_ptr + tl.program_id(0) * 3
    start, splits, depth = tl.load(job), tl.load(job + 1), tl.load(job + 2)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = i < 9 * C
    total = tl.zeros((SPLITS, BLOCK), dtype=tl.float32)
    for begin in range(0, splits, SPLITS):
        split = begin + tl.arange(0, SPLITS)
        at = sums_ptr + start + (split * (9 * C))[:, None] + i[None, :]
        total += tl.load(at, mask=(split < splits)[:, None] & ok[None, :], other=0.0)
    tl.store(to_ptr + depth + i % C * 9 + i // C, tl.sum(total, 0), mask=ok)


SHARED_MEMORY = 227 * 1024
"""Bytes of shared memory per multiprocessor of an H100 or H200."""


def warps_for(block_n, block_k):
    return 4 if block_n * block_k <= 2**13 else 8


def fitting(blocks, block_n, block_k, itemsize, num_stages):
    """Programs of `_weight_gradient` that fit a GPU, by shared memory and by 16 warps of 128 registers per thread."""
    shared = num_stages * blocks.weight_rows * (block_n + block_k) * itemsize
    each = min(SHARED_MEMORY // shared, 16 // warps_for(block_n, block_k))
    return MULTIPROCESSORS * max(1, each)


def splits_at_once(splits):
    """Partial sums that a program of `_sum_splits` adds at a time: 8 to 64, so that at least half of a load is used.

    With 64 where there were 17 splits, most of a load was masked and seven times as many programs ran; with 8 where
    there are 256, loads wait for each other (benchmarks/NOTES.md, rows 20 and 21).
    """
    return min(64, max(8, 1 << (splits.bit_length() - 1)))


class WeightSums(NamedTuple):
    """Partial sums of weight gradients of a group of stages, [splits, length] from `start`; `at`: those of a stage."""

    start: int
    length: int
    splits: int
    rows_each: int
    block_n: int
    block_k: int
    at: tuple[int, ...]


class WeightGradients:
    """Partial sums of the weight gradients of a backward pass, and their reduction at its end."""

    def __init__(self, run):
        self.run = run
        self.plans = self._plan()
        self.sums = run.temporary(sum(group.splits * group.length for group in self.plans.values()))
        self.depths, size = self._plan_depths()
        self.depth_sums = run.temporary(size) if size else None

    def add(self, stages, read, dy, size, rows):
        """Partial sums of the gradients of the stages' dense kernels; dy [stages, rows, pitch]."""
        run, b = self.run, self.run.blocks
        numbered = {stage: i for i, stage in enumerate(stages)}
        for group in by_size(stages):
            plan = self.plans[group]
            external = group[0].source < 0
            aligned = size[0] * size[1] % b.weight_rows == 0 and b.weight_rows % size[1] == 0
            aligned = aligned and not (external and group[0].stride > 1)  # these need a mask
            jobs = tuple(
                (numbered[s], s.column // run.columns_unit, s.width // run.columns_unit, *read.window(s),
                 plan.start + at, n // 16, k // 16)
                for s, at in zip(group, plan.at, strict=True)
                for n in range(0, s.width, plan.block_n)
                for k in range(0, s.taps * read.pitch, plan.block_k)
            )  # fmt: skip
            run.schedule.launch(
                _weight_gradient, (len(jobs), plan.splits), dy, read.tensor, self.sums, run.schedule.table(jobs), rows,
                plan.rows_each, read.tall, read.wide, size[0], size[1], rows * run.pitch, read.size, plan.length,
                DY_PITCH=run.pitch, FAN_IN=group[0].fan_in, X_PITCH=read.pitch, COLUMNS=run.columns_unit,
                SIZE=group[0].size, STRIDE=group[0].stride, BLOCK_M=b.weight_rows, BLOCK_N=plan.block_n,
                BLOCK_K=plan.block_k, EXTERNAL=external, WHOLE=run.columns_unit == run.c, ALIGNED=aligned,
                PRECISION=run.precision, num_warps=warps_for(plan.block_n, plan.block_k),
                num_stages=self._num_stages(group),
            )  # fmt: skip

    def add_by_factors(self, stages, x, dense, dy, lowered):
        """Partial sums of the gradients of the stages' matrices and depthwise kernels, computed separately.

        dense: depthwise results as maps; lowered: their gradients.
        """
        run, p, flat = self.run, self.run.program, self.run.blocks.depth_flat
        size = (run.out_height, run.out_width)
        self.add(points(stages), dense, dy, size, run.rows)
        splits, each, starts = self.depths[stages]
        dilations = {s.dilation for s in stages}
        jobs = tuple(
            (*run.view(s.source), s.source, s.dilation, s.padding, number, start)
            for number, (s, start) in enumerate(zip(stages, starts, strict=True))
        )
        run.schedule.launch(
            _depth_gradient, (splits, len(jobs), triton.cdiv(size[1] * run.pitch, flat)), x, run.coefficients,
            lowered.tensor, self.depth_sums, run.schedule.table(jobs), run.n, each, *size, lowered.border,
            run._plane_size(x), lowered.size, p.planes, C=run.c, PITCH=run.pitch,
            DILATION=dilations.pop() if len(dilations) == 1 else 0, FLAT=flat, num_warps=max(1, flat // 128),
        )  # fmt: skip

    def _num_stages(self, group):
        b = self.run.blocks
        matrices = b.weight_factors and group[0].size == 1 and group[0].source >= 0
        return b.point_stages if matrices else b.weight_stages

    def _plan_depths(self):
        """For stages handled by `add_by_factors`: splits, groups of four lines in each, offsets of partial sums."""
        run, found, start = self.run, {}, 0
        groups, width = run.n * triton.cdiv(run.out_height, 4), run.out_width
        for stages in (stages for r in run.program.rounds for stages in (r.first, r.second) if run.by_factors(stages)):
            jobs = len(stages) * triton.cdiv(width * run.pitch, run.blocks.depth_flat)
            # Every column of a line is a split, so a program should add several lines.
            least = min(groups, max(4, width // 4))
            splits = max(1, min(groups // least, run.blocks.depth_programs // jobs))
            each = triton.cdiv(groups, splits)
            splits, size = triton.cdiv(groups, each), triton.cdiv(groups, each) * width * 9 * run.c
            found[stages] = splits, each, tuple(start + i * size for i in range(len(stages)))
            start += len(stages) * size
        return found, start

    def _plan(self):
        """The partial sums of each group of stages that `add` processes in one launch."""
        run, p, b = self.run, self.run.program, self.run.blocks
        found, start = {}, 0
        inputs = [tuple(s for s in p.preprocess if s.source == -1 - i) for i in range(p.inputs)]
        inner = [stages for r in p.rounds for stages in (r.first, r.second)]
        inner = [points(stages) if run.by_factors(stages) else stages for stages in inner]
        for rows, stages in (*((run.rows_in, s) for s in inputs), *((run.rows, s) for s in inner)):
            for group in by_size(stages):
                external, fan_in, staged = group[0].source < 0, group[0].fan_in, self._num_stages(group)
                columns = group[0].taps * (fan_in if external else run.pitch)
                most = b.weight_side if run.dtype == torch.bfloat16 else min(b.weight_side, 64)  # larger values spill
                block_n = side_for(max(s.width for s in group), most)
                block_k = side_for(columns, most)
                jobs = sum(triton.cdiv(s.width, block_n) for s in group) * triton.cdiv(columns, block_k)
                programs = b.weight_programs or b.weight_waves * fitting(
                    b, block_n, block_k, run.dtype.itemsize, staged
                )
                splits = max(1, min(triton.cdiv(rows, 4 * b.weight_rows), programs // jobs))
                each = triton.cdiv(triton.cdiv(rows, splits), b.weight_rows) * b.weight_rows
                splits = triton.cdiv(rows, each)
                at = tuple(accumulate((s.taps * s.width * fan_in for s in group), initial=0))
                found[group] = WeightSums(start, at[-1], splits, each, block_n, block_k, at[:-1])
                start += splits * at[-1]
        return found

    def finish(self, to):
        """Reduces partial sums to the gradients of matrices and depthwise kernels, written to `to`."""
        run, c, adding, deep = self.run, self.run.c, [], []
        block = run.blocks.splits_block or 2048 // splits_at_once(
            max((p.splits for p in self.plans.values()), default=1)
        )
        for group, plan in self.plans.items():
            for s, at in zip(group, plan.at, strict=True):
                length = s.taps * s.width * s.fan_in
                at_once = NONE if s.size > 1 else s.matrix  # matrices without a depthwise kernel are then complete
                adding += [
                    (plan.start + at, length, plan.length, plan.splits, i, at_once)
                    for i in range(triton.cdiv(length, block))
                ]
                if s.size > 1:
                    deep.append((plan.start + at, s.matrix, s.depth, run._depth_at(s), s.taps))
        if not adding:  # only pools
            run.schedule.free(self.sums)
            return
        run.schedule.launch(
            _sum_splits, (len(adding),), self.sums, to, run.schedule.table(adding), SPLITS=2048 // block, BLOCK=block,
        )  # fmt: skip
        if self.depths:
            jobs = tuple(
                (start, splits * run.out_width, s.depth)
                for stages, (splits, _, starts) in self.depths.items()
                for s, start in zip(stages, starts, strict=True)
            )
            run.schedule.launch(
                _finish_depths, (len(jobs), triton.cdiv(9 * c, 16)), self.depth_sums, to, run.schedule.table(jobs), C=c,
                SPLITS=512, BLOCK=16, num_warps=8,
            )  # fmt: skip
            run.schedule.free(self.depth_sums)
        if not deep:
            run.schedule.free(self.sums)
            return
        block_k = 16 if c <= 64 else 8
        run.schedule.launch(
            _finish_weights, (len(deep), triton.cdiv(c, block_k)), self.sums, run.parameters, run.depths, to,
            run.schedule.table(deep), C=c, BLOCK_N=padded(c), BLOCK_K=block_k,
        )  # fmt: skip
        run.schedule.free(self.sums)
