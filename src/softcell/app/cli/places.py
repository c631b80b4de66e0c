"""Where a file that was asked for will lie, looked at before the work it takes."""

from __future__ import annotations

import os
from pathlib import Path

from softcell.errors import UserError


def check_absent(file: Path, overwrite: bool, way_out: str = "give another name") -> None:
    """Raises where a file is there that may not be replaced."""
    if file.exists() and not overwrite:
        raise UserError(f"{file} exists already; {way_out}, or --overwrite to replace it")


def free_place(file: Path, overwrite: bool) -> Path | None:
    """The topmost folder that will have to be made for `file`, if any; raises where it cannot be written."""
    if file.is_dir():
        raise UserError(f"{file} is a folder; give the name of a file in it")
    check_absent(file, overwrite, "give another name with --out")
    missing = [parent for parent in file.parents if not parent.exists()]
    there = missing[-1].parent if missing else file.parent
    if not there.is_dir() or not os.access(there, os.W_OK):
        reason = "may not be written to" if there.is_dir() else "is no folder"
        raise UserError(f"{file} cannot be written, since {there} {reason}; choose another place")
    return missing[-1] if missing else None


def placed(file: Path, made: Path | None) -> str:
    """Where a file lies now, for people to read; `made` is what `free_place` gave."""
    return str(file) if made is None else f"{file} (the folder {made} is new)"
