"""NAS-Bench-1Shot1: three spaces, counted by three rules, with cells that concatenate as in the paper."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softcell.arch import Cell, Genotype, Mix, Pick, StrongestEach, Table, WeightMix, count, derive, sample
from softcell.errors import UserError
from softcell.kernels.cell import mixed_cell
from softcell.methods.darts import Darts, DartsSettings
from softcell.methods.itnas import ItNas, ItNasSettings
from softcell.methods.snas import Snas, SnasSettings, concrete
from softcell.spaces import Network, _fused_cell, build_space, execution
from softcell.spaces.execution import fused_networks, is_modules_only
from softcell.spaces.oneshot1 import OneShot1Space1, OneShot1Space2, OneShot1Space3, counts, raw_count
from softcell.testing import one_hot, tiny_space
from tests.reference.reference_itnas import encoder

PARENTS = {1: OneShot1Space1.parents, 2: OneShot1Space2.parents, 3: OneShot1Space3.parents}
RAW = {1: 14_580, 2: 29_160, 3: 1_312_200}


@pytest.mark.parametrize("number", [1, 2, 3])
def test_raw_counts_match_the_rule_and_the_closed_form(number: int) -> None:
    layout = build_space(f"nb1shot1-{number}").layout()
    assert count(layout) == raw_count(PARENTS[number]) == RAW[number]


@pytest.mark.parametrize("number", [1, 2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_enumeration_gives_each_architecture_once(number: int) -> None:
    layout = build_space(f"nb1shot1-{number}").layout()
    (table,) = layout.tables
    found = sum(1 for _ in layout.rule.enumerate(table))  # type: ignore[attr-defined]
    assert found == RAW[number]


def test_every_architecture_has_the_parents_of_its_space() -> None:
    for number, parents in ((1, (1, 2, 2, 2, 2)), (2, (1, 1, 2, 2, 3)), (3, (1, 1, 1, 2, 2, 2))):
        space = build_space(f"nb1shot1-{number}")
        for seed in range(20):
            cell = sample(space.layout(), seed).cells["cell"]
            gathering = [n for n in cell.targets if n % 2 == 1]
            assert tuple(len(cell.incoming(node)) for node in gathering) == parents
            assert all(len(cell.incoming(node)) == 1 for node in cell.targets if node % 2 == 0)


def by_permutations(parents: tuple[int, ...]) -> tuple[int, int]:
    """Connected and isomorphic counts from adjacency matrices, by trying all orders of the blocks."""
    blocks, connected, graphs = len(parents) - 1, 0, set()
    for edges in itertools.product(*(itertools.combinations(range(i + 1), n) for i, n in enumerate(parents))):
        pairs = {(source, node + 1) for node, sources in enumerate(edges) for source in sources}
        alive = {blocks + 1}
        for _ in range(blocks + 1):
            alive |= {source for source, target in pairs if target in alive}
        kept = [block for block in range(1, blocks + 1) if block in alive]
        for ops in itertools.product(range(3), repeat=blocks):
            connected += len(kept) == blocks
            best = None
            for order in itertools.permutations(kept):
                place = {0: 0, blocks + 1: blocks + 1, **{block: i + 1 for i, block in enumerate(order)}}
                form = (
                    tuple(ops[block - 1] for block in order),
                    tuple(sorted((place[a], place[b]) for a, b in pairs if a in place and b in place)),
                )
                best = form if best is None or form < best else best
            graphs.add(best)
    return connected, len(graphs)


@pytest.mark.parametrize("parents", [(1, 1, 2), (1, 2, 2), (1, 1, 2, 2), (1, 2, 2, 2)])
def test_counts_up_to_isomorphism_match_all_permutations(parents: tuple[int, ...]) -> None:
    found = counts(parents)
    assert (found.connected, found.isomorphic) == by_permutations(parents)
    assert found.raw == raw_count(parents)


@pytest.mark.exhaustive
def test_counts_of_the_published_spaces_hold_against_permutations() -> None:
    for number in (1, 2):
        found = counts(PARENTS[number])
        assert (found.connected, found.isomorphic) == by_permutations(PARENTS[number])


def test_remarks_print_our_counts_next_to_the_published_one() -> None:
    (text,) = build_space("nb1shot1-1").remarks()
    for part in ("raw 14,580", "without loose ends 3,078", "up to isomorphism 2,685", "published 6,240"):
        assert part in text
    assert "raw 1,312,200" in build_space("nb1shot1-3").remarks()[0]


def test_the_output_is_a_convolution_over_the_concatenated_parents() -> None:
    space = tiny_space("nb1shot1-2")
    genotype = sample(space.layout(), 1)
    network = space.network(genotype, (3, 8, 8), 5).eval()
    cell = network.cells[0]  # type: ignore[index]
    x = torch.randn(2, 4, 8, 8)
    nodes = cell([x])  # type: ignore[operator]
    parents = [pick.source for pick in genotype.cells["cell"].incoming(9)]
    assert len(parents) == 3
    weight = torch.cat([cell.edges.own[f"{p}_9"]["link_1x1"].weight for p in parents], dim=1)  # type: ignore[union-attr, index]
    joined = torch.cat([nodes[p] for p in parents], dim=1)
    torch.testing.assert_close(nodes[-1], torch.nn.functional.conv2d(joined, weight))


def test_a_parent_that_is_not_chosen_has_no_say() -> None:
    space = tiny_space("nb1shot1-1")
    layout, genotype = space.layout(), sample(space.layout(), 0)
    supernet = space.supernet((3, 8, 8), 5).double().train()
    weights = one_hot(layout, genotype)["cell"]
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    before = supernet(x, WeightMix(layout, {"cell": weights}))
    (table,) = layout.tables
    none = table.columns("none")
    changed = torch.where(none, torch.full_like(weights, 0.7), weights)  # the weight of `none` changes nothing
    torch.testing.assert_close(supernet(x, WeightMix(layout, {"cell": changed})), before)


def parents_of(table: Table) -> dict[int, list[int]]:
    """By node that chooses parents the choices that end in it."""
    return {n: list(table.incoming(n)) for n in table.targets if n % 2 == 1}


def literal_softmax(table: Table, alpha: Tensor) -> Tensor:
    """One softmax over the parents of each node, one over the operations of each block, number by number."""
    found = torch.zeros_like(alpha)
    for edges in parents_of(table).values():
        total = sum(math.exp(float(alpha[i, 1])) for i in edges)
        for i in edges:
            found[i, 1] = math.exp(float(alpha[i, 1])) / total
            found[i, 0] = 1 - found[i, 1]
    for i, choice in enumerate(table.choices):
        if choice.target % 2 == 0:
            found[i] = alpha[i].exp() / alpha[i].exp().sum()
    return found


@pytest.mark.parametrize("number", [1, 2, 3])
def test_parents_compete_in_one_softmax(number: int) -> None:
    layout = tiny_space(f"nb1shot1-{number}").layout()
    (table,) = layout.tables
    darts = Darts(layout, DartsSettings(init_scale=1.0)).double()
    expected = literal_softmax(table, darts.alpha["cell"].detach())
    torch.testing.assert_close(darts.probabilities()["cell"].detach(), expected)
    snas = Snas(layout, SnasSettings()).double()
    with torch.no_grad():
        snas.temperature.fill_(0.5)
        snas.log_alpha["cell"].normal_()
    uniform = torch.rand(table.shape, dtype=torch.float64)
    noisy = (snas.log_alpha["cell"].detach() - (-uniform.log()).log()) / 0.5
    sampled = concrete(snas.log_alpha["cell"], snas.masks["cell"], 0.5, uniform, snas.masks.members("cell"))
    torch.testing.assert_close(sampled.detach(), literal_softmax(table, noisy))
    torch.testing.assert_close(
        snas.probabilities()["cell"].detach(), literal_softmax(table, snas.log_alpha["cell"].detach())
    )
    torch.manual_seed(3)
    mix = snas.relax()
    assert isinstance(mix, WeightMix)
    for edges in parents_of(table).values():
        assert float(mix.tables["cell"][edges, 1].sum().detach()) == pytest.approx(1.0)


def test_a_parent_gains_what_others_lose() -> None:
    layout = tiny_space("nb1shot1-1").layout()
    (table,) = layout.tables
    method = Darts(layout, DartsSettings()).double()
    edges = parents_of(table)[table.output[0]]
    before = method.probabilities()["cell"][edges, 1].detach()
    with torch.no_grad():
        method.alpha["cell"][edges[2], 1] += 1.0
    after = method.probabilities()["cell"][edges, 1].detach()
    assert [bool(b > a) for a, b in zip(before, after, strict=True)] == [i == 2 for i in range(len(edges))]


def test_rules_of_other_methods_keep_the_parents_of_the_space() -> None:
    """SNAS takes the strongest candidate of every edge: `none`, wherever a parent has less than half."""
    layout = tiny_space("nb1shot1-2").layout()
    (table,) = layout.tables
    strengths = torch.rand(table.shape, generator=torch.Generator().manual_seed(0))
    strengths[:, 0] = 2.0
    cell = derive(layout, {"cell": strengths}, StrongestEach()).cells["cell"]
    own = derive(layout, {"cell": strengths}).cells["cell"]
    for node in parents_of(table):
        assert cell.incoming(node) == own.incoming(node)
    for node in range(2, 9, 2):
        (pick,) = cell.incoming(node)
        row = strengths[table.incoming(node)[0]]
        assert pick.op == table.choices[table.incoming(node)[0]].candidates[int(row.argmax())]


class LiteralParents(Mix):
    """IT-NAS by the literal encoder: the parents of a node are tokens of one, and so are a block's operations."""

    def __init__(self, method: ItNas) -> None:
        self.method, self.rows = method, dict[tuple[int, int], Tensor]()

    def combine(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> Tensor | None:
        every, attention = encoder(self.method.transformer(site, choice), outputs)
        self.rows[site, choice] = attention[:, 0, 1:]
        return every[:, 0]

    def compete(self, site: int, outputs: Mapping[int, Mapping[int, Tensor | None]]) -> Tensor | None:
        edges = sorted(outputs)
        tokens = {i: outputs[choice][1] for i, choice in enumerate(edges)}
        every, attention = encoder(self.method.transformer(site, edges[0]), tokens)
        for i, choice in enumerate(edges):
            row = torch.zeros(len(attention), 3, dtype=attention.dtype)
            row[:, 1] = attention[:, 0, i + 1]
            self.rows[site, choice] = row
        return every[:, 0]


@pytest.mark.parametrize("drop_path", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_the_indicator_token_attends_to_all_parents_together(drop_path: bool, shared: bool) -> None:
    torch.manual_seed(0)
    space = tiny_space("nb1shot1-2")
    supernet = space.supernet((3, 8, 8), 5).double()
    if drop_path:
        supernet.use_drop_path(0.5)
        supernet.drop_path.set_fraction(1.0)
    supernet.train(drop_path)
    method = ItNas.for_supernet(ItNasSettings(shared=shared), supernet).double()
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    x, literal = torch.randn(3, 3, 8, 8, dtype=torch.float64), LiteralParents(method)
    ((indicating, _),) = method.selection.passes()
    found = []
    for mix in (indicating, literal):
        torch.manual_seed(1)
        with torch.no_grad():
            found.append(supernet(x, mix))
    torch.testing.assert_close(found[0], found[1], rtol=1e-7, atol=1e-7)
    (table,) = method.layout.tables
    sites = range(len(method.layout.sites))
    rows = method.selection.indicator()["cell"]
    shares = method.probabilities()["cell"]
    for i in range(len(table)):
        expected = torch.stack([literal.rows[s, i] for s in sites]).mean((0, 1))
        torch.testing.assert_close(rows[i], expected, rtol=1e-7, atol=1e-8)
    for node, edges in parents_of(table).items():
        assert float(rows[edges, 1].sum()) < 1, "the IT keeps a part"
        torch.testing.assert_close(shares[edges, 1], rows[edges, 1] / rows[edges, 1].sum())
        strongest = sorted(edges, key=lambda i: -float(rows[i, 1]))[: len(method.derive().cells["cell"].incoming(node))]
        kept = {pick.source for pick in method.derive().cells["cell"].incoming(node)}
        assert kept == {table.choices[i].source for i in strongest}
    assert float(rows[parents_of(table)[9], 1].std()) > 1e-3, "parents differ"


def test_single_paths_are_refused_if_edges_compete() -> None:
    supernet = tiny_space("nb1shot1-1").supernet((3, 8, 8), 5)
    with pytest.raises(UserError, match=r"method\.paths=all"):
        ItNas.for_supernet(ItNasSettings(paths="single"), supernet)


# --- fused networks ---


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells are fused on the CPU too, by the kernels' plain twins."""
    monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())


def small_network(number: int, seed: int, channels: int = 5, **options: Any) -> Network:
    """A network in float64 whose norms have random scales, shifts and running statistics."""
    torch.manual_seed(seed)
    space = build_space(f"nb1shot1-{number}", {"cells_per_stack": 1, "channels": channels})
    network = space.network(sample(space.layout(), seed), (3, 9, 7), 5, **options).double()
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d) and norm.affine:
            assert norm.running_mean is not None and norm.running_var is not None
            nn.init.uniform_(norm.weight, 0.5, 2)
            nn.init.normal_(norm.bias)
            norm.running_mean.uniform_(-1, 1)
            norm.running_var.uniform_(0.5, 2)
    return network


