"""SNAS against its equations: literal twins, statistics with a stated confidence, or hand-computed values."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from softcell.arch import Choice, Layout, StrongestEach, Table, WeightMix
from softcell.arch.mix import concrete, gumbel
from softcell.errors import UserError
from softcell.methods import Observer
from softcell.methods.snas import Snas, SnasSettings, credit, temperature_at
from softcell.nn.candidates import Spec
from softcell.search import resolve, search
from softcell.search.steps import bilevel, single_level
from softcell.spaces import build_space
from softcell.spaces.cell import MixedCell
from softcell.spaces.edges import Combiner
from softcell.testing import RaggedSpace, one_hot, tiny_space
from tests.helpers.search_toys import THREE_EDGES, batch, check_resumed, same, settings, step_state, write_data

TABLE = Table(
    "cell",
    (Choice(0, 1, ("none", "skip_connect")), Choice(0, 2, ("skip_connect", "nor_conv_3x3", "none"))),
    (2,),
)
MASK = TABLE.mask()
LAYOUT = Layout("toy", (TABLE,), ("cell", "cell"), StrongestEach())
DRAWS = 100_000


def uniforms(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- Eq 5 and 24 ---


@pytest.mark.parametrize("temperature", [5.0, 1.0, 0.3])
def test_the_gradient_of_a_sample_is_equation_24(temperature: float) -> None:
    """∂Z^l/∂α^k = (δ_lk - Z^l) Z^k / (λ α^k), for α itself; the toolkit learns log α."""
    alpha = torch.tensor([0.5, 2.0, 1.3, 0.1], dtype=torch.float64, requires_grad=True)
    uniform, mask = uniforms(4, seed=3), torch.ones(4, dtype=torch.bool)

    def sample(a: Tensor) -> Tensor:
        return concrete(a.log(), mask, temperature, uniform)

    assert torch.autograd.gradcheck(sample, (alpha,))
    z = sample(alpha).detach()
    found = torch.autograd.functional.jacobian(sample, alpha)
    literal = torch.empty(4, 4, dtype=torch.float64)
    for k in range(4):
        for m in range(4):
            literal[m, k] = (float(m == k) - z[m]) * z[k] / (temperature * alpha[k].detach())
    torch.testing.assert_close(found, literal, rtol=1e-10, atol=1e-12)


def test_a_sample_is_the_softmax_of_perturbed_logits_equation_5() -> None:
    alpha, uniform = [0.5, 2.0, 1.3], [0.2, 0.7, 0.9]
    powers = [math.exp((math.log(a) - math.log(-math.log(u))) / 0.7) for a, u in zip(alpha, uniform, strict=True)]
    expected = torch.tensor([p / sum(powers) for p in powers], dtype=torch.float64)
    found = concrete(
        torch.tensor(alpha, dtype=torch.float64).log(),
        torch.ones(3, dtype=torch.bool),
        0.7,
        torch.tensor(uniform, dtype=torch.float64),
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_padding_is_ignored_in_a_sample() -> None:
    log_alpha = torch.zeros(TABLE.shape, dtype=torch.float64)
    log_alpha[~MASK] = 99.0
    log_alpha.requires_grad_()
    z = concrete(log_alpha, MASK, 0.5, uniforms(*TABLE.shape))
    assert not z[~MASK].any()
    torch.testing.assert_close(z.sum(1), torch.ones(2, dtype=torch.float64))
    (z * torch.randn(TABLE.shape, dtype=torch.float64)).sum().backward()
    assert log_alpha.grad is not None
    assert not log_alpha.grad[~MASK].any()
    assert log_alpha.grad[MASK].all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_numbers_of_0_and_1_give_finite_samples(dtype: torch.dtype) -> None:
    noise = gumbel(torch.tensor([0.0, 0.5, 1.0], dtype=dtype))
    assert noise.isfinite().all()
    assert noise[0] < noise[1] < noise[2]
    z = concrete(
        torch.zeros(3, dtype=dtype), torch.ones(3, dtype=torch.bool), 0.03, torch.tensor([0.0, 0.5, 1.0], dtype=dtype)
    )
    assert z.isfinite().all()


@pytest.mark.parametrize("temperature", [5.0, 1.0, 0.03])
def test_candidates_win_as_often_as_alpha_says_at_any_temperature(temperature: float) -> None:
    """Chi-square over 100,000 draws of the method's own sampler; refused at less than 1 in 10,000 by chance."""
    odds = torch.tensor([1.0, 4.0, 2.0, 0.5])
    table = Table("cell", (Choice(0, 1, ("a", "b", "c", "d")),) * DRAWS, (1,))
    method = Snas(Layout("toy", (table,), ("cell",), StrongestEach()), SnasSettings())
    with torch.no_grad():
        method.log_alpha["cell"].copy_(odds.log().expand(DRAWS, 4))
    method.temperature.fill_(temperature)
    torch.manual_seed(0)
    winners = method.relax().tables["cell"].argmax(1)  # type: ignore[attr-defined]
    counts = torch.bincount(winners, minlength=4).double()
    expected = DRAWS * odds.double() / odds.sum()
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-4
    torch.testing.assert_close(method.probabilities()["cell"][0].detach(), odds / odds.sum())


