"""The gradient after one virtual weight step: against a closed form and against finite differences."""

import copy
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from softcell.methods.snas import Snas
from softcell.nn.objective import ContextAutoRegression
from softcell.nn.stochastic import SharedDraws, draw_normal, draw_uniform
from softcell.search import steps
from softcell.search.guide import supernet_maps
from softcell.search.steps import StepState, Unrolling, hypergradient, unrolled
from softcell.spaces import Bound
from tests.helpers.search_toys import Pair, batch, step_state

LR, MOMENTUM, DECAY = 0.3, 0.9, 0.07
EXACT = Unrolling(exact=True)


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def numeric(function: Callable[[], float], place: Tensor, index: Any, step: float) -> float:
    """The derivative of `function` by the entry `index` of `place`, by a difference of fourth order."""
    before = float(place[index])
    values = []
    for shift in (-2, -1, 1, 2):
        place[index] = before + shift * step
        values.append(function())
    place[index] = before
    far_down, down, up, far_up = values
    return (8 * (up - down) - (far_up - far_down)) / (12 * step)


# --- a quadratic problem ---


@pytest.mark.parametrize("momentum", [0.0, MOMENTUM])
@pytest.mark.parametrize("weight_decay", [0.0, DECAY])
@pytest.mark.parametrize("settings", [EXACT, Unrolling(exact=False)], ids=["exact", "difference"])
def test_hypergradient_is_the_closed_form_of_a_quadratic_problem(
    settings: Unrolling, momentum: float, weight_decay: float
) -> None:
    """L_train = w'Aw/2 + w'Ba + c'w, L_val = |w - d|²/2 + w'Da + a'Ca/2 + e'a; the difference is exact here too."""
    root, b, c, d = randn(0, 5, 5), randn(1, 5, 3), randn(2, 5), randn(3, 5)
    a_matrix, cross, c_matrix, e = root @ root.T, randn(4, 5, 3), randn(5, 3, 3), randn(6, 3)
    c_matrix = c_matrix + c_matrix.T
    w, moment, alpha = randn(7, 5), randn(8, 5), randn(9, 3).requires_grad_()

    def train_loss(values: Sequence[Tensor]) -> Tensor:
        v = torch.cat([values[0].flatten(), values[1]])
        return v @ a_matrix @ v / 2 + v @ b @ alpha + c @ v

    def validation_loss(values: Sequence[Tensor]) -> Tensor:
        v = torch.cat([values[0].flatten(), values[1]])
        return (v - d).square().sum() / 2 + v @ cross @ alpha + alpha @ c_matrix @ alpha / 2 + e @ alpha

    # Two tensors of different shapes stand for w, so that a mix-up of tensors would show.
    (found,) = hypergradient(
        train_loss,
        validation_loss,
        [w[:4].view(2, 2), w[4:]],
        [alpha],
        lr=LR,
        momentum=momentum,
        momenta=[moment[:4].view(2, 2), moment[4:]],
        weight_decay=weight_decay,
        settings=settings,
    )
    a = alpha.detach()
    ahead = w - LR * (momentum * moment + a_matrix @ w + b @ a + c + weight_decay * w)
    expected = cross.T @ ahead + c_matrix @ a + e - LR * b.T @ (ahead - d + cross @ a)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_a_first_step_has_no_momentum_yet() -> None:
    alpha, w = randn(0, 3).requires_grad_(), randn(1, 3)

    def loss(values: Sequence[Tensor]) -> Tensor:
        return (values[0] * alpha).sum() + values[0].square().sum()

    (found,) = hypergradient(
        loss, loss, [w], [alpha], lr=LR, momentum=MOMENTUM, momenta=[None], weight_decay=DECAY, settings=EXACT
    )
    ahead = w - LR * (alpha.detach() + 2 * w + DECAY * w)
    torch.testing.assert_close(found, ahead - LR * (alpha.detach() + 2 * ahead), rtol=1e-12, atol=1e-12)


# --- a small nonlinear network ---


