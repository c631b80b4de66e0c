"""Only one process at a time works in a folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import softcell
from softcell.engine.lock import LOCK, RESERVE, free_reserve, locked
from softcell.errors import UserError

HOLD = """
import sys, time
from softcell.engine.lock import locked
try:
    with locked(sys.argv[1]):
        print("held", flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    print("released", flush=True)
"""


def holding(folder: Path) -> subprocess.Popen[str]:
    """Another process that holds the lock."""
    environment = {**os.environ, "PYTHONPATH": str(Path(softcell.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_with_the_holder_and_gets_the_lock_afterwards(tmp_path: Path) -> None:
    process = holding(tmp_path / "run")
    try:
        with pytest.raises(UserError) as caught, locked(tmp_path / "run"):
            raise AssertionError("two processes in one folder")
        text = str(caught.value)
        assert f"process {process.pid} on {socket.gethostname()}, since 2" in text and "-c" in text
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20)[0] == "released\n"
    finally:
        process.kill()
    assert not (tmp_path / "run").exists(), "it stayed empty"
    with locked(tmp_path / "run"):
        pass


def test_a_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    process = holding(tmp_path)
    process.kill()
    process.wait()
    assert (tmp_path / LOCK).exists(), "it could not clean up"
    with locked(tmp_path):
        found = json.loads((tmp_path / LOCK).read_text().splitlines()[0])
        assert found["pid"] == os.getpid()
    assert not (tmp_path / LOCK).exists()


def test_contexts_of_one_thread_nest_and_other_threads_wait_outside(tmp_path: Path) -> None:
    errors: list[str] = []

    def intrude() -> None:
        try:
            with locked(tmp_path):
                pass
        except UserError as error:
            errors.append(str(error))

    with locked(tmp_path):
        with locked(tmp_path / ".." / tmp_path.name):
            pass
        assert (tmp_path / LOCK).exists(), "the outer context still holds it"
        other = threading.Thread(target=intrude)
        other.start()
        other.join()
    assert len(errors) == 1 and "another thread" in errors[0]
    assert not (tmp_path / LOCK).exists()


def test_an_error_releases_the_lock_and_removes_created_folders(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), locked(tmp_path / "a" / "b"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "result").touch()
    assert (tmp_path / "a" / "b" / "result").exists()


def test_a_lock_file_that_was_removed_meanwhile_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The previous holder removes its file between opening and locking: nobody would see a lock on it."""
    real, times = fcntl.flock, []

    def flock(descriptor: int, how: int) -> None:
        if not times:
            (tmp_path / LOCK).unlink()
        times.append(how)
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path):
        assert len(times) == 2 and (tmp_path / LOCK).exists()


@pytest.mark.parametrize(
    ("host", "pid", "is_free"),
    [(socket.gethostname(), 2**22 + 12345, True), (socket.gethostname(), os.getppid(), False), ("elsewhere", 1, False)],
)
def test_without_locks_of_the_file_system_the_file_decides(
    host: str, pid: int, is_free: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    (tmp_path / LOCK).write_text(json.dumps({"pid": pid, "host": host, "since": "then"}) + "\n")
    if is_free:
        with locked(tmp_path):
            pass
        return
    with pytest.raises(UserError, match=f"process {pid} on {host}") as caught, locked(tmp_path):
        pass
    assert ("delete" in str(caught.value)) is (host == "elsewhere")


def test_the_lock_reserves_space_that_can_be_freed(tmp_path: Path) -> None:
    with locked(tmp_path):
        assert (tmp_path / LOCK).stat().st_size > RESERVE
        free_reserve(tmp_path)
        assert (tmp_path / LOCK).stat().st_size < 1000
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid(), "and still names the holder"


def test_a_folder_that_cannot_be_created_or_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "deep"):
        with pytest.raises(UserError, match=r"needs a (writable )?folder"), locked(place):
            pass


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="cannot be opened"), locked(tmp_path / "run"):
        pass
    assert (tmp_path / "precious").read_text() == "mine"
