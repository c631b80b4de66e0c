"""Search spaces, one file each."""

from softcell.spaces.base import Bound, Inputs, Network, Shape, Space, Supernet
from softcell.spaces.cell import MixedCell, PickedCell
from softcell.spaces.registry import SPACES, build_space, register_space

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
