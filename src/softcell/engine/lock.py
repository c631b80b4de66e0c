"""A lock that lets only one process at a time work in a folder, and names the process that holds it.

The lock is `flock` on the file `.lock` in the folder. The system releases it when the process ends, however that
happens. The file names the holder (process, machine, start time) and is removed at the end. On network file systems
`flock` works across machines if the lock service runs (NFS since Linux 2.6.12). On a file system without locks the file
alone decides: a dead process of this machine loses the lock, one of another machine cannot be checked and keeps it.

The file is padded: on a full disk the padding is freed, so that the run can still record its failure.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shlex
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softcell.engine.distributed import World, on_main
from softcell.engine.manifest import now
from softcell.errors import UserError
from softcell.files import make_folder

LOCK = ".lock"
RESERVE = 64 * 1024
"""Bytes reserved for recording a failure on a full disk; a `run.json` has some thousands."""


@dataclass(slots=True)
class _Held:
    descriptor: int
    process: int  # a forked child inherits this table, but not the lock
    thread: int
    made: list[Path]
    times: int = 1


_held: dict[str, _Held] = {}
_guard = threading.Lock()


@contextlib.contextmanager
def locked(folder: str | os.PathLike[str], world: World | None = None) -> Iterator[None]:
    """Lock `folder` within the context; if another process or thread holds it, the `UserError` names the holder.

    A missing folder is created, and removed again if it stays empty. One thread may nest these contexts. With several
    ranks the first holds the lock, and a failure is raised on all.
    """
    path, alone = Path(folder), world is None or world.size == 1
    if alone or world is None:
        _acquire(path)
    else:
        on_main(lambda: _acquire(path), world)
    try:
        yield
    finally:
        if world is None or world.is_main:
            _release(path)


def free_reserve(folder: str | os.PathLike[str]) -> None:
    """Free the space that the lock of `folder` reserves, so that a failure can be recorded on a full disk."""
    held = _held.get(os.path.realpath(folder))
    if held is not None and held.process == os.getpid():
        with contextlib.suppress(OSError):
            os.ftruncate(held.descriptor, len(_about()))


def holder(file: Path) -> str:
    """The holder of the lock `file`, as text."""
    found = _read(file)
    if found is None:
        return "another process"
    command = f" (`{found['command']}`)" if found.get("command") else ""
    # Without locks in the file system, it is impossible to check whether a process of another machine still runs.
    gone = "" if found["host"] == socket.gethostname() else f"; if that process is gone, delete {file}"
    return f"process {found['pid']} on {found['host']}, since {found['since']}{command}{gone}"


def open_lock(file: Path) -> int:
    """A descriptor of a lock file, created if missing; a link is rejected."""
    return os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)


def take(descriptor: int, file: Path) -> bool:
    """Lock an open file and write the holder into it; False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: the content of the file decides
        found = _read(file)
        if found is not None and _may_be_alive(found):
            return False
    announce(descriptor)
    return True


def announce(descriptor: int, pid: int | None = None) -> None:
    """Write the holder into an open lock file: this process, or a child that inherited the lock."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, _about(pid), 0)


def _acquire(folder: Path) -> None:
    key = os.path.realpath(folder)
    with _guard:
        held = _held.get(key)
        if held is not None and held.process == os.getpid():
            if held.thread != threading.get_ident():
                raise UserError(f"{folder} is in use by another thread of this process; wait, or use another folder")
            held.times += 1
            return
        made = _make(folder)
        try:
            _held[key] = _Held(_lock(folder), os.getpid(), threading.get_ident(), made)
        except BaseException:
            _remove(made)
            raise


def _make(folder: Path) -> list[Path]:
    """Create a folder; return the ones that did not exist before, innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        make_folder(folder, "a run")
    except UserError:
        _remove(missing)
        raise
    return missing


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        with contextlib.suppress(OSError):  # not empty any more
            folder.rmdir()


def _lock(folder: Path) -> int:
    file = folder / LOCK
    while True:
        try:
            descriptor = open_lock(file)
        except OSError as error:
            raise UserError(
                f"a run needs a writable folder, but {file} cannot be opened ({error.strerror or error}); free "
                "some space, or choose another --out"
            ) from error
        try:
            if not take(descriptor, file):
                raise UserError(
                    f"{folder} is in use by {holder(file)}; wait until it has ended, or choose another folder"
                )
            # The previous holder may have removed the file since it was opened: no other process would see this lock.
            try:
                is_current = os.path.samestat(os.fstat(descriptor), os.stat(file))
            except FileNotFoundError:
                is_current = False
            if is_current:
                # On a full disk a part may be written without an error.
                if os.pwrite(descriptor, b" " * RESERVE, len(_about())) < RESERVE:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return descriptor
        except OSError as error:
            file.unlink(missing_ok=True)
            os.close(descriptor)
            raise UserError(
                f"a run needs {RESERVE // 1024} KB to start, but cannot write them to {folder} "
                f"({error.strerror or error}); free some space, then repeat the command"
            ) from error
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _release(folder: Path) -> None:
    key = os.path.realpath(folder)
    with _guard:
        held = _held.get(key)
        if held is None or held.process != os.getpid():
            return
        held.times -= 1
        if held.times:
            return
        del _held[key]
        with contextlib.suppress(OSError):
            (folder / LOCK).unlink(missing_ok=True)  # before the release: no process may lock a removed file
        os.close(held.descriptor)
        _remove(held.made)


def _about(pid: int | None = None) -> bytes:
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv else [])[:300]
    about = {"pid": pid or os.getpid(), "host": socket.gethostname(), "since": now(), "command": command}
    return json.dumps(about).encode() + b"\n"


def _read(file: Path) -> dict[str, Any] | None:
    try:
        with open(file, "rb") as stream:
            found = json.loads(stream.read(4096).split(b"\n")[0])
    except (OSError, ValueError):
        return None  # it is just being written
    return found if isinstance(found, dict) and {"pid", "host", "since"} <= found.keys() else None


def _may_be_alive(found: dict[str, Any]) -> bool:
    if found["host"] != socket.gethostname():
        return True
    try:
        os.kill(int(found["pid"]), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, OverflowError):
        return True
    # This process does not hold the lock (`_acquire` would know), so an earlier one had the same number.
    return int(found["pid"]) != os.getpid()
