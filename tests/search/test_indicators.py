"""Indicators on one supernet: what perturbation measures, attention on another method's supernet, ranks by hand."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))

from search_toys import settings, write_data

from softcell.api import compare_indicators
from softcell.arch import WeightMix
from softcell.errors import UserError
from softcell.methods import fitted
from softcell.search import resolve, search
from softcell.search.indicators import Without, compute, perturbation, summary, trained_selector
from softcell.search.restored import restore


def silent(text: str) -> None:
    pass


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("indicators")
    data = write_data(root / "data.npz")
    for method in ("darts", "itnas"):
        search(resolve(settings("nb201", data, method=method, epochs=1)), root / method)
    search(resolve(settings("nb201", data, method="random", epochs=1, method_settings={"samples": 1})), root / "random")
    return {name: root / name for name in ("darts", "itnas", "random")}


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
    falls, rises = perturbation(found, 20, silent)

    def measured(table: torch.Tensor) -> tuple[float, float]:
        with torch.no_grad():
            logits = found.supernet(batch.images, WeightMix(found.supernet.layout, {"cell": table})).double()
        return float((logits.argmax(1) == batch.labels).double().mean()), float(F.cross_entropy(logits, batch.labels))

    whole = measured(weights)
    for choice, candidate in itertools.product(range(6), range(5)):
        table = weights.clone()
        table[choice, candidate] = 0.0
        accuracy, loss = measured(table)
        assert float(falls["cell"][choice, candidate]) == pytest.approx(whole[0] - accuracy, abs=1e-9)
        assert float(rises["cell"][choice, candidate]) == pytest.approx(loss - whole[1], abs=1e-5)
    assert bool(falls["cell"].any()), "some candidate is missed"
    assert float(rises["cell"][2, 0]) == pytest.approx(0, abs=1e-6), "none adds nothing that could be missed"


def test_a_token_that_is_taken_out_gets_no_attention(runs: dict[str, Path]) -> None:
    found = restore(runs["itnas"], device="cpu")
    looking = found.method.looking()
    assert looking is not None
    with torch.no_grad():
        found.supernet(torch.randn(3, 1, 8, 8), Without(looking, found.supernet.layout, "cell", 1, 3))
    rows = found.method.probabilities()["cell"]
    assert float(rows[1, 3]) == 0
    assert bool((rows[0] > 0).all()) and bool((rows[1, :3] > 0).all())


def test_attention_is_trained_on_another_methods_supernet_and_leaves_it_alone(runs: dict[str, Path]) -> None:
    found = restore(runs["darts"], device="cpu")
    before = {name: value.clone() for name, value in found.supernet.state_dict().items()}
    values = compute(found, ["alpha", "attention"], tell=silent)
    assert all(torch.equal(value, before[name]) for name, value in found.supernet.state_dict().items())
    torch.testing.assert_close(values["alpha"]["cell"], found.method.probabilities()["cell"].detach().double())
    torch.testing.assert_close(values["attention"]["cell"].sum(1), torch.ones(6, dtype=torch.float64))
    again = compute(restore(runs["darts"], device="cpu"), ["attention"], tell=silent)
    torch.testing.assert_close(again["attention"]["cell"], values["attention"]["cell"], rtol=0, atol=0)


def test_attention_of_its_own_supernet_is_that_of_the_search(runs: dict[str, Path]) -> None:
    found = restore(runs["itnas"], device="cpu")
    kept = found.method.probabilities()["cell"].double().clone()
    looked = compute(replace(found, is_finished=False), ["attention"], tell=silent)["attention"]["cell"]
    torch.testing.assert_close(looked, kept, rtol=1e-6, atol=1e-9)
    found = restore(runs["itnas"], device="cpu")
    for parameter in found.supernet.parameters():
        parameter.data.zero_()  # nothing has to pass once more
    assert torch.equal(compute(found, ["attention"], tell=silent)["attention"]["cell"], kept)


def test_alpha_is_trained_on_the_supernet_of_a_method_without_and_leaves_it_alone(runs: dict[str, Path]) -> None:
    found = restore(runs["itnas"], device="cpu")
    before = {name: value.clone() for name, value in found.supernet.state_dict().items()}
    alpha = compute(found, ["alpha"], tell=silent)["alpha"]["cell"]
    assert all(torch.equal(value, before[name]) for name, value in found.supernet.state_dict().items())
    torch.testing.assert_close(alpha.sum(1), torch.ones(6, dtype=torch.float64), rtol=0, atol=1e-6)

    # Every logit moves against its gradient: Adam's first steps have the size of its learning rate.
    supernet, method = trained_selector(found, 1, silent, "darts")
    logits = torch.cat([p.detach().flatten() for p in method.parameters()])
    torch.manual_seed(found.recipe.seed)
    fresh = fitted(type(method), type(method).Settings(), supernet)
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
    values = compute(replace(found, is_finished=False), ["attention", "perturbation"], images=20, tell=silent)
    torch.testing.assert_close(values["attention"]["cell"], kept, rtol=1e-5, atol=1e-7)
    moved = values["perturbation_loss"]["cell"].abs() > 0
    assert bool((moved.sum(1) >= 4).all()), "every candidate of an edge runs when the edge is looked at"
    live = found.mix(("cell", 2)).live(1)
    assert live is not None and len(live[2]) == 5 and all(len(row) <= 1 for i, row in enumerate(live) if i != 2)


def test_ranks_and_taus_by_hand(runs: dict[str, Path]) -> None:
    layout = restore(runs["darts"], device="cpu").supernet.layout
    up, down = torch.arange(5.0).repeat(6, 1), torch.arange(5.0).flip(0).repeat(6, 1)
    mixed = up.clone()
    mixed[:, [0, 1]] = mixed[:, [1, 0]]
    found = summary(
        layout, {"up": {"cell": up}, "down": {"cell": down}, "mixed": {"cell": mixed}, "flat": {"cell": 0 * up}}
    )
    first = found["edges"][0]
    assert first["best"] == {"up": "avg_pool_3x3", "down": "none", "mixed": "avg_pool_3x3", "flat": "none"}
    assert first["tau"]["up ~ down"] == pytest.approx(-1)
    assert first["tau"]["up ~ mixed"] == pytest.approx(0.8), "one of ten pairs is swapped"
    assert first["tau"]["up ~ flat"] is None


def test_what_cannot_be_looked_at_is_said(runs: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no supernet"):
        restore(runs["random"])
    with pytest.raises(UserError, match="must be one of alpha"):
        compute(restore(runs["darts"], device="cpu"), ["alfa"], tell=silent)
    with pytest.raises(UserError, match=r"run\.json"):
        compare_indicators(tmp_path)
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "run.json").write_text((runs["darts"] / "run.json").read_text())
    with pytest.raises(UserError, match="no checkpoint"):
        restore(folder)
