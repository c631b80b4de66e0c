"""The pictures of a run: which are drawn, and that numbers in them are the recorded ones."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from softcell.app import jobs
from softcell.app.report.heatmaps import evenly
from softcell.arch import Choice, Layout, StrongestEach, Table, sample
from softcell.evaluate import TrainResult
from softcell.evaluate import resolve as resolve_training
from softcell.search import SearchResult, resolve
from softcell.spaces import build_space

TABLE = Table("cell", (Choice(0, 1, ("a", "b")), Choice(0, 2, ("a",))), (2,))
LAYOUT = Layout("toy", (TABLE,), ("cell",), StrongestEach())


def test_the_entropy_of_every_edge_is_drawn_over_the_epochs(tmp_path: Path) -> None:
    lines = [
        {"epoch": epoch, "tables": {"cell": [[p, 1 - p], [1.0, 0.0]]}, "genotype": {}}
        for epoch, p in enumerate((0.5, 0.9, 1.0))
    ]
    (tmp_path / "architecture.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    jobs.draw_architecture(tmp_path, LAYOUT, "title")
    text = (tmp_path / "entropy-cell.svg").read_text()
    second = -0.9 * math.log(0.9) - 0.1 * math.log(0.1)
    for part in ("in → 1", "in → out", "epoch 1", "epoch 3", f"{math.log(2):.2f}", f"{second:.2f}"):
        assert part in text, part


def test_a_long_search_is_shown_by_epochs_spread_evenly() -> None:
    assert evenly(3, jobs.MAX_COLUMNS) == [0, 1, 2]
    spread = evenly(150, jobs.MAX_COLUMNS)
    assert (spread[0], spread[-1], len(spread)) == (0, 149, jobs.MAX_COLUMNS)
    assert spread == sorted(set(spread))


def test_children_and_temperature_are_drawn_if_measured(tmp_path: Path) -> None:
    rows = [
        {"epoch": e, "train_accuracy": 0.5, "val_accuracy": 0.4, "val_split": "validation", "train_loss": 1.0}
        for e in range(2)
    ]
    jobs.draw_curves(tmp_path, rows, "title")
    assert "child" not in (tmp_path / "curves.svg").read_text()
    assert not (tmp_path / "temperature.svg").exists()
    more = [{**row, "child_accuracy": 0.3, "temperature": 1.0, "expected_parameters": 5.0} for row in rows]
    jobs.draw_curves(tmp_path, more, "title")
    assert "child, validation" in (tmp_path / "curves.svg").read_text()
    assert (tmp_path / "temperature.svg").exists()
    assert (tmp_path / "cost.svg").exists()


@pytest.mark.parametrize("kind", ["search", "train"])
@pytest.mark.parametrize("left", ["nothing", "first", "old"])
def test_a_run_killed_before_its_drawings_gets_them_when_it_is_resumed(tmp_path: Path, kind: str, left: str) -> None:
    folder, sizes = tmp_path / "run", {"cells_per_stage": 1, "channels": 2}
    small = {"data": "digits", "epochs": 1, "batch_size": 512, "space_settings": sizes}

    def again() -> SearchResult | TrainResult:
        begun = jobs.has_run(folder)
        if kind == "search":
            return jobs.search(resolve({**small, "method": "darts", "space": "nb201"}), folder, resume=begun)
        cell = sample(build_space("nb201", sizes).layout(), 0)
        return jobs.train(cell, resolve_training(cell, small), folder, resume=begun)

    again()
    drawn = {file.name: file.read_bytes() for file in (*folder.glob("*.svg"), folder / "report.html")}
    assert {"genotype.svg", "curves.svg", "report.html"} <= {*drawn}
    if left == "old":  # of an interrupted run that was then completed
        (folder / "report.html").write_text("interrupted")
        os.utime(folder / "report.html", ns=(0, 0))
    else:
        for name in drawn:
            if left == "nothing" or name != "genotype.svg":
                (folder / name).unlink()
    again()
    assert {name: (folder / name).read_bytes() for name in drawn} == drawn
    times = {name: (folder / name).stat().st_mtime_ns for name in drawn}
    again()
    assert {name: (folder / name).stat().st_mtime_ns for name in drawn} == times, "complete ones are kept"
