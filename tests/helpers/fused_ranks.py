"""What the tests of fused cells, norms and buckets run on each of two ranks, and on one process as the oracle.

Every `*_on_rank` is `(world, folder) -> plain results`.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.arch import Layout, Mix, WeightMix, sample
from softcell.engine import distributed, reduce
from softcell.engine.capture import prepare_step
from softcell.engine.optim import apply_gradients, classification_step, sgd
from softcell.kernels.shared import local_norms, norms_of
from softcell.nn.norm import running_statistics
from softcell.search.steps import StepState, Unrolling, bilevel, single_level, unrolled
from softcell.spaces import build_space, execution
from softcell.spaces.execution import is_modules_only, modules_only
from tests.helpers.search_toys import batch, step_state

CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    "nos": ("nos", {"cells": 3, "channels": 4, "nodes": 1}),
    "bottleneck": ("darts", {"cells": 3, "channels": 8, "nodes": 1, "bottleneck": 2}),
    "darts": ("darts", {"cells": 3, "channels": 4, "nodes": 2}),
    "nb201": ("nb201", {"cells_per_stage": 1, "channels": 4}),
    "chain": ("fullattention", {"layers": 1, "channels": 16, "candidates": ("local_sa_k3_h4", "non_local_sa")}),
}
"""A cell that runs node by node, one with something between its nodes, two that run as a whole, and a chain."""
SHARED = (
    ("nos", "summed"),
    ("nos", "separate"),
    ("bottleneck", "dropping"),
    ("darts", "summed"),
    ("nb201", "dropping"),
    ("chain", "summed"),
    ("chain", "separate"),
)
"""Cells and ways to run them, which together use every pass of the kernels."""
TWICE = ("darts", "summed")
"""The one whose second derivatives are compared: these take longest."""
SIZE = 6


class Separately(Mix):
    """The sums of a `WeightMix`, from separate outputs."""

    def __init__(self, layout: Layout, tables: dict[str, Tensor]) -> None:
        self._weights = [tables[name] for name in layout.sites]

    def live(self, site: int) -> None:
        return None

    def combine(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> Tensor | None:
        terms = [self._weights[site][choice, k] * x for k, x in outputs.items() if x is not None]
        return torch.stack(terms).sum(0) if terms else None


def cell_step(
    case: str, variant: str, part: slice, device: str = "cpu", dtype: torch.dtype = torch.float64
) -> dict[str, Any]:
    """Outputs, gradients and running statistics of a supernet on `part` of a batch."""
    name, settings = CELLS[case]
    torch.manual_seed(0)
    supernet = build_space(name, settings).supernet((3, 8, 8), 5).double()
    supernet.use_drop_path(0.5 if variant == "dropping" else 0.0)
    supernet.drop_path.set_fraction(1.0)
    layout = supernet.layout
    tables = {t.name: torch.randn(len(t), t.width, dtype=torch.float64).softmax(1) for t in layout.tables}
    tables = {key: value.to(device, dtype).requires_grad_() for key, value in tables.items()}
    x = torch.randn(SIZE, 3, 8, 8, dtype=torch.float64)[part].to(device, dtype).requires_grad_()
    supernet = supernet.to(device, dtype)
    torch.manual_seed(1)
    mix = (Separately if variant == "separate" else WeightMix)(layout, tables)
    wanted = [*tables.values(), *supernet.parameters()]
    y = supernet(x, mix)
    loss = (y**3).sum()
    first = torch.autograd.grad(loss, wanted, allow_unused=True, retain_graph=True)
    buffers = [buffer.clone() for buffer in supernet.buffers()]
    found = {"y": y.detach(), "buffers": buffers, "first": _filled(first, wanted)}
    if (case, variant) == TWICE and dtype is torch.float64:
        (pull,) = torch.autograd.grad(loss, x, create_graph=True)
        found["second"] = _filled(torch.autograd.grad(pull.square().sum(), wanted, allow_unused=True), wanted)
    return found


def _filled(gradients: Sequence[Tensor | None], like: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(w) if g is None else g.detach() for g, w in zip(gradients, like, strict=True)]


def part_of(rank: int) -> slice:
    return slice(rank * SIZE // 2, (rank + 1) * SIZE // 2)


def fuse_by_twins() -> None:
    """Cells are fused on the CPU too, by the kernels' plain twins, and blocks of a chain are grouped."""
    execution.kernels_serve = lambda x: not is_modules_only()
    execution.grouping_blocks_pays = lambda x: True


