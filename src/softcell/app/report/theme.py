"""The HTML and the look that all pictures and pages share: escaping, families of operations, colours, type, marks.

Text is escaped unless it is `Html` already, so no text of a user can become a tag. `clean`, `columns`, `shorten` and
`wrap` prepare strings of users for drawings.

A family is recognised by the operation's name, so that operations of users, which no registry knows, are drawn too.
Families differ by colour, line and mark, for eyes and printers without colour. Colours are written out per class and
not as CSS variables, which several SVG readers do not support; readers without media queries show the light page.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias
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


def shorten(text: str, limit: int) -> str:
    """The text in at most `limit` cells; the middle is cut, because names differ at both ends."""
    text = clean(text)
    if columns(text) <= limit:
        return text
    room = max(limit - 1, 0)
    tail = room // 2
    end = chop_cells(text[::-1], tail)[0][::-1] if tail else ""
    start = chop_cells(text, room - tail)[0] if room - tail else ""
    short = f"{start}…{end}"
    return short if columns(short) <= limit else "…"[:limit]


def wrap(parts: list[str], limit: int) -> list[str]:
    """The parts joined by commas into lines of at most `limit` cells; a single part that is longer is shortened."""
    lines: list[str] = []
    for i, part in enumerate(parts):
        part = shorten(part, limit - 1) + ("," if i + 1 < len(parts) else "")
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


def big(value: float, digits: int = 3) -> str:
    """A count in few characters: 134k, 1.53M."""
    if abs(value) < 1e3:
        return f"{value:.4g}"
    rounded = float(f"{value:.{digits}g}")  # before the unit is chosen: 999,999 is 1M, not 1e+03k
    size, unit = next((size, unit) for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if abs(rounded) >= size)
    return f"{rounded / size:.{digits}g}{unit}"


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

SANS = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,'DejaVu Sans',sans-serif"
MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"
MARGIN = 24.0
CHAR = 7.25  # advance of one character of a 12 px monospace font, with a little to spare

# Blue, vermilion and green after Okabe and Ito, darkened or lightened to at least 4.5:1 on the page.
COLOURS: dict[Family, tuple[str, str]] = {
    "conv": ("#0b66b0", "#6db5ff"),
    "dilated": ("#b8430a", "#ff9d66"),
    "dynamic": ("#5b3fc4", "#b9a6ff"),
    "pool": ("#00745a", "#4bd1a4"),
    "skip": ("#5b636d", "#a9b3be"),
    "attention": ("#a02a76", "#f490cb"),
    "other": ("#7a5b00", "#e3bf4f"),
    "none": ("#5b636d", "#a9b3be"),
}

STROKES: dict[Family, str] = {
    "conv": "",
    "dilated": "9 4",
    "dynamic": "14 3",
    "pool": "1.5 4.5",
    "skip": "",
    "attention": "10 4 1.5 4",
    "other": "5 3",
    "none": "2 6",
}

# page, box, text, quiet text, lines, grid
LIGHT = ("#ffffff", "#f3f5f8", "#1c2128", "#59626d", "#77818c", "#dfe4ea")
DARK = ("#11151b", "#1d242d", "#e8ecf1", "#a3adb8", "#7f8a96", "#2a333f")


DARK_CHOSEN, NOT_LIGHT = ":root[data-theme=dark]", ":root:not([data-theme=light])"


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
    # Before dilation: that the kernel depends on the image matters more than its dilation.
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


def num(value: float) -> str:
    """A coordinate with one decimal at most, the same on every machine."""
    text = f"{value:.1f}"
    text = text.removesuffix(".0")
    return "0" if text == "-0" else text


def text(x: float, y: float, content: str, style: str, anchor: str = "", width: float | None = None) -> str:
    """A line of text; `width` fixes it to that many pixels for any font."""
    fixed = f' textLength="{num(width)}" lengthAdjust="spacingAndGlyphs"' if width else ""
    side = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text class="{style}" x="{num(x)}" y="{num(y)}"{side}{fixed}>{escape(content)}</text>'


def page(width: float, height: float, title: str, description: str, style: str, body: list[str]) -> str:
    """The finished file."""
    w, h = num(width), num(height)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="sc" role="img" width="{w}" height="{h}" '
        f'viewBox="0 0 {w} {h}" aria-label="{escape(title)}">',
        f"<title>{escape(title)}</title>",
        f"<desc>{escape(description)}</desc>",
        f"<style>{style}</style>",
        f'<rect class="sc-page" width="{w}" height="{h}" rx="6"/>',
        *body,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def sheet(extra_light: str = "", extra_dark: str = "") -> str:
    """The style sheet of a picture. Every class begins with `sc`, so that it can be put inside a web page."""
    common = (
        f".sc text{{font:12px {SANS}}}"
        ".sc .sc-title{font-size:16px;font-weight:600}"
        ".sc .sc-head{font-size:14px;font-weight:600}"
        ".sc .sc-node{font-size:13px;font-weight:600}"
        ".sc .sc-var{font-size:15px;font-style:italic;font-weight:500}"
        ".sc .sc-sub{font-size:11px;font-style:normal;font-weight:500}"
        f".sc .sc-op,.sc .sc-num{{font:12px {MONO}}}.sc .sc-num{{font-size:11px}}"
        ".sc .sc-edge{fill:none;stroke-width:2;stroke-linecap:round;stroke-linejoin:round}"
        ".sc .sc-hand{stroke-width:1.5}.sc .sc-l-skip{stroke-width:1.25}"
        ".sc .sc-l-pool{stroke-width:2.5}.sc .sc-thin{stroke-width:1}"
    )
    common += "".join(f".sc .sc-l-{name}{{stroke-dasharray:{dash}}}" for name, dash in STROKES.items() if dash)
    common += (
        ".sc .sc-box{stroke-width:1.5}.sc .sc-empty{stroke-dasharray:4 3}.sc .sc-surrogate{stroke-dasharray:1.5 2.5}"
    )
    common += ".sc .sc-pill{stroke-width:1}.sc .sc-grid{stroke-width:1}"
    dark = _colours(DARK, 1) + extra_dark
    return f"{common}{_colours(LIGHT, 0)}{extra_light}@media (prefers-color-scheme:dark){{{dark}}}"


def page_sheet(extra_light: str = "", extra_dark: str = "") -> str:
    """The style sheet for pictures inside a web page whose theme can be chosen by `data-theme` on its root."""
    bare = sheet().partition(_colours(LIGHT, 0))[0]
    dark = _colours(DARK, 1) + extra_dark
    chosen, preferred = (dark.replace(".sc ", f"{root} .sc ") for root in (DARK_CHOSEN, NOT_LIGHT))
    return f"{bare}{_colours(LIGHT, 0)}{extra_light}@media (prefers-color-scheme:dark){{{preferred}}}{chosen}"


def inside_page(svg: str) -> str:
    """A picture of ours without its own style sheet, which inside a web page would hold for the whole of it."""
    head, _, rest = svg.partition("<style>")
    return head + rest.partition("</style>")[2]


def _colours(tones: tuple[str, ...], index: int) -> str:
    paper, box, ink, quiet, line, grid = tones
    rules = (
        f".sc .sc-page,.sc .sc-pill{{fill:{paper}}}"
        f".sc text{{fill:{ink}}}.sc .sc-quiet{{fill:{quiet}}}"
        f".sc .sc-box{{fill:{box};stroke:{line}}}.sc .sc-empty{{fill:{paper}}}"
        f".sc .sc-output{{fill:{ink};stroke:{ink}}}.sc .sc-on-output{{fill:{paper}}}"
        f".sc .sc-input{{stroke:{ink}}}"
        f".sc .sc-hand{{stroke:{line}}}.sc .sc-tip{{fill:{line}}}"
        f".sc .sc-grid{{stroke:{grid}}}.sc .sc-axis{{stroke:{line}}}"
    )
    for name, pair in COLOURS.items():
        colour = pair[index]
        rules += f".sc .sc-l-{name},.sc .sc-p-{name}{{stroke:{colour}}}.sc .sc-f-{name}{{fill:{colour}}}"
        rules += f".sc .sc-o-{name}{{fill:none;stroke:{colour};stroke-width:1.5}}"
    return rules


def mark(name: Family, x: float, y: float) -> str:
    """The sign of a family, ten pixels wide around (x, y): it conveys without colour what the line conveys with it."""
    n = num
    match name:
        case "conv":
            return f'<rect class="sc-f-conv" x="{n(x - 4)}" y="{n(y - 4)}" width="8" height="8" rx="1"/>'
        case "dilated":  # a kernel with holes
            dots = "".join(f"M{n(x + i)} {n(y + j)}h3v3h-3z" for j in (-4.5, 1.5) for i in (-4.5, 1.5))
            return f'<path class="sc-f-dilated" d="{dots}"/>'
        case "dynamic":  # a kernel within the map that makes it
            inner = f'<rect class="sc-f-dynamic" x="{n(x - 2)}" y="{n(y - 2)}" width="4" height="4"/>'
            return f'<rect class="sc-o-dynamic" x="{n(x - 4.5)}" y="{n(y - 4.5)}" width="9" height="9" rx="1"/>' + inner
        case "pool":
            return f'<path class="sc-f-pool" d="M{n(x - 5)} {n(y - 4)}h10l-5 8.5z"/>'
        case "skip":
            return f'<path class="sc-o-skip" d="M{n(x - 5)} {n(y)}h9m-3.5 -3.5l3.5 3.5l-3.5 3.5"/>'
        case "attention":
            return f'<path class="sc-f-attention" d="M{n(x)} {n(y - 5.5)}l5.5 5.5l-5.5 5.5l-5.5 -5.5z"/>'
        case "other":
            return f'<circle class="sc-o-other" cx="{n(x)}" cy="{n(y)}" r="4"/>'
        case "none":
            return f'<path class="sc-o-none" d="M{n(x - 4)} {n(y - 4)}l8 8m0 -8l-8 8"/>'
