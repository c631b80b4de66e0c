# mypy: ignore-errors
"""Gradients of the weights of `derived`: kernels, and the plan of their partial sums.

They come from the gradient of the dense kernel depthwise[tap, k] · matrix[n, k], which tensor cores compute.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from softcell.kernels.backend import padded
from softcell.kernels.derived import NONE
from softcell.kernels.derived_layout_triton import by_size, side_for


@triton.jit(do_not_specialize=["rows", "rows_each"])
def _weight_gradient(
    dy_ptr, x_ptr, to_ptr, jobs_ptr, rows, rows_each, TALL: tl.constexpr, WIDE: tl.constexpr, OUT_HEIGHT: tl.constexpr,
    OUT_WIDTH: tl.constexpr, dy_size, x_size, to_size, DY_PITCH: tl.constexpr, FAN_IN: tl.constexpr,
    X_PITCH: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EXTERNAL: tl.constexpr, WHOLE: tl.constexpr,
    ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ over rows of ∂y[n] · x[tap, k]: the gradient of a dense kernel.

    Taps and channels are one axis of SIZE² · X_PITCH columns, so that a tensor core's block wastes only what is missing
    in its last one. Between the channels of two taps may lie columns of nothing, whose sums are not stored. WHOLE: all
    stages write planes from their first column on. ALIGNED: blocks are whole lines of one image, so that addresses
    differ by one number from block to block.
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
    # Columns beyond the last are those of another stage or nothing; a mask of them would make loads narrower.
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
    """Σ over the splits of partial sums: of dense kernels into the first split, of matrices into their gradients."""
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
        tl.debug_barrier()  # before that, all of the first split has been read
        tl.store(sums_ptr + start + i, found, mask=ok)


@triton.jit
def _finish_weights(
    dense_ptr, w_ptr, depth_ptr, to_ptr, jobs_ptr, C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """From the gradient of the dense kernel, depthwise[tap, k] · matrix[n, k], to those of its two factors."""
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


MULTIPROCESSORS, SHARED_MEMORY = 132, 227 * 1024
"""Of an H100 or H200; elsewhere the last wave of programs is less full."""


def warps_for(block_n, block_k):
    return 4 if block_n * block_k <= 2**13 else 8


def fitting(blocks, block_n, block_k, itemsize):
    """Programs of `_weight_gradient` that a GPU holds: by shared memory, and by 16 warps of 128 registers a thread."""
    shared = blocks.weight_stages * blocks.weight_rows * (block_n + block_k) * itemsize
    each = min(SHARED_MEMORY // shared, 16 // warps_for(block_n, block_k))
    return MULTIPROCESSORS * max(1, each)


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
    """Partial sums of the weight gradients of a backward pass, and what becomes of them at its end."""

    def __init__(self, run):
        self.run = run
        self.plans = self._plan()
        self.sums = run.temporary(sum(group.splits * group.length for group in self.plans.values()))

    def add(self, stages, read, dy, size, rows):
        """Partial sums of the gradients of the stages' dense kernels; dy [stages, rows, pitch]."""
        run, b = self.run, self.run.blocks
        numbered = {stage: i for i, stage in enumerate(stages)}
        for group in by_size(stages):
            plan = self.plans[group]
            external = group[0].source < 0
            aligned = size[0] * size[1] % b.weight_rows == 0 and b.weight_rows % size[1] == 0
            aligned = aligned and not (external and group[0].stride > 1)  # those need a mask
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
                num_stages=b.weight_stages,
            )  # fmt: skip

    def _plan(self):
        """By group of stages that `add` handles in one launch, where its partial sums lie."""
        run, p, b = self.run, self.run.program, self.run.blocks
        found, start = {}, 0
        inputs = [tuple(s for s in p.preprocess if s.source == -1 - i) for i in range(p.inputs)]
        inner = [stages for r in p.rounds for stages in (r.first, r.second)]
        for rows, stages in (*((run.rows_in, s) for s in inputs), *((run.rows, s) for s in inner)):
            for group in by_size(stages):
                external, fan_in = group[0].source < 0, group[0].fan_in
                columns = group[0].taps * (fan_in if external else run.pitch)
                most = b.weight_side if run.dtype == torch.bfloat16 else min(b.weight_side, 64)  # spills beyond it
                block_n = side_for(max(s.width for s in group), most)
                block_k = side_for(columns, most)
                jobs = sum(triton.cdiv(s.width, block_n) for s in group) * triton.cdiv(columns, block_k)
                programs = b.weight_programs or b.weight_waves * fitting(b, block_n, block_k, self.run.dtype.itemsize)
                splits = max(1, min(triton.cdiv(rows, 4 * b.weight_rows), programs // jobs))
                each = triton.cdiv(triton.cdiv(rows, splits), b.weight_rows) * b.weight_rows
                splits = triton.cdiv(rows, each)
                at = tuple(accumulate((s.taps * s.width * fan_in for s in group), initial=0))
                found[group] = WeightSums(start, at[-1], splits, each, block_n, block_k, at[:-1])
                start += splits * at[-1]
        return found

    def finish(self, to):
        """From partial sums to the gradients of matrices and depthwise kernels, which `to` receives."""
        run, c, block = self.run, self.run.c, self.run.blocks.splits_block
        adding, deep = [], []
        for group, plan in self.plans.items():
            for s, at in zip(group, plan.at, strict=True):
                length = s.taps * s.width * s.fan_in
                at_once = NONE if s.size > 1 else s.matrix  # matrices without a depthwise kernel are done then
                adding += [
                    (plan.start + at, length, plan.length, plan.splits, i, at_once)
                    for i in range(triton.cdiv(length, block))
                ]
                if s.size > 1:
                    deep.append((plan.start + at, s.matrix, s.depth, run._depth_at(s), s.taps))
        run.schedule.launch(
            _sum_splits, (len(adding),), self.sums, to, run.schedule.table(adding), SPLITS=2048 // block, BLOCK=block,
        )  # fmt: skip
        if not deep:
            run.schedule.free(self.sums)
            return
        block_k = 16 if c <= 64 else 8
        run.schedule.launch(
            _finish_weights, (len(deep), triton.cdiv(c, block_k)), self.sums, run.parameters, run.depths, to,
            run.schedule.table(deep), C=c, BLOCK_N=padded(c), BLOCK_K=block_k,
        )  # fmt: skip
        run.schedule.free(self.sums)
