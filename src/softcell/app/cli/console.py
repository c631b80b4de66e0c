"""Printing results, and the files that a user asks for."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from rich.console import Console
from rich.text import Text

from softcell.engine.distributed import is_main_process
from softcell.errors import UserError
from softcell.text import percent as percent


def console() -> Console:
    """Standard output, silent on all processes but the first; no highlighting, so that numbers look alike."""
    return Console(highlight=False, soft_wrap=True, quiet=not is_main_process())


def print_fields(out: Console, **values: str) -> None:
    """Aligned lines of a name and a value."""
    for name, value in values.items():
        out.print(Text.assemble((f"{name.replace('_', '-'):<14}", "bold"), value))


def command(*words: str | Path) -> str:
    """A command line to copy."""
    return shlex.join(("softcell", *(str(word) for word in words)))


def check_absent(file: Path, overwrite: bool, way_out: str = "give another name") -> None:
    """Raises if there is a file that may not be replaced."""
    if file.exists() and not overwrite:
        raise UserError(f"{file} already exists; {way_out}, or --overwrite to replace it")


def check_output_path(file: Path, overwrite: bool) -> Path | None:
    """Raises if `file` cannot be written, before the work it takes.

    Returns the topmost folder that will be created for it, if any.
    """
    if file.is_dir():
        raise UserError(f"{file} is a folder; give the name of a file in it")
    check_absent(file, overwrite, "give another name with --out")
    missing = [parent for parent in file.parents if not parent.exists()]
    existing = missing[-1].parent if missing else file.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        reason = "is not writable" if existing.is_dir() else "is not a folder"
        raise UserError(f"{file} cannot be written because {existing} {reason}; choose another path")
    return missing[-1] if missing else None


def output_path(file: Path, created: Path | None) -> str:
    """The path of a written file for people; `created` is what `check_output_path` returned."""
    return str(file) if created is None else f"{file} (created the folder {created})"


def write(path: Path, text: str, overwrite: bool) -> None:
    """Writes a file that the user asked for; an existing one is kept unless `overwrite`."""
    check_absent(path, overwrite)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}); choose another path") from error
