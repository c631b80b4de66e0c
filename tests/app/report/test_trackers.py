"""Data logged to TensorBoard, MLflow and Weights & Biases, read back with their own readers, without a server."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from softcell import api
from softcell.app.report.trackers import BOARD, IDS, TRACKERS, Tracker, Tracking, tag
from softcell.engine.task import EpochEnded, Event, Finished, Note, Started, Stepped
from softcell.errors import UserError
from softcell.files import read_json

CELL = "|skip_connect~0|+|none~0|skip_connect~1|+|none~0|none~1|nor_conv_3x3~2|"
TINY: dict[str, Any] = {"epochs": 3, "channels": 2, "threads": 1, "batch_size": 512}
NEEDED = "{} is not installed (an extra)"


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    needed = NEEDED.format("TensorBoard")
    accumulator: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason=needed)
    found = accumulator.EventAccumulator(str(folder / BOARD)).Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def epoch(number: int, loss: float) -> EpochEnded:
    return EpochEnded(number, {"epoch": number, "train_loss": loss, "val_split": "validation", "entropy_cell": 1.5})


def test_epochs_are_written_once_even_when_some_are_run_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason=NEEDED.format("TensorBoard"))
    passed: list[Event] = []
    board = Tracking(["tensorboard"], tmp_path, passed.append)
    for event in (Started(0, 0, 4), epoch(0, 4.0), epoch(1, 3.0), epoch(2, 2.0)):
        board(event)
    assert scalars(tmp_path)["loss/train"] == [(1, 4.0), (2, 3.0), (3, 2.0)]  # readable while it runs
    board.close()  # killed: epoch 3 was written, but the checkpoint is from after epoch 2
    with Tracking(["tensorboard"], tmp_path, passed.append) as board:
        for event in (Started(2, 0, 4), epoch(2, 2.5), epoch(3, 1.0), Note("hm"), Finished(4, None)):
            board(event)
    assert scalars(tmp_path)["loss/train"] == [(1, 4.0), (2, 3.0), (3, 2.5), (4, 1.0)]
    assert scalars(tmp_path)["entropy/cell"][0] == (1, 1.5)
    assert len(passed) == 9
    board(Started(0, 0, 1))  # a new run
    board(epoch(0, 9.0))
    board.close("interrupted")
    assert scalars(tmp_path)["loss/train"] == [(1, 9.0)]


def test_tags_group_metrics_of_one_kind() -> None:
    names = ("val_accuracy", "best_val_accuracy", "skip_share_cell", "entropy", "lr", "expected_parameters")
    assert [tag(name) for name in names] == [
        "accuracy/val", "accuracy/best_val", "share/skip_cell", "entropy/mean", "lr", "expected/parameters",
    ]  # fmt: skip


@pytest.mark.parametrize("name", TRACKERS)
def test_without_the_tool_the_error_names_the_extra(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (name, "torch.utils.tensorboard", "mlflow.entities"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"--{name} needs .*: pip install 'softcell\[{name}\]'"):
        api.train(CELL, data="digits", out=tmp_path / "run", **{name: True}, **TINY)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


class Recorder(Tracker):
    """A tool that notes what it is given, and fails when asked to."""

    calls: list[tuple[Any, ...]]
    fails_at = ""

    def __init__(self) -> None:
        self.calls = []
        Recorder.last = self  # type: ignore[attr-defined]

    def _note(self, action: str, *values: Any) -> None:
        self.calls.append((action, *values))
        if action == Recorder.fails_at:
            raise ConnectionError(f"no\nserver for {action}")

    def start(self, folder: Path, recipe: Any, event: Started, known: str | None) -> str:
        self._note("start", recipe.get("epochs"), known)
        return known or "id-1"

    def write(self, metrics: Any, epoch: int) -> None:
        self._note("write", sorted(metrics), epoch)

    def finish(self, results: Any, status: str) -> None:
        self._note("finish", results, status)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    monkeypatch.setitem(TRACKERS, "mlflow", Recorder)
    monkeypatch.setattr(Recorder, "fails_at", "")
    return Recorder


class StopError(Exception):
    pass


def stop_in_epoch_2(event: Event) -> None:
    if isinstance(event, Stepped) and event.epoch == 1:
        raise StopError


def test_a_resumed_run_continues_under_its_id_and_ends_with_its_results(
    recorder: type[Recorder], tmp_path: Path
) -> None:
    with pytest.raises(StopError):
        api.train(CELL, data="digits", out=tmp_path / "run", mlflow=True, on_event=stop_in_epoch_2, **TINY)
    calls = recorder.last.calls  # type: ignore[attr-defined]
    assert [call[0] for call in calls] == ["start", "write", "finish"]
    assert calls[0] == ("start", 3, None) and calls[-1][-1] == "failed"
    assert read_json(tmp_path / "run" / IDS) == {"mlflow": "id-1"}
    trained = api.train(resume=True, out=tmp_path / "run", mlflow=True)
    calls = recorder.last.calls  # type: ignore[attr-defined]
    assert [call[0] for call in calls] == ["start", "write", "write", "finish"]
    assert calls[0] == ("start", 3, "id-1") and [call[2] for call in calls[1:3]] == [2, 3]
    assert "train_loss" in calls[1][1] and "epoch" not in calls[1][1]
    assert calls[-1][2] == "finished"
    assert calls[-1][1]["accuracy"] == trained.accuracy
    assert calls[-1][1]["parameters"] == trained.cost.parameters


def test_a_tool_that_fails_in_a_run_is_left_out_and_one_that_cannot_start_stops_it(
    recorder: type[Recorder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "fails_at", "write")
    with pytest.warns(UserWarning, match="--mlflow stopped, the run continues: no server for write"):
        trained = api.train(CELL, data="digits", out=tmp_path / "run", mlflow=True, **TINY)
    assert trained.exit_code == 0 and [call[0] for call in recorder.last.calls] == ["start", "write"]  # type: ignore[attr-defined]
    monkeypatch.setattr(recorder, "fails_at", "start")
    with pytest.raises(UserError, match="--mlflow cannot start a run: no server for start"):
        api.train(CELL, data="digits", out=tmp_path / "other", mlflow=True, **TINY)


def test_the_first_of_two_phases_is_marked(recorder: type[Recorder], tmp_path: Path) -> None:
    sizes = {"space.cells_per_stage": 1, "pretrain.epochs": 1, "pretrain.batch_size": 512}
    api.search("darts", space="nb201", out=tmp_path / "run", mlflow=True, set=sizes, **{**TINY, "epochs": 1})
    calls = recorder.last.calls  # type: ignore[attr-defined]
    assert [call[0] for call in calls] == ["start", "write", "write", "finish"]
    assert "phase-1/train_loss" in calls[1][1] and "train_loss" in calls[2][1]
    assert not any(name.startswith("phase-1/") for name in calls[2][1])


def test_mlflow_has_settings_metrics_and_results_in_its_own_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow: Any = pytest.importorskip("mlflow", reason=NEEDED.format("MLflow"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    with pytest.raises(StopError):
        api.train(CELL, data="digits", out=tmp_path / "run", mlflow=True, on_event=stop_in_epoch_2, **TINY)
    client = mlflow.MlflowClient()
    known = read_json(tmp_path / "run" / IDS)["mlflow"]
    assert client.get_run(known).info.status == "FAILED"
    trained = api.train(resume=True, out=tmp_path / "run", mlflow=True)
    found = client.get_run(known)
    assert found.info.status == "FINISHED" and found.info.run_name == "run"
    assert found.data.params["epochs"] == "3" and found.data.params["space_settings.channels"] == "2"
    assert found.data.metrics["result.accuracy"] == pytest.approx(trained.accuracy)
    losses = [(one.step, one.value) for one in client.get_metric_history(known, "train_loss")]
    assert losses == [(row["epoch"] + 1, row["train_loss"]) for row in trained.metrics]
    experiments = {one.name for one in client.search_experiments()}
    assert "softcell" in experiments and len(client.search_runs([found.info.experiment_id])) == 1


def wandb_records(content: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: a header of 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    assert content.startswith(b":W&B")
    at, parts = 7, b""
    while at + 7 <= len(content):
        room = 32768 - at % 32768
        if room < 7:  # too little for a header of a record: padding
            at += room
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)  # after the checksum
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


def test_wandb_has_settings_metrics_and_results_in_its_offline_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason=NEEDED.format("Weights & Biases"))
    records: Any = pytest.importorskip("wandb.proto.wandb_internal_pb2", reason="wandb's own format has moved")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    trained = api.train_seeds(CELL, seeds=2, data="digits", out=tmp_path / "runs", wandb=True, at_once=2, **TINY)
    for seed, result in trained.results.items():
        folder = tmp_path / "runs" / f"seed-{seed}"
        (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
        rows, summary, config = [], {}, {}  # type: ignore[var-annotated]
        for data in wandb_records(file.read_bytes()):
            record = records.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                config |= {item.key: item.value_json for item in record.run.config.update}
            if record.HasField("history"):
                rows.append({item.key or item.nested_key[0]: item.value_json for item in record.history.item})
            if record.HasField("summary"):
                summary |= {item.key or item.nested_key[0]: item.value_json for item in record.summary.update}
        assert config["epochs"] == "3" and config["seed"] == str(seed)
        losses = [(int(row["epoch"]), float(row["train_loss"])) for row in rows]
        assert losses == [(row["epoch"] + 1, pytest.approx(row["train_loss"])) for row in result.metrics]
        assert float(summary["result.accuracy"]) == pytest.approx(result.accuracy)
        assert read_json(folder / IDS)["wandb"] in file.name
