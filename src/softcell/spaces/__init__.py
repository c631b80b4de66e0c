"""Search spaces, one file each."""

from softcell.spaces.base import SPACES, Bound, Inputs, Network, Shape, Space, Supernet, build_space, register_space
from softcell.spaces.cell import MixedCell, PickedCell

__all__ = [
    "SPACES",
    "Bound",
    "Inputs",
    "MixedCell",
    "Network",
    "PickedCell",
    "Shape",
    "Space",
    "Supernet",
    "build_space",
    "register_space",
]
