"""Convolutions of one kind that read the same input, run as one: their weights stacked, one norm over all channels.

On a CPU a call costs as much as the arithmetic of a small convolution, so fewer calls take less time; large inputs gain
nothing, and outputs that are views of one tensor are read more slowly. On a GPU, in cells that are not fused, a launch
costs more than any of these convolutions.

`flat` puts the weights of many modules into one vector by one copy; the backward pass distributes the gradients by one
more.

Blocks of attention that read the same map also run together, with one pass for each of their layers. On a GPU each of
the seven blocks of a layer launches about a dozen small kernels forward and twice as many backward; only the attention
itself differs between blocks. Everything before and after it runs for all blocks at once:

    reduce                             one convolution, one norm
    queries, keys, values              one batched product of rows [n·h·w, inner]
    local attention                    one kernel forward and two backward (`kernels.local.attend_by_lines`)
    non-local attention                torch's own
    projection, expand                 two batched products, one norm
    shortcut                           once; where the width changes one convolution, one norm
    weighted sum, average pool         in the last norm, so that a pool reads one map (`run_summed`)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.kernels.backend import compute_type, runs_triton
from softcell.kernels.block_norm import normed
from softcell.kernels.local import Kinds, Room, attend_by_lines, divided, in_lines
from softcell.kernels.mix import product, stacked_sum
from softcell.kernels.mixed_norm import mixed_norm
from softcell.kernels.shared import shares_norms
from softcell.nn.attention import Attention, AttentionBlock, LocalAttention, NonLocalAttention
from softcell.nn.conv import ReLUConvBN
from softcell.nn.norm import BatchNorm2d, normalise_over_ranks, update_running_by_plane

K = TypeVar("K", bound=Hashable)
LARGEST = 2**17
"""Elements of an input up to which stacking pays on a CPU."""


def stacking_pays(x: Tensor) -> bool:
    """Whether convolutions of `x` should be stacked."""
    return x.device.type == "cuda" or (x.device.type == "cpu" and x.numel() <= LARGEST)


def stack_key(module: nn.Module | None) -> Hashable | None:
    """A key that modules which can be stacked share; None for a module that must run separately."""
    if type(module) is not ReLUConvBN:
        return None
    conv, norm = _conv_and_norm(module)
    kind = norm_key(norm)
    if kind is None or has_hooks(module):
        return None
    shape = (conv.kernel_size, conv.stride, conv.padding, conv.dilation, conv.in_channels, conv.out_channels)
    return (*shape, kind)


def norm_key(norm: nn.BatchNorm2d) -> Hashable | None:
    """A key that norms which can be concatenated share; None for one that cannot."""
    # Without a momentum, running statistics are a mean over batches, which needs each norm's own count.
    if norm.momentum is None or not norm.track_running_stats:
        return None
    return (norm.eps, norm.momentum, norm.affine, norm.training)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module or a part of it has hooks, which must be called."""
    return any(
        part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks
        for part in module.modules()
    )


def grouped(
    modules: Iterable[nn.Module | None], key: Callable[[nn.Module | None], K | None]
) -> dict[K, dict[int, Any]]:
    """Modules by key and by id; those whose key is None are skipped."""
    found: dict[K, dict[int, Any]] = {}
    for module in modules:
        if module is not None and (kind := key(module)) is not None:
            found.setdefault(kind, {})[id(module)] = module
    return found


def run_stacked(modules: Sequence[nn.Module], activated: Tensor) -> tuple[Tensor, ...]:
    """Modules of one key on max(x, 0) [n, c, h, w]: their outputs, each [n, c_out, h', w'], as views of one tensor."""
    convs, norms = zip(*(_conv_and_norm(module) for module in modules), strict=True)
    first = convs[0]
    weight = torch.cat([conv.weight for conv in convs])
    y = F.conv2d(activated, weight, None, first.stride, first.padding, first.dilation)
    return torch.split(normalise(y, norms), first.out_channels, dim=1)


