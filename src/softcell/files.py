"""Files: untrusted ones are read as bounded, plain data or raise a `UserError`; ours are written atomically.

The usual parsers raise many kinds of errors: `RecursionError` on deep nesting, `ValueError` on numbers of 5,000
digits, anything on odd YAML. What they accept may break later code: lone surrogates cannot be printed, dates cannot be
written as JSON, and YAML reads `12:30:45` as 45045 and `010` as 8. All files of settings, runs and genotypes are
therefore read here.

After an atomic write a reader, or a crash, finds the old content or the new one, never a part of it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from softcell.errors import UserError

MAX_BYTES = 64 * 2**20
"""For a file of settings, a manifest or a genotype; a manifest with a thousand classes has 100 KB."""
MAX_BYTES_OF_LINES = 2**30
"""For a `.jsonl` file, which gets a line per epoch."""
MAX_DEPTH = 64
MAX_DIGITS = 40  # far below the 4,300 from which Python itself raises a ValueError
MAX_VALUES = 2_000_000
"""In one file: a short YAML file can expand to more values than fit into memory."""


def read_text(file: str | os.PathLike[str], *, most_bytes: int = MAX_BYTES, errors: str = "strict") -> str:
    """The content of a regular file as UTF-8; `FileNotFoundError` passes through: the caller knows what to suggest.

    errors: how bytes that are not UTF-8 are decoded, as in `bytes.decode`.
    """
    file = Path(file)
    try:
        # Non-blocking: opening a pipe without a writer would wait forever.
        with open(file, "rb", opener=lambda path, flags: os.open(path, flags | getattr(os, "O_NONBLOCK", 0))) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise UserError(f"{file} must be a regular file, but is a pipe or a device; pass a file")
            content = stream.read(most_bytes + 1)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise UserError(f"{file} cannot be read ({reason})") from error
    if len(content) > most_bytes:
        raise UserError(f"{file} must have at most {most_bytes // 2**20} MiB, but is larger; is it the right file?")
    try:
        return content.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        raise UserError(f"{file} cannot be read as text: {error}") from error


def parse_json(text: str, where: str) -> Any:
    """Plain data from JSON; errors call the source `where`."""
    try:
        value = json.loads(text, parse_int=_whole)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not valid JSON (line {error.lineno}, column {error.colno}: {error.msg})") from error
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except RecursionError as error:
        raise UserError(f"{where}: nested deeper than {MAX_DEPTH} levels") from error
    _check_plain(value, where)
    return value


def read_json(file: str | os.PathLike[str]) -> Any:
    """Plain data from a JSON file; `FileNotFoundError` passes through."""
    return parse_json(read_text(file), str(file))


def read_json_lines(file: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The objects of a `.jsonl` file, one per line; any other line is a `UserError` that names it."""
    rows = []
    for number, line in enumerate(read_text(file, most_bytes=MAX_BYTES_OF_LINES).splitlines(), 1):
        row = parse_json(line, f"{file}, line {number}")
        if not isinstance(row, dict):
            raise UserError(f"{file}, line {number}: must be a JSON object, got {type(row).__name__}")
        rows.append(row)
    return rows


def parse_yaml(text: str, where: str) -> Any:
    """Plain data from YAML, where base-60 numbers, octal numbers and dates are text."""
    try:
        value = yaml.load(text, Loader=_PlainLoader)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except RecursionError as error:
        raise UserError(f"{where}: nested deeper than {MAX_DEPTH} levels") from error
    except Exception as error:  # not only YAMLError: constructors of tags raise IndexError, TypeError and others
        raise UserError(f"{where}: cannot be read as YAML ({' '.join(str(error).split())[:300]})") from error
    _check_plain(value, where)
    return value


def _whole(text: str) -> int:
    digits = len(text.lstrip("+-"))
    if digits > MAX_DIGITS:
        raise UserError(f"a whole number must have at most {MAX_DIGITS} digits, but one has {digits}")
    return int(text)


