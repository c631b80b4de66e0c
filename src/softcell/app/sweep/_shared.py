"""The process in which the jobs of a sweep share a GPU.

Two processes on one GPU wait for each other; runs in one process overlap (`softcell.engine.interleave`), and each gives
the same result as it would alone. With more jobs than GPUs, a sweep therefore starts one process per GPU
(`SharedProcess`). It runs `main`, which reads requests from its standard input and answers with the exit code of each
job, one line of JSON each.
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
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from softcell.app.baseline import networks_to_train, random_folder
from softcell.app.jobs import draw_search, draw_training, has_run
from softcell.app.process import exit_code_of, explain_failure, write_error
from softcell.app.report.page import REPORT, write_report
from softcell.app.sweep.plan import ERROR, LOG, Job, is_finished
from softcell.engine import resolve_device
from softcell.engine.capture import MAX_SHARING_RUNS
from softcell.engine.interleave import Interleaved, Running
from softcell.engine.lock import locked
from softcell.engine.session import Interrupt
from softcell.engine.task import Event, Note
from softcell.errors import UserError
from softcell.evaluate.train import train_steps
from softcell.recipes import search_recipe
from softcell.search.run import search_steps


def process_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run that hold for a whole process: runs that share one must agree on them."""
    return {key: settings.get(key) for key in ("deterministic", "threads", "plugins")}


def runs_on_gpu(settings: Mapping[str, Any]) -> bool:
    """Whether a run uses the GPU of its process, if there is one."""
    return settings.get("device", "auto") in ("auto", "cuda")


def trains_shared(job: Job) -> bool:
    """Whether the training runs of a job may share a process with other jobs.

    A time limit prevents it: beside others, a run would make fewer steps in its time than alone.
    """
    if job.train is None or job.train.get("time") or not runs_on_gpu(job.train):
        return False
    given = {"plugins": job.search.get("plugins"), **job.train}  # a training run loads those of its search
    return process_settings(given) == process_settings(job.search)


