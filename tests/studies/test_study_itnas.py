"""The commands that make the records of IT-NAS: they go on, look up, and tell positions from content."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from search_toys import write_data

from softcell.arch import Cell, Genotype, notation
from softcell.errors import UserError
from softcell.spaces import build_space
from studies import itnas_nb201 as nb201
from studies import itnas_positions as positions


def test_searches_of_several_seeds_go_on_and_are_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = build_space("nb201", {}).layout()
    lines = ["arch,cifar10_valid,cifar10_test,params,cifar10_test_nats"]
    lines += [
        f"{notation.to_nb201(Genotype('nb201', {'cell': Cell(picks, (3,))}))},{i / 200},{90 - i / 200},1,7"
        for i, picks in enumerate(layout.rule.enumerate(layout.tables[0]))  # type: ignore[attr-defined]
    ]
    table = tmp_path / "table.csv"
    table.write_text("\n".join(lines) + "\n")
    data = write_data(tmp_path / "data.npz", train=32)
    given = ["--data", str(data), "--scale", "small", "--epochs", "1", "--device", "cpu", "--table", str(table)]
    given += ["--methods", "itnas", "--seeds", "2", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    for minutes, finished in (("0", False), ("60", True)):
        monkeypatch.setattr(sys, "argv", ["evidence", *given, "--minutes", minutes])
        nb201.main()
        record = json.loads((tmp_path / "nb201-data.json").read_text())
        if not finished:
            assert record["summary"]["itnas"] == "not measured"
            continue
        assert record["optimum"] == {"cifar10_valid": 15624 / 200, "cifar10_test": 90.0}
        found = record["summary"]["itnas"]["cifar10_test"]
        assert found["n"] == 2
        for row in record["rows"]:
            line = next(line for line in lines if line.startswith(row["architecture"] + ","))
            assert row["accuracies"]["cifar10_test"] == float(line.split(",")[2])
    with pytest.raises(UserError, match="no file"):
        nb201.read_table(tmp_path / "absent.csv")


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
    positions.main()
    record = json.loads((tmp_path / "positions-data.json").read_text())
    assert [(row["task"], row["order"]) for row in record["rows"]] == [
        (task, order) for task in ("cell", "planted") for order in ("given", "reversed")
    ]
    for row in record["rows"]:
        whole, alone, content = (torch.tensor(row["readings"][kind]) for kind in positions.KINDS)
        assert not torch.equal(whole, alone) and not torch.equal(whole, content)
        assert 0 <= row["result"]["variance_between_images"] <= 1
    assert "same_slot_in_both_orders" in record["summary"]["planted"]


def test_readings_are_compared_edge_by_edge() -> None:
    whole = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]])
    found = positions.compare({"whole": whole, "positions": whole.flip(1), "content": whole * 2})
    assert (found["tau_positions"], found["tau_content"]) == (pytest.approx(-1), pytest.approx(1))
    assert (found["same_winner_positions"], found["same_winner_content"]) == (0, 1)