def normalise(y: Tensor, norms: Sequence[nn.BatchNorm2d]) -> Tensor:
    """y [n, Σ c, h, w] by concatenated norms of one key; each keeps its own running statistics."""
    norm, sizes = norms[0], [n.num_features for n in norms]
    if len(norms) == 1:
        return norm(y)  # type: ignore[no-any-return]
    running = [*_buffers(norms, "running_mean"), *_buffers(norms, "running_var")]
    # Batch-norm updates `both` in place, through its halves; the norms get their parts back below.
    both = torch.cat(running)
    mean, variance = both.chunk(2)
    scale = torch.cat([n.weight for n in norms]) if norm.affine else None
    shift = torch.cat([n.bias for n in norms]) if norm.affine else None
    if norm.training and shares_norms():
        assert norm.momentum is not None  # `norm_key` rejects such norms
        # One collective for the group.
        y, _, *new = normalise_over_ranks(y, scale, shift, norm.eps)
        both += (torch.cat(new) - both) * norm.momentum
    else:
        y = F.batch_norm(y, mean, variance, scale, shift, norm.training, norm.momentum, norm.eps)  # type: ignore[arg-type]
    if norm.training:
        with torch.no_grad():
            torch._foreach_copy_(running, torch.split(both, [*sizes, *sizes]))
            torch._foreach_add_(_buffers(norms, "num_batches_tracked"), 1)
    return y


def _buffers(norms: Sequence[nn.BatchNorm2d], name: str) -> list[Tensor]:
    return [norm.get_buffer(name) for norm in norms]


def _conv_and_norm(module: nn.Module) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    """The last two parts of a module."""
    *_, conv, norm = module.children()
    assert isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
    return conv, norm


def as_vector(weight: Tensor) -> Tensor:
    """A weight [c_out, c_in, k, k] as a vector ordered (c_out, tap, c_in): a view of one that is channels-last."""
    return weight.permute(0, 2, 3, 1).reshape(-1)


def like(vector: Tensor, weight: Tensor) -> Tensor:
    """The reverse of `as_vector`: a view, with the weight's strides where its memory has the same order."""
    c_out, c_in, height, width = weight.shape
    if height * width == 1 or c_in == 1:  # any order of the dimensions is the same memory
        offset = vector.storage_offset()
        return vector.as_strided(weight.shape, weight.stride(), offset)
    return vector.view(c_out, height, width, c_in).permute(0, 3, 1, 2)


