"""docs/results.md shows the records in results/ as they are."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scripts import results_page
from softcell.app.reproduce.papers import PAPERS, PaperTable
from softcell.app.reproduce.record import columns_of, verdict

ROOT = Path(__file__).parents[2]


def test_the_page_matches_the_records() -> None:
    same = results_page.PAGE.read_text(encoding="utf-8") == results_page.page()
    assert same, "records or plans changed: run `python scripts/results_page.py` and read docs/results.md"


def test_the_page_links_every_record_of_the_papers() -> None:
    page = results_page.PAGE.read_text(encoding="utf-8")
    files = [path for key in PAPERS for path in (ROOT / "results" / key).rglob("*.json")]
    files += (ROOT / "results" / "nb201").glob("*.json")  # its rows are parts of that record
    records = {path.relative_to(ROOT).as_posix() for path in files}
    assert records == set(re.findall(r"\.\./(results/[\w/.-]+\.json)", page))


def test_numbers_on_the_page_match_a_record() -> None:
    """Read independently of the script: SNAS's children, and the networks of full-attention NAS."""
    page = results_page.PAGE.read_text(encoding="utf-8")
    children = json.loads((ROOT / "results/snas/children-cifar10.json").read_text())["summary"]["snas-mild"]
    accuracy = 100 * children["child_accuracy"]["mean"]
    assert f"{accuracy:.1f} ± {100 * children['child_accuracy']['std']:.1f} % (2)" in page
    rows = json.loads((ROOT / "results/fullattention/phases-cifar10.json").read_text())["rows"]
    both = [row["trained"]["accuracy"] for row in rows if row["arm"] == "both"]
    assert f"{100 * sum(both) / len(both):.2f} ±" in page


def made_record(table: PaperTable) -> dict[str, object]:
    """A record in which the first row is measured and one search was stopped."""
    key = list(columns_of(table))[-1]
    rows = [
        {"name": row.name, "published": dict(row.published), "networks": {}, "seeds": {}, "stopped": []}
        for row in table.rows
    ]
    rows[0]["networks"] = {key: {"n": 2, "mean": 0.05, "std": 0.01, "values": [0.04, 0.06]}}
    rows[1]["stopped"] = ["search other, seed 0: interrupted after 3 of 150 epochs"]
    return {
        "rows": rows,
        "verdict": verdict(table, rows),
        "complete": False,
        "date": "2026-01-02T03:04:05+00:00",
        "git": {"commit": "0123456789", "dirty": False},
        "hardware": {"gpus": ["A GPU"], "cores": 2},
        "runs": {"a": {"status": "interrupted", "kind": "search"}},
    }


def test_a_new_record_appears_with_what_was_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paper = PAPERS["snas"]
    table = next(table for table in paper.tables if table.number == "2")
    (tmp_path / "snas").mkdir()
    (tmp_path / "snas" / "table-2.json").write_text(json.dumps(made_record(table)))
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    section = results_page.plan_section(paper, table)
    assert "5.00 ± 1.00 (2)" in section
    assert "interrupted after 3 of 150 epochs" in section
    assert "A GPU, commit 0123456, 2026-01-02; not complete" in section
    assert "**Not measured: SNAS, moderate and random cells.**" in section


def test_the_first_screen_of_the_readme_links_the_results() -> None:
    first = (ROOT / "README.md").read_text(encoding="utf-8").partition("## What it does")[0]
    assert "(docs/results.md)" in first
