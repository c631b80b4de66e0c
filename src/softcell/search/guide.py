"""Guidance of a search by a teacher: settings, the check before the run, and what is measured in the first epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from softcell.data import Batch
from softcell.engine.distributed import World, average_, sum_
from softcell.engine.session import Session
from softcell.errors import UserError
from softcell.methods import Method
from softcell.nn.guide import Form, Guided, pair_stages
from softcell.nn.objective import CrossEntropy, Objective
from softcell.settings import positive
from softcell.spaces import Bound, Shape, Supernet
from softcell.spaces.teacher import FoundTeacher, find_teacher

PROBED = 4
"""Batches of the first epoch over which gradient norms are averaged."""


@dataclass(frozen=True)
class Guide:
    """Attention guidance (NOS, Eq 6-9).

    `teacher`: a run folder, a .safetensors, .pt, .pth or .pt2 file, or a registered name; None for an unguided search.
    `weight`: λ. `form`: `mean-square`, or `norm` for Eq 6 to the letter. `classifier`: the network that a file's
    weights belong to, built in or registered. `layers`: submodules of the teacher whose outputs are compared.
    `trust`: read a .pt2 program, which may hold code.
    """

    teacher: str | None = None
    weight: float = 1e3
    form: Form = "mean-square"
    classifier: str | None = None
    layers: tuple[str, ...] = ()
    trust: bool = False

    def __post_init__(self) -> None:
        positive("guide.weight", self.weight)
        told = [name for name in ("classifier", "layers", "trust") if getattr(self, name)]
        if told and self.teacher is None:
            raise UserError(f"guide.{told[0]} says how a teacher is read, but there is none; name it with --guide")


def make_objective(
    settings: Guide, stages: Callable[[], list[tuple[int, int]]], shape: Shape, session: Session
) -> tuple[Objective, dict[str, Any]]:
    """The objective of a search, and for its results what is known of the teacher; a teacher that does not fit is told.

    stages: heights and widths of the searched network's stages.
    """
    if settings.teacher is None:
        return CrossEntropy(), {}
    found = find_teacher(settings.teacher, classifier=settings.classifier, layers=settings.layers, trust=settings.trust)
    teacher = session.place(found.module)
    pairs = pair_stages(stages(), _sizes(found, shape, session))
    needed = partial(teacher, number=1 + max(pairs))
    guided = Guided(CrossEntropy(), needed, pairs, settings.weight, settings.form).to(session.device)
    return guided, {"guide": found.about}


def supernet_stages(supernet: Supernet, method: Method) -> list[tuple[int, int]]:
    """Heights and widths of the stages."""
    return [(height, width) for _, height, width in supernet_maps(supernet, method)]


def supernet_maps(supernet: Supernet, method: Method) -> list[Shape]:
    """Channels, heights and widths of the stages, from one image; running statistics stay as they are."""
    parameter = next(supernet.parameters())
    image = torch.zeros(1, *supernet.shape, device=parameter.device, dtype=parameter.dtype)
    was_training = supernet.training
    supernet.eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        maps = supernet.features(image, method.relax())
    supernet.train(was_training)
    return [(m.shape[1], m.shape[2], m.shape[3]) for m in maps]


def _sizes(found: FoundTeacher, shape: Shape, session: Session) -> list[tuple[int, int]]:
    images = torch.zeros(2, *shape, device=session.device, dtype=session.dtype)  # two: a program may know only one
    try:
        maps = found.module(images)
    except UserError:
        raise
    except Exception as error:  # a user's module, which may raise anything
        reason = " ".join(str(error).split())
        raise UserError(
            f"the teacher {found.about['teacher']} cannot read batches of {'x'.join(map(str, shape))} images: "
            f"{reason[:200]}; train one on this data with `softcell teacher`"
        ) from error
    return [(m.shape[-2], m.shape[-1]) for m in maps]


def probe(
    objective: Guided, supernet: Supernet, method: Method, batches: Iterable[Batch], world: World
) -> dict[str, float]:
    """Norms of the gradients of both loss parts, of weights and of architecture, mean over some batches.

    Nothing is learnt: statistics and random numbers are given back.
    """
    weights = {name: p for name, p in supernet.named_parameters() if p.requires_grad}
    architecture = [p for p in method.parameters() if p.requires_grad]
    norms: list[Tensor] = []
    with torch.random.fork_rng(devices=[world.device] if world.device.type == "cuda" else []):
        for batch in islice(batches, PROBED):
            loss = _Parts(objective, supernet, method)
            buffers = {f"supernet.{name}": b.clone() for name, b in supernet.named_buffers()}
            parts = functional_call(loss, buffers, (batch.images, batch.labels))
            wanted = [*weights.values(), *architecture]
            row = []
            for part, kept in zip(parts, (True, False), strict=True):
                gradients = torch.autograd.grad(part, wanted, allow_unused=True, retain_graph=kept)
                row += [_norm(gradients[: len(weights)], part), _norm(gradients[len(weights) :], part)]
            norms.append(torch.stack(row))
    mean = torch.stack(norms).mean(0)
    average_([mean], world)
    task_w, task_a, guide_w, guide_a = mean.tolist()
    return {
        "gradient_norm_task": task_w,
        "gradient_norm_guide": guide_w,
        "gradient_norm_task_architecture": task_a,
        "gradient_norm_guide_architecture": guide_a,
    }


def read_gauges(objective: Objective, world: World) -> dict[str, float]:
    """The means over an epoch of what an objective sums up, over all ranks."""
    found = {}
    for name, sums in objective.gauges().items():
        total, number = sum_(sums.clone(), world).tolist()
        found[name] = total / max(number, 1.0)
    return found


class _Parts(nn.Module):
    """The two parts of a guided loss, the second with its weight."""

    def __init__(self, objective: Guided, supernet: Supernet, method: Method) -> None:
        super().__init__()
        self.supernet = supernet
        self._objective, self._method = [objective], [method]

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        objective, mix = self._objective[0], self._method[0].relax()
        task, guide = objective.parts(Bound(self.supernet, mix), images, labels)
        return task.loss, objective.weight * guide


def _norm(gradients: Iterable[Tensor | None], like: Tensor) -> Tensor:
    squares = [g.double().square().sum() for g in gradients if g is not None]
    return torch.stack(squares).sum().sqrt() if squares else like.new_zeros((), dtype=torch.float64)
