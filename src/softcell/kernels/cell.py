"""A whole mixed cell as one operation: every candidate of every edge, normalised, weighted and summed into nodes.

A `Program` assigns the planes of one buffer [planes, n, h, w, c]: first the nodes, then every candidate's value before
its norm. Waves follow the order of the nodes: the candidates of all input nodes run together, then those of each inner
node once its value is known. The backward pass keeps this buffer and its statistics, and recomputes ReLU, norm and
mixing where needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softcell.kernels import library_conv
from softcell.kernels.backend import by_twin, current_settings, is_wanted
from softcell.kernels.norm import (
    Term,
    combine,
    combine_gradient,
    distribute_gradient,
    finish_moments,
    gradient_sums,
    normalise,
    normalise_gradient,
    normed,
    scaled,
    weighted,
)
from softcell.kernels.pool import (
    MAX_TOGETHER,
    NONE,
    Leaving,
    Pool,
    average_pool,
    convolve_and_pool,
    gather_gradient,
    pool,
)
from softcell.kernels.schedule import alongside, uses_second_stream
from softcell.kernels.shared import SharedRows
from softcell.kernels.taps import (
    Group,
    apply_group,
    convolve,
    input_gradient,
    masked_input_gradient,
    shares,
    tiles,
    weight_gradient,
)


@dataclass(frozen=True, slots=True)
class Wave:
    """Everything that runs once the values of `sources` are known.

    `first`: convolutions of the sources. `inner`: those of their output planes that are normalised in place and
    convolved again by `second`. `measured`, `measured_second`: the planes that are followed by a norm. `identities`:
    for each source, (target, mixing weight, choice) of its identities.
    """

    sources: tuple[int, ...]
    first: tuple[Group, ...]
    second: tuple[Group, ...]
    pools: tuple[Pool, ...]
    inner: range
    measured: range
    measured_second: range
    identities: tuple[tuple[tuple[int, int, int], ...], ...]


@dataclass(frozen=True, slots=True)
class Program:
    """A cell of `nodes` nodes, the first `inputs` of which are given; node i is plane i.

    `stride` applies to all outgoing operations of the input nodes. `terms[j]` are the inputs of node inputs + j. `size`
    is the length of the flat weights, `slots` the number of maximum pools. `results` are the returned planes: the inner
    nodes, or separate candidates; those in `finished` are normalised in place. Nodes in `rectified` are the ReLU of
    their sum; if there are any, no convolution of the program reads negative values.
    """

    channels: int
    inputs: int
    nodes: int
    planes: int
    stride: int
    size: int
    slots: int
    waves: tuple[Wave, ...]
    terms: tuple[tuple[Term, ...], ...]
    eps: float
    results: tuple[int, ...]
    finished: tuple[range, ...] = ()
    rectified: frozenset[int] = frozenset()

    def wave_of(self, node: int) -> Wave | None:
        return next((wave for wave in self.waves if node in wave.sources), None)

    def uses_library(self) -> bool:
        """Whether convolutions run by the library (`softcell.kernels.library_conv`)."""
        return bool(self.rectified) and self.channels >= current_settings().library_channels


@dataclass(frozen=True, slots=True)
class Read:
    """Mixing weights [size] as one of several readers sees them.

    room [size]: zeros, where the reader's gradient may be written; None: it allocates its own.
    """

    mix: Tensor
    room: Tensor | None = None


def readers(mix: Tensor, count: int) -> list[Read]:
    """Mixing weights [size], flat, for `count` cells; their gradients are summed by one launch."""
    if not (mix.requires_grad and torch.is_grad_enabled()):
        return [Read(mix)] * count
    room = torch.zeros(count, *mix.shape, dtype=mix.dtype, device=mix.device)
    found: tuple[Tensor, ...] = _Readers.apply(_Room(room), mix)  # type: ignore[no-untyped-call]
    return [Read(own, part) for own, part in zip(found, room.unbind(), strict=True)]


@dataclass(frozen=True, slots=True)
class _Room:
    """A tensor that autograd does not see."""

    tensor: Tensor


class _Readers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, room: _Room, mix: Tensor) -> tuple[Tensor, ...]:
        ctx.room = room.tensor
        ctx.set_materialize_grads(False)
        return tuple(mix.view_as(mix) for _ in range(len(room.tensor)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, Tensor | None]:
        room: Tensor = ctx.room
        pairs = zip(gradients, room.unbind(), strict=True)
        if all(own is not None and own.data_ptr() == part.data_ptr() for own, part in pairs):
            return None, room.sum(0)
        known = [own for own in gradients if own is not None]
        return None, torch.stack(known).sum(0) if known else None


def mixed_cell(
    program: Program,
    dtype: torch.dtype,
    mix: Tensor,
    weights: Tensor,
    running: Tensor | None,
    factors: Tensor | None,
    *states: Tensor,
    shared: SharedRows | None = None,
    converted: Tensor | None = None,
    room: Tensor | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Values of the program's results, each [n, c, h', w'] channels-last, and the planes' statistics [3, planes, c].

    dtype: of computation and stored values; sums are float32 or wider. mix [weights], or ones, scales and shifts [1 + 2
    · norms, c] (`softcell.kernels.norm`), and weights [size], flat, in float32 or wider; running [2, planes, c]: mean
    and variance to normalise with, or None to use batch statistics; factors [choices, n] float32: drop-path's scale for
    each choice and sample, or None; states: the input nodes, [n, c, h, w]. The statistics are mean, 1/√(variance + eps)
    and biased variance; they have no gradient and are undefined for planes without a norm. shared: merges batch
    statistics over all ranks with one collective per norm group. converted: the weights in `dtype`, if known. room: for
    the gradient of the mix (`Read`).
    """
    # Gradients of other dtypes are converted, and for other readers than cells they are not written there.
    own_room = None if room is None or room.dtype != mix.dtype else _Room(room)
    *nodes, moments = _MixedCell.apply(  # type: ignore[no-untyped-call]
        program, dtype, shared, own_room, mix, weights, converted, running, factors, *states
    )
    return nodes, moments


