"""The documentation is run: Python blocks are executed, command lines must exist, links must lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (f"{page.relative_to(ROOT)}:{number}", text)
        for page in PAGES
        for number, (kind, text) in enumerate(FENCE.findall(page.read_text(encoding="utf-8")))
        if kind == language
    ]


@pytest.mark.parametrize(
    ("where", "code"),
    [block for block in blocks("python") if not block[0].startswith("docs/tutorials/")],  # those run as whole pages
    ids=lambda value: value if ".md" in value else "",
)
def test_python_block_runs(where: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, where, "exec"), {"__name__": "documentation"})


def command_lines() -> list[tuple[str, str]]:
    lines = []
    for where, text in blocks("console"):
        joined = text.replace("\\\n", " ")
        lines += [(where, line[2:].split("#")[0].strip()) for line in joined.splitlines() if line.startswith("$ ")]
    return [(where, line) for where, line in lines if "softcell" in line]


@pytest.mark.parametrize(("where", "line"), command_lines())
def test_command_line_names_existing_options(where: str, line: str) -> None:
    """Every command in the docs exists, and has the options that are shown."""
    import typer

    from softcell.cli.main import app

    words = shlex.split(line)
    arguments = words[words.index("softcell") + 1 :]
    group = typer.main.get_command(app)
    if not arguments:
        return
    command = group.commands.get(arguments[0])
    assert command is not None, f"{where}: no command {arguments[0]!r}"
    # The parser itself: options, their values and what must be given.
    command.make_context(arguments[0], [*arguments[1:]], resilient_parsing="--help" in arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