class Net:
    """tanh units mixed by a softmax of α; `loss` takes the weights from outside."""

    def __init__(self) -> None:
        self.alpha = [randn(1, 4).requires_grad_(), randn(2, 3).requires_grad_()]
        self.weights = [randn(3, 4, 3), randn(4, 3, 2), randn(5, 2)]
        self.momenta = [0.3 * randn(6, 4, 3), 0.3 * randn(7, 3, 2), 0.3 * randn(8, 2)]
        self.data = {name: (randn(seed, 7, 4), randn(seed + 1, 7, 2)) for name, seed in (("train", 10), ("val", 20))}

    def loss(self, name: str, weights: Sequence[Tensor]) -> Tensor:
        x, y = self.data[name]
        hidden = torch.tanh((x * torch.softmax(self.alpha[0], 0)) @ weights[0]) * torch.sigmoid(self.alpha[1])
        return (torch.sin(hidden @ weights[1] + weights[2]) - y).square().mean()

    def ahead(self) -> float:
        """L_val(w'(α), α), spelled out."""
        values = [w.clone().requires_grad_() for w in self.weights]
        gradients = torch.autograd.grad(self.loss("train", values), values)
        moved = [
            w - LR * (MOMENTUM * m + g + DECAY * w)
            for w, m, g in zip(self.weights, self.momenta, gradients, strict=True)
        ]
        with torch.no_grad():
            return float(self.loss("val", moved))

    def hypergradient(self, settings: Unrolling) -> Tensor:
        found = hypergradient(
            lambda values: self.loss("train", values),
            lambda values: self.loss("val", values),
            self.weights,
            self.alpha,
            lr=LR,
            momentum=MOMENTUM,
            momenta=self.momenta,
            weight_decay=DECAY,
            settings=settings,
        )
        return torch.cat(found)

    def numeric(self) -> Tensor:
        return torch.tensor(
            [numeric(self.ahead, table.data, i, 1e-3) for table in self.alpha for i in range(len(table))],
            dtype=torch.float64,
        )


def test_exact_hypergradient_is_the_derivative_of_the_loss_after_the_step() -> None:
    net = Net()
    expected = net.numeric()
    first_order = torch.cat(torch.autograd.grad(net.loss("val", net.weights), net.alpha))
    assert (first_order - expected).abs().max() > 1e-3, "the problem must tell first from second order"
    torch.testing.assert_close(net.hypergradient(EXACT), expected, rtol=0, atol=1e-8)


def test_the_error_of_the_papers_difference_falls_with_the_square_of_epsilon() -> None:
    net = Net()
    expected = net.numeric()
    errors = [
        float((net.hypergradient(Unrolling(exact=False, epsilon=epsilon)) - expected).abs().max())
        for epsilon in (0.1, 0.01, 0.001)
    ]
    assert errors[1] < 1e-4, "the paper's epsilon"
    for larger, smaller in itertools.pairwise(errors):
        assert 50 < larger / smaller < 200


# --- what is not used ---


@pytest.mark.parametrize("settings", [EXACT, Unrolling()], ids=["exact", "difference"])
def test_unused_weights_and_logits_are_ignored(settings: Unrolling) -> None:
    alpha, idle_alpha = randn(0, 3).requires_grad_(), randn(1, 2).requires_grad_()
    both, only_train, only_val, idle = (randn(seed, 3) for seed in (2, 3, 4, 5))

    def train_loss(values: Sequence[Tensor]) -> Tensor:
        return (values[0] * values[1] * alpha).sum()

    def validation_loss(values: Sequence[Tensor]) -> Tensor:
        return (values[0] * values[2]).sum() + alpha.square().sum()

    found, idle_found = hypergradient(
        train_loss, validation_loss, [both, only_train, only_val, idle], [alpha, idle_alpha], lr=LR, settings=settings
    )
    torch.testing.assert_close(found, 2 * alpha.detach() - LR * only_train * only_val, rtol=1e-9, atol=1e-9)
    assert torch.equal(idle_found, torch.zeros_like(idle_alpha))


@pytest.mark.parametrize("settings", [EXACT, Unrolling()], ids=["exact", "difference"])
def test_a_validation_loss_without_weights_leaves_the_direct_gradient(settings: Unrolling) -> None:
    alpha, w = randn(0, 3).requires_grad_(), randn(1, 3)
    (found,) = hypergradient(
        lambda values: (values[0] * alpha).sum(), lambda values: alpha.sum(), [w], [alpha], lr=LR, settings=settings
    )
    torch.testing.assert_close(found, torch.ones_like(alpha), rtol=0, atol=0)


