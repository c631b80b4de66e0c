"""The study of the two phases, rehearsed: stopped and resumed, it ends with a complete record."""

from __future__ import annotations

import json
import re
import shlex
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from softcell.app.cli.main import run as softcell
from softcell.data.splits import check_readable, test_set_sealed
from softcell.engine.interleave import interleave
from softcell.engine.session import resolve_device
from softcell.engine.task import Event, OnEvent, Stepped
from softcell.errors import UserError
from softcell.search import SearchRecipe
from studies import fullattention, recorded
from studies.fullattention import parsed
from studies.runs import Deadline
from tests.helpers.search_toys import write_data

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


PAGE = Path(__file__).parents[2] / "docs/papers/full-attention.md"


def table_vii() -> list[str]:
    """The page's commands for the rows of Table VII, in its order."""
    text = PAGE.read_text(encoding="utf-8").partition("The ablations of Table VII")[2]
    fence = re.search(r"```console\n(.*?)```", text, re.DOTALL)
    assert fence is not None
    return [line.removeprefix("$ softcell ") for line in fence[1].splitlines()]


@pytest.mark.parametrize(("line", "arm"), list(zip(table_vii(), ("tied", "alone", "both"), strict=True)))
def test_the_pages_rows_of_table_vii_are_the_arms_of_the_study(
    line: str, arm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command resolves to the arm's recipe; only the epochs differ, which arms spend equally many of."""
    found: list[SearchRecipe] = []

    class Reached(BaseException):
        pass

    def stop(recipe: SearchRecipe, *_: object, **__: object) -> None:
        found.append(recipe)
        raise Reached

    monkeypatch.setattr("softcell.app.jobs.search", stop)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Reached):
        softcell(shlex.split(line))
    study = fullattention.recipe_of(arm, 0, parsed(["--data", "cifar10"]))
    assert study.pretrain.epochs == (20 if arm == "both" else 0)
    assert study.space_settings["tied"] == (arm == "tied")
    assert replace(found[0], epochs=study.epochs) == study


def test_the_page_claims_no_more_arms_than_the_record_has() -> None:
    record = json.loads((PAGE.parents[2] / "results/fullattention/phases-cifar10.json").read_text())
    trained = {row["arm"] for row in record["rows"] if row["trained"] != "not measured"}
    assert {"both", "alone"} <= trained
    (row,) = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| 80 channels, error")]
    assert ("cells not measured" in row) == ("tied" not in trained)


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


def test_it_stops_resumes_and_records_both_arms_at_equal_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        patch.setattr(recorded, "search_and_train", None)
        fullattention.main(again)
    found = json.loads(record.read_text())
    for row, was in zip(found["rows"], whole["rows"], strict=True):
        row["trained"].pop("seconds"), was["trained"].pop("seconds")
    assert found["rows"] == whole["rows"]
    assert [path.name for path in (tmp_path / "second").iterdir()] == ["alone-toys-0"]

    # What lies in the folder of the runs must be what would be trained there.
    changed = json.loads(record.read_text())
    changed["rows"][1]["trained"] = "not measured"
    changed["rows"][1]["search"]["genotype"] = changed["rows"][0]["search"]["genotype"] | {"cells": flipped(changed)}
    record.write_text(json.dumps(changed))
    with pytest.raises(UserError, match="the training of another architecture"):
        fullattention.main(again)
    changed["rows"][1]["search"]["genotype"] = found["rows"][1]["search"]["genotype"]
    record.write_text(json.dumps(changed))
    with pytest.raises(UserError, match="epochs"):
        fullattention.main([*again, "--train-epochs", "2", "--out", str(tmp_path / "elsewhere")])
    record.write_text(json.dumps(found))

    # Trained by other settings, it is trained again; searched by others, it is refused; nothing is lost.
    known = fullattention.known_of
    elsewhere = {**vars(parsed(again)), "out": tmp_path / "elsewhere"}
    assert all(isinstance(row["trained"], dict) for row in known(Namespace(**elsewhere)).values())
    assert {row["trained"] for row in known(Namespace(**{**elsewhere, "train_epochs": 2})).values()} == {"not measured"}
    with pytest.raises(UserError, match="would lose the training of both with seed 0, by other settings"):
        known(Namespace(**{**vars(parsed(again)), "train_epochs": 2}))
    with pytest.raises(UserError, match="would lose alone with seed 0; write the new record elsewhere"):
        known(Namespace(**{**vars(parsed(again)), "arms": ["both"]}))
    refused = rf"^{re.escape(str(record))} has \w+ with seed 0 by another recipe: .*"
    for name, value in (("epochs", 2), ("precision", "bfloat16")):
        with pytest.raises(UserError, match=refused + rf"\b{name}\b.* differ;"):
            known(Namespace(**{**vars(parsed(again)), name: value}))
    for row in found["rows"]:  # from before there was such a setting
        del row["search"]["recipe"]["collapse"], row["search"]["recipe"]["space_settings"]["norm"]
        del row["trained"]["recipe"]["nesterov"]
    record.write_text(json.dumps(found))
    assert all(isinstance(row["trained"], dict) for row in known(parsed(again)).values())
    record.write_text('{"rows": []}')
    with pytest.raises(UserError, match="no finished search of these arms and seeds"):
        known(parsed(again))
    row = {"arm": "both", "seed": 0, "epochs_done": [1], "trained": "not measured"}
    wrong = [row | {"search": {}}, row | {"search": {**found["rows"][0]["search"], "recipe": "x"}}, {"arm": "both"}]
    for text in ("", "[]", *(json.dumps({"rows": [one]}) for one in wrong)):
        record.write_text(text)
        with pytest.raises(UserError):
            known(parsed(again))


def flipped(record: dict[str, Any]) -> dict[str, Any]:
    """Cells of another architecture than any of the record's."""
    cells: dict[str, Any] = json.loads(json.dumps(record["rows"][1]["search"]["genotype"]["cells"]))
    for cell in cells.values():
        for edge in cell["edges"]:
            edge[2] = "non_local_sa" if edge[2] == "local_sa_k3_h4" else "local_sa_k3_h4"
    return cells


def test_a_run_that_is_over_may_read_the_test_set_while_others_continue() -> None:
    """Every run has its own seal; outside, none is left."""
    seen: list[str] = []

    def steps(count: int) -> Any:
        for _ in range(count):
            yield

    def searching() -> Any:
        with test_set_sealed():
            yield steps(2)
            with pytest.raises(AssertionError, match="sealed"):
                check_readable(is_test=True)
            seen.append("sealed")

    def training() -> Any:
        with test_set_sealed():
            yield steps(1)
        check_readable(is_test=True)
        seen.append("open")

    ended = interleave([searching, training], resolve_device("cpu"), 2)
    assert ended == [None, None] and seen == ["open", "sealed"]
    check_readable(is_test=True)
