"""Strings of users on their way into a drawing: made harmless, measured and shortened."""

from __future__ import annotations

import unicodedata
from xml.sax.saxutils import escape as _escape

from rich.cells import cell_len, chop_cells


def clean(text: str) -> str:
    """The text on one line, without characters that XML forbids or that a terminal would obey."""
    # Controls, bidirectional overrides (Cf), lone surrogates and the two non-characters of the first plane.
    bad = {"Cc", "Cf", "Cs", "Zl", "Zp"}
    return "".join("\ufffd" if unicodedata.category(c) in bad or c in "\ufffe\uffff" else c for c in text)


def escape(text: str) -> str:
    """For element content and double-quoted attributes of XML."""
    return _escape(clean(text), {'"': "&quot;"})


def columns(text: str) -> int:
    """Width in character cells; wide characters take two."""
    return cell_len(text)


def shorten(text: str, limit: int, ellipsis: str = "…") -> str:
    """The text in at most `limit` cells; the middle goes first, for names differ at both ends."""
    text = clean(text)
    if columns(text) <= limit:
        return text
    room = max(limit - columns(ellipsis), 0)
    tail = room // 2
    end = chop_cells(text[::-1], tail)[0][::-1] if tail else ""
    start = chop_cells(text, room - tail)[0] if room - tail else ""
    short = start + ellipsis + end
    return short if columns(short) <= limit else ellipsis[:limit]


def wrap(parts: list[str], limit: int, comma: str = ",") -> list[str]:
    """The parts joined into lines of at most `limit` cells; a single part that is longer is shortened."""
    lines: list[str] = []
    for i, part in enumerate(parts):
        part = shorten(part, limit - columns(comma)) + (comma if i + 1 < len(parts) else "")
        joined = f"{lines[-1]} {part}" if lines else part
        if lines and columns(joined) <= limit:
            lines[-1] = joined
        else:
            lines.append(part)
    return lines