def parts_of(vector: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """The part of each weight in a vector of all of them, as disjoint views where the weights have their order.

    Optimisers and clipping may change one of them in place; a copy would cost a launch for every cell.
    """
    parts = torch.split(vector, [w.numel() for w in weights])
    found = [like(part, w) for part, w in zip(parts, weights, strict=True)]
    if all(part.stride() == w.stride() for part, w in zip(found, weights, strict=True)):
        return found
    return owned(vector, weights)


def owned(vector: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """The part of each weight in a vector of all of them.

    Each gets its own memory: clipping or averaging gradients in place must not change another's.
    """
    parts = torch.split(vector, [w.numel() for w in weights])
    own = [torch.empty_strided(w.shape, w.stride(), dtype=w.dtype, device=w.device) for w in weights]
    torch._foreach_copy_(own, [like(part, w) for part, w in zip(parts, weights, strict=True)])
    return own


def flat(weights: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Weights [c_out, c_in, k, k] of any sizes, one after the other, each ordered (c_out, tap, c_in): [total]

    dtype: of the result, that of the weights by default. Their gradients are converted back while they are copied.
    """
    result: Tensor = _Flat.apply(dtype, *weights)  # type: ignore[no-untyped-call]
    return result


class _Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype | None, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        vector = torch.cat([as_vector(w) for w in weights])
        return vector if dtype is None else vector.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weights: tuple[Tensor, ...] = ctx.saved_tensors
        if torch.is_grad_enabled():  # a copy in place could not be differentiated once more
            parts = torch.split(gradient.to(weights[0].dtype), [w.numel() for w in weights])
            shaped = (part.view(w.permute(0, 2, 3, 1).shape) for part, w in zip(parts, weights, strict=True))
            return None, *(part.permute(0, 3, 1, 2) for part in shaped)
        if gradient.dtype == weights[0].dtype:
            return None, *parts_of(gradient.contiguous(), weights)
        return None, *owned(gradient, weights)


_ALIGNED = 8
"""Vectors whose size is a multiple of this come first, so that most begin at whole words of 16 bytes in any dtype."""


def vectors(lists: Sequence[Sequence[Tensor]], dtype: torch.dtype | None = None) -> list[Tensor]:
    """`flat` of each list, by one launch for all of them; weights of a list that nothing reads get no gradient."""
    sizes = [sum(w.numel() for w in own) for own in lists]
    order = sorted(range(len(lists)), key=lambda i: sizes[i] % _ALIGNED != 0)
    weights = [w for i in order for w in lists[i]]
    counts = tuple(len(lists[i]) for i in order)
    found = _Vectors.apply(counts, dtype, *weights) if weights else ()  # type: ignore[no-untyped-call]
    by_number = dict(zip(order, found, strict=True))
    return [by_number[i] for i in range(len(lists))]


class _Vectors(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, counts: tuple[int, ...], dtype: torch.dtype | None, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.counts = counts
        ctx.save_for_backward(*weights)
        ctx.set_materialize_grads(False)
        vector = torch.cat([as_vector(w) for w in weights])
        parts = iter(weights)
        sizes = [sum(next(parts).numel() for _ in range(count)) for count in counts]
        return torch.split(vector if dtype is None else vector.to(dtype), sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        weights: Iterator[Tensor] = iter(ctx.saved_tensors)
        found: list[Tensor | None] = []
        own: list[Tensor] = []
        given: list[Tensor] = []
        for count, gradient in zip(ctx.counts, gradients, strict=True):
            alike = [next(weights) for _ in range(count)]
            if gradient is None:
                found += [None] * count
            elif torch.is_grad_enabled():  # a copy in place could not be differentiated once more
                parts = torch.split(gradient.to(alike[0].dtype), [w.numel() for w in alike])
                shaped = (part.view(w.permute(0, 2, 3, 1).shape) for part, w in zip(parts, alike, strict=True))
                found += [part.permute(0, 3, 1, 2) for part in shaped]
            else:
                parts = torch.split(gradient.contiguous(), [w.numel() for w in alike])
                given += [like(part, w) for part, w in zip(parts, alike, strict=True)]
                own += [torch.empty_strided(w.shape, w.stride(), dtype=w.dtype, device=w.device) for w in alike]
                found += own[-count:]
        if own:
            torch._foreach_copy_(own, given)
        return None, None, *found


def grouping_blocks_pays(x: Tensor) -> bool:
    """Whether blocks on `x` should run together; a compiler groups modules in its own way."""
    return x.device.type == "cuda" and not torch.compiler.is_compiling()


def block_key(module: nn.Module | None) -> Hashable | None:
    """A key that blocks which can run together share; None for a module that must run separately."""
    if type(module) is not AttentionBlock or has_hooks(module):
        return None
    if type(module.attention) not in (LocalAttention, NonLocalAttention):
        return None  # another one may do more than `attend`
    parts = [module.reduce, module.expand]
    if not isinstance(module.widen, nn.Identity):
        parts.append(module.widen)
    kinds = tuple(_linear_key(part) for part in parts)
    return None if None in kinds else (kinds, type(module.pool), getattr(module.pool, "stride", None))


def _linear_key(part: nn.Module) -> Hashable | None:
    """Of a convolution and its norm."""
    if [type(child) for child in part.children()] != [nn.Conv2d, BatchNorm2d]:
        return None  # without norms there is a bias
    conv, norm = _conv_and_norm(part)
    kind = norm_key(norm) if conv.bias is None else None
    return None if kind is None else (conv.in_channels, conv.out_channels, kind)


def run_blocks(modules: Iterable[nn.Module | None], x: Tensor) -> dict[int, Tensor]:
    """The output of each block for x [n, c, h, w], by its id; modules that must run separately are skipped."""
    found: dict[int, Tensor] = {}
    for own in grouped(modules, block_key).values():
        if len(own) > 1:
            found.update(zip(own, _run(list(own.values()), x).unbind(1), strict=True))
    return found


def stackable(modules: Sequence[nn.Module | None]) -> list[AttentionBlock]:
    """The modules if all are blocks that run together; otherwise nothing."""
    groups = list(grouped(modules, block_key).values())
    if len(groups) != 1 or len(modules) < 2 or len(groups[0]) < len(modules):
        return []
    return list(groups[0].values())


def run_summed(modules: Sequence[nn.Module | None], x: Tensor, weights: Callable[[], Tensor]) -> Tensor | None:
    """The weighted sum [n, c', h', w'] of several blocks for x [n, c, h, w]; None unless all stack.

    weights: called if they stack; returns one [blocks].
    """
    blocks = stackable(modules)
    if not blocks:
        return None
    if _sums_in_norms(blocks, x):
        return _run_summed(blocks, x, weights())
    return stacked_sum(_run(blocks, x), weights())


class _Kernels(NamedTuple):
    """Weights of the 1×1 convolutions of blocks that run together, in the precision of the step."""

    reduce: Tensor
    """[blocks · inner, c, 1, 1]"""
    packed: Tensor
    """Queries, keys and values: [blocks, inner, 3 · inner]"""
    project: Tensor
    """[blocks, inner, inner]"""
    expand: Tensor
    """[blocks, inner, c']"""
    widen: Tensor | None
    """[blocks · c', c, 1, 1]; None where the width stays."""
    lines: Tensor | None
    """Embeddings of local attention as kernels read them (`kernels.local.in_lines`); None without kernels."""


_PREPARED: ContextVar[Mapping[tuple[int, ...], _Kernels]] = ContextVar("prepared_kernels", default=MappingProxyType({}))


@contextmanager
def weights_together(layers: Sequence[Sequence[AttentionBlock]], x: Tensor) -> Iterator[None]:
    """Within this context the weights of all layers are concatenated and converted by two launches, embeddings by two.

    layers: blocks that run together, all different; x: any tensor of the pass. Their gradients are distributed by a few
    launches, too.
    """
    if not layers:
        yield
        return
    token = _PREPARED.set(_converted(layers, x))
    try:
        yield
    finally:
        _PREPARED.reset(token)


def _kernels_of(blocks: Sequence[AttentionBlock], x: Tensor) -> _Kernels:
    key = tuple(map(id, blocks))
    found = _PREPARED.get().get(key)
    return _converted([blocks], x)[key] if found is None else found


def _converted(layers: Sequence[Sequence[AttentionBlock]], x: Tensor) -> Mapping[tuple[int, ...], _Kernels]:
    """The weights of each layer, by the ids of its blocks."""
    groups = [group for blocks in layers for group in _groups(blocks)]
    vector = flat([conv.weight for group in groups for conv in group], compute_type(x))
    parts = iter(torch.split(vector, [sum(conv.weight.numel() for conv in group) for group in groups]))
    found, lines = {}, _lines(layers, x)
    for number, blocks in enumerate(layers):
        own = iter([(next(parts), group[0].in_channels) for group in _groups(blocks)])
        reduce, c = next(own)
        packed, project, expand = (
            part.view(len(blocks), -1, c_in).transpose(1, 2) for part, c_in in (next(own) for _ in range(3))
        )
        widen = [part.view(-1, c_in, 1, 1) for part, c_in in own]
        given = (packed, project, expand, widen[0] if widen else None, lines.get(number))
        found[tuple(map(id, blocks))] = _Kernels(reduce.view(-1, c, 1, 1), *given)
    return found


def _lines(layers: Sequence[Sequence[AttentionBlock]], x: Tensor) -> dict[int, Tensor]:
    """Embeddings of the layers whose local attentions run together, by number."""
    attentions = [[block.attention for block in blocks] for blocks in layers]
    if not runs_triton(x):
        return {}
    numbers = [number for number, own in enumerate(attentions) if _kinds(own)]
    every = [part.reshape(-1) for number in numbers for a in attentions[number] for part in a.embeddings()]
    sizes = tuple((_kinds(attentions[number]), attentions[number][0].width) for number in numbers)
    return dict(zip(numbers, in_lines(torch.cat(every), sizes), strict=True)) if every else {}


def _kinds(attentions: Sequence[Attention]) -> Kinds:
    """Of the local attentions that run together, all before the others; none if they are not the first."""
    kinds = tuple((a.extent, a.heads) for a in attentions if isinstance(a, LocalAttention))
    leading = all(isinstance(a, LocalAttention) for a in attentions[: len(kinds)])  # the others are non-local
    return kinds if len(kinds) > 1 and leading else ()


def _groups(blocks: Sequence[AttentionBlock]) -> list[list[nn.Conv2d]]:
    """The convolutions of each field of `_Kernels`."""
    attentions = [block.attention for block in blocks]
    found = [
        [_conv_and_norm(block.reduce)[0] for block in blocks],
        [conv for a in attentions for conv in (a.queries, a.keys, a.values)],
        [a.project for a in attentions],
        [_conv_and_norm(block.expand)[0] for block in blocks],
    ]
    if not isinstance(blocks[0].widen, nn.Identity):
        found.append([_conv_and_norm(block.widen)[0] for block in blocks])
    return found


def _sums_in_norms(blocks: Sequence[AttentionBlock], x: Tensor) -> bool:
    """Whether the last norms of blocks can add up what they return: by kernels, without scale and shift."""
    norms = [norm for norm in blocks[0].modules() if isinstance(norm, nn.BatchNorm2d)]
    return runs_triton(x) and not shares_norms() and all(norm.training and not norm.affine for norm in norms)


def _run_summed(blocks: Sequence[AttentionBlock], x: Tensor, weights: Tensor) -> Tensor:
    """Pools are linear, so they read the sum of the blocks instead of each of them."""
    n, _, h, w = x.shape
    kernels, pool = _kernels_of(blocks, x), blocks[0].pool
    shortcut = x if kernels.widen is None else None
    z = _expanded(blocks, x, kernels).view(len(blocks), n, h, w, -1)
    y = pool(_mixed(z, [block.expand for block in blocks], weights, shortcut=shortcut))
    if kernels.widen is None:
        return y  # type: ignore[no-any-return]
    joined = F.conv2d(pool(x), kernels.widen).unflatten(1, (len(blocks), -1))  # type: ignore[no-untyped-call]
    return y + _mixed(joined.permute(1, 0, 3, 4, 2), [block.widen for block in blocks], weights)  # type: ignore[no-any-return]


def _mixed(z: Tensor, parts: Sequence[nn.Module], weights: Tensor, shortcut: Tensor | None = None) -> Tensor:
    """`mixed_norm` of z [blocks, n, h, w, c], by the norms of the parts."""
    _, norms = zip(*(_conv_and_norm(part) for part in parts), strict=True)
    y, mean, variance = mixed_norm(z, weights, norms[0].eps, shortcut=shortcut)
    rows = z[0].numel() // z.shape[-1]
    update_running_by_plane(list(enumerate(norms)), mean, variance, rows / max(rows - 1, 1))
    return y


def _run(blocks: Sequence[AttentionBlock], x: Tensor) -> Tensor:
    """The stacked outputs [n, blocks, c', h', w']."""
    first, count, kernels = blocks[0], len(blocks), _kernels_of(blocks, x)
    n, _, h, w = x.shape
    y = _expanded(blocks, x, kernels).transpose(0, 1).reshape(n, h, w, -1).permute(0, 3, 1, 2)
    y = _normalised(y, [block.expand for block in blocks])
    small, y = first.pool(x), first.pool(y)
    if kernels.widen is None:
        outputs: Tensor = y.unflatten(1, (count, -1)) + small[:, None]
    else:
        small = _normalised(F.conv2d(small, kernels.widen), [block.widen for block in blocks])
        outputs = (y + small).unflatten(1, (count, -1))
    return outputs


def _expanded(blocks: Sequence[AttentionBlock], x: Tensor, kernels: _Kernels) -> Tensor:
    """Everything up to the last convolution of each block, without its norm: [blocks, n·h·w, c']"""
    count, (n, _, h, w) = len(blocks), x.shape
    rows = _reduced(F.conv2d(x, kernels.reduce), [block.reduce for block in blocks]).view(count, n * h * w, -1)
    packed = product(rows, kernels.packed.to(rows.dtype))
    attentions = [block.attention for block in blocks]
    rows = _attended(attentions, packed.view(count, n, h, w, -1), kernels.lines).view(rows.shape)
    rows = torch.relu(product(rows, kernels.project.to(rows.dtype)))
    return product(rows, kernels.expand.to(rows.dtype))


def _attended(attentions: Sequence[Attention], packed: Tensor, lines: Tensor | None) -> Tensor:
    """Each attention of its part of packed [blocks, n, h, w, 3·inner]: [blocks, n, h, w, inner]"""
    if lines is not None:
        kinds, room = _kinds(attentions), Room()
        local, *parts = divided(packed, len(kinds), room)
        others = [a for a in attentions if isinstance(a, NonLocalAttention)]
        rest = [a.attend_rows(*parts[3 * i : 3 * i + 3]) for i, a in enumerate(others)]
        return attend_by_lines(local, lines, kinds, rest, room)
    # Embeddings are one copy: a backward pass skips tensors that are no leaves and not needed.
    every = [part for attention in attentions for part in attention.embeddings()]
    together = torch.cat([part.reshape(-1) for part in every]) if every else packed.new_empty(0)
    pieces = iter(torch.split(together, [part.numel() for part in every]))
    given = ([next(pieces).view(part.shape) for part in attention.embeddings()] for attention in attentions)
    return torch.stack([_alone(a, own, *parts) for a, own, parts in zip(attentions, packed, given, strict=True)])


def _alone(attention: Attention, packed: Tensor, *embeddings: Tensor) -> Tensor:
    """packed [n, h, w, 3·inner]; returns [n, h, w, inner]."""
    return attention.attend(packed.permute(0, 3, 1, 2), *embeddings).permute(0, 2, 3, 1)


def _reduced(y: Tensor, parts: Sequence[nn.Module]) -> Tensor:
    """y [n, parts · c, h, w] by the norms of the parts, and ReLU: [parts, n, h, w, c] without gaps."""
    _, norms = zip(*(_conv_and_norm(part) for part in parts), strict=True)
    if _by_kernels(norms, y):
        return _normed(y, norms, relu=True, parts=len(parts))
    y = torch.relu(normalise(y, norms))
    return torch.stack(y.permute(0, 2, 3, 1).chunk(len(parts), 3))


def _normalised(y: Tensor, parts: Sequence[nn.Module]) -> Tensor:
    """y [n, parts · c, h, w] by the norms of the parts."""
    _, norms = zip(*(_conv_and_norm(part) for part in parts), strict=True)
    return normalised(y, norms)


def normalised(y: Tensor, norms: Sequence[nn.BatchNorm2d], *, relu: bool = False) -> Tensor:
    """`normalise`, then ReLU if asked; by kernels, running statistics are updated with those of all other norms."""
    if _by_kernels(norms, y):
        return _normed(y, norms, relu=relu)
    y = normalise(y, norms)
    return torch.relu(y) if relu else y


def _by_kernels(norms: Sequence[nn.BatchNorm2d], y: Tensor) -> bool:
    """Whether kernels normalise y [n, Σ c, h, w] by its batch."""
    return norms[0].training and runs_triton(y) and not shares_norms()


def _normed(y: Tensor, norms: Sequence[nn.BatchNorm2d], *, relu: bool = False, parts: int = 1) -> Tensor:
    """`normed` by concatenated norms of one key; running statistics are updated with those of all other norms."""
    first = norms[0]
    scale, shift = (
        torch.cat([norm.get_parameter(name) for norm in norms]) if first.affine else None for name in ("weight", "bias")
    )
    y, mean, variance = normed(y, scale, shift, first.eps, relu=relu, parts=parts)
    rows = y.numel() // mean.numel()
    start = 0
    for width, alike in groupby(norms, lambda norm: norm.num_features):
        own = list(enumerate(alike))
        end = start + len(own) * width
        planes = mean[start:end].view(-1, width), variance[start:end].view(-1, width)
        update_running_by_plane(own, *planes, rows / max(rows - 1, 1))
        start = end
    return y
