"""Families of operations: what a drawing tells apart by colour, line and mark.

A family is read off the name, so that operations of users, which no registry knows, are drawn too.
"""

from __future__ import annotations

import re
from typing import Literal

Family = Literal["conv", "dilated", "dynamic", "pool", "skip", "attention", "other", "none"]

FAMILIES: tuple[Family, ...] = ("conv", "dilated", "dynamic", "pool", "skip", "attention", "other", "none")

TITLES: dict[Family, str] = {
    "conv": "convolution",
    "dilated": "dilated convolution",
    "dynamic": "dynamic convolution",
    "pool": "pooling",
    "skip": "skip",
    "attention": "attention",
    "other": "other",
    "none": "none",
}

_NONE = frozenset({"none", "zero", "zeroize"})
_SKIP = frozenset({"skip", "identity", "shortcut"})
_ATTENTION = frozenset({"attn", "att", "sa", "mhsa", "nonlocal", "se", "eca", "cbam"})


def family(op: str) -> Family:
    """The family of an operation by the words of its name; `other` where nothing fits."""
    name = op.lower()
    words = set(re.split(r"[^a-z]+", name))
    if name in _NONE:
        return "none"
    if words & _SKIP:
        return "skip"
    if "pool" in name:
        return "pool"
    # Before dilation: that a kernel is made from the image itself says more of it than its holes.
    if "dynamic" in words and "conv" in name:
        return "dynamic"
    if any(word.startswith("dil") for word in words):
        return "dilated"
    # Before the short words: `mbconv_k3_se` is a convolution that happens to hold an attention.
    if "attention" in name:
        return "attention"
    if "conv" in name:
        return "conv"
    return "attention" if words & _ATTENTION else "other"
