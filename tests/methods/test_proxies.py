"""Zero-cost proxies against their definitions: finite differences, explicit Hessians, loops and closed forms."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from softcell.arch import WeightMix, notation, sample
from softcell.methods.proxies import (
    PROXIES,
    SIZES,
    SUPERNET_PROXIES,
    Proxy,
    fisher,
    grad_norm,
    grasp,
    jacob_cov,
    naswot,
    prepare,
    score,
    score_untrained,
    snip,
    synflow,
    zico,
)
from softcell.search.samplers import score_architecture
from softcell.spaces import SPACES, build_space
from softcell.spaces.costs import count_genotype
from softcell.spaces.execution import is_modules_only, literal_modules
from softcell.testing import tiny_space

IMAGES = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.tensor([0, 2, 1, 1, 2, 0])
STEP = 1e-5


def small() -> nn.Module:
    """A smooth network in float64 with a bias, a norm and one weight that it never uses."""
    torch.manual_seed(1)
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Tanh(), nn.Conv2d(2, 2, 1), nn.Flatten(), nn.Linear(8, 3)
    )
    network.register_parameter("unused", nn.Parameter(torch.ones(2, 2)))
    return network.double()


def loss_of(network: nn.Module) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(network(IMAGES), LABELS))


def weights_of(network: nn.Module) -> list[Tensor]:
    return [p.data for p in network.parameters() if p.ndim > 1]


def differences(network: nn.Module, measured: Callable[[], Tensor]) -> list[Tensor]:
    """Per weight tensor the central differences [*shape, *measured] by each of its numbers."""
    found = []
    for weight in weights_of(network):
        rows = []
        for i in range(weight.numel()):
            flat, values = weight.view(-1), []
            kept = float(flat[i])
            for step in (STEP, -STEP):
                flat[i] = kept + step
                values.append(measured())
            flat[i] = kept
            rows.append((values[0] - values[1]) / (2 * STEP))
        found.append(torch.stack(rows).reshape(*weight.shape, *rows[0].shape))
    return found


def gradient_differences(network: nn.Module) -> list[Tensor]:
    return differences(network, lambda: torch.tensor(loss_of(network), dtype=torch.float64))


def test_grad_norm_is_the_sum_of_the_norms_of_layers() -> None:
    network = small()
    expected = sum(float(g.square().sum().sqrt()) for g in gradient_differences(network))
    assert float(grad_norm(network, network, IMAGES, LABELS)) == pytest.approx(expected, rel=1e-7)
    assert score_untrained(network, "grad_norm", IMAGES, LABELS) == pytest.approx(expected, rel=1e-7)


def test_snip_is_the_sum_of_weight_times_gradient_in_absolute_value() -> None:
    network = small()
    pairs = zip(weights_of(network), gradient_differences(network), strict=True)
    expected = sum(float((w * g).abs().sum()) for w, g in pairs)
    assert float(snip(network, network, IMAGES, LABELS)) == pytest.approx(expected, rel=1e-7)


def test_grasp_multiplies_weights_gradients_and_the_hessian() -> None:
    """The Hessian is explicit: central differences of all gradients by each weight."""
    network = small()
    tensors = [p for p in network.parameters() if p.ndim > 1]

    def gradient() -> Tensor:
        loss = F.cross_entropy(network(IMAGES), LABELS)
        found = torch.autograd.grad(loss, tensors, materialize_grads=True, allow_unused=True)
        return torch.cat([g.flatten() for g in found])

    hessian = torch.cat([rows.flatten(0, -2) for rows in differences(network, gradient)])
    assert torch.allclose(hessian, hessian.T, atol=1e-8) and hessian.abs().max() > 0.01
    theta = torch.cat([w.flatten() for w in weights_of(network)])
    expected = -float(theta @ hessian @ gradient())
    assert float(grasp(network, network, IMAGES, LABELS)) == pytest.approx(expected, rel=1e-6)


def test_grasp_is_half_the_change_of_the_squared_gradient_if_all_weights_shrink() -> None:
    network = small()

    def squared(scale: float) -> float:
        changed = copy.deepcopy(network)
        for weight in weights_of(changed):
            weight *= scale
        return sum(float(g.square().sum()) for g in gradient_differences(changed))

    change = (squared(1 - 1e-3) - squared(1 + 1e-3)) / 2e-3
    assert float(grasp(network, network, IMAGES, LABELS)) == pytest.approx(change / 2, rel=1e-4)


class Tokens(nn.Module):
    """A linear layer on the pixels [n, h·w, c] of a map, then its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.linear, self.last = nn.Conv2d(1, 2, 3), nn.Linear(2, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(x).tanh_().flatten(2).transpose(1, 2)
        return self.last(torch.tanh(self.linear(tokens)).mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [small, lambda: Tokens().double()])
def test_fisher_is_a_loop_over_images_and_channels(make: Callable[[], nn.Module]) -> None:
    """Σ_positions a · ∂L/∂a is how the loss answers to scaling one channel of one image: a central difference."""
    torch.manual_seed(2)
    network = make().train()
    layers = [m for m in network.modules() if isinstance(m, nn.Conv2d | nn.Linear)]

    def gated(layer: nn.Module, image: int, channel: int, scale: float) -> float:
        def gate(module: nn.Module, given: tuple[Tensor, ...], y: Tensor) -> Tensor:
            y = y.clone()
            one = y[image, channel] if isinstance(layer, nn.Conv2d) else y[image, ..., channel]
            one *= scale
            return y

        hook = layer.register_forward_hook(gate)
        with torch.no_grad():
            loss = F.cross_entropy(network(IMAGES), LABELS, reduction="sum")
        hook.remove()
        return float(loss)

    expected = 0.0
    for layer in layers:
        for channel in range(layer.weight.shape[0]):  # type: ignore[index]
            for image in range(len(IMAGES)):
                high, low = (gated(layer, image, channel, 1 + step) for step in (STEP, -STEP))
                expected += ((high - low) / (2 * STEP)) ** 2 / (2 * len(IMAGES))
    assert float(fisher(network, network, IMAGES, LABELS)) == pytest.approx(expected, rel=1e-6)
    assert not [m for m in network.modules() if m._forward_hooks], "no hook is left behind"
    for parameter in layers[0].parameters():
        parameter.requires_grad_(False)
    assert float(fisher(network, network, IMAGES, LABELS)) == pytest.approx(expected, rel=1e-6)


def test_jacob_cov_is_the_spectrum_of_correlations_between_rows_of_the_jacobian() -> None:
    """Rows by central differences of every pixel, correlations and eigenvalues by numpy's general solver."""
    network, x = small(), IMAGES.clone()
    rows = np.zeros((len(x), x[0].numel()))
    with torch.no_grad():
        for i in range(x.numel()):
            values = []
            for step in (STEP, -STEP):
                changed = x.clone()
                changed.view(-1)[i] += step
                values.append(float(network(changed).sum()))
            rows.flat[i] = (values[0] - values[1]) / (2 * STEP)
    v = np.linalg.eigvals(np.corrcoef(rows)).real
    expected = -float(np.sum(np.log(v + 1e-5) + 1 / (v + 1e-5)))
    assert jacob_cov(network, IMAGES) == pytest.approx(expected, rel=1e-6)


def test_jacob_cov_in_closed_form() -> None:
    """Equal rows have the eigenvalues n and 0; rows that are orthogonal, and of mean 0, only the eigenvalue 1."""
    n, k = 4, 1e-5

    def term(v: float) -> float:
        return -math.log(v + k) - 1 / (v + k)

    linear, x = nn.Linear(8, 3).double(), torch.randn(n, 8, dtype=torch.float64)
    assert jacob_cov(linear, x) == pytest.approx(term(n) + (n - 1) * term(0), rel=1e-9)
    waves = torch.tensor([[1, 1, 1, 1], [1, 1, -1, -1], [1, -1, 1, -1], [1, -1, -1, 1]], dtype=torch.float64)
    rows = torch.cat([waves, -waves], 1)  # what the sum of logits has as the gradient of each image
    assert jacob_cov(lambda x: x * rows, torch.zeros(n, 8, dtype=torch.float64)) == pytest.approx(n * term(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_jacob_cov_of_rounding_errors_is_minus_infinity(dtype: torch.dtype) -> None:
    """The sum of a batch after BatchNorm is a constant, whose gradient is 0 but for rounding; a ReLU changes that."""
    torch.manual_seed(0)
    convolution, norm = nn.Conv2d(3, 4, 3).to(dtype), nn.BatchNorm2d(4).to(dtype)
    x = torch.randn(6, 3, 8, 8, dtype=dtype)
    assert jacob_cov(lambda x: norm(convolution(x)).mean((2, 3)), x) == -math.inf
    assert -8 < jacob_cov(lambda x: norm(convolution(x)).relu().mean((2, 3)), x) < -6


def test_synflow_has_no_value_where_negative_terms_matter() -> None:
    layer = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2.0]]))

    def found(second: float) -> float:
        """1 + 2 * second: the terms of a layer whose second input is multiplied by it."""
        scale = torch.tensor([1.0, second], dtype=torch.float64)
        return float(synflow(lambda x: (x * scale) @ layer.weight.T, layer, torch.ones(1, 2, dtype=torch.float64)))

    assert [found(0.004), found(-0.004)] == pytest.approx([1.008, 0.992])
    assert math.isnan(found(-0.006))


