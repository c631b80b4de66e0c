"""What the two-process tests run on each rank; every function is `(world, folder) -> plain results`."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softcell.engine import distributed, loop
from softcell.engine.distributed import agree
from softcell.engine.metrics import DivergedError
from softcell.engine.session import Interrupt
from softcell.engine.timing import TimeBudget
from softcell.errors import UserError
from softcell.nn.norm import BatchNorm2d
from softcell.nn.stochastic import Dropout, DropPath
from tests.helpers.engine_toy import Toy

# --- batch normalisation: shared by the ranks and by the oracle ---

CASES: dict[str, dict[str, Any]] = {
    "affine": {},
    "plain": {"affine": False},
    "cumulative": {"momentum": None},
    "untracked": {"track_running_stats": False, "affine": False},
    "unequal": {"sizes": (5, 1)},
    "empty": {"sizes": (6, 0), "affine": False},
    "far": {"offset": 1e6},
    "float32": {"dtype": torch.float32},
}


def norm_case(
    case: dict[str, Any], kind: type[nn.BatchNorm2d], rank: int | None, device: str = "cpu"
) -> dict[str, Tensor]:
    """Two training passes, first and second derivatives, one evaluation; `rank` None means the whole batch."""
    options = dict(case)
    sizes = options.pop("sizes", (3, 3))
    dtype = options.pop("dtype", torch.float64)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, sum(sizes), 3, 2, 2, dtype=torch.float64, generator=generator)
    x = (x * torch.tensor([1.0, 2.0, 0.5])[:, None, None] + options.pop("offset", 0.0)).to(dtype)
    target = torch.randn(sum(sizes), 3, 2, 2, dtype=torch.float64, generator=generator).to(dtype)
    if rank is not None:
        part = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        x, target = x[:, part], target[part]
    x, target = x.to(device), target.to(device)
    norm = kind(3, **options).to(device, dtype)
    if norm.affine:
        norm.weight.data.copy_(torch.tensor([0.5, -1.0, 2.0]))
        norm.bias.data.copy_(torch.tensor([0.1, 0.2, -0.3], dtype=dtype))
    norm(x[1])
    leaf = x[0].clone().requires_grad_()
    y = norm(leaf)
    # Cubed, so that the loss's own curvature meets that of the normalisation.
    (gradient,) = torch.autograd.grad((y**3 * target).sum(), leaf, create_graph=True)
    wanted = [leaf, *norm.parameters()]
    second = torch.autograd.grad((gradient**2).sum(), wanted, allow_unused=True)
    found = {"y": y.detach(), "gradient": gradient.detach(), "second": second[0]}
    for name, value in zip(("second_weight", "second_bias"), second[1:], strict=False):
        found[name] = torch.zeros_like(norm.weight) if value is None else value
    first = torch.autograd.grad((norm(leaf) ** 3 * target).sum(), wanted)
    for name, value in zip(("weight", "bias"), first[1:], strict=False):
        found[name] = value
    found |= {f"state.{name}": value.clone() for name, value in norm.state_dict().items()}
    norm.eval()
    found["evaluated"] = norm(x[0]).detach()
    return {name: value.cpu() for name, value in found.items()}


def norm_on_cuda_rank(world: distributed.World, folder: Path) -> Any:
    """Both ranks on one CUDA device, by gloo, which allows that."""
    return {name: norm_case(case, BatchNorm2d, world.rank, "cuda") for name, case in CASES.items()}


def norm_on_rank(world: distributed.World, folder: Path) -> Any:
    found: dict[str, Any] = {name: norm_case(case, BatchNorm2d, world.rank) for name, case in CASES.items()}
    half = torch.full((2, 1, 2, 2), float(world.rank), dtype=torch.bfloat16)
    found["bfloat16"] = BatchNorm2d(1)(half)
    try:
        BatchNorm2d(1)(torch.zeros(1 - world.rank, 1, 1, 1))
    except ValueError as error:
        found["single"] = str(error)
    return found


# --- dropping ---

DROP_SHAPE = (6, 4, 2)


def dropped(x: Tensor) -> list[Tensor]:
    """Paths and elements dropped at several points of a schedule; ends with a plain draw, to see the generator."""
    path, elements = DropPath(0.5).double(), Dropout(0.3).double()
    out = []
    for fraction in (1.0, 0.5, 0.0):
        path.set_fraction(fraction)
        elements.set_fraction(fraction)
        out += [path(x), elements(x)]
    return [*out, torch.rand(3)]


def drop_on_rank(world: distributed.World, folder: Path) -> Any:
    x = torch.arange(1.0, 49.0, dtype=torch.float64).reshape(DROP_SHAPE)
    torch.manual_seed(2)
    return dropped(x[3 * world.rank : 3 * world.rank + 3])


# --- collectives ---


def values(rank: int) -> list[Tensor]:
    """Tensors of several dtypes and layouts; one is not dense, one is empty."""
    generator = torch.Generator().manual_seed(rank)
    a = torch.randn(4, 3, dtype=torch.float64, generator=generator)
    b = torch.randn(5, generator=generator)
    c = torch.randn(3, 2, dtype=torch.float64, generator=generator).t()
    return [a, b, c, torch.zeros(0), torch.tensor(float(rank), dtype=torch.float64)]


def collectives_on_rank(world: distributed.World, folder: Path) -> Any:
    rank = world.rank
    found: dict[str, Any] = {"world": (world.rank, world.size, world.local_rank, str(world.device))}
    distributed.BUCKET_BYTES = 64  # the first tensor alone overflows a bucket
    calls: list[int] = []
    original = torch.distributed.all_reduce

    def counted(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        calls.append(tensor.numel())
        return original(tensor, *arguments, **options)

    torch.distributed.all_reduce = counted
    found["averaged"] = values(rank)
    distributed.average_(found["averaged"], world)
    found["average_calls"] = list(calls)
    torch.distributed.all_reduce = original
    view = torch.arange(6.0).reshape(2, 3).t() + rank
    found["summed"] = distributed.sum_(view, world)

    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), DropPath(0.1 * (rank + 1)))
    net.register_buffer("flags", torch.tensor([rank == 0, True]))
    state = [*net.parameters(), *net.buffers()]
    found["same_before"] = distributed.same_everywhere(state, world)
    distributed.broadcast_module(net, world)
    found["same_after"] = distributed.same_everywhere(state, world)
    found["module"] = [tensor.detach().clone() for tensor in state]
    found["same_sign_of_zero"] = distributed.same_everywhere([torch.tensor(-0.0 if rank else 0.0)], world)
    found["same_shape"] = distributed.same_everywhere([torch.zeros(2 + rank)], world)
    found["same_nan"] = distributed.same_everywhere([torch.tensor(float("nan"))], world)
    found["object"] = distributed.broadcast_object({"from": rank}, world)
    found["gathered"] = distributed.gather_objects(rank * 10, world)
    found["on_main"] = distributed.on_main(lambda: rank + 5, world)
    found["agreed"] = agree([0, rank], world)

    def refuse() -> None:
        raise UserError("the disk is full")

    try:
        distributed.on_main(refuse, world)
    except UserError as error:
        found["error"] = str(error)
    distributed.barrier(world)
    return found


# --- the loop ---


def loop_on_rank(world: distributed.World, folder: Path) -> Any:
    """An unbroken run, one where only rank 1 gets a signal and which is resumed, and one that diverges on rank 1."""
    for name in ("whole", "parts", "diverged", "bad_rng"):
        (folder / name).mkdir(exist_ok=True)
    found: dict[str, Any] = {}
    whole = Toy(world)
    found["whole"] = loop.run(whole, folder / "whole", world, resume=False).metrics
    found["weights"] = [p.detach().clone() for p in whole.net.parameters()]
    found["same"] = distributed.same_everywhere(whole.net.state_dict().values(), world)

    def strike(epoch: int, step: int) -> None:
        if world.rank == 1 and (epoch, step) == (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)

    outcome = loop.run(Toy(world, before_step=strike), folder / "parts", world, resume=False)
    found["interrupted"] = (outcome.status, outcome.exit_code)
    found["parts"] = loop.run(Toy(world), folder / "parts", world, resume=True).metrics

    try:
        nan_at = (1, 1) if world.rank == 1 else None
        loop.run(Toy(world, nan_at=nan_at), folder / "diverged", world, resume=False)
    except DivergedError as error:
        found["diverged"] = (error.epoch, error.failure.step)

    def draw(epoch: int, step: int) -> None:
        if world.rank == 1:
            torch.rand(1)

    try:
        loop.run(Toy(world, before_step=draw), folder / "bad_rng", world, resume=False)
    except RuntimeError as error:
        found["bad_rng"] = str(error)
    with Interrupt() as interrupt:
        found["no_signal"] = interrupt.signal
    found["used"] = timed_on_rank(world, folder / "timed")
    return found


def timed_on_rank(world: distributed.World, folder: Path) -> list[float]:
    """A run of ten seconds by clocks that differ between the ranks: the time used before each step."""
    folder.mkdir(exist_ok=True)
    used: list[float] = []

    class Clock(TimeBudget):
        for_steps = 9.8  # without the measured time of a checkpoint

        def elapsed(self) -> float:
            return len(used) * (1.0 + 0.25 * world.rank)

    budget = Clock(10.0)
    task = Toy(world, before_step=lambda epoch, step: used.append(budget.used))
    for _ in loop.steps_of(task, folder, world, resume=False, budget=budget):
        pass
    return used


def loop_and_collectives_on_rank(world: distributed.World, folder: Path) -> Any:
    # In this order: the collectives shrink the size of buckets.
    return {"loop": loop_on_rank(world, folder), "collectives": collectives_on_rank(world, folder)}
