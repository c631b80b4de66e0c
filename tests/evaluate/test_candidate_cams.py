"""Grad-CAM of every candidate of a choice: against its definition, and only through this edge."""

import pytest
import torch
from PIL import Image
from torch import Tensor

from softcell.app.report.heatmaps import SIDE, cam_grid
from softcell.arch import WeightMix
from softcell.evaluate.predictions import candidate_cams
from softcell.methods import METHODS
from softcell.nn.candidates import get_candidate
from softcell.spaces import Supernet, build_space
from softcell.spaces.block import watching
from softcell.testing.tools import random_weights
from tests.reference import reference_nos as literal


def supernet() -> tuple[Supernet, Tensor]:
    torch.manual_seed(0)
    made = build_space("nb201", {"cells_per_stage": 1, "channels": 4}).supernet((1, 8, 8), 3).double().eval()
    return made, torch.randn(2, 1, 8, 8, dtype=torch.float64)


def by_definition(network: Supernet, x: Tensor, mix: WeightMix, k: int, classes: Tensor) -> Tensor:
    """Edge 0->1 of the last cell: its candidates' maps by hand, the score as a function of their weighted sum."""
    cell = network.cells[2]  # type: ignore[index]
    with torch.no_grad():
        before = x
        before = network.skeleton.stem(before)  # type: ignore[operator, union-attr]
        for site in (0, 1):
            before = network.cells[site]([before], mix, site)[-1]  # type: ignore[index]
            before = network.skeleton.reductions[site](before)  # type: ignore[index, union-attr]
    modules = [cell.edges.module(i) for i in range(5)]  # type: ignore[union-attr]
    maps = [torch.zeros_like(before) if m is None else m(before).detach() for m in modules]
    weights = mix.weights(2)
    # Node 1 is this edge alone; the rest of the cell is a function of it.
    edge = sum(w * m for w, m in zip(weights[0], maps, strict=True)).requires_grad_()  # type: ignore[union-attr]
    nodes = [before, edge]
    for node in (2, 3):
        total: Tensor | float = 0.0
        for i, choice in enumerate(cell.table.choices):  # type: ignore[union-attr]
            if choice.target == node:
                for c in range(5):
                    module = cell.edges.module(5 * i + c)  # type: ignore[union-attr]
                    if module is not None:
                        total = total + weights[i, c] * module(nodes[choice.source])
        assert isinstance(total, Tensor)
        nodes.append(total)
    score = network.head(nodes[3]).gather(1, classes[:, None]).sum()
    (gradient,) = torch.autograd.grad(score, edge)
    heat = torch.relu((gradient.mean((2, 3), keepdim=True) * maps[k]).sum(1))
    return heat / heat.amax((1, 2), keepdim=True).clamp_min(1e-300)


def test_every_candidates_map_is_grad_cam_of_its_own_output() -> None:
    network, x = supernet()
    classes = torch.tensor([0, 2])
    mix = WeightMix(network.layout, random_weights(network.layout, 1))
    found = candidate_cams(network, mix, 2, 0, x, classes)
    assert sorted(found) == [1, 2, 3, 4], "all but none, which has no map"
    for k, heat in found.items():
        torch.testing.assert_close(heat, by_definition(network, x, mix, k, classes))
        assert 0 <= float(heat.min()) <= float(heat.max()) <= 1


def test_a_candidate_without_weight_has_a_map_too() -> None:
    network, x = supernet()
    weights = random_weights(network.layout, 1)
    weights["cell"][0, 3] = 0.0
    found = candidate_cams(network, WeightMix(network.layout, weights), 2, 0, x, torch.tensor([0, 1]))
    assert bool(found[3].any())


def test_maps_under_attention_come_from_the_candidates_own_gradients() -> None:
    network, x = supernet()
    kind = METHODS.get("itnas")
    method = kind.for_supernet(kind.Settings(), network).double()  # type: ignore[type-var]
    found = candidate_cams(network, method.relax(), 1, 5, x, torch.tensor([1, 2]))
    assert sorted(found) == [1, 2, 3, 4]
    assert all(heat.shape == (2, 4, 4) for heat in found.values())
    assert any(bool(heat.any()) for heat in found.values())
    assert not torch.equal(found[1], found[3])


def calibrating() -> tuple[Supernet, Tensor]:
    torch.manual_seed(0)
    made = build_space("nos", {"cells": 3, "channels": 4, "nodes": 2}).supernet((1, 8, 8), 3).double()
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    made(x, WeightMix(made.layout, random_weights(made.layout, 2)))  # norms get statistics of their own
    return made.eval(), x


