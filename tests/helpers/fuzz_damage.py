"""Damage as it happens to files: bits, bytes, spans and values. The same number gives the same damage."""

from __future__ import annotations

import random
import re

TOKENS = (
    b"null", b"true", b"-1", b"0", b"1e308", b"1e999", b"NaN", b"[]", b"{}", b'""', b'"text"', b"9" * 25, b"9" * 5000,
    b"[" * 3000 + b"]" * 3000, b'"\\ud800"', b"2001-99-99", b"12:30:45", b"-0.0", b"[null]", b'{"x": 1}',
)  # fmt: skip
"""What takes the place of a value."""
_VALUE = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null')


def damage(content: bytes, number: int) -> bytes:
    """`content` with the damage of this number; now and then that is none."""
    draw = random.Random(number)
    kind = draw.choice(
        ("bit", "bit", "bit", "byte", "cut", "delete", "insert", "repeat", "zeros", "empty", "value", "value", "value")
    )
    at = draw.randrange(len(content)) if content else 0
    span = min(len(content) - at, draw.choice((1, 2, 16, 256, 4096)))
    if kind == "value" and (found := list(_VALUE.finditer(content[:100_000]))):
        chosen = draw.choice(found)
        return content[: chosen.start()] + draw.choice(TOKENS) + content[chosen.end() :]
    if kind in ("bit", "value") and content:
        return content[:at] + bytes([content[at] ^ (1 << draw.randrange(8))]) + content[at + 1 :]
    if kind == "byte" and content:
        return content[:at] + draw.randbytes(1) + content[at + 1 :]
    if kind == "cut":
        return content[:at]
    if kind == "delete":
        return content[:at] + content[at + span :]
    if kind == "insert":
        return content[:at] + draw.randbytes(draw.choice((1, 3, 40))) + content[at:]
    if kind == "repeat":
        return content[: at + span] + content[at : at + span] + content[at + span :]
    if kind == "zeros":
        return content[:at] + bytes(span) + content[at + span :]
    return b""
