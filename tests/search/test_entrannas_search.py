"""EnTranNAS searches and the use of their architectures, including any in-degree."""

from __future__ import annotations

import io
import json
import random
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from softcell.app.export.write import Format, export
from softcell.app.report import to_svg, to_text
from softcell.arch import Cell, Genotype, Pick, Positive, WeightMix, check_against, derive
from softcell.arch.notation import to_darts, to_nb201
from softcell.errors import UserError
from softcell.evaluate import count_genotype, load_network, train
from softcell.evaluate import resolve as resolve_training
from softcell.methods import METHODS
from softcell.search import SearchResult, resolve, search
from softcell.search.supernet import make_child
from softcell.settings import to_dict
from softcell.spaces import build_space
from softcell.spaces.costs import count_candidates
from softcell.spaces.darts import DartsSpace
from softcell.testing.tools import images, random_weights, require_close
from tests.helpers.search_toys import settings, training, write_data

TINY: dict[str, Any] = {"cells": 3, "channels": 2, "nodes": 2}
SIZES = {
    "darts": build_space("darts", TINY),
    "nb201": build_space("nb201", {"cells_per_stage": 1, "channels": 2}),
    "nos": build_space("nos", {"cells": 3, "channels": 2, "nodes": 1}),
}
FORMATS: tuple[Format, ...] = ("python", "safetensors")
"""Quick ones; the others are traced from the same network."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "data.npz")


def any_degree(space: str, seed: int) -> Genotype:
    """A random architecture with any number of connections per node and of candidates per edge."""
    layout, rng = SIZES[space].layout(), random.Random(seed)
    cells = {table.name: Cell(Positive().sample(table, rng), table.output) for table in layout.tables}
    return Genotype(layout.space, cells)


def run(space: str, data: Path, out: Path, **changes: Any) -> SearchResult:
    given = settings(space, data, **{"method": "entrannas-dst", "epochs": 2, **changes})
    return search(resolve(given), out)


@pytest.mark.parametrize("space", ["darts", "nb201"])
def test_an_architecture_of_any_degree_is_saved_drawn_counted_and_trained(
    space: str, data: Path, tmp_path: Path
) -> None:
    genotype = any_degree(space, 3)
    degrees = {(name, t): len(c.incoming(t)) for name, c in genotype.cells.items() for t in c.targets}
    edges = [(p.source, p.target) for c in genotype.cells.values() for p in c.picks]
    assert max(degrees.values()) > 2
    assert len(edges) > len(set(edges)), "several candidates on one edge"
    genotype.save(tmp_path / "cell.json")
    again = Genotype.load(tmp_path / "cell.json")
    assert again == genotype
    check_against(again, build_space(space, {}).layout())

    drawing = ET.fromstring(to_svg(again))
    words = " ".join(drawing.itertext())
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(to_text(again))
    text = console.export_text()
    for cell in again.cells.values():
        for op in {pick.op for pick in cell.picks}:
            times = sum(pick.op == op for c in again.cells.values() for pick in c.picks)
            assert text.count(op) == times, "the terminal shows every connection"
            assert words.count(op) >= times

    with pytest.raises(UserError, match="keep softcell JSON"):
        (to_darts if space == "darts" else to_nb201)(again)
    small = SIZES[space]
    cost = count_genotype(small, again, (3, 32, 32), 10)
    fewer = Genotype(again.space, {n: Cell(c.picks[::2], c.output) for n, c in again.cells.items()})
    assert count_genotype(small, fewer, (3, 32, 32), 10).parameters < cost.parameters

    given = training(space, data, epochs=1, space_settings=to_dict(SIZES[space]))
    del given["in"], given["genotype"]
    result = train(again, resolve_training(again, given), tmp_path / "run")
    loaded = load_network(tmp_path / "run")
    assert loaded.genotype == again
    assert result.exit_code == 0
    for form in FORMATS:
        exported = export(tmp_path / "run", form, tmp_path / form)
        assert exported.difference < 1e-4, "what was written gives the network's logits"


@pytest.mark.parametrize("scale", ["paper", "enlarged", "imagenet"])
def test_recipes_for_photographs_have_the_sparsity_that_was_found_on_cifar10(scale: str) -> None:
    data = "imagenet" if scale == "imagenet" else "cifar10"
    given: dict[str, Any] = {"method": "entrannas-dst", "data": data, "scale": scale}
    chosen = resolve(given).method_settings
    assert (chosen["sparsity"], chosen["threshold_speed"]) == (1.0, 4.0)
    own = resolve({**given, "method_settings": {"sparsity": 0.1}}).method_settings
    assert (own["sparsity"], own["threshold_speed"]) == (0.1, 4.0)


def test_more_sparsity_gives_fewer_connections(tmp_path: Path, data: Path) -> None:
    """A few steps with fast thresholds; `results/entrannas` has the sweep on digits."""
    found = []
    for weight in (0.0, 1.0):
        result = run(
            "darts",
            data,
            tmp_path / str(weight),
            child_every=0,
            method_settings={"sparsity": weight, "threshold_speed": 20.0},
        )
        assert result.genotype is not None
        found.append(sum(len(cell.picks) for cell in result.genotype.cells.values()))
        row = result.metrics[-1]
        assert row["connections_normal"] == len(result.genotype.cells["normal"].picks) / 2
        assert 0 < row["threshold_reduce_3"] < 1
    assert found[1] < found[0]


def test_a_search_anneals_the_temperature(data: Path, tmp_path: Path) -> None:
    result = run("nb201", data, tmp_path / "run", method="entrannas", epochs=3)
    assert [row["temperature"] for row in result.metrics] == pytest.approx([1.0, 10**-0.5, 0.1])


@pytest.mark.parametrize("estimator", ["monte-carlo", "policy"])
def test_estimators_that_draw_one_candidate_are_refused(estimator: str, data: Path, tmp_path: Path) -> None:
    resource = {"weight": 0.1, "form": "linear", "estimator": estimator}
    with pytest.raises(UserError, match=r"resource\.estimator=expectation"):
        run("nb201", data, tmp_path / "run", resource=resource)


@pytest.mark.parametrize("space", ["nb201", "nos"])
def test_dst_searches_with_a_resource_penalty_and_a_budget(space: str, data: Path, tmp_path: Path) -> None:
    """DST's topology with SNAS's resource term: both reach the same coefficients."""
    sizes = to_dict(SIZES[space])
    layout = SIZES[space].layout()
    # One pool or skip connection per node: within reach, but not in this time.
    least = derive(layout, {table.name: torch.zeros(table.shape) for table in layout.tables}, Positive())
    limit = count_genotype(SIZES[space], least, (1, 8, 8), 3).parameters
    resource = {"preset": "aggressive", "max_params": limit, "network": sizes}
    result = run(space, data, tmp_path / "run", resource=resource, child_every=1, space_settings=sizes)
    assert result.genotype is not None
    check_against(result.genotype, SIZES[space].layout())
    found = count_candidates(SIZES[space], (1, 8, 8), 3)
    derived = sum(
        float(found.kinds["parameters"][site][table.choices.index(choice), k])
        for site, name in enumerate(found.layout.sites)
        for table in [found.layout.table(name)]
        for choice in table.choices
        for k, op in enumerate(choice.candidates)
        if Pick(choice.source, choice.target, op) in result.genotype.cells[name].picks
    )
    assert result.metrics[-1]["expected_parameters"] == pytest.approx(derived), "every connection in full"
    results = json.loads((tmp_path / "run" / "run.json").read_text())["results"]
    assert results["budget_met"] is False
    assert 0 <= results["child_accuracy_bn"] <= 1


@pytest.mark.parametrize("space", ["darts", "nb201"])
@pytest.mark.parametrize("sizes", [{"share_features": True}, {"share_features": True, "bottleneck": 4}])
def test_a_child_takes_over_shared_and_narrow_weights(space: str, sizes: dict[str, Any]) -> None:
    """In evaluation the child equals the supernet in which every cell is a transit cell of it."""
    small = {"cells": 3, "channels": 8, "nodes": 2} if space == "darts" else {"cells_per_stage": 1, "channels": 8}
    built = build_space(space, {**small, **sizes})
    layout = built.layout()
    torch.manual_seed(0)
    supernet = built.supernet((3, 9, 7), 5).double()
    with torch.no_grad():
        supernet(images(), WeightMix(layout, random_weights(layout, 0)))
    rng = random.Random(1)
    genotype = Genotype(
        layout.space, {t.name: Cell(Positive().sample(t, rng), t.output) for t in layout.tables}, layout.settings
    )
    method = METHODS.get("entrannas-dst")(layout, METHODS.get("entrannas-dst").Settings(engines="first"))  # type: ignore
    ones, lives = {}, {}
    for table in layout.tables:
        picked = {(p.source, p.target, p.op) for p in genotype.cells[table.name].picks}
        live = tuple(
            tuple(k for k, op in enumerate(c.candidates) if (c.source, c.target, op) in picked) for c in table.choices
        )
        lives[table.name] = live
        ones[table.name] = method._ones_at(table.name, live, torch.zeros(table.shape, dtype=torch.float64))
    mix = WeightMix(layout, ones, picked={site: (lives[name], ones[name]) for site, name in enumerate(layout.sites)})
    child = make_child(supernet, genotype)
    assert sum(p.numel() for p in child.parameters()) < sum(p.numel() for p in supernet.parameters())
    with torch.no_grad():
        mine, theirs = child.eval()(images()), supernet.eval()(images(), mix)
    require_close(mine, theirs, "a child equals its supernet", 1e-10)


def test_costs_of_narrow_candidates_are_counted_at_their_own_width() -> None:
    wide, narrow = (
        count_candidates(DartsSpace(**TINY | {"channels": 8, "bottleneck": b}), (3, 8, 8), 10) for b in (1, 4)
    )
    at = DartsSpace().candidates.index("sep_conv_3x3")
    # Twice (depthwise 3·3·c + pointwise c·c), at c = 8 and c = 2.
    assert float(wide.of("parameters", "normal")[0, 0, at]) == 2 * (9 * 8 + 64)
    assert float(narrow.of("parameters", "normal")[0, 0, at]) == 2 * (9 * 2 + 4)


# --- recipes ---


@pytest.mark.parametrize("method", ["entrannas", "entrannas-dst"])
def test_recipes_match_the_paper_and_its_authors_code(method: str) -> None:
    cifar = resolve({"method": method, "data": "cifar10"})
    assert (cifar.scale, cifar.epochs, cifar.batch_size, cifar.weights.lr) == ("paper", 50, 256, 0.1)
    assert cifar.architecture.lr == 6e-4
    assert cifar.regime == "bilevel"
    assert cifar.space_settings["share_features"] is True
    assert cifar.space_settings["bottleneck"] == 4, "§2.5"
    imagenet = resolve({"method": method, "data": "imagenet"})
    assert imagenet.scale == "imagenet"
    assert (imagenet.batch_size, imagenet.weights.lr) == (1024, 0.5)
    assert (imagenet.weights.schedule, imagenet.weights.warmup) == ("linear", 5)
    assert imagenet.space_settings["stem"] == "imagenet"
    assert resolve({"method": method, "data": "imagenet", "space": "nb201"}).scale == "imagenet", "has no stem to set"
    enlarged = resolve({"method": method, "data": "cifar10", "scale": "enlarged"})
    assert len(enlarged.space_settings["candidates"]) > len(cifar.space_settings["candidates"])
    assert ("none" in enlarged.space_settings["candidates"]) == (method == "entrannas")
    small = resolve({"method": method})
    assert (small.scale, small.space_settings["cells"]) == ("small", 4)
    assert imagenet.space_settings["bottleneck"] == enlarged.space_settings["bottleneck"] == 4
    assert small.space_settings["bottleneck"] == 1, "a quarter of its 8 channels would be 2"
    for recipe in (cifar, imagenet, enlarged, small):
        assert resolve(recipe.to_dict()) == recipe


def test_the_enlarged_space_is_searched(data: Path, tmp_path: Path) -> None:
    given = settings("darts", data, method="entrannas", epochs=1, space_settings=TINY)
    result = search(resolve({**given, "scale": "enlarged"}), tmp_path / "run")
    assert result.recipe.scale == "enlarged"
    assert len(result.recipe.space_settings["candidates"]) == 12
    assert result.genotype is not None


@pytest.mark.parametrize("space", ["nb201", "nos", "s1", "fullattention"])
def test_other_spaces_keep_their_own_candidates(space: str) -> None:
    recipe = resolve({"method": "entrannas", "space": space, "scale": "enlarged", "data": "digits"})
    own = build_space(space, {k: v for k, v in recipe.space_settings.items() if k == "share_features"})
    assert build_space(space, recipe.space_settings).layout() == own.layout()


@pytest.mark.parametrize(("space", "expected"), [("nb201", 1), ("nos", 1), ("s1", 1), ("darts", 4)])
def test_the_bottleneck_of_the_paper_matches_its_own_space(space: str, expected: int) -> None:
    recipe = resolve({"method": "entrannas", "space": space, "data": "cifar10"})
    assert recipe.space_settings["bottleneck"] == expected
    given = resolve({"method": "entrannas", "space": space, "data": "cifar10", "space_settings": {"bottleneck": 2}})
    assert given.space_settings["bottleneck"] == 2


def test_a_scale_that_a_method_does_not_have_is_refused_with_those_it_has() -> None:
    with pytest.raises(UserError, match="small, paper, imagenet, enlarged for method 'entrannas'"):
        resolve({"method": "entrannas", "scale": "huge"})
    with pytest.raises(UserError, match="small, paper for method 'darts'"):
        resolve({"method": "darts", "scale": "enlarged"})


def test_a_warm_up_rises_and_a_linear_schedule_falls(data: Path, tmp_path: Path) -> None:
    weights = {"lr": 0.4, "lr_min": 0.0, "schedule": "linear", "warmup": 2}
    longer = settings("nb201", data, method="darts", epochs=6, weights=weights)
    assert [row["lr"] for row in search(resolve(longer), tmp_path / "longer").metrics] == pytest.approx(
        [0.2, 0.4, 0.4, 0.3, 0.2, 0.1]
    )
    with pytest.raises(UserError, match=r"warmup < epochs"):
        resolve({**longer, "epochs": 2})
