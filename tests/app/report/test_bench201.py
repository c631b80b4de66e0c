"""Searches compared with the NAS-Bench-201 table: which of them form a group, and which are skipped."""

from __future__ import annotations

import json
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from softcell.app.report import bench201
from softcell.app.report.bench201 import (
    accuracy_rows,
    bench_runs,
    from_dict,
    groups,
    tau_rows,
    to_dict,
    trajectory_bands,
    trajectory_notes,
    trajectory_rows,
    trajectory_svg,
)
from softcell.arch import Cell, Genotype, Pick, sample
from softcell.engine import RunFolder
from softcell.errors import UserError
from softcell.evaluate.nb201 import Nb201Table, load_table
from softcell.search.genotypes import line
from softcell.spaces import build_space
from tests.helpers.bench_tables import write_made
from tests.helpers.report_runs import make_search, make_training, write_lines
from tests.helpers.unsealed import unseal


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Nb201Table:
    return load_table(write_made(tmp_path_factory.mktemp("nb201") / "made.csv"))


def test_runs_that_differ_by_more_than_their_seed_are_not_averaged(table: Nb201Table, tmp_path: Path) -> None:
    for seed in (0, 1):
        make_search(tmp_path / f"short-{seed}", seed=seed, epochs=3)
    make_search(tmp_path / "long", seed=0, epochs=5)
    make_search(tmp_path / "guided", seed=0, epochs=5, recipe={"guide": {"weight": 0.5}, "device": "cuda"})
    make_search(tmp_path / "snas", method="snas", seed=7)
    runs = bench_runs(table, [tmp_path])
    found = {name: sorted(Path(run.label).name for run in own) for name, own in groups(runs).items()}
    assert found == {
        "darts (epochs=3, guide.weight=None)": ["short-0", "short-1"],
        "darts (epochs=5, guide.weight=None)": ["long"],
        "darts (epochs=5, guide.weight=0.5)": ["guided"],
        "snas": ["snas"],
    }
    named = {name: n for name, n, _ in accuracy_rows(table, runs)}
    assert named["darts (epochs=3, guide.weight=None)"] == "2" and named["snas"] == "1"
    means = trajectory_rows(runs, "cifar10_test")
    short = [run.trajectory[0]["cifar10_test"] for run in runs if "short" in run.label]
    assert means[0]["darts (epochs=3, guide.weight=None)"] == pytest.approx(sum(short) / 2)
    assert {"darts (epochs=3, guide.weight=None)", "darts (epochs=5, guide.weight=None)"} & means[4].keys() == {
        "darts (epochs=5, guide.weight=None)"
    }
    # `space_settings.candidates` is not in these recipes, so they have no indicator to rank
    assert tau_rows(table, runs, ("cifar10_test",)) == []


def test_settings_of_device_and_speed_make_no_group(table: Nb201Table, tmp_path: Path) -> None:
    make_search(tmp_path / "a", seed=0, recipe={"device": "cpu", "threads": 1})
    make_search(tmp_path / "b", seed=1, recipe={"device": "cuda", "threads": 8})
    assert list(groups(bench_runs(table, [tmp_path]))) == ["darts"]


def test_a_copied_folder_is_no_second_seed(table: Nb201Table, tmp_path: Path) -> None:
    make_search(tmp_path / "run", seed=3)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    notes: list[str] = []
    (only,) = bench_runs(table, [tmp_path], notes.append)
    assert only.seed == 3 and accuracy_rows(table, [only])[0][1] == "1"
    assert notes == ["run repeats copy (same recipe, seed and architecture): counted once"]


