"""Random architectures within a budget: by brute force from the draws without one, and in whole searches."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from softcell.arch import Genotype, sample
from softcell.engine.task import Note
from softcell.errors import UserError
from softcell.methods.random import RandomSearch
from softcell.search import budget as subject
from softcell.search import resolve, search
from softcell.search.budget import Budget, next_within, stated_budget
from softcell.search.resource import Resource
from softcell.spaces import build_space
from softcell.spaces.costs import Cost, count_candidates, count_genotype
from tests.helpers.search_toys import check_resumed, settings, write_data

NETWORK = {"cells_per_stage": 1, "channels": 4}
SPACE = build_space("nb201", NETWORK)
SEED = 3


def parameters(genotype: Genotype) -> int:
    return count_genotype(SPACE, genotype, (1, 8, 8), 3).parameters


DRAWS = [sample(SPACE.layout(), SEED * 1_000_003 + number) for number in range(60)]


# Not at import: counting takes seconds, and every test process imports this file.
@functools.cache
def costs() -> list[Cost]:
    return [count_genotype(SPACE, genotype, (1, 8, 8), 3) for genotype in DRAWS]


def sizes() -> list[int]:
    return [cost.parameters for cost in costs()]


def limit() -> int:
    return sorted(sizes())[15]  # a quarter of the draws


def allowed() -> list[Genotype]:
    return [genotype for genotype, size in zip(DRAWS, sizes(), strict=True) if size <= limit()]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "data.npz")


def recipe(data: Path, samples: int = 3, **resource: Any) -> Any:
    own = {"method": "random", "epochs": 1, "seed": SEED, "method_settings": {"samples": samples}}
    return resolve(settings("nb201", data, **own, resource={"network": NETWORK, **resource}))


def trained(folder: Path) -> list[Any]:
    """The cells of the architectures that a random search trained, in order."""
    lines = (folder / "architecture.jsonl").read_text().splitlines()
    return [json.loads(line)["genotype"]["cell"]["edges"] for line in lines]


def cells(genotypes: list[Genotype]) -> list[Any]:
    return [genotype.to_dict()["cells"]["cell"]["edges"] for genotype in genotypes]


def budget(limit: float, **others: Any) -> Budget:
    return Budget(Resource(max_params=limit, **others), None, SPACE, (1, 8, 8), 3, num_epochs=1)


def test_without_a_budget_the_draws_are_what_they_always_were(data: Path, tmp_path: Path) -> None:
    result = search(recipe(data), tmp_path / "run")
    assert trained(tmp_path / "run") == cells(DRAWS[:3])
    assert result.genotype is not None and "budget" not in result.genotype.about
    assert "budget_met" not in json.loads((tmp_path / "run" / "run.json").read_text())["results"]


def test_a_random_search_trains_the_first_draws_that_meet_the_budget(data: Path, tmp_path: Path) -> None:
    assert cells(allowed()[:3]) != cells(DRAWS[:3])
    events: list[Any] = []
    result = search(recipe(data, max_params=limit()), tmp_path / "run", on_event=events.append)
    assert trained(tmp_path / "run") == cells(allowed()[:3])
    found = json.loads((tmp_path / "run" / "run.json").read_text())["results"]
    assert result.genotype is not None
    assert found["budget_met"] is True and found["derived_parameters"] == parameters(result.genotype) <= limit()
    assert not [event.text for event in events if isinstance(event, Note)], "nothing to warn of"


def test_all_budgets_hold_at_once(data: Path, tmp_path: Path) -> None:
    most = sorted(cost.multiply_adds for cost in costs())[30]
    both = [g for g, c in zip(DRAWS, costs(), strict=True) if c.parameters <= limit() and c.multiply_adds <= most]
    search(recipe(data, 2, max_params=limit(), max_flops=most), tmp_path / "run")
    assert trained(tmp_path / "run") == cells(both[:2])


def test_a_latency_is_a_budget_of_draws_too(data: Path, tmp_path: Path) -> None:
    (tmp_path / "times.yaml").write_text(
        "{none: 0, skip_connect: 1, avg_pool_3x3: 2, nor_conv_1x1: 3, nor_conv_3x3: 9}"
    )
    dear = [sum(pick.op == "nor_conv_3x3" for pick in genotype.cells["cell"].picks) for genotype in DRAWS]
    most = 9 * SPACE.layout().sites.count("cell") - 1  # no cell of the kind may have a 3×3 convolution
    search(recipe(data, 2, max_latency=most, latency_table=str(tmp_path / "times.yaml")), tmp_path / "run")
    plain = [genotype for genotype, count in zip(DRAWS, dear, strict=True) if count == 0]
    assert all(edges in cells(plain) for edges in trained(tmp_path / "run"))
    found = json.loads((tmp_path / "run" / "run.json").read_text())["results"]
    assert found["budget_met"] is True and found["derived_latency"] <= most


def test_a_stopped_search_resumes_with_the_same_draws(data: Path, tmp_path: Path) -> None:
    check_resumed(recipe(data, max_params=limit()), tmp_path, 1, 1)


def test_a_sampler_hears_of_what_was_passed_over_as_of_what_learnt_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: dict[int, list[float]] = {}
    original = RandomSearch.propose

    def propose(self: Any, number: int, scores: list[float]) -> Genotype:
        heard[number] = scores
        return original(self, number, scores)

    monkeypatch.setattr(RandomSearch, "propose", propose)
    result = search(recipe(data, max_params=limit()), tmp_path / "run")
    measured = [row["val_accuracy"] for row in result.metrics]
    numbers = [DRAWS.index(genotype) for genotype in allowed()[:3]]
    assert list(heard) == list(range(numbers[-1] + 1)), "every number once, in order"
    for number, scores in heard.items():
        said = {own: score for own, score in zip(numbers, measured, strict=True) if own < number}
        assert scores == [said.get(before, 0.0) for before in range(number)]


@pytest.mark.parametrize(
    ("resource", "said"),
    [
        ({"max_params": 100}, "a budget of 100 parameters is out of reach .* smallest .* resource.network.channels=N"),
        ({"preset": "mild"}, "a resource penalty works through a method's probabilities, and 'random' has none"),
        ({"weight": 0.1, "max_params": 10**6}, "leave out `resource.preset` .* or pass a budget instead"),
    ],
)
def test_what_cannot_be_drawn_is_refused_before_there_is_a_folder(
    resource: dict[str, Any], said: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        search(recipe(data, **resource), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_budget_that_chance_does_not_meet_is_given_up_with_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "TRIES", 20)
    falling = sorted(DRAWS[:20], key=parameters, reverse=True)
    drawn, smallest = [*falling[10:], *falling[:10]], min(sizes()[:20])  # neither the first nor the last
    with pytest.raises(UserError, match="none of 20 random architectures meets the budget; the nearest has") as caught:
        next_within(budget(smallest - 1), drawn.__getitem__, 0, 0, "raise it")
    gap = f"{smallest / (smallest - 1) - 1:.1%} over the budget of"
    assert gap in str(caught.value) and str(caught.value).endswith("; raise it")


def test_later_architectures_may_use_the_tries_that_earlier_ones_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "TRIES", 20)
    small, large = DRAWS[sizes().index(min(sizes()))], DRAWS[sizes().index(max(sizes()))]
    drawn = [small, *[large] * 30, small]
    assert next_within(budget(min(sizes())), drawn.__getitem__, 0, 0, "")[0] == 0
    assert next_within(budget(min(sizes())), drawn.__getitem__, 1, 1, "")[0] == 31
    with pytest.raises(UserError, match="none of 19"):
        next_within(budget(min(sizes())), drawn.__getitem__, 1, 0, "")


def test_what_the_cheapest_network_misses_is_not_drawn_for() -> None:
    tight = budget(100)
    tight.find_cheapest(SPACE.layout(), count_candidates(SPACE, (1, 8, 8), 3), None)

    def draw(number: int) -> Genotype:
        raise AssertionError("in vain")

    with pytest.raises(UserError, match="out of reach of random architectures"):
        next_within(tight, draw, 0, 0, "")


@pytest.mark.parametrize("method", ["random", "darts"])
def test_a_genotype_brings_the_budget_of_its_search_along(method: str, data: Path, tmp_path: Path) -> None:
    own = {"method_settings": {"samples": 1}} if method == "random" else {}
    resource = {"max_params": limit(), "network": NETWORK}
    search(resolve(settings("nb201", data, method=method, epochs=1, resource=resource, **own)), tmp_path / "run")
    genotype = Genotype.load(tmp_path / "run")
    known = stated_budget(genotype)
    assert known is not None
    assert known.found == {"parameters": parameters(genotype)}
    assert (known.missed() is None) == (parameters(genotype) <= limit())
    again = known.budget("nb201")
    assert [again.measure(other)["parameters"] for other in DRAWS[:5]] == sizes()[:5], "counted as the search counts"
    assert again.limits == {"parameters": limit()}


@pytest.mark.parametrize(
    ("known", "said"),
    [
        (3, "must be a mapping"),
        ({"input": [1, 8, 8]}, "classes must be given"),
        ({"input": [1, 8], "classes": 3}, r"\[channels, height, width\]"),
        ({"input": [1, 8, 8], "classes": 3, "max_parms": 3}, "did you mean 'max_params'"),
        ({"input": [1, 8, 8], "classes": 3, "found": {"parameters": "few"}}, "found.parameters must be a number"),
    ],
)
def test_a_budget_that_cannot_be_read_is_refused(known: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        stated_budget(Genotype("nb201", DRAWS[0].cells, about={"budget": known}))


def test_a_missed_budget_is_reported_by_kind() -> None:
    about = {"input": [1, 8, 8], "classes": 3, "max_params": 100, "max_flops": 500}
    for found, said in (((100, 500), None), ((150, 400), "150 parameters, 50.0% over the budget of 100 parameters")):
        costs = dict(zip(("parameters", "flops"), found, strict=True))
        known = stated_budget(Genotype("nb201", DRAWS[0].cells, about={"budget": {**about, "found": costs}}))
        assert known is not None and known.missed() == said
