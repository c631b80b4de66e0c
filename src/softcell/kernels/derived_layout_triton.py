# mypy: ignore-errors
"""Block sizes of the kernels of `derived`, and the memory layout of its maps."""

import functools
import math
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import torch
import triton

from softcell.kernels.backend import padded, shared_memory
from softcell.kernels.derived_forward_triton import _activate
from softcell.kernels.derived_lines_triton import _activate_lines, _depthwise_lines
from softcell.kernels.derived_program import NONE
from softcell.kernels.schedule import Name


@dataclass(frozen=True)
class Blocks:
    """Block sizes and numbers of warps of each kernel; `blocks_for` chooses them by width."""

    channels: int = 64  # maximum channels of an elementwise block
    pitch: int = 8  # windows read maps padded to a multiple of this many channels: 8 × 2 bytes are one load
    stage_rows: int = 128
    stage_depth: int = 32  # channels convolved at a time
    input_depth: int = 64  # channels of an input tensor multiplied at a time
    point_depth: int = 64  # the same inside a cell, without windows
    point_side: int = 128  # maximum columns of a block in both cases
    stage_warps: int = 8
    stage_registers: int = 0  # maximum registers per thread, so that more programs fit; 0: no limit
    stage_lines: int = 2  # without strides, four lines at a time: 1 in one kernel, 2 in two kernels
    point_tiles: bool = True  # with two kernels, matrix programs loop over blocks of rows
    point_tile_stages: int = 3
    point_tile_programs: int = 2  # per multiprocessor: as many as fit
    product_sums: bool = True  # statistics by tensor cores
    lower_rows: int = 128
    lower_depth: int = 32
    lower_columns: int = 64
    lower_inner: int = 64  # the same inside a cell
    lower_apart: bool = True  # a separate launch writes gradients with respect to norm inputs
    lower_pulled: int = 64  # `lower_depth` in that case
    lower_stages: int = 3  # loads in flight in that case, if there are several blocks
    lower_warps: int = 8
    lower_registers: int = 0
    lower_tiles: bool = True  # inside a cell: as many programs as fit a GPU loop over blocks of rows
    input_tiles: bool = True  # the same for gradients of input tensors
    tile_pulled: int = 128  # up to this many channels they also write gradients of norm inputs
    tile_stages: int = 3  # loads in flight in these kernels
    tile_registers: int = 128
    tile_programs: int = 8  # per multiprocessor: two waves, since weight gradients occupy some of them
    weight_rows: int = 64
    weight_side: int = 128  # maximum columns of either side
    weight_stages: int = 3
    weight_waves: int = 2  # number of waves: programs divided by those that a GPU holds at a time
    weight_programs: int = 0  # number of programs instead, if not 0
    weight_factors: int = 1  # see `Pass.by_factors`: 1 keeps depthwise results, 2 recomputes them, 0: not by factors
    point_stages: int = 3  # `weight_stages` for matrices only
    depth_flat: int = 256  # values of a line in a block of `_depth_gradient`, four per thread
    depth_programs: int = 1056  # its programs, if there are enough lines: eight per multiprocessor
    gather_rows: int = 32
    gather_warps: int = 4
    gather_registers: int = 0  # by lines, at most; 0: as many as the compiler takes
    gather_groups: int = 8  # groups of four lines, without strides and with windows of one size; 0: pixel by pixel
    gather_flat: int = 64  # values of a line in a block; fewer than threads, or weights take a detour
    gather_together: bool = True  # terms added to windows are loaded at once for four lines, or for all taps of a pool
    lines_together: bool = False  # also by lines
    activate_lines: bool = True  # line by line
    flat_lines: int = 32  # lines per program of elementwise kernels, and values of each
    flat: int = 64
    sums_elements: int = 1024
    add_elements: int = 2048
    finish_rows: int = 4096  # partial sums of norm gradients that a program loads at a time
    splits_block: int = 0  # values whose partial sums a program adds, 2,048 at a time; 0: by the number of splits
    beside: bool = True  # gradients of weights on a second stream, in parallel with those of planes


MULTIPROCESSORS = 132
"""Multiprocessors of an H100 or H200; on other GPUs the last wave of programs is less full."""

OVERRIDES: dict[str, int] = {}
"""Fields of `Blocks` that override the chosen ones in measurements (`benchmarks.derived`)."""


