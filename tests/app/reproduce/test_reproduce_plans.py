"""The plans of `softcell reproduce`: the papers' settings, one recipe per table, published cells as published."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from softcell.app.cli import search as search_command
from softcell.app.cli.main import run as softcell
from softcell.app.reproduce import plan as plans
from softcell.app.reproduce.papers import EPOCHS, PAPERS, RANDOM_CELLS, PaperTable
from softcell.app.reproduce.plan import CELLS, Job, Plan, chosen_rows, count_parameters, make_plan, random_cell
from softcell.app.reproduce.run import num_epochs
from softcell.arch import empty_cells, notation, sample
from softcell.errors import UserError
from softcell.evaluate import TrainRecipe
from softcell.evaluate.recipe import RECIPES
from softcell.search import SearchRecipe, resolve
from softcell.spaces import build_space
from softcell.spaces.base import evaluation_space
from softcell.spaces.costs import count_genotype
from tests.reference import reference_snas_cells as snas_cells
from tests.reference.published_genotypes import DARTS_V2

TABLES = [(paper.key, table) for paper in PAPERS.values() for table in paper.tables if not table.missing]


def parameters(name: str) -> int:
    return count_parameters(notation.parse(CELLS[name]))


def test_published_cells_match_the_papers() -> None:
    assert notation.parse(CELLS["DARTS_V2"]) == notation.parse(DARTS_V2)
    for level, cell in snas_cells.EDGE_ALL.items():
        assert notation.parse(CELLS[f"SNAS-{level}"]) == notation.parse(cell)
    # 3,349,342 is what the authors' network counts; the papers print 3.6M and 3.4M.
    assert parameters("DARTS_V2") == 3_349_342
    assert round(parameters("PC-DARTS") / 1e6, 1) == 3.6
    assert round(parameters("GDAS") / 1e6, 1) == 3.4


def every_job(plan: Plan, table: PaperTable) -> list[Job]:
    return [job for row in table.rows for job in plan.jobs_of(table, row)]


def test_searches_have_the_lengths_of_the_papers() -> None:
    lengths = {"snas": 150, "darts": 50, "entrannas": 50, "entrannas-dst": 50, "nos": 25, "itnas": 50}
    for paper in PAPERS.values():
        longest = 0
        for name, settings in paper.searches.items():
            recipe = resolve(settings | {"guide": {}} if "guide" in settings else settings)
            if recipe.method == "random":
                continue
            if recipe.method == "fullattention":
                assert (recipe.epochs, recipe.pretrain.epochs) in ((50, 20), (50, 0))
            else:
                assert recipe.epochs == lengths[recipe.method], name
            longest = max(longest, recipe.epochs)
        if "random-search" in paper.searches:  # as many epochs, in tens
            assert longest <= num_epochs(resolve(paper.searches["random-search"])) < longest + 10


@pytest.mark.parametrize(("key", "table"), TABLES, ids=[f"{key}-{table.number}" for key, table in TABLES])
def test_all_networks_of_a_table_are_trained_by_one_recipe(key: str, table: PaperTable, tmp_path: Path) -> None:
    plan = make_plan(key, table.number, out=tmp_path)
    for name, training in table.trainings.items():
        jobs = [job for job in every_job(plan, table) if job.folder.parts[:2] == ("train", name)]
        assert jobs
        for job in jobs:
            different = {k for k, v in job.settings.items() if jobs[0].settings.get(k) != v}
            assert different <= {"seed", "classifier_settings"}
        if training.settings.get("task") == "retrieve" or jobs[0].kind == "classifier":
            continue
        recipe = plan.recipe(plan.stand_in(jobs[0]))
        assert isinstance(recipe, TrainRecipe)
        full = {"epochs": 600, "drop_path": 0.2, **RECIPES[recipe.recipe]}
        assert recipe.epochs == EPOCHS
        assert recipe.drop_path == pytest.approx(full["drop_path"] * EPOCHS / full["epochs"])
        for key_, value in full.items():
            if key_ not in ("epochs", "drop_path"):
                assert getattr(recipe, key_) == value


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("key", PAPERS)
def test_every_run_of_a_plan_has_a_complete_recipe(key: str, small: bool, tmp_path: Path) -> None:
    plan = make_plan(key, small=small, out=tmp_path)
    seen = set()
    for job in plan.jobs:
        kind = (job.kind, *job.folder.parts[1:2])
        if kind not in seen and job.kind != "train":  # networks differ in their cells alone
            plan.recipe(job)
        elif kind not in seen and job.found is not None:
            plan.recipe(plan.stand_in(job))
        seen.add(kind)
    assert len({job.folder for job in plan.jobs}) == len(plan.jobs)
    assert {row.name for table in plan.tables for row in table.rows} == {row for job in plan.jobs for row in job.rows}


def test_rows_are_compared_with_four_random_networks_if_the_table_trains() -> None:
    for _, table in TABLES:
        if (
            table.trainings
            and not any(row.classifier is not None for row in table.rows)
            and table.number != "efficiency"
        ):
            assert any(row.random for row in table.rows), table.title
        names = {row.name for row in table.rows}
        assert table.compare is not None
        assert {*table.compare[:2]} <= names
    assert RANDOM_CELLS >= 4


def test_random_cells_differ_and_keep_to_the_limit() -> None:
    free = [random_cell("nb201", number, None) for number in range(1, 6)]
    assert len({cell.dumps() for cell in free}) == 5
    sizes = [count_genotype(evaluation_space("nb201", "cifar10"), cell, (3, 32, 32), 10).parameters for cell in free]
    limit = sorted(sizes)[1]
    small_enough = [cell for cell, size in zip(free, sizes, strict=True) if size <= limit]
    assert small_enough[:2] != free[:2]  # the limit excludes one of the first
    assert [random_cell("nb201", number, limit) for number in (1, 2)] == small_enough[:2]


def test_all_draws_are_used_before_there_are_too_few_random_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_DRAWS", 3)
    layout = build_space("nb201").layout()
    draws = [cell for seed in (1, 2, 3) if not empty_cells(cell := sample(layout, seed), layout)]
    assert [random_cell("nb201", number, None) for number in range(1, len(draws) + 1)] == draws
    more = len(draws) + 1
    for limit, within in ((None, ""), (10**9, " with 1,000,000,000 parameters or less")):
        with pytest.raises(UserError) as raised:
            random_cell("nb201", more, limit)
        expected = f"3 random architectures of 'nb201' have no {more} that can be trained{within}"
        assert str(raised.value) == expected


def test_a_plan_draws_random_cells_within_the_limit_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []
    monkeypatch.setattr(plans, "random_cell", lambda space, number, limit, form: asked.append(limit))
    for number, small in (("2", False), (None, False), ("2", True)):
        plan = make_plan("snas", number, small=small)
        plan.genotype(next(job for job in plan.jobs if job.network == "random-darts-3"))
    assert asked == [4_000_000, 4_000_000, None]  # the same cells for one table as for all


@pytest.mark.parametrize("key", PAPERS)
def test_the_command_of_a_search_has_the_recipe_of_the_plan(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(search_command, "run_search", lambda settings, *_, **__: given.append(settings) or 0)
    plan = make_plan(key, small=True, out=tmp_path)
    searches = {job.network: job for job in plan.jobs if job.kind == "search" and job.network.count("-") < 2}
    for job in searches.values():
        assert softcell(shlex.split(plan.command(job))[1:]) == 0
        recipe = plan.recipe(job)
        assert isinstance(recipe, SearchRecipe)
        assert resolve(given[-1]).to_dict() == {**recipe.to_dict(), "device": "auto"}


def test_seeds_must_be_several_and_tables_known() -> None:
    with pytest.raises(UserError, match="at least 2"):
        make_plan("snas", seeds=1)
    with pytest.raises(UserError, match="--table must be one of 1, 2, 3"):
        make_plan("snas", "9")
    with pytest.raises(UserError, match="snas"):
        make_plan("snass")
    assert make_plan("full-attention", "vii").tables[0].number == "VII"
    assert make_plan("IT-NAS").paper.key == "itnas"


def test_rows_are_chosen_by_part_of_their_name() -> None:
    plan = make_plan("snas", "2")
    assert chosen_rows(plan, ["darts_v2"]) == {"DARTS_V2, published"}
    assert len(chosen_rows(plan, [])) == len(plan.tables[0].rows)
    with pytest.raises(UserError, match="no row contains 'darts_v3'"):
        chosen_rows(plan, ["darts_v3"])