# --- real supernets ---


def ahead_of(one: StepState, train: Pair, validation: Pair) -> float:
    """L_val(w'(α), α) of a supernet, with all its batch statistics, on copies; α is relaxed once."""
    net, objective = copy.deepcopy((one.supernet, one.objective))
    with torch.no_grad():
        mix = one.method.relax()
    objective(Bound(net, mix), *train).loss.backward()
    group = one.weight_optimiser.param_groups[0]
    with torch.no_grad():
        own = [*net.parameters(), *objective.parameters()]
        for mine, original in zip(own, one.weights(), strict=True):
            direction = group["weight_decay"] * original
            moment = one.weight_optimiser.state.get(original, {}).get("momentum_buffer")
            if mine.grad is not None:
                direction = direction + mine.grad
            if moment is not None:
                direction = direction + group["momentum"] * moment
            mine.copy_(original - group["lr"] * direction)
        return float(objective(Bound(net, mix), *validation).loss)


def hypergradient_of(
    one: StepState, train: Pair, validation: Pair, monkeypatch: pytest.MonkeyPatch, how: Unrolling = EXACT
) -> list[Tensor]:
    """What `unrolled` gives the architecture's optimiser."""
    kept: list[Tensor] = []

    def keep(step_state: StepState, gradients: Sequence[Tensor], **options: Any) -> None:
        kept.extend(gradient.clone() for gradient in gradients)

    monkeypatch.setattr(StepState, "learn_architecture", keep)
    monkeypatch.setattr(steps, "weight_step", lambda *arguments: None)
    unrolled(one, train, validation, how)
    return kept