def literal_block_cams(
    network: Supernet, x: Tensor, tables: dict[str, Tensor], site: int, choice: int, classes: Tensor
) -> dict[int, Tensor]:
    """All cells of a NOS supernet from Eq 2-5, edge by edge; the maps of one choice and the gradients they meet."""
    older, newer = network.stem(x)  # type: ignore[operator]
    maps: dict[int, tuple[Tensor, str]] = {}
    for number, (plan, pre, cell) in enumerate(zip(network.plans, network.pre, network.cells, strict=True)):  # type: ignore[arg-type]
        nodes = dict(enumerate(pre(older, newer)))
        table, weights = cell.table, tables[plan.table]
        entries = [(i, k, op) for i, own in enumerate(table.choices) for k, op in enumerate(own.candidates)]
        for target in table.targets:
            kinds: dict[str, list[tuple[int, int, Tensor]]] = {"feature": [], "attention": [], "kernel": []}
            for entry, (i, k, op) in enumerate(entries):
                if table.choices[i].target == target:
                    made = cell.edges.module(entry)(nodes[table.choices[i].source])
                    kinds[get_candidate(op).kind].append((i, k, made))
            base = sum(weights[i, k] * made for i, k, made in kinds["feature"])
            if target in table.output:  # the second tier keeps what features leave over of its surrogate
                base = base + (1 - sum(weights[i, k] for i, k, _ in kinds["feature"])) * nodes[target - 1]
            assert isinstance(base, Tensor)
            value = base
            for i, k, made in kinds["attention"]:
                value = value + base * (weights[i, k] * made)
            for i, k, made in kinds["kernel"]:
                value = value + literal.convolve(base, weights[i, k] * made)
            nodes[target] = value
            if number == site and table.choices[choice].target == target:
                sums = (base, value)
                maps |= {k: (made, "base") for i, k, made in kinds["feature"] if i == choice}
                maps |= {k: (base * made, "value") for i, k, made in kinds["attention"] if i == choice}
                maps |= {k: (literal.convolve(base, made), "value") for i, k, made in kinds["kernel"] if i == choice}
        older, newer = newer, torch.cat([nodes[n] for n in table.output], dim=1)
    score = network.head(newer).gather(1, classes[:, None]).sum()
    gradients = dict(zip(("base", "value"), torch.autograd.grad(score, sums), strict=True))
    heats = {}
    for k, (own, where) in maps.items():
        heat = torch.relu((gradients[where].mean((2, 3), keepdim=True) * own).sum(1))
        heats[k] = (heat / heat.amax((1, 2), keepdim=True).clamp_min(1e-300)).detach()
    return heats


@pytest.mark.parametrize("site", [0, 2])  # a normal and a reduction cell
@pytest.mark.parametrize("edge", ["0->2", "3->4", "4->5"])  # first tier, out of an inner node, second tier
def test_maps_in_cells_that_calibrate_are_what_each_kind_adds_to_its_node(site: int, edge: str) -> None:
    network, x = calibrating()
    tables = random_weights(network.layout, 1)
    table = network.layout.table(network.layout.sites[site])
    choice = [str(own) for own in table.choices].index(edge)
    classes = torch.tensor([0, 2, 1])
    found = candidate_cams(network, WeightMix(network.layout, tables), site, choice, x, classes)
    twin = literal_block_cams(network, x, tables, site, choice, classes)
    assert sorted(found) == sorted(twin) == list(range(11))
    for k, heat in found.items():
        torch.testing.assert_close(heat, twin[k], rtol=1e-7, atol=1e-9)
    assert sum(bool(heat.any()) for heat in found.values()) >= 8


@pytest.mark.parametrize("method", ["nos", "itnas"])
def test_watching_a_choice_of_a_calibrating_cell_changes_nothing_of_the_forward(method: str) -> None:
    network, x = calibrating()
    if method == "itnas":
        kind = METHODS.get("itnas")
        mix = kind.for_supernet(kind.Settings(), network).double().relax()  # type: ignore[type-var]
    else:
        mix = WeightMix(network.layout, random_weights(network.layout, 1))
    plain = network(x, mix)
    for site in (0, 2):
        table = network.layout.table(network.layout.sites[site])
        for choice in range(len(table)):
            with watching(table, site, choice) as watch:
                assert torch.equal(network(x, mix), plain)
            assert sorted(watch.made) == list(range(11)) and watch.features is not None
    found = candidate_cams(network, mix, 2, len(table) - 1, x, torch.tensor([0, 1, 2]))
    assert sorted(found) == list(range(11)) and all(0 <= float(h.min()) <= float(h.max()) <= 1 for h in found.values())


def test_the_grid_has_a_tile_per_image_and_candidate_and_frames_the_chosen_one() -> None:
    images = torch.randint(0, 255, (2, 1, 8, 8), dtype=torch.uint8)
    heats = {"skip_connect": torch.zeros(2, 8, 8), "nor_conv_3x3": torch.ones(2, 4, 4)}
    grid = cam_grid(images, heats, ["a", "b"], "nor_conv_3x3", "heading")
    assert isinstance(grid, Image.Image)
    assert grid.width > 3 * SIDE and grid.height > 2 * SIDE
    other = cam_grid(images, heats, ["a", "b"], None, "heading")
    assert grid.tobytes() != other.tobytes()
