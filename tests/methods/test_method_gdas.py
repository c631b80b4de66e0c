"""GDAS: samples and gradients by hand-computed values, statistics with a stated confidence, or literal twins."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import Tensor

from softcell.arch import Choice, Layout, Mix, StrongestEach, Table, WeightMix
from softcell.arch.mix import concrete, temperature_at
from softcell.errors import UserError
from softcell.methods.gdas import Gdas, GdasSettings, harden, straight_through
from softcell.nn.candidates import Spec
from softcell.search import resolve
from softcell.search.steps import bilevel
from softcell.spaces.cell import MixedCell
from softcell.testing import tiny_space
from tests.helpers.search_toys import THREE_EDGES, batch, check_resumed, settings, step_state, write_data

TABLE = Table(
    "cell",
    (Choice(0, 1, ("none", "skip_connect")), Choice(0, 2, ("skip_connect", "nor_conv_3x3", "none"))),
    (2,),
)
LAYOUT = Layout("toy", (TABLE,), ("cell", "cell"), StrongestEach())


def weights_of(method: Gdas) -> Tensor:
    mix = method.relax()
    assert isinstance(mix, WeightMix)
    return mix.tables["cell"]


# --- samples and their gradients ---


def test_the_strongest_real_candidate_of_each_choice_gets_one() -> None:
    relaxed = torch.tensor([[0.4, 0.6, 0.0], [0.5, 0.2, 0.3]])
    assert harden(relaxed, TABLE.mask()).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert harden(torch.tensor([[0.0, 0.0, 9.0], [0.3, 0.3, 0.4]]), TABLE.mask()).tolist() == [[1, 0, 0], [0, 0, 1]]


def test_one_link_wins_a_contest_and_the_others_get_none() -> None:
    """Choices 0 and 1 compete to be the input of a node; choice 2 does not."""
    mask = torch.ones(3, 2, dtype=torch.bool)
    members = torch.tensor([[True, True, False]])
    relaxed = torch.tensor([[0.1, 0.9], [0.05, 0.95], [0.6, 0.4]])
    assert harden(relaxed, mask, members).tolist() == [[1, 0], [0, 1], [1, 0]]


def test_the_gradient_matches_the_relaxed_sample_only_at_the_sampled_operation() -> None:
    """s = (1/4, 3/4) at τ = 2: ∂h_1/∂A_0 = -s_1 s_0 / τ, ∂h_1/∂A_1 = s_1 (1 - s_1) / τ, and nothing from h_0."""
    alpha = torch.tensor([[0.0, 2 * math.log(3)]], dtype=torch.float64, requires_grad=True)
    relaxed = torch.softmax(alpha / 2.0, -1)
    sample = straight_through(harden(relaxed, torch.ones(1, 2, dtype=torch.bool)), relaxed)
    assert sample.tolist() == [[0.0, 1.0]]
    slopes = torch.tensor([[100.0, 10.0]], dtype=torch.float64)  # ∂L/∂h; that of h_0 is not used
    (found,) = torch.autograd.grad((slopes * sample).sum(), alpha)
    expected = torch.tensor([[-10 * 0.75 * 0.25 / 2, 10 * 0.75 * 0.25 / 2]], dtype=torch.float64)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [10.0, 0.1])
def test_weights_are_exactly_zero_and_one(dtype: torch.dtype, temperature: float) -> None:
    torch.manual_seed(0)
    method = Gdas(LAYOUT, GdasSettings(init_scale=1.0)).to(dtype)
    method.temperature.fill_(temperature)
    for _ in range(50):
        weights = weights_of(method)
        assert set(weights.flatten().tolist()) == {0.0, 1.0}
        assert weights.sum(1).tolist() == [1.0, 1.0]
        assert not weights[~TABLE.mask()].any()


@pytest.mark.parametrize("temperature", [10.0, 0.1])
def test_operations_are_sampled_as_often_as_the_softmax_says(temperature: float) -> None:
    """Chi-square over 50,000 draws of the method's own sampler; refused at less than 1 in 10,000 by chance."""
    draws, odds = 50_000, torch.tensor([1.0, 4.0, 2.0, 0.5])
    table = Table("cell", (Choice(0, 1, ("a", "b", "c", "d")),) * draws, (1,))
    method = Gdas(Layout("toy", (table,), ("cell",), StrongestEach()), GdasSettings(run="all"))
    with torch.no_grad():
        method.alpha["cell"].copy_(odds.log().expand(draws, 4))
    method.temperature.fill_(temperature)
    torch.manual_seed(0)
    counts = weights_of(method).detach().sum(0).double()
    assert stats.chisquare(counts.numpy(), (draws * odds.double() / odds.sum()).numpy()).pvalue > 1e-4
    torch.testing.assert_close(method.probabilities()["cell"][0].detach(), odds / odds.sum())


