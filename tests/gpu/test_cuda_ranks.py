"""Several processes on CUDA: two ranks on one device by gloo against one process, and NCCL with one rank, recorded.

NCCL refuses two ranks on one device, and gloo accepts it; its collectives work on CUDA tensors but cannot be recorded.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.engine.capture import CapturedStep, prepare_step
from softcell.engine.distributed import World
from softcell.engine.optim import apply_gradients, sgd
from softcell.engine.reduce import gradients_of
from softcell.kernels.derived import derived_cell
from softcell.spaces.execution import modules_only
from tests.helpers.derived_cells import Cell, states
from tests.helpers.engine_launch import free_port, results, start_ranks
from tests.helpers.fused_ranks import CELLS, CUDA_STEPS, ON_CUDA, SIZE, Counted, cell_step, cuda_step, part_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
]
KERNELS = 2e-3
"""Kernels sum in float32, and two halves of a batch are summed in another order than the whole."""
STEP = 1e-6
"""Steps are float64 but for the learning rate and Adam's bias correction on a device."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return results(start_ranks(2, "fused_ranks", "cuda_on_rank", folder), folder, timeout=500.0)


def close_in_norm(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b.double()).norm() <= tolerance * (b.double().norm() + 1e-3)


@pytest.mark.parametrize(("case", "variant"), ON_CUDA)
def test_fused_cells_of_two_ranks_with_shared_norms_equal_one_process(
    ranks: list[dict[str, Any]], case: str, variant: str
) -> None:
    """The oracle is module by module, in float64 and on the CPU."""
    with modules_only():
        expected = cell_step(case, variant, slice(0, SIZE))
    found = [rank[f"shared {case} {variant}"] for rank in ranks]
    close_in_norm([torch.cat([rank["y"] for rank in found])], [expected["y"]], KERNELS)
    total = [a + b for a, b in zip(found[0]["first"], found[1]["first"], strict=True)]
    close_in_norm(total, expected["first"], 10 * KERNELS)
    for rank in found:
        close_in_norm(rank["buffers"], expected["buffers"], KERNELS)


@pytest.mark.parametrize("case", list(CELLS))
def test_fused_cells_of_two_ranks_with_local_norms_equal_a_process_with_this_part(
    ranks: list[dict[str, Any]], case: str
) -> None:
    for number, rank in enumerate(ranks):
        with modules_only():
            expected = cell_step(case, "summed", part_of(number))
        found = rank[f"local {case}"]
        close_in_norm([found["y"]], [expected["y"]], KERNELS)
        close_in_norm(found["first"], expected["first"], 10 * KERNELS)
        close_in_norm(found["buffers"], expected["buffers"], KERNELS)


@pytest.mark.parametrize("regime", CUDA_STEPS)
def test_eager_steps_of_two_ranks_equal_one_process(ranks: list[dict[str, Any]], regime: str) -> None:
    expected = cuda_step(World(0, 1, 0, torch.device("cuda", 0)), "shared", regime)
    for rank in ranks:
        for name, value in expected.items():
            torch.testing.assert_close(rank[f"step {regime}"][name], value, rtol=0, atol=STEP)


def test_a_step_that_is_divided_around_gloo_equals_an_eager_one(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["divided"]["parts"] > 1, "the recording has a part before and after each collective"
        torch.testing.assert_close(rank["divided"]["recorded"], rank["divided"]["eager"], rtol=0, atol=1e-12)


# --- NCCL ---


def test_a_step_with_collectives_of_nccl_is_recorded_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, so a sum over ranks is the gradient itself; the world claims two, so that it is sent and halved."""
    device = torch.device("cuda", 0)
    store = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    monkeypatch.setattr("softcell.engine.reduce.GRADIENT_BUCKET_BYTES", 1024)
    try:
        recorded, eager = (_steps(device, engine, claimed=2) for engine in ("graph", "eager"))
        torch.testing.assert_close(recorded, eager, rtol=0, atol=1e-12)
        halved = _steps(device, "eager", claimed=1, scale=0.5)
        torch.testing.assert_close(recorded, halved, rtol=0, atol=1e-12)
    finally:
        dist.destroy_process_group()


def _steps(device: torch.device, engine: Any, claimed: int, scale: float = 1.0) -> list[Tensor]:
    """The weights after eight steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 5)).to(device, torch.float64)
    parameters, world = list(net.parameters()), World(0, claimed, 0, device)
    optimiser = sgd(parameters, device, lr=2**-4, momentum=0.5, weight_decay=0.0)

    def learn(x: Tensor) -> None:
        loss = scale * F.cross_entropy(net(x), torch.zeros(len(x), dtype=torch.int64, device=device))
        found = gradients_of(loss, parameters, world)
        apply_gradients(optimiser, parameters, found.means, world, 0.0, averaged=True)

    step = prepare_step(learn, engine, world, pytest.fail)
    generator = torch.Generator().manual_seed(1)
    for _ in range(8):
        step(torch.randn(16, 32, generator=generator, dtype=torch.float64).to(device))
    if engine == "graph":
        assert isinstance(step, CapturedStep) and step._graphs, "it was recorded"
    return [p.detach().clone() for p in parameters]


def test_fused_derived_cells_with_shared_norms_are_recorded_with_nccl() -> None:
    """One rank, so the statistics of all rows are its own: the same as without collectives."""
    device = torch.device("cuda", 0)
    store = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=device)
    try:
        with Counted() as counted:
            recorded = _derived_steps(device, "graph", shared=True)
        assert counted.sizes, "statistics are exchanged"
        close_in_norm([recorded], [_derived_steps(device, "eager", shared=False)], 1e-5)
    finally:
        dist.destroy_process_group()


def _derived_steps(device: torch.device, engine: Any, *, shared: bool) -> Tensor:
    """The parameters of a fused cell after eight steps in float32."""
    torch.manual_seed(0)
    fused = Cell(8, 2, older_is_larger=True, pool_norm=True).to(device).plan()
    parameters = nn.Parameter(fused.flat_parameters().detach().clone())
    world = World(0, 1, 0, device)
    optimiser = sgd([parameters], device, lr=2**-10, momentum=0.5, weight_decay=0.0)

    def learn(older: Tensor, newer: Tensor) -> None:
        out, _ = derived_cell(fused.program, torch.float32, parameters, None, None, older, newer, shared=shared)
        (gradient,) = torch.autograd.grad((out - 1.0).square().mean(), [parameters])
        apply_gradients(optimiser, [parameters], [gradient], world, 0.0, averaged=True)

    step = prepare_step(learn, engine, world, pytest.fail)
    for _ in range(8):
        step(*(x.to(device) for x in states(4, (8, 8), older_is_larger=True)))
    if engine == "graph":
        assert isinstance(step, CapturedStep) and step._graphs, "it was recorded"
    return parameters.detach().clone()