@pytest.mark.parametrize("space", ["nb201", pytest.param("darts", marks=pytest.mark.exhaustive)])
def test_on_a_supernet_the_exact_hypergradient_equals_differences(space: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = step_state(space)
    steps.weight_step(one, *batch(5))  # so that there is momentum
    train, validation = batch(1), batch(2)
    found = hypergradient_of(one, train, validation, monkeypatch)
    first_order = torch.autograd.grad(
        torch.nn.functional.cross_entropy(
            copy.deepcopy(one.supernet)(validation[0], one.method.relax()), validation[1]
        ),
        list(one.method.parameters()),
    )
    for table, gradient, naive in zip(one.method.parameters(), found, first_order, strict=True):
        rows, columns = table.shape
        for index in ((0, columns - 1), (rows // 2, columns // 2)):
            # So near that no ReLU and no maximum changes its mind in between.
            expected = numeric(lambda: ahead_of(one, train, validation), table.data, index, 1e-6)
            assert float(gradient[index]) == pytest.approx(expected, rel=1e-6, abs=1e-8)
        assert (gradient - naive).abs().max() > 1e-5, "first order would pass too"


@pytest.mark.parametrize("settings", [EXACT, Unrolling()], ids=["exact", "difference"])
def test_looking_ahead_leaves_weights_and_running_statistics_alone(
    settings: Unrolling, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = step_state("darts")
    steps.weight_step(one, *batch(5))
    before = copy.deepcopy(one.supernet.state_dict())
    momenta = copy.deepcopy(one.weight_optimiser.state_dict()["state"])
    monkeypatch.setattr(steps, "weight_step", lambda *arguments: None)
    unrolled(one, batch(1), batch(2), settings)
    for name, value in one.supernet.state_dict().items():
        assert torch.equal(value, before[name]), name
    for number, state in one.weight_optimiser.state_dict()["state"].items():
        assert torch.equal(state["momentum_buffer"], momenta[number]["momentum_buffer"])
    assert all(p.grad is None for p in one.supernet.parameters())


def test_the_virtual_step_is_the_step_that_the_optimiser_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """The validation loss that `unrolled` sees belongs to the weights after a real step of the optimiser."""
    one = step_state("nb201", clip_weights=0.0)
    steps.weight_step(one, *batch(5))
    train, validation = batch(1), batch(2)
    twin = copy.deepcopy(one.supernet)
    optimiser = torch.optim.SGD(twin.parameters())
    optimiser.load_state_dict(copy.deepcopy(one.weight_optimiser.state_dict()))
    with torch.no_grad():
        mix = one.method.relax()
    torch.nn.functional.cross_entropy(twin(train[0], mix), train[1]).backward()
    optimiser.step()
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(twin(validation[0], mix), validation[1])
    _, held = unrolled(one, train, validation, EXACT)
    assert float(held.loss) == pytest.approx(float(expected), rel=1e-12)


# --- steps that draw random numbers ---


def sampled() -> StepState:
    return step_state("nb201", method=Snas)


def dropping() -> StepState:
    one = step_state("nb201")
    one.supernet.use_drop_path(0.5)
    one.supernet.drop_path.set_fraction(1.0)
    return one


def noisy() -> StepState:
    return step_state("s4")


def hiding() -> StepState:
    """Context auto-regression, which hides other pixels at every call; its decoder learns with the weights."""
    one = step_state("nb201")
    one.objective = ContextAutoRegression(supernet_maps(one.supernet, one.method), (1, 8, 8)).double()
    return one


def all_of_it() -> StepState:
    one = step_state("s4", method=Snas)
    one.supernet.use_drop_path(0.5)
    one.supernet.drop_path.set_fraction(1.0)
    return one


RANDOM = (sampled, dropping, noisy, hiding, all_of_it)


@pytest.mark.parametrize("make", RANDOM)
def test_one_draw_serves_all_evaluations_of_a_step(
    make: Callable[[], StepState], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ε falls, Eq 8 approaches the gradient that differentiating twice gives for the same random numbers.

    With a draw for each evaluation the error would grow as 1/ε. The limit itself is checked against differences of the
    loss after a step whose random numbers a seed repeats.
    """
    one, train, validation = make(), batch(1), batch(2)

    def drawn(how: Unrolling) -> Tensor:
        torch.manual_seed(7)
        with monkeypatch.context() as patch:
            return torch.cat([g.flatten() for g in hypergradient_of(one, train, validation, patch, how)])

    def ahead() -> float:
        torch.manual_seed(7)
        return ahead_of(one, train, validation)

    exact = drawn(EXACT)
    # So near that no ReLU and no maximum changes its mind in between, and the networks are smooth.
    for epsilon in (1e-5, 1e-6):
        assert (drawn(Unrolling(epsilon=epsilon)) - exact).norm() < 1e-6 * exact.norm()
    places = [(table.data, i) for table in one.method.parameters() for i in range(table.numel())]
    for number in range(0, len(places), max(1, len(places) // 4)):
        table, i = places[number]
        expected = numeric(ahead, table.view(-1), i, 1e-6)
        assert float(exact[number]) == pytest.approx(expected, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("make", RANDOM)
def test_the_next_step_draws_again(make: Callable[[], StepState], monkeypatch: pytest.MonkeyPatch) -> None:
    one, train, validation = make(), batch(1), batch(2)
    torch.manual_seed(7)
    first, second = (
        torch.cat([g.flatten() for g in hypergradient_of(one, train, validation, monkeypatch)]) for _ in range(2)
    )
    assert (first - second).abs().max() > 1e-6


def test_images_of_another_batch_have_separate_draws() -> None:
    """The sample of an architecture is one per step; what is dropped of the validation images is independent."""
    draws, cpu, found = SharedDraws(), torch.device("cpu"), {}
    torch.manual_seed(0)
    for number, name in enumerate(("train", "validation", "train")):
        with draws.evaluation(name):
            found[number] = draw_uniform(4, device=cpu), draw_normal(4, device=cpu, of_batch=True)
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][0], found[2][0])
    assert torch.equal(found[0][1], found[2][1]) and not torch.equal(found[0][1], found[1][1])
    assert not torch.equal(draw_uniform(4, device=cpu), found[0][0]), "outside, every draw is new"
    with draws.evaluation("train"), pytest.raises(AssertionError, match="in the same order"):
        draw_uniform(5, device=cpu)
