"""Architectures for several budgets from one search."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from xml.dom import minidom

import pytest
import torch

from softcell.app.cli.main import run as softcell
from softcell.app.report.charts import front_svg
from softcell.arch import Genotype, empty_cells
from softcell.search.budget import stated_budget
from softcell.search.selection import strongest_accepted
from softcell.search.supernet import make_child, restore
from softcell.spaces import build_space
from softcell.spaces.costs import count_genotype

TINY = ("--space", "nb201", "--set", "space.channels=2", "--batch-size", "256", "--threads", "1")


def test_the_strongest_within_a_budget_is_nearly_always_the_best_of_all_architectures() -> None:
    """Brute force over all 15,625 cells, with random probabilities and costs. Never above a budget, never empty."""
    layout = build_space("nb201").layout()
    choices = layout.tables[0].choices
    every = torch.tensor(list(itertools.product(range(5), repeat=6)))
    reached = [torch.full((len(every),), node == 0) for node in range(4)]
    for edge, choice in sorted(enumerate(choices), key=lambda one: one[1].target):
        reached[choice.target] |= reached[choice.source] & (every[:, edge] != choice.candidates.index("none"))
    gaps = []
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        p = torch.rand(6, 5, generator=generator, dtype=torch.float64).mul(3).softmax(1)
        cost = torch.rand(6, 5, generator=generator, dtype=torch.float64)
        cost[:, :2] = 0.0  # none and skip_connect
        cost /= cost.max()
        scores, prices = (table[torch.arange(6), every].sum(1) for table in (p.log(), cost))

        def value(genotype: Genotype, table: torch.Tensor) -> float:
            numbers = [choices[0].candidates.index(pick.op) for pick in genotype.cells["cell"].picks]
            return float(table[torch.arange(6), torch.tensor(numbers)].sum())

        for limit in (0.1, 0.4, 0.8, 1.5, 9.0):
            found = strongest_accepted(
                layout, {"cell": p}, {"cell": cost}, lambda one, c=cost, most=limit: value(one, c) <= most
            )
            assert found is not None and not empty_cells(found, layout) and value(found, cost) <= limit
            best = float(scores[(prices <= limit) & reached[3]].max())
            assert value(found, p.log()) <= best + 1e-9
            gaps.append(best - value(found, p.log()))
        assert gaps[-1] < 1e-9  # without a limit: the strongest of every edge
        assert strongest_accepted(layout, {"cell": p}, {"cell": cost}, lambda genotype: False) is None
    assert sum(gap < 1e-9 for gap in gaps) >= 27 and max(gaps) < 1.0


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("searched") / "run"
    assert softcell(["search", "darts", *TINY, "--epochs", "1", "--out", str(folder), "--quiet"]) == 0
    return folder


def test_every_budget_gets_an_architecture_that_meets_it(searched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert softcell(["derive", str(searched), "--max-params", "1M, 75k,90k", "--quiet", "--overwrite"]) == 0
    said = capsys.readouterr().out
    points = json.loads((searched / "front.json").read_text())["points"]
    assert [point["limit"] for point in points] == [75e3, 90e3, 1e6]
    space = build_space("nb201", {"cells_per_stage": 1, "channels": 16})  # the network that is trained on digits
    for point in points:
        genotype = Genotype.load(searched / point["genotype"])
        cost = count_genotype(space, genotype, (1, 8, 8), 10)
        assert (point["parameters"], point["flops"]) == (cost.parameters, cost.multiply_adds)
        assert cost.parameters <= point["limit"]
        stated = stated_budget(genotype)
        assert stated is not None and stated.max_params == point["limit"] and stated.missed() is None
        assert f"{100 * point['accuracy']:.1f}% on the validation split with the supernet's weights" in said
    assert Genotype.load(searched).cells == Genotype.load(searched / "front-1M.json").cells
    drawn = minidom.parse(str(searched / "front.svg"))
    assert {"75k", "90k", "1M"} <= {node.firstChild.data for node in drawn.getElementsByTagName("text")}
    assert softcell(["derive", str(searched), "--max-params", "75k"]) == 2  # its file exists
    assert "already exists" in capsys.readouterr().err


def test_accuracies_match_the_child_with_recalibrated_norms(searched: Path) -> None:
    assert softcell(["derive", str(searched), "--max-flops", "700k", "--quiet", "--overwrite"]) == 0
    (point,) = json.loads((searched / "front.json").read_text())["points"]
    found = restore(searched, device="cpu")
    child = make_child(found.supernet, Genotype.load(searched / "front-700k.json"))
    norms = [module for module in child.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    with torch.no_grad():
        child.train()
        for batch in found.feeds().plain(found.dataset.train, found.parts["weights"]).epoch(0):
            child(batch.images)
        child.eval()
        right = [
            (child(batch.images).argmax(1) == batch.labels).float()
            for batch in found.feeds().plain(found.dataset.train, found.parts["validation"]).epoch(0)
        ]
    assert point["accuracy"] == pytest.approx(float(torch.cat(right).mean()))


def test_impossible_and_wrong_budgets_are_refused(searched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.name for path in searched.iterdir())
    for options, reason in (
        (("--max-params", "1,50M", "--overwrite"), "no architecture meets a budget of 1 parameter:"),
        ((), "pass either --max-params or --max-flops"),
        (("--max-params", "9M", "--max-flops", "9M"), "pass either"),
        (("--max-params", "50x"), "--max-params must be a number above 0"),
    ):
        assert softcell(["derive", str(searched), *options]) == 2
        assert reason in capsys.readouterr().err
    assert sorted(path.name for path in searched.iterdir()) == before


def test_a_front_is_drawn_in_the_order_of_cost() -> None:
    svg = front_svg([(200e3, 0.9, "200k"), (50e3, 0.7, "50k & less")], "A <search>", "parameters", "accuracy")
    minidom.parseString(svg)
    assert svg.index("50k &amp; less: 70") < svg.index("200k: 90")


def test_budgets_with_the_same_network_share_one_label() -> None:
    svg = front_svg([(84e3, 0.8, "100k"), (84e3, 0.8, "200k"), (73e3, 0.7, "75k")], "t", "parameters", "accuracy")
    assert ">100k, 200k</text>" in svg and ">100k</text>" not in svg and "100k, 200k: 80.0 %" in svg
