"""A job as processes: what runs on the machine that a launcher chose, be it this one or a node of a cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path

from softcell.app.sweep.plan import finished
from softcell.engine.lock import LOCK, announce, holder, open_lock, take
from softcell.engine.runfolder import MANIFEST

LOG = "log.txt"
BUSY = 75  # as sysexits.h has it: try again later


def commands(folder: Path, random: int) -> list[list[str]]:
    """The command lines that are still to be run for a job in `folder`, without the program.

    A run that has begun is gone on with; a finished one is left alone.
    """
    result = []
    search, train = folder / "search", folder / "train"
    if not finished(search):
        begun = (search / MANIFEST).is_file()
        start = ["--resume", str(search)] if begun else ["--config", f"{search}.json", "--out", str(search)]
        result.append(["search", *start, "--quiet"])
    if Path(f"{train}.json").is_file():
        beside = [train / f"random-{k}" for k in range(1, random + 1)]
        if not all(finished(run) for run in (train, *beside)):
            begun = (train / MANIFEST).is_file()
            new = [str(search), "--config", f"{train}.json", "--out", str(train)]
            more = ["--random", str(random)] if random else []
            result.append(["train", *(["--resume", str(train)] if begun else new), *more, "--quiet"])
    return result


class Work:
    """Runs a job's commands one after the other; `stop`, from any thread, lets the present one save and end."""

    def __init__(self, folder: str | Path, random: int, environment: Mapping[str, str] | None = None) -> None:
        self._folder, self._random = Path(folder), random
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._lock = threading.Lock()

    def run(self) -> int:
        """The exit code of the first command that fails, else 0; everything said goes to the job's log."""
        with open(self._folder / LOG, "ab") as log, open(open_lock(self._folder / LOCK), "r+b") as lock:
            if not take(lock.fileno(), self._folder / LOCK):
                who = holder(self._folder / LOCK)
                log.write(f"error: this job is in use by {who}; wait until it has ended, or stop it\n".encode())
                return BUSY
            try:
                for words in commands(self._folder, self._random):
                    log.write(f"$ softcell {' '.join(words)}\n".encode())
                    log.flush()
                    code = self._run([sys.executable, "-m", "softcell", *words], log.fileno(), lock.fileno())
                    if code:
                        log.write(f"ended with exit code {code}\n".encode())
                        return code
            except KeyboardInterrupt:  # a cluster cancels a task this way
                self.stop()
                return 130
            except Exception:
                log.write(traceback.format_exc().encode())
                return 1
        return 0

    def _run(self, words: list[str], log: int, lock: int) -> int:
        with self._lock:
            if self._stopped:
                return 130
            # In a session of its own, so that Ctrl-C in a terminal reaches it through `stop` and only once.
            # It holds the lock itself: it may outlive a sweep that is killed, and its folder must stay its own.
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
                pass_fds=(lock,),
            )
            announce(lock, self._process.pid)
        try:
            code = self._process.wait()
        except KeyboardInterrupt:
            self.stop()
            code = self._process.wait()
        return 128 - code if code < 0 else code

    def stop(self, now: bool = False) -> None:
        """Asks the present command to save and end; `now` does not ask."""
        with self._lock:
            self._stopped = True
            if self._process is not None and self._process.poll() is None:
                self._process.send_signal(signal.SIGKILL if now else signal.SIGTERM)


def run_job(folder: str, random: int, environment: Mapping[str, str] | None = None) -> int:
    """What a cluster's worker calls."""
    return Work(folder, random, environment).run()


def last_error(folder: Path) -> str:
    """The last line of a job's log that says what went wrong."""
    try:
        with open(folder / LOG, "rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - 20_000))
            lines = [line.strip() for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
    except OSError:
        return "no log was written"
    begun = max((i for i, line in enumerate(lines) if line.startswith("$ softcell")), default=-1)
    said = lines[begun + 1 :]  # by the last command alone
    told = [line for line in said if line.startswith("error:")]
    return told[-1] if told else "; ".join(said[-2:]) or "nothing was said"