class Counted:
    """Counts collectives by their numbers of elements."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._original = dist.all_reduce

    def __enter__(self) -> "Counted":
        def counted(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            self.sizes.append(tensor.numel())
            return self._original(tensor, *arguments, **options)

        dist.all_reduce = counted
        return self

    def __exit__(self, *error: object) -> None:
        dist.all_reduce = self._original


def cells_on_rank(world: distributed.World, folder: Path) -> dict[str, Any]:
    fuse_by_twins()
    found: dict[str, Any] = {}
    for case, variant in SHARED:
        found[f"shared {case} {variant}"] = cell_step(case, variant, part_of(world.rank))
    with Counted() as local, local_norms():
        for case in CELLS:
            found[f"local {case}"] = cell_step(case, "summed", part_of(world.rank))
    found["collectives"] = {"local": len(local.sizes)}
    for case in CELLS:
        with Counted() as together:
            cell_step(case, "summed", part_of(world.rank))
        with Counted() as one_by_one, modules_only():
            cell_step(case, "summed", part_of(world.rank))
        found["collectives"][case] = len(together.sizes), len(one_by_one.sizes)
    return found


# --- buckets ---


def toy(rank: int) -> tuple[list[nn.Parameter], Tensor, nn.Parameter]:
    """Weights of several dtypes and layouts, one unused; a loss [] that differs by rank; a watched weight."""
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int, dtype: torch.dtype = torch.float64) -> nn.Parameter:
        return nn.Parameter(torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype))

    first, single = weight(4, 3, 3, 3), weight(3, 4, dtype=torch.float32)
    lying = nn.Parameter(weight(4, 4, 3, 3).detach().contiguous(memory_format=torch.channels_last))
    unused, twice, empty, watched = weight(5), weight(4), weight(0), weight(4)
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(7 + rank), dtype=torch.float64)
    x = F.conv2d(F.conv2d(x, first).relu(), lying).mean((2, 3)) * twice
    x = (x + twice) * watched
    loss = x.square().sum() + (x.float() @ single.t()).square().sum() + empty.sum()
    return [first, lying, unused, twice, single, empty], loss, watched


def buckets_on_rank(world: distributed.World, folder: Path) -> dict[str, Any]:
    reduce.GRADIENT_BUCKET_BYTES = 128
    weights, loss, watched = toy(world.rank)
    moving = torch.full((3,), float(world.rank))
    events: list[str] = []
    weights[0].register_hook(lambda gradient: events.append("last gradient"))
    with Counted() as counted:
        original = dist.all_reduce

        def noted(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            events.append("collective")
            return original(tensor, *arguments, **options)

        dist.all_reduce = noted
        result = reduce.gradients_of(loss, weights, world, watched=[watched], also=[moving])
    left = [len(weight._backward_hooks or {}) for weight in weights]
    layouts = [w.stride() == g.stride() for w, g in zip(weights, result.means, strict=True) if g is not None]
    weights, loss, _ = toy(world.rank)
    again = reduce.gradients_of(loss, weights[:2], world, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in again.local if g is not None), weights[:2])
    return {
        "means": result.means, "local": result.local, "watched": result.watched, "also": moving, "sizes": counted.sizes,
        "events": events, "hooks": left, "layouts": layouts, "second": list(second),
    }  # fmt: skip


# --- local norms: steps against a by-hand twin, training against DistributedDataParallel ---

STEPS = (("local", "single-level"), ("local", "bilevel"), ("local", "unrolled"), ("shared", "unrolled"))


def one_step(state: StepState, regime: str, part: slice, device: str = "cpu") -> None:
    (images, labels), (others, marks) = batch(1, device=device), batch(2, device=device)
    train, validation = (images[part], labels[part]), (others[part], marks[part])
    if regime == "single-level":
        single_level(state, *train)
    elif regime == "bilevel":
        bilevel(state, train, validation)
    else:
        unrolled(state, train, validation, Unrolling())


def result_of(state: StepState) -> dict[str, Tensor]:
    found = {**state.supernet.state_dict(), **state.method.state_dict()}
    return {name: value.clone() for name, value in found.items()}


def steps_on_rank(world: distributed.World, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for norms, regime in STEPS:
        state = step_state("nb201", clip_architecture=0.01, clip_weights=0.1)
        state.world, state.norms = world, norms
        for _ in range(1 if regime == "unrolled" else 2):
            with norms_of(norms):
                one_step(state, regime, part_of(world.rank))
        found[f"{norms} {regime}"] = result_of(state)
    return found


def network_and_batch() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    space = build_space("darts", {"cells": 3, "channels": 2, "nodes": 2})
    network: Any = space.network(sample(space.layout(), 5), (3, 8, 8), 5).double()
    network.use_drop_path(0.0)
    images = torch.randn(SIZE, 3, 8, 8, dtype=torch.float64)
    return network.train(), images, torch.randint(5, (SIZE,))


def training_on_rank(world: distributed.World, folder: Path) -> dict[str, Any]:
    """Two steps of ours with local norms, and two of DistributedDataParallel; rank by rank."""
    network, images, labels = network_and_batch()
    theirs = copy.deepcopy(network)
    part = part_of(world.rank)
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        with local_norms():
            also = running_statistics([network])
            classification_step(network, optimiser, images[part], labels[part], world, clip=0.0, also=also)

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = theirs

        def forward(self, x: Tensor) -> Tensor:
            return self.network.forward_with_auxiliary(x)[0]

    wrapped = nn.parallel.DistributedDataParallel(Logits(), broadcast_buffers=False, find_unused_parameters=True)
    optimiser = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        with local_norms():
            F.cross_entropy(wrapped(images[part]), labels[part]).backward()
        optimiser.step()
        optimiser.zero_grad()
    del wrapped
    return {"ours": dict(network.state_dict()), "theirs": dict(theirs.state_dict())}


def everything_on_rank(world: distributed.World, folder: Path) -> dict[str, Any]:
    parts: dict[str, Callable[[distributed.World, Path], Any]] = {
        "steps": steps_on_rank, "training": training_on_rank, "buckets": buckets_on_rank, "cells": cells_on_rank,
    }  # fmt: skip
    return {name: run(world, folder) for name, run in parts.items()}


# --- two ranks on one CUDA device, by gloo ---

ON_CUDA = tuple(one for one in SHARED if one[1] != "dropping")
"""A device draws other numbers than the CPU of the oracle; dropping is compared on CPUs."""
CUDA_STEPS = ("single-level", "bilevel", "unrolled")


def cuda_step(world: distributed.World, norms: Any, regime: str) -> dict[str, Tensor]:
    """Two steps in float64, so module by module, on the CUDA device of `world`; what they leave, on the CPU."""
    state = step_state("nb201", device="cuda", clip_architecture=0.01, clip_weights=0.1)
    state.world, state.norms = world, norms
    part = part_of(world.rank) if world.size > 1 else slice(0, SIZE)
    for _ in range(2):
        with norms_of(norms):
            one_step(state, regime, part, "cuda")
    return {name: value.cpu() for name, value in result_of(state).items()}


def divided_steps(world: distributed.World, engine: Any) -> tuple[Tensor, int]:
    """A weight [8] after eight steps on this rank's inputs, and the number of parts of the recording (0: none)."""
    device = world.device
    weight = nn.Parameter(torch.linspace(-1.0, 1.0, 8, dtype=torch.float64, device=device))
    optimiser = sgd([weight], device, lr=2**-4, momentum=0.5, weight_decay=0.0)

    def learn(x: Tensor) -> None:
        for power in (2, 4):  # two losses, as a bilevel step has
            found = reduce.gradients_of(((weight * x) ** power).mean(), [weight], world)
            apply_gradients(optimiser, [weight], found.means, world, 0.0, averaged=True)

    step: Any = prepare_step(learn, engine, world, print, divides=True)
    generator = torch.Generator().manual_seed(5 + world.rank)
    for _ in range(8):
        step(torch.randn(16, 8, generator=generator, dtype=torch.float64).to(device))
    parts = [len(recording._graphs) for recording in step._graphs.values()] if engine == "graph" else [0]
    return weight.detach().cpu(), parts[0] if parts else 0


def cuda_on_rank(world: distributed.World, folder: Path) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.cuda.set_device(0)
    world = distributed.World(world.rank, world.size, 0, torch.device("cuda", 0))
    found: dict[str, Any] = {f"step {regime}": cuda_step(world, "shared", regime) for regime in CUDA_STEPS}
    own = (part_of(world.rank), "cuda", torch.float32)
    for case, variant in ON_CUDA:
        found[f"shared {case} {variant}"] = _on_cpu(cell_step(case, variant, *own))
    with local_norms():
        for case in CELLS:
            found[f"local {case}"] = _on_cpu(cell_step(case, "summed", *own))
    (recorded, parts), (eager, _) = (divided_steps(world, engine) for engine in ("graph", "eager"))
    return {**found, "divided": {"recorded": recorded, "eager": eager, "parts": parts}}


def _on_cpu(found: dict[str, Any]) -> dict[str, Any]:
    return {name: [x.cpu() for x in one] if isinstance(one, list) else one.cpu() for name, one in found.items()}
