"""A cell of a derived network as one operation: preprocessing, convolutions, norms, drop-path and sums into nodes.

Every map is a *plane*. A plane stores the output of a convolution, y [rows, c], and its value is z = a · y + b with a
and b per channel: batch-norm is applied wherever the plane is read, without a separate pass. Nodes have a = 1, b = 0
and are adjacent in one buffer [rows, nodes · c], which is the concatenated output of the cell. Inputs that are not
preprocessed also have a = 1, b = 0: such a program is one part of a cell, and the other parts ran before. The nodes of
a part are separate maps [rows, c] instead, because what reads them reads them one by one.

The convolutions are *stages*: ReLU of a plane, a depthwise k×k convolution (skipped if k = 1), a pointwise convolution.
Depthwise results are kept for the gradients of weights where `Blocks.weight_factors` is 1. With the gradient g of a
value z and m rows,

    ∂y = a · (g − Σg / m − ŷ · Σ(g·ŷ) / m),   ŷ = (y − mean) · rstd,   ∂γ = Σ g·ŷ,   ∂β = Σ g

is linear in g and y, so the gradient of a norm is also applied wherever a plane's gradient is read.

`derived_cell_reference` is the plain twin, differentiated by autograd. The Triton passes are in `derived_triton`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from softcell.kernels.backend import is_wanted, triton_kernels
from softcell.kernels.derived_program import NONE, Derived, Form, Stage, nodes_read
from softcell.kernels.pool import average_pool
from softcell.kernels.schedule import copy_together
from softcell.kernels.shared import merge_over_ranks


def derived_cell(
    program: Derived,
    dtype: torch.dtype,
    parameters: Tensor,
    running: Tensor | None,
    factors: Tensor | None,
    *states: Tensor,
    shared: bool = False,
    readers: int = 1,
    passes: bool = False,
) -> tuple[Tensor, ...]:
    """The concatenated nodes [n, nodes · c, h', w'], channels-last, and the planes' statistics [3, planes, c].

    dtype: of stored maps; sums are float32. parameters [size] float32, flat; running [2, planes, c]: mean and variance
    to normalise with, or None to use batch statistics; factors [paths, n] float32 or None; states: the input tensors
    [n, c_i, h_i, w_i]. Statistics are mean, 1/√(variance + eps) and unbiased variance (as stored in running
    statistics), without gradient. shared: batch statistics cover the rows of all ranks and are merged by one collective
    per norm group, forward and backward. readers: how often the nodes are returned, each time as the same memory. If
    each reader gets its own, the backward pass adds their gradients where they belong; autograd would add them up
    elsewhere, and the sum would then be copied. passes: the last input tensor is returned, too, before the statistics.
    If its later readers read that, the kernel that writes its gradient adds theirs, and if only this cell reads the
    nodes of another one, that gradient begins the buffer in which the backward pass of the other cell continues.
    """
    given = (program, dtype, shared, False, (readers,), passes, parameters, running, factors, *states)
    found: tuple[Tensor, ...] = _DerivedCell.apply(*given)  # type: ignore[no-untyped-call]
    return found


def derived_nodes(
    program: Derived,
    dtype: torch.dtype,
    parameters: Tensor,
    running: Tensor | None,
    factors: Tensor | None,
    *states: Tensor,
    shared: bool = False,
) -> tuple[list[Tensor], Tensor]:
    """`derived_cell` that returns the nodes separately, each [n, c, h', w'], channels-last and without gaps.

    Node gradients are copied once. Slicing a concatenated output instead would first assemble them into one tensor.
    """
    given = (program, dtype, shared, True, (1,) * program.nodes, False, parameters, running, factors, *states)
    *nodes, moments = _DerivedCell.apply(*given)  # type: ignore[no-untyped-call]
    return nodes, moments


def derived_nodes_reference(
    program: Derived,
    dtype: torch.dtype,
    parameters: Tensor,
    running: Tensor | None,
    factors: Tensor | None,
    *states: Tensor,
    shared: bool = False,
) -> tuple[list[Tensor], Tensor]:
    """The plain twin of `derived_nodes`."""
    out, moments = derived_cell_reference(program, dtype, parameters, running, factors, *states, shared=shared)
    return list(torch.split(out, program.channels, 1)), moments


def derived_cell_reference(
    program: Derived,
    dtype: torch.dtype,
    parameters: Tensor,
    running: Tensor | None,
    factors: Tensor | None,
    *states: Tensor,
    shared: bool = False,
    readers: int = 1,
    passes: bool = False,
) -> tuple[Tensor, ...]:
    """The plain twin of `derived_cell`, by autograd; differentiable any number of times."""
    c = program.channels
    norms = {norm.plane: norm for norm in program.norms}
    moments = torch.zeros(3, program.planes, c, dtype=parameters.dtype, device=parameters.device)
    raw: dict[int, list[Tensor]] = {}
    values: dict[int, Tensor] = {}

    def run(stages: Sequence[Stage]) -> None:
        for stage in stages:
            x = states[-1 - stage.source] if stage.source < 0 else values[stage.source]
            raw.setdefault(stage.plane, []).append(_apply(stage, x.to(dtype), parameters.to(dtype)))

    def measure(ys: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, biased and unbiased variance of a norm group, each [planes, c]."""
        variance, mean = (
            torch.stack(own) for own in zip(*(torch.var_mean(y, (0, 2, 3), correction=0) for y in ys), strict=True)
        )
        rows = ys[0].numel() // c
        if not shared:
            return mean, variance, variance * (rows / max(rows - 1, 1))
        total, mean, variance = merge_over_ranks(rows, mean, variance * rows)
        return mean, variance, variance * (total / (total - 1).clamp(min=1))

    def normalise(planes: Sequence[int]) -> None:
        if not planes:
            return
        ys = [torch.cat(raw[plane], 1).to(parameters.dtype) for plane in planes]
        if running is None:
            means, variances, unbiased = measure(ys)
        else:
            means, variances = running[:, list(planes)]
            unbiased = variances
        rstds = torch.rsqrt(variances + program.eps)
        moments[:, list(planes)] = torch.stack([means, rstds, unbiased]).detach()
        for plane, y, mean, rstd in zip(planes, ys, means, rstds, strict=True):
            z = (y - mean.view(-1, 1, 1)) * rstd.view(-1, 1, 1)
            norm = norms[plane]
            if norm.scale != NONE:
                scale, shift = (parameters[at : at + c].view(-1, 1, 1) for at in (norm.scale, norm.shift))
                z = z * scale + shift
            values[plane] = z.to(dtype)

    if program.is_raw:
        values.update((i, state.to(dtype)) for i, state in enumerate(states))
    else:
        run(program.preprocess)
        normalise(range(program.inputs))
    for plane in (program.inputs - 1, *program.node_planes):
        if program.is_node(plane):
            like = values[0][:, :, :: program.stride, :: program.stride]
            total = torch.zeros_like(like)
            for one in program.node_inputs[plane - program.inputs]:
                value = values[one.plane]
                if factors is not None and one.path != NONE:
                    value = value * factors[one.path].to(value.dtype).view(-1, 1, 1, 1)
                total = total + value
            values[plane] = total
        found = program.round_of(plane)
        if found is None:
            continue
        run(found.first)
        for pool in found.pools:
            x = values[pool.source]
            pooled = F.max_pool2d(x, 3, pool.stride, 1) if pool.largest else average_pool(x, pool.stride)
            raw[pool.plane], values[pool.plane] = [pooled], pooled
        normalise(found.measured)
        run(found.second)
        normalise(found.measured_second)
    out = torch.cat([values[plane] for plane in program.node_planes], 1)
    return *[out.contiguous(memory_format=torch.channels_last)] * readers, *states[-1:] * passes, moments