def blocks_for(channels):
    """Chooses block sizes such that at least 3/4 of a block is used.

    A depth of 32 pads 36 channels to 64, one of 16 to 48. From 65 channels on, a block has 128 columns, and eight warps
    process 64 rows. Smaller blocks let more warps wait for loads at a time, which was only faster in `_lower` and
    `_gather_lines` (benchmarks/NOTES.md, rows 11 and 15). Weight gradients of narrow cells read through the L1 cache,
    which neighbouring taps share, if loads are not staged (row 16). Kernels with few registers and one purpose are
    preferred to those that save a pass over memory (rows 18 and 19), though stages in one kernel were faster at 36 and
    72 channels; that form has not been compared in bfloat16 yet. Depthwise results are kept for the gradients of
    weights, which saves 1.7 ms per step of DARTS_V2 and takes 0.8 GB (row 22).
    """
    if channels <= 48 and -channels % 32 > channels // 3:
        found = Blocks(stage_depth=16, stage_warps=4, lower_rows=64, lower_warps=4, weight_stages=1)
    elif channels <= 64:
        found = Blocks()
    else:
        found = Blocks(
            stage_rows=64, point_depth=32, point_tile_stages=3 if channels <= 128 else 2, lower_rows=64,
            lower_pulled=32, tile_stages=2, tile_programs=3,
        )  # fmt: skip
    return replace(found, **({"lower_inner": side_for(channels, 128)} | OVERRIDES))


def at_most(registers):
    """The compiler option that limits registers."""
    return {"maxnreg": registers} if registers else {}


def overridden():
    """Distinguishes plans of one program with different `OVERRIDES`."""
    return tuple(sorted(OVERRIDES.items()))


def side_for(length, most):
    """The side of a block that covers `length`: the largest that pads at most 15 % more than the best."""
    sides = [side for side in (64, 128) if side <= most]
    if length <= 64 or not sides:
        return min(most, padded(length))
    least = min(triton.cdiv(length, side) * side for side in sides)
    return max(side for side in sides if triton.cdiv(length, side) * side <= 1.15 * least)


def points(stages):
    """The stages reduced to their matrices, which read depthwise results: one map per stage, numbered by its plane."""
    return tuple(replace(s, source=s.plane, size=1, dilation=1, padding=0, depth=NONE) for s in stages)


def border_of(stages):
    """How many pixels the windows of stages extend beyond a map."""
    return max(max(s.padding, -s.padding) for s in stages)


def by_size(stages):
    """Stages grouped by window size, so that loop bounds are compile-time constants."""
    return [tuple(s for s in stages if s.size == size) for size in sorted({s.size for s in stages}, reverse=True)]


@functools.cache
def _stages_of(program):
    return (*program.preprocess, *(s for r in program.rounds for s in (*r.first, *r.second)))


@functools.cache
def _units(program):
    """Greatest common divisors: of matrix offsets (at most 16), and of all columns and widths that stages write."""
    stages = _stages_of(program)
    widths = [n for s in stages for n in (s.column, s.width)]
    return math.gcd(16, *(s.matrix for s in stages)), math.gcd(program.channels, *widths)


@functools.cache
def _first_depth(program):
    """Where depthwise kernels begin in the flat parameters; they are contiguous."""
    return min((s.depth for s in _stages_of(program) if s.depth != NONE), default=0)


@dataclass(frozen=True)
class Read:
    """Maps that stages read, by source: `tall` × `wide` pixels of `pitch` values with a border, `size` values each."""

    tensor: Name
    size: int
    pitch: int
    tall: int
    wide: int
    border: int
    sources: dict[int, int]

    def window(self, stage):
        """Map, dilation, distance from an output pixel to the first pixel of its window, padding."""
        shift = (self.border - stage.padding) * (self.wide + 1)
        return self.sources[stage.source], stage.dilation, shift, stage.padding


class Lowered(NamedTuple):
    """Gradients of depthwise results inside a border of zeros, `size` elements each."""

    tensor: Name
    size: int
    border: int


class Partial(NamedTuple):
    """Two kinds of partial sums, [2, splits, terms, c]."""

    tensor: Name
    splits: int
    terms: int


