"""How cells run: the choice among executors that compute the same values at different speeds.

    plan           mixed cells                         `_executors`
    plan_modules   the modules that read one node      `_executors`
    plan_layer     a layer of a mixed chain            `cell`
    plan_around    convolutions and norms around cells `nn.fused_convs`
    plan_network   cells of derived networks           `_derived_plan` (DARTS), `_segment_plan` (NOS),
                                                       `_affine_cells` (NAS-Bench-201), `_rectified_plan`
                                                       (NAS-Bench-1Shot1), `cell`

Fused executors run through `softcell.kernels`, on a GPU with Triton. The plain path, module by module, is the twin that
all others are compared with; `modules_only` selects it everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum, auto
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from softcell.arch import Mix, WeightMix
from softcell.kernels.backend import compute_type, current_settings, has_triton
from softcell.nn.calibrate import grouping_calibrations_pays
from softcell.nn.stack import grouping_blocks_pays, stacking_pays

if TYPE_CHECKING:
    from softcell.spaces.cell import MixedCell

_MODULES_ONLY: ContextVar[bool] = ContextVar("modules_only", default=False)
_LITERAL: ContextVar[bool] = ContextVar("literal_modules", default=False)
_NETWORKS: ContextVar[bool] = ContextVar("fused_networks", default=False)

NO_TRITON = (
    "Triton is not installed: cells run module by module, more slowly than fused ones (`pip install triton`, on Linux)"
)


class Execution(Enum):
    """The executors of a mixed cell."""

    FUSED_CELL = auto()
    """The whole cell is one program."""
    FUSED_SUMS = auto()
    """Node by node; the outgoing features of a node are one program, which returns one weighted sum per target."""
    FUSED_OUTPUTS = auto()
    """Node by node; the outgoing features of a node are one program, which returns every output separately."""
    MODULES = auto()
    """Node by node and module by module."""


def plan(cell: MixedCell, mix: Mix, site: int, x: Tensor) -> Execution:
    """The executor of a mixed cell whose inputs are like `x` [n, c, h, w].

    A cell with something between its nodes (a bottleneck, a bypass, a calibration, an offset) or with a candidate that
    has no kernel has no fused form. A node without its own fused form then runs module by module.
    """
    if not kernels_serve(x):
        return Execution.MODULES
    if not isinstance(mix, WeightMix):
        return Execution.FUSED_OUTPUTS  # it combines outputs itself, so it needs each of them
    if mix.offsets(site) is not None or cell.fused(mix.live(site)) is None:
        return Execution.FUSED_SUMS
    return Execution.FUSED_CELL


class Grouping(NamedTuple):
    """Which modules that read one node run together: convolutions of one kind, calibrations."""

    convolutions: bool
    calibrations: bool


def plan_modules(x: Tensor) -> Grouping:
    """How modules run on a node's value x [n, c, h, w]."""
    if is_modules_only():
        return Grouping(False, False)
    return Grouping(stacking_pays(x), grouping_calibrations_pays(x))


class LayerExecution(Enum):
    """The executors of a layer of a mixed chain."""

    STACKED = auto()
    """All blocks return one tensor, which is summed in one pass; `GROUPED` where they are not all of one kind."""
    GROUPED = auto()
    """Blocks of one kind run together."""
    MODULES = auto()
    """Module by module."""


def plan_layer(mix: Mix, site: int, layer: int, x: Tensor) -> LayerExecution:
    """The executor of a layer of a mixed chain with the input x [n, c, h, w]."""
    if mix.recomputes(site, layer) or is_modules_only() or not grouping_blocks_pays(x):
        return LayerExecution.MODULES
    if isinstance(mix, WeightMix) and not mix.is_picked(site):
        return LayerExecution.STACKED
    return LayerExecution.GROUPED


def plan_around(x: Tensor) -> bool:
    """Whether convolutions and norms around the cells of a supernet are fused, where they have a fused form."""
    return current_settings().block_norms and kernels_serve(x)


def plan_network(x: Tensor) -> bool:
    """Whether cells of derived networks on inputs like `x` are fused, where they have a fused form."""
    return _NETWORKS.get() and kernels_serve(x)


def kernels_serve(x: Tensor) -> bool:
    """Whether cells on inputs like `x` are fused: on a GPU with Triton, in float32 or bfloat16, unless it is empty.

    A rank may have no share of the last batch of an evaluation.
    """
    if x.device.type != "cuda" or is_modules_only() or not x.numel():
        return False
    return can_fuse() and compute_type(x) in (torch.float32, torch.bfloat16)


def can_fuse() -> bool:
    """Whether this machine can fuse cells; without Triton, the kernels' plain twins would be slower than modules."""
    return has_triton()


def is_modules_only() -> bool:
    """Whether `modules_only` holds here."""
    return _MODULES_ONLY.get()


@contextmanager
def modules_only() -> Iterator[None]:
    """Within this context every cell runs module by module: the plain path that the fused one is compared with."""
    token = _MODULES_ONLY.set(True)
    try:
        yield
    finally:
        _MODULES_ONLY.reset(token)


def shares_activations() -> bool:
    """Whether modules that start with ReLU and read the same node share it; not within `literal_modules`."""
    return not _LITERAL.get()


@contextmanager
def literal_modules() -> Iterator[None]:
    """`modules_only` without shared work: every module also applies its own ReLU, for scores that count ReLUs.

    The outputs are the same. Otherwise the ReLU of a node is computed once for all modules that read the node.
    """
    token = _LITERAL.set(True)
    try:
        with modules_only():
            yield
    finally:
        _LITERAL.reset(token)


@contextmanager
def fused_networks(enabled: bool = True) -> Iterator[None]:
    """Within this context cells of derived networks are fused, too, where that is possible.

    Kernels are compiled for every width, and hooks on candidate modules are not called. enabled: False for a network
    inside such a context that runs module by module.
    """
    token = _NETWORKS.set(enabled)
    try:
        yield
    finally:
        _NETWORKS.reset(token)