def _apply(stage: Stage, x: Tensor, parameters: Tensor) -> Tensor:
    """One stage with PyTorch convolutions: x [n, fan_in, h, w]; returns [n, width, ⌈h/s⌉, ⌈w/s⌉]."""
    matrix = parameters[stage.matrix : stage.matrix + stage.width * stage.fan_in].view(stage.width, stage.fan_in, 1, 1)
    x = F.relu(x)
    size = [-(-length // stage.stride) for length in x.shape[2:]]
    reach = (stage.size - 1) * stage.dilation + 1
    # Padding after the last row and column; negative if the last window ends before them.
    after = [
        (s - 1) * stage.stride + reach - length - stage.padding for s, length in zip(size, x.shape[2:], strict=True)
    ]
    x = F.pad(x, (stage.padding, after[1], stage.padding, after[0]))
    if stage.size == 1:
        x = x[:, :, :: stage.stride, :: stage.stride]
    else:
        kernel = parameters[stage.depth : stage.depth + stage.taps * stage.fan_in]
        kernel = kernel.view(stage.fan_in, 1, stage.size, stage.size)
        x = F.conv2d(x, kernel, stride=stage.stride, dilation=stage.dilation, groups=stage.fan_in)
    return F.conv2d(x, matrix)


class _DerivedCell(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        program: Derived,
        dtype: torch.dtype,
        shared: bool,
        apart: bool,
        readers: tuple[int, ...],
        passes: bool,
        parameters: Tensor,
        running: Tensor | None,
        factors: Tensor | None,
        *states: Tensor,
    ) -> tuple[Tensor, ...]:
        # Inputs that are not preprocessed are copied into the buffer, from any layout.
        is_raw = program.is_raw
        inputs = [state.permute(0, 2, 3, 1) if is_raw else _rows_last(state, dtype) for state in states]
        shapes, known, drops = [x.shape for x in inputs], running is not None, factors is not None
        form = Form.of(dtype, shapes, parameters.numel(), known=known, drops=drops, shared=shared, apart=apart)
        tensors = _named(parameters, running, factors, [] if is_raw else inputs)
        tensors |= {f"input{i}": x for i, x in enumerate(inputs) if is_raw}
        triton_kernels("derived").forward_schedule(program, form, parameters.device).run(tensors)
        ctx.program, ctx.form, ctx.readers, ctx.passes = program, form, readers, passes
        ctx.size, ctx.room = gradient_size(tensors["buffer"], program, form), None
        ctx.kept = [name for name in _KEPT if name in tensors]
        kept = [tensors[name] for name in ctx.kept]
        ctx.shapes = shapes
        ctx.save_for_backward(parameters, running, factors, *([] if is_raw else inputs), *kept)
        ctx.set_materialize_grads(False)
        # The state begins with mean, 1/√(variance + eps) and variance (`Forward.begin`).
        moments = tensors["state"].view(-1, program.planes, program.channels)[:3]
        ctx.mark_non_differentiable(moments)
        outputs = zip(_outputs_in(tensors["buffer"], program, form), readers, strict=True)
        passed = [states[-1].view_as(states[-1])] * passes
        return *(x.permute(0, 3, 1, 2) for x, count in outputs for _ in range(count)), *passed, moments

    @staticmethod
    def backward(ctx: Any, *arrived: Tensor | None) -> tuple[Tensor | None, ...]:
        program: Derived = ctx.program
        parameters, running, factors, *kept = ctx.saved_tensors
        inputs = [] if program.is_raw else kept[: program.inputs]
        kept = kept[len(inputs) :]
        gradients = list(arrived[:-1])  # the last one belongs to the statistics
        passed = gradients.pop() if ctx.passes else None
        room, ctx.room = ctx.room, None
        if all(gradient is None for gradient in gradients):
            return *(None,) * (8 + program.inputs), passed
        if torch.is_grad_enabled():
            raise NotImplementedError("a fused derived cell has no second derivative; run it within `modules_only`")
        tensors = _named(parameters, running, factors, inputs)
        tensors |= zip(ctx.kept, kept, strict=True)
        each = iter(gradients)
        given = [[one.permute(0, 2, 3, 1) for one in islice(each, n) if one is not None] for n in ctx.readers]
        if room is not None and _begins(room, given, program, ctx.form):
            tensors["buffer_gradient"] = room
        else:
            tensors["buffer_gradient"] = tensors["buffer"].new_empty(ctx.size)
            _fill(_outputs_in(tensors["buffer_gradient"], program, ctx.form), given)
        if "given" in tensors:
            tensors["given_gradient"] = torch.empty_like(tensors["given"])
        last, producer = f"input{program.inputs - 1}_gradient", _producer(ctx)
        form = replace(ctx.form, room=0 if producer is None else producer.size)
        if passed is not None and program.adds_passed:
            tensors |= _aligned({"passed": _rows_last(passed, form.dtype)})
            form, passed = replace(form, passed=True), None
        triton_kernels("derived").backward_schedule(program, form, parameters.device).run(tensors)
        if producer is not None:
            producer.room = tensors[last]
        own = (tensors[f"input{i}_gradient"][: math.prod(of)].view(of) for i, of in enumerate(ctx.shapes))
        states = [x.permute(0, 3, 1, 2) for x in own]
        if passed is not None:
            states[-1] = states[-1] + passed
        return *(None,) * 6, tensors["parameter_gradient"], None, None, *states


_KEPT = ("given", "buffer", "state", "winners", "depths", "depthwise")
"""Tensors that a forward pass saves for the backward pass.

Without strides, `given` is part of `buffer`; `depthwise` is only present if `Pass.by_factors` needs it.
"""


def _named(
    parameters: Tensor, running: Tensor | None, factors: Tensor | None, inputs: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Input tensors of a schedule, by name; kernels rely on addresses that are multiples of 16."""
    named = {"parameters": parameters, "running": running, "factors": factors}
    named |= {f"input{i}": x for i, x in enumerate(inputs)}
    return _aligned({name: x for name, x in named.items() if x is not None})


def _aligned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x if x.data_ptr() % 16 == 0 else x.clone() for name, x in tensors.items()}


def gradient_size(buffer: Tensor, program: Derived, form: Form) -> int:
    """Values of the buffer of gradients of planes: like the planes' own, with a second map for `nodes_read`."""
    n, height, width, _ = form.shapes[-1]
    rows = n * -(-height // program.stride) * -(-width // program.stride)
    return buffer.numel() + len(nodes_read(program)) * rows * program.channels


def _producer(ctx: Any) -> Any:
    """The autograd node of the cell whose nodes are the last input, if this cell is their only reader, or None.

    This pass must reach it: its backward pass continues in the buffer that the gradient of the input begins.
    """
    producer, output = ctx.next_functions[-1]
    if ctx.program.is_raw or not isinstance(producer, type(ctx)):
        return None
    alone = output == 0 and producer.readers == (1,) and producer.form.dtype == ctx.form.dtype
    return producer if alone and is_wanted(ctx, len(ctx.next_functions) - 1) else None


def _begins(room: Tensor, gradients: Sequence[Sequence[Tensor]], program: Derived, form: Form) -> bool:
    """Whether the only gradient that arrived is the start of `room`, where the reader of the nodes wrote it.

    A hook or another reader may have replaced it. `room` is alive, so no other tensor has its address.
    """
    [[own]], [place] = gradients, _outputs_in(room, program, form)
    same = own.shape == place.shape and own.stride() == place.stride() and own.dtype == place.dtype
    return same and own.data_ptr() == place.data_ptr()


def _outputs_in(buffer: Tensor, program: Derived, form: Form) -> tuple[Tensor, ...]:
    """The nodes at the start of a buffer: separately [n, h', w', c], or as one map [n, h', w', nodes · c]."""
    n, height, width, _ = form.shapes[-1]
    shape = n, -(-height // program.stride), -(-width // program.stride), program.channels
    found = buffer[: program.nodes * math.prod(shape)]
    if form.apart:
        return found.view(program.nodes, *shape).unbind()
    return (found.view(*shape[:3], program.nodes * program.channels),)


def _fill(places: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]) -> None:
    """Writes the sum of each list of gradients into a map without gaps; the sum of none is zero."""
    given = list(zip(places, gradients, strict=True))
    absent = [to for to, own in given if not own]
    if absent:
        torch._foreach_zero_(absent)
    copy_together([(to, own[0]) for to, own in given if len(own) == 1])
    for to, own in given:
        if len(own) > 1:
            torch.add(own[0], own[1], out=to)
            for one in own[2:]:
                to.add_(one)


def _rows_last(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x [n, c, h, w] as a dense [n, h, w, c] of `dtype`; a view if it is already channels-last."""
    return x.permute(0, 2, 3, 1).to(dtype).contiguous()
