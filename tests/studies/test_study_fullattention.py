"""The study of the two phases, rehearsed: stopped and gone on with, it ends with a complete record."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
from search_toys import write_data
from studies.fullattention import parsed
from studies.runs import Deadline

from softcell.data.guard import check_readable, test_set_sealed
from softcell.engine.device import resolve_device
from softcell.engine.events import Event, OnEvent, Stepped
from softcell.engine.lanes import interleave
from softcell.errors import UserError
from studies import fullattention, recorded

TINY = ["--first", "1", "--epochs", "1", "--train-epochs", "1", "--seeds", "1", "--channels", "16", "--device", "cpu"]
TINY += [
    "--set",
    "space.candidates=[local_sa_k3_h4, non_local_sa]",
    "--set",
    "space.layers=1",
    "--set",
    "batch_size=16",
]
TINY += ["--set-training", "batch_size=16", "--precision", "float32", "--at-once", "2"]


class After(Deadline):
    """Passes after so many steps."""

    left: int

    def watching(self, name: str) -> OnEvent:
        then = super().watching(name)

        def on_event(event: Event) -> None:
            self.left -= isinstance(event, Stepped)
            if self.left == 0:
                self._end = 0.0
            then(event)

        return on_event


def test_it_stops_goes_on_and_records_both_arms_at_equal_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_data(tmp_path / "toys.npz", train=32)
    places = ["--data", str(data), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]

    def record() -> dict[str, Any]:
        found: dict[str, Any] = json.loads((tmp_path / "out" / "phases-toys.json").read_text())
        return found

    with monkeypatch.context() as patch:
        patch.setattr(fullattention, "Deadline", type("Soon", (After,), {"left": 3}))
        fullattention.main([*TINY, *places])
    assert {row["search"] for row in record()["rows"]} == {"not measured"}
    assert json.loads((tmp_path / "runs" / "alone-toys-0" / "run.json").read_text())["status"] == "interrupted"
    fullattention.main([*TINY, *places])
    both, alone = record()["rows"]
    assert both["epochs_done"] == [1, 1, 1] and alone["epochs_done"] == [0, 2, 1]
    assert both["first_phase"]["val_loss"][0] > 0
    assert str(tmp_path) not in json.dumps(record()) and both["search"]["recipe"]["data"] == "DIR/toys.npz"
    for row in (both, alone):
        assert row["trained"]["split"] == "test" and 0 <= row["trained"]["accuracy"] <= 1
        assert row["trained"]["recipe"]["epochs"] == len(row["trained"]["curves"]["train_loss"]) == 1
    assert both["trained"]["parameters"] > 10_000
    for name in ("train_loss.svg", "train_accuracy-by-cost.svg", "both-0.svg", "alone-0.svg"):
        assert (tmp_path / "out" / name).exists()

    def broken(options: Any) -> None:
        raise RuntimeError("a run is broken")

    monkeypatch.setattr(fullattention, "run_all", broken)
    (tmp_path / "out" / "phases-toys.json").unlink()
    with pytest.raises(RuntimeError, match="is broken"):
        fullattention.main([*TINY, *places])
    assert record()["rows"] == [both, alone]


def test_searches_of_a_record_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_data(tmp_path / "toys.npz", train=32)
    given = [*TINY, "--data", str(data), "--runs", str(tmp_path / "first"), "--out", str(tmp_path / "out")]
    record = tmp_path / "out" / "phases-toys.json"
    fullattention.main(given)
    whole = json.loads(record.read_text())
    assert "not measured" not in json.dumps(whole["rows"])

    # One training is measured, the other was never finished, and the runs are gone.
    left = json.loads(record.read_text())
    left["rows"][1]["trained"], left["rows"][1]["epochs_done"][2] = "not measured", 7
    record.write_text(json.dumps(left))
    again = [*TINY, "--data", str(data), "--runs", str(tmp_path / "second"), "--out", str(tmp_path / "out")]
    again += ["--searched", str(record)]
    with monkeypatch.context() as patch:
        patch.setattr(recorded, "searched_and_trained", None)
        fullattention.main(again)
    found = json.loads(record.read_text())
    for row, was in zip(found["rows"], whole["rows"], strict=True):
        row["trained"].pop("seconds"), was["trained"].pop("seconds")
    assert found["rows"] == whole["rows"]
    assert [path.name for path in (tmp_path / "second").iterdir()] == ["alone-toys-0"]

    # Trained by other settings, it is trained anew; searched by others, it is refused.
    known = fullattention.known_of
    given = argparse.Namespace(**{**vars(parsed(again)), "train_epochs": 2})
    assert {row["trained"] for row in known(given).values()} == {"not measured"}
    refused = rf"^{re.escape(str(record))} has \w+ with seed 0 by another recipe: .*"
    for name, value in (("epochs", 2), ("precision", "bfloat16")):
        with pytest.raises(UserError, match=refused + rf"\b{name}\b.* differ;"):
            known(argparse.Namespace(**{**vars(parsed(again)), name: value}))
    for text in ("", "[]", '{"rows": [{"arm": "both", "seed": 0, "search": {}}]}'):
        record.write_text(text)
        with pytest.raises(UserError, match="must name a record of this study"):
            known(parsed(again))


def test_a_run_that_is_over_may_look_at_the_test_set_while_others_go_on() -> None:
    """Every lane has its own seal; outside, none is left."""
    seen: list[str] = []

    def searching() -> Any:
        with test_set_sealed():
            yield
            yield
            with pytest.raises(AssertionError, match="sealed"):
                check_readable(is_test=True)
            seen.append("sealed")

    def training() -> Any:
        with test_set_sealed():
            yield
        check_readable(is_test=True)
        seen.append("open")

    ended = interleave([searching, training], resolve_device("cpu"), 2)
    assert ended == [None, None] and seen == ["open", "sealed"]
    check_readable(is_test=True)