def test_jacob_cov_of_an_ignored_image_is_minus_infinity() -> None:
    assert jacob_cov(lambda x: x[:, :3] * torch.tensor([[1.0], [0.0]]), torch.randn(2, 5)) == -math.inf


def test_zico_is_a_loop_over_layers_and_weights() -> None:
    network = small()
    gradients = []
    for part in (slice(0, 3), slice(3, 6)):
        network.zero_grad()
        F.cross_entropy(network(IMAGES[part]), LABELS[part]).backward()
        gradients.append([p.grad for p in network.parameters() if p.ndim > 1])
    expected = 0.0
    for first, second in zip(*gradients, strict=True):
        if first is None:
            continue  # the unused weight
        ratios = 0.0
        for pair in zip(first.flatten().tolist(), second.flatten().tolist(), strict=True):
            a, b = (abs(value) for value in pair)
            mean = (a + b) / 2
            deviation = math.sqrt(((a - mean) ** 2 + (b - mean) ** 2) / 2)
            ratios += mean / deviation
        expected += math.log(ratios)
    assert float(zico(network, network, IMAGES, LABELS)) == pytest.approx(expected, rel=1e-9)


def test_zico_leaves_out_weights_of_equal_gradients() -> None:
    """Both halves of the batch are the same images, so no weight has a ratio, and no layer counts."""
    network, twice = small(), torch.cat([IMAGES, IMAGES])
    assert float(zico(network, network, twice, torch.cat([LABELS, LABELS]))) == 0.0