class Pass:
    """What a forward and a backward pass of a program share: sizes, locations of planes, and maps that stages read."""

    def __init__(self, program, form, schedule):
        self.program, self.form, self.schedule = program, form, schedule
        self.dtype = form.dtype
        n, height, width = form.shapes[-1][:3]
        self.n, self.height, self.width = n, height, width
        self.out_height, self.out_width = -(-height // program.stride), -(-width // program.stride)
        self.rows_in, self.rows = n * height * width, n * self.out_height * self.out_width
        self.c = program.channels
        # Three tf32 products are as accurate as one in float32. bfloat16 products ignore the setting.
        self.precision = "tf32x3" if self.dtype == torch.float32 else "tf32"
        self.blocks = blocks_for(self.c)
        self.block_c = min(self.blocks.channels, padded(self.c))
        self.tile = self.blocks.stage_rows
        self.pitch = triton.cdiv(self.c, self.blocks.pitch) * self.blocks.pitch
        self.norms = {norm.plane: norm for norm in program.norms}
        self.weights_unit, self.columns_unit = _units(program)
        self.parameters, self.running, self.factors = Name("parameters"), Name("running"), Name("factors")
        self.inputs = tuple(Name(f"input{i}") for i in range(program.inputs))
        self.buffer, self.winners, self.depths = Name("buffer"), Name("winners"), Name("depths")
        self.given = self.buffer if program.stride == 1 else Name("given")
        self.moments, self.coefficients, self.slopes = Name("moments"), Name("coefficients"), Name("slopes")
        self.reciprocals, self.depthwise = Name("reciprocals"), Name("depthwise")
        inner = (stages for r in program.rounds for stages in (r.first, r.second) if self.by_factors(stages))
        self.numbers = {stage: number for number, stage in enumerate(chain.from_iterable(inner))}
        self._temporaries = 0

    def unit(self, plane):
        p = self.program
        if p.is_node(plane):
            return plane - p.inputs if self.form.apart else 0
        if plane < p.inputs:
            return p.nodes + plane if p.stride == 1 else plane
        return plane if p.stride == 1 else plane - p.inputs

    def view(self, plane):
        """(unit, column, row stride) of a plane; the latter two in multiples of c, which is a constant in kernels."""
        p = self.program
        if p.is_node(plane) and not self.form.apart:
            return 0, plane - p.inputs, p.nodes
        return self.unit(plane), 0, 1

    def units(self):
        p = self.program
        return p.planes if p.stride == 1 else p.planes - p.inputs

    def allocate(self, suffix=""):
        """A buffer of planes with the output's resolution, and one with the inputs' (the same one without strides)."""
        p, c = self.program, self.c
        buffer = self.schedule.new("buffer" + suffix, self.units() * self.rows * c, self.dtype)
        if p.stride == 1:
            return buffer, buffer
        return self.schedule.new("given" + suffix, p.inputs * self.rows_in * c, self.dtype), buffer

    def temporary(self, size, dtype=torch.float32, *, zeroed=False):
        """A temporary tensor for a few launches; the caller must free it."""
        self._temporaries += 1
        return self.schedule.new(f"temporary{self._temporaries}", size, dtype, zeroed=zeroed)

    def beside(self):
        """Context for launches that the following ones do not wait for, until `schedule.join`."""
        return self.schedule.beside() if self.blocks.beside else nullcontext()

    def _partial(self, splits, terms):
        return Partial(self.temporary(2 * splits * terms * self.c), splits, terms)

    def by_factors(self, stages):
        """Whether gradients of depthwise kernels and matrices are computed separately, each as a convolution's.

        Otherwise they are derived from the gradient of the dense kernel, which needs no depthwise results but nine
        times as many products. Only 3×3 windows without strides are implemented. Passes with given statistics keep no
        depthwise results.
        """
        fits = all(s.size == 3 and s.stride == 1 and s.dilation in (1, 2) and s.width <= 256 for s in stages)
        return self.blocks.weight_factors > 0 and bool(stages) and fits and not self.form.known

    def dense(self, stages, tensor, first=0):
        """Depthwise results [stages, rows, pitch] as maps, starting with map `first` of the tensor."""
        sources = {stage.plane: first + i for i, stage in enumerate(stages)}
        return Read(tensor, self.rows * self.pitch, self.pitch, self.out_height, self.out_width, 0, sources)

    def depthwise_lines(self, stages, read, to):
        """Writes depthwise results of stages without strides, [stages, rows, pitch], to `to`."""
        dilations, groups, flat = {s.dilation for s in stages}, self.blocks.gather_groups or 8, self.blocks.gather_flat
        height, width = self.out_height, self.out_width
        jobs = tuple((read.sources[s.source], s.dilation, read.border - s.padding, self._depth_at(s)) for s in stages)
        tiles = triton.cdiv(self.n * triton.cdiv(height, 4), groups)
        self.schedule.launch(
            _depthwise_lines, (tiles, len(jobs), triton.cdiv(width * self.pitch, flat)), read.tensor, self.depths, to,
            self.schedule.table(jobs), read.tall, read.wide, height, width, self.n, read.size, self.rows * self.pitch,
            C=self.c, PITCH=self.pitch, SIZE=stages[0].size, DILATION=dilations.pop() if len(dilations) == 1 else 0,
            GROUPS=groups, FLAT=flat, num_warps=self.blocks.gather_warps,
        )  # fmt: skip

    def tiles_fit(self, stages):
        """Whether programs may loop over blocks of rows: a block has all columns, and its loads fit into shared memory.

        In float32, wider blocks need more shared memory than any GPU has. The 99 KB of consumer GPUs are not enough
        either, but sufficient for the other kernels of a pass.
        """
        large = self.c > 32 and self.blocks.lower_rows > 64  # 196 to 224 KB in float32, which an A100 does not have
        most, needed = (256, 112 * 1024) if self.dtype == torch.bfloat16 else (48, (227 if large else 160) * 1024)
        fits = self.c <= most and shared_memory(self.schedule.device) >= needed
        return fits and all(s.width == self.c and s.stride == 1 for s in stages)

    def split_state(self, state):
        """Views of the planes' state: moments [3, …], coefficients [2, …], slopes [3, …], reciprocals [1, …]."""
        size = self.program.planes * self.c
        for name, start in (("moments", 0), ("coefficients", 3), ("slopes", 5)):
            self.schedule.view(name, state, start * size)
        if self.form.shared:
            self.schedule.view("reciprocals", state, 8 * size)

    def _depth_at(self, stage):
        """Offset of its depthwise kernel among all depthwise kernels, in multiples of c."""
        return NONE if stage.depth == NONE else (stage.depth - _first_depth(self.program)) // self.c

    def _activated(self, stages, x):
        """ReLU(z) of the planes that stages read, each inside a border of zeros that windows extend into."""
        sources = tuple(sorted({s.source for s in stages}))
        border = border_of(stages)
        height, width = self._size_of(stages[0])
        tall, wide = height + 2 * border, width + 2 * border
        rows = self.n * tall * wide
        size = rows * self.pitch
        to = self.temporary(len(sources) * size, self.dtype)
        jobs = tuple((*self.view(source), source) for source in sources)
        found = Read(to, size, self.pitch, tall, wide, border, {source: i for i, source in enumerate(sources)})
        if self.blocks.activate_lines:
            self.schedule.launch(
                _activate_lines, self.flat_grid(self.n * tall, len(sources), wide * self.pitch), x, self.coefficients,
                to, self.schedule.table(jobs), self.n, height, width, border, self._plane_size(x), size,
                self.program.planes, C=self.c, PITCH=self.pitch, **self._flat(),
            )  # fmt: skip
            return found
        block = max(1, self.blocks.add_elements // self.block_c)
        self.schedule.launch(
            _activate, (triton.cdiv(rows, block), len(sources), triton.cdiv(self.pitch, self.block_c)), x,
            self.coefficients, to, self.schedule.table(jobs), rows, height, width, border, self._plane_size(x), size,
            self.program.planes, C=self.c, PITCH=self.pitch, CB=self.block_c, BLOCK=block,
        )  # fmt: skip
        return found

    def flat_grid(self, lines, terms, length):
        """Number of programs of a kernel that processes lines of `length` values."""
        b = self.blocks
        return triton.cdiv(lines, b.flat_lines), terms, triton.cdiv(length, b.flat)

    def _flat(self):
        return {"LINES": self.blocks.flat_lines, "FLAT": self.blocks.flat}

    def _external(self, number):
        """An input tensor, which has no border."""
        shape = self.form.shapes[number]
        sources = {-1 - i: 0 for i in range(self.program.inputs)}
        return Read(self.inputs[number], math.prod(shape), shape[3], shape[1], shape[2], 0, sources)

    def _plane_size(self, buffer):
        return (self.rows_in if buffer == self.given and self.program.stride != 1 else self.rows) * self.c

    def _size_of(self, stage):
        """Height and width of the map that a stage reads."""
        if stage.source < self.program.inputs:
            return self.height, self.width
        return self.out_height, self.out_width

    def _drops(self):
        return {"AREA": self.out_height * self.out_width, "samples": self.n, "DROPS": self.form.drops}

    def _scales(self):
        return self.factors if self.form.drops else self.parameters
