"""Progress of a search or training: a live bar in a terminal or notebook, one line per epoch anywhere else."""

from __future__ import annotations

import html
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from softcell.app.process import NOTICE_AFTER, showing_progress
from softcell.app.report.trackers import Tracking
from softcell.engine.distributed import is_main_process
from softcell.engine.task import EpochEnded, Event, Finished, Interrupted, Note, OnEvent, Started, Stepped
from softcell.seeds import seed_folder
from softcell.settings import MAX_EPOCHS
from softcell.text import clock, count_of, percent

SHOWN_EVERY = 0.05
"""The share of a training run's time after which the next epoch is shown."""
PREPARING = "preparing data, networks and the first step"
REFRESH = 0.2
"""Seconds between two updates of a notebook's output."""
BAR = 30


def python_console(quiet: bool | None) -> tuple[Console, bool]:
    """The console of calls from Python, and whether they are quiet: if None, outside of terminals and notebooks.

    Standard error, so that a program's own output can be piped.
    """
    console = Console(stderr=True, highlight=False, soft_wrap=True, quiet=not is_main_process())
    return console, not (console.is_terminal or console.is_jupyter) if quiet is None else quiet


def _announcing(console: Console, what: str) -> threading.Timer:
    """A started timer that prints one line after a moment without progress; the first progress cancels it."""
    timer = threading.Timer(NOTICE_AFTER, lambda: console.print(Text(f"{what} ...")))
    timer.daemon = True
    timer.start()
    return timer


@contextmanager
def working(console: Console, what: str, quiet: bool = False) -> Iterator[None]:
    """Shows that something without countable steps is running: a spinner in a terminal, one line anywhere else."""
    if quiet or console.quiet:
        yield
    elif console.is_terminal:
        with showing_progress(), console.status(what):
            yield
    else:
        console.print(Text(f"{what} ..."))
        yield


@contextmanager
def counting(console: Console, what: str, quiet: bool = False) -> Iterator[Callable[[int, int, str], None]]:
    """Yields a function of (done, total, next item): a bar in a terminal, else a line every ten seconds."""
    if quiet or console.quiet:
        yield lambda done, total, next_: None
        return
    if not console.is_terminal:
        last = [time.monotonic()]
        waiting = _announcing(console, what)

        def notify(done: int, total: int, next_: str) -> None:
            if done == 0 or time.monotonic() - last[0] > 10:
                waiting.cancel()
                last[0] = time.monotonic()
                console.print(Text(f"{what}: {done} of {total}"))

        try:
            yield notify
        finally:
            waiting.cancel()
        return
    columns = (
        TextColumn(what),
        BarColumn(bar_width=30),
        TextColumn("{task.description}"),
    )
    with showing_progress(), Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=None)  # a pulse until there is something to count
        yield lambda done, total, next_: bar.update(
            task, completed=done, total=total, description=f"{done}/{total} {next_}"
        )


class NotebookOutput:
    """Lines and bars in the output of a notebook's cell, which is replaced in place."""

    def __init__(self) -> None:
        from IPython.display import display  # a notebook has it

        self._lines: list[str] = []
        self._bars: dict[str, str] = {}
        self._next = 0.0
        self._handle: Any = display(self._content(), raw=True, display_id=True)

    def say(self, line: str) -> None:
        self._lines.append(line)
        self._show()

    def bar(self, key: str, line: str, share: float | None) -> None:
        """Sets the bar of `key`; `share` None: the work cannot be counted."""
        done = 0 if share is None else round(BAR * share)
        self._bars[key] = f"{'━' * done}{'┄' * (BAR - done)} {line}"
        if time.monotonic() >= self._next:
            self._show()

    def close(self) -> None:
        self._bars.clear()
        self._show()

    def _show(self) -> None:
        self._next = time.monotonic() + REFRESH
        self._handle.update(self._content(), raw=True)

    def _content(self) -> dict[str, str]:
        text = "\n".join((*self._lines, *self._bars.values()))
        return {"text/plain": text, "text/html": f"<pre style='line-height: 1.3'>{html.escape(text)}</pre>"}


