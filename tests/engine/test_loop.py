"""The loop in one process: order of events, interruption, resumption, failure."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from softcell.engine import checkpoint, loop
from softcell.engine.distributed import World
from softcell.engine.metrics import DivergedError
from softcell.engine.task import EpochEnded, Event, Finished, Interrupted, Note, Started, Stepped
from softcell.errors import UserError
from tests.helpers.engine_toy import ALONE, Toy, final_state, same, untimed

# Every step of the toy task: four in even epochs, five in odd ones.
PLACES = [(epoch, step) for epoch in range(3) for step in range(4 + epoch % 2)]


def strike_at(epoch: int, step: int, number: int = signal.SIGINT) -> Callable[[int, int], None]:
    def strike(now_epoch: int, now_step: int) -> None:
        if (now_epoch, now_step) == (epoch, step):
            os.kill(os.getpid(), number)

    return strike


def place(folder: Path) -> tuple[int, int] | None:
    loaded = checkpoint.load_latest(folder)
    return (loaded.state["epoch"], loaded.state["step"]) if loaded else None


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole")
    loop.run(Toy(), folder, ALONE, resume=False)
    return final_state(folder)


def test_events_come_in_order_and_lead_to_the_end(tmp_path: Path) -> None:
    events: list[Event] = []
    outcome = loop.run(Toy(num_epochs=2), tmp_path, ALONE, resume=False, on_event=events.append)
    kinds = [type(event).__name__ for event in events]
    assert kinds == ["Started", *["Stepped"] * 4, "EpochEnded", *["Stepped"] * 5, "EpochEnded", "Finished"]
    steps = [event for event in events if isinstance(event, Stepped)]
    assert [round(event.fraction * 9) for event in steps] == list(range(1, 10))
    assert steps[0].seconds_left is None
    assert all(event.seconds_left is not None and event.seconds_left >= 0 for event in steps[1:])
    assert (outcome.status, outcome.exit_code, outcome.reason) == ("finished", 0, None)
    ended = [event.metrics for event in events if isinstance(event, EpochEnded)]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert ended == lines == outcome.metrics
    assert [line["epoch"] for line in lines] == [0, 1]
    assert all(line["seconds"] > 0 for line in lines)
    records = [json.loads(line) for line in (tmp_path / "weights.jsonl").read_text().splitlines()]
    assert [record["epoch"] for record in records] == [0, 1]
    assert "_records" not in lines[0]


@settings(max_examples=12, deadline=None)
@given(stops=st.lists(st.sampled_from(PLACES), max_size=3, unique=True))
def test_an_interrupted_and_resumed_run_repeats_an_unbroken_one(
    whole: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, stops: list[tuple[int, int]]
) -> None:
    folder = tmp_path_factory.mktemp("parts")
    for epoch, step in sorted(stops):
        outcome = loop.run(Toy(before_step=strike_at(epoch, step)), folder, ALONE, resume=True)
        assert (outcome.status, outcome.exit_code) == ("interrupted", 130)
    assert loop.run(Toy(), folder, ALONE, resume=True).status == "finished"
    assert same(final_state(folder), whole)
    shutil.rmtree(folder)


def test_an_interruption_saves_its_state_and_says_how_to_resume(tmp_path: Path) -> None:
    events: list[Event] = []
    task = Toy(before_step=strike_at(1, 1, signal.SIGTERM))
    outcome = loop.run(task, tmp_path, ALONE, resume=False, on_event=events.append)
    assert outcome.exit_code == 143
    last = events[-1]
    assert isinstance(last, Interrupted)
    assert (last.epoch, last.step, last.exit_code) == (1, 2, 143)
    assert "--resume" in last.text
    assert "SIGTERM" in last.text
    assert str(tmp_path) in last.text
    loop.run(Toy(), tmp_path, ALONE, resume=True, on_event=events.append)
    started = [event for event in events if isinstance(event, Started)]
    assert (started[1].epoch, started[1].step) == (1, 2)


def test_a_signal_during_the_end_of_an_epoch_stops_the_run(tmp_path: Path, whole: dict[str, Any]) -> None:
    class Struck(Toy):
        def end_epoch(self, epoch: int) -> dict[str, Any]:
            if epoch == 0:
                os.kill(os.getpid(), signal.SIGINT)
            return super().end_epoch(epoch)

    outcome = loop.run(Struck(), tmp_path, ALONE, resume=False, save_every_epochs=10)
    assert outcome.status == "interrupted"
    assert place(tmp_path) == (1, 0)
    loop.run(Toy(), tmp_path, ALONE, resume=True)
    assert same(final_state(tmp_path), whole)


def test_handlers_are_as_before_after_a_run(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    loop.run(Toy(), tmp_path, ALONE, resume=False)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_checkpoint_is_never_overwritten_by_a_new_run(tmp_path: Path) -> None:
    loop.run(Toy(num_epochs=1), tmp_path, ALONE, resume=False)
    with pytest.raises(UserError, match=r"--resume.*--out"):
        loop.run(Toy(num_epochs=1), tmp_path, ALONE, resume=False)


def test_resuming_a_finished_run_does_nothing_and_a_longer_one_continues(tmp_path: Path) -> None:
    first = loop.run(Toy(num_epochs=1), tmp_path, ALONE, resume=False)

    def never(epoch: int, step: int) -> None:
        raise AssertionError("a finished run made a step")

    assert loop.run(Toy(num_epochs=1, before_step=never), tmp_path, ALONE, resume=True) == first
    assert len(loop.run(Toy(num_epochs=2), tmp_path, ALONE, resume=True).metrics) == 2


def test_resuming_without_a_checkpoint_starts_and_says_so(tmp_path: Path) -> None:
    events: list[Event] = []
    loop.run(Toy(num_epochs=1), tmp_path, ALONE, resume=True, on_event=events.append)
    assert isinstance(events[0], Note)
    assert "no checkpoint" in events[0].text


def test_a_damaged_checkpoint_costs_one_epoch_and_a_note(tmp_path: Path, whole: dict[str, Any]) -> None:
    loop.run(Toy(), tmp_path, ALONE, resume=False)
    (tmp_path / checkpoint.CURRENT).write_bytes(b"spoilt")
    events: list[Event] = []
    loop.run(Toy(), tmp_path, ALONE, resume=True, on_event=events.append)
    assert isinstance(events[0], Note)
    assert checkpoint.PREVIOUS in events[0].text
    assert same(final_state(tmp_path), whole)


def test_files_left_behind_by_a_kill_are_rewritten(tmp_path: Path) -> None:
    loop.run(Toy(num_epochs=2), tmp_path, ALONE, resume=False)
    for file in tmp_path.glob("*.jsonl"):
        file.write_text("")
    loop.run(Toy(num_epochs=2), tmp_path, ALONE, resume=True)
    final_state(tmp_path)  # compares files and checkpoint


def test_an_early_stop_ends_the_run_for_good(tmp_path: Path) -> None:
    events: list[Event] = []
    outcome = loop.run(Toy(stop_after=1), tmp_path, ALONE, resume=False, on_event=events.append)
    assert (outcome.status, outcome.reason, len(outcome.metrics)) == ("finished", "enough", 2)
    assert events[-1] == Finished(2, "enough")
    assert "_stop" not in outcome.metrics[1]
    assert loop.run(Toy(), tmp_path, ALONE, resume=True) == outcome


@pytest.mark.parametrize("place", [(1, 2), (1, 4)])
def test_a_loss_that_is_not_finite_ends_the_run_at_once(tmp_path: Path, place: tuple[int, int]) -> None:
    with pytest.raises(DivergedError, match=rf"nan in epoch 2 at step {place[1]}.*learning rate"):
        loop.run(Toy(nan_at=place), tmp_path, ALONE, resume=False)
    loaded = checkpoint.load_latest(tmp_path)
    assert loaded is not None
    assert (loaded.state["epoch"], loaded.state["step"]) == (1, 0)


def test_on_cuda_a_failure_is_looked_for_rarely_but_before_anything_is_saved(tmp_path: Path) -> None:
    steps: list[int] = []
    task = Toy(nan_at=(0, 1), before_step=lambda epoch, step: steps.append(step))
    with pytest.raises(DivergedError, match="epoch 1 at step 1"):
        loop.run(task, tmp_path, World(0, 1, 0, torch.device("cuda")), resume=False)
    assert steps == [0, 1, 2, 3]
    assert place(tmp_path) is None
    task = Toy(nan_at=(0, 1), before_step=strike_at(0, 2))
    with pytest.raises(DivergedError, match="epoch 1 at step 1"):
        loop.run(task, tmp_path, World(0, 1, 0, torch.device("cuda")), resume=False)
    assert place(tmp_path) is None


def test_a_signal_together_with_a_failure_saves_no_bad_state(tmp_path: Path) -> None:
    with pytest.raises(DivergedError):
        loop.run(Toy(nan_at=(0, 1), before_step=strike_at(0, 1)), tmp_path, ALONE, resume=False)
    assert checkpoint.load_latest(tmp_path) is None


def test_checkpoints_follow_save_every_epochs_and_files_every_epoch(tmp_path: Path) -> None:
    seen, saved = [], []

    def look(event: Event) -> None:
        if isinstance(event, EpochEnded):
            seen.append(len((tmp_path / "metrics.jsonl").read_text().splitlines()))
            found = checkpoint.load_latest(tmp_path)
            saved.append(0 if found is None else found.state["epoch"])

    loop.run(Toy(num_epochs=5), tmp_path, ALONE, resume=False, on_event=look, save_every_epochs=2)
    assert seen == [1, 2, 3, 4, 5]
    assert saved == [0, 2, 2, 4, 5]
    with pytest.raises(UserError, match="save_every_epochs=0"):
        loop.run(Toy(), tmp_path, ALONE, resume=True, save_every_epochs=0)


def test_slow_saving_keeps_within_its_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[tuple[int, int]] = []
    save, killed = checkpoint.save, tmp_path / "killed"
    for folder in (tmp_path / "whole", tmp_path / "cut", killed):
        folder.mkdir()

    def noted(folder: Path, state: dict[str, Any]) -> None:
        saved.append((state["epoch"], state["step"]))
        save(folder, state)

    monkeypatch.setattr(checkpoint, "save", noted)
    whole = loop.run(Toy(num_epochs=5), tmp_path / "whole", ALONE, resume=False)
    assert saved == [(k, 0) for k in (1, 2, 3, 4, 5)], "quickly saved: after every epoch"
    monkeypatch.setattr(loop, "FAST_SAVE_SECONDS", 0.0)
    monkeypatch.setattr(loop, "MAX_SAVING_SHARE", 1e-9)
    saved.clear()
    struck = Toy(num_epochs=5, before_step=strike_at(3, 1))
    assert loop.run(struck, tmp_path / "cut", ALONE, resume=False).status == "interrupted"
    (first, *_), second = saved, saved[-1]
    assert first == (1, 0) and second[0] == 3 and second[1] > 0 and len(saved) == 2, (
        "a signal is always followed by one"
    )
    rows = (tmp_path / "cut" / "metrics.jsonl").read_text().splitlines()
    assert len(rows) == 3
    # Killed within epoch 4 instead: files are ahead of the checkpoint, and agree with it once the run is resumed.
    (killed / checkpoint.CURRENT).write_bytes((tmp_path / "cut" / checkpoint.PREVIOUS).read_bytes())
    (killed / "metrics.jsonl").write_text("".join(f"{row}\n" for row in rows))
    at_start: list[int] = []

    def look(event: Event) -> None:
        if isinstance(event, Started):
            at_start.append(len((killed / "metrics.jsonl").read_text().splitlines()))

    outcome = loop.run(Toy(num_epochs=5), killed, ALONE, resume=True, on_event=look)
    assert at_start == [1] and untimed(outcome.metrics) == untimed(whole.metrics)


@pytest.mark.parametrize("slow", [False, True])
def test_a_run_stopped_after_an_epoch_resumes_from_it(
    slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if slow:
        monkeypatch.setattr(loop, "FAST_SAVE_SECONDS", 0.0)
        monkeypatch.setattr(loop, "MAX_SAVING_SHARE", 1e-9)

    def end(event: Event) -> None:
        if isinstance(event, EpochEnded) and event.epoch == 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        loop.run(Toy(num_epochs=6), tmp_path, ALONE, resume=False, on_event=end)
    found = checkpoint.load_latest(tmp_path)
    assert found is not None and (found.state["epoch"], found.state["step"]) == (4, 0)


def test_no_run_is_unsaved_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[int] = []
    save = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda folder, state: (saved.append(state["epoch"]), save(folder, state)))
    for name, value in (("FAST_SAVE_SECONDS", 0.0), ("MAX_SAVING_SHARE", 1e-9), ("MAX_UNSAVED_SECONDS", 0.0)):
        monkeypatch.setattr(loop, name, value)
    loop.run(Toy(num_epochs=3), tmp_path, ALONE, resume=False)
    assert saved == [1, 2, 3]


def test_a_metric_that_is_not_finite_is_null_and_noted(tmp_path: Path) -> None:
    class Odd(Toy):
        def end_epoch(self, epoch: int) -> dict[str, Any]:
            return {"loss": float("inf"), "deep": [{"a": float("nan")}], "pair": (1, 2)}

    events: list[Event] = []
    outcome = loop.run(Odd(num_epochs=1), tmp_path, ALONE, resume=False, on_event=events.append)
    assert untimed(outcome.metrics) == [{"epoch": 0, "loss": None, "deep": [{"a": None}], "pair": [1, 2]}]
    notes = [event.text for event in events if isinstance(event, Note)]
    assert any("loss is inf" in note for note in notes)
    assert any("deep[0].a is nan" in note for note in notes)


def test_too_few_batches_are_an_error(tmp_path: Path) -> None:
    class Short(Toy):
        def batches(self, epoch: int, start: int) -> Any:
            yield from list(super().batches(epoch, start))[:2]

    with pytest.raises(RuntimeError, match="ended after 2"):
        loop.run(Short(), tmp_path, ALONE, resume=False)


@pytest.mark.parametrize("names", [{"_records": {"metrics": 1}}, {"epoch": 3}, {"_records": {"../x": 1}}])
def test_names_reserved_for_the_loop_are_refused(tmp_path: Path, names: dict[str, Any]) -> None:
    class Named(Toy):
        def end_epoch(self, epoch: int) -> dict[str, Any]:
            return names

    with pytest.raises(ValueError, match=r"reserved for the loop|file name"):
        loop.run(Named(), tmp_path, ALONE, resume=False)


def test_the_global_generator_is_part_of_the_state(tmp_path: Path, whole: dict[str, Any]) -> None:
    loop.run(Toy(before_step=strike_at(0, 1)), tmp_path, ALONE, resume=False)
    task = Toy()
    torch.manual_seed(99)
    loop.run(task, tmp_path, ALONE, resume=True)
    assert same(final_state(tmp_path), whole)
