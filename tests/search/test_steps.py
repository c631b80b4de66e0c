"""The three regimes against twins in which every backward and every update is written out."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.arch import Mix
from softcell.engine.optim import adam, load_optimiser
from softcell.methods.darts import Darts
from softcell.nn.classifiers import Classifier, ResNet18, Tapped
from softcell.nn.objective import CrossEntropy, Guided
from softcell.search.steps import StepState, Unrolling, bilevel, single_level, unrolled, weight_step
from tests.helpers.search_toys import ARCHITECTURE_LR, LR, Pair, batch, step_state

STEPS = 3


class Penalised(Darts):
    """DARTS with a term that pulls all logits down alike, and one that only the mix knows."""

    def penalty(self, mix: Mix) -> Tensor | None:
        tables: dict[str, Tensor] = mix.tables  # type: ignore[attr-defined]
        return 0.3 * sum(alpha.sum() for alpha in self.alpha.values()) + sum(p.square().sum() for p in tables.values())


class Twin:
    """A supernet with its logits and both optimisers by hand: SGD with momentum, Adam with decay in the gradient."""

    def __init__(self, one: StepState) -> None:
        self.net, self.method = copy.deepcopy(one.supernet), copy.deepcopy(one.method)
        self.clips = one.clip_weights, one.clip_architecture
        self.momentum: dict[nn.Parameter, Tensor] = {}
        self.adam: dict[nn.Parameter, tuple[int, Tensor, Tensor]] = {}

    def backward(self, data: Pair, penalised: bool) -> float:
        """Fresh gradients everywhere."""
        self.net.zero_grad()
        self.method.zero_grad()
        mix = self.method.relax()
        loss = self.loss(data, mix)
        penalty = self.method.penalty(mix) if penalised else None
        (loss if penalty is None else loss + penalty).backward()  # type: ignore[no-untyped-call]
        return loss.item()

    def loss(self, data: Pair, mix: Mix) -> Tensor:
        return F.cross_entropy(self.net(data[0], mix), data[1])

    def step_weights(self) -> None:
        self._clip(self.net, self.clips[0])
        with torch.no_grad():
            for p in self.net.parameters():
                direction = p.grad + 3e-3 * p
                before = self.momentum.get(p)
                self.momentum[p] = direction if before is None else 0.9 * before + direction
                p -= LR * self.momentum[p]

    def step_architecture(self) -> None:
        self._clip(self.method, self.clips[1])
        with torch.no_grad():
            for p in self.method.parameters():
                gradient = p.grad + 1e-2 * p
                count, first, second = self.adam.get(p, (0, torch.zeros_like(p), torch.zeros_like(p)))
                count += 1
                first, second = 0.5 * first + 0.5 * gradient, 0.999 * second + 0.001 * gradient**2
                self.adam[p] = count, first, second
                p -= ARCHITECTURE_LR * (first / (1 - 0.5**count)) / ((second / (1 - 0.999**count)).sqrt() + 1e-8)

    def _clip(self, module: nn.Module, most: float) -> None:
        norm = sum(float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None) ** 0.5
        if most > 0 and norm > most:
            for p in module.parameters():
                if p.grad is not None:
                    p.grad *= most / (norm + 1e-6)


def twin_single_level(twin: Twin, train: Pair, validation: Pair) -> tuple[float, ...]:
    loss = twin.backward(train, penalised=True)
    twin.step_weights()
    twin.step_architecture()
    return (loss,)


def twin_bilevel(twin: Twin, train: Pair, validation: Pair) -> tuple[float, ...]:
    held = twin.backward(validation, penalised=True)
    twin.step_architecture()
    loss = twin.backward(train, penalised=False)
    twin.step_weights()
    return loss, held


def twin_unrolled(twin: Twin, train: Pair, validation: Pair) -> tuple[float, ...]:
    """DARTS's own way: a second network that is one step ahead, then the first one moved a little to both sides."""
    net, weights = twin.net, list(twin.net.parameters())
    kept = copy.deepcopy(net.state_dict())
    twin.backward(train, penalised=False)
    ahead = {
        name: p - LR * (0.9 * twin.momentum.get(p, torch.zeros_like(p)) + p.grad + 3e-3 * p)
        for name, p in net.named_parameters()
    }
    net.load_state_dict({**kept, **ahead})
    held = twin.backward(validation, penalised=True)
    direct = [p.grad.clone() for p in twin.method.parameters()]
    vector = [p.grad.clone() for p in weights]
    size = 0.01 / sum(float(v.square().sum()) for v in vector) ** 0.5
    sides = []
    for sign in (1, -1):
        net.load_state_dict(kept)
        with torch.no_grad():
            for p, v in zip(weights, vector, strict=True):
                p += sign * size * v
        twin.backward(train, penalised=False)
        sides.append([torch.zeros_like(p) if p.grad is None else p.grad for p in twin.method.parameters()])
    net.load_state_dict(kept)
    for p, d, plus, minus in zip(twin.method.parameters(), direct, *sides, strict=True):
        p.grad = d - LR * (plus - minus) / (2 * size)
    twin.step_architecture()
    loss = twin.backward(train, penalised=False)
    twin.step_weights()
    return loss, held


