"""The table of all methods in NAS-Bench-201: one recipe, one file per search, collected by many commands."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from softcell.arch import notation
from softcell.engine.interleave import Running, Steps, interleave
from softcell.engine.task import EpochEnded, Event, Note
from softcell.errors import UserError
from softcell.spaces import build_space
from studies import nb201
from studies.runs import PeakMemory, Sharing, in_turns, sharing_of
from tests.helpers.bench_tables import write_made
from tests.helpers.search_toys import write_data


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_made(tmp_path_factory.mktemp("nb201") / "table.csv")


def test_all_searches_share_one_recipe(table: Path) -> None:
    options = nb201._options(["--table", str(table)])
    common = nb201.recipe_of("darts", 0, options)
    for arm in nb201.ARMS.keys() - set(nb201.ON_REQUEST):
        recipe = nb201.recipe_of(arm, 3, options)
        assert recipe.seed == 3 and recipe.space == "nb201"
        assert (recipe.batch_size, recipe.split, recipe.weights) == (common.batch_size, common.split, common.weights)
        if arm not in nb201.SEPARATE:
            assert (recipe.epochs, recipe.drop_path) == (common.epochs, common.drop_path) == (50, common.drop_path)
            size = ("cells_per_stage", "channels", "candidates")
            assert all(recipe.space_settings[key] == common.space_settings[key] for key in size)
    random = nb201.recipe_of("random", 0, options)
    assert random.epochs * random.method_settings["samples"] >= 50, "at least the epochs of a search"
    assert nb201.recipe_of("darts-2nd", 0, options).regime == "unrolled"
    assert nb201.recipe_of("itnas-pt", 0, options).select.by == "perturbation"
    assert nb201.recipe_of("itnas-post-norm", 0, options).method_settings["token_norm"] is False


def test_arms_of_authors_recipes_differ_in_what_they_name_and_run_on_request(table: Path) -> None:
    options = nb201._options(["--table", str(table)])
    assert not set(nb201.ON_REQUEST) & set(options.arms)
    for arm, same in (("gdas-released", "gdas"), ("beta-darts-100", "beta-darts"), ("pc-darts-256", "pc-darts")):
        own, common = (nb201.recipe_of(name, 1, options).to_dict() for name in (arm, same))
        assert {key for key in own if own[key] != common[key]} == set(nb201.ARMS[arm]) - {"method"}
    assert nb201.recipe_of("gdas-released", 0, options).method_settings["unsampled"] == "constant"
    longest = nb201.recipe_of("gdas-250", 0, options)
    assert (longest.epochs, longest.batch_size, longest.weights.weight_decay) == (250, 64, 5e-4)
    partial = nb201.recipe_of("darts-partial-100", 0, options)
    assert (partial.method, partial.epochs, partial.space_settings["partial_channels"]) == ("darts", 100, 4)
    assert nb201.recipe_of("pc-darts-256", 0, options).weights.lr == 0.1
    for arm in nb201.SCORES:
        own, common = (nb201.recipe_of(name, 1, options).to_dict() for name in (arm, "zero-cost"))
        assert own == {**common, "method_settings": {**common["method_settings"], "proxy": arm.replace("-", "_")}}
    common = nb201.recipe_of("itnas", 0, options).method_settings
    for arm, changed in (
        ("itnas-fixed-values", {"learned_values", "feed_forward"}),
        ("itnas-flat", {"tokens", "token_norm"}),
        ("itnas-shared", {"shared"}),
    ):
        own = nb201.recipe_of(arm, 0, options).method_settings
        assert {key for key in own if own[key] != common[key]} == changed


def test_a_table_grows_by_several_commands(
    tmp_path: Path, table: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nb201, "load_table", functools.cache(nb201.load_table))  # every command reads 15,625 cells
    data = write_data(tmp_path / "data.npz", train=32)
    given = ["--data", str(data), "--scale", "small", "--epochs", "2", "--device", "cpu", "--table", str(table)]
    given += ["--set", "space.cells_per_stage=1", "--set", "space.channels=2"]
    given += ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]

    def record() -> dict[str, Any]:
        found: dict[str, Any] = json.loads((tmp_path / "out" / "nb201.json").read_text())
        return found

    nb201.main([*given, "--arms", "darts", "--seeds", "0", "--others", "2"])
    row = json.loads((tmp_path / "out/rows/darts-data-0.json").read_text("utf-8"))
    assert (row["at_once"], row["at_once_by_epoch"]) == (3, [3, 3]), "with two of other commands"
    nb201.main([*given, "--arms", "gdas", "--seeds", "0", "--minutes", "0"])
    assert [row["arm"] for row in record()["summary"]] == ["darts"]
    assert "not measured: gdas-data-0" in capsys.readouterr().out
    assert record()["summary"][0]["memory"] is None, "there is no GPU"
    (tmp_path / "runs" / "darts-data-0").rename(tmp_path / "gone")
    nb201.main([*given, "--arms", "gdas", "darts", "--seeds", "0", "--indicators", "--proxies", "1"])
    found = {row["arm"]: row for row in record()["summary"]}
    assert list(found) == ["darts", "gdas"] and all(row["n"] == 1 for row in found.values())
    assert not (tmp_path / "runs" / "darts-data-0").exists(), "a search that has its row is not run again"
    for search in record()["searches"]:
        known = nb201.load_table(table).lookup(notation.parse(search["architecture"]))
        assert found[search["arm"]]["accuracies"]["cifar10_test"]["mean"] == pytest.approx(known["cifar10_test"])
    assert "<svg" in (tmp_path / "out" / "anytime-data.svg").read_text()
    out = capsys.readouterr().out
    assert record()["best_of"]["10"]["cifar10_valid"][0] > record()["random"]["cifar10_valid"][0]
    assert "random cell" in out and "GPU memory" in out and "not measured" in out
    per_edge = {(row["supernet"], row["indicator"]) for row in record()["taus"]}
    own = {("darts, data", "own"), ("gdas, data", "own")}
    measured = {("gdas, data", "perturbation"), ("gdas, data", "discretisation")}  # the supernet of darts is gone
    assert per_edge == own | measured | {("untrained", "naswot"), ("untrained", "synflow")}
    assert all(len(row["edges"]) == 6 and row["column"] == "cifar10_test" for row in record()["taus"])
    nb201.main([*given, "--seeds"])
    assert {(row["supernet"], row["indicator"]) for row in record()["taus"]} == per_edge, "nothing is lost"


def test_rows_of_unknown_arms_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"arm": "other", "data": "digits", "seed": 0}))
    with pytest.raises(UserError, match="unknown arms: other"):
        nb201.read_rows(tmp_path)


def test_random_search_is_compared_after_the_same_seconds() -> None:
    """Cells end after 10, 20, 30 and 12, 24, 36 device seconds; the second search shared the device with another."""
    rows = [
        {
            "seconds": 3 * pace * at_once,
            "seconds_by_epoch": [at_once * pace * half / 2 for half in range(1, 7)],
            "at_once": at_once,
            "trajectory": [{"epoch": 2 * i + 1, "cifar10_test": best + i} for i in range(3)],
        }
        for pace, best, at_once in ((10.0, 90.0, 1), (12.0, 80.0, 2))
    ]
    assert nb201.random_within(11.0, rows) is None, "one of them has trained no cell"
    found = nb201.random_within(23.0, rows)
    assert found is not None
    assert (found["mean"], found["n"], found["cells"], found["is_shorter"]) == ((91.0 + 80.0) / 2, 2, 1.5, False)
    assert found["std"] == pytest.approx(11.0 / 2**0.5)
    assert found["values"] == [91.0, 80.0]
    late = nb201.random_within(35.0, rows)
    assert late is not None and late["is_shorter"] and nb201._shown_random(late).startswith("≥ 86.50")
    assert nb201._shown_random(None) == "not measured"


def test_methods_are_compared_with_the_random_search_that_has_enough_seeds() -> None:
    def compared(old: int, new: int) -> str | None:
        groups = {("cifar10", arm): [{"arm": arm}] * count for arm, count in (("random", old), ("random-20", new))}
        rows = nb201._compared_with({key: rows for key, rows in groups.items() if rows}, "cifar10")
        return rows[0]["arm"] if rows else None

    assert compared(7, 3) == "random"
    assert compared(7, nb201.ENOUGH) == "random-20"
    assert (compared(3, 0), compared(3, 1), compared(0, 0)) == ("random", "random-20", None)
    assert nb201._compared_with({("cifar10", "random"): [{}]}, "cifar100") == []


@pytest.mark.parametrize(("measure", "sign"), [("accuracy", -1), ("loss", 1)])
def test_a_selection_by_perturbation_is_an_indicator_in_the_order_of_the_table(measure: str, sign: int) -> None:
    choices = build_space("nb201").layout().tables[0].choices
    edges = [
        {"edge": str(choice), "without": {op: {measure: 10 * i + k} for k, op in enumerate(choice.candidates)}}
        for i, choice in enumerate(choices)
    ]
    found = nb201._removals({"measure": measure, "edges": edges[::-1]})
    assert found == [[sign * (10 * i + choices[i].candidates.index(op)) for op in nb201.OPERATIONS] for i in range(6)]
    assert nb201._removals(None) is None


def test_the_memory_of_a_search_does_not_count_that_of_others() -> None:
    """Runs hold 100 and 7 bytes; in its second step the first needs 50 more for a moment, in the third it fails."""
    allocated, most = 0, 0

    def take(bytes_: int) -> None:
        nonlocal allocated, most
        allocated += bytes_
        most = max(most, allocated)

    def counters(reset: bool) -> tuple[int, int]:
        nonlocal most
        most = allocated if reset else most
        return allocated, most

    def run(held: int, extra: int, *, fails: bool) -> Running[str]:
        def steps() -> Steps[str]:
            take(held)
            yield
            take(extra)
            take(-extra)
            yield
            if fails:
                raise ValueError("a step failed")
            return "done"

        try:
            outcome = yield steps()
        except ValueError as error:
            outcome = str(error)
        take(-held)
        return f"{held}: {outcome}"

    peaks = [PeakMemory(counters), PeakMemory(counters)]
    starts = [
        lambda: in_turns(lambda: run(100, 50, fails=True), peaks[0]),
        lambda: in_turns(lambda: run(7, 1, fails=False), peaks[1]),
    ]
    assert interleave(starts, torch.device("cpu"), 2) == ["100: a step failed", "7: done"]
    assert [peak.peak for peak in peaks] == [150, 8] and allocated == 0


def test_cpu_and_gpu_times_are_not_on_one_axis() -> None:
    rows = [
        {"arm": arm, "data": data, "hardware": {"gpus": gpus}}
        for arm, data, gpus in (("darts", "cifar10", ["H200"]), ("zero-cost", "cifar10", []), ("snas", "digits", []))
    ]
    assert [row["arm"] for row in nb201.on_one_device(rows, "cifar10")] == ["darts"]
    assert [row["arm"] for row in nb201.on_one_device(rows, "digits")] == ["snas"]


def test_device_seconds_divide_each_epoch_by_the_searches_in_it(tmp_path: Path) -> None:
    """A search of three epochs is joined by another in its second one, which then resumes with other neighbours."""
    row = {"seconds": 65.0, "seconds_by_epoch": [10.0, 30.0, 60.0], "at_once": 4, "at_once_by_epoch": [1, 2, 4]}
    assert [nb201.device_seconds(row, epoch) for epoch in range(3)] == [10.0, 20.0, 27.5]
    assert nb201.device_seconds(row) == 27.5 + 5.0 / 4
    assert nb201.device_seconds({**row, "at_once_by_epoch": None}) == 65.0 / 4
    first, second = tmp_path / "first", tmp_path / "second"
    heard: list[Event] = []
    for folder in (first, second):
        folder.mkdir()
    sharing = Sharing(others=1)
    with sharing.run(first, heard.append) as on_first:
        on_first(EpochEnded(0, {}))
        with sharing.run(second, heard.append) as on_second:
            on_first(EpochEnded(1, {}))
            on_second(EpochEnded(0, {}))
        on_first(Note("no epoch"))
    assert (sharing_of(first, 2), sharing_of(first, 3), sharing_of(second, 1)) == ([2, 3], None, [3])
    assert len(heard) == 4
    with sharing.run(second, heard.append) as on_second:
        on_second(EpochEnded(1, {}))
    assert sharing_of(second, 2) == [3, 2], "the first one has ended"
    with Sharing().run(first, heard.append) as on_first:
        on_first(EpochEnded(1, {}))  # the epoch was repeated after an interruption
        on_first(EpochEnded(2, {}))
    assert sharing_of(first, 3) == [2, 1, 1]
    assert sharing_of(tmp_path / "gone", 1) is None
