"""The study of the two phases, rehearsed: stopped and gone on with, it ends with a complete record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from studies import fullattention

TINY = ["--data", "digits", "--first", "1", "--epochs", "1", "--train-epochs", "1", "--seeds", "1", "--channels", "16"]
TINY += ["--set", "space.candidates=[local_sa_k3_h4, non_local_sa]", "--set", "batch_size=256", "--device", "cpu"]


def test_it_stops_goes_on_and_records_both_arms_at_equal_cost(tmp_path: Path) -> None:
    places = ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]

    def record() -> dict[str, Any]:
        found: dict[str, Any] = json.loads((tmp_path / "out" / "phases-digits.json").read_text())
        return found

    fullattention.main([*TINY, *places, "--minutes", "0"])
    assert {row["search"] for row in record()["rows"]} == {"not measured"}
    fullattention.main([*TINY, *places])
    both, alone = record()["rows"]
    assert both["epochs_done"] == [1, 1] and alone["epochs_done"] == [0, 2]
    assert both["first_phase"]["val_loss"][0] > 0
    for row in (both, alone):
        assert row["trained"]["split"] == "test" and 0 <= row["trained"]["accuracy"] <= 1
    assert both["trained"]["parameters"] > 10_000
    for name in ("train_loss.svg", "train_accuracy.svg", "both-0.svg", "alone-0.svg"):
        assert (tmp_path / "out" / name).exists()
