"""The call stack from the command line to the step is short: a reader has to follow every function on it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import softcell
from softcell.app import process
from softcell.app.cli.main import main

MAX_FRAMES = 10
ROOT = Path(softcell.__file__).parent


class ReachedError(BaseException):
    """Ends a command at its first step."""


def frames_of(monkeypatch: pytest.MonkeyPatch, step: str, arguments: list[str]) -> list[str]:
    """The functions of the package on the stack when a command calls `step` first, from the entry point to the step."""
    found: list[str] = []

    def stop(*_: Any, **__: Any) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(ROOT):
                found.append(f"{path.relative_to(ROOT)}:{frame.f_code.co_qualname}")
            frame = frame.f_back
        raise ReachedError

    monkeypatch.setattr(step, stop)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # `main` replaces it for its process
    monkeypatch.setattr(process, "_entered", [])  # likewise
    with pytest.raises(ReachedError):
        main(arguments)
    return [*reversed(found), step]


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    monkeypatch.chdir(tmp_path)
    return lambda step, *arguments: frames_of(monkeypatch, step, list(arguments))


def test_search_reaches_its_step_in_few_frames(in_folder: Callable[..., list[str]]) -> None:
    found = in_folder("softcell.search.task.bilevel", "search", "--space", "nb201", "--epochs", "1", "--quiet")
    assert found[0] == "app/cli/main.py:main" and "engine/loop.py:_Loop.steps" in found
    assert len(found) <= MAX_FRAMES, "\n".join(found)


def test_train_reaches_its_step_in_few_frames(in_folder: Callable[..., list[str]]) -> None:
    cell = "|nor_conv_3x3~0|+|none~0|skip_connect~1|+|none~0|none~1|avg_pool_3x3~2|"
    found = in_folder("softcell.evaluate.task.classification_step", "train", cell, "--epochs", "1", "--quiet")
    assert found[0] == "app/cli/main.py:main" and "engine/loop.py:_Loop.steps" in found
    assert len(found) <= MAX_FRAMES, "\n".join(found)