def _check_plain(value: Any, where: str) -> None:
    """Raises `UserError` unless `value` has plain values only, not too many and not nested too deeply."""
    left, seen = [(value, 0)], 0
    while left:
        item, depth = left.pop()
        seen += 1
        if depth > MAX_DEPTH:
            raise UserError(f"{where}: nested deeper than {MAX_DEPTH} levels")
        if seen > MAX_VALUES:
            raise UserError(f"{where}: must hold at most {MAX_VALUES:,} values, but has more")
        if type(item) is dict:
            for key, inner in item.items():
                if type(key) not in (str, int, float, bool, type(None)):
                    raise UserError(f"{where}: a key must be text, got {key!r:.60}")
                left += [(key, depth), (inner, depth + 1)]
        elif type(item) is list:
            left += [(inner, depth + 1) for inner in item]
        elif type(item) is str:
            if not item.isascii() and not _printable(item):
                raise UserError(f"{where}: text must be Unicode, but {ascii(item)[:60]} has half of a surrogate pair")
        elif item is not None and type(item) not in (bool, int, float):
            raise UserError(f"{where}: must hold numbers, text, lists and mappings, got a {type(item).__name__}")


def _printable(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


class _PlainLoader(yaml.SafeLoader):
    """YAML 1.1 without base-60 numbers, octal numbers and dates."""

    def construct_yaml_int(self, node: Any) -> int:
        if len(str(node.value)) > MAX_DIGITS:  # in any base, such a number is below 10**MAX_DIGITS
            raise UserError(f"a whole number must have at most {MAX_DIGITS} digits, but one has more")
        return super().construct_yaml_int(node)


_PlainLoader.add_constructor("tag:yaml.org,2002:int", _PlainLoader.construct_yaml_int)
_PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag.rpartition(":")[2] not in ("int", "float", "timestamp")]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int",
    re.compile(r"^(?:[-+]?0b[01_]+|[-+]?0x[0-9a-fA-F_]+|[-+]?(?:0|[1-9][0-9_]*))$"),
    list("-+0123456789"),
)
_PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^(?:[-+]?[0-9][0-9_]*\.[0-9_]*(?:[eE][-+][0-9]+)?|[-+]?\.[0-9][0-9_]*(?:[eE][-+][0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+.0123456789"),
)


class Fields(dict[str, Any]):
    """Nested fields of a file. One that is missing is a `UserError` that names it, instead of a `KeyError`."""

    where: str
    path: str

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str, path: str = "") -> Fields:
        found = cls()
        found.where, found.path = where, path
        for key, value in values.items():
            inner = f"{path}{key}."
            found[key] = cls.of(value, where, inner) if isinstance(value, Mapping) else value
        return found

    def __missing__(self, key: str) -> Any:
        raise UserError(f"{self.where} must have `{self.path}{key}`, but it is missing; the file is damaged or too old")


TEMPORARY = ".tmp"
FILE_LIST = "softcell-files.txt"
"""In a run folder: the names of the files that Softcell wrote there, one per line. Only these are ever deleted."""
HEADING = "# Files that Softcell made in this folder. --overwrite deletes these and no others."


def make_folder(folder: Path, needed_by: str) -> None:
    """Create a folder and its parents, if they are missing; `needed_by` is for the error, such as "a run"."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError(f"{needed_by} needs a folder, but {folder} is a file; choose another --out") from None
    except OSError as error:
        raise UserError(
            f"{needed_by} needs a writable folder, but {folder} cannot be created ({error.strerror or error}); choose "
            "another --out"
        ) from error


def fsync_folder(folder: Path) -> None:
    """Make the renames done in `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_temporary(path: Path, data: bytes) -> Path:
    """Write `data` to a temporary file next to `path`, flush it to disk and return its path; the caller renames it.

    The name is fixed, so the file of a killed run is overwritten. Only one process at a time may write a given path.
    """
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    try:
        # Before the write: if the process is killed in between, no unlisted file is left behind.
        list_file(path)
        # Never through a link: a run folder may come from an untrusted source.
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        temporary.unlink(missing_ok=True)
        denied = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        raise UserError(
            f"{path} must be writable, but writing {len(data)} bytes failed: {error.strerror or error}; the previous "
            f"content is untouched. {'Make it writable' if denied else 'Free some space'} or choose another folder, "
            "then resume."
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