def test_the_gradient_of_a_cell_matches_hand_computed_values() -> None:
    """One edge, x of ones [1, 1, 2, 2], L = sum of the node: 4 where x is passed on, and nothing where it is not."""
    table = Table("cell", (Choice(0, 1, ("none", "skip_connect", "avg_pool_3x3")),), (1,))
    cell = MixedCell(table, 1, lambda source: Spec(1, 1, affine=False, pool_norm=False)).double()
    method = Gdas(Layout("toy", (table,), ("cell",), StrongestEach()), GdasSettings(init_scale=1.0)).double()
    alpha, seen = method.alpha["cell"], set()
    for seed in range(40):
        torch.manual_seed(seed)
        mix = method.relax()
        node = cell([torch.ones(1, 1, 2, 2, dtype=torch.float64)], mix, 0)[-1]
        assert isinstance(mix, WeightMix)
        k = int(mix.weights(0).argmax())
        seen.add(k)
        assert mix.live(0) == ((k,),)
        if k == 0:
            assert not node.any()
            continue
        torch.testing.assert_close(node, torch.ones_like(node))
        torch.manual_seed(seed)
        uniform = torch.rand(1, 3).double()
        s = concrete(alpha.detach(), torch.ones(1, 3, dtype=torch.bool), 10.0, uniform)[0]
        literal = [4 * float(s[k]) * (float(j == k) - float(s[j])) / 10.0 for j in range(3)]
        (found,) = torch.autograd.grad(node.sum(), alpha)
        torch.testing.assert_close(found[0], torch.tensor(literal, dtype=torch.float64))
    assert seen == {0, 1, 2}


