"""Attention transfer: a student learns to attend where a frozen teacher attends (NOS, Eq 6, 8 and 9).

Zagoruyko, Komodakis: Paying More Attention to Attention, ICLR 2017. At each stage j the squares of a feature map are
summed over channels, flattened and normalised; student and teacher are compared position by position:

    x^j = vec(Σ_i |F^j(·,·,i)|²)            q^j = x^j / ‖x^j‖₂
    literal (Eq 6)     ½ Σ_j ‖q_S^j - q_T^j‖₂, mean over the batch
    mean-square        ½ Σ_j mean over batch and positions of (q_S^j - q_T^j)²

Deviation: the default is the mean square, as in the released code of attention transfer. With λ = 1e3 the literal norm
drowns the cross-entropy: its gradient is thousands of times larger.

`Guided` adds λ times this to any objective, so that every method in every space can be guided, in every loss it learns
from (Eq 8 and 9). The teacher runs once per batch, without gradients, whatever the number of stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from softcell.errors import UserError
from softcell.nn.classifiers import Classifier
from softcell.nn.objective import Evaluated, Features, Objective

Form = Literal["mean-square", "norm"]
Teacher = Callable[[Tensor], Sequence[Tensor]]
"""Images [n, c, h, w] to feature maps [n, c_j, h_j, w_j], one per stage or more."""


def attention_vector(features: Tensor) -> Tensor:
    """[n, c, h, w] to normalised attention [n, h·w], at least in float32."""
    features = features.to(torch.promote_types(features.dtype, torch.float32))
    x = features.square().sum(dim=1).flatten(1)
    length: Tensor = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    return x / length.clamp(min=1e-12)


def transfer_loss(students: Sequence[Tensor], teachers: Sequence[Tensor], form: Form) -> Tensor:
    """Eq 6 from attention vectors [n, h_j·w_j] of paired stages."""
    total = students[0].new_zeros(())
    for mine, theirs in zip(students, teachers, strict=True):
        if form == "norm":
            total = total + torch.linalg.vector_norm(mine - theirs, dim=1).mean()
        else:
            total = total + (mine - theirs).square().mean()
    return 0.5 * total


def pair_stages(student: Sequence[tuple[int, int]], teacher: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """For every stage of the student the last map of the teacher with the same height and width."""
    pairs = []
    for size in student:
        found = [number for number, other in enumerate(teacher) if other == size]
        if not found:
            mine, theirs = (", ".join(f"{h}x{w}" for h, w in sizes) for sizes in (student, teacher))
            raise UserError(
                f"guidance compares maps of one size, but the teacher has none of {size[0]}x{size[1]}: stages of the "
                f"searched network are {mine}, maps of the teacher {theirs}; use a teacher that halves its maps at the "
                "same stages, or other images"
            )
        pairs.append(found[-1])
    return tuple(pairs)


class Guided(Objective):
    """Another objective plus `weight` (λ) times attention transfer from a frozen teacher.

    `pairs`: the number of the teacher's map for each stage of the student (`pair_stages`). The teacher is not a
    submodule: it is not saved, moved or trained with this module.
    """

    sums: Tensor

    def __init__(
        self, objective: Objective, teacher: Teacher, pairs: Sequence[int], weight: float, form: Form = "mean-square"
    ) -> None:
        super().__init__()
        self.objective = objective
        self.weight, self.form, self.pairs = weight, form, tuple(pairs)
        self._teacher = [teacher]  # in a list, so that it is not a submodule
        self._seen: list[tuple[Tensor, int, list[Tensor]]] = []
        # Sum of L_AT over batches, and their number; zeroed by the search before an epoch.
        self.register_buffer("sums", torch.zeros(2, dtype=torch.float64), persistent=False)

    def forward(self, network: Features, images: Tensor, labels: Tensor) -> Evaluated:
        task, guide = self.parts(network, images, labels)
        with torch.no_grad():
            self.sums += torch.stack((guide.double(), torch.ones_like(guide, dtype=torch.float64)))
        return Evaluated(task.loss + self.weight * guide, task.logits)

    def gauges(self) -> dict[str, Tensor]:
        return {"guide_loss": self.sums}

    def parts(self, network: Features, images: Tensor, labels: Tensor) -> tuple[Evaluated, Tensor]:
        """The result of the other objective, and L_AT [] without its weight."""
        recorded = _Recorded(network)
        task: Evaluated = self.objective(recorded, images, labels)
        students = [attention_vector(stage) for stage in recorded.of(images)]
        return task, transfer_loss(students, self._teach(images), self.form)

    def _teach(self, images: Tensor) -> list[Tensor]:
        """The teacher's attention for a batch; a batch that was just seen (second order) is not run again.

        A batch is recognised as the same unchanged tensor: a captured step has tensors of its own.
        """
        for known, version, vectors in self._seen:
            if known is images and version == images._version:
                return vectors
        with torch.no_grad():
            maps = self._teacher[0](images)
            vectors = [attention_vector(maps[number]) for number in self.pairs]
        self._seen = [*self._seen[-1:], (images, images._version, vectors)]
        return vectors


class _Recorded:
    """A network that keeps its last features, so that objective and guidance share one pass."""

    def __init__(self, network: Features) -> None:
        self._network = network
        self._last: tuple[Tensor, list[Tensor]] | None = None

    def features(self, x: Tensor) -> list[Tensor]:
        maps = self._network.features(x)
        self._last = x, maps
        return maps

    def head(self, features: Tensor) -> Tensor:
        return self._network.head(features)

    def of(self, x: Tensor) -> list[Tensor]:
        """The features of x; those of the last pass where it was over x itself."""
        if self._last is not None and self._last[0] is x:
            return self._last[1]
        return self._network.features(x)


class Tapped(nn.Module):
    """Any module as a teacher: the outputs of the named submodules, in that order.

    Without names the module itself must return feature maps: by a method `features`, or as its output.
    """

    def __init__(self, module: nn.Module, layers: Sequence[str] = ()) -> None:
        super().__init__()
        self.module, self.layers = module, tuple(layers)
        known = dict(module.named_modules())
        unknown = [name for name in self.layers if name not in known]
        if unknown:
            raise UserError(f"the teacher has no layer {unknown[0]!r}; it has {', '.join(list(known)[1:13])}, ...")
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> Tapped:
        """A teacher stays in eval mode."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: Tensor, number: int | None = None) -> list[Tensor]:
        """The first `number` maps, else all; built-in networks stop there, others run to their end."""
        maps = self._outputs(images) if self.layers else self._maps(images, number)
        if isinstance(maps, Tensor):
            maps = [maps]
        if not isinstance(maps, list | tuple) or not all(isinstance(m, Tensor) and m.dim() == 4 for m in maps):
            raise UserError(
                "a teacher must give feature maps [n, c, h, w]: by a method `features`, as its output, or from named "
                "layers (guide.layers)"
            )
        return list(maps[:number])

    def _maps(self, images: Tensor, number: int | None) -> object:
        if isinstance(self.module, Classifier):
            return self.module.features(images, number)
        features = getattr(self.module, "features", None)
        return features(images) if callable(features) and not isinstance(features, nn.Module) else self.module(images)

    def _outputs(self, images: Tensor) -> list[object]:
        """The outputs of the named layers; hooks are on the module during this pass only."""
        caught: dict[str, object] = {}

        def catching(name: str) -> Callable[..., None]:
            return lambda module, given, output: caught.__setitem__(name, output)

        handles = [self.module.get_submodule(name).register_forward_hook(catching(name)) for name in self.layers]
        try:
            self.module(images)
        finally:
            for handle in handles:
                handle.remove()
        return [caught.get(name) for name in self.layers]