class SharedProcess:
    """A process that runs several jobs on one GPU; it starts with the first job."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self._environment, self._log = {**os.environ, **environment}, log
        self._process: subprocess.Popen[bytes] | None = None
        self._codes: dict[str, int] = {}
        self._asked = 0

    def submit(self, job: Job) -> None:
        if self._process is not None and self._asked:
            self._process.wait()  # it is about to end
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process is not None and self._process.stdin is not None
        # The code of an earlier attempt.
        self._codes.pop(str(job.folder), None)
        request = {"folder": str(job.folder), "random": job.random, "trains": trains_shared(job)}
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            # It died after `poll`: `code_of` reports that, and the job is retried in a separate process.
            self._process.wait()
            with suppress(BrokenPipeError):  # what was not sent is still in its buffer
                self._process.stdin.close()

    def _start(self) -> None:
        reading, writing = os.pipe()
        self._asked = 0
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from softcell.app.sweep._shared import main; main({writing})"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,  # Ctrl-C in a terminal reaches it through `stop` and only once
                pass_fds=(writing,),
            )
        # Only the child may hold this end, or `_listen` would never see that the child has ended.
        os.close(writing)
        threading.Thread(target=self._listen, args=(reading,), daemon=True).start()

    def _listen(self, reading: int) -> None:
        with os.fdopen(reading) as answers:
            for line in answers:
                folder, code = json.loads(line)
                self._codes[folder] = code

    def code_of(self, folder: Path) -> int | None:
        """The exit code of the job in `folder`; None while it runs; that of the process if it ended before the job."""
        process = self._process
        is_gone = process is None or process.poll() is not None  # before the codes are read: it may end in between
        if str(folder) in self._codes or not is_gone:
            return self._codes.get(str(folder))
        code = 1 if process is None else process.returncode
        return exit_code_of(code) or 1

    def stop(self, now: bool) -> None:
        """Asks all runs to save and end; with `now`, kills the process."""
        if self._process is not None and self._process.poll() is None and (now or not self._asked):
            self._asked += 1
            self._process.send_signal(signal.SIGKILL if now else signal.SIGTERM)

    def close(self) -> None:
        """No job will follow: runs that are still going save, and the process ends."""
        if self._process is not None and self._process.stdin is not None:
            self.stop(now=False)
            self._process.stdin.close()
            self._process.wait()


def _steps_of(folder: Path, random: int, trains: bool) -> Running[int]:
    """The job in `folder`, started or resumed: a run that returns the exit code of its first run with one, else 0.

    random: how many random architectures are trained, too. trains: whether its training runs belong to it.
    """
    with locked(folder):  # the lock of the job, which `Work` holds for jobs in separate processes
        code = 0 if is_finished(folder / "search") else (yield from _search_steps_of(folder))
        if code or not trains:
            return code
        return (yield from _train_steps_of(folder, random))


def _search_steps_of(folder: Path) -> Running[int]:
    search = folder / "search"
    begun = has_run(search)
    _begin(folder, "search", begun)
    recipe = search_recipe({}, resume_from=search) if begun else search_recipe({}, config=f"{search}.json")
    result = yield from search_steps(recipe, search, resume=begun, on_event=partial(_note, folder))
    if result.genotype is not None:
        draw_search(result, again=True)
    return result.exit_code


def _train_steps_of(folder: Path, random: int) -> Running[int]:
    """The training of the found network, then of the random ones, as by `softcell train --random`."""
    search, train = folder / "search", folder / "train"
    begun = has_run(train)
    source, config = (None, None) if begun else (search, f"{train}.json")
    found, others, recipe = networks_to_train(source, {}, config, train if begun else None, random)
    for number, genotype in enumerate((found, *others)):
        run_folder = random_folder(train, number) if number else train
        if is_finished(run_folder):
            continue
        begun = has_run(run_folder)
        _begin(folder, f"train {run_folder.relative_to(folder)}", begun)
        result = yield from train_steps(genotype, recipe, run_folder, resume=begun, on_event=partial(_note, folder))
        if result.exit_code:
            return result.exit_code
        draw_training(result, again=True)
    if others:
        write_report([train], train / REPORT)  # now with the random architectures
    return 0


def _begin(folder: Path, command: str, begun: bool) -> None:
    _log(folder, f"$ softcell {command} ({'resumed' if begun else 'new'}, in one process with other jobs)")


def _note(folder: Path, event: Event) -> None:
    if isinstance(event, Note):
        _log(folder, f"note: {event.text}")


def _log(folder: Path, text: str) -> None:
    with open(folder / LOG, "a", encoding="utf-8") as log:
        log.write(f"{text}\n")


def serve(requests: int, answers: IO[str]) -> None:
    """Run the jobs that arrive on the descriptor `requests`, until it is closed and all have ended."""
    runs: Interleaved[Path] = Interleaved(resolve_device("auto"))
    waiting, text, is_open = list[dict[str, Any]](), b"", True
    with Interrupt() as interrupt:
        while is_open or waiting or len(runs):
            is_busy = bool(waiting or len(runs))
            # A handled signal does not end `select`, so an idle process looks for one twice per second.
            if is_open and select.select([requests], [], [], 0.0 if is_busy else 0.5)[0]:
                read = os.read(requests, 65536)
                is_open = bool(read)
                *lines, text = (text + read).split(b"\n")
                waiting += [json.loads(line) for line in lines]
            while waiting and len(runs) < MAX_SHARING_RUNS:
                job = waiting.pop(0)
                folder = Path(job["folder"])
                runs.add(folder, partial(_steps_of, folder, job["random"], job["trains"]))
            for folder, result in runs.turn():
                code = result
                if isinstance(result, Exception):
                    reason = str(result) if isinstance(result, UserError) else explain_failure(result)
                    code = 1 if reason is None else 2
                    log = "".join(traceback.format_exception(result)) if reason is None else f"error: {reason}"
                    with suppress(UserError, OSError):  # a full disk must not end the other jobs
                        _log(folder, f"{log}\nended with exit code {code}")
                        write_error(folder / ERROR, reason or f"{type(result).__name__}: {result}")
                print(json.dumps([str(folder), code]), file=answers, flush=True)
            if interrupt.signal and not len(runs):
                return


def main(answers: int) -> None:
    """The program of a shared process: requests on standard input, answers on the descriptor `answers`."""
    with os.fdopen(answers, "w") as stream:
        serve(sys.stdin.fileno(), stream)
