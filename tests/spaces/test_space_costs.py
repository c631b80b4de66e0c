"""Costs of candidates against hand-computed sums and counts of whole networks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from softcell.arch import Choice, Genotype, Layout, StrongestEach, Table, WeightMix, sample
from softcell.engine.session import rng_state
from softcell.errors import UserError
from softcell.nn.candidates import Spec, candidate, get_candidate
from softcell.spaces import SPACES, Space, Supernet, build_space
from softcell.spaces.base import evaluation_space
from softcell.spaces.costs import (
    CostTables,
    Resources,
    convolution,
    count_candidate,
    count_candidates,
    count_module,
    output_shapes,
    passing,
    pooling,
)
from softcell.spaces.execution import is_modules_only
from softcell.testing import RaggedSpace, tiny_space

SHAPE = (3, 9, 7)
PLACES = (*SPACES, "ragged")


def place(name: str) -> Space:
    return RaggedSpace() if name == "ragged" else tiny_space(name)


def cost(name: str, stride: int = 1, channels: int = 4, size: tuple[int, int] = (6, 8), **options: bool) -> Resources:
    """A candidate of a supernet on [1, channels, *size]."""
    with torch.device("meta"):
        module = get_candidate(name).build(Spec(channels, stride, affine=False, pool_norm=True))
    return count_candidate(module, torch.Size((1, channels, *size)), **options)


def test_candidates_cost_as_appendix_f_says() -> None:
    hw, c = 48, 4
    depthwise, pointwise = 9 * c, c * c
    assert cost("nor_conv_3x3") == Resources(9 * c * c, hw * 9 * c * c, hw * 2 * c + 9 * c * c)
    assert cost("dil_conv_3x3") == Resources(
        depthwise + pointwise, hw * (depthwise + pointwise), 2 * hw * 2 * c + depthwise + pointwise
    )
    once = cost("dil_conv_5x5")
    assert cost("sep_conv_5x5") == Resources(*(2 * value for value in once))  # applied twice
    assert cost("skip_connect") == Resources(0, 0, hw * 2 * c)
    for pool in ("max_pool_3x3", "avg_pool_3x3"):
        assert cost(pool) == Resources(0, hw * 9 * c, hw * 2 * c)
        assert cost(pool, printed_pooling=True) == Resources(0, hw * 9 * c * c, hw * 2 * c)


def test_a_layer_of_stride_2_reads_the_whole_input_and_a_skip_of_stride_2_is_its_convolutions() -> None:
    hw, c = 3 * 4, 4
    assert cost("max_pool_3x3", stride=2) == Resources(0, hw * 9 * c, hw * 5 * c)
    assert cost("nor_conv_3x3", stride=2) == Resources(9 * c * c, hw * 9 * c * c, hw * 5 * c + 9 * c * c)
    half = c * c // 2  # two 1×1 convolutions from c to c/2
    assert cost("skip_connect", stride=2) == Resources(2 * half, hw * 2 * half, 2 * (hw * (4 * c + c // 2) + half))


def test_memory_access_of_reduction_cells_matches_the_authors_code() -> None:
    """DARTS on CIFAR-10, 16 channels: the reduction cells write 16×16 maps of 32 channels and 8×8 maps of 64.

    With the output's H·W for both maps, as Eq 37 and 40 are printed, it would be 1.28 to 2.92 times less.
    """
    ratios = []
    for c, size in ((32, 16), (64, 8)):
        depthwise = {"3x3": 9 * c, "5x5": 25 * c}
        # Channels read and written per output position: with stride 2 a map of c channels is 4·c to read, c to write.
        expected = {f"{kind}_pool_3x3": (5 * c, 0) for kind in ("max", "avg")}
        expected["skip_connect"] = (2 * (4 * c + c // 2), c * c)  # two convolutions, each to half of the channels
        for window, weights in depthwise.items():
            expected[f"dil_conv_{window}"] = (5 * c + 2 * c, weights + c * c)
            expected[f"sep_conv_{window}"] = (5 * c + 3 * 2 * c, 2 * (weights + c * c))
        for name, (channels, weights) in expected.items():
            found = cost(name, stride=2, channels=c, size=(2 * size, 2 * size)).memory
            assert found == size * size * channels + weights, name
            surplus = size * size * 3 * c * (2 if name == "skip_connect" else 1)
            ratios.append(found / (found - surplus))
    assert (min(ratios), max(ratios)) == pytest.approx((1.28, 2.92), abs=0.005)


class Mixer(nn.Module):
    """A candidate that is nothing like a convolution: a product of matrices, a linear layer and a loose parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        mixed = self.linear(tokens @ tokens.transpose(1, 2) @ tokens) * self.scale
        return mixed.transpose(1, 2).reshape(x.shape)


class Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_a_custom_candidate_is_counted() -> None:
    with torch.device("meta"):
        mixer, loose = Mixer(), Loose()
    positions = 12
    found = count_candidate(mixer, torch.Size((1, 4, 3, 4)))
    assert found.parameters == 4 + 16 + 4
    assert found.flops == 2 * positions * positions * 4 + positions * 16
    assert found.memory == positions * 8 + 16
    assert count_candidate(loose, torch.Size((1, 4, 3, 4))) == Resources(4, 0, positions * 8 + 4)


def picked(costs: CostTables, genotype: Genotype) -> dict[str, float]:
    totals = dict.fromkeys(costs.kinds, 0.0)
    for site, name in enumerate(costs.layout.sites):
        table = costs.layout.table(name)
        rows = {(c.source, c.target): i for i, c in enumerate(table.choices)}
        for pick in genotype.cells[name].picks:
            row = rows[pick.source, pick.target]
            for kind in totals:
                totals[kind] += float(costs.kinds[kind][site][row, table.choices[row].candidates.index(pick.op)])
    return totals


@pytest.mark.parametrize("name", PLACES)
def test_costs_of_picks_add_up_to_what_the_real_network_has_more_than_an_empty_one(name: str) -> None:
    """Children in search form: same surroundings, so their difference is that of their picks."""
    space = place(name)
    layout = space.layout()
    costs = count_candidates(space, SHAPE, 5)
    reference, *others = [sample(layout, seed) for seed in range(4)]
    base, own = network_cost(space, reference), picked(costs, reference)
    for genotype in others:
        found, mine = network_cost(space, genotype), picked(costs, genotype)
        assert mine["parameters"] - own["parameters"] == found["parameters"] - base["parameters"]
        assert mine["flops"] - own["flops"] == found["flops"] - base["flops"]


def network_cost(space: Space, genotype: Genotype) -> dict[str, float]:
    network = space.network(genotype, SHAPE, 5, search_form=True)
    cost = count_module(network, SHAPE)
    # Pools that leave one node run once for all edges; the table counts them on each edge.
    pools = sum(
        9 * output_size(network, site, pick.target)
        for site, table in enumerate(space.layout().sites)
        for pick in genotype.cells[table].picks
        if pick.op.endswith("pool_3x3")
    )
    return {"parameters": cost.parameters, "flops": cost.multiply_adds + pools}


def output_size(network: nn.Module, site: int, node: int) -> int:
    """Values of one node of a cell, caught on the real network."""
    caught: list[int] = []
    handle = network.cells[site].register_forward_hook(lambda m, given, nodes: caught.append(nodes[node].numel()))
    network.eval()(torch.zeros(1, *SHAPE))
    handle.remove()
    return caught[0]


@pytest.mark.parametrize("name", PLACES)
def test_padding_and_zeros_cost_nothing_and_everything_else_something(name: str) -> None:
    space = place(name)
    costs = count_candidates(space, SHAPE, 5)
    for site, table in ((s, costs.layout.table(n)) for s, n in enumerate(costs.layout.sites)):
        free = ~table.mask() | table.columns("none")
        for kind in costs.kinds:
            assert not costs.kinds[kind][site][free].any()
        assert costs.kinds["memory"][site][~free].all()


def test_printed_pooling_reaches_the_tables() -> None:
    space = tiny_space("nb201")
    plain, printed = (count_candidates(space, SHAPE, 5, printed_pooling=flag) for flag in (False, True))
    pool = plain.layout.tables[0].columns("avg_pool_3x3")
    for site, width in enumerate((4, 8, 16)):
        ratio = printed.kinds["flops"][site][pool] / plain.kinds["flops"][site][pool]
        assert ratio.tolist() == [width] * len(ratio)
        assert torch.equal(printed.kinds["flops"][site][~pool], plain.kinds["flops"][site][~pool])


