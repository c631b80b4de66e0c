"""TensorBoard's files, read back by TensorBoard itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from softcell.app.report.tensorboard import BOARD, TensorBoard, _tag
from softcell.engine.task import EpochEnded, Event, Finished, Interrupted, Note, Started
from softcell.errors import UserError

NEEDED = "TensorBoard is not installed (the tensorboard extra)"


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason=NEEDED)
    found = accumulator.EventAccumulator(str(folder / BOARD)).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def epoch(number: int, loss: float) -> EpochEnded:
    return EpochEnded(number, {"epoch": number, "train_loss": loss, "val_split": "validation", "entropy_cell": 1.5})


def test_epochs_are_written_once_even_when_some_are_run_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason=NEEDED)
    passed: list[Event] = []
    board = TensorBoard(tmp_path, passed.append)
    for event in (Started(0, 0, 4), epoch(0, 4.0), epoch(1, 3.0), epoch(2, 2.0)):
        board(event)
    assert scalars(tmp_path)["loss/train"] == [(1, 4.0), (2, 3.0), (3, 2.0)]  # readable while it runs
    board.close()  # killed: epoch 3 was written, but the checkpoint is from after epoch 2
    board = TensorBoard(tmp_path, passed.append)
    for event in (Started(2, 0, 4), epoch(2, 2.5), epoch(3, 1.0), Note("hm"), Finished(4, None)):
        board(event)
    assert scalars(tmp_path)["loss/train"] == [(1, 4.0), (2, 3.0), (3, 2.5), (4, 1.0)]
    assert scalars(tmp_path)["entropy/cell"][0] == (1, 1.5)
    assert len(passed) == 9
    board(Started(0, 0, 1))  # a new run
    board(epoch(0, 9.0))
    board(Interrupted(2, 130, 1, 0, ""))
    assert scalars(tmp_path)["loss/train"] == [(1, 9.0)]


def test_tags_group_metrics_of_one_kind() -> None:
    names = ("val_accuracy", "best_val_accuracy", "skip_share_cell", "entropy", "lr", "expected_parameters")
    assert [_tag(name) for name in names] == [
        "accuracy/val", "accuracy/best_val", "share/skip_cell", "entropy/mean", "lr", "expected/parameters",
    ]  # fmt: skip


def test_without_tensorboard_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(UserError, match=r"pip install 'softcell\[tensorboard\]'"):
        TensorBoard(tmp_path)