@pytest.mark.parametrize("run", ["sampled", "all"])
def test_constants_give_logits_and_gradients_of_the_released_forward_pass(run: str) -> None:
    """A literal twin of it: h^s F_s(x) + Σ_{k≠s} h^k on every edge, h = one_hot - s.detach() + s."""
    space = tiny_space("nb201")
    torch.manual_seed(0)
    supernet = space.supernet((3, 8, 8), 4).double()
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    method = Gdas(space.layout(), GdasSettings(run=run, unsampled="constant")).double()  # type: ignore[arg-type]
    method.temperature.fill_(2.0)
    (table,), alpha = space.layout().tables, method.alpha["cell"]
    asked = [alpha, *supernet.parameters()]

    def literal_cell(cell: MixedCell, value: Tensor, h: Tensor) -> Tensor:
        nodes, entry = [value], {(i, k): e for own in cell.leaving.values() for e, i, k, _ in own}
        for target in table.targets:
            total = torch.zeros_like(value)
            for choice in table.incoming(target):
                sampled = int(h[choice].argmax())
                for k in range(table.width):
                    module = cell.edges.module(entry[choice, k])
                    if k != sampled:
                        total = total + h[choice, k]
                    elif module is not None:
                        total = total + h[choice, k] * module(nodes[table.choices[choice].source])
            nodes.append(total)
        return nodes[-1]

    differs = False
    for seed in range(4):
        torch.manual_seed(seed)
        found = supernet(x, method.relax())
        gradients = torch.autograd.grad(found.square().sum(), asked, allow_unused=True)
        torch.manual_seed(seed)
        relaxed = concrete(alpha, table.mask(), 2.0, torch.rand(table.shape).double())
        h = harden(relaxed.detach(), table.mask()) - relaxed.detach() + relaxed
        features = supernet.skeleton.stem(x)
        for site, cell in enumerate(supernet.cells):  # one cell per stage
            if site:
                features = supernet.skeleton.reductions[site - 1](features)
            features = literal_cell(cell, features, h)
        expected = supernet.head(features)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        literal = torch.autograd.grad(expected.square().sum(), asked, allow_unused=True)
        for parameter, own, other in zip(asked, gradients, literal, strict=True):
            own, other = (torch.zeros_like(parameter) if one is None else one for one in (own, other))
            torch.testing.assert_close(own, other, rtol=1e-8, atol=1e-10)
        torch.manual_seed(seed)
        plain = Gdas(space.layout(), GdasSettings(run=run)).double()  # type: ignore[arg-type]
        plain.load_state_dict(method.state_dict())
        torch.manual_seed(seed)
        (without,) = torch.autograd.grad(supernet(x, plain.relax()).square().sum(), plain.alpha["cell"])
        differs |= not torch.allclose(without, gradients[0])
    assert differs


def test_constants_are_for_nas_bench_201_and_for_steps_of_the_architecture() -> None:
    with pytest.raises(UserError, match=r"got 'toy'.*unsampled=nothing"):
        Gdas(LAYOUT, GdasSettings(unsampled="constant"))
    method = Gdas(tiny_space("nb201").layout(), GdasSettings(unsampled="constant"))
    mix = method.relax()
    assert isinstance(mix, WeightMix)
    offsets = mix.offsets(0)
    assert offsets is not None and offsets.requires_grad and not offsets.any()
    with torch.no_grad():
        mix = method.relax()
    assert isinstance(mix, WeightMix) and mix.offsets(0) is None and mix.copy().offsets(0) is None


# --- what runs ---


@pytest.mark.parametrize("space", ["nb201", "darts", "nb1shot1-1"])
def test_running_the_sampled_operations_alone_changes_no_value_and_no_gradient(space: str) -> None:
    built = tiny_space(space)
    torch.manual_seed(0)
    supernet = built.supernet((3, 8, 8), 4).double()
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    weights, skipped = list(supernet.parameters()), 0
    for seed in range(3):
        results = []
        for run in ("sampled", "all"):
            torch.manual_seed(seed)
            method = Gdas(built.layout(), GdasSettings(run=run)).double()  # type: ignore[arg-type]
            loss = supernet(x, method.relax()).square().sum()
            asked = [*method.parameters(), *weights]
            results.append((loss.detach(), torch.autograd.grad(loss, asked, allow_unused=True)))
        torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-10, atol=1e-12)
        for alone, among_all in zip(results[0][1], results[1][1], strict=True):
            if alone is None:
                skipped += 1
                assert among_all is None or not among_all.any()
            else:
                assert among_all is not None
                torch.testing.assert_close(alone, among_all, rtol=1e-9, atol=1e-11)
    assert skipped  # operations that were not sampled did not run


def test_one_sample_is_shared_by_all_sites_and_both_levels_draw_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    mix = Gdas(LAYOUT, GdasSettings()).relax()
    assert isinstance(mix, WeightMix)
    assert mix.weights(0) is mix.weights(1)
    assert mix.live(0) == mix.live(1)
    one, mixes, relax = step_state("nb201", method=Gdas), [], Gdas.relax

    def watch(method: Gdas) -> Mix:
        mixes.append(relax(method))
        return mixes[-1]

    monkeypatch.setattr(Gdas, "relax", watch)
    torch.manual_seed(0)
    bilevel(one, batch(0), batch(1))
    assert len(mixes) == 2
    assert mixes[0].live(0) != mixes[1].live(0)


