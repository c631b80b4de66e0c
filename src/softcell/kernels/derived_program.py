"""The program of a fused derived cell: its stages, pools, nodes and norms, and the sizes of a pass.

`softcell.kernels.derived` explains planes and stages, and runs programs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
import torch.distributed as dist

NONE = -1


@dataclass(frozen=True, slots=True)
class Stage:
    """y[plane][:, column : column + width] = matrix · depthwise(ReLU(z[source])).

    `source`: a plane, or -1 - i for the cell's i-th input tensor. `size`, `dilation`, `padding`, `stride`: the window
    of the depthwise convolution; a size of 1 has no weights and reads the pixel at −padding. `depth`, `matrix`: offsets
    of weights [fan_in, size²] and [width, fan_in] in the flat parameters.
    """

    source: int
    plane: int
    size: int
    dilation: int
    padding: int
    stride: int
    matrix: int
    depth: int
    fan_in: int
    width: int
    column: int = 0

    @property
    def taps(self) -> int:
        return self.size**2


@dataclass(frozen=True, slots=True)
class Pooling:
    """A 3×3 pool of the value of plane `source` into `plane`; a maximum stores its winning taps in `slot`."""

    source: int
    plane: int
    largest: bool
    slot: int
    stride: int


@dataclass(frozen=True, slots=True)
class NodeInput:
    """One input of a node: the value of `plane`, scaled per sample by row `path` of drop-path's factors unless NONE."""

    plane: int
    path: int = NONE


@dataclass(frozen=True, slots=True)
class Norm:
    """The batch-norm of a plane: offsets of scale and shift in the flat parameters, or NONE without them."""

    plane: int
    scale: int
    shift: int


@dataclass(frozen=True, slots=True)
class Round:
    """Everything that runs once the values of `sources` are known: stages, the stages that follow them, and pools.

    `measured` are the planes with a norm written by the first stages and pools, `measured_second` those of the second.
    """

    sources: tuple[int, ...]
    first: tuple[Stage, ...]
    second: tuple[Stage, ...]
    pools: tuple[Pooling, ...]
    measured: tuple[int, ...]
    measured_second: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Derived:
    """A cell of `inputs` preprocessed inputs (planes 0…), `nodes` inner nodes (the next planes) and further planes.

    `preprocess` reads the input tensors; if it is empty, the input tensors are the first planes. Inner node j sums
    `node_inputs[j]`; `paths` is the number of drop-path factors.
    """

    channels: int
    inputs: int
    nodes: int
    planes: int
    stride: int
    slots: int
    paths: int
    preprocess: tuple[Stage, ...]
    rounds: tuple[Round, ...]
    node_inputs: tuple[tuple[NodeInput, ...], ...]
    norms: tuple[Norm, ...]
    eps: float
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Cached: every pass uses the program as a key, and hashing hundreds of numbers takes as long as a kernel.
        values = tuple(getattr(self, one.name) for one in fields(self) if one.init)
        object.__setattr__(self, "_hash", hash(values))

    def __hash__(self) -> int:
        return self._hash

    def is_node(self, plane: int) -> bool:
        return self.inputs <= plane < self.inputs + self.nodes

    @property
    def is_raw(self) -> bool:
        """Whether the input tensors are the values of the first planes, without preprocessing."""
        return not self.preprocess

    @property
    def adds_passed(self) -> bool:
        """Whether a kernel adds another gradient of the last input to its own, which it then writes once per value."""
        last = [stage for stage in self.preprocess if stage.source == -self.inputs]
        return len(last) == 1 and last[0].stride == 1 and last[0].padding == 0

    @property
    def node_planes(self) -> range:
        return range(self.inputs, self.inputs + self.nodes)

    def round_of(self, plane: int) -> Round | None:
        """The round that follows `plane`; the round of the inputs follows the last input."""
        return next((r for r in self.rounds if plane == r.sources[-1]), None)


@dataclass(frozen=True, slots=True)
class Form:
    """Everything that determines the launches of a pass, apart from the program.

    shapes: of the input tensors, [n, h_i, w_i, c_i]. known: norms use given statistics. drops: drop-path is active.
    apart: nodes are separate maps [nodes, n, h', w', c], not columns of one map [n, h', w', nodes · c]. rank, ranks:
    this rank and the number of ranks that share norms, 0 if norms are local.

    Of backward passes only: passed: another gradient of the last input tensor is added to its own. room: the least size
    of the buffer that this gradient begins, in which the producer of the input continues.
    """

    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    num_parameters: int
    known: bool
    drops: bool
    apart: bool = False
    rank: int = 0
    ranks: int = 0
    passed: bool = False
    room: int = 0

    @staticmethod
    def of(
        dtype: torch.dtype,
        shapes: Sequence[Sequence[int]],
        num_parameters: int,
        *,
        known: bool,
        drops: bool,
        shared: bool,
        apart: bool = False,
    ) -> Form:
        """shared: whether all ranks of the process group share norms, which is only the case in training."""
        place = (dist.get_rank(), dist.get_world_size()) if shared and not known else (0, 0)
        return Form(dtype, tuple(map(tuple, shapes)), num_parameters, known, drops, apart, *place)

    @property
    def shared(self) -> bool:
        return self.ranks > 0


@functools.lru_cache(maxsize=1024)
def interned(program: Derived) -> Derived:
    """A canonical instance of an equal program: cells of one width share it, so that lookups compare identities."""
    return program


@functools.cache
def consumers(program: Derived) -> dict[int, tuple[int, int]]:
    """Maps each plane to the node that reads it and its position among that node's inputs; inner stages have none."""
    return {
        one.plane: (j, i)
        for j, inputs in enumerate(program.node_inputs)
        for i, one in enumerate(inputs)
        if not (one.plane < program.inputs or program.is_node(one.plane))
    }


@functools.cache
def nodes_read(program: Derived) -> tuple[int, ...]:
    """Inner nodes that operations of the cell read."""
    return tuple(plane for plane in program.node_planes if program.round_of(plane) is not None)


def norm_groups(program: Derived) -> tuple[list[int], list[int]]:
    """Number of norms merged by each collective, in the order of the kernels: forward and backward."""
    inner = [len(planes) for r in program.rounds for planes in (r.measured, r.measured_second) if planes]
    normed = {norm.plane for norm in program.norms} - set(range(program.inputs))
    preprocessed = 0 if program.is_raw else program.inputs
    backward, arrived = [], 0
    for plane in reversed((program.inputs - 1, *program.node_planes)):
        found = program.round_of(plane)
        if found is not None:
            backward += [arrived, len(found.second), preprocessed if plane < program.inputs else 0]
            arrived = 0
        if program.is_node(plane):
            arrived += sum(one.plane in normed for one in program.node_inputs[plane - program.inputs])
    return [preprocessed, *inner][program.is_raw :], [count for count in backward if count]