def mixed_cell_reference(
    program: Program,
    dtype: torch.dtype,
    mix: Tensor,
    weights: Tensor,
    running: Tensor | None,
    factors: Tensor | None,
    *states: Tensor,
    shared: SharedRows | None = None,
    converted: Tensor | None = None,
    room: Tensor | None = None,
) -> tuple[list[Tensor], Tensor]:
    """The plain twin of `mixed_cell`, differentiated by autograd; it converts the weights itself and needs no room."""
    height, width = (-(-s // program.stride) for s in states[0].shape[2:])
    planes: dict[int, Tensor] = {i: state.permute(0, 2, 3, 1).to(dtype) for i, state in enumerate(states)}
    weights = weights.to(dtype)
    shape = (3, program.planes, program.channels)
    moments = torch.zeros(shape, dtype=mix.dtype, device=mix.device)
    normalised: dict[int, Tensor] = {}

    def norm(plane: int) -> Tensor:
        y = planes[plane].to(mix.dtype)
        if running is not None:
            mean, variance = running[:, plane]
        elif shared is not None:
            mean, variance = shared.merge_norm(y)
        else:
            variance, mean = torch.var_mean(y, dim=(0, 1, 2), correction=0)
        both = torch.stack([mean, torch.rsqrt(variance + program.eps)])
        moments[:2, plane], moments[2, plane] = both.detach(), variance.detach()
        return normed(y, both).to(dtype)

    def run(groups: Sequence[Group], values: dict[int, Tensor]) -> None:
        for g in groups:
            out = apply_group(values[g.source], weights, g, (height, width))
            planes.update(zip(range(g.first, g.first + g.count), out.unbind(), strict=True))

    for node in range(program.nodes):
        if node >= program.inputs:
            total = torch.zeros_like(planes[0][:, :: program.stride, :: program.stride])
            for t in program.terms[node - program.inputs]:
                if t.normed and t.plane not in normalised:
                    normalised[t.plane] = norm(t.plane)
                value = weighted((normalised if t.normed else planes)[t.plane], mix.to(total.dtype), t)
                total = total + scaled(value, factors, t.choice)
            planes[node] = total.relu() if node in program.rectified else total
        wave = program.wave_of(node)
        if wave is None or node != wave.sources[-1]:
            continue
        run(wave.first, planes)
        normalised.update((plane, norm(plane)) for plane in wave.inner)
        run(wave.second, normalised)
        for p in wave.pools:
            image = planes[p.source].permute(0, 3, 1, 2)
            if p.largest != NONE:
                planes[p.largest] = F.max_pool2d(image, 3, p.stride, 1).permute(0, 2, 3, 1)
            if p.average != NONE:
                mean = average_pool(image, p.stride)
                planes[p.average] = mean.permute(0, 2, 3, 1)
    planes.update((plane, norm(plane)) for own in program.finished for plane in own)
    return [planes[j].permute(0, 3, 1, 2) for j in program.results], moments


class _MixedCell(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        program: Program,
        dtype: torch.dtype,
        shared: SharedRows | None,
        room: _Room | None,
        mix: Tensor,
        given_weights: Tensor,
        converted: Tensor | None,
        running: Tensor | None,
        factors: Tensor | None,
        *states: Tensor,
    ) -> tuple[Tensor, ...]:
        weights = given_weights.to(dtype) if converted is None else converted
        assert weights.dtype == dtype
        n, c, height, width = states[0].shape
        out_height, out_width = -(-height // program.stride), -(-width // program.stride)
        wide = torch.promote_types(dtype, torch.float32)
        buffer = weights.new_empty(program.planes, n, out_height, out_width, c)
        # Without strides, input nodes are as large as all other nodes and occupy the first planes of the buffer.
        given = buffer if program.stride == 1 else weights.new_empty(program.inputs, n, height, width, c)
        read = _readable(program, states, dtype)
        if read is None:
            read = given
            for i, state in enumerate(states):
                given[i].copy_(state.permute(0, 2, 3, 1))
        rows, by_library = n * out_height * out_width, program.uses_library()
        winners = torch.empty((program.slots, *buffer.shape[1:]), dtype=torch.uint8, device=buffer.device)
        partial: Tensor | None = None
        if running is None:
            partial = weights.new_empty(2, tiles(rows), program.planes, c, dtype=wide)
            moments = weights.new_empty(3, program.planes, c, dtype=wide)  # read only for planes followed by a norm
        else:
            mean, variance = running
            moments = torch.stack([mean, torch.rsqrt(variance + program.eps), variance]).to(wide)

        def measure(planes: range) -> None:
            if partial is not None:
                finish_moments(partial, rows, moments, planes, program.eps)
                if shared is not None:
                    shared.merge_moments(moments, planes, program.eps)

        for node in range(program.nodes):
            if node >= program.inputs:
                terms = program.terms[node - program.inputs]
                combine(buffer, moments, mix, factors, node, terms, rectified=node in program.rectified)
            wave = program.wave_of(node)
            if wave is None or node != wave.sources[-1]:
                continue
            x = read if node < program.inputs else buffer
            measured = any(plane in wave.measured for p in wave.pools for plane in (p.largest, p.average))
            copies = node < program.inputs and read is not given
            together = not by_library and _pools_together(wave, c)
            if not together:
                pool(x, buffer, winners, partial if measured else None, wave.pools, copies=copies)
            if together:
                own = (x, weights, buffer, partial, wave.first, wave.pools)
                convolve_and_pool(*own, measured=measured, copies=copies)
            elif by_library:
                library_conv.convolve(x, weights, buffer, partial, wave.first, wave.measured)
            else:
                convolve(x, weights, buffer, partial, wave.first)
            measure(wave.measured)
            normalise(buffer, moments, wave.inner)
            convolve(buffer, weights, buffer, partial, wave.second)
            measure(wave.measured_second)
        for planes in program.finished:
            normalise(buffer, moments, planes)
        ctx.program, ctx.dtype, ctx.by_batch = program, dtype, running is None
        ctx.room = None if room is None else room.tensor
        ctx.shared, ctx.by_library = shared if running is None else None, by_library
        ctx.second_stream = uses_second_stream(buffer.device)
        ctx.save_for_backward(mix, given_weights, weights, running, factors, moments, winners, buffer, given, *states)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(moments)
        return (*(buffer[j].permute(0, 3, 1, 2) for j in program.results), moments)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        program: Program = ctx.program
        shared: SharedRows | None = ctx.shared
        mix, given_weights, weights, running, factors, moments, winners, buffer, given, *states = ctx.saved_tensors
        if torch.is_grad_enabled():
            leaves, constants = (mix, given_weights, *states), (running, factors)
            return _differentiable_backward(program, ctx.dtype, shared, grads[:-1], leaves, constants)
        gradient = torch.empty_like(buffer)
        given_gradient = gradient if program.stride == 1 else torch.empty_like(given)
        mix_wanted = is_wanted(ctx, 0)  # inputs: mix, weights, states; weight steps need no mix gradient
        mix_gradient: Tensor | None = None
        if program.terms:  # no kernel writes weights of `none`; all scales and shifts are written
            if mix_wanted and mix.dim() == 1:
                mix_gradient = torch.zeros_like(mix) if ctx.room is None else ctx.room
            else:
                mix_gradient = torch.empty_like(mix)
        arrived = dict(zip(program.results, grads[:-1], strict=True))
        for plane in (plane for plane, own in arrived.items() if own is None):
            if plane >= program.nodes or program.wave_of(plane) is None:  # otherwise the wave writes it first
                gradient[plane].zero_()
        for plane in (plane for plane in range(program.inputs) if program.wave_of(plane) is None):
            given_gradient[plane].zero_()  # nothing reads it
        given_grads = {plane: own.permute(0, 2, 3, 1) for plane, own in arrived.items() if own is not None}
        along = {plane: own for plane, own in given_grads.items() if _copied_along(program, mix, gradient, plane, own)}
        _copy_planes(gradient, {plane: own for plane, own in given_grads.items() if plane not in along})
        for planes in program.finished:
            partial = _room_for_sums(buffer, moments)
            gradient_sums(buffer, gradient, partial, planes)
            if shared is not None:
                partial = shared.merge_tiles(partial, planes)
            normalise_gradient(partial, buffer, gradient, moments, planes, by_batch=ctx.by_batch)
        # A node's gradient is complete once all its readers have added to it; only then is it propagated to its inputs.
        for node in reversed(range(program.nodes)):
            wave = program.wave_of(node)
            if wave is not None and node == wave.sources[-1]:
                inward = node < program.inputs
                x, dx = (given, given_gradient) if inward else (buffer, gradient)
                own = (wave, x, dx, buffer, gradient, moments, mix, factors, weights, winners)
                adds, masked = not inward and node in given_grads, not program.rectified
                _leave(*own, ctx.by_batch, shared, adds=adds, masked=masked, by_library=ctx.by_library)
            if node < program.inputs:
                continue
            terms = program.terms[node - program.inputs]
            if _only_distributes(mix, terms):
                own_terms = [t for t in terms if not t.through]
                distribute_gradient(buffer, gradient, moments, mix, factors, node, own_terms)
            elif mix_gradient is not None:
                values = (buffer, gradient, moments, mix, factors, mix_gradient)
                merge = shared.merge_sums if shared is not None and any(t.normed for t in terms) else None
                rectified = node in program.rectified
                combine_gradient(
                    *values,
                    node,
                    terms,
                    by_batch=ctx.by_batch,
                    merge=merge,
                    rectified=rectified,
                    arrived=along.get(node),
                )
        weight_grad: Tensor | None = None
        if is_wanted(ctx, 1):  # in architecture steps weights need no gradient
            outer = [wave for wave in program.waves if wave.sources[0] < program.inputs]
            others = [wave for wave in program.waves if wave not in outer]
            if program.stride == 1:
                outer, others = list(program.waves), []
            with alongside(ctx.second_stream, given, buffer, gradient, weights):
                weight_grad = flat = torch.empty_like(given_weights)  # every weight belongs to a group
                first = [g for wave in outer for g in wave.first]
                if ctx.by_library:  # such programs have no strides, hence no `others`
                    library_conv.weight_gradient(given, gradient, weights, flat, first)
                else:
                    weight_gradient(given, gradient, flat, first)
                weight_gradient(buffer, gradient, flat, [g for wave in others for g in wave.first])
                weight_gradient(buffer, gradient, flat, [g for wave in program.waves for g in wave.second])
        inputs = [given_gradient[i].permute(0, 3, 1, 2).to(state.dtype) for i, state in enumerate(states)]
        return None, None, None, None, mix_gradient if mix_wanted else None, weight_grad, None, None, None, *inputs


def _pools_together(wave: Wave, channels: int) -> bool:
    """Whether the pools of a wave share a launch with its convolutions."""
    if not (current_settings().pools_together and wave.first and wave.pools) or channels > MAX_TOGETHER:
        return False
    return all(p.largest == NONE for p in wave.pools)


def _readable(program: Program, states: Sequence[Tensor], dtype: torch.dtype) -> Tensor | None:
    """The input of a program as [1, n, h, w, c] without a copy, if pools read it, which can copy it to the buffer."""
    wave = program.wave_of(0)
    if not current_settings().copies_along or len(states) != 1 or program.stride > 1 or wave is None or not wave.pools:
        return None
    rows = states[0].permute(0, 2, 3, 1)
    return rows[None] if rows.is_contiguous() and rows.dtype == dtype else None


def _copied_along(program: Program, mix: Tensor, gradient: Tensor, plane: int, own: Tensor) -> bool:
    """Whether the kernel that reads the gradient `own` of a node first can copy it to its plane."""
    if not current_settings().copies_along or not program.inputs <= plane < program.nodes:
        return False
    terms = program.terms[plane - program.inputs]
    if not terms or program.wave_of(plane) is not None or _only_distributes(mix, terms):
        return False
    return own.is_contiguous() and own.dtype == gradient.dtype


def _copy_planes(buffer: Tensor, maps: dict[int, Tensor]) -> None:
    """Copies maps [n, h, w, c] to planes of a buffer; equal parts of one map, as of a concatenation, by one launch."""
    if not maps:
        return
    (first, *_), (own, *others) = maps, maps.values()
    steps = {b.storage_offset() - a.storage_offset() for a, b in pairwise(maps.values())}
    alike = all(x.stride() == own.stride() and x.dtype == own.dtype for x in others)
    is_one = len({x.untyped_storage().data_ptr() for x in maps.values()}) == 1
    if not (current_settings().copies_along and alike and is_one and len(steps) == 1 and min(steps) > 0) or any(
        plane != first + i for i, plane in enumerate(maps)
    ):
        torch._foreach_copy_([buffer[plane] for plane in maps], list(maps.values()))
        return
    parts = own.as_strided((len(maps), *own.shape), (*steps, *own.stride()), own.storage_offset())
    to = buffer[first : first + len(maps)]
    size = 8 // own.element_size()  # copies with gaps handle one element at a time
    numbers = (own.shape[-1], parts.storage_offset(), to.storage_offset(), *parts.stride()[:-1])
    if to.dtype == own.dtype and own.stride(-1) == 1 and not any(number % size for number in numbers):
        to, parts = to.view(torch.int64), parts.view(torch.int64)
    to.copy_(parts)


def _only_distributes(mix: Tensor, terms: Sequence[Term]) -> bool:
    """Whether the gradients of all terms of a node are its own gradient."""
    return mix.dim() == 2 and not any(t.normed for t in terms)


def _leave(
    wave: Wave,
    x: Tensor,
    dx: Tensor,
    buffer: Tensor,
    gradient: Tensor,
    moments: Tensor,
    mix: Tensor,
    factors: Tensor | None,
    weights: Tensor,
    winners: Tensor,
    by_batch: bool,
    shared: SharedRows | None,
    *,
    adds: bool,
    masked: bool,
    by_library: bool,
) -> None:
    """Computes the gradients of a wave's sources from those of all their outgoing operations.

    adds: accumulate into the sources' gradients instead of overwriting them. masked: convolutions read the
    ReLU of the sources. by_library: convolutions run by the library.
    """
    c = buffer.shape[-1]
    if wave.second:
        partial = _room_for_sums(buffer, moments)
        masked_input_gradient(gradient, weights, buffer, gradient, partial, wave.second)
        if shared is not None:
            partial = shared.merge_tiles(partial, wave.inner)
        normalise_gradient(partial, buffer, gradient, moments, wave.inner, by_batch=by_batch)
    rows = x[0].numel() // c
    if by_library:
        parts = library_conv.shares(wave.first)
        sums = library_conv.input_gradient(x, gradient, weights, parts)
    else:
        parts = shares(wave.first, rows, c)
        sums = moments.new_empty(len(parts), *x.shape[1:])
        input_gradient(gradient, weights, sums, parts)
    leaving = []
    for source, identities in zip(wave.sources, wave.identities, strict=True):
        # Parts are ordered by source (`shares`), so the parts of one source are contiguous.
        own = [i for i, part in enumerate(parts) if part.group.source == source]
        pooled = next((p for p in wave.pools if p.source == source), None)
        leaving.append(Leaving(source, own[0] if own else 0, len(own), identities, pooled, adds, masked))
    gather_gradient(x, sums, gradient, dx, mix, factors, winners, leaving)


def _room_for_sums(buffer: Tensor, moments: Tensor) -> Tensor:
    """Buffer [2, tiles, planes, c] for two sums per tile of rows."""
    planes, n, height, width, c = buffer.shape
    return moments.new_empty(2, tiles(n * height * width), planes, c)


def _differentiable_backward(
    program: Program,
    dtype: torch.dtype,
    shared: SharedRows | None,
    grads: Sequence[Tensor | None],
    leaves: Sequence[Tensor],
    constants: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Reruns the twin for create_graph: its gradient can be differentiated again, that of a kernel cannot."""

    def twin(mix: Tensor, weights: Tensor, *states: Tensor) -> Sequence[Tensor]:
        return mixed_cell_reference(program, dtype, mix, weights, *constants, *states, shared=shared)[0]

    dmix, dweights, *dstates = by_twin(twin, leaves, grads)
    return None, None, None, None, dmix, dweights, None, None, None, *dstates