def test_samples_become_one_hot_as_the_temperature_falls() -> None:
    log_alpha, mask = torch.zeros(DRAWS // 10, 5, dtype=torch.float64), torch.ones(5, dtype=torch.bool)
    shares = [
        float((concrete(log_alpha, mask, t, uniforms(DRAWS // 10, 5)).amax(1) > 0.99).double().mean())
        for t in (5.0, 1.0, 0.3, 0.1, 0.03)
    ]
    assert shares == sorted(shares)
    assert shares[0] < 0.01
    assert shares[-1] > 0.85


# --- the method ---


def test_one_sample_per_table_and_step_is_shared_by_its_sites() -> None:
    torch.manual_seed(0)
    method = Snas(LAYOUT, SnasSettings())
    first, second = method.relax(), method.relax()
    assert isinstance(first, WeightMix)
    assert isinstance(second, WeightMix)
    assert first.weights(0) is first.weights(1)
    assert not torch.equal(first.weights(0), second.weights(0))
    torch.manual_seed(0)
    again = Snas(LAYOUT, SnasSettings()).relax()
    assert torch.equal(again.weights(0), first.weights(0))  # type: ignore[attr-defined]


def test_log_alpha_starts_around_one() -> None:
    torch.manual_seed(0)
    wide = Table("cell", tuple(Choice(0, 1, tuple(f"op{k}" for k in range(50))) for _ in range(50)), (1,))
    logits = Snas(Layout("toy", (wide,), ("cell",), StrongestEach()), SnasSettings()).log_alpha["cell"].detach()
    assert abs(float(logits.mean()) - 1) < 1e-3
    assert abs(float(logits.std()) / 0.01 - 1) < 0.1


def test_over_150_epochs_the_temperature_is_nearly_that_of_the_authors_code() -> None:
    """Theirs is one step ahead, 1 - 0.97·(e + 1)/150; ours ends at 0.03 in searches of any length."""
    s = SnasSettings()
    for epochs, most in ((150, 0.0065), (10, 0.91)):
        ours = [
            temperature_at(e / (epochs - 1), s.first_temperature, s.last_temperature, s.schedule) for e in range(epochs)
        ]
        theirs = [1 - 0.97 * (e + 1) / 150 for e in range(epochs)]
        assert (ours[0], ours[-1]) == pytest.approx((1.0, 0.03))
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) == pytest.approx(most, abs=5e-3)


def test_the_temperature_falls_as_scheduled_in_place() -> None:
    assert temperature_at(0.5, 1.0, 0.03, "linear") == pytest.approx(0.515)
    assert temperature_at(0.5, 1.0, 0.04, "exponential") == pytest.approx(0.2)
    assert temperature_at(0.7, 2.0, 0.03, "constant") == 2.0
    method = Snas(LAYOUT, SnasSettings())
    place = method.temperature.data_ptr()
    values = []
    for progress in (0.0, 0.5, 1.0):
        method.begin_epoch(progress)
        values.append(float(method.gauges()["temperature"]))
    assert values == pytest.approx([1.0, 0.515, 0.03])
    assert method.temperature.data_ptr() == place
    with pytest.raises(UserError, match="last_temperature > 0"):
        SnasSettings(last_temperature=0.0)


def test_none_can_be_derived_and_ties_go_to_the_earlier_candidate() -> None:
    method = Snas(LAYOUT, SnasSettings())
    with torch.no_grad():
        method.log_alpha["cell"].copy_(torch.tensor([[2.0, 1.0, 99.0], [1.0, 1.0, 3.0]]))
    assert [str(pick) for pick in method.derive().cells["cell"].picks] == ["none(0->1)", "none(0->2)"]


def test_the_paper_recipe_is_the_papers() -> None:
    recipe = resolve({"method": "snas", "data": "cifar10"})
    assert (recipe.scale, recipe.epochs, recipe.regime, recipe.batch_size) == ("paper", 150, "single-level", 64)
    assert (recipe.weights.lr, recipe.weights.lr_min, recipe.weights.weight_decay) == (0.025, 0.0, 3e-4)
    assert (recipe.architecture.lr, recipe.architecture.beta1, recipe.architecture.clip) == (3e-4, 0.5, 10.0)
    assert (recipe.drop_path, recipe.child_every, recipe.resource.eta) == (0.3, 1, 1.5e-3)
    assert recipe.split == {"weights": 0.9, "validation": 0.1}
    assert (recipe.space_settings["cells"], recipe.space_settings["channels"]) == (8, 16)
    assert recipe.method_settings["last_temperature"] == 0.03


def test_a_vanished_node_is_zeros_in_the_child_and_left_out_in_the_evaluation_network() -> None:
    space = build_space("darts", {"cells": 3, "channels": 4, "nodes": 3})
    layout = space.layout()
    torch.manual_seed(0)
    method = Snas(layout, SnasSettings())
    with torch.no_grad():
        for table in layout.tables:
            logits = method.log_alpha[table.name]
            logits.normal_()
            for index in table.incoming(3):
                logits[index, table.choices[index].candidates.index("none")] = 9.0
            # so that the other nodes live
            logits[table.incoming(2)[0], table.choices[0].candidates.index("sep_conv_3x3")] = 9.0
            logits[table.incoming(4)[0], table.choices[0].candidates.index("skip_connect")] = 9.0
    genotype = method.derive()
    assert all(pick.op == "none" for cell in genotype.cells.values() for pick in cell.incoming(3))
    assert all(len(cell.picks) == len(layout.table(name)) for name, cell in genotype.cells.items())
    supernet = space.supernet((3, 8, 8), 4).double()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    child = supernet.child(genotype)
    mix = WeightMix(layout, one_hot(layout, genotype))
    torch.testing.assert_close(child(x), supernet(x, mix), rtol=1e-10, atol=1e-10)
    evaluation = space.network(genotype, (3, 8, 8), 4).double()
    assert evaluation(x).shape == (2, 4)
    assert evaluation.cells[0].cell.output == (2, 4)
    assert child.cells[0].cell.output == (2, 3, 4)


def test_a_cell_in_which_everything_vanished_still_builds_and_runs() -> None:
    space = tiny_space("darts")
    method = Snas(space.layout(), SnasSettings())
    with torch.no_grad():
        for table in space.layout().tables:
            method.log_alpha[table.name][table.columns("none")] = 9.0
    x = torch.randn(2, 3, 8, 8)
    for network in (space.supernet((3, 8, 8), 4).child(method.derive()), space.network(method.derive(), (3, 8, 8), 4)):
        assert network(x).isfinite().all()


# --- Eq 7 ---


def score(log_alpha: Tensor, z: Tensor, temperature: float) -> Tensor:
    """∇_{log α} log p(Z) of the concrete density (Maddison et al., Eq 10): 1 - n · α z^-λ / Σ α z^-λ."""
    share = torch.softmax(log_alpha - temperature * z.log(), -1)
    return 1.0 - z.shape[-1] * share


def both_sides(power: int) -> tuple[Tensor, Tensor]:
    """Per draw, search gradient and policy gradient of Eq 7 for L = x^power, x = Z · O: each [draws, 3]."""
    temperature, draws = 1.0, 400_000
    outputs = torch.tensor([0.3, 1.0, 2.0], dtype=torch.float64)
    log_alpha = torch.tensor([0.2, -0.4, 0.1], dtype=torch.float64).expand(draws, 3).clone().requires_grad_()
    z = concrete(log_alpha, torch.ones(3, dtype=torch.bool), temperature, uniforms(draws, 3, seed=5))
    x = (z * outputs).sum(-1)
    (search_gradient,) = torch.autograd.grad(x.pow(power).sum(), log_alpha)
    slope = power * x.detach() ** (power - 1)  # ∂L/∂x_j
    policy = score(log_alpha.detach(), z.detach(), temperature) * (slope * x.detach())[:, None]
    return search_gradient, policy


@pytest.mark.parametrize(("power", "factor"), [(1, 1.0), (2, 2.0)])
def test_equation_7_is_an_identity_for_a_linear_loss_and_off_by_2_for_a_square(power: int, factor: float) -> None:
    """Over 400,000 draws, within 5 standard errors of the difference."""
    search_gradient, policy = both_sides(power)
    difference = policy - factor * search_gradient
    error = difference.std(0) / len(difference) ** 0.5
    assert (difference.mean(0).abs() < 5 * error).all()
    # The test would notice: the other factor is far off.
    wrong = (policy - (3.0 - factor) * search_gradient).mean(0).abs()
    assert (wrong > 10 * error).any()


# --- credit ---


def test_credit_of_a_cell_matches_hand_computed_values() -> None:
    """One edge, x of ones [1, 1, 2, 2], L = sum of the node: a candidate that passes x on adds 4·Z, `none` nothing."""
    table = Table("cell", (Choice(0, 1, ("none", "skip_connect", "avg_pool_3x3")),), (1,))
    cell = MixedCell(table, 1, lambda source: Spec(1, 1, affine=False, pool_norm=False)).double()
    layout = Layout("toy", (table,), ("cell",), StrongestEach())
    method = Snas(layout, SnasSettings()).double()
    torch.manual_seed(0)
    mix = method.relax()
    node = cell([torch.ones(1, 1, 2, 2, dtype=torch.float64)], mix, 0)[-1]
    (gradient,) = torch.autograd.grad(node.sum(), method.observer.watched(mix))
    method.observer.observe(mix, [gradient])
    method.observer.observe(mix, [gradient])
    z = mix.tables["cell"].detach()[0]  # type: ignore[attr-defined]
    kept = method.observer.sums()["credit"]["cell"]
    torch.testing.assert_close(kept, 2 * torch.tensor([[0.0, -4 * z[1], -4 * z[2]]], dtype=torch.float64))
    torch.testing.assert_close(credit(z[None], gradient).sum(), -node.sum().detach())  # R = -∂L/∂x_j · Õ(x_i)


@pytest.mark.parametrize("regime", ["single-level", "bilevel"])
def test_the_credit_of_an_edge_is_minus_its_share_of_the_loss_slope(
    regime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eq 34 taken literally: -(∂L/∂x_j) · Õ_ij(x_i) with node values and edge outputs caught inside the cells."""
    one = step_state("nb201", method=Snas)
    caught: list[tuple[int, Tensor, Tensor]] = []
    original = Combiner.combine

    def combine(combiner: Combiner, outputs: Any, mix: Any, site: int, factors: Any) -> Tensor | None:
        node = original(combiner, outputs, mix, site, factors)
        if node is not None and torch.is_grad_enabled() and mix.weights(site).requires_grad:
            for choice in {choice for choice, _, _ in outputs}:
                terms = [mix.weights(site)[choice, k] * x for c, k, x in outputs if c == choice and x is not None]
                caught.append((choice, node, sum(terms).detach()))  # type: ignore[union-attr]
        return node

    slopes: list[Tensor] = []
    grad = torch.autograd.grad

    def with_nodes(total: Tensor, wanted: Any, **options: Any) -> Any:
        if caught and not slopes:
            slopes.extend(grad(total, [node for _, node, _ in caught], retain_graph=True))
        return grad(total, wanted, **options)

    monkeypatch.setattr(Combiner, "combine", combine)
    monkeypatch.setattr(torch.autograd, "grad", with_nodes)
    if regime == "single-level":
        single_level(one, *batch(0))
    else:
        bilevel(one, batch(0), batch(1))
    expected = torch.zeros(6, dtype=torch.float64)
    for (choice, _, output), slope in zip(caught, slopes, strict=True):
        expected[choice] -= (slope * output).sum()
    found = one.method.observer.sums()["credit"]["cell"].sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    assert found.abs().max() > 1e-6


def test_a_single_level_step_with_credit_makes_one_backward_on_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    one = step_state("nb201", method=Snas)
    forwards, backwards = [], []
    one.supernet.cells[0].register_forward_hook(lambda *arguments: forwards.append(1))
    original = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **o: (backwards.append(1), original(*a, **o))[1])
    single_level(one, *batch(0))
    assert (len(forwards), len(backwards)) == (1, 1)
    assert one.method.observer.sums()["credit"]["cell"].any()


def test_recording_credit_changes_no_step_and_can_be_switched_off() -> None:
    states = []
    for record in (True, False):
        one = step_state("nb201", method=Snas)
        assert Snas(one.method.layout, SnasSettings(record_credit=record)).observer is None or record
        one.method.observer = one.method.observer if record else None
        torch.manual_seed(1)
        for step in range(2):
            single_level(one, *batch(step))
        states.append({**one.supernet.state_dict(), **one.method.state_dict()})
    assert same(states[0], states[1])


def test_ragged_tables_keep_their_padding_out_of_the_credit() -> None:
    space = RaggedSpace()
    method = Snas(space.layout(), SnasSettings()).double()
    supernet = space.supernet((3, 8, 8), 4).double()
    mix = method.relax()
    loss = supernet(torch.randn(2, 3, 8, 8, dtype=torch.float64), mix).square().sum()
    watched = method.observer.watched(mix)
    method.observer.observe(mix, torch.autograd.grad(loss, list(watched)))
    for table in space.layout().tables:
        found = method.observer.sums()["credit"][table.name]
        assert not found[~table.mask()].any()
        assert not found[table.columns("none")].any()
        assert found[table.mask() & ~table.columns("none")].all()


# --- whole searches ---


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "data.npz")


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("regime", ["auto", "bilevel", "unrolled"])
def test_a_search_records_temperature_credit_and_children(regime: str, data: Path, tmp_path: Path) -> None:
    result = search(resolve(settings("nb201", data, method="snas", regime=regime)), tmp_path / "run")
    assert [row["temperature"] for row in result.metrics] == pytest.approx([1.0, 0.515, 0.03])
    assert all(0 <= row["child_accuracy"] <= 1 for row in result.metrics)
    assert all(row["expected_parameters"] > 0 for row in result.metrics)
    if regime == "unrolled":
        assert not (tmp_path / "run" / "credit.jsonl").exists()
        return
    for epoch, record in enumerate(lines(tmp_path / "run" / "credit.jsonl")):
        table = torch.tensor(record["tables"]["cell"])
        assert record["epoch"] == epoch
        assert table.shape == (6, 5)
        torch.testing.assert_close(table.sum(1), torch.tensor(record["choices"]["cell"]))
        assert not table[:, 0].any(), "none earns nothing"
        assert table[:, 1:].any()


def test_a_record_is_the_mean_over_the_steps_of_its_own_epoch(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_one(self: Observer, mix: Any, gradients: Any) -> None:
        for sums in self.sums()["credit"].values():
            sums.add_(1.0)

    monkeypatch.setattr(type(Snas(LAYOUT, SnasSettings()).observer), "observe", add_one)
    search(resolve(settings("nb201", data, method="snas")), tmp_path / "run")
    for record in lines(tmp_path / "run" / "credit.jsonl"):
        assert torch.tensor(record["tables"]["cell"]).eq(1.0).all()


def test_an_unrolled_search_is_the_same_when_it_is_stopped_and_resumed(data: Path, tmp_path: Path) -> None:
    changes = {"method": "snas", "regime": "unrolled", "drop_path": 0.3, "epochs": 2, "space_settings": THREE_EDGES}
    check_resumed(resolve(settings("nb201", data, **changes)), tmp_path, 1, 1)


def test_samples_and_credit_are_the_same_when_a_search_is_stopped_and_resumed(data: Path, tmp_path: Path) -> None:
    recipe = resolve(settings("nb201", data, method="snas", drop_path=0.3, resource={"max_params": "80k"}))
    check_resumed(recipe, tmp_path, 1, 2)
    assert (tmp_path / "broken" / "credit.jsonl").read_text() == (tmp_path / "whole" / "credit.jsonl").read_text()