def real_single_level(one: StepState, train: Pair, validation: Pair) -> tuple[float, ...]:
    return (float(single_level(one, *train).loss),)


def real_bilevel(one: StepState, train: Pair, validation: Pair) -> tuple[float, ...]:
    return tuple(float(result.loss) for result in bilevel(one, train, validation))


def real_unrolled(one: StepState, train: Pair, validation: Pair) -> tuple[float, ...]:
    return tuple(float(result.loss) for result in unrolled(one, train, validation, Unrolling()))


# The difference of the unrolled twin divides rounding by a small number; everything else is plain arithmetic.
REGIMES: dict[str, tuple[Callable[..., Any], Callable[..., Any], float]] = {
    "single-level": (real_single_level, twin_single_level, 1e-12),
    "bilevel": (real_bilevel, twin_bilevel, 1e-12),
    "unrolled": (real_unrolled, twin_unrolled, 1e-10),
}


@pytest.mark.parametrize("method", [Darts, Penalised])
@pytest.mark.parametrize("clips", [(0.0, 0.0), (0.4, 0.05)], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("regime", REGIMES)
def test_a_regime_equals_its_twin(regime: str, clips: tuple[float, float], method: type[Darts]) -> None:
    real, literal, tolerance = REGIMES[regime]
    one = step_state("nb201", clip_weights=clips[0], clip_architecture=clips[1], method=method)
    compare(one, real, literal, tolerance)


@pytest.mark.parametrize("regime", REGIMES)
def test_a_regime_equals_its_twin_on_darts_cells(regime: str) -> None:
    real, literal, tolerance = REGIMES[regime]
    compare(step_state("darts"), real, literal, tolerance, steps=1)


class GuidedTwin(Twin):
    """The loss of Eq 8 and 9 alike: cross-entropy and λ times Eq 6 in its settled form."""

    weight = 20.0

    def __init__(self, one: StepState, teacher: Classifier) -> None:
        super().__init__(one)
        self.teacher = teacher

    def loss(self, data: Pair, mix: Mix) -> Tensor:
        images, labels = data
        mine = self.net.features(images, mix)
        total = F.cross_entropy(self.net.head(mine[-1]), labels)
        for student, teacher in zip(mine, self.teacher.features(images)[:3], strict=True):
            x, y = student.square().sum(1), teacher.detach().square().sum(1)
            q, r = (z / z.square().sum((1, 2), keepdim=True).sqrt() for z in (x, y))
            total = total + self.weight * (q - r).square().mean() / 2
        return total


@pytest.mark.parametrize("regime", REGIMES)
def test_a_teacher_guides_both_levels(regime: str) -> None:
    real, literal, tolerance = REGIMES[regime]
    one = step_state("nb201", clip_weights=0.0)
    teacher = ResNet18(width=2).build(1, 3).double().eval()
    one.objective = Guided(CrossEntropy(), Tapped(teacher), (0, 1, 2), GuidedTwin.weight)
    compare(one, real, literal, tolerance, steps=2, twin=GuidedTwin(one, teacher))


def compare(
    one: StepState, real: Any, literal: Any, tolerance: float, steps: int = STEPS, twin: Twin | None = None
) -> None:
    twin = twin or Twin(one)
    for step in range(steps):
        train, validation = batch(10 + step), batch(20 + step)
        assert real(one, train, validation) == pytest.approx(literal(twin, train, validation), abs=tolerance)
    expected = {**twin.net.state_dict(), **twin.method.state_dict()}
    for name, value in {**one.supernet.state_dict(), **one.method.state_dict()}.items():
        torch.testing.assert_close(
            value, expected[name], rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize(("regime", "counted"), [("unrolled", 5), ("bilevel", 10), ("single-level", 5)])
def test_batch_norm_counts_the_batches_of_weights_that_the_network_has(regime: str, counted: int) -> None:
    """Evaluations at virtual weights are not counted: 5 batches in 5 second-order steps."""
    one = step_state("darts")
    for step in range(5):
        REGIMES[regime][0](one, batch(step), batch(50 + step))
    found = {int(m.num_batches_tracked) for m in one.supernet.modules() if isinstance(m, nn.BatchNorm2d)}
    assert found == {counted}


def test_a_weight_step_leaves_the_architecture_alone() -> None:
    one = step_state()
    before = copy.deepcopy(one.method.state_dict())
    weight_step(one, *batch(0))
    assert all(torch.equal(value, before[name]) for name, value in one.method.state_dict().items())
    assert not one.architecture_optimiser.state


@pytest.mark.parametrize("regime", REGIMES)
def test_a_step_leaves_no_gradients_and_hands_out_detached_results(regime: str) -> None:
    one = step_state()
    if regime == "single-level":
        results = [single_level(one, *batch(0))]
    elif regime == "bilevel":
        results = list(bilevel(one, batch(0), batch(1)))
    else:
        results = list(unrolled(one, batch(0), batch(1), Unrolling()))
    for result in results:
        assert not result.loss.requires_grad
        assert result.logits is not None
        assert not result.logits.requires_grad
    assert all(p.grad is None for p in [*one.supernet.parameters(), *one.method.parameters()])


def test_single_level_makes_one_forward_and_one_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    one = step_state()
    forwards, backwards = [], []
    one.supernet.cells[0].register_forward_hook(lambda *arguments: forwards.append(1))
    original = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **o: (backwards.append(1), original(*a, **o))[1])
    single_level(one, *batch(0))
    assert (len(forwards), len(backwards)) == (1, 1)


class Twins(Darts):
    """Two parameters that get one and the same gradient tensor from autograd, and one whose gradient is a broadcast."""

    def __init__(self, layout: Any, settings: Any) -> None:
        super().__init__(layout, settings)
        self.left, self.right = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
        self.wide = nn.Parameter(torch.zeros(4))

    def penalty(self, mix: Mix) -> Tensor | None:
        return ((self.left + self.right) * torch.arange(1.0, 4.0, dtype=torch.float64)).sum() + self.wide.sum()


@pytest.mark.parametrize("regime", REGIMES)
def test_gradients_that_share_memory_are_clipped_once(regime: str) -> None:
    real, literal, tolerance = REGIMES[regime]
    compare(step_state(method=Twins, clip_architecture=0.1), real, literal, tolerance, steps=2)


def test_an_optimiser_is_restored_with_the_settings_of_its_device() -> None:
    """Saved on CUDA, where rates are tensors and counters capturable, and restored on the CPU; and the other way."""
    parameter = nn.Parameter(torch.ones(2))
    here = adam([parameter], torch.device("cpu"), lr=0.5, betas=(0.5, 0.9), weight_decay=0.0)
    parameter.grad = torch.ones(2)
    here.step()
    saved = here.state_dict()
    group = {**saved["param_groups"][0], "lr": torch.tensor(0.25), "capturable": True, "betas": (0.1, 0.2)}
    load_optimiser(here, {**saved, "param_groups": [group]})
    restored = here.param_groups[0]
    assert (restored["lr"], restored["capturable"], restored["betas"]) == (0.25, False, (0.1, 0.2))
    assert float(here.state[parameter]["step"]) == 1.0
    here.step()
    there = torch.optim.SGD([parameter], lr=torch.tensor(0.5))
    load_optimiser(there, torch.optim.SGD([parameter], lr=0.125).state_dict())
    assert isinstance(there.param_groups[0]["lr"], Tensor)
    assert float(there.param_groups[0]["lr"]) == 0.125
