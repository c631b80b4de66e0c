"""A griffe extension that converts Softcell's docstrings to the format that mkdocstrings renders.

`Example:` becomes griffe's section `Examples:`, and lines such as `epochs: how many`, which explain a parameter or a
field, become a list.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

EXPLAINED = re.compile(r"^(?P<names>\*{0,2}\w+(?:, \*{0,2}\w+)*): (?=\S)")


def rendered(text: str, names: set[str]) -> str:
    """A docstring in Google style and Markdown. names: the parameters or fields that it may explain."""
    lines: list[str] = []
    listed = False
    for line in text.splitlines():
        found = EXPLAINED.match(line)
        if found and {name.strip("* ") for name in found["names"].split(",")} <= names:
            if not listed:
                lines.append("")
            explained = ", ".join(f"`{name.strip()}`" for name in found["names"].split(","))
            lines.append(f"- {explained}: {line[found.end() :]}")
            listed = True
        else:
            listed = listed and line.startswith(" ")
            lines.append("Examples:" if line == "Example:" else line)
    return "\n".join(lines)


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        if isinstance(obj, griffe.Function):
            names = {parameter.name for parameter in obj.parameters}
        else:
            names = set(obj.members)
        obj.docstring.value = rendered(obj.docstring.value, names)