def test_counting_draws_no_random_numbers() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    count_candidates(tiny_space("darts"), SHAPE, 5)
    assert torch.equal(torch.get_rng_state(), before)


class Bare(Supernet):
    def features(self, x: Tensor, mix: object) -> list[Tensor]:  # type: ignore[override]
        return [x]

    def head(self, features: Tensor) -> Tensor:
        return features.mean((2, 3))


def test_a_supernet_without_mixed_cells_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    space = RaggedSpace()
    monkeypatch.setattr(RaggedSpace, "supernet", lambda self, shape, classes: Bare(self, shape, classes))
    with pytest.raises(UserError, match="MixedCell"):
        count_candidates(space, SHAPE, 5)


def test_the_network_meant_by_a_budget_is_the_one_that_training_builds() -> None:
    assert evaluation_space("darts", "cifar10") == build_space("darts", {"cells": 20, "channels": 36})
    assert evaluation_space("darts", "digits", {"channels": 4}) == build_space("darts", {"cells": 5, "channels": 4})
    assert evaluation_space("darts", "imagenet").stem == "imagenet"  # type: ignore[attr-defined]


# --- drop-path on mixed edges ---


@pytest.fixture
def noisy() -> Supernet:
    torch.manual_seed(0)
    return tiny_space("darts").supernet((3, 8, 8), 4).double()


def weights(supernet: Supernet) -> WeightMix:
    generator = torch.Generator().manual_seed(3)
    tables = {t.name: torch.rand(t.shape, generator=generator, dtype=torch.float64) for t in supernet.layout.tables}
    return WeightMix(supernet.layout, tables)


def test_dropping_paths_equals_a_literal_twin(monkeypatch: pytest.MonkeyPatch, noisy: Supernet) -> None:
    """Node by node and edge by edge: Σ_choices keep/(1-p) · Σ_k w_k·o_k(x), one uniform number per image and choice."""
    from softcell.nn.stochastic import DropPath
    from softcell.spaces.edges import Combiner

    noisy.use_drop_path(0.4)
    noisy.drop_path.set_fraction(0.5)
    x, mix = torch.randn(5, 3, 8, 8, dtype=torch.float64), weights(noisy)
    torch.manual_seed(7)
    found = noisy(x, mix)
    after = torch.get_rng_state()

    def literal(
        combiner: Combiner, outputs: list[tuple[int, int, Tensor | None]], mix: WeightMix, site: int, drawn: Tensor
    ) -> Tensor:
        total: Tensor | float = 0.0
        for choice in sorted({choice for choice, _, _ in outputs}):
            edge = sum(mix.weights(site)[c, k] * o for c, k, o in outputs if c == choice and o is not None)
            assert isinstance(edge, Tensor)
            for image in range(len(edge)):
                edge[image] *= 0.0 if drawn[image, choice] < 0.2 else 1 / 0.8
            total = total + edge
        assert isinstance(total, Tensor)
        return total

    monkeypatch.setattr(Combiner, "combine", literal)
    monkeypatch.setattr(DropPath, "factors", lambda self, x, paths: torch.rand(len(x), paths))
    torch.manual_seed(7)
    torch.testing.assert_close(found, noisy(x, mix), rtol=1e-6, atol=1e-6)  # 0.2 is kept in float32
    assert torch.equal(after, torch.get_rng_state())


def test_without_drop_path_and_in_evaluation_nothing_is_drawn(noisy: Supernet) -> None:
    x, mix = torch.randn(2, 3, 8, 8, dtype=torch.float64), weights(noisy)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    plain = noisy(x, mix)
    noisy.use_drop_path(0.5)
    noisy.use_drop_path(0.0)
    assert not any(cell.drops() for cell in noisy.cells), "and nothing is computed for it"
    torch.testing.assert_close(noisy(x, mix), plain)
    assert torch.equal(torch.get_rng_state(), before)
    noisy.use_drop_path(0.5)
    noisy.eval()(x, mix)
    assert torch.equal(torch.get_rng_state(), before)
    noisy.train()(x, mix)
    assert not torch.equal(torch.get_rng_state(), before)
    assert not [name for name in noisy.state_dict() if "drop_path" in name]