class Display:
    """A context that shows the events of one run; `beside` adds listeners for concurrent runs."""

    def __init__(self, console: Console, heading: str, quiet: bool = False) -> None:
        self._console, self._quiet = console, quiet
        self.heading = heading  # shown when the run starts, so that an earlier error is printed alone
        self._bar: Progress | None = None
        self._notebook: NotebookOutput | None = None
        self._task: TaskID | None = None
        self._label = ""
        self._others: list[Display] = []
        self._num_epochs = 0
        self._time = 0.0
        self._shown_at = self._fraction = 0.0
        self._left: float | None = None
        self._open = ExitStack()
        self._waiting: threading.Timer | None = None

    def beside(self, label: str, heading: str) -> Display:
        """A listener for one of several runs: its lines begin with `label`, and its bar is below the others."""
        other = Display(self._console, heading, self._quiet)
        other._label, other._bar, other._notebook = f"{label}  ", self._bar, self._notebook
        other._waiting = self._waiting  # the first run that starts ends the wait of all
        if self._bar is not None and self._task is not None:  # each has its own bar
            self._bar.remove_task(self._task)
            self._task = None
        self._others.append(other)
        return other

    def __enter__(self) -> Self:
        if self._console.is_jupyter and not self._quiet and not self._console.quiet:
            self._notebook = NotebookOutput()
            self._notebook.bar(self._label, PREPARING, None)
        elif self._console.is_terminal and not self._quiet and not self._console.quiet:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=30),
                TextColumn("{task.fields[steps]}"),
                TextColumn("{task.fields[left]}", style="cyan"),
                console=self._console,
                transient=True,
            )
            self._open.enter_context(showing_progress())
            self._bar.start()
            self._task = self._bar.add_task(PREPARING, total=None, left="", steps="")
        elif not self._quiet and not self._console.quiet:
            self._waiting = _announcing(self._console, PREPARING)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._started()
        self._open.close()
        if self._notebook is not None:
            self._notebook.close()
        if self._bar is not None:
            self._bar.stop()
            for display in (self, *self._others):
                display._bar, display._task = None, None

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                self._started()
                self._num_epochs, self._time = event.num_epochs, event.time
                self._say(self.heading)
                # A run that has finished all its epochs resumes none: it only evaluates and writes its results.
                if (event.epoch or event.step) and event.epoch < event.num_epochs:
                    of = f" of {event.num_epochs}" if event.num_epochs < MAX_EPOCHS else ""
                    self._say(f"resuming at epoch {event.epoch + 1}{of}, step {event.step}")
            case Stepped():
                self._step(event)
            case EpochEnded():
                # A time limit may allow thousands of epochs.
                if not self._time or self._fraction >= min(1.0, self._shown_at + SHOWN_EVERY):
                    self._shown_at = self._fraction
                    self._say(epoch_line(event.metrics, self._num_epochs, self._left))
            case Note():
                # `--quiet` hides progress but not warnings, and a note may be one.
                self._print(f"note: {event.text}")
            case Finished():
                if self._bar is not None and self._task is not None:  # measuring, drawing and writing follow
                    self._bar.update(self._task, description=f"{self._label}finishing", total=None, steps="", left="")
                if event.reason is not None:
                    self._print(f"stopped after {count_of(event.num_epochs, 'epoch')}: {event.reason}")
            case Interrupted():
                pass  # the command itself prints how to resume

    def _started(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _say(self, text: str) -> None:
        if not self._quiet:
            self._print(text, style="")

    def _print(self, text: str, style: str = "yellow") -> None:
        if self._notebook is not None:
            self._notebook.say(self._label + text)
        else:
            self._console.print(Text(self._label + text, style))

    def _step(self, event: Stepped) -> None:
        self._left, self._fraction = event.seconds_left, event.fraction
        description = f"{self._label}{_epoch_of(event.epoch, self._num_epochs)}"
        # The bar of a training run with a time limit shows its time.
        done, total = (event.fraction, 1.0) if self._time else (event.step, event.steps)
        left = "" if event.seconds_left is None else f"{clock(event.seconds_left)} left"
        steps = f"of {clock(self._time)}" if self._time else f"step {event.step}/{event.steps}"
        if self._notebook is not None:
            self._notebook.bar(self._label, "  ".join(filter(None, (description, steps, left))), done / max(1, total))
        if self._bar is None:
            return
        # A listener made by `beside` gets its bar with its first step.
        if self._task is None:
            self._task = self._bar.add_task(description, total=total, left="", steps="")
        self._bar.update(
            self._task,
            description=description,
            completed=done,
            total=total,
            left=left,
            steps=steps,
            refresh=event.step == 1,
        )


def seed_listeners(
    display: Display | None,
    folder: Path,
    track: Sequence[str],
    opened: ExitStack,
    on_event: Callable[[int], OnEvent] | None = None,
) -> Callable[[int], OnEvent]:
    """Creates the listener for each of several seeds: progress, trackers and the caller's own (`on_event`).

    Trackers are closed with `opened`.
    """

    def listener(seed: int) -> OnEvent:
        tracking = listener_beside(display, f"seed {seed}", seed_folder(folder, seed), track, opened)
        return tracking if on_event is None else both(tracking, on_event(seed))

    return listener


def listener_beside(
    display: Display | None, label: str, folder: Path, track: Sequence[str], opened: ExitStack
) -> OnEvent:
    """The listener of one of several concurrent runs: progress, and trackers that are closed with `opened`."""
    shown = None if display is None else display.beside(label, str(folder))
    return opened.enter_context(Tracking(track, folder, shown))


def both(first: OnEvent, second: OnEvent) -> OnEvent:
    """A listener that passes every event to two others."""

    def listener(event: Event) -> None:
        first(event)
        second(event)

    return listener


@contextmanager
def listening(
    heading: str, folder: Path, quiet: bool | None, track: Sequence[str], on_event: OnEvent | None
) -> Iterator[OnEvent]:
    """The listener of a run that Python code starts: progress, trackers and the caller's own."""
    console, is_quiet = python_console(quiet)
    with ExitStack() as opened:
        display = None if is_quiet else opened.enter_context(Display(console, heading))
        tracking = opened.enter_context(Tracking(track, folder, display))
        yield tracking if on_event is None else both(tracking, on_event)


@contextmanager
def listening_to_seeds(
    folder: Path,
    quiet: bool | None,
    track: Sequence[str],
    on_event: Callable[[int], OnEvent] | None,
) -> Iterator[Callable[[int], OnEvent]]:
    """`listening` for several seeds: yields a function that creates the listener for each."""
    console, is_quiet = python_console(quiet)
    with ExitStack() as opened:
        display = None if is_quiet else opened.enter_context(Display(console, ""))
        yield seed_listeners(display, folder, track, opened, on_event)


class RunScreen:
    """Shows `softcell run` in a terminal, or as lines."""

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self._console, self._quiet = console, quiet

    def print(self, *lines: str) -> None:
        if not self._quiet:
            for line in lines:
                self._console.print(Text(line))

    @contextmanager
    def working(self, what: str) -> Iterator[Callable[[int, int, str], None]]:
        with counting(self._console, what, self._quiet) as step:
            yield step

    @contextmanager
    def job(self, heading: str) -> Iterator[OnEvent]:
        with Display(self._console, heading, self._quiet) as display:
            yield display


def _epoch_of(epoch: int, num_epochs: int) -> str:
    """`epoch  3/50`, or `epoch 3` without a limit."""
    if num_epochs == MAX_EPOCHS:
        return f"epoch {epoch + 1}"
    return f"epoch {epoch + 1:>{len(str(num_epochs))}}/{num_epochs}"


def epoch_line(metrics: Mapping[str, Any], num_epochs: int, left: float | None) -> str:
    """One epoch in one line; every accuracy follows the name of its split."""
    parts = [_epoch_of(metrics["epoch"], num_epochs)]
    if "architecture" in metrics:
        parts.append(f"architecture {metrics['architecture'] + 1}")
    if "train_loss" in metrics:
        parts.append(f"loss {_number(metrics['train_loss'], '.3f')}")
    if "best_score" in metrics:
        parts.append(
            f"best score {_number(metrics['best_score'], '.5g')} of "
            f"{count_of(metrics['networks'], 'untrained network')}"
        )
    if "train_accuracy" in metrics:
        parts.append(f"train {_share(metrics['train_accuracy'])}")
    elif "val_loss" in metrics:
        parts.append(f"{metrics['val_split']} {_number(metrics['val_loss'], '.3f')}")
    if "val_accuracy" in metrics:
        parts.append(f"{metrics['val_split']} {_share(metrics['val_accuracy'])}")
    if "child_accuracy" in metrics:
        parts.append(f"child {_share(metrics['child_accuracy'])}")
    if "entropy" in metrics:
        parts.append(f"entropy {_number(metrics['entropy'], '.3f')}")
    if left is not None and metrics["epoch"] + 1 < num_epochs:
        parts.append(f"{clock(left)} left")
    return "  ".join(parts)


def _number(value: float | None, form: str) -> str:
    return "none" if value is None else format(value, form)


def _share(value: float | None) -> str:
    return "none" if value is None else f"{percent(value):>5}"


class Screen(Protocol):
    """Shows a run to people.

    Example:
        >>> from contextlib import contextmanager
        >>> from softcell.app.pipeline import Screen
        >>> class Quiet:
        ...     def print(self, *lines): ...
        ...     @contextmanager
        ...     def working(self, what):
        ...         yield lambda done, total, name: None
        ...     @contextmanager
        ...     def job(self, heading):
        ...         yield lambda event: None
        >>> screen: Screen = Quiet()
        >>> with screen.working("reading images") as show:
        ...     print(show(1, 2, "cat.jpg"))
        None
    """

    def print(self, *lines: str) -> None:
        """Prints lines."""

    def working(self, what: str) -> AbstractContextManager[Callable[[int, int, str], None]]:
        """Shows work that emits no events; yields a function of (done, total, next item)."""

    def job(self, heading: str) -> AbstractContextManager[OnEvent]:
        """Shows a search or training."""
