"""Indicators on one supernet: perturbation, attention on another method's supernet, hand-computed ranks."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from softcell.api import compare_indicators
from softcell.arch import WeightMix
from softcell.data import Batch
from softcell.errors import UserError
from softcell.search import resolve, search
from softcell.search.indicators import (
    Baseline,
    Only,
    Without,
    _norm_batches,
    compute,
    perturbation,
    summary,
    trained_selector,
)
from softcell.search.supernet import Restored, recalibrated, restore
from tests.helpers.search_toys import settings, write_data


def silent(text: str) -> None:
    pass


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("indicators")
    data = write_data(root / "data.npz")
    halves = {"weights": 0.5, "validation": 0.5}
    for method in ("darts", "itnas", "snas"):
        search(resolve(settings("nb201", data, method=method, epochs=1, split=halves)), root / method)
    search(resolve(settings("nb201", data, method="random", epochs=1, method_settings={"samples": 1})), root / "random")
    return {name: root / name for name in ("darts", "itnas", "snas", "random")}


def test_a_restored_search_is_what_was_saved(runs: dict[str, Path]) -> None:
    for name in ("darts", "itnas"):
        first, second = (restore(runs[name], device="cpu") for _ in range(2))
        x = torch.randn(2, 1, 8, 8)
        with torch.no_grad():
            torch.testing.assert_close(first.supernet(x, first.mix()), second.supernet(x, second.mix()), rtol=0, atol=0)
        assert not first.supernet.training


def test_perturbation_is_what_the_supernet_loses_without_a_candidate(runs: dict[str, Path]) -> None:
    found = restore(runs["darts"], device="cpu")
    chosen = found.parts["validation"][:20]
    (batch,) = found.feeds(20).plain(found.dataset.train, chosen).epoch(0)
    weights = found.method.probabilities()["cell"].detach()
    last = [module for module in found.supernet.modules() if isinstance(module, torch.nn.Linear)][-1]
    with torch.no_grad():  # one epoch names the same class everywhere: all classes are made as likely
        last.bias -= found.supernet(batch.images, found.mix()).mean(0)
    falls, rises, baseline = perturbation(found, 20, silent)

    def measured(table: torch.Tensor) -> tuple[float, float]:
        with torch.no_grad():
            logits = found.supernet(batch.images, WeightMix(found.supernet.layout, {"cell": table})).double()
        return float((logits.argmax(1) == batch.labels).double().mean()), float(F.cross_entropy(logits, batch.labels))

    whole = measured(weights)
    assert baseline.accuracy == whole[0] and baseline.images == 20 and not baseline.recalibrated, "as DARTS-PT does"
    check_every_candidate(weights, whole, measured, falls["cell"], rises["cell"])
    assert bool(falls["cell"].any()), "some candidate is missed"
    assert float(rises["cell"][2, 0]) == pytest.approx(0, abs=1e-6), "none adds nothing that could be missed"


def check_every_candidate(
    weights: torch.Tensor,
    whole: tuple[float, float],
    measured: Callable[[torch.Tensor], tuple[float, float]],
    falls: torch.Tensor,
    rises: torch.Tensor,
) -> None:
    """Each is what accuracy and loss (`whole`) change by without the candidate, one at a time."""
    for choice, candidate in itertools.product(range(6), range(5)):
        table = weights.clone()
        table[choice, candidate] = 0.0
        accuracy, loss = measured(table)
        assert float(falls[choice, candidate]) == pytest.approx(whole[0] - accuracy, abs=1e-9)
        assert float(rises[choice, candidate]) == pytest.approx(loss - whole[1], abs=1e-5)


def first_training_batches(found: Restored, count: int) -> list[Batch]:
    training = found.feeds().training(found.parts["weights"], found.dataset.augment)
    return list(itertools.islice(training.epoch(0), count))


def spoil_norms(found: Restored) -> None:
    """Running statistics that fit nothing."""
    for module in found.supernet.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            module.running_mean.fill_(3.0)
            module.running_var.fill_(40.0)


def test_discretisation_is_the_accuracy_with_one_candidate_on_one_edge(runs: dict[str, Path]) -> None:
    """Figure 3 of IT-NAS: on DARTS's supernet a weight of 1 on the edge in all cells, and all other edges mixed."""
    found = restore(runs["darts"], device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():  # after one epoch it names one class always
        for parameter in found.supernet.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    values = compute(found, ["discretisation"], images=24, notify=silent).values["discretisation"]["cell"]
    chosen = found.parts["validation"][:24]
    batches = list(found.feeds().plain(found.dataset.train, chosen).epoch(0))
    layout, seen = found.supernet.layout, set()
    for edge, candidate in itertools.product(range(6), range(5)):
        weights = found.method.probabilities()["cell"].detach().clone()
        weights[edge] = F.one_hot(torch.tensor(candidate), 5).to(weights.dtype)
        right = 0
        with torch.no_grad():
            for batch in batches:
                logits = found.supernet(batch.images, WeightMix(layout, {"cell": weights}))
                right += int((logits.argmax(1) == batch.labels).sum())
        assert float(values[edge, candidate]) == pytest.approx(right / 24)
        seen.add(right)
    assert len(seen) > 1, "accuracies must differ to be messages apart"


def test_an_edge_that_keeps_one_candidate_attends_only_to_it(runs: dict[str, Path]) -> None:
    found = restore(runs["itnas"], device="cpu")
    mix = found.mix()
    x = next(iter(found.feeds().plain(found.dataset.train, found.parts["validation"]).epoch(0))).images
    only = Only(mix, found.supernet.layout, "cell", 3, 2)
    found.supernet(x, only)
    rows = mix.rows.mean("cell")  # type: ignore[attr-defined]
    assert bool((rows[:, 3, 2] > 0).all()) and not rows[:, 3, [0, 1, 3, 4]].any()
    assert bool((rows[:, 2] > 0).all()), "other edges stay mixed"


def test_it_is_computed_only_on_request(runs: dict[str, Path]) -> None:
    assert "discretisation" not in compute(restore(runs["itnas"], device="cpu"), images=8, notify=silent).values


def test_sampled_cells_are_perturbed_with_recalibrated_norms(runs: dict[str, Path]) -> None:
    found = restore(runs["snas"], device="cpu")
    spoil_norms(found)
    kept = {name: value.clone() for name, value in found.supernet.state_dict().items()}
    falls, rises, baseline = perturbation(found, 20, silent)
    assert all(torch.equal(value, kept[name]) for name, value in found.supernet.state_dict().items()), "all is put back"
    assert not found.supernet.training
    (batch,) = found.feeds(20).plain(found.dataset.train, found.parts["validation"][:20]).epoch(0)
    norms = first_training_batches(found, 2)  # 16 images each, for 20 that are looked at
    weights = found.method.probabilities()["cell"].detach()

    def measured(table: torch.Tensor) -> tuple[float, float]:
        mix = WeightMix(found.supernet.layout, {"cell": table})
        with recalibrated(found.supernet, mix, norms), torch.no_grad():
            logits = found.supernet(batch.images, mix).double()
        return float((logits.argmax(1) == batch.labels).double().mean()), float(F.cross_entropy(logits, batch.labels))

    whole = measured(weights)
    assert baseline.accuracy == whole[0] and baseline.recalibrated
    check_every_candidate(weights, whole, measured, falls["cell"], rises["cell"])
    assert float(rises["cell"].abs().max()) > 1e-4


def test_norms_are_measured_over_as_many_images_as_are_looked_at_and_no_more_than_the_search_takes(
    runs: dict[str, Path],
) -> None:
    for method in ("snas", "itnas"):
        found = restore(runs[method], device="cpu")
        seen = [len(_norm_batches(found, images) or ()) for images in (1, 16, 17)]
        assert seen == [1, 1, 2]
        less = replace(found, recipe=replace(found.recipe, evolution=replace(found.recipe.evolution, norm_batches=1)))
        assert len(_norm_batches(less, 32) or ()) == 1
    assert _norm_batches(restore(runs["darts"], device="cpu"), 20) is None


def test_guessing_is_the_most_frequent_class_and_two_deviations() -> None:
    baseline = Baseline(0.16, 100, 0.1, False)
    assert baseline.guessing == pytest.approx(0.1 + 2 * 0.03)
    assert baseline.at_chance and not replace(baseline, accuracy=0.17).at_chance
    assert not replace(baseline, images=10_000).at_chance, "more images tell more apart"
    assert replace(baseline, accuracy=0.5, most_frequent=0.5).at_chance, "half of the images may be of one class"


def test_a_supernet_at_chance_names_no_best_candidate_by_perturbation(runs: dict[str, Path]) -> None:
    found = restore(runs["darts"], device="cpu")
    last = [module for module in found.supernet.modules() if isinstance(module, torch.nn.Linear)][-1]
    with torch.no_grad():
        last.weight.zero_()  # one class is named always
    made = compute(found, ["alpha", "perturbation"], images=20, notify=silent)
    assert made.baseline is not None and made.baseline.at_chance
    assert made.saying_nothing == ("perturbation", "perturbation_loss")
    messages = summary(found.supernet.layout, made.values, made.saying_nothing)
    for edge in messages["edges"]:
        assert edge["best"]["perturbation"] is edge["best"]["perturbation_loss"] is None and edge["best"]["alpha"]
        assert edge["tied"] == {} and set(edge["tau"].values()) == {None}
    assert compute(found, ["alpha"], notify=silent).saying_nothing == ()


def test_the_images_that_were_used_are_recorded(runs: dict[str, Path]) -> None:
    held = len(restore(runs["darts"], device="cpu").parts["validation"])
    assert held < 512
    messages = compare_indicators(runs["darts"], ["perturbation"], device="cpu")
    assert messages["images"] == messages["baseline"]["images"] == held
    assert compare_indicators(runs["darts"], ["perturbation"], images=5, device="cpu")["images"] == 5
    messages = compare_indicators(runs["darts"], ["alpha"], device="cpu")
    assert messages["images"] is messages["baseline"] is None


def test_a_token_that_is_taken_out_gets_no_attention(runs: dict[str, Path]) -> None:
    found = restore(runs["itnas"], device="cpu")
    assert found.method.selection is not None
    ((looking, _),) = found.method.selection.passes()
    with torch.no_grad():
        found.supernet(torch.randn(3, 1, 8, 8), Without(looking, found.supernet.layout, "cell", 1, 3))
    rows = found.method.probabilities()["cell"]
    assert float(rows[1, 3]) == 0
    assert bool((rows[0] > 0).all()) and bool((rows[1, :3] > 0).all())


def test_attention_is_trained_on_another_methods_supernet_and_leaves_it_unchanged(runs: dict[str, Path]) -> None:
    found = restore(runs["darts"], device="cpu")
    before = {name: value.clone() for name, value in found.supernet.state_dict().items()}
    values = compute(found, ["alpha", "attention"], notify=silent).values
    assert all(torch.equal(value, before[name]) for name, value in found.supernet.state_dict().items())
    torch.testing.assert_close(values["alpha"]["cell"], found.method.probabilities()["cell"].detach().double())
    torch.testing.assert_close(values["attention"]["cell"].sum(1), torch.ones(6, dtype=torch.float64))
    again = compute(restore(runs["darts"], device="cpu"), ["attention"], notify=silent).values
    torch.testing.assert_close(again["attention"]["cell"], values["attention"]["cell"], rtol=0, atol=0)


def test_attention_of_its_own_supernet_matches_the_search(runs: dict[str, Path]) -> None:
    found = restore(runs["itnas"], device="cpu")
    kept = found.method.probabilities()["cell"].double().clone()
    looked = compute(replace(found, is_finished=False), ["attention"], notify=silent).values["attention"]["cell"]
    torch.testing.assert_close(looked, kept, rtol=1e-6, atol=1e-9)
    found = restore(runs["itnas"], device="cpu")
    for parameter in found.supernet.parameters():
        parameter.data.zero_()  # nothing has to pass once more
    assert torch.equal(compute(found, ["attention"], notify=silent).values["attention"]["cell"], kept)


def test_alpha_is_trained_on_the_supernet_of_a_method_without_alpha_and_leaves_it_unchanged(
    runs: dict[str, Path],
) -> None:
    found = restore(runs["itnas"], device="cpu")
    before = {name: value.clone() for name, value in found.supernet.state_dict().items()}
    alpha = compute(found, ["alpha"], notify=silent).values["alpha"]["cell"]
    assert all(torch.equal(value, before[name]) for name, value in found.supernet.state_dict().items())
    torch.testing.assert_close(alpha.sum(1), torch.ones(6, dtype=torch.float64), rtol=0, atol=1e-6)

    # Every logit moves against its gradient: Adam's first steps have the size of its learning rate.
    supernet, method = trained_selector(found, 1, silent, "darts")
    logits = torch.cat([p.detach().flatten() for p in method.parameters()])
    torch.manual_seed(found.recipe.seed)
    fresh = type(method).for_supernet(type(method).Settings(), supernet)
    moved = logits - torch.cat([p.detach().flatten() for p in fresh.parameters()])
    steps = -(-len(found.parts["validation"]) // found.recipe.batch_size)
    assert 0 < float(moved.abs().max()) <= steps * found.recipe.architecture.lr * 1.5
    torch.testing.assert_close(method.probabilities()["cell"].detach().double(), alpha)


def test_supernets_of_single_paths_are_looked_at_choice_by_choice(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data.npz")
    given = settings("nb201", data, method="itnas", epochs=1, method_settings={"paths": "single"})
    search(resolve(given), tmp_path / "single")
    found = restore(tmp_path / "single", device="cpu")
    kept = found.method.probabilities()["cell"].double().clone()
    made = compute(replace(found, is_finished=False), ["attention", "perturbation"], images=20, notify=silent)
    values = made.values
    torch.testing.assert_close(values["attention"]["cell"], kept, rtol=1e-5, atol=1e-7)
    moved = values["perturbation_loss"]["cell"].abs() > 0
    assert bool((moved.sum(1) >= 4).all()), "every candidate of an edge runs when the edge is looked at"
    assert made.baseline is not None and made.baseline.recalibrated
    (batch,) = found.feeds(20).plain(found.dataset.train, found.parts["validation"][:20]).epoch(0)
    whole = []
    for choice in range(6):
        mix = found.mix(("cell", choice))
        with recalibrated(found.supernet, mix, first_training_batches(found, 2)), torch.no_grad():
            whole.append(float((found.supernet(batch.images, mix).argmax(1) == batch.labels).double().mean()))
    assert made.baseline.accuracy == pytest.approx(sum(whole) / 6), "each choice has a baseline of its own"
    live = found.mix(("cell", 2)).live(1)
    assert live is not None and len(live[2]) == 5 and all(len(row) <= 1 for i, row in enumerate(live) if i != 2)


def test_ranks_and_taus_match_hand_computed_values(runs: dict[str, Path]) -> None:
    layout = restore(runs["darts"], device="cpu").supernet.layout
    up, down = torch.arange(5.0).repeat(6, 1), torch.arange(5.0).flip(0).repeat(6, 1)
    mixed = up.clone()
    mixed[:, [0, 1]] = mixed[:, [1, 0]]
    found = summary(
        layout, {"up": {"cell": up}, "down": {"cell": down}, "mixed": {"cell": mixed}, "flat": {"cell": 0 * up}}
    )
    first = found["edges"][0]
    assert first["best"] == {"up": "avg_pool_3x3", "down": "none", "mixed": "avg_pool_3x3", "flat": None}
    assert first["tied"] == {"flat": ["none", "skip_connect", "nor_conv_1x1", "nor_conv_3x3", "avg_pool_3x3"]}
    assert first["tau"]["up ~ down"] == pytest.approx(-1)
    assert first["tau"]["up ~ mixed"] == pytest.approx(0.8), "one of ten pairs is swapped"
    assert first["tau"]["up ~ flat"] is None


@pytest.mark.parametrize(
    ("row", "best", "tied"),
    [
        ([0.1, 0.3, 0.3, 0.2, 0.1], None, ["skip_connect", "nor_conv_1x1"]),
        ([0.2, 0.2 + 1e-9, 0.2, 0.1, 0.1], None, ["none", "skip_connect", "nor_conv_1x1"]),  # as float32 rounds
        ([0.2, 0.2 + 1e-5, 0.2, 0.1, 0.1], "skip_connect", None),
        ([-0.1, -0.1, -0.1, 0.0, -0.1], "nor_conv_3x3", None),
    ],
)
def test_a_tie_names_no_best_candidate(
    runs: dict[str, Path], row: list[float], best: str | None, tied: list[str] | None
) -> None:
    layout = restore(runs["darts"], device="cpu").supernet.layout
    table = torch.tensor([row] * 6, dtype=torch.float64)
    first = summary(layout, {"one": {"cell": table}})["edges"][0]
    assert first["best"]["one"] == best and first["tied"].get("one") == tied


def test_what_cannot_be_looked_at_is_said(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no supernet"):
        restore(runs["random"])
    with pytest.raises(UserError, match="must be one of alpha"):
        compute(restore(runs["darts"], device="cpu"), ["alfa"], notify=silent)
    with pytest.raises(UserError, match=r"run\.json"):
        compare_indicators(tmp_path)
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "run.json").write_text((runs["darts"] / "run.json").read_text())
    with pytest.raises(UserError, match="no checkpoint"):
        restore(folder)
