"""Groups, tests and sentences: numbers against published tables and scipy, claims against what n allows."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from scipy import stats

from softcell.app.report.compare import (
    HEADER,
    Comparison,
    compare,
    group_row,
    groups_csv,
    holm,
    markdown,
    pairs_csv,
    runs_csv,
    summarise,
    welch,
)
from softcell.app.report.page import write_report
from softcell.app.report.runs import find_runs, read_runs
from tests.helpers.report_runs import make_search, make_training
from tests.helpers.unsealed import unsealed

A, B = [0.91, 0.93, 0.92, 0.95], [0.85, 0.90, 0.84]


def test_welch_is_scipys() -> None:
    found, expected = welch(A, B), stats.ttest_ind(A, B, equal_var=False)
    assert found is not None
    assert found.p == pytest.approx(expected.pvalue)
    low, high = expected.confidence_interval(0.95)
    assert found.interval == pytest.approx((low, high))
    assert found.difference == pytest.approx(sum(A) / 4 - sum(B) / 3)


def test_no_test_without_spread_or_with_one_value() -> None:
    assert welch(A, [0.9]) is None
    assert welch([0.9, 0.9], [0.8, 0.8]) is None
    assert welch([0.1 + 0.2] * 3, [0.8, 0.8]) is None
    one_sided = welch([0.9, 0.9], [0.8, 0.7])
    assert one_sided is not None and 0 < one_sided.p < 1


def test_holm_steps_down() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])  # 3 x 0.01; 2 x 0.03; not below it
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_summary_has_the_sample_deviation_and_students_interval() -> None:
    found = summarise([1.0, 2.0, 3.0])
    assert (found.n, found.mean, found.std) == (3, 2.0, 1.0)
    assert found.interval == pytest.approx((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5))
    assert summarise([1.0]).std is None


def comparison(folder: Path) -> Comparison:
    return compare(read_runs(find_runs([folder])))


def test_runs_that_differ_by_seed_are_one_group(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.95, 0.96, 0.97)):
        make_training(tmp_path / f"a{seed}", method="snas", seed=seed, accuracy=accuracy)
        make_training(tmp_path / f"b{seed}", method="darts", seed=seed, accuracy=accuracy - 0.2)
        make_training(tmp_path / f"c{seed}", method="darts", seed=seed, accuracy=accuracy - 0.2, epochs=9)
    found = comparison(tmp_path)
    assert [(g.name, len(g.runs)) for g in found.groups] == [
        ("darts in nb201 (epochs=3)", 3),
        ("darts in nb201 (epochs=9)", 3),
        ("snas in nb201", 3),
    ]
    said = {(p.first.name, p.second.name): p.sentence for p in found.pairs}
    clear = said["darts in nb201 (epochs=3)", "snas in nb201"]
    assert clear.startswith("snas in nb201 is 20.00 points higher than darts in nb201 (epochs=3)")
    assert "a significant difference at the 5 % level" in clear and "corrected for 3 comparisons" in clear
    assert "Caution" not in clear
    same = said["darts in nb201 (epochs=3)", "darts in nb201 (epochs=9)"]
    assert "no significant difference, which does not show that they are equal" in same
    assert "Caution: they also differ in epochs 3 and 9" in same


def test_names_of_groups_have_settings_as_users_type_them_and_short_numbers(tmp_path: Path) -> None:
    for name, channels, time in (("a", 8, 4.930789715452702), ("b", 12, 19.398369483787132), ("c", 12, 19.39839)):
        make_training(tmp_path / name, settings={"space_settings": {"channels": channels}, "time": time})
    assert [group.name for group in comparison(tmp_path).groups] == [
        "darts in nb201 (space.channels=8, time=4.931)",
        "darts in nb201 (space.channels=12, time=19.398369483787132)",  # rounded, this and the next would be 19.4
        "darts in nb201 (space.channels=12, time=19.39839)",
    ]


def test_names_of_groups_list_no_settings_that_follow_from_the_recipe(tmp_path: Path) -> None:
    for name, recipe in (
        ("a", {"recipe": "fast", "epochs": 0, "lr": 0.07, "cutout": 0}),
        ("b", {"epochs": 2, "lr": 0.05, "cutout": 2}),
        ("c", {"epochs": 9, "lr": 0.05, "cutout": 2}),
    ):
        make_training(tmp_path / name, settings=recipe)
    assert {group.name for group in comparison(tmp_path).groups} == {
        "darts in nb201 (recipe=fast)",
        "darts in nb201 (recipe=small, epochs=2)",
        "darts in nb201 (recipe=small, epochs=9)",
    }


def test_values_that_differ_are_never_shown_alike(tmp_path: Path) -> None:
    limits = (("a", 123456789, 19.398369483787132), ("b", 123456790, 19.39839), ("c", 5, 4.930789715452702))
    for name, limit, time in limits:
        make_training(tmp_path / name, settings={"resource.max_params": limit, "time": time})
    found = comparison(tmp_path)
    names = [group.name for group in found.groups]
    assert all(any(f"max_params={limit}, " in name for name in names) for _, limit, _ in limits)
    said = [pair.sentence.partition("Caution: ")[2] for pair in found.pairs]
    assert said[0].endswith("resource.max_params 123456789 and 123456790, time 19.398369483787132 and 19.39839.")
    assert said[1].endswith("resource.max_params 123456789 and 5, time 19.4 and 4.931.")


def test_networks_of_different_searches_are_never_one_group(tmp_path: Path) -> None:
    """Searched longer, with a teacher, or taken from another epoch: trained alike, they still are other experiments."""
    longer, guided = {"settings": {"epochs": 9}}, {"settings": {"guide.teacher": "resnet18"}}
    for seed, accuracy in enumerate((0.95, 0.96, 0.97)):
        for name, about in (("a", {}), ("b", longer), ("c", guided), ("d", {"epoch": 2, "epochs": 2})):
            make_training(tmp_path / f"{name}{seed}", method="snas", seed=seed, accuracy=accuracy, about=about)
        make_training(tmp_path / f"e{seed}", seed=seed, accuracy=accuracy, about={"settings": {"weights.lr": 0.1}})
    found = comparison(tmp_path)
    keys = "search.epochs", "search.guide.teacher", "search.epoch"
    names = {
        "snas in nb201 (" + ", ".join(f"{k}={v}" for k, v in zip(keys, values, strict=True)) + ")"
        for values in (
            ("default", "default", "default"),
            ("9", "default", "default"),
            ("default", "resnet18", "default"),
            ("default", "default", "2"),
        )
    }
    assert {g.name for g in found.groups} == {*names, "darts in nb201"}
    assert all(len(g.runs) == 3 for g in found.groups)
    said = [p.sentence for p in found.pairs if p.first.method == "darts" and "search.epochs=9" in p.second.name]
    assert len(said) == 1 and "Caution: they also differ in search.epochs default and 9." in said[0]
    assert "weights.lr" not in said[0], "methods have their own"


def test_one_seed_is_never_a_result(tmp_path: Path) -> None:
    make_training(tmp_path / "a", method="snas", accuracy=0.99)
    make_training(tmp_path / "b", method="darts", accuracy=0.5)
    (pair,) = comparison(tmp_path).pairs
    assert pair.test is None
    assert "at least 2 runs are needed, but n = 1 for darts in nb201 and snas in nb201" in pair.sentence


def test_pairs_that_cannot_be_compared_are_named_once(tmp_path: Path) -> None:
    for method in ("snas", "darts", "random"):
        make_training(tmp_path / method, method=method, accuracy=0.9)
    found = comparison(tmp_path)
    assert len(found.pairs) == 3
    (said,) = found.sentences
    assert (
        said.startswith("3 pairs of groups cannot be compared: at least 2 runs are needed, but n = 1 for")
        and "snas in nb201" in said
    )
    for seed in (1, 2):
        make_training(tmp_path / f"snas{seed}", method="snas", seed=seed, accuracy=0.9 + seed / 100)
        make_training(tmp_path / f"darts{seed}", method="darts", seed=seed, accuracy=0.8 + seed / 100)
    found = comparison(tmp_path)
    assert len(found.sentences) == 2 and "by Welch's t-test" in found.sentences[0]
    assert found.sentences[1].startswith("2 pairs")


def test_the_same_run_twice_counts_once(tmp_path: Path) -> None:
    make_training(tmp_path / "a", accuracy=0.9)
    make_training(tmp_path / "copy", accuracy=0.9)
    found = comparison(tmp_path)
    assert [len(group.runs) for group in found.groups] == [1]
    assert "copy repeats a (same recipe, seed and architecture): counted once" in found.notes


def test_different_kinds_of_accuracy_are_never_compared(tmp_path: Path) -> None:
    for seed in range(2):
        make_training(tmp_path / f"t{seed}", seed=seed, accuracy=0.9 + seed / 50)
        make_search(tmp_path / f"s{seed}", seed=seed, accuracy=0.8 + seed / 50)
        make_search(tmp_path / f"o{seed}", seed=seed, accuracy=0.8 + seed / 50, data="other")
    child = json.loads((tmp_path / "s1" / "run.json").read_text())
    child["results"]["child_accuracy"] = 0.5
    (tmp_path / "s1" / "run.json").write_text(json.dumps(unsealed(child)))
    found = comparison(tmp_path)
    assert len({(g.measure, g.data) for g in found.groups}) == 4
    assert found.pairs == ()
    assert any("never compared" in note for note in found.notes)


def test_supernets_with_recalibrated_and_with_running_statistics_are_never_compared(tmp_path: Path) -> None:
    for seed in range(2):
        make_search(tmp_path / f"d{seed}", seed=seed, accuracy=0.8 + seed / 50)
        make_search(tmp_path / f"g{seed}", seed=seed, accuracy=0.6 + seed / 50, method="gdas")
        file = tmp_path / f"g{seed}" / "run.json"
        manifest = json.loads(file.read_text())
        manifest["results"]["val_accuracy_bn"] = manifest["results"]["val_accuracy"]
        file.write_text(json.dumps(unsealed(manifest)))
    found = comparison(tmp_path)
    assert [group.measure for group in found.groups] == [
        "supernet, BatchNorm recalibrated, validation split",
        "supernet, validation split",
    ]
    assert found.pairs == ()
    for seed in range(2):  # earlier versions stated both, and the first was measured with running statistics
        file = tmp_path / f"g{seed}" / "run.json"
        manifest = json.loads(file.read_text())
        manifest["results"]["val_accuracy_bn"] += 0.1
        file.write_text(json.dumps(unsealed(manifest)))
    assert {group.measure for group in comparison(tmp_path).groups} == {"supernet, validation split"}


def test_top_5_is_shown_if_all_runs_of_a_group_have_it(tmp_path: Path) -> None:
    """Older runs have none: their group says so and keeps its accuracy."""
    for seed, top5 in ((0, 0.875), (1, 0.9375)):
        make_training(tmp_path / f"new{seed}", seed=seed, accuracy=0.5 + seed / 50)
        make_training(tmp_path / f"old{seed}", seed=seed, accuracy=0.5 + seed / 50, method="snas")
        manifest = json.loads((tmp_path / f"new{seed}" / "run.json").read_text())
        manifest["results"]["top5"] = top5
        (tmp_path / f"new{seed}" / "run.json").write_text(json.dumps(unsealed(manifest)))
    found = comparison(tmp_path)
    column = HEADER.index("top-5, %")
    assert {group.method: group_row(group)[column] for group in found.groups} == {"darts": "90.62", "snas": "–"}
    assert "0.90625" in groups_csv(found) and "0.9375" in runs_csv(found)
    page = write_report([tmp_path / "new0"], tmp_path / "page.html").read_text()
    assert "top-5" in page and "87.5" in page


def test_unfinished_runs_are_named_and_not_counted(tmp_path: Path) -> None:
    make_training(tmp_path / "a")
    make_search(tmp_path / "half", status="interrupted")
    found = comparison(tmp_path)
    assert "half: status interrupted; not counted" in found.notes


def test_groups_of_one_seed_are_named(tmp_path: Path) -> None:
    for k, accuracy in enumerate((0.9, 0.8)):
        make_training(tmp_path / f"f{k}", seed=k, accuracy=accuracy)
        make_training(tmp_path / f"r{k}", method="random", seed=k + 5, accuracy=accuracy - 0.1)
        manifest = json.loads((tmp_path / f"r{k}" / "run.json").read_text())
        manifest["seed"] = manifest["recipe"]["seed"] = 0
        (tmp_path / f"r{k}" / "run.json").write_text(json.dumps(unsealed(manifest)))
    (pair,) = comparison(tmp_path).pairs
    assert "All runs of random draw in nb201 share one seed, so they vary by architecture only." in pair.sentence


def test_tables_have_the_same_numbers(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.9, 0.92)):
        make_training(tmp_path / f"a{seed}", method="snas", seed=seed, accuracy=accuracy)
        make_training(tmp_path / f"b{seed}", method="=1+1|`x`", seed=seed, accuracy=accuracy - 0.1)
    found = comparison(tmp_path)
    first, second = list(csv.DictReader(io.StringIO(groups_csv(found))))
    assert (float(second["mean"]), float(second["std"])) == pytest.approx((0.91, 0.0002**0.5))
    assert (second["n"], second["seeds"], second["runs"]) == ("2", "0 1", "a0 a1")
    assert first["method"].startswith("'=")  # no formula for a spreadsheet
    (pair,) = list(csv.DictReader(io.StringIO(pairs_csv(found))))
    assert float(pair["difference"]) == pytest.approx(-0.1)
    assert len(list(csv.DictReader(io.StringIO(runs_csv(found))))) == 4
    text = markdown(found)
    assert "| snas in nb201 | 2 | 91.00 | 1.41 |" in text
    assert "=1+1\\|\\`x\\`" in text
    assert {line.replace("\\|", "").count("|") for line in text.splitlines() if line.startswith("|")} == {10}


def test_random_draws_get_no_warning_about_search_settings(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.9, 0.92)):
        about = {"settings": {"epochs": 9}}
        make_training(tmp_path / f"found{seed}", method="snas", seed=seed, accuracy=accuracy, about=about)
        make_training(tmp_path / f"drawn{seed}", method="random", seed=seed + 5, accuracy=accuracy - 0.1)
    (pair,) = comparison(tmp_path).pairs
    assert "random draw" in pair.sentence and "Caution" not in pair.sentence


def test_no_interval_is_wider_than_accuracies_can_differ(tmp_path: Path) -> None:
    for seed, accuracy in enumerate((0.1, 0.9)):
        make_training(tmp_path / f"a{seed}", method="snas", seed=seed, accuracy=accuracy)
        make_training(tmp_path / f"b{seed}", method="darts", seed=seed, accuracy=accuracy / 2)
    (pair,) = comparison(tmp_path).pairs
    assert pair.test is not None and pair.test.interval[0] < -1 < 1 < pair.test.interval[1]
    assert "95 % interval -100.00 to +100.00" in pair.sentence
