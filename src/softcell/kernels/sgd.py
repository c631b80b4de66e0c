"""Clips gradients by the norm of all of them and makes a step of SGD, for all parameters of a network at once.

torch's operations on lists pass addresses as arguments of a launch, which has room for 36 to 110 tensors. A network of
a thousand small weights takes forty launches of a few microseconds each, for arithmetic that takes twenty. Here the
addresses of parameters and momenta are in a table on the device, and gradients are copied into one vector, so that a
step takes three launches: parts of one buffer, as fused cells return gradients, are copied as one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from softcell.kernels.backend import KeptTable, runs_triton, triton_kernels

ROOM = 64
"""Tables that are kept, those used last: steps that update changing sets of parameters are not worth one each."""
_tables: dict[tuple[object, ...], KeptTable] = {}


def sgd_step(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    lr: Tensor,
    *,
    clip: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
) -> None:
    """One step of SGD in place, with gradients scaled so that the norm of all is at most `clip` (0: not scaled).

    parameters, gradients, momenta: float32, of the same shapes and strides, without gaps. lr [] float32.

        g = min(1, clip / (‖g‖ + 1e-6)) · g + weight_decay · p,  m = momentum · m + g,
        p = p − lr · m, or p − lr · (g + momentum · m) with `nesterov`

    Example:
        >>> import torch
        >>> from softcell.kernels.sgd import sgd_step
        >>> weight, velocity = torch.ones(2), torch.zeros(2)
        >>> rule = {"clip": 5.0, "momentum": 0.9, "weight_decay": 0.0, "nesterov": False}
        >>> sgd_step([weight], [torch.tensor([30.0, 40.0])], [velocity], torch.tensor(0.1), **rule)
        >>> weight
        tensor([0.7000, 0.6000])
    """
    given = (clip, momentum, weight_decay, nesterov)
    if not parameters:
        return
    if not runs_triton(parameters[0]):
        sgd_step_reference(parameters, gradients, momenta, lr, *given)
        return
    order, runs = _ordered(gradients)
    found = _table([parameters[i] for i in order], [momenta[i] for i in order])
    if found is None:
        sgd_step_reference(parameters, gradients, momenta, lr, *given)
        return
    vector = torch.cat(runs) if len(runs) > 1 else runs[0]
    found.await_copy(parameters[0])
    triton_kernels("sgd").sgd_step(vector, found.tensor, lr, *given)
    # As operations of torch do: a graph from before the step must fail, since its weights are others now.
    torch.autograd.graph.increment_version([*parameters, *momenta])


def sgd_step_reference(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    lr: Tensor,
    clip: float,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
) -> None:
    """The plain twin of `sgd_step`."""
    scale = torch.ones_like(lr)
    if clip > 0:
        norm = torch.stack([g.norm() for g in gradients]).norm()
        scale = torch.clamp(clip / (norm + 1e-6), max=1.0)
    for p, g, m in zip(parameters, gradients, momenta, strict=True):
        g = scale * g + weight_decay * p
        m.mul_(momentum).add_(g)
        p.sub_(lr * (g + momentum * m if nesterov else m))


def _ordered(gradients: Sequence[Tensor]) -> tuple[list[int], list[Tensor]]:
    """Gradients as vectors [n], as few as possible, and the numbers of the gradients in their order.

    Gradients that follow each other in one buffer are one vector. The order depends on their positions in buffers
    only, so that it is the same in every step.
    """
    buffers: dict[int, list[int]] = {}
    for i, g in enumerate(gradients):
        buffers.setdefault(g.untyped_storage().data_ptr(), []).append(i)
    order: list[int] = []
    runs: list[Tensor] = []
    for own in buffers.values():
        own.sort(key=lambda i: gradients[i].storage_offset())
        begin = 0
        for last in range(len(own)):
            g = gradients[own[last]]
            end = g.storage_offset() + g.numel()
            if last + 1 == len(own) or gradients[own[last + 1]].storage_offset() != end:
                first = gradients[own[begin]]
                start = first.storage_offset()
                runs.append(first.as_strided((end - start,), (1,), start))
                begin = last + 1
        order += own
    return order, runs


def _table(parameters: Sequence[Tensor], momenta: Sequence[Tensor]) -> KeptTable | None:
    """The blocks of all parameters in order: addresses of both, the first of their gradients, and how many they are.

    None if it cannot be copied to the device, in a capture that no eager step of the same parameters preceded.
    """
    sizes = tuple(p.numel() for p in parameters)
    key = (*(p.data_ptr() for p in parameters), *(m.data_ptr() for m in momenta), *sizes, parameters[0].device)
    found = _tables.pop(key, None)
    if found is not None:
        _tables[key] = found  # used last
        return found
    device = parameters[0].device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    if len(_tables) >= ROOM:
        del _tables[next(iter(_tables))]
    block, rows, start = triton_kernels("sgd").BLOCK, [], 0
    for p, m, size in zip(parameters, momenta, sizes, strict=True):
        for at in range(0, size, block):
            rows.append((p.data_ptr() + 4 * at, m.data_ptr() + 4 * at, start + at, min(block, size - at)))
        start += size
    found = _tables[key] = KeptTable(tuple(rows), device, torch.int64)
    return found
