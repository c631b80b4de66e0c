"""The table of all methods in NAS-Bench-201: one recipe, one file a search, collected by many commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from softcell.arch import notation
from softcell.errors import UserError
from studies import nb201
from tests.helpers.bench_tables import write_made
from tests.helpers.search_toys import write_data


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_made(tmp_path_factory.mktemp("nb201") / "table.csv")


def test_all_searches_share_one_recipe(table: Path) -> None:
    options = nb201._options(["--table", str(table)])
    common = nb201.recipe_of("darts", 0, options)
    for arm in nb201.ARMS:
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


def test_a_table_grows_by_several_commands(
    tmp_path: Path, table: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_data(tmp_path / "data.npz", train=32)
    given = ["--data", str(data), "--scale", "small", "--epochs", "2", "--device", "cpu", "--table", str(table)]
    given += ["--set", "space.cells_per_stage=1", "--set", "space.channels=2"]
    given += ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]

    def record() -> dict[str, Any]:
        found: dict[str, Any] = json.loads((tmp_path / "out" / "nb201.json").read_text())
        return found

    nb201.main([*given, "--arms", "darts", "--seeds", "0"])
    nb201.main([*given, "--arms", "gdas", "--seeds", "0", "--minutes", "0"])
    assert [row["arm"] for row in record()["summary"]] == ["darts"]
    assert "not measured: gdas-data-0" in capsys.readouterr().out
    (tmp_path / "runs" / "darts-data-0").rename(tmp_path / "gone")
    nb201.main([*given, "--arms", "gdas", "darts", "--seeds", "0"])
    found = {row["arm"]: row for row in record()["summary"]}
    assert list(found) == ["darts", "gdas"] and all(row["n"] == 1 for row in found.values())
    assert not (tmp_path / "runs" / "darts-data-0").exists(), "a search that has its row is not run again"
    for search in record()["searches"]:
        known = nb201.load_table(table).lookup(notation.parse(search["architecture"]))
        assert found[search["arm"]]["accuracies"]["cifar10_test"]["mean"] == pytest.approx(known["cifar10_test"])
    assert "<svg" in (tmp_path / "out" / "anytime-data.svg").read_text()
    assert "random cell" in capsys.readouterr().out


def test_rows_of_unknown_arms_are_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"arm": "other", "data": "digits", "seed": 0}))
    with pytest.raises(UserError, match="arms that this study does not know: other"):
        nb201.read_rows(tmp_path)
