"""One supernet for all checks of a space and shape: building it takes longer than most of them."""

from __future__ import annotations

from torch import Tensor

from softcell.spaces import Shape, Space, Supernet
from softcell.testing.tools import SHAPE, build_supernet

_KNOWN: dict[tuple[Space, Shape], tuple[Supernet, dict[str, Tensor], bool]] = {}


def shared_supernet(space: Space, shape: Shape = SHAPE) -> Supernet:
    """The supernet of a space and shape in the state in which it was built."""
    if (space, shape) not in _KNOWN:
        supernet = build_supernet(space, shape)
        state = {name: value.clone() for name, value in supernet.state_dict().items()}
        _KNOWN[space, shape] = supernet, state, supernet.training
    supernet, state, training = _KNOWN[space, shape]
    supernet.load_state_dict(state)
    supernet.zero_grad()
    supernet.requires_grad_(True)
    assert not any(module._forward_hooks for module in supernet.modules()), "a check removes its hooks"
    return supernet.train(training)
