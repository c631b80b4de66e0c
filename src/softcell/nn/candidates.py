"""The registry of candidate operations: a name, how to build it, and whether edges share it.

A candidate maps [n, channels, h, w] to [n, channels, ceil(h / stride), ceil(w / stride)]. Adding one is a function
with a decorator; it is then known to every space, to the command line and to the genotype reader:

    @candidate("my_conv")
    def my_conv(spec: Spec) -> nn.Module:
        return ReLUConvBN(spec.channels, spec.channels, 3, spec.stride, affine=spec.affine)

A *calibrating* candidate (`kind` attention or kernel) does not return a feature map but something applied to one: an
attention that multiplies it, a kernel of each sample that is convolved with it. Its module is a `Calibration`
(`softcell.nn.calibrate`), which defines how.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from softcell.errors import UserError, nearest


@dataclass(frozen=True, slots=True)
class Spec:
    """What a candidate is built for.

    `affine`: whether batch-norm learns scale and shift (not in search). `pool_norm`: whether pools are followed by
    batch-norm (DARTS supernets). `channels_in`: the input width if it differs, as in chains; only candidates with
    `widens` are built for that. `norm`: whether blocks of attention have batch-norm at all.

    Example:
        >>> from softcell.nn import Spec, get_candidate
        >>> conv = get_candidate("nor_conv_3x3").build(Spec(channels=8, stride=2, affine=False))
        >>> sum(p.numel() for p in conv.parameters())  # 8 * 8 * 3 * 3, no scale and shift
        576
    """

    channels: int
    stride: int = 1
    affine: bool = True
    pool_norm: bool = False
    channels_in: int | None = None
    norm: bool = True

    @property
    def c_in(self) -> int:
        return self.channels if self.channels_in is None else self.channels_in


Builder = Callable[[Spec], nn.Module]
Kind = Literal["feature", "attention", "kernel"]
KINDS: tuple[Kind, ...] = ("feature", "attention", "kernel")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A registered operation.

    `zero`: its output is all zeros, so it never runs. `blind`: its output does not depend on its input (noise), so no
    gradient passes. `widens`: it can change the width. `shared(spec)`: its output depends only on its input (no
    weights, no noise), so it is computed once for all outgoing edges of a node. `multiple`: it is built for widths that
    are a multiple of this (heads of attention).

    `kind` is what its module returns: a feature map; an attention, of a shape that broadcasts to
    [n, c, ⌈h/stride⌉, ⌈w/stride⌉]; a kernel per sample and channel [n, c, k, k].

    Example:
        >>> from softcell.nn import Spec, get_candidate
        >>> skip = get_candidate("skip_connect")
        >>> skip.kind, skip.shared(Spec(channels=8)), get_candidate("none").zero
        ('feature', True, True)
    """

    name: str
    build: Builder
    zero: bool = False
    shared: Callable[[Spec], bool] = lambda spec: False
    kind: Kind = "feature"
    blind: bool = False
    widens: bool = False
    multiple: int = 1

    @property
    def calibrates(self) -> bool:
        return self.kind != "feature"


_REGISTRY: dict[str, Candidate] = {}


def candidate(
    name: str,
    *,
    zero: bool = False,
    shared: bool | Callable[[Spec], bool] = False,
    kind: Kind = "feature",
    blind: bool = False,
    widens: bool = False,
    multiple: int = 1,
) -> Callable[[Builder], Builder]:
    """Registers the decorated function as the builder of candidate `name`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from softcell.nn import ReLUConvBN, Spec, candidate, get_candidate
        >>> @candidate("wide_conv_7x7")
        ... def wide_conv(spec: Spec) -> nn.Module:
        ...     return ReLUConvBN(spec.channels, spec.channels, 7, spec.stride, affine=spec.affine)
        >>> get_candidate("wide_conv_7x7").build(Spec(4))(torch.randn(2, 4, 8, 8)).shape
        torch.Size([2, 4, 8, 8])
    """
    if kind not in KINDS:
        raise UserError(f"the kind of candidate {name!r} must be one of {', '.join(KINDS)}, got {kind!r}")

    def register(build: Builder) -> Builder:
        if not name.isidentifier():
            raise UserError(f"a candidate's name must be a plain identifier such as 'sep_conv_3x3', got {name!r}")
        known = _REGISTRY.get(name)
        # The same module may register again: a plugin that failed is executed a second time.
        if known is not None and known.build.__module__ != build.__module__:
            raise UserError(f"candidate {name!r} already exists (from {known.build.__module__}); choose another name")
        shares = shared if callable(shared) else (lambda _: bool(shared))
        _REGISTRY[name] = Candidate(name, build, zero, shares, kind, blind, widens, multiple)
        return build

    return register


def get_candidate(name: str) -> Candidate:
    """The registered candidate of this name.

    Example:
        >>> from softcell.nn import get_candidate
        >>> get_candidate("sep_conv_3x3").name
        'sep_conv_3x3'
    """
    if name not in _REGISTRY:
        raise UserError(
            f"no candidate operation {name!r} (add your own with --plugin FILE); {nearest(name, _REGISTRY)}"
        )
    return _REGISTRY[name]


def known_candidates() -> tuple[str, ...]:
    """Names of all registered candidates, in alphabetical order.

    Example:
        >>> from softcell.nn import known_candidates
        >>> {"skip_connect", "sep_conv_3x3"} <= set(known_candidates())
        True
    """
    return tuple(sorted(_REGISTRY))
