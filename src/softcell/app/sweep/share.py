"""Several searches of a sweep in one process per GPU: they take turns step by step, as the seeds of `--seeds` do.

Two processes on one GPU wait for each other; runs in one process overlap (`softcell.engine.interleave`), and each gives
what it gives alone. A sweep starts one such process per GPU (`SharedProcess`). It runs `main`: it reads
folders of jobs from its standard input and answers with the exit code of each search, one line of JSON each.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO

from softcell.app.jobs import draw_search
from softcell.app.process import explain_failure
from softcell.engine import resolve_device
from softcell.engine.capture import MAX_SHARING_RUNS
from softcell.engine.interleave import Interleaved, Running
from softcell.engine.lock import locked
from softcell.engine.runfolder import MANIFEST
from softcell.engine.session import Interrupt
from softcell.engine.task import Event, Note
from softcell.errors import UserError
from softcell.recipes import search_recipe
from softcell.search.run import search_steps

LOG = "log.txt"


class SharedProcess:
    """A process that searches for several jobs on one GPU; it starts with the first job."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self._environment, self._log = {**os.environ, **environment}, log
        self._process: subprocess.Popen[bytes] | None = None
        self._codes: dict[str, int] = {}
        self._asked = 0

    def submit(self, folder: Path) -> None:
        if self._process is not None and self._asked:
            self._process.wait()  # it is about to end
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        self._codes.pop(str(folder), None)
        self._process.stdin.write(json.dumps(str(folder)).encode() + b"\n")
        self._process.stdin.flush()

    def _start(self) -> None:
        reading, writing = os.pipe()
        self._asked = 0
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from softcell.app.sweep.share import main; main({writing})"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,  # Ctrl-C in a terminal reaches it through `stop` and only once
                pass_fds=(writing,),
            )
        os.close(writing)
        threading.Thread(target=self._listen, args=(reading,), daemon=True).start()

    def _listen(self, reading: int) -> None:
        with os.fdopen(reading) as answers:
            for line in answers:
                folder, code = json.loads(line)
                self._codes[folder] = code

    def code_of(self, folder: Path) -> int | None:
        """The exit code of the search in `folder`; None while it runs; 1 if the process died before it ended."""
        process = self._process
        is_gone = process is None or process.poll() is not None  # before the codes are read: it may end in between
        return self._codes.get(str(folder), 1 if is_gone else None)

    def stop(self, now: bool) -> None:
        """Asks all searches to save and end; with `now`, kills the process."""
        if self._process is not None and self._process.poll() is None and (now or not self._asked):
            self._asked += 1
            self._process.send_signal(signal.SIGKILL if now else signal.SIGTERM)

    def close(self) -> None:
        """No job will follow: searches that still run save, and the process ends."""
        if self._process is not None and self._process.stdin is not None:
            self.stop(now=False)
            self._process.stdin.close()
            self._process.wait()


def _search_steps_of(folder: Path) -> Running[int]:
    """The search of the job in `folder`, started or resumed: a run that returns its exit code."""

    def note(event: Event) -> None:
        if isinstance(event, Note):
            _log(folder, f"note: {event.text}")

    search = folder / "search"
    begun = (search / MANIFEST).is_file()
    with locked(folder):
        _log(folder, f"$ softcell search ({'resumed' if begun else 'new'}, in one process with other jobs)")
        recipe = search_recipe({}, resume_from=search) if begun else search_recipe({}, config=f"{search}.json")
        result = yield from search_steps(recipe, search, resume=begun, on_event=note)
        if result.genotype is not None:
            draw_search(result, again=True)
        return result.exit_code


def _log(folder: Path, text: str) -> None:
    with open(folder / LOG, "a", encoding="utf-8") as log:
        log.write(f"{text}\n")


def serve(requests: int, answers: IO[str]) -> None:
    """Search for the jobs whose folders arrive on the descriptor `requests`, until it is closed and all have ended."""
    runs: Interleaved[Path] = Interleaved(resolve_device("auto"))
    waiting, text, is_open = list[Path](), b"", True
    with Interrupt() as interrupt:
        while is_open or waiting or len(runs):
            is_busy = bool(waiting or len(runs))
            if is_open and select.select([requests], [], [], 0.0 if is_busy else 0.5)[0]:
                read = os.read(requests, 65536)
                is_open = bool(read)
                *lines, text = (text + read).split(b"\n")
                waiting += [Path(json.loads(line)) for line in lines]
            while waiting and len(runs) < MAX_SHARING_RUNS:
                folder = waiting.pop(0)
                runs.add(folder, partial(_search_steps_of, folder))
            for folder, result in runs.turn():
                code = result
                if isinstance(result, Exception):
                    reason = str(result) if isinstance(result, UserError) else explain_failure(result)
                    code = 1 if reason is None else 2
                    _log(folder, "".join(traceback.format_exception(result)) if reason is None else f"error: {reason}")
                    _log(folder, f"ended with exit code {code}")
                print(json.dumps([str(folder), code]), file=answers, flush=True)
            if interrupt.signal and not len(runs):
                return


def main(answers: int) -> None:
    """The program of a shared process: requests on standard input, answers on the descriptor `answers`."""
    with os.fdopen(answers, "w") as stream:
        serve(sys.stdin.fileno(), stream)
