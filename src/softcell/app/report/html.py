"""Builds HTML: text is escaped unless it is `Html` already, so no text of a user can become a tag.

`clean`, `columns`, `shorten` and `wrap` prepare strings of users for drawings.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable
from typing import Any, TypeAlias
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


VOID = {"br", "hr", "img", "input", "meta", "link"}


class Html(str):
    """Markup; everything else is text."""

    __slots__ = ()


Child: TypeAlias = "str | Iterable[str] | None"


def el(tag: str, *children: Child, **attributes: str | int | float | bool | None) -> Html:
    """An element. `class_` is class, `data_x` is data-x; None and False leave an attribute out, True has no value."""
    parts = [tag]
    for key, value in attributes.items():
        name = key.rstrip("_").replace("_", "-")
        if value is True:
            parts.append(name)
        elif value is not None and value is not False:
            parts.append(f'{name}="{escape(str(value))}"')
    opening = f"<{' '.join(parts)}>"
    return Html(opening if tag in VOID else f"{opening}{join(*children)}</{tag}>")


def join(*children: Child) -> Html:
    """Children one after the other: markup as it is, text escaped line by line."""
    result = []
    for child in children:
        if child is None:
            continue
        if isinstance(child, Html):
            result.append(str(child))
        elif isinstance(child, str):
            result.append("\n".join(escape(line) for line in child.split("\n")))
        else:
            result.append(join(*child))
    return Html("".join(result))


def data(value: Any) -> str:
    """A value for a `data-` attribute, as compact JSON."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def table(header: Iterable[Child], rows: Iterable[Iterable[Child]], numeric: Iterable[int] = ()) -> Html:
    """A plain table that scrolls sideways where it must; columns in `numeric` are aligned to the right."""
    right = set(numeric)

    def line(cells: Iterable[Child], tag: str) -> Html:
        return el("tr", [el(tag, cell, class_="n" if i in right else None) for i, cell in enumerate(cells)])

    head, body = el("thead", line(header, "th")), el("tbody", [line(row, "td") for row in rows])
    return el("div", el("table", head, body, class_="plain"), class_="scroll fade", tabindex=0)


def facts(pairs: Iterable[tuple[str, Child]]) -> Html:
    """Names and values, one per line."""
    return el("dl", [join(el("dt", name), el("dd", value)) for name, value in pairs if value], class_="facts")


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def big(value: float) -> str:
    """A count in few characters: 134k, 1.53M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.4g}"