def steps(network: Network, *, training: bool) -> dict[str, Tensor]:
    """Logits, gradients of images and parameters, and buffers after two passes. Parameters that nothing reads get 0."""
    images = torch.randn(4, 3, 9, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    network.train(training)
    for _ in range(2):
        network.zero_grad()
        images.grad = None
        logits = network(images)
        logits.square().sum().backward()
    assert images.grad is not None
    found = {"logits": logits.detach(), "images": images.grad}
    found |= {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in network.named_parameters()}
    return found | dict(network.named_buffers())


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("number", "seed"), [(1, 0), (1, 3), (2, 1), (2, 4), (3, 2), (3, 5)])
def test_a_fused_network_equals_its_modules(
    number: int, seed: int, training: bool, served: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = 0

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal ran
        ran += 1
        return mixed_cell(*given, **named)

    monkeypatch.setattr(_fused_cell, "mixed_cell", counted)
    with fused_networks():
        mine = steps(small_network(number, seed), training=training)
    assert ran == 2 * 3
    theirs = steps(small_network(number, seed), training=training)
    assert ran == 2 * 3, "without the context modules run"
    for name, expected in theirs.items():
        torch.testing.assert_close(mine[name], expected, rtol=1e-8, atol=1e-9, msg=name)


def test_search_forms_and_cells_of_pools_run_module_by_module(served: None) -> None:
    ops = {0: "skip_connect", 1: "max_pool_3x3"}
    picks = [Pick(node, node + 1, ops[node % 2]) for node in range(8)]
    links = [Pick(2, 9, "link_1x1"), Pick(8, 9, "link_1x1")]
    pools = Genotype("nb1shot1-1", {"cell": Cell((*picks, *links), output=(9,))})
    space = build_space("nb1shot1-1", {"cells_per_stack": 1, "channels": 4})
    for network in (space.network(pools, (3, 8, 8), 5), small_network(1, 0, search_form=True)):
        x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
        network.double().eval()
        assert network.has_fused_cells() == [False] * 3
        with fused_networks():
            mine = network(x)
        torch.testing.assert_close(mine, network(x), rtol=0, atol=0)
