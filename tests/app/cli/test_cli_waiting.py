"""Nobody waits in the dark, and whoever stops something is told how to go on."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from softcell.app.cli import main, patience, progress
from softcell.app.cli.progress import PREPARING, Display, counting, working
from softcell.engine.task import Started
from tests.helpers.cli_calls import process
from tests.helpers.search_toys import write_data

COMMANDS = tuple(str(command.name) for command in main.app.registered_commands)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(terminal: bool) -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, force_terminal=terminal, width=100), stream


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_is_slow_says_so_in_a_terminal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(patience, "SECONDS", 0.01)
    monkeypatch.setattr(sys, "stderr", terminal)

    def slow(arguments: list[str], **_: object) -> int:
        time.sleep(0.1)
        return 0

    monkeypatch.setattr(main, "app", _Like(slow))
    assert main.run([name]) == 0
    assert terminal.getvalue() == f"softcell {name} is at work; Ctrl-C stops it\n"


@pytest.mark.parametrize("command", main.app.registered_commands, ids=lambda command: command.name)
def test_every_command_that_is_stopped_says_how_to_go_on(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the real parser, since that has ideas of its own about Ctrl-C."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)

    @main._stoppable
    def stopped() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "callback", stopped)
    assert command.callback is stopped
    assert main.run([str(command.name)]) == 130
    assert "same command" in stream.getvalue()


def test_no_command_is_left_to_the_parsers_ideas_of_ctrl_c() -> None:
    for command in main.app.registered_commands:
        assert hasattr(command.callback, "__wrapped__"), command.name


class _Like:
    """Stands for the real application."""

    registered_commands = main.app.registered_commands

    def __init__(self, call: object) -> None:
        self._call = call

    def __call__(self, *arguments: object, **named: object) -> object:
        return self._call(*arguments, **named)  # type: ignore[operator]


def test_nothing_is_said_where_progress_is_shown_or_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "SECONDS", 0.01)
    terminal, log = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    with patience.patience("it"), working(screen(True)[0], "busy"):
        time.sleep(0.05)
    monkeypatch.setattr(sys, "stderr", log)
    with patience.patience("it"):
        time.sleep(0.05)
    assert terminal.getvalue() == log.getvalue() == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_that_is_slow_to_start_says_that_it_prepares(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.01)
    console, stream = screen(terminal)
    with Display(console, "a run"):
        deadline = time.monotonic() + 10
        while PREPARING not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert PREPARING in stream.getvalue()
    console, stream = screen(False)
    with Display(console, "a run") as display:
        display(Started(0, 0, 1))
        time.sleep(0.05)
    assert PREPARING not in stream.getvalue()


def test_counting_shows_a_bar_or_lines_and_nothing_when_quiet() -> None:
    for terminal, quiet, expected in ((True, False, "third"), (False, False, "measuring: 0 of 3"), (True, True, "")):
        console, stream = screen(terminal)
        with counting(console, "measuring", quiet) as step:
            for number, name in enumerate(("first", "second", "third")):
                step(number, 3, name)
        shown = stream.getvalue()
        assert (expected in shown) if expected else shown == ""


def test_what_has_no_steps_to_count_says_what_it_does_in_a_log_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.01)
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
    late = "import time; time.sleep(0.3); from softcell.app.cli import process as p; p.enter()"
    code = f"{late}; print(time.perf_counter() - p.began())"
    began = time.perf_counter()
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert (0.3 if sys.platform == "linux" else 0.0) <= float(shown) <= time.perf_counter() - began + 0.02


def test_ctrl_c_in_a_whole_run_says_how_to_go_on(tmp_path: Path) -> None:
    write_data(tmp_path / "data.npz", train=96)
    small = ("--max-params", "9k", "--random", "2", "--threads", "1")
    running = process("run", "--data", "data.npz", "--time", "90s", *small, "--out", "run", cwd=tmp_path)
    assert running.stdout is not None and running.stderr is not None
    for line in running.stdout:  # into the search, past its first epoch
        if line.startswith("epoch"):
            break
    running.send_signal(signal.SIGINT)
    shown = running.stdout.read()
    assert running.wait(timeout=60) == 130, running.stderr.read()
    assert "softcell run --resume run" in shown
    again = process("run", "--resume", "run", cwd=tmp_path)
    assert again.stdout is not None
    for line in again.stdout:
        if line.startswith("going on at epoch"):
            break
    else:
        raise AssertionError("the resumed run did not go on where it was stopped")
    again.kill()
    again.wait(timeout=60)


def test_ctrl_c_in_a_measurement_leaves_nothing_half_written(tmp_path: Path) -> None:
    running = process("latency", "nb201", "--out", "table.yaml", cwd=tmp_path)
    assert running.stdout is not None and running.stderr is not None
    assert running.stdout.readline().startswith("measuring")
    running.send_signal(signal.SIGINT)
    assert running.wait(timeout=60) == 130
    assert "same command" in running.stderr.read()
    assert not list(tmp_path.iterdir())
