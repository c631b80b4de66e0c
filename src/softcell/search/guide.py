"""Guidance of a search by a teacher: settings, the check before the run, and what is measured in the first epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from softcell.data import Batch
from softcell.engine.distributed import World, average_, sum_
from softcell.engine.session import Session, forked_rng
from softcell.errors import UserError, one_line
from softcell.kernels.backend import twins_only
from softcell.methods import Method
from softcell.nn.classifiers import ARCHITECTURES
from softcell.nn.objective import CrossEntropy, Form, Guided, Objective, pair_stages
from softcell.settings import positive
from softcell.spaces import Shape, Supernet
from softcell.spaces.execution import fused_networks, modules_only
from softcell.spaces.teacher import FoundTeacher, find_teacher

TRIED = (2, 3)
"""Batch sizes that a teacher is tried with: two, since an exported program may accept only one."""
PROBED = 4
"""Batches of the first epoch over which gradient norms are averaged."""
DROWNING = 5.0
"""Ratio of the gradient norms of guidance and task above which the user is warned."""


@dataclass(frozen=True)
class Guide:
    """Attention guidance (NOS, Eq 6-9).

    `teacher`: a run folder, a file of weights, a .pt2 program or a registered name (`find_teacher`); None for an
    unguided search.
    `weight`: λ. `form`: `mean-square`, or `norm` for Eq 6 as printed. `classifier`: the network that a file's
    weights belong to, built in or registered. `layers`: submodules of the teacher whose outputs are compared.
    `trust`: only valid on the command line and in a Python call, where it means `--trust`; ignored in files.
    """

    teacher: str | None = None
    weight: float = 1e3
    form: Form = "mean-square"
    classifier: str | None = None
    layers: tuple[str, ...] = ()
    trust: bool = False

    def __post_init__(self) -> None:
        positive("guide.weight", self.weight)
        if self.teacher is not None:
            if not self.teacher.strip():
                raise UserError(
                    f"guide.teacher must name a teacher, got {self.teacher!r}, which is empty; leave it out"
                )
            return
        given = [f.name for f in fields(self) if f.name != "teacher" and getattr(self, f.name) != f.default]
        if given:
            how = "guides" if given[0] in ("weight", "form") else "is read"
            raise UserError(
                f"guide.{given[0]} says how a teacher {how}, but there is none; name it with --guide, or leave "
                f"guide.{given[0]} out"
            )


def make_objective(
    settings: Guide, stages: Callable[[], list[tuple[int, int]]], shape: Shape, session: Session
) -> tuple[Objective, dict[str, Any]]:
    """The objective of a search, and a record of the teacher for its results; a teacher that does not fit is rejected.

    stages: heights and widths of the searched network's stages.
    """
    if settings.teacher is None:
        return CrossEntropy(), {}
    found = find_teacher(settings.teacher, classifier=settings.classifier, layers=settings.layers)
    teacher = session.place(found.module)
    pairs = _pair(stages(), _sizes(found, shape, session), shape)

    def needed(images: Tensor) -> list[Tensor]:
        # Module by module: hooks read the teacher's layers, and no kernels are compiled ahead for it.
        with fused_networks(enabled=False):
            return teacher(images, number=1 + max(pairs))  # type: ignore[no-any-return]

    guided = Guided(CrossEntropy(), needed, pairs, settings.weight, settings.form).to(session.device)
    return guided, {"guide": found.about}


def supernet_stages(supernet: Supernet, method: Method) -> list[tuple[int, int]]:
    """Heights and widths of the stages."""
    return [(height, width) for _, height, width in supernet_maps(supernet, method)]


def supernet_maps(supernet: Supernet, method: Method) -> list[Shape]:
    """Channels, heights and widths of the stages, from one image; running statistics stay as they are.

    Without kernels, which would first have to be compiled: no step has this shape, and only sizes are needed.
    """
    parameter = next(supernet.parameters())
    image = torch.zeros(1, *supernet.shape, device=parameter.device, dtype=parameter.dtype)
    was_training = supernet.training
    supernet.eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), modules_only(), twins_only():
        maps = supernet.features(image, method.relax())
    supernet.train(was_training)
    return [(m.shape[1], m.shape[2], m.shape[3]) for m in maps]


def _sizes(found: FoundTeacher, shape: Shape, session: Session) -> list[tuple[int, int]]:
    """Heights and widths of the teacher's maps; raises if it fails or returns values that are not finite."""
    name, maps = found.about["teacher"], list[Tensor]()
    for number in TRIED:
        # Noise, as normalised images are: constant ones have no deviation, by which a user's module may divide.
        noise = torch.randn(number, *shape, generator=torch.Generator().manual_seed(0))
        images = noise.to(session.device, session.dtype)
        read = bool(maps)  # another batch was
        try:
            maps = found.module(images)
        except UserError:
            raise
        except Exception as error:  # a user's module, which may raise anything
            raise UserError(_refusal(name, shape, number, read, one_line(error))) from error
        if not maps:
            raise UserError(
                f"a teacher must return feature maps to compare with, but {name} returns none; name submodules of it "
                "with guide.layers"
            )
        for place, m in enumerate(maps, 1):
            _check_map(m, f"map {place} of {len(maps)} of the teacher {name}", number)
    return [(m.shape[-2], m.shape[-1]) for m in maps]


