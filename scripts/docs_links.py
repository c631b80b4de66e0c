"""Hooks of mkdocs: every paper's page is in the menu, and links to files that are no pages become plain text.

On the page of a repository such links work; a site has no such files. tests/docs sees that they lead somewhere.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s]+)(#[^)]*)?\)")


def on_config(config: Any, **_: Any) -> Any:
    """Puts the pages of `docs/papers` under Papers, so that a new paper brings one page and nothing else."""
    pages = sorted(f"papers/{page.name}" for page in (Path(config.docs_dir) / "papers").glob("*.md"))
    config.nav = [{"Papers": pages} if "Papers" in entry else entry for entry in config.nav]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Keeps links to pages and to the web."""
    folder = posixpath.dirname(page.file.src_uri)

    def plain(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        if "://" in target:
            return found[0]
        place = posixpath.normpath(posixpath.join(folder, target))
        return text if place.startswith("..") else found[0]

    return LINK.sub(plain, markdown)
