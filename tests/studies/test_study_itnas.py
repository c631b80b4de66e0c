"""The commands that make the records of IT-NAS: they resume, look up, and separate positions from content."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from softcell.arch import Cell, Genotype, notation
from softcell.errors import UserError
from softcell.evaluate.nb201 import COLUMNS, OPERATIONS, load_table
from softcell.search import resolve
from softcell.spaces import build_space
from studies import itnas_nb201 as nb201
from studies import itnas_positions as positions
from studies import itnas_readings as readings
from tests.helpers.search_toys import write_data


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cells: CIFAR-10's test accuracies fall with the number, the others rise."""
    layout = build_space("nb201", {}).layout()
    lines = [",".join(("arch", *COLUMNS, "cifar10_test_nats"))]
    for i, picks in enumerate(layout.rule.enumerate(layout.tables[0])):  # type: ignore[attr-defined]
        text = notation.to_nb201(Genotype("nb201", {"cell": Cell(picks, (3,))}))
        values = [90 - i / 200 if column == "cifar10_test" else i / 200 for column in COLUMNS]
        lines.append(",".join((text, *map(str, values), "7")))
    path = tmp_path_factory.mktemp("nb201") / "table.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.exhaustive
def test_searches_resume_are_looked_up_and_ranked_and_records_grow(
    tmp_path: Path, table: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = load_table(table)
    monkeypatch.setattr(nb201, "load_table", lambda path: known if path == table else load_table(path))
    data = write_data(tmp_path / "data.npz", train=32)
    given = ["--data", str(data), "--scale", "small", "--epochs", "2", "--device", "cpu", "--table", str(table)]
    given += ["--set", "space.cells_per_stage=1", "--set", "space.channels=2", "--methods", "itnas", "darts"]
    given += ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]

    def record() -> dict[str, Any]:
        found: dict[str, Any] = json.loads((tmp_path / "nb201-data.json").read_text())
        return found

    nb201.main([*given, "--seeds", "0", "--minutes", "0"])
    assert record()["summary"]["accuracies"]["itnas"] == "not measured" and record()["summary"]["taus"] == []
    nb201.main([*given, "--seeds", "0"])
    first = record()
    assert first["optimum"]["cifar10_test"] == 90.0 and first["optimum"]["cifar10_valid"] == 15624 / 200
    for row in first["rows"]:
        assert row["accuracies"] == known.lookup(notation.parse(row["architecture"]))
        assert [step["epoch"] for step in row["trajectory"]] == [0, 1]
        assert row["trajectory"][-1]["cifar10_test"] == row["accuracies"]["cifar10_test"]
        own = "attention" if row["method"] == "itnas" else "alpha"
        torch.testing.assert_close(
            torch.tensor(row["indicators"][own]), torch.tensor(row["indicator"]), rtol=1e-5, atol=1e-7
        )
        assert row["taus"][own]["derives"] == row["architecture"]
    named = {(t["supernet"], t["indicator"]) for t in first["summary"]["taus"]}
    assert {(s, i) for s in ("itnas", "darts") for i in ("attention", "alpha", "perturbation")} <= named
    assert {("untrained", "naswot"), ("untrained", "synflow")} <= named
    (row,) = (row for row in first["rows"] if row["method"] == "itnas")
    own = row["readings"]["mean, last pass"]
    assert own["architecture"] == row["architecture"] and own["accuracies"] == row["accuracies"]
    lines = readings.read_lines(tmp_path / "attention-data-0.jsonl")
    assert [line["epoch"] for line in lines] == [0, 1]
    assert readings.selected(known, lines) == row["readings"], "from the file beside the record alone"
    last = torch.tensor(lines[-1]["tables"]["cell"]["mean"])[-1].argmax(1).tolist()
    picks = notation.from_nb201(row["readings"]["last, last pass"]["architecture"]).cells["cell"].picks
    assert [pick.op for pick in picks] == [OPERATIONS[k] for k in last]
    for split in ("valid", "test"):
        assert (tmp_path / f"trajectory-data-{split}.svg").is_file()

    shutil.rmtree(tmp_path / "runs")  # another machine has the record alone
    monkeypatch.setattr("studies.itnas_taus.zero_cost", None)  # the record has what Zero-Cost-PT says
    nb201.main([*given, "--seeds", "1"])
    second = record()
    assert second["zero_cost"] == first["zero_cost"]
    assert [(r["method"], r["seed"]) for r in second["rows"]] == [(m, s) for m in ("itnas", "darts") for s in (0, 1)]
    assert [r for r in second["rows"] if r["seed"] == 0] == first["rows"]
    assert second["summary"]["accuracies"]["darts"]["cifar10_test"]["n"] == 2
    assert "itnas (n=2; 2/2 done)" in capsys.readouterr().out
    (tmp_path / "runs/itnas-data-1/indicators.json").unlink()
    (tmp_path / "runs/itnas-data-1/checkpoint.bin").unlink()
    nb201.main([*given, "--seeds", "1"])
    assert record()["rows"] == second["rows"], "what was looked at stays where the supernet is gone"
    with pytest.raises(UserError, match="another epochs"):
        nb201.main([*given, "--seeds", "1", "--epochs", "3"])
    with pytest.raises(UserError, match="does not exist"):
        nb201.main(["--table", str(tmp_path / "absent.csv")])
    with pytest.raises(UserError, match="in this order"):
        nb201.main([*given, "--set", "space.candidates=[none, skip_connect]"])