def _check_map(found: Tensor, name: str, number: int) -> None:
    """Raises `UserError` unless a map for `number` images can be compared with."""
    if not found.is_floating_point():
        raise UserError(f"a teacher's maps must be of real numbers, but {name} is of {found.dtype}; convert it")
    if found.shape[0] != number:
        raise UserError(
            f"a teacher must return one map per image, but {name} has {found.shape[0]} for {number} images; return "
            "one [c, h, w] for each"
        )
    if not bool(found.isfinite().all()):
        raise UserError(
            f"a teacher's maps must be finite, but {name} is not; its weights are damaged or were trained on other "
            "images: train it again, or use another"
        )


def _refusal(teacher: str, shape: Shape, number: int, read: bool, reason: str) -> str:
    """Why a batch of `number` images could not be read, and the way out; `read`: a smaller one could."""
    dynamic = "with a dynamic batch dimension (`dynamic_shapes` of torch.export)"
    if read:
        return (
            f"a teacher must read any number of images at once, but {teacher} reads {TRIED[0]} and not {number}: "
            f"{reason}; export it {dynamic}"
        )
    way_out = "train one on this data with `softcell teacher`"
    if teacher.endswith(".pt2"):
        way_out = f"export it for images of this size, {dynamic}"
    size = "x".join(map(str, shape))
    return f"the teacher {teacher} cannot read batches of {size} images: {reason}; {way_out}"


def _pair(stages: list[tuple[int, int]], maps: list[tuple[int, int]], shape: Shape) -> tuple[int, ...]:
    """`pair_stages`; where the teacher does not fit, a built-in one that would is named."""
    try:
        return pair_stages(stages, maps)
    except UserError as error:
        fitting = [name for name in ARCHITECTURES if _fits(name, stages, shape)]
        if not fitting:
            raise
        raise UserError(f"{error}; `softcell teacher {fitting[0]}` trains one that fits") from error


def _fits(name: str, stages: list[tuple[int, int]], shape: Shape) -> bool:
    """Whether a built-in teacher has a map for every stage, found without weights."""
    kind = ARCHITECTURES[name]
    with torch.device("meta"), torch.no_grad():
        maps = kind(**kind.small).build(shape[0], 1).eval().features(torch.empty(1, *shape))
    try:
        pair_stages(stages, [(m.shape[-2], m.shape[-1]) for m in maps])
    except UserError:
        return False
    return True


def probe(
    objective: Guided,
    network: nn.Module,
    bound: Callable[[], Any],
    architecture: Sequence[nn.Parameter],
    batches: Iterable[Batch],
    world: World,
    notify: Callable[[str], None],
) -> dict[str, float]:
    """Norms of the gradients of both loss parts, of weights and of architecture, mean over some batches.

    bound: creates the network that the objective evaluates. Nothing learns: statistics and random numbers are restored.
    notify: called where the teacher outweighs the task.
    """
    weights = [p for p in network.parameters() if p.requires_grad]
    norms: list[Tensor] = []
    with forked_rng(world.device):
        for batch in islice(batches, PROBED):
            loss = _Parts(objective, network, bound)
            # In place of the network's own buffers, whose running statistics therefore stay as they are.
            buffers = {f"network.{name}": b.clone() for name, b in network.named_buffers()}
            parts = functional_call(loss, buffers, (batch.images, batch.labels))
            row = []
            for part, kept in zip(parts, (True, False), strict=True):
                gradients = torch.autograd.grad(part, [*weights, *architecture], allow_unused=True, retain_graph=kept)
                row += [_norm(gradients[: len(weights)], part), _norm(gradients[len(weights) :], part)]
            norms.append(torch.stack(row))
    mean = torch.stack(norms).mean(0)
    average_([mean], world)
    task_w, task_a, guide_w, guide_a = mean.tolist()
    found = {"gradient_norm_task": task_w, "gradient_norm_guide": guide_w}
    if architecture:
        found |= {"gradient_norm_task_architecture": task_a, "gradient_norm_guide_architecture": guide_a}
    if (text := drowned(found, objective.weight)) is not None:
        notify(text)
    return found


def drowned(norms: Mapping[str, float], weight: float) -> str | None:
    """A warning where the teacher outweighs the task, else None. weight: λ."""
    task, guide = norms["gradient_norm_task"], norms["gradient_norm_guide"]
    if not 0 < DROWNING * task < guide:
        return None
    equal = float(f"{weight * task / guide:.2g}")
    return (
        f"the teacher outweighs the labels: after the first epoch the norm of its gradient is {guide:.2g}, that of the "
        f"labels {task:.2g}. With --set guide.weight={equal:g} they would be equal. Guidance is "
        "stronger on smaller images"
    )


def read_gauges(objective: Objective, world: World) -> dict[str, float]:
    """The means over an epoch of an objective's sums, over all processes."""
    found = {}
    for name, sums in objective.gauges().items():
        total, number = sum_(sums.clone(), world).tolist()
        found[name] = total / max(number, 1.0)
    return found


class _Parts(nn.Module):
    """The two parts of a guided loss, the second with its weight."""

    def __init__(self, objective: Guided, network: nn.Module, bound: Callable[[], Any]) -> None:
        super().__init__()
        self.network = network
        self._objective, self._bound = [objective], bound

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        objective = self._objective[0]
        task, guide = objective.parts(self._bound(), images, labels)
        return task.loss, objective.weight * guide


def _norm(gradients: Iterable[Tensor | None], like: Tensor) -> Tensor:
    squares = [g.double().square().sum() for g in gradients if g is not None]
    return torch.stack(squares).sum().sqrt() if squares else like.new_zeros((), dtype=torch.float64)
