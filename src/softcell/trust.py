"""Which files may run code: those that the user named or trusted, by path and content.

Recipes, run folders and sweeps may name Python files (plugins) and exported programs, and loading either of them runs
code. Such a folder may come from anyone, so a file runs only if it is trusted:

- it was named on the command line (`--plugin`) or in a Python call;
- the user trusted it with `--trust`, `trust=True` or at the prompt;
- or the same content at the same path was trusted before. Trusted files are kept in a small JSON file below
  `$SOFTCELL_STATE`, else `$XDG_STATE_HOME/softcell`, else `~/.local/state/softcell`.

What a file says about itself is ignored. A sweep passes its trusted files to its jobs through the environment.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from softcell.errors import UserError

STATE = "SOFTCELL_STATE"
PASSED_ON = "SOFTCELL_TRUSTED"
"""Environment variable: digests, separated by commas, of the files that the parent process trusts."""
FORMAT, VERSION = "softcell-trust", 1
MAX_VERSIONS = 50
"""Contents of one path that are remembered: a plugin under development changes often."""
Kind = Literal["plugin", "program"]
Ask = Callable[[str], bool]
"""Asks the user a question; True for yes."""
_WORDS: dict[Kind, str] = {
    "plugin": "a Python file that would be run",
    "program": "an exported program, which may hold code that runs while it is read",
}


class UntrustedError(UserError):
    """A file would run code and is not trusted."""


@dataclass(frozen=True, slots=True)
class Content:
    """A file, read once: the bytes that were checked are the bytes that run."""

    path: Path
    data: bytes
    digest: str


@dataclass(slots=True)
class _Scope:
    """Kinds of files that are trusted in advance, how to ask, and how to report what was trusted."""

    kinds: set[Kind] = field(default_factory=set)
    ask: Ask | None = None
    notify: Callable[[str], None] | None = None


_scope: ContextVar[_Scope | None] = ContextVar("softcell_trust", default=None)
_agreed: set[tuple[str, str]] = set()


@contextmanager
def asking(ask: Ask | None = None, notify: Callable[[str], None] | None = None) -> Iterator[None]:
    """A context in which `allow` may be called; what it allows ends with it. ask: None where there is no user."""
    token = _scope.set(_Scope(set(), ask, notify))
    try:
        yield
    finally:
        _scope.reset(token)


def allow(*kinds: Kind) -> None:
    """Trusts all files of these kinds (default: all) in the current context."""
    scope = _scope.get()
    assert scope is not None, "`allow` must be called inside `asking` or `trusting`"
    scope.kinds |= set(kinds or ("plugin", "program"))


@contextmanager
def trusting(agreed: bool = True) -> Iterator[None]:
    """Within this context all files that would run code are trusted; with False nothing changes.

    Example:
        >>> with trusting():
        ...     pass  # load a run folder whose plugins you have read
    """
    before = _scope.get() or _Scope()
    kinds: set[Kind] = {"plugin", "program"} if agreed else before.kinds
    token = _scope.set(_Scope(set(kinds), before.ask, before.notify))
    try:
        yield
    finally:
        _scope.reset(token)


def trust(path: str | Path) -> Content:
    """Trusts a plugin that the user named, now and later; returns its content."""
    content = read(path, "plugin")
    if not _is_known(content):
        _agree(content)
    return content


def trusted(path: str | Path, asked_by: str, kind: Kind = "plugin") -> Content:
    """The content of a trusted file; raises `UntrustedError` for any other. asked_by: what names the file."""
    content, scope = read(path, kind), _scope.get() or _Scope()
    if _is_known(content):
        return content
    changed = content.path in (Path(known) for known in _remembered())
    what = (
        f"{asked_by} names {content.path}, {_WORDS[kind]} (sha256 {content.digest[:12]}…). "
        f"{'It has changed since it was trusted here' if changed else 'It was not trusted here before'}"
    )
    if kind in scope.kinds:
        _agree(content)
        if scope.notify is not None:
            scope.notify(f"trusted {content.path} (sha256 {content.digest[:12]}…), remembered in {store()}")
        return content
    if scope.ask is not None and scope.ask(f"{what}. Trust it?"):
        _agree(content)
        return content
    name_it = f", or name it with --plugin {shlex.quote(str(content.path))}" if kind == "plugin" else ""
    raise UntrustedError(
        f"{what}. Read it, then repeat the command with --trust{name_it} (in Python: trust=True); a recipe cannot "
        "trust files itself"
    )


def is_trusted(path: str | Path, kind: Kind = "plugin") -> bool:
    """Whether a file would run without a question; False for one that cannot be read."""
    try:
        content = read(path, kind)
    except UserError:
        return False
    return _is_known(content) or kind in (_scope.get() or _Scope()).kinds


def digests(paths: Iterable[str | Path]) -> str:
    """The value of `PASSED_ON` for child processes: what this process was given, and the contents of `paths`."""
    given = [word for word in os.environ.get(PASSED_ON, "").split(",") if word]
    # The kind `program` accepts any file, a plugin too.
    return ",".join(dict.fromkeys([*given, *(read(path, "program").digest for path in paths)]))


def read(path: str | Path, kind: Kind = "plugin") -> Content:
    """The whole file at `path`."""
    file = Path(path).resolve()
    if not file.is_file() or (kind == "plugin" and file.suffix != ".py"):
        rule = "--plugin must name a Python file" if kind == "plugin" else "an exported program must be a file"
        raise UserError(f"{rule}, but {path} is not one")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}") from error
    return Content(file, data, hashlib.sha256(data).hexdigest())


def store() -> Path:
    """The file that lists trusted files."""
    own = os.environ.get(STATE)
    if own:
        # A relative path would let the working directory decide what is trusted.
        if not Path(own).is_absolute():
            raise UserError(f"{STATE} must be an absolute path, got {own!r}")
        return Path(own) / "trust.json"
    base = Path(os.environ.get("XDG_STATE_HOME") or "")
    if not base.is_absolute():  # as the XDG rules say
        base = Path.home() / ".local" / "state"
    return base / "softcell" / "trust.json"


def _is_known(content: Content) -> bool:
    if (str(content.path), content.digest) in _agreed:
        return True
    if content.digest in os.environ.get(PASSED_ON, "").split(","):
        return True
    return content.digest in _remembered().get(str(content.path), ())


def _agree(content: Content) -> None:
    _agreed.add((str(content.path), content.digest))
    file = store()
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Ranks of torchrun and jobs of a sweep may write at the same time.
        with open(file.with_name(".trust.lock"), "ab") as lock:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            known = _remembered()
            others = [digest for digest in known.get(str(content.path), ()) if digest != content.digest]
            known[str(content.path)] = [*others, content.digest][-MAX_VERSIONS:]
            text = json.dumps({"format": FORMAT, "version": VERSION, "files": known}, indent=2) + "\n"
            temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
            try:
                # Anyone who can write this file can have code run, so only its owner may.
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
                with open(descriptor, "w", encoding="utf-8") as stream:
                    stream.write(text)
                    stream.flush()
                    os.fsync(stream.fileno())
                os.replace(temporary, file)
            finally:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        warnings.warn(
            f"{content.path} is trusted for this process only: {file} cannot be written ({error.strerror or error})",
            stacklevel=2,
        )


def _remembered() -> dict[str, list[str]]:
    """Digests by path; empty where the file is damaged."""
    file = store()
    try:
        data: Any = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, RecursionError) as error:
        warnings.warn(f"{file} cannot be read ({error}); the files it lists are not trusted", stacklevel=2)
        return {}
    files = data.get("files") if isinstance(data, dict) and data.get("format") == FORMAT else None
    if not isinstance(files, dict):
        return {}
    return {
        path: [digest for digest in known if isinstance(digest, str)]
        for path, known in files.items()
        if isinstance(known, list)
    }
