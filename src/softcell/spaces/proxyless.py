"""The chain of ProxylessNAS: 21 layers, each an inverted bottleneck with its own kernel and expansion, or a skip.

Cai, Zhu, Han: ProxylessNAS, ICLR 2019, as IT-NAS searches it (A.1): a stem of 32 channels with stride 2, a fixed
bottleneck without expansion to 16, six stages of 24, 40, 80, 96, 192 and 320 channels with 4, 4, 4, 4, 4 and 1 layers,
a head of 1280. A layer may be skipped where it changes neither width nor resolution, so depth is searched too.

Images smaller than 96 pixels get a stem and a first stage without stride, as is usual for CIFAR.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from softcell.arch import Choice, Genotype, Layout, Mix, StrongestEach, Table, derive
from softcell.errors import UserError
from softcell.nn.candidates import Spec, get_candidate
from softcell.nn.conv import EXPANSIONS, KERNELS, MBConv, conv_norm, name_of
from softcell.settings import build, to_dict
from softcell.spaces.base import Network, Shape, Space, Supernet, global_pool, register_space
from softcell.spaces.cell import MixedChain, PickedChain, check_chain
from softcell.spaces.costs import count_genotype

WIDTHS = (24, 40, 80, 96, 192, 320)
STRIDES = (2, 2, 2, 1, 2, 1)
DEPTHS = (4, 4, 4, 4, 4, 1)
STEM, FIRST = 32, 16
LARGE = 96
"""Images of at least this many pixels get the stem for ImageNet."""
SKIP = "skip_connect"


def _divisible(channels: float, by: int = 8) -> int:
    """The nearest multiple of `by`, not more than a tenth below `channels` (MobileNets)."""
    rounded = max(by, int(channels + by / 2) // by * by)
    return rounded + by if rounded < 0.9 * channels else rounded


@register_space
@dataclass(frozen=True)
class ProxylessSpace(Space):
    """A chain of inverted bottlenecks. `width` multiplies all widths, `depths` are the layers of the six stages."""

    name: ClassVar[str] = "proxyless"
    about: ClassVar[str] = (
        "ProxylessNAS chain: 21 layers, MBConv 3/5/7 × expansion 3/6, skip for depth; SE as an option"
    )
    small: ClassVar[dict[str, Any]] = {"width": 0.25, "depths": (2, 2, 1, 1, 1, 1), "head": 128}
    evaluation: ClassVar[dict[str, dict[str, Any]]] = {"small": {"width": 0.5, "head": 256}}

    width: float = 1.0
    depths: tuple[int, ...] = DEPTHS
    kernels: tuple[int, ...] = KERNELS
    expansions: tuple[int, ...] = EXPANSIONS
    skip: bool = True
    se: bool = False
    head: int = 1280
    stem: Literal["auto", "cifar", "imagenet"] = "auto"
    """The stride at the start of the chain; `auto`: by the size of the images."""

    def __post_init__(self) -> None:
        if self.width <= 0:
            raise UserError(f"`width > 0` must hold, but got width={self.width}")
        if len(self.depths) != len(WIDTHS) or min(self.depths) < 1:
            raise UserError(
                f"`depths` must name at least one layer for each of {len(WIDTHS)} stages, got {self.depths}"
            )
        if self.head < 1:
            raise UserError(f"`head >= 1` must hold, but got head={self.head}")
        for name, known in (("kernels", KERNELS), ("expansions", EXPANSIONS)):
            values = getattr(self, name)
            if not values or not set(values) <= set(known) or len(set(values)) != len(values):
                raise UserError(f"`{name}` must be different ones of {known}, at least one, got {values}")

    def layout(self) -> Layout:
        bottlenecks = tuple(name_of(e, k, se=self.se) for e in self.expansions for k in self.kernels)
        choices: list[Choice] = []
        for depth in self.depths:
            for layer in range(depth):
                # The first layer of a stage changes width or resolution. At some widths it would not, but an
                # architecture applies to all of them.
                skips = (SKIP,) if self.skip and layer > 0 else ()
                choices.append(Choice(len(choices), len(choices) + 1, (*bottlenecks, *skips)))
        table = Table("chain", tuple(choices), (len(choices),))
        settings: dict[str, object] = {"depths": list(self.depths)}
        return Layout(self.name, (table,), ("chain",), StrongestEach(), settings)

    def specs(self, strides: tuple[int, ...], *, affine: bool) -> list[Spec]:
        """The spec of every layer; `strides` are those of the first layers of the stages."""
        found = []
        before = _divisible(FIRST * self.width)
        for width, depth, stride in zip(WIDTHS, self.depths, strides, strict=True):
            for layer in range(depth):
                own = _divisible(width * self.width)
                found.append(Spec(own, stride if layer == 0 else 1, affine=affine, channels_in=before))
                before = own
        return found

    def strides_for(self, shape: Shape) -> tuple[int, tuple[int, ...]]:
        """The strides of the stem and of the stages. A stage that strides only on ImageNet still has no skip there."""
        large = self.stem == "imagenet" or (self.stem == "auto" and min(shape[1:]) >= LARGE)
        return (2, STRIDES) if large else (1, (1, *STRIDES[1:]))

    def remarks(self, num_classes: int = 10) -> tuple[str, ...]:
        smallest, largest = (self.extreme(largest=largest) for largest in (False, True))
        costs = [count_genotype(self, g, (3, 224, 224), 1000).multiply_adds / 1e6 for g in (smallest, largest)]
        skippable = sum(SKIP in choice.candidates for choice in self.layout().tables[0].choices)
        return (
            f"multiply-adds at 224×224: {costs[0]:.0f}M (smallest network) to {costs[1]:.0f}M (largest); "
            "--max-flops 600M keeps a search within that limit; at space.width=0.95 every network is",
            f"{skippable} of {sum(self.depths)} layers can be skipped",
        )

    def extreme(self, *, largest: bool) -> Genotype:
        """The network of the fewest or the most multiply-adds."""
        layout = self.layout()
        (table,) = layout.tables
        strengths = torch.zeros(table.shape)
        for row, choice in enumerate(table.choices):
            for column, op in enumerate(choice.candidates):
                # Bottlenecks are ordered by expansion, then kernel; a skip costs nothing.
                size = -1 if op == SKIP else self._sizes()[op]
                strengths[row, column] = size if largest else -size
        return derive(layout, {table.name: strengths})

    def _sizes(self) -> dict[str, int]:
        """The bottlenecks by rising cost: widths matter more than kernels."""
        pairs = sorted((e, k) for e in self.expansions for k in self.kernels)
        return {name_of(e, k, se=self.se): rank for rank, (e, k) in enumerate(pairs)}

    def supernet(self, shape: Shape, num_classes: int) -> Supernet:
        return ProxylessSupernet(self, shape, num_classes)

    def network(
        self,
        genotype: Genotype,
        shape: Shape,
        num_classes: int,
        *,
        search_form: bool = False,
        auxiliary: bool = False,
    ) -> Network:
        if set(genotype.cells) != {"chain"}:
            raise UserError(f"a genotype of a chain needs one cell named 'chain', got {sorted(genotype.cells)}")
        if auxiliary:
            raise UserError("chains have no auxiliary tower; set auxiliary=0")
        # A genotype defines its depths: it can be trained at any width, but not with another number of layers.
        own = build(ProxylessSpace, {**to_dict(self), **genotype.settings}, "settings of the genotype")
        layers = len(check_chain(genotype.cells["chain"]))
        if layers != sum(own.depths):
            raise UserError(
                f"the chain of the genotype has {layers} layers, but depths {list(own.depths)} need {sum(own.depths)}; "
                "`depths` in the genotype's settings must be those it was searched with"
            )
        return ProxylessNetwork(own, genotype, shape, num_classes, search_form=search_form)


class Ends(nn.Module):
    """Everything around the chain: stem and fixed bottleneck before it, head and classifier after it."""

    def __init__(self, space: ProxylessSpace, shape: Shape, num_classes: int, *, affine: bool) -> None:
        super().__init__()
        stride, _ = space.strides_for(shape)
        stem, first = _divisible(STEM * space.width), _divisible(FIRST * space.width)
        self.stem = nn.Sequential(
            conv_norm(shape[0], stem, 3, stride, affine=affine), MBConv(stem, first, 3, 1, 1, affine=affine)
        )
        self.last = conv_norm(_divisible(WIDTHS[-1] * space.width), space.head, 1, affine=affine)
        self.classifier = nn.Linear(space.head, num_classes)

    def head(self, features: Tensor) -> Tensor:
        return self.classifier(global_pool(self.last(features)))  # type: ignore[no-any-return]


def _stage_ends(specs: list[Spec]) -> tuple[int, ...]:
    """The last node of every resolution: those before a stride, and the last of all."""
    return (*(i for i, spec in enumerate(specs) if spec.stride > 1), len(specs))


class ProxylessSupernet(Supernet):
    def __init__(self, space: ProxylessSpace, shape: Shape, num_classes: int) -> None:
        super().__init__(space, shape, num_classes)
        specs = space.specs(space.strides_for(shape)[1], affine=False)
        self.ends = Ends(space, shape, num_classes, affine=False)
        self.chain = MixedChain(self.layout.tables[0], lambda source: specs[source])
        self._stages = _stage_ends(specs)

    def features(self, x: Tensor, mix: Mix) -> list[Tensor]:
        nodes = self.chain([self.ends.stem(x)], mix, 0)
        return [nodes[i] for i in self._stages]

    def head(self, features: Tensor) -> Tensor:
        return self.ends.head(features)


class ProxylessNetwork(Network):
    def __init__(
        self, space: ProxylessSpace, genotype: Genotype, shape: Shape, num_classes: int, *, search_form: bool
    ) -> None:
        super().__init__(genotype, shape, num_classes)
        specs = space.specs(space.strides_for(shape)[1], affine=not search_form)
        _check_widths(genotype, specs)
        self.ends = Ends(space, shape, num_classes, affine=not search_form)
        self.chain = PickedChain(genotype.cells["chain"], lambda source: specs[source], self.drop_path)
        self._stages = _stage_ends(specs)

    def features(self, x: Tensor) -> list[Tensor]:
        nodes = self.chain([self.ends.stem(x)])
        return [nodes[i] for i in self._stages]

    def head(self, features: Tensor) -> Tensor:
        return self.ends.head(features)


def _check_widths(genotype: Genotype, specs: list[Spec]) -> None:
    """Raises `UserError` where a layer that changes the width has an operation that cannot."""
    for pick in genotype.cells["chain"].picks:
        spec = specs[pick.source]
        if spec.c_in != spec.channels and not get_candidate(pick.op).widens:
            raise UserError(
                f"layer {pick.source} of the chain goes from {spec.c_in} to {spec.channels} channels, which "
                f"{pick.op!r} cannot; choose an inverted bottleneck there"
            )
