"""mkdocs hooks: navigation, notebooks as pages, the gallery, the API reference, links to files that are not pages."""

from __future__ import annotations

import ast
import base64
import dataclasses
import html
import inspect
import json
import posixpath
import re
import shlex
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(#[^)]*)?\)")
REFERENCE = re.compile(r"^<!-- public names of ([\w.]+) -->$", re.MULTILINE)


def by_name(page: Path) -> tuple[bool, str]:
    return page.name != "index.md", page.name


def on_config(config: Any, **_: Any) -> Any:
    """Lists the pages of `docs/papers` and `docs/api` in the navigation, so that a new page needs no other change."""
    folders = {"Papers": "papers", "API reference": "api"}
    nav = []
    for entry in config.nav:
        (title,) = entry
        if title in folders:
            pages = sorted((Path(config.docs_dir) / folders[title]).glob("*.md"), key=by_name)
            entry = {title: [f"{folders[title]}/{page.name}" for page in pages]}
        nav.append(entry)
    config.nav = nav
    return config


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Adds a page for every notebook."""
    from mkdocs.structure.files import File

    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        content = notebook_page(json.loads(Path(notebook.abs_src_path).read_text(encoding="utf-8")))
        name = Path(notebook.src_uri).name
        note = f"\n\n*This page is a notebook: [{name}]({name}).*\n"
        page = notebook.src_uri.removesuffix(".ipynb") + ".md"
        files.append(File.generated(config, page, content=content + note))
    return files


def notebook_page(notebook: dict[str, Any]) -> str:
    """The cells of a notebook and their stored outputs as Markdown."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            text = "".join(data.get("text/html", "")) or f"<pre>{html.escape(''.join(data['text/plain']))}</pre>"
            # A blank line would end the block of HTML.
            parts.append(f'<div class="output">{re.sub(chr(10) + "+", chr(10), text.strip())}</div>')
    return "\n\n".join(parts)


def commands() -> str:
    """All commands with their arguments and options, as in their help."""
    from softcell.app.cli.main import COMMANDS, load_command

    parts = []
    for name in COMMANDS:
        command = load_command(name)
        parts.append(f"## softcell {name}\n\n{cell(command.help)}")
        rows = []
        for one in command.params:
            argument = f"{one.metavar or one.name.upper()}{'' if one.nargs == 1 else '...'}"
            given = ", ".join(one.opts) if one.param_type_name == "option" else argument
            metavar = "" if one.param_type_name == "argument" or getattr(one, "is_flag", False) else one.metavar or ""
            rows.append(f"| `{given}{' ' + cell(metavar) if metavar else ''}` | {cell(one.help or '')} |")
        parts.append("\n".join(["| argument or option | meaning |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def settings() -> str:
    """All settings of recipes, spaces and methods with their defaults."""
    from softcell.evaluate import TrainRecipe
    from softcell.methods import METHODS
    from softcell.search import SearchRecipe
    from softcell.spaces import SPACES

    parts = []
    for title, kind in (("Searches", SearchRecipe), ("Training", TrainRecipe)):
        parts += [f"## {title}", described(kind), "\n".join([HEAD, *rows_of(kind)])]
    for title, registry in (("Spaces", SPACES), ("Methods", METHODS)):
        parts.append(f"## {title}\n\nSet with `--set {title.lower()[:-1]}.NAME=VALUE`.")
        for name in sorted(registry):
            kind = registry.get(name)
            rows = list(rows_of(kind if title == "Spaces" else kind.Settings, f"{title.lower()[:-1]}."))
            if rows:
                parts += [f"### {name}", "\n".join([HEAD, *rows])]
    return "\n\n".join(parts)


HEAD = "| setting | type | default |\n|---|---|---|"


def rows_of(kind: Any, prefix: str = "") -> Iterator[str]:
    """A row for every field of a dataclass; those of nested dataclasses by dotted names."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if not field.init or field.name in ("space_settings", "method_settings"):
            continue
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from rows_of(hint, f"{prefix}{field.name}.")
            continue
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        shown = "required" if default is dataclasses.MISSING else f"`{cell(json.dumps(default, default=str))}`"
        kind_name = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
        yield f"| `{prefix}{field.name}` | {cell(kind_name.replace('typing.', ''))} | {shown} |"


def described(kind: Any) -> str:
    """The docstring of a class without its example."""
    return inspect.cleandoc(kind.__doc__ or "").partition("\nExample:")[0].strip()


def cell(text: str) -> str:
    """Text for a cell of a table."""
    return " ".join(str(text).split()).replace("|", "\\|").replace("<", "&lt;")


def gallery() -> str:
    """The cells in the records of `results/`, a section for each record."""
    from softcell.app.report import to_svg  # imports torch, so only for this page
    from softcell.arch import Genotype

    parts = []
    for file in sorted((ROOT / "results").glob("*/*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        found = [(name, Genotype.from_dict(data)) for name, data in genotypes(record)]
        if not found or "digits" in file.name:
            continue
        made = f"`{shlex.join(record['command'])}`, {record['date'][:10]}"
        parts.append(f"## {file.relative_to(ROOT / 'results').with_suffix('')}\n\n{made}")
        for name, genotype in found:
            picture = base64.b64encode(to_svg(genotype, name).encode()).decode()
            parts.append(f'<img alt="{html.escape(name)}" src="data:image/svg+xml;base64,{picture}">')
    return "\n\n".join(parts)


def genotypes(record: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """All genotypes in a record, each with the method, settings and seed of its row."""
    if isinstance(record, dict):
        if record.get("format") == "softcell-genotype":
            yield ", ".join(dict.fromkeys(words)), record
            return
        keys = ("method", "variant", "kind", "level", "arm", "name", "space", "data")
        words += tuple(str(record[key]) for key in keys if isinstance(record.get(key), str))
        words += (f"weight {record['weight']}",) if isinstance(record.get("weight"), float) else ()
        words += (f"seed {record['seed']}",) if isinstance(record.get("seed"), int) else ()
    for value in record.values() if isinstance(record, dict) else record if isinstance(record, list) else ():
        yield from genotypes(value, words)


MADE = {
    "<!-- cells of the records -->": gallery,
    "<!-- all commands -->": commands,
    "<!-- all settings -->": settings,
}
"""Markers in pages, and the functions that generate their replacements when the site is built."""


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Expands the public names of a module, and turns links that lead out of the site into plain text."""
    folder = posixpath.dirname(page.file.src_uri)

    def plain(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        if "://" in target:
            return found[0]
        place = posixpath.normpath(posixpath.join(folder, target))
        if target.endswith(".ipynb") and "/" in target:  # from another page: to the page of the notebook
            return f"[{text}]({target.removesuffix('.ipynb')}.md)"
        return text if place.startswith("..") else found[0]

    linked = LINK.sub(plain, markdown)
    for mark, make in MADE.items():
        if mark in linked:
            linked = linked.replace(mark, make())
    return REFERENCE.sub(lambda found: reference(found[1]), linked)


def reference(module: str) -> str:
    """One block of mkdocstrings for every name in the `__all__` of a module."""
    homes = public_names(module)
    return "\n\n".join(f"::: {home}.{name}" for name, home in homes.items())


def public_names(module: str) -> dict[str, str]:
    """The names in `__all__` and the modules that define them, read from the source without importing it."""
    base = ROOT / "src" / Path(*module.split("."))
    file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    names: list[str] = []
    homes: dict[str, str] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            homes |= {alias.asname or alias.name: node.module for alias in node.names}
        elif isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["__all__"]:
            names = ast.literal_eval(node.value)
    return {name: homes.get(name, module) for name in names}
