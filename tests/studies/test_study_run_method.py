"""The study of `softcell run`'s method: equal conditions for all, and nothing measured twice."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from softcell.arch import notation
from studies import run_method


def test_methods_share_images_and_training_and_finished_rows_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "rows.jsonl"
    given = ["--images", "40", "--held", "20", "--channels", "2", "--search", "1", "--epochs", "1", "--seeds", "1"]
    monkeypatch.setattr(sys, "argv", ["run_method", *given, "--record", str(record)])
    searched: list[str] = []
    found_by_search = run_method.found_by_search

    def noted(options: Any, subset: Path, folder: Path, seed: int, method: str) -> dict[str, Any]:
        searched.append(method)
        return found_by_search(options, subset, folder, seed, method)

    monkeypatch.setattr(run_method, "found_by_search", noted)
    run_method.main()
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert [row["method"] for row in rows] == list(run_method.METHODS) == ["snas", "drnas", "random"]
    assert all("none" not in row["cell"] for row in rows), "the candidates of softcell run"
    assert all(notation.from_nb201(row["cell"]) for row in rows)
    assert [row["search_cpu_seconds"] > 0 for row in rows] == [True, True, False]
    run_method.main()
    assert len(record.read_text().splitlines()) == 3 and len(searched) == 2, "finished rows are not repeated"
    assert capsys.readouterr().out.count("standard error") == 6
