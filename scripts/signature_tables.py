"""Write the signature tables in docs/extend.md from the code.

python scripts/signature_tables.py
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from softcell.methods import Method
from softcell.spaces import Space

PAGE = Path(__file__).parents[1] / "docs" / "extend.md"
CLASSES = (Space, Method)


def table(cls: type) -> str:
    """Markdown rows for the public methods and properties of a class, abstract ones first."""
    members = [(name, member) for name, member in vars(cls).items() if not name.startswith("_")]
    shown = [(name, member) for name, member in members if _is_callable(member) or isinstance(member, property)]
    shown.sort(key=lambda item: not _is_abstract(item[1]))  # stable: otherwise in the order of the code
    rows = [
        f"| `{_signature(name, member)}` | {'required' if _is_abstract(member) else 'optional'} | {_summary(member)} |"
        for name, member in shown
    ]
    return "\n".join([f"| `{cls.__name__}` | | |", "|---|---|---|", *rows])


def _is_callable(member: Any) -> bool:
    return inspect.isfunction(member) or isinstance(member, classmethod | staticmethod)


def _is_abstract(member: Any) -> bool:
    return bool(getattr(member, "__isabstractmethod__", False))


def _signature(name: str, member: Any) -> str:
    if isinstance(member, property):
        return f"{name}: {member.fget.__annotations__['return']}"
    function = member if inspect.isfunction(member) else member.__func__
    text = str(inspect.signature(function)).replace("'", "")
    text = re.sub(r"\((self|cls)(, )?", "(", text, count=1)
    return (name + text).replace("|", "\\|")


def _summary(member: Any) -> str:
    """The first paragraph of the docstring, or an empty string."""
    function = member.fget if isinstance(member, property) else member
    text = inspect.cleandoc(getattr(function, "__doc__", None) or "").partition("\n\n")[0]
    return text.replace("\n", " ").replace("|", "\\|")


def written(page: str) -> str:
    """The page with the table between each pair of markers regenerated."""
    for cls in CLASSES:
        begin, end = (f"<!-- {word} of {cls.__name__} -->" for word in ("signatures", "end"))
        before, found, rest = page.partition(begin)
        if found:
            page = f"{before}{begin}\n\n{table(cls)}\n\n{end}{rest.partition(end)[2]}"
    return page


def main() -> None:
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
