"""What an argument that names an architecture may be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softcell.errors import UserError

if TYPE_CHECKING:
    from softcell.arch import Genotype


def from_stdin(text: str | None) -> str | None:
    """The argument itself, or what standard input holds where it is `-`."""
    if text != "-":
        return text
    content = sys.stdin.read()
    if not content.strip():
        raise UserError("an architecture was expected on standard input, but it is empty")
    from softcell.arch import notation

    notation.parse(content)  # so that text which is no notation is not taken for a path
    return content


def genotype(text: str) -> Genotype:
    from softcell.sources import read_genotype

    content = from_stdin(text)
    assert content is not None
    return read_genotype(content)


def with_run(text: str) -> tuple[Path | None, dict[str, Any] | None, Genotype]:
    """The architecture that an argument names and, where it is that of a run, its folder and manifest.

    The run's plugins are loaded first: its space may be one of theirs.
    """
    from softcell.engine import RunFolder
    from softcell.registry import load_plugin
    from softcell.sources import run_of

    folder = run_of(text)
    manifest = None if folder is None else RunFolder.open(folder).manifest
    for plugin in () if manifest is None else manifest["recipe"].get("plugins", ()):
        load_plugin(plugin)
    return folder, manifest, genotype(text)
