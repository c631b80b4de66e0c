"""Commands run in this process on folders that are damaged one file at a time, and what must hold whatever happens.

The oracle: no traceback, no hang, no silent difference. A command ends with 0, or with 2 and one line that begins with
`error:`; and where a file of a run was damaged, the command either mentions it or says and writes exactly what it says
and writes without the damage.
"""

from __future__ import annotations

import contextlib
import io
import re
import shutil
import signal
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from softcell.api import search, train
from softcell.app.cli.main import run
from softcell.app.report.page import LivePage
from softcell.engine.task import EpochEnded, Event

CELL = "|nor_conv_3x3~0|+|none~0|skip_connect~1|+|nor_conv_1x1~0|none~1|avg_pool_3x3~2|"
LIMIT = 60
"""Seconds that a command may take here; each takes less than one on an idle machine."""


class Hang(BaseException):
    """A command took too long."""


class Stop(Exception):
    """Ends a run between two epochs."""


@dataclass
class Seen:
    """What a command left: its exit code, what it said, and the files it wrote."""

    code: int | None
    out: str
    error: str
    files: dict[str, bytes] = field(default_factory=dict)
    broken: str | None = None


class Workshop:
    """A folder with pristine runs; `run` works on a copy."""

    def __init__(self, root: Path) -> None:
        self.place, self.pristine = root / "place", root / "pristine"
        self.place.mkdir()
        tiny: dict[str, Any] = {"batch_size": 32, "space_settings": {"channels": 2, "cells_per_stage": 1}}
        draw = np.random.default_rng(0)
        images = draw.integers(0, 256, (40, 8, 8), dtype=np.uint8)
        self.pristine.mkdir()
        np.savez(self.pristine / "data.npz", images=images, labels=np.arange(40) % 2)
        self.data = self.place / "data.npz"
        shutil.copy(self.pristine / "data.npz", self.data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            search(
                "darts", space="nb201", scale="small", data=self.data, epochs=2, out=self.pristine / "search", **tiny
            )
            common = {"data": self.data, "recipe": "small", **tiny}
            train(CELL, epochs=1, out=self.pristine / "train", **common)
            with contextlib.suppress(Stop):
                train(CELL, epochs=2, out=self.pristine / "half", on_event=_stop, **common)
        self._expected: dict[tuple[str, ...], Seen] = {}

    def fresh(self) -> None:
        """Puts everything back as it was."""
        for entry in self.place.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        for entry in self.pristine.iterdir():
            if entry.is_dir():
                shutil.copytree(entry, self.place / entry.name)
            else:
                shutil.copy(entry, self.place)

    def run(self, words: Sequence[str]) -> Seen:
        """Runs one command (or `watch`, once) in the place as it is."""
        out, error, broken, code = io.StringIO(), io.StringIO(), None, None
        before = {file: file.stat().st_mtime_ns for file in self._files()}
        try:
            with _limited(LIMIT), contextlib.redirect_stdout(out), contextlib.redirect_stderr(error), _said(error):
                if words[0] == "watch":
                    out.write(LivePage([self.place / word for word in words[1:]]).get()[0].decode())
                    code = 0
                else:
                    code = run(list(words))
        except Hang:
            broken = f"hang: more than {LIMIT} s"
        except BaseException:
            broken = traceback.format_exc(limit=-4)
        files = {
            str(file.relative_to(self.place)): file.read_bytes()
            for file in self._files()
            if before.get(file) != file.stat().st_mtime_ns
        }
        return Seen(code, out.getvalue(), error.getvalue(), files, broken)

    def expected(self, words: Sequence[str]) -> Seen:
        """What the command leaves without any damage."""
        if tuple(words) not in self._expected:
            self.fresh()
            self._expected[tuple(words)] = self.run(words)
        return self._expected[tuple(words)]

    def _files(self) -> Iterator[Path]:
        return (file for file in self.place.rglob("*") if file.is_file())


def fault(seen: Seen) -> str | None:
    """What is wrong with how a command ended; None where nothing is."""
    if seen.broken is not None:
        return seen.broken
    if seen.code == 0:
        return None
    lines = [line for line in seen.error.splitlines() if not line.startswith(("warning: ", "note: "))]
    if seen.code != 2 or len(lines) != 1 or not lines[0].startswith("error: "):
        return f"exit code {seen.code} with {seen.error[-500:]!r}"
    return None


def difference(seen: Seen, expected: Seen, file: str) -> str | None:
    """What a damaged `file` changed without a word; None where the command reported it, or nothing changed."""
    said = f"{seen.out}\n{seen.error}"
    if seen.code != 0 or Path(file).name in said or "damaged" in said or "warning" in seen.error:
        return None
    if _plain(seen.out) != _plain(expected.out):
        return f"says {_plain(seen.out)[-300:]!r} instead of {_plain(expected.out)[-300:]!r}"
    other = [
        name
        for name in seen.files.keys() | expected.files.keys()
        if not name.endswith((".bin", "run.json", "log.txt"))
        and _content(name, seen.files.get(name)) != _content(name, expected.files.get(name))
    ]
    return f"writes other {sorted(other)}" if other else None


def _content(name: str, content: bytes | None) -> bytes | None:
    """Without what differs from run to run: times."""
    if content is None or name.endswith(".safetensors"):
        return content
    if name.endswith((".jsonl", ".html", ".json")):
        content = re.sub(rb'"seconds": [0-9.e-]+', b"", content)
        content = re.sub(rb"\b\d+ (h \d+ min|min \d+ s|s)\b", b"", content)
        return re.sub(rb"20\d\d-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\+00:00)?", b"", content)
    return content


def _plain(text: str) -> str:
    return re.sub(r"\d+(\.\d+)? ?(s|ms|min|h)\b", "", text)


def _stop(event: Event) -> None:
    if isinstance(event, EpochEnded):
        raise Stop


@contextlib.contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def ring(number: int, frame: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _said(stream: io.StringIO) -> Iterator[None]:
    """Warnings as the command line shows them."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *rest, **more: print(f"warning: {message}", file=stream)  # type: ignore[assignment]
        yield
