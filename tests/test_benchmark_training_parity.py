"""The comparison of fused training with eager training: finished runs are read, interrupted ones are resumed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import training_parity


def test_finished_runs_are_read_and_unfinished_ones_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []

    def write(folder: Path, accuracy: float) -> None:
        folder.mkdir(exist_ok=True)
        row = {"train_loss": 1.0 + accuracy, "train_accuracy": accuracy, "seconds": 2.0}
        (folder / "metrics.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
        (folder / "run.json").write_text(json.dumps({"results": {"accuracy": accuracy}}))

    class Run:
        returncode = 0

        def __init__(self, words: list[str], **_: Any) -> None:
            started.append(words)
            self._late = "eager-1" in words[-2] and "--resume" not in words  # the first attempt takes too long
            place = next(word for word in words if word.startswith(str(tmp_path / "runs")))
            write(Path(place), 0.5 + 0.1 * len(started))

        def __enter__(self) -> Run:
            return self

        def __exit__(self, *_: object) -> None: ...

        def communicate(self, timeout: float | None = None) -> tuple[str, str]:
            if self._late and timeout is not None:
                raise subprocess.TimeoutExpired("softcell", timeout)
            return "", ""

        def send_signal(self, number: int) -> None:
            done.discard("eager-1")

    done: set[str] = {"fused-0", "fused-1"}
    (tmp_path / "runs").mkdir()
    for name in done:
        write(tmp_path / "runs" / name, 0.6 + 0.02 * int(name[-1]))
    monkeypatch.setattr(training_parity, "finished", lambda folder: folder.name in done)
    # Only this module's: git is asked for the commit of the record.
    monkeypatch.setattr(
        training_parity, "subprocess", SimpleNamespace(Popen=Run, TimeoutExpired=subprocess.TimeoutExpired)
    )
    given = ["training_parity", "--seeds", "2", "--jobs", "1", "--folder", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", [*given, "--minutes", "5"])
    training_parity.main()
    assert "eager seed 1: interrupted" in capsys.readouterr().out
    assert "holdout=0.1" in started[0], "the accuracy is that of held-out images, which not every recipe has"
    done.add("eager-0")
    record = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", [*given, "--out", str(record)])
    training_parity.main()
    assert started[-1][3:5] == ["train", "--resume"], "what was interrupted continues"
    assert len(started) == 3, "what has finished is not repeated"
    found = json.loads(record.read_text())
    assert [run["accuracy"] for run in found["runs"]["fused"]] == [0.6, 0.62]
    assert found["runs"]["eager"][0]["seconds"] == 6.0
    gaps = {row["metric"]: row["gap_in_spreads"] for row in found["rows"] if row["way"] == "fused"}
    # Eager 0.6 and 0.8, fused 0.6 and 0.62: -0.09 of √(0.02 + 0.0002).
    assert gaps["accuracy"] == pytest.approx(-0.09 / 0.0202**0.5)
