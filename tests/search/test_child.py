"""Children: measured each epoch without training, without changing the search, and once more with new statistics."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from softcell.arch import Mix, WeightMix, sample
from softcell.data import Batch
from softcell.engine.metrics import Measured
from softcell.methods import METHODS, Method
from softcell.search import resolve, search
from softcell.search.supernet import RECALIBRATED, Validation, measure_child, recalibrate_, recalibrated
from softcell.seeds import compared_by, last_accuracy, search_seeds
from softcell.spaces import Supernet
from softcell.spaces.execution import is_modules_only
from softcell.testing import one_hot, tiny_space
from tests.helpers.method_kinds import one_of_each_kind
from tests.helpers.search_toys import ALONE, THREE_EDGES, same, settings, state_of, write_data

DIFFERENTIABLE = [name for name in METHODS if issubclass(METHODS.get(name), Method)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "data.npz")


def small(data: Path, **changes: Any) -> dict[str, Any]:
    return settings("nb201", data, space_settings=THREE_EDGES, **changes)


def batches(number: int, seed: int, size: int = 6) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Batch(
            torch.randn(size, 3, 8, 8, dtype=torch.float64, generator=generator),
            torch.randint(4, (size,), generator=generator),
            torch.arange(size),
        )
        for _ in range(number)
    ]


@pytest.mark.parametrize("method", one_of_each_kind(DIFFERENTIABLE))
def test_children_are_measured_every_few_epochs_and_at_the_end(method: str, data: Path, tmp_path: Path) -> None:
    given = small(data, method=method, epochs=5, child_every=2, evolution={"generations": 0})
    result = search(resolve(given), tmp_path / "run")
    assert [row["epoch"] for row in result.metrics if "child_accuracy" in row] == [1, 3, 4]
    results = json.loads((tmp_path / "run" / "run.json").read_text())["results"]
    assert results["child_accuracy"] == result.metrics[-1]["child_accuracy"]
    assert results["child_loss"] == result.metrics[-1]["child_loss"]
    assert 0.0 <= results["child_accuracy_bn"] <= 1.0
    assert results["child_split"] == "validation"


@pytest.mark.parametrize("method", one_of_each_kind(DIFFERENTIABLE))
def test_looking_at_children_changes_nothing_in_the_search(method: str, data: Path, tmp_path: Path) -> None:
    runs: dict[int, Any] = {}
    for every in (0, 1):
        given = small(data, method=method, epochs=2, child_every=every)
        runs[every] = search(resolve(given), tmp_path / str(every)).metrics
    for off, on in zip(runs[0], runs[1], strict=True):
        assert "child_accuracy" not in off
        kept = {key: value for key, value in on.items() if not key.startswith("child") and key != "seconds"}
        assert kept == {key: value for key, value in off.items() if key != "seconds"}
    assert same(state_of(tmp_path / "0"), state_of(tmp_path / "1"))
    assert "child_accuracy" not in json.loads((tmp_path / "0" / "run.json").read_text())["results"]


def test_a_child_is_the_supernet_under_one_hot_weights_with_its_running_statistics() -> None:
    space = tiny_space("darts")
    torch.manual_seed(0)
    supernet = space.supernet((3, 8, 8), 4).double()
    genotype = sample(space.layout(), 1)
    mix = WeightMix(space.layout(), one_hot(space.layout(), genotype))
    with torch.no_grad():
        for batch in batches(3, seed=1):
            supernet(batch.images, mix)
    held = batches(2, seed=2)
    found = measure_child(supernet, genotype, held, ALONE)
    supernet.eval()
    with torch.no_grad():
        logits = torch.cat([supernet(batch.images, mix) for batch in held])
    labels = torch.cat([batch.labels for batch in held])
    assert found.count == 12
    assert found.loss == pytest.approx(float(nn.functional.cross_entropy(logits, labels)))
    assert found.accuracy == float((logits.argmax(1) == labels).double().mean())


def test_statistics_are_replaced_by_their_plain_mean_over_the_batches_and_nothing_else_moves() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2)).double()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    given = batches(3, seed=3)
    with torch.no_grad():
        network(batches(1, seed=9)[0].images + 5.0)  # statistics of other images, which must be forgotten
    recalibrate_(network, given)
    with torch.no_grad():
        maps = [network[0](batch.images) for batch in given]
    torch.testing.assert_close(network[1].running_mean, torch.stack([m.mean((0, 2, 3)) for m in maps]).mean(0))
    torch.testing.assert_close(network[1].running_var, torch.stack([m.var((0, 2, 3)) for m in maps]).mean(0))
    for name, value in network.state_dict().items():
        if "running" not in name and "tracked" not in name:
            assert torch.equal(value, before[name])


def test_new_statistics_stay_in_the_child() -> None:
    space = tiny_space("nb201")
    supernet = space.supernet((3, 8, 8), 4).double()
    before = {name: value.clone() for name, value in supernet.state_dict().items()}
    genotype = sample(space.layout(), 1)
    held = batches(1, seed=4)
    plain = measure_child(supernet, genotype, held, ALONE)
    calibrated = measure_child(supernet, genotype, held, ALONE, recalibrate=batches(4, seed=5))
    assert calibrated.loss != plain.loss
    assert all(torch.equal(value, before[name]) for name, value in supernet.state_dict().items())


def test_recalibrated_norms_are_means_over_batches_and_everything_is_restored() -> None:
    torch.manual_seed(0)
    supernet = tiny_space("nb201").supernet((3, 8, 8), 4).double()
    supernet.use_drop_path(0.5)
    supernet.drop_path.set_fraction(0.6)
    layout = supernet.layout
    mix = WeightMix(layout, {t.name: torch.rand(t.shape, dtype=torch.float64).softmax(1) for t in layout.tables})
    looked = batches(5, 1)
    norms = [module for module in supernet.modules() if isinstance(module, nn.BatchNorm2d)]
    supernet(looked[0].images, mix)
    before = {name: value.clone() for name, value in supernet.state_dict().items()}
    chance, drawn = supernet.drop_path.current.clone(), torch.random.get_rng_state()

    twin = copy.deepcopy(supernet)
    twin.use_drop_path(0.0)
    sums: dict[int, list[torch.Tensor]] = {}
    for number, norm in enumerate(m for m in twin.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.register_forward_pre_hook(
            lambda module, given, number=number: sums.setdefault(number, []).append(given[0].detach())
        )
    with torch.no_grad():
        for batch in looked:
            twin(batch.images, mix)
    with recalibrated(supernet, mix, looked):
        for number, norm in enumerate(norms):
            if number in sums:  # each batch-norm is run once per batch
                assert len(sums[number]) == len(looked)
                means = torch.stack([x.mean((0, 2, 3)) for x in sums[number]]).mean(0)
                variances = torch.stack([x.transpose(0, 1).flatten(1).var(1) for x in sums[number]]).mean(0)
                torch.testing.assert_close(norm.running_mean, means)
                torch.testing.assert_close(norm.running_var, variances)
    assert sums
    assert torch.equal(torch.random.get_rng_state(), drawn) and torch.equal(supernet.drop_path.current, chance)
    assert all(torch.equal(value, before[name]) for name, value in supernet.state_dict().items())
    assert {norm.momentum for norm in norms} == {0.1} and supernet.training

    with (
        pytest.raises(RuntimeError),
        recalibrated(supernet, mix, [Batch(torch.zeros(1), *looked[0].images[:2])]),
    ):
        raise AssertionError("such images cannot be looked at")
    assert all(torch.equal(value, before[name]) for name, value in supernet.state_dict().items())
    assert {norm.momentum for norm in norms} == {0.1} and torch.equal(supernet.drop_path.current, chance)


@pytest.mark.parametrize("method", one_of_each_kind(DIFFERENTIABLE))
def test_methods_with_many_cells_are_validated_with_recalibrated_norms(
    method: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = METHODS.get(method)
    given = small(data, method=method, epochs=3, drop_path=0.3, evolution={"generations": 0})
    momenta: list[set[float | None]] = []
    original = Validation.__call__

    def call(self: Validation, mix: Mix) -> Measured:
        momenta.append({norm.momentum for norm in self._supernet.modules() if isinstance(norm, nn.BatchNorm2d)})
        return original(self, mix)

    with monkeypatch.context() as patch:
        patch.setattr(Validation, "__call__", call)
        result = search(resolve(given), tmp_path / "run")
    results = json.loads((tmp_path / "run" / "run.json").read_text())["results"]
    many = method in ("snas", "spos", "entrannas", "entrannas-dst", "gdas", "drnas")
    assert [row["epoch"] for row in result.metrics if "val_accuracy_bn" in row] == [0, 1, 2] * many
    assert all(row["val_accuracy_bn"] == row["val_accuracy"] for row in result.metrics if many)
    assert momenta == [{None}] * 3 or not many, "recalibrated norms average plainly"
    assert results.get("val_accuracy_bn") == result.metrics[-1].get("val_accuracy_bn")
    assert compared_by([result]) == ("val_accuracy_bn" if many else "val_accuracy")
    if many:
        monkeypatch.setattr(kind, "many_cells", property(lambda self: False))
        search(resolve(given), tmp_path / "plain")
        assert same(state_of(tmp_path / "run"), state_of(tmp_path / "plain")), "measuring changes nothing"


@pytest.mark.parametrize("paths", ["all", "single", "pairwise"])
def test_the_indicator_token_learns_in_many_cells_if_steps_run_paths(paths: str, data: Path, tmp_path: Path) -> None:
    given = settings("nb201", data, method="itnas", epochs=1, method_settings={"paths": paths})
    result = search(resolve(given), tmp_path / "run")
    assert ("val_accuracy_bn" in result.metrics[-1]) == (paths != "all")


def test_norms_are_measured_as_steps_are_made(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Module by module where that is asked for, and in the precision of the search."""
    seen: list[tuple[bool, bool]] = []
    original = Supernet.forward

    def forward(self: Supernet, *given: Any) -> Any:
        if any(module.momentum is None for module in self.modules() if isinstance(module, nn.BatchNorm2d)):
            seen.append((is_modules_only(), torch.is_autocast_enabled("cpu")))
        return original(self, *given)

    monkeypatch.setattr(Supernet, "forward", forward)
    for fused in (True, False):
        for precision in ("float32", "bfloat16"):
            seen.clear()
            given = settings("nb201", data, method="snas", epochs=1, fused=fused, precision=precision)
            search(resolve(given), tmp_path / f"{fused}-{precision}")
            assert set(seen) == {(not fused, precision == "bfloat16")}


def test_seeds_are_compared_by_a_figure_that_all_of_them_have(data: Path, tmp_path: Path) -> None:
    recipe = resolve(settings("nb201", data, method="snas", epochs=1))
    found = search_seeds(recipe, tmp_path / "runs", [0, 1])
    last = {seed: one.metrics[-1] for seed, one in found.results.items()}
    listed = {row["seed"]: row for row in json.loads((tmp_path / "runs" / "seeds.json").read_text())["seeds"]}
    for seed, row in last.items():
        assert (listed[seed]["val_accuracy"], listed[seed]["val_accuracy_bn"]) == (
            row["val_accuracy"],
            row["val_accuracy_bn"],
        )
    results = list(found.results.values())
    assert compared_by(results) == "val_accuracy_bn" and found.best == max(
        last, key=lambda s: (last[s][RECALIBRATED], -s)
    )
    del results[0].metrics[-1]["val_accuracy_bn"]  # finished before there was such a figure
    assert compared_by(results) == "val_accuracy"
    assert [last_accuracy(one, compared_by(results)) for one in results] == [
        row["val_accuracy"] for row in last.values()
    ]