def test_edges_are_dropped_on_their_own_and_per_image(noisy: Supernet) -> None:
    """With everything dropped the cells give zeros; with half, images and edges differ."""
    noisy.use_drop_path(0.999999)
    noisy.drop_path.set_fraction(1.0)
    x, mix = torch.randn(4, 3, 8, 8, dtype=torch.float64), weights(noisy)
    assert not noisy.features(x, mix)[-1].any()
    noisy.use_drop_path(0.5)
    noisy.drop_path.set_fraction(1.0)
    nodes: list[Tensor] = []
    noisy.cells[0].register_forward_hook(lambda m, given, values: nodes.extend(values[2:]))
    noisy(torch.randn(64, 3, 8, 8, dtype=torch.float64), mix)
    dropped = [(node.abs().sum((1, 2, 3)) == 0).double().mean() for node in nodes]
    assert 0.05 < dropped[0] < 0.5  # both edges of the first node: a quarter of the images
    assert all(later < dropped[0] + 0.2 for later in dropped)


def test_a_convolution_costs_as_equations_35_to_37_say() -> None:
    # 4×5 output, 3×3 window, 6 to 8 channels in 2 groups: 9·6·8/2 = 216 weights.
    assert convolution(4, 5, 9, 6, 8, groups=2) == Resources(216, 20 * 216, 20 * 14 + 216)
    # With stride 2 an input of 8×10 is read for the same output.
    assert convolution(4, 5, 9, 6, 8, groups=2, reduction=4) == Resources(216, 20 * 216, 80 * 6 + 20 * 8 + 216)


def test_pooling_and_passing_cost_as_equations_38_to_40_say() -> None:
    assert pooling(4, 5, 9, 6, 6) == Resources(0, 20 * 9 * 6, 20 * 12)
    assert pooling(4, 5, 9, 6, 6, printed=True) == Resources(0, 20 * 9 * 36, 20 * 12)
    assert pooling(4, 5, 9, 6, 6, reduction=4) == Resources(0, 20 * 9 * 6, 80 * 6 + 20 * 6)
    assert passing(4, 5, 6, 6) == Resources(0, 0, 20 * 12)


def test_costs_are_found_by_table_and_kind() -> None:
    read = Table("cell", (Choice(0, 1, ("a", "b", "c")), Choice(0, 2, ("a", "b"))), (2,))
    costs = torch.arange(12, dtype=torch.float64).reshape(2, 2, 3)  # of two sites
    other = Table("other", (Choice(0, 1, ("a", "b")),), (1,))
    unread = Table("unread", (Choice(0, 1, ("a",)),), (1,))
    layout = Layout("toy", (read, other, unread), ("cell", "other", "cell"), StrongestEach())
    rows = (costs[0], torch.tensor([[1.0, 2.0]], dtype=torch.float64), costs[1])
    tables = CostTables(layout, {"flops": rows})
    assert torch.equal(tables.of("flops", "cell"), costs)
    assert tables.of("flops", "other").tolist() == [[[1.0, 2.0]]]
    assert tables.read_tables() == ("cell", "other")
    with pytest.raises(AssertionError, match="one"):
        CostTables(layout, {"flops": rows[:2]})


class _AlwaysNoise(nn.Module):
    """Draws in evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
def test_output_shapes_leave_random_numbers_alone(device: str) -> None:
    candidate("always_noise")(lambda spec: _AlwaysNoise())
    sizes = {"cells_per_stage": 1, "channels": 2, "candidates": ["always_noise", "skip_connect"]}
    supernet = build_space("nb201", sizes).supernet((1, 8, 8), 3).to(device)
    before = rng_state(torch.device(device))
    assert output_shapes(supernet)
    for mine, theirs in zip(rng_state(torch.device(device)).values(), before.values(), strict=True):
        assert mine is theirs is None or torch.equal(mine, theirs)


def test_shapes_of_outputs_are_found_module_by_module() -> None:
    """Kernels for one image would be compiled for this pass alone, one by one."""
    supernet, seen = tiny_space("nb201").supernet((3, 8, 8), 5), list[bool]()
    supernet.cells[0].register_forward_pre_hook(lambda *given: seen.append(is_modules_only()))  # type: ignore[index, union-attr]
    output_shapes(supernet)
    assert seen == [True]
