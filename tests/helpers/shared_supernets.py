"""One supernet for all checks of a space and shape: building it takes longer than most of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from softcell.spaces import Shape, Space, Supernet
from softcell.testing.tools import SHAPE, build_supernet

_KNOWN: dict[tuple[Space, Shape], tuple[Supernet, list[tuple[nn.Module, bool]], list[Tensor]]] = {}


def shared_supernet(space: Space, shape: Shape = SHAPE) -> Supernet:
    """The supernet of a space and shape in the state in which it was built."""
    if (space, shape) not in _KNOWN:
        supernet = build_supernet(space, shape)
        modules = [(module, module.training) for module in supernet.modules()]
        _KNOWN[space, shape] = supernet, modules, [value.detach().clone() for value in _values(modules)]
    supernet, modules, state = _KNOWN[space, shape]
    # By hand: `load_state_dict` looks up every name and takes longer than a check.
    values = _values(modules)
    assert len(values) == len(state), "a check keeps the weights and buffers that there are"
    with torch.no_grad():
        torch._foreach_copy_(values, state)
    for module, training in modules:
        module.training = training
        assert not module._forward_hooks, "a check removes its hooks"
        for parameter in module._parameters.values():
            if parameter is not None:
                parameter.grad = None
                parameter.requires_grad_(True)
    return supernet


def _values(modules: list[tuple[nn.Module, bool]]) -> list[Tensor]:
    """Of now: a change of precision replaces buffers."""
    return [
        value
        for module, _ in modules
        for value in (*module._parameters.values(), *module._buffers.values())
        if value is not None
    ]
