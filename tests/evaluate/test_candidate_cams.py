"""Grad-CAM of every candidate of a choice: against its definition, and only through this edge."""

import torch
from PIL import Image
from torch import Tensor

from softcell.arch import WeightMix
from softcell.evaluate.gradcam import candidate_cams
from softcell.methods import METHODS, fitted
from softcell.report.cams import SIDE, cam_grid
from softcell.spaces import Supernet, build_space
from softcell.testing.tools import random_weights


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
    method = fitted(kind, kind.Settings(), network).double()  # type: ignore[type-var]
    found = candidate_cams(network, method.relax(), 1, 5, x, torch.tensor([1, 2]))
    assert sorted(found) == [1, 2, 3, 4]
    assert all(heat.shape == (2, 4, 4) for heat in found.values())
    assert any(bool(heat.any()) for heat in found.values())
    assert not torch.equal(found[1], found[3])


def test_the_grid_has_a_tile_per_image_and_candidate_and_frames_the_chosen_one() -> None:
    images = torch.randint(0, 255, (2, 1, 8, 8), dtype=torch.uint8)
    heats = {"skip_connect": torch.zeros(2, 8, 8), "nor_conv_3x3": torch.ones(2, 4, 4)}
    grid = cam_grid(images, heats, ["a", "b"], "nor_conv_3x3", "heading")
    assert isinstance(grid, Image.Image)
    assert grid.width > 3 * SIDE and grid.height > 2 * SIDE
    other = cam_grid(images, heats, ["a", "b"], None, "heading")
    assert grid.tobytes() != other.tobytes()
