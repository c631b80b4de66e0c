"""Slow commands say that they are running, and interrupted ones how to resume."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from softcell.app import process, progress
from softcell.app.cli import main
from softcell.app.progress import PREPARING, Display, counting, working
from softcell.engine.task import Started
from tests.helpers.cli_calls import process as start
from tests.helpers.search_toys import write_data


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(terminal: bool) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=terminal, width=100), stream


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_slow_command_says_that_it_is_running_in_a_terminal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(process, "NOTICE_AFTER", 0.01)
    monkeypatch.setattr(sys, "stderr", terminal)

    def slow(self: main.LazyGroup, context: object) -> int:
        time.sleep(0.1)
        return 0

    monkeypatch.setattr(main.LazyGroup, "invoke", slow)
    assert main.run([name]) == 0
    assert terminal.getvalue() == f"softcell {name} is running; press Ctrl-C to stop it\n"


@pytest.mark.parametrize("name", main.COMMANDS)
def test_every_interrupted_command_says_how_to_resume(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real parser, which handles Ctrl-C in its own way."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    command = main.load_command(name)
    command.params.clear()  # so that no argument is required

    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "callback", interrupt)
    monkeypatch.setattr(main, "load_command", lambda _: command)
    assert main.run([name]) == 130
    assert "run the same command to resume" in stream.getvalue()


def test_ctrl_c_while_a_command_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)

    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "load_command", interrupt)
    assert main.run(["search"]) == 130
    assert "run the same command to resume" in stream.getvalue()


def test_no_notice_if_progress_is_shown_or_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "NOTICE_AFTER", 0.01)
    terminal, log = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    with process.notice_when_slow("it"), working(screen(True)[0], "busy"):
        time.sleep(0.05)
    monkeypatch.setattr(sys, "stderr", log)
    with process.notice_when_slow("it"):
        time.sleep(0.05)
    assert terminal.getvalue() == log.getvalue() == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_that_starts_slowly_says_that_it_is_preparing(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "NOTICE_AFTER", 0.01)
    console, stream = screen(terminal)
    with Display(console, "a run"):
        deadline = time.monotonic() + 10
        while PREPARING not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert PREPARING in stream.getvalue()
    monkeypatch.setattr(progress, "NOTICE_AFTER", 0.5)
    console, stream = screen(False)
    with Display(console, "a run") as display:
        display(Started(0, 0, 1))
        time.sleep(0.6)
    assert PREPARING not in stream.getvalue()
    with Display(console, "several runs") as display:
        display.beside("seed 0", "run")(Started(0, 0, 1))
        time.sleep(0.6)
    assert PREPARING not in stream.getvalue()


def test_counting_shows_a_bar_or_lines_and_nothing_when_quiet() -> None:
    for terminal, quiet, expected in ((True, False, "third"), (False, False, "measuring: 0 of 3"), (True, True, "")):
        console, stream = screen(terminal)
        with counting(console, "measuring", quiet) as step:
            for number, name in enumerate(("first", "second", "third")):
                step(number, 3, name)
        shown = stream.getvalue()
        assert (expected in shown) if expected else shown == ""


def test_work_without_steps_is_named_in_a_log_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "NOTICE_AFTER", 0.01)
    console, stream = screen(False)
    with counting(console, "exporting"):
        deadline = time.monotonic() + 10
        while not stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert stream.getvalue() == "exporting ...\n"
    console, stream = screen(False)
    with counting(console, "measuring") as step:
        step(0, 3, "first")
        time.sleep(0.05)
    assert stream.getvalue() == "measuring: 0 of 3\n"


def test_the_age_of_a_process_counts_from_its_start() -> None:
    late = "import time; time.sleep(0.3); from softcell.app import process as p; p.enter()"
    code = f"{late}; print(time.perf_counter() - p.start_time())"
    began = time.perf_counter()
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert (0.3 if sys.platform == "linux" else 0.0) <= float(shown) <= time.perf_counter() - began + 0.02


def test_ctrl_c_in_a_whole_run_prints_how_to_resume(tmp_path: Path) -> None:
    write_data(tmp_path / "data.npz", train=96)
    small = ("--max-params", "9k", "--random", "2", "--threads", "1")
    running = start("run", "--data", "data.npz", "--time", "90s", *small, "--out", "run", cwd=tmp_path)
    assert running.stdout is not None and running.stderr is not None
    for line in running.stdout:  # into the search, past its first epoch
        if line.startswith("epoch"):
            break
    running.send_signal(signal.SIGINT)
    shown = running.stdout.read()
    assert running.wait(timeout=60) == 130, running.stderr.read()
    assert "softcell run --resume run" in shown
    again = start("run", "--resume", "run", cwd=tmp_path)
    assert again.stdout is not None
    for line in again.stdout:
        if line.startswith("resuming at epoch"):
            break
    else:
        raise AssertionError("the run was not resumed where it was interrupted")
    again.kill()
    again.wait(timeout=60)


def test_ctrl_c_in_a_measurement_leaves_no_partial_files(tmp_path: Path) -> None:
    running = start("latency", "nb201", "--out", "table.yaml", cwd=tmp_path)
    assert running.stdout is not None and running.stderr is not None
    assert running.stdout.readline().startswith("measuring")
    running.send_signal(signal.SIGINT)
    assert running.wait(timeout=60) == 130
    assert "same command" in running.stderr.read()
    assert not list(tmp_path.iterdir())