def test_sizes_are_counts() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    assert score_untrained(copy.deepcopy(network), "params", IMAGES.float(), LABELS) == 18 + 2 + 4 + 24 + 3
    assert score_untrained(network, "flops", IMAGES.float(), LABELS) == 2 * 9 * 4 + 24
    space = build_space("nb201")
    genotype = sample(space.layout(), 3)
    cost = count_genotype(space, genotype, (3, 32, 32), 10)
    images = torch.zeros(2, 3, 32, 32)
    found = [score_untrained(space.network(genotype, (3, 32, 32), 10), size, images, LABELS[:2]) for size in SIZES]
    assert found == [cost.parameters, cost.multiply_adds]


@pytest.mark.parametrize("function", [grad_norm, snip, grasp, fisher, zico])
def test_scores_of_gradients_never_wait_for_the_device(function: Callable[..., Tensor]) -> None:
    """Fake tensors have no values: reading one on the host raises."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
        found = function(network, network, torch.zeros(6, 1, 4, 4), torch.zeros(6, dtype=torch.int64))
    assert found.shape == () and found.dtype == torch.float32


def per_proxy(space: str) -> list[float]:
    chosen = tiny_space(space)
    images = IMAGES.float().repeat(1, 1, 4, 4)
    return [
        score_architecture(
            chosen,
            sample(chosen.layout(), 1),
            lambda network, x, y, proxy=proxy: score_untrained(network, proxy, x, y),  # type: ignore[misc]
            images,
            LABELS,
            3,
            seed=5,
        )
        for proxy in PROXIES
    ]


@pytest.mark.parametrize("space", sorted(SPACES))
def test_every_proxy_scores_networks_of_every_space_the_same_each_time(space: str) -> None:
    before = torch.random.get_rng_state()
    first = per_proxy(space)
    assert torch.equal(torch.random.get_rng_state(), before), "the run's own random numbers stay as they were"
    torch.randn(7)
    assert per_proxy(space) == first
    assert all(value == value and value < math.inf for value in first)


def test_a_network_that_ignores_its_images_has_a_score() -> None:
    """Every edge is `none`, so the logits are the bias b of the classifier, and the scores have closed forms."""
    space = build_space("nb201", {"cells_per_stage": 1, "channels": 4})
    cell = notation.parse("|none~0|+|none~0|none~1|+|none~0|none~1|none~2|")
    images = torch.randn(6, 3, 8, 8)

    def of(proxy: Proxy) -> float:
        return score_architecture(space, cell, lambda n, x, y: score_untrained(n, proxy, x, y), images, LABELS, 3, 0)

    assert of("jacob_cov") == -math.inf
    assert of("snip") == of("grasp") == of("grad_norm") == of("zico") == 0.0
    torch.manual_seed(0)
    (b,) = [p for name, p in space.network(cell, (3, 8, 8), 3).named_parameters() if name.endswith("classifier.bias")]
    b = b.detach()
    assert of("synflow") == pytest.approx(float(b.abs().sum()))
    wrong = b.softmax(0) - F.one_hot(LABELS, 3)
    assert of("fisher") == pytest.approx(float((b * wrong).square().sum()) / 12)


@pytest.mark.parametrize("proxy", [name for name in PROXIES if name not in (*SIZES, "naswot")])
def test_gradients_are_computed_module_by_module(proxy: Proxy) -> None:
    """Kernels have no second derivatives and call no hooks. The caller may have switched gradients off."""
    network = small()
    modes = []

    def forward(x: Tensor) -> Tensor:
        modes.append((is_modules_only(), torch.is_grad_enabled()))
        return network(x)  # type: ignore[no-any-return]

    with torch.no_grad():
        assert math.isfinite(score(proxy, forward, prepare(network, proxy), IMAGES, LABELS))
    assert set(modes) == {(True, True)}


@pytest.mark.parametrize("proxy", SUPERNET_PROXIES)
def test_scores_follow_the_dtype_of_the_images(proxy: Proxy) -> None:
    space = build_space("nb201", {"cells_per_stage": 1, "channels": 4})
    genotype = sample(space.layout(), 0)
    torch.manual_seed(0)
    network = space.network(genotype, (3, 8, 8), 3)
    images = torch.randn(6, 3, 8, 8)
    exact = score_untrained(copy.deepcopy(network).double(), proxy, images.double(), LABELS)
    assert math.isfinite(exact)
    # A ratio of ZiCo has a difference of two gradients in its denominator.
    rel = 0.01 if proxy == "zico" else 1e-3
    assert score_untrained(network, proxy, images, LABELS) == pytest.approx(exact, rel=rel)


@pytest.mark.parametrize("proxy", ["grad_norm", "snip", "grasp", "fisher", "zico"])
def test_proxies_of_the_loss_read_the_labels_and_the_others_do_not(proxy: Proxy) -> None:
    others = [name for name in PROXIES if name not in ("grad_norm", "snip", "grasp", "fisher", "zico")]
    wrong = (LABELS + 1) % 3
    assert score_untrained(small(), proxy, IMAGES, LABELS) != score_untrained(small(), proxy, IMAGES, wrong)
    for other in others:
        assert score_untrained(small(), other, IMAGES, LABELS) == score_untrained(small(), other, IMAGES, wrong)


def test_proxies_of_the_loss_run_in_training_mode_and_synflow_on_absolute_weights_in_evaluation() -> None:
    network = small()
    assert prepare(network, "snip").training
    assert not prepare(network, "synflow").training and all(p.detach().min() >= 0 for p in network.parameters())
    with pytest.raises(AssertionError, match="sizes are counted"):
        score("params", network, network, IMAGES, LABELS)


def test_naswot_counts_agreeing_relus_one_by_one() -> None:
    torch.manual_seed(0)
    first, second, x = nn.Linear(3, 7), nn.Linear(7, 5), torch.randn(4, 3)
    found = naswot(nn.Sequential(first, nn.ReLU(), second, nn.ReLU()), x)
    hidden = first(x)
    units = torch.cat([hidden, second(hidden.clamp(min=0))], 1) > 0
    kernel = [[sum(a == b for a, b in zip(r, s, strict=True)) for s in units.tolist()] for r in units.tolist()]
    assert found == pytest.approx(math.log(abs(torch.tensor(kernel, dtype=torch.float64).det().item())))


@pytest.mark.parametrize(
    ("cell", "convolutions"),
    [
        ("|nor_conv_1x1~0|+|nor_conv_3x3~0|nor_conv_1x1~1|+|nor_conv_3x3~0|skip_connect~1|none~2|", 4),
        ("|nor_conv_1x1~0|+|none~0|none~1|+|avg_pool_3x3~0|none~1|nor_conv_3x3~2|", 2),  # a node without an input
    ],
)
def test_naswot_counts_the_relu_of_every_module(cell: str, convolutions: int) -> None:
    """Modules that read the same node share its ReLU, but the score counts it once for each of them."""
    torch.manual_seed(0)
    space = build_space("nb201", {"cells_per_stage": 2, "channels": 3})
    network, x = space.network(notation.parse(cell), (3, 8, 8), 10).double().train(), torch.randn(5, 3, 8, 8).double()
    shared = network(x)
    codes: list[torch.Tensor] = []
    for module in network.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(lambda module, given, out: codes.append((out > 0).flatten(1).double()))
    found = naswot(network, x)
    # A cell has one ReLU per convolution; each of two reductions has two, and the end of the network one.
    assert len(codes) == 6 * convolutions + 2 * 2 + 1
    kernel = sum(code @ code.T + (1 - code) @ (1 - code).T for code in codes)
    assert found == pytest.approx(float(torch.linalg.slogdet(kernel).logabsdet))
    with literal_modules():
        assert torch.equal(network(x), shared)


def test_naswot_of_equal_images_is_minus_infinity() -> None:
    assert (
        score_untrained(nn.Sequential(nn.Linear(3, 7), nn.ReLU()), "naswot", torch.ones(2, 3), LABELS[:2]) == -math.inf
    )


def test_synflow_of_a_linear_chain_is_its_depth_times_its_output() -> None:
    """R is a product of |W|, so Σ θ·∂R/∂θ counts R once per layer."""
    torch.manual_seed(0)
    chain = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    product = torch.ones(1, 4, dtype=torch.float64)
    for layer in chain:
        assert isinstance(layer, nn.Linear)
        product = product @ layer.weight.detach().double().abs().T
    assert score_untrained(chain, "synflow", torch.randn(5, 4), LABELS[:5]) == pytest.approx(3 * float(product.sum()))
    assert synflow(chain, chain, torch.zeros(1, 4, dtype=torch.float64)) == pytest.approx(3 * float(product.sum())), (
        "the images' values do not matter"
    )


def test_naswot_counts_the_relu_of_every_candidate_of_a_supernet() -> None:
    """Convolutions of a supernet that read the same node can be stacked, with one ReLU for all of them."""
    torch.manual_seed(0)
    supernet = build_space("nb201", {"cells_per_stage": 1, "channels": 3}).supernet((3, 8, 8), 10).double().train()
    layout = supernet.layout
    mix = WeightMix(layout, {"cell": torch.full(layout.tables[0].shape, 0.2).double()})
    x, counted = torch.randn(4, 3, 8, 8).double(), 0

    class Relus(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal counted
            counted += func is torch.ops.aten.relu.default
            return func(*args, **(kwargs or {}))

    def forward(images: Tensor) -> Tensor:
        with Relus():
            return supernet(images, mix)

    forward(x)
    shared, counted = counted, 0
    naswot(forward, x)
    # Two convolutions on each of six edges in three cells; two reductions and the end of the network.
    assert counted == 3 * 6 * 2 + 2 * 2 + 1 > shared