def test_steps_that_run_everything_can_be_recorded_and_others_cannot() -> None:
    assert Gdas(LAYOUT, GdasSettings(run="all")).planner.num_plans() is None
    assert Gdas(LAYOUT, GdasSettings(run="sampled")).planner.num_plans() == 2 * 3
    assert Gdas(LAYOUT, GdasSettings()).planner.num_plans() == 2 * 3  # auto on a CPU
    elsewhere = Gdas(LAYOUT, GdasSettings()).to("meta")  # auto on any other device
    assert elsewhere.planner.num_plans() is None
    assert elsewhere.relax().live(0) is None


# --- schedule, derivation, recipes ---


def test_the_temperature_falls_linearly_from_10_to_a_tenth_as_in_the_released_code() -> None:
    method, epochs = Gdas(LAYOUT, GdasSettings()), 250
    place = method.temperature.data_ptr()
    for epoch in (0, 1, 100, 249):
        method.begin_epoch(epoch / (epochs - 1))
        assert float(method.gauges()["temperature"]) == pytest.approx(10 - (10 - 0.1) * epoch / (epochs - 1))
    assert float(method.temperature) == pytest.approx(0.1)
    assert method.temperature.data_ptr() == place
    assert temperature_at(0.5, 10.0, 0.1, "linear") == pytest.approx(5.05)
    with pytest.raises(UserError, match="last_temperature > 0"):
        GdasSettings(last_temperature=0.0)


def test_the_strongest_operation_of_each_edge_is_derived() -> None:
    method = Gdas(LAYOUT, GdasSettings())
    with torch.no_grad():
        method.alpha["cell"].copy_(torch.tensor([[0.2, 0.3, 9.0], [0.1, 0.5, 0.4]]))
    assert [str(pick) for pick in method.derive().cells["cell"].picks] == ["skip_connect(0->1)", "nor_conv_3x3(0->2)"]


@pytest.mark.parametrize(("scale", "space", "size"), [("paper", "darts", 256), ("nb201", "nb201", 64)])
def test_recipes_match_the_released_configurations(scale: str, space: str, size: int) -> None:
    recipe = resolve({"method": "gdas", "space": space, "data": "cifar10", "scale": scale})
    assert (recipe.regime, recipe.epochs, recipe.batch_size) == ("bilevel", 250, size)
    w, a = recipe.weights, recipe.architecture
    assert (w.lr, w.lr_min, w.schedule, w.momentum, w.weight_decay, w.clip) == (0.025, 0.001, "cosine", 0.9, 5e-4, 5.0)
    assert (a.lr, a.beta1, a.beta2, a.weight_decay, a.clip) == (3e-4, 0.5, 0.999, 1e-3, 0.0)
    assert recipe.split == {"weights": 0.5, "validation": 0.5}
    assert (recipe.method_settings["first_temperature"], recipe.method_settings["last_temperature"]) == (10.0, 0.1)
    assert recipe.method_settings["unsampled"] == ("constant" if space == "nb201" else "nothing")
    if space == "nb201":
        assert (recipe.space_settings["cells_per_stage"], recipe.space_settings["channels"]) == (5, 16)


@pytest.mark.parametrize("regime", ["bilevel", "unrolled"])
def test_a_search_is_the_same_when_it_is_stopped_and_resumed(regime: str, tmp_path: Path) -> None:
    data = write_data(tmp_path / "toy.npz")
    changes = {"method": "gdas", "regime": regime, "epochs": 2, "space_settings": THREE_EDGES}
    check_resumed(resolve(settings("nb201", data, **changes)), tmp_path, 1, 1)