def test_means_over_epochs_are_means_over_all_runs(table: Nb201Table, tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        make_search(tmp_path / f"seed-{seed}", seed=seed, epochs=4)
    unseal(tmp_path / "seed-1")
    lines = (tmp_path / "seed-1/architecture.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "seed-1/architecture.jsonl").write_text("".join(lines[:2]))  # as a search that was stopped early
    runs = bench_runs(table, [tmp_path])
    rows = trajectory_rows(runs, "cifar10_test")
    assert ["darts" in row for row in rows] == [True, True, False, False]
    assert [sum("seed-" in key for key in row) for row in rows] == [3, 3, 2, 2], "what there is stands for itself"
    (note,) = trajectory_notes(runs)
    assert "darts: 1 of 3 searches lack epochs" in note and "for the 2 epochs that all of them have" in note
    assert trajectory_notes([run for run in runs if "seed-1" not in run.label]) == []


@pytest.mark.parametrize("marked", [True, False])
def test_a_trajectory_has_the_epochs_that_were_read_and_no_others(
    table: Nb201Table, tmp_path: Path, marked: bool
) -> None:
    """Of IT-NAS those that were validated: before the first its cell would be all `none`, between two a stale one."""
    folder = make_search(tmp_path / "run", method="itnas", epochs=5, recipe={"validate_every": 2})
    if marked:  # as searches write it; older ones do not
        unseal(folder)
        rows = [json.loads(line) for line in (folder / "architecture.jsonl").read_text().splitlines()]
        write_lines(
            folder / "architecture.jsonl", [{**row, "read": False} if row["epoch"] in (0, 2) else row for row in rows]
        )
    (run,) = bench_runs(table, [folder])
    assert [row["epoch"] for row in run.trajectory] == [1.0, 3.0, 4.0]
    stored = {**to_dict(run), "trajectory": [{"epoch": float(e), "cifar10_test": 10.0} for e in range(5)]}
    recipe = {"method": "itnas", "validate_every": 2, "epochs": 5}
    assert [row["epoch"] for row in from_dict(table, "run", {**stored, "recipe": recipe}).trajectory] == [1, 3, 4]
    assert [row["epoch"] for row in trajectory_rows([run], "cifar10_test")] == [2, 4, 5]


def test_a_band_is_one_standard_deviation_over_the_runs_of_a_group(table: Nb201Table, tmp_path: Path) -> None:
    for seed in (0, 1, 2):
        make_search(tmp_path / f"seed-{seed}", seed=seed, epochs=2)
    make_search(tmp_path / "alone", method="snas", epochs=2)
    runs = bench_runs(table, [tmp_path])
    bands = trajectory_bands(runs, "cifar10_test")
    assert list(bands) == ["darts"], "one run has no deviation"
    for epoch, low, high in bands["darts"]:
        values = [run.trajectory[int(epoch) - 1]["cifar10_test"] for run in runs if run.method == "darts"]
        mean, std = statistics.mean(values), statistics.stdev(values)
        assert (low, high) == pytest.approx((mean - std, mean + std)) and std > 0
    assert [epoch for epoch, *_ in bands["darts"]] == [1, 2]
    drawn, plain = (
        trajectory_svg(runs, "cifar10_test"),
        trajectory_svg([r for r in runs if r.method == "snas"], "cifar10_test"),
    )
    assert drawn.count("fill-opacity") == 1 and "fill-opacity" not in plain


@pytest.mark.parametrize("key", ["val_accuracy", "score"])
def test_samplers_are_followed_by_the_best_so_far(table: Nb201Table, key: str) -> None:
    layout = build_space("nb201").layout()
    cells = [sample(layout, seed) for seed in range(4)]
    scores = [0.1, 3e40, 0.2, 4e40]
    rows = [line(n, cell, **{key: score}) for n, (cell, score) in enumerate(zip(cells, scores, strict=True))]
    best = [cells[i] for i in (0, 1, 1, 3)]
    assert [{name: row[name] for name in row if name != "epoch"} for row in bench201._trajectory(table, rows)] == [
        table.lookup(cell) for cell in best
    ]


def test_a_folder_with_the_name_of_a_method_does_not_replace_the_mean(table: Nb201Table, tmp_path: Path) -> None:
    first, second = (bench_runs(table, [make_search(tmp_path / str(seed), seed=seed)])[0] for seed in (0, 1))
    row = trajectory_rows([replace(first, label="darts"), second], "cifar10_test")[0]
    values = [run.trajectory[0]["cifar10_test"] for run in (first, second)]
    assert row["darts"] == pytest.approx(sum(values) / 2) != values[0] and row["darts/"] == values[0]


def test_other_runs_are_skipped_in_folders_and_refused_by_name(table: Nb201Table, tmp_path: Path) -> None:
    make_search(tmp_path / "sweep/a/search")
    make_training(tmp_path / "sweep/a/train")
    make_training(tmp_path / "sweep/b/train")
    make_search(tmp_path / "sweep/b/search", seed=1, status="interrupted")
    make_search(tmp_path / "sweep/c", recipe={"space": "darts"})
    # resumed after its end: the architecture in the folder is not the last one
    RunFolder.open(make_search(tmp_path / "sweep/d", seed=2)).update(status="running")
    notes: list[str] = []
    assert [Path(run.label).parent.name for run in bench_runs(table, [tmp_path / "sweep"], notes.append)] == ["a"]
    (note,) = notes
    assert "2 × a train run" in note and "a search that is interrupted" in note and "in space 'darts'" in note
    assert "a search that is running" in note
    for place, what in (("a/train", "a train run"), ("b/search", "interrupted"), ("c", "in space 'darts'")):
        with pytest.raises(UserError, match=f"must be a finished search in space nb201, but it is .*{what}"):
            bench_runs(table, [tmp_path / "sweep", tmp_path / "sweep" / place])
    with pytest.raises(UserError, match="no finished search in space nb201"):
        bench_runs(table, [tmp_path / "sweep/b"])


def test_a_search_of_smaller_cells_is_refused_by_its_folder(table: Nb201Table, tmp_path: Path) -> None:
    make_search(tmp_path / "good")
    folder = unseal(make_search(tmp_path / "small", seed=1))
    cell = Cell((Pick(0, 1, "nor_conv_3x3"), Pick(0, 2, "nor_conv_3x3"), Pick(1, 2, "none")), (2,))
    Genotype("nb201", {"cell": cell}).save(folder / "genotype.json")
    with pytest.raises(UserError, match=r"small: NAS-Bench-201 has cells of 4 nodes .* ends in 2"):
        bench_runs(table, [tmp_path])


def test_a_run_is_the_same_from_plain_data(table: Nb201Table, tmp_path: Path) -> None:
    (run,) = bench_runs(table, [make_search(tmp_path / "run")])
    again = from_dict(table, run.label, to_dict(run))
    assert replace(run, settings={}, genotype=again.genotype) == again
    assert table.lookup(again.genotype) == run.accuracies
