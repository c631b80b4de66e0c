"""Calibrating candidates: attentions that multiply a feature map, kernels of each sample that are convolved with it.

Neural Operator Search, §3.1 and Appendix A.1. Channel and spatial attention reduce the width 16-fold, the dynamic
kernel 8-fold; a width below that keeps one channel. At stride 2 spatial attention strides itself; channel attention
and dynamic kernels have no resolution and fit any.

    channel attention    sigmoid(W2 relu(W1 mean_hw(x)))                            [n, c, 1, 1]
    spatial attention    sigmoid(W2 * relu(norm(W1 x))), W2 a 3×3 convolution       [n, 1, ⌈h/s⌉, ⌈w/s⌉]
    dynamic kernel       softmax_taps(W3 (relu(norm(W1 x)) softmax_hw(W2 x)ᵀ))     [n, c, k, k]

`run_calibrations` runs those that read the same map together: weights stacked, one pass for each stage. A GPU needs
3-4 µs to launch a kernel, and each of these modules launches many small ones. Together all modules of a node launch
little more than one of them does. Maps are read as rows [n·h·w, c], the memory order of channels-last.

    channel attentions                one mean, one product to all hidden channels, one batched product back
    spatial attentions and kernels    one product to all hidden channels, one norm
    spatial attentions                one grouped convolution
    dynamic kernels                   one kernel of ours where it fits (`kernels.calibrate`); else one product to all
                                      scores and one softmax over h·w, whatever their sizes; one product of all hidden
                                      channels with all scores, although a module needs only its own block: arithmetic
                                      is cheaper than launches; the rest once per size
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.kernels.backend import is_wanted
from softcell.kernels.calibrate import calibrate, calibrate_reference, convolve, dynamic_kernels, fits
from softcell.kernels.mix import diagonal_blocks, scores_by_position
from softcell.nn.candidates import Spec, candidate
from softcell.nn.norm import BatchNorm2d
from softcell.nn.stack import grouped, has_hooks, norm_key, normalised, vectors

ATTENTION_REDUCTION = 16
KERNEL_REDUCTION = 8


def reduced(channels: int, reduction: int) -> int:
    """`channels // reduction`, at least one."""
    return max(1, channels // reduction)


class Calibration(nn.Module, ABC):
    """Computes from a node's value something that is applied to another map.

    It is applied linearly, so the results of several edges are summed and applied once.

    Example:
        >>> import torch
        >>> from softcell.nn import Calibration
        >>> class MeanGate(Calibration):
        ...     def forward(self, x):  # [n, c, h, w] to [n, c, 1, 1]
        ...         return x.mean((2, 3), keepdim=True).sigmoid()
        ...     def applied(self, base, made):
        ...         return base * made
        >>> gate, x = MeanGate(), torch.ones(1, 2, 4, 4)
        >>> gate.applied(2 * x, gate(0 * x))[0, 0, 0, 0]
        tensor(1.)
    """

    @abstractmethod
    def applied(self, base: Tensor, made: Tensor) -> Tensor:
        """Applies the results of modules of this kind to base [n, c, h, w]; returns a map of the same shape."""


class Attention(Calibration):
    """Multiplies: base ⊙ A."""

    def applied(self, base: Tensor, made: Tensor) -> Tensor:
        return base * made


class ChannelAttention(Attention):
    """One factor per channel from the global mean: [n, c, h, w] to [n, c, 1, 1] in (0, 1)."""

    def __init__(self, channels: int, reduction: int = ATTENTION_REDUCTION) -> None:
        super().__init__()
        hidden = reduced(channels, reduction)
        self.squeeze = nn.Conv2d(channels, hidden, 1, bias=False)
        self.excite = nn.Conv2d(hidden, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.mean(x, dim=(2, 3), keepdim=True)
        return torch.sigmoid(self.excite(F.relu(self.squeeze(y))))


class SpatialAttention(Attention):
    """One factor per position: [n, c, h, w] to [n, 1, ⌈h/s⌉, ⌈w/s⌉] in (0, 1)."""

    def __init__(
        self, channels: int, stride: int = 1, reduction: int = ATTENTION_REDUCTION, *, affine: bool = True
    ) -> None:
        super().__init__()
        hidden = reduced(channels, reduction)
        self.squeeze = nn.Conv2d(channels, hidden, 1, stride, bias=False)
        self.norm = BatchNorm2d(hidden, affine=affine)
        self.gather = nn.Conv2d(hidden, 1, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.gather(F.relu(self.norm(self.squeeze(x)))))


class DynamicKernel(Calibration):
    """A k×k kernel per sample and channel: [n, c, h, w] to [n, c, k, k]; the taps of each kernel sum to 1.

    Every tap attends to all positions: W2 scores them, a softmax over h·w turns scores into weights (first softmax of
    A.1.2), the compressed map is averaged with them (kernel transform), and W3 reads out the channels (kernel decode),
    normalised over the k² taps (second softmax).
    """

    def __init__(
        self,
        channels: int,
        size: int,
        dilation: int = 1,
        reduction: int = KERNEL_REDUCTION,
        *,
        affine: bool = True,
    ) -> None:
        super().__init__()
        hidden = reduced(channels, reduction)
        self.size, self.dilation = size, dilation
        self.compress = nn.Conv2d(channels, hidden, 1, bias=False)
        self.norm = BatchNorm2d(hidden, affine=affine)
        self.score = nn.Conv2d(channels, size * size, 1, bias=False)
        self.decode = nn.Conv2d(hidden, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n, size = x.shape[0], self.size
        compressed = F.relu(self.norm(self.compress(x))).flatten(2)  # [n, c/8, h·w]
        weights = torch.softmax(self.score(x).flatten(2), dim=2)  # [n, k², h·w]
        # Autocast leaves the result of a softmax in float32.
        latent = torch.matmul(compressed, weights.transpose(1, 2).to(compressed.dtype))  # [n, c/8, k²]
        taps = self.decode(latent.reshape(n, -1, size, size)).flatten(2)  # [n, c, k²]
        return torch.softmax(taps, dim=2).reshape(n, -1, size, size)

    def applied(self, base: Tensor, made: Tensor) -> Tensor:
        return convolve(base, made, self.dilation)


def calibrated(base: Tensor, made: Sequence[tuple[Calibration, Tensor]], *, at_once: bool = False) -> Tensor:
    """base + base ⊙ A + Σ base ⊛ D (NOS, Eq 3), where each module applies its own result.

    at_once: without kernels, attentions of base's dtype run in one pass too, where Triton serves; they are then
    rounded once, not after every operation.

    base [n, c, h, w]. Both are linear in the results, so attentions are summed (A of Eq 2), and kernels of one
    dilation too, the smaller in the middle of the larger: this saves memory traffic and launches.
    """
    kernels: dict[int, Tensor] = {}
    attentions: dict[type, Tensor] = {}
    others: list[Tensor] = []
    for module, one in made:
        kind = type(module)
        # A subclass with its own `applied` is not merged: it is called below.
        if isinstance(module, DynamicKernel) and kind.applied is DynamicKernel.applied:
            known = kernels.get(module.dilation)
            kernels[module.dilation] = one if known is None else _centred_sum(known, one)
        elif kind in (ChannelAttention, SpatialAttention):
            attentions[kind] = attentions[kind] + one if kind in attentions else one
        else:
            others.append(module.applied(base, one))
    # The kernel of one dilation runs in one pass with base and attentions; others add a term each.
    *more, last = kernels.items() or ((1, None),)
    others += [convolve(base, kernel, dilation) for dilation, kernel in more]
    channel, spatial = attentions.get(ChannelAttention), attentions.get(SpatialAttention)
    dilation, kernel = last
    alike = all(one is None or one.dtype == base.dtype for one in (channel, spatial))
    if kernel is None and not (at_once and alike):
        value = calibrate_reference(base, channel, spatial, None)
    else:
        value = calibrate(base, channel, spatial, kernel, dilation)
    for term in others:
        value = value + term
    return value


def _centred_sum(a: Tensor, b: Tensor) -> Tensor:
    """Two kernels [n, c, k, k] of odd sizes, the smaller padded with zeros."""
    small, large = (a, b) if a.shape[-1] < b.shape[-1] else (b, a)
    border = (large.shape[-1] - small.shape[-1]) // 2
    return large + (F.pad(small, (border,) * 4) if border else small)


@candidate("spatial_attention", kind="attention")
def spatial_attention(spec: Spec) -> nn.Module:
    """Multiplies by a saliency map (NOS)."""
    return SpatialAttention(spec.channels, spec.stride, affine=spec.affine)


@candidate("channel_attention", kind="attention")
def channel_attention(spec: Spec) -> nn.Module:
    """Multiplies by a factor per channel (NOS)."""
    return ChannelAttention(spec.channels)


@candidate("dynamic_conv_3x3", kind="kernel")
def dynamic_conv_3x3(spec: Spec) -> nn.Module:
    """Convolves with a 3×3 kernel made from each sample (NOS)."""
    return DynamicKernel(spec.channels, 3, affine=spec.affine)


@candidate("dynamic_conv_5x5", kind="kernel")
def dynamic_conv_5x5(spec: Spec) -> nn.Module:
    """Convolves with a 5×5 kernel made from each sample (NOS)."""
    return DynamicKernel(spec.channels, 5, affine=spec.affine)


@candidate("dil_dynamic_conv_3x3", kind="kernel")
def dil_dynamic_conv_3x3(spec: Spec) -> nn.Module:
    """Convolves with a 3×3 kernel of dilation 2 made from each sample, which NOS tries and drops (Table 1)."""
    return DynamicKernel(spec.channels, 3, dilation=2, affine=spec.affine)


@candidate("dil_dynamic_conv_5x5", kind="kernel")
def dil_dynamic_conv_5x5(spec: Spec) -> nn.Module:
    """Convolves with a 5×5 kernel of dilation 2 made from each sample, which NOS tries and drops (Table 1)."""
    return DynamicKernel(spec.channels, 5, dilation=2, affine=spec.affine)


LARGEST_ON_CPU = 2**20
"""Elements of an input up to which running them together was faster on a CPU."""

_KINDS = (DynamicKernel, ChannelAttention, SpatialAttention)
_CHANNEL = "channel"
_WithNorm = DynamicKernel | SpatialAttention


def grouping_calibrations_pays(x: Tensor) -> bool:
    """Whether calibrations on `x` should run together; a compiler groups modules in its own way."""
    return not torch.compiler.is_compiling() and (x.device.type != "cpu" or x.numel() <= LARGEST_ON_CPU)


def family(module: nn.Module | None) -> tuple[Hashable, ...] | None:
    """A key that modules whose weights can be stacked share; None for a module that must run separately.

    Modules of one key have one size; those that share its first item use one norm.
    """
    if module is None or type(module) not in _KINDS or has_hooks(module):
        return None
    if isinstance(module, ChannelAttention):
        return _CHANNEL, module.squeeze.out_channels
    assert isinstance(module, DynamicKernel | SpatialAttention)
    kind = norm_key(module.norm) if type(module.norm) is BatchNorm2d else None
    if kind is None:
        return None
    size = module.size if isinstance(module, DynamicKernel) else 0
    return (_entrance(module).stride, kind), size, module.norm.num_features


def run_calibrations(modules: Iterable[nn.Module | None], x: Tensor, least: int = 2) -> dict[int, Tensor]:
    """The result of each module for x [n, c, h, w], by its id; those that must run separately are skipped.

    least: the fewest modules that run together.
    """
    families = grouped(modules, family)
    if sum(map(len, families.values())) < least:
        return {}
    groups: dict[Hashable, list[list[Any]]] = {}
    for key, own in families.items():
        groups.setdefault(key[0], []).append(list(own.values()))
    channel = groups.pop(_CHANNEL, [])
    normed = [_Normed(group) for group in groups.values()]
    x, dtype = _cast(x)
    excited = (stack for own in channel for stack in _excited(own))
    weights = _Weights([*excited, *(stack for one in normed for stack in one.stacks())], dtype)
    made: dict[int, Tensor] = {}
    if channel:
        mean = _mean(x)
        for alike in channel:
            made |= _by_id(alike, _channel_attentions(alike, mean, weights))
    for one in normed:
        made |= one.run(x, weights)
    return made


class Together(NamedTuple):
    """Calibrations of one map whose results are two tensors (`run_together`), in the order of these results.

    All kernels have one dilation, and all norms of kernels and spatial attentions are of one kind.
    """

    kernels: tuple[DynamicKernel, ...]
    channel: tuple[ChannelAttention, ...]
    spatial: tuple[SpatialAttention, ...]


def together(modules: Iterable[nn.Module | None]) -> Together | None:
    """The order in which these modules run together; None if they do not or if there is no kernel."""
    every = list({id(module): module for module in modules if module is not None}.values())
    families = grouped(every, family)
    kernels, channel, spatial = (
        [[*own.values()] for own in families.values() if isinstance(next(iter(own.values())), kind)] for kind in _KINDS
    )
    if sum(map(len, families.values())) < len(every) or len(channel) > 1 or len(spatial) > 1:
        return None
    own = [*chain(*kernels)]
    if len({(norm_key(module.norm), module.norm.num_features, module.dilation) for module in own}) != 1:
        return None
    return Together(tuple(own), *(tuple(chain(*lists)) for lists in (channel, spatial)))


class SpatialForm(NamedTuple):
    """What `spatial_sums` reads: hidden maps [n, h·w, count · r], W2 [count, 3, 3, r], and h and w."""

    hidden: Tensor
    gather: Tensor
    size: tuple[int, int]


def run_together(modules: Together, x: Tensor) -> tuple[Tensor, SpatialForm | None] | None:
    """Taps [n, Σ k² + count, c] of kernels and then of channel attentions, and how to make spatial attentions.

    A channel attention is a kernel of one tap. Taps may be more exact than x. None if the Triton kernels do not support
    this size.
    """
    kernels, channel, spatial = modules
    x, dtype = _cast(x)
    taps, rows = tuple(module.size**2 for module in kernels), x.permute(0, 2, 3, 1).flatten(1, 2)
    if not fits(rows, rows, taps):  # compressed maps are narrower
        return None
    parts = _Parts(modules)
    first, last = parts.first, parts.last
    weights = _Weights([*parts.stacks()], dtype)
    rows, entered = _Entered.apply(rows, weights.of(kernels[0].compress))  # type: ignore[no-untyped-call]
    hidden = first.hidden(x, weights, entered)
    squeeze = weights.of(channel[0].squeeze) if channel else None
    excite = weights.of(channel[0].excite).view(len(channel), x.shape[1], -1) if channel else None
    made = first.taps(rows, hidden, weights, squeeze, excite)
    if not spatial:
        return made, None
    height, width = (-(-side // spatial[0].squeeze.stride[0]) for side in x.shape[2:])
    seen = hidden[-1] if first is last else last.hidden(x, weights)[0]
    return made, SpatialForm(seen, weights.of(spatial[0].gather), (height, width))


class _Parts:
    """Those of some calibrations that share a norm: kernels, and spatial attentions unless they have another stride."""

    def __init__(self, modules: Together) -> None:
        kernels, self._channel, spatial = modules
        lists: list[list[Any]] = [*_by_size(kernels), *([[*spatial]] if spatial else [])]
        alike = not spatial or family(kernels[0])[0] == family(spatial[0])[0]  # type: ignore[index]
        self.first = _Normed(lists if alike else lists[:-1])
        self.last = self.first if alike else _Normed(lists[-1:])

    def stacks(self) -> Iterator[list[nn.Conv2d]]:
        yield from _excited(self._channel)
        yield from self.first.stacks()
        if self.last is not self.first:
            yield from self.last.stacks()


class _Entered(torch.autograd.Function):
    """rows [n, p, c] for one reader alone, and their product with a weight [d, c]: [n, p, d]

    The gradient of the product is added to that of the reader while it is computed.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(rows, weight)
        ctx.set_materialize_grads(False)
        return rows.view_as(rows), F.linear(rows, weight)

    @staticmethod
    def backward(ctx: Any, back: Tensor | None, gradient: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        rows, weight = ctx.saved_tensors
        if gradient is None:
            return back, None
        flat_gradient = gradient.reshape(-1, weight.shape[0])
        dweight = flat_gradient.t() @ rows.reshape(-1, weight.shape[1]) if is_wanted(ctx, 1) else None
        if back is None or torch.is_grad_enabled() or not back.is_contiguous():
            product = (flat_gradient @ weight).view_as(rows)
            return product if back is None else back + product, dweight
        back.view(-1, weight.shape[1]).addmm_(flat_gradient, weight)  # nothing else reads it
        return back, dweight


def _excited(modules: Sequence[ChannelAttention]) -> list[list[nn.Conv2d]]:
    return [[m.squeeze for m in modules], [m.excite for m in modules]] if modules else []


def _by_size(kernels: Sequence[DynamicKernel]) -> list[list[DynamicKernel]]:
    sizes: dict[int, list[DynamicKernel]] = {}
    for module in kernels:
        sizes.setdefault(module.size, []).append(module)
    return [*sizes.values()]


def _cast(x: Tensor) -> tuple[Tensor, torch.dtype | None]:
    """x in the dtype of computation, and that of autocast: one cast instead of one for every module."""
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return (x if dtype is None else x.to(dtype)), dtype


_Key = tuple[torch.dtype | None, tuple[int, ...]]
_PREPARED: ContextVar[Mapping[_Key, Tensor]] = ContextVar("prepared weights", default=MappingProxyType({}))


@contextmanager
def weights_prepared(every: Sequence[Together], x: Tensor) -> Iterator[None]:
    """Within this context the weights of all these calibrations are stacked and converted by one launch each.

    x: any tensor of the pass.
    """
    if not every:
        yield
        return
    _, dtype = _cast(x[:0])
    lists = [convs for modules in every for convs in _Parts(modules).stacks()]
    parts = vectors([[conv.weight for conv in convs] for convs in lists], dtype)
    token = _PREPARED.set({_key(convs, dtype): part for convs, part in zip(lists, parts, strict=True)})
    try:
        yield
    finally:
        _PREPARED.reset(token)


def _key(convs: Sequence[nn.Conv2d], dtype: torch.dtype | None) -> _Key:
    return dtype, tuple(map(id, convs))


class _Weights:
    """Stacked weights of lists of convolutions, known by the first of each list."""

    def __init__(self, lists: Sequence[Sequence[nn.Conv2d]], dtype: torch.dtype | None) -> None:
        known, keys = _PREPARED.get(), [_key(convs, dtype) for convs in lists]
        if not all(key in known for key in keys):
            parts = vectors([[conv.weight for conv in convs] for convs in lists], dtype)
            known = dict(zip(keys, parts, strict=True))
        self._parts = {id(convs[0]): known[key] for key, convs in zip(keys, lists, strict=True)}

    def of(self, first: nn.Conv2d) -> Tensor:
        """[count · c_out, k, k, c_in] of the list that begins with `first`; without k, k where they are 1."""
        _, c_in, size, _ = first.weight.shape
        shape = (-1, c_in) if size == 1 else (-1, size, size, c_in)
        return self._parts[id(first)].view(shape)


def _mean(x: Tensor) -> Tensor:
    """x [n, c, h, w] to [n, c]."""
    return _Mean.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class _Mean(torch.autograd.Function):
    """Plain autograd divides the gradient after it has expanded it: one more pass over a map, in the wrong layout."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return torch.mean(x, dim=(2, 3))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        n, c, height, width = ctx.shape
        small: Tensor = gradient / (height * width)
        return small[:, :, None, None].expand(n, c, height, width)


def _channel_attentions(modules: Sequence[ChannelAttention], mean: Tensor, weights: _Weights) -> Tensor:
    """mean [n, c] to [count, n, c, 1, 1]"""
    (n, c), count = mean.shape, len(modules)
    hidden = F.relu(F.linear(mean, weights.of(modules[0].squeeze)))  # [n, count · c/16]
    back = weights.of(modules[0].excite).view(count, c, -1)
    y = torch.bmm(hidden.view(n, count, -1).transpose(0, 1), back.transpose(1, 2))
    return torch.sigmoid(y)[..., None, None]


class _Normed:
    """Kernels and spatial attentions, each list of one shape, that go through one norm."""

    def __init__(self, families: Sequence[list[Any]]) -> None:
        self._kernels: list[list[DynamicKernel]] = [own for own in families if isinstance(own[0], DynamicKernel)]
        self.spatial: list[list[SpatialAttention]] = [own for own in families if isinstance(own[0], SpatialAttention)]
        self.every: list[DynamicKernel] = [*chain(*self._kernels)]
        self._all: list[_WithNorm] = [*self.every, *chain(*self.spatial)]

    def stacks(self) -> Iterator[list[nn.Conv2d]]:
        yield [_entrance(module) for module in self._all]
        if self.every:
            yield [module.score for module in self.every]
        yield from ([module.decode for module in own] for own in self.decoded())
        for spatial in self.spatial:
            yield [module.gather for module in spatial]

    def decoded(self) -> list[list[DynamicKernel]]:
        """Kernels whose last weights have one shape: as a rule all of them."""
        alike = len({module.norm.num_features for module in self.every}) == 1
        return [self.every] if alike else self._kernels

    def run(self, x: Tensor, weights: _Weights) -> dict[int, Tensor]:
        hidden = self.hidden(x, weights)
        made = self._make_kernels(x, hidden, weights) if self.every else {}
        for own, maps in zip(self.spatial, self.maps(x, hidden, weights), strict=True):
            made |= _by_id(own, maps[:, :, None], dim=1)
        return made

    def hidden(self, x: Tensor, weights: _Weights, entered: Tensor | None = None) -> list[Tensor]:
        """relu(norm(W1 x)) of x [n, c, h, w]: of all kernels [n, h'·w', Σ c/8], if any, and of each list of attentions.

        The stride is that of the modules. entered: W1 x as rows, if it is known.
        """
        first = _entrance(self._all[0])
        if entered is None:
            y = _pointwise(x, weights.of(first), first.stride)
        else:
            y = entered.view(len(x), *x.shape[2:], -1).permute(0, 3, 1, 2)
        y = normalised(y, [module.norm for module in self._all], relu=True)
        lists: list[list[Any]] = [self.every] if self.every else []
        widths = [sum(module.norm.num_features for module in own) for own in [*lists, *self.spatial]]
        # As rows: their gradients are then concatenated as rows too, the layout that norms read.
        rows = y.permute(0, 2, 3, 1).flatten(1, 2)
        return [*torch.split(rows, widths, dim=2)] if len(widths) > 1 else [rows]

    def maps(self, x: Tensor, hidden: Sequence[Tensor], weights: _Weights) -> list[Tensor]:
        """Spatial attentions [n, count, h', w'] from x [n, c, h, w] and `hidden`, one tensor for each list."""
        (stride, _), found = _entrance(self._all[0]).stride, []
        size = [-(-side // stride) for side in x.shape[2:]]
        for own, rows in zip(self.spatial, hidden[1:] if self.every else hidden, strict=True):
            gather = weights.of(own[0].gather).permute(0, 3, 1, 2)
            image = rows.transpose(1, 2).reshape(len(x), -1, *size)
            found.append(torch.sigmoid(F.conv2d(image, gather, padding=1, groups=len(own))))
        return found

    def taps(self, rows: Tensor, hidden: Sequence[Tensor], weights: _Weights, *attentions: Tensor | None) -> Tensor:
        """`dynamic_kernels` of the rows of x [n, h·w, c], where kernels have one width."""
        score, (decode,) = weights.of(self.every[0].score), self._decode(rows.shape[2], weights)
        taps = tuple(module.size**2 for module in self.every)
        return dynamic_kernels(rows, hidden[0], score, decode, taps, *attentions)

    def _decode(self, channels: int, weights: _Weights) -> list[Tensor]:
        return [weights.of(own[0].decode).view(len(own), channels, -1) for own in self.decoded()]

    def _make_kernels(self, x: Tensor, hidden: Sequence[Tensor], weights: _Weights) -> dict[int, Tensor]:
        """x [n, c, h, w]"""
        c, rows, compressed = x.shape[1], x.permute(0, 2, 3, 1).flatten(1, 2), hidden[0]
        decode, taps = self._decode(c, weights), [module.size**2 for module in self.every]
        if len(decode) == 1 and fits(rows, compressed, tuple(taps)):
            made = torch.split(self.taps(rows, hidden, weights), taps, dim=1)
            return {id(module): as_kernels(one, module.size) for module, one in zip(self.every, made, strict=True)}
        if len(decode) == 1:
            decode = [*torch.split(decode[0], [len(own) for own in self._kernels])]
        scores = scores_by_position(rows, weights.of(self.every[0].score))
        with torch.autocast(x.device.type, enabled=False):  # to float32 and back: the sums are float32 in any case
            attention = torch.softmax(scores, dim=2)
        latent = torch.bmm(compressed.transpose(1, 2), attention.transpose(1, 2))  # [n, Σ c/8, Σ k²]
        sizes = tuple((len(own), own[0].norm.num_features, own[0].size ** 2) for own in self._kernels)
        found: dict[int, Tensor] = {}
        for own, back, block in zip(self._kernels, decode, diagonal_blocks(latent, sizes), strict=True):
            count, size = len(own), own[0].size
            wanted = torch.bmm(block, back.transpose(1, 2)).view(count, len(x), size * size, c)
            kernels = torch.softmax(wanted, dim=2)
            found |= _by_id(own, kernels.view(count, len(x), size, size, c).permute(0, 1, 4, 2, 3))
        return found


def as_kernels(taps: Tensor, size: int) -> Tensor:
    """[n, k², c] to [n, c, k, k]"""
    return taps.view(len(taps), size, size, -1).permute(0, 3, 1, 2)


def _entrance(module: _WithNorm) -> nn.Conv2d:
    return module.compress if isinstance(module, DynamicKernel) else module.squeeze


def _by_id(modules: Sequence[nn.Module], outputs: Tensor, dim: int = 0) -> dict[int, Tensor]:
    """The part of each module along a dimension of `outputs`; the gradient of a single one needs no stacking."""
    parts = outputs.unbind(dim) if len(modules) > 1 else (outputs.squeeze(dim),)
    return {id(module): output for module, output in zip(modules, parts, strict=True)}


def _pointwise(x: Tensor, weight: Tensor, stride: tuple[int, ...] = (1, 1)) -> Tensor:
    """A 1×1 convolution of x [n, c, h, w] with weight [c_out, c]."""
    if stride != (1, 1):
        return F.conv2d(x, weight[:, :, None, None], stride=stride)
    return F.linear(x.permute(0, 2, 3, 1), weight).permute(0, 3, 1, 2)