def test_positions_and_content_are_read_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_data(tmp_path / "data.npz", train=32)
    given = [
        "--data",
        str(data),
        "--epochs",
        "1",
        "--seeds",
        "1",
        "--runs",
        str(tmp_path / "runs"),
        "--out",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", ["positions", *given])
    small = {"cells_per_stage": 1, "channels": 2}
    monkeypatch.setattr(positions, "resolve", lambda recipe: resolve(recipe, {"space_settings": small}))
    positions.main()
    record = json.loads((tmp_path / "positions-data.json").read_text())
    assert [(row["task"], row["order"]) for row in record["rows"]] == [
        (task, order) for task in ("cell", "noise", "planted") for order in ("given", "reversed")
    ]
    for row in record["rows"]:
        whole, alone, content = (torch.tensor(row["readings"][kind]) for kind in positions.KINDS)
        assert not torch.equal(whole, alone) and not torch.equal(whole, content)
        assert 0 <= row["result"]["variance_between_images"] <= 1
    assert "same_slot_in_both_orders" in record["summary"]["planted"]
    for row in record["rows"]:
        if row["task"] == "noise":
            at = row["candidates"].index("noise")
            mean = sum(edge[at] for edge in row["readings"]["whole"]) / 6
            assert row["result"]["noise_over_uniform"] == pytest.approx(4 * mean)
            assert row["result"]["noise_wins"] == row["winners"].count("noise") / 6


def test_winners_are_compared_over_seeds_of_one_order() -> None:
    rows = [
        {"order": order, "winners": winners, "result": {"x": 0.0}}
        for order, winners in (("given", ["a", "b"]), ("reversed", ["a", "a"]), ("given", ["a", "c"]))
    ]
    assert positions.summarise(rows)["same_candidate_over_seeds"] == {"n": 1, "mean": 0.5, "std": None}


def test_readings_are_compared_edge_by_edge() -> None:
    whole = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]])
    found = positions.compare({"whole": whole, "positions": whole.flip(1), "content": whole * 2})
    assert (found["tau_positions"], found["tau_content"]) == (pytest.approx(-1), pytest.approx(1))
    assert (found["same_winner_positions"], found["same_winner_content"]) == (0, 1)


def test_a_record_older_than_a_setting_is_still_of_its_default(table: Path) -> None:
    """The shipped record has searches from before `method.token_norm`: they had the norm."""
    record = Path(__file__).parents[2] / "results" / "itnas" / "nb201-cifar10.json"
    given = ["--table", str(table), "--scale", "paper", "--set", "validate_every=5"]
    found, _ = nb201.read_before(record, nb201._options(given))
    assert {seed for method, seed in found if method == "itnas"} == {0, 1, 2}
    with pytest.raises(UserError, match="another method_settings"):
        nb201.read_before(record, nb201._options([*given, "--set", "method.token_norm=false"]))


def test_settings_of_the_method_match_it_nas(table: Path) -> None:
    options = nb201._options(["--table", str(table), "--set", "method.token_norm=false"])
    assert nb201.recipe_of("itnas", 0, options).method_settings["token_norm"] is False
    for method in ("darts", "snas", "entrannas"):
        assert "token_norm" not in nb201.recipe_of(method, 0, options).method_settings
