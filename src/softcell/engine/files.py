"""Atomic writes: a reader, or a crash, finds the old content or the new one, never a part of it."""

import os
from pathlib import Path

from softcell.errors import UserError

TEMPORARY = ".tmp"
FILE_LIST = "softcell-files.txt"
"""In a run folder: the names of the files that Softcell wrote there, one per line. Only these are ever deleted."""
HEADING = "# Files that Softcell made in this folder. --overwrite deletes these and no others."


def fsync_folder(folder: Path) -> None:
    """Make the renames done in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_temporary(path: Path, data: bytes) -> Path:
    """Write `data` to a temporary file beside `path`, flush it to disk and return its path; the caller renames it.

    The name is fixed, so the file of a killed run is overwritten. Only one process at a time may write a given path.
    """
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    try:
        list_file(path)
        # Never through a link: a run folder may come from an untrusted source.
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(
            f"{path} must be writable, but writing {len(data)} bytes failed: {error.strerror or error}; the previous "
            f"content is untouched. Free some space or choose another folder, then resume."
        ) from error
    return temporary


def list_file(path: Path) -> None:
    """Add a file to the list of its run folder before it is written; does nothing in a folder without a list.

    A line is appended, so several processes may do this at the same time.
    """
    known = listed_files(path.parent)
    if not known or path.name in known:
        return
    with open(path.with_name(FILE_LIST), "ab") as stream:
        stream.write(f"{path.name}\n".encode())
        stream.flush()
        os.fsync(stream.fileno())


def listed_files(folder: Path) -> set[str]:
    """The names in the list of a run folder; empty if there is no list."""
    try:
        lines = (folder / FILE_LIST).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    return {line for line in lines[1:] if line} if lines[:1] == [HEADING] else set()


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Replace the file at `path` by `data` in one step."""
    path = Path(path)
    os.replace(write_temporary(path, data), path)
    fsync_folder(path.parent)


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """Replace the file at `path` by `text`, in UTF-8 and with the newlines as given, in one step."""
    atomic_write_bytes(path, text.encode("utf-8"))
