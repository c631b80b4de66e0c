"""Builds HTML: text is escaped unless it is `Html` already, so no text of a user can become a tag."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, TypeAlias

from softcell.app.report.strings import escape

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
