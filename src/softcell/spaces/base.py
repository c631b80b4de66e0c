"""Search spaces: a layout of choices, a supernet that holds all of them, and the network of one genotype."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import softcell.nn.attention
import softcell.nn.calibrate
import softcell.nn.conv
import softcell.nn.stochastic  # noqa: F401  (registers its candidates)
from softcell.arch import Cell, Genotype, Layout, Mix, Table
from softcell.errors import UserError
from softcell.kernels.schedule import Schedule
from softcell.nn.conv import dense_gradient
from softcell.nn.norm import updates_together
from softcell.nn.stochastic import DropPath
from softcell.registry import Registry
from softcell.settings import at_most, build, merge
from softcell.spaces.cell import MixedCell

Shape = tuple[int, int, int]
"""Channels, height and width of an input image."""


class Supernet(nn.Module, ABC):
    """All architectures of a space in one network: weights only, never architecture parameters.

    Example:
        >>> import torch
        >>> from softcell.arch import WeightMix
        >>> from softcell.spaces import build_space
        >>> supernet = build_space("nb201", {"cells_per_stage": 1, "channels": 4}).supernet((3, 8, 8), num_classes=10)
        >>> mix = WeightMix(supernet.layout, {"cell": torch.full((6, 5), 0.2)})
        >>> supernet(torch.rand(2, 3, 8, 8), mix).shape
        torch.Size([2, 10])
    """

    def __init__(self, space: Space, shape: Shape, num_classes: int) -> None:
        super().__init__()
        self.space, self.shape, self.num_classes = space, shape, num_classes
        self.layout = space.layout()
        self.drop_path = DropPath(0.0)

    def use_drop_path(self, probability: float) -> None:
        """Drops what a choice adds to a node, per sample, in training with up to `probability` (SNAS).

        The schedule moves inside that. At 0 nothing is drawn and nothing is computed for it.
        """
        self.drop_path.probability = probability
        for module in self.modules():
            if isinstance(module, MixedCell):
                module.use_drop_path(self.drop_path if probability > 0 else None)

    @abstractmethod
    def features(self, x: Tensor, mix: Mix) -> list[Tensor]:
        """x [n, c, h, w] to one feature map per resolution stage; the last is what `head` reads."""

    @abstractmethod
    def head(self, features: Tensor) -> Tensor:
        """The last feature map to logits [n, classes]."""

    def forward(self, x: Tensor, mix: Mix) -> Tensor:
        with updates_together():
            return self.head(self.features(x, mix)[-1])

    def child(self, genotype: Genotype) -> Network:
        """The derived network in its search form with this supernet's weights: nothing is trained.

        Modules of supernet and network carry the same names, so a child is the part of the supernet's state that the
        genotype uses.
        """
        network = self.space.network(genotype, self.shape, self.num_classes, search_form=True)
        own, reference = self.state_dict(), next(self.parameters())
        network = network.to(device=reference.device, dtype=reference.dtype)
        network.load_state_dict({name: own[name] for name in network.state_dict()})
        return network


class Bound:
    """A supernet together with one mix: a plain network to an objective.

    Example:
        >>> import torch
        >>> from softcell.nn import CrossEntropy
        >>> from softcell.spaces import Bound, build_space
        >>> from softcell.testing import one_hot
        >>> from softcell.arch import WeightMix, sample
        >>> supernet = build_space("nb201", {"cells_per_stage": 1, "channels": 4}).supernet((3, 8, 8), 10)
        >>> mix = WeightMix(supernet.layout, one_hot(supernet.layout, sample(supernet.layout, seed=0)))
        >>> loss, logits = CrossEntropy()(Bound(supernet, mix), torch.rand(2, 3, 8, 8), torch.tensor([0, 1]))
        >>> logits.shape
        torch.Size([2, 10])
    """

    def __init__(self, supernet: Supernet, mix: Mix) -> None:
        self._supernet, self._mix = supernet, mix

    def features(self, x: Tensor) -> list[Tensor]:
        with updates_together():
            return self._supernet.features(x, self._mix)

    def head(self, features: Tensor) -> Tensor:
        return self._supernet.head(features)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs a trained network expects: its classes in the order of the logits, mean and std of pixels in 0..1.

    A picture is scaled to `scaled_to` (height, width), by default the size of the network's images: all of it if
    `whole`, else a central part of that aspect. The network sees the centre of the result.

    Example:
        >>> from softcell.spaces import Network
        >>> inputs = Network.from_pretrained("runs/train").inputs
        >>> inputs.classes[:3], inputs.scaled_to, inputs.whole
        (('0', '1', '2'), (8, 8), False)
    """

    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scaled_to: tuple[int, int] | None = None
    whole: bool = False


class Network(nn.Module, ABC):
    """The network of one genotype; `inputs` describes the training data of a loaded one.

    Example:
        >>> import torch
        >>> from softcell.spaces import Network
        >>> network = Network.from_pretrained("runs/train")
        >>> pixels = torch.rand(2, 1, 8, 8)  # in 0..1
        >>> network(network.normalise(pixels)).shape, network.inputs.classes[:2]
        (torch.Size([2, 10]), ('0', '1'))
    """

    inputs: Inputs | None = None
    needs_dry_pass: bool = False
    """Whether the launches of fused cells are found by a dry pass instead of from `schedules`."""

    def __init__(self, genotype: Genotype, shape: Shape, num_classes: int) -> None:
        super().__init__()
        self.genotype, self.shape, self.num_classes = genotype, shape, num_classes
        self.drop_path = DropPath(0.0)
        self.auxiliary: nn.Module | None = None

    def use_drop_path(self, probability: float) -> None:
        """Drops paths in training with up to `probability`; the schedule moves inside that."""
        self.drop_path.probability = probability

    @staticmethod
    def from_pretrained(folder: str | Path, *, trust: bool = False) -> Network:
        """The trained network of a training run or an exported folder, on the CPU and in eval mode.

        trust: run the plugins that the folder names, even if they were not trusted here before.
        """
        from softcell.spaces.pretrained import load_pretrained  # spaces import this file, not the other way round

        return load_pretrained(folder, trust=trust)

    def normalise(self, pixels: Tensor) -> Tensor:
        """Pixels [n, c, h, w] in 0..1 as this network was trained to see them."""
        if self.inputs is None:
            raise ValueError("only a network that was loaded from its folder knows how its images were normalised")
        mean, std = (pixels.new_tensor(values).view(-1, 1, 1) for values in (self.inputs.mean, self.inputs.std))
        return (pixels - mean) / std

    @abstractmethod
    def features(self, x: Tensor) -> list[Tensor]:
        """x [n, c, h, w] to one feature map per resolution stage; the last is what `head` reads."""

    @abstractmethod
    def head(self, features: Tensor) -> Tensor:
        """The last feature map to logits [n, classes]."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x)[-1])

    def forward_with_auxiliary(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits, and those of the auxiliary tower; spaces that have a tower override this."""
        return self(x), None

    def schedules(self, batch: int, dtype: torch.dtype, *, training: bool) -> list[Schedule]:
        """The launches of fused cells for a batch of images; empty in spaces whose networks have no fused form."""
        return []

    def has_fused_cells(self) -> list[bool]:
        """By cell whether it has a fused form; empty in spaces whose networks have none."""
        return []


class Space(ABC):
    """A search space. Subclasses are frozen dataclasses: their fields are its settings (depth, width, candidates…).

    `small` holds the settings for a laptop: a smaller space of the same kind. `tiny` holds those of the smallest size
    that still has every part, for the suites of `softcell.testing`, if the suites' own sizes do not fit. `evaluation`
    holds the sizes of evaluation networks, by recipe (`cifar`, `imagenet`) or dataset (`svhn`); `has_auxiliary`: they
    can have an auxiliary tower. `search_only` names settings that only supernets have.

    Example:
        >>> from softcell.arch import count, sample
        >>> from softcell.spaces import build_space
        >>> space = build_space("nb201", {"cells_per_stage": 1, "channels": 4})
        >>> layout = space.layout()
        >>> network = space.network(sample(layout, seed=0), shape=(3, 32, 32), num_classes=10)
        >>> count(layout), len(layout.sites)
        (15625, 3)
    """

    name: ClassVar[str]
    about: ClassVar[str] = ""
    small: ClassVar[Mapping[str, Any]] = {}
    tiny: ClassVar[Mapping[str, Any]] = {}
    evaluation: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    has_auxiliary: ClassVar[bool] = False
    search_only: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def sizes(cls) -> set[str]:
        """The settings that set the size of an evaluation network."""
        return {key for layer in cls.evaluation.values() for key in layer}

    def remarks(self, num_classes: int = 10) -> tuple[str, ...]:
        """Lines that `softcell info` adds, such as a paper's own count; num_classes: of the counted networks."""
        return ()

    @abstractmethod
    def layout(self) -> Layout:
        """Tables, sites and the derivation rule."""

    @abstractmethod
    def supernet(self, shape: Shape, num_classes: int) -> Supernet:
        """The network with all candidates, for images of `shape` [c, h, w]."""

    @abstractmethod
    def network(
        self,
        genotype: Genotype,
        shape: Shape,
        num_classes: int,
        *,
        search_form: bool = False,
        auxiliary: bool = False,
    ) -> Network:
        """The network of `genotype` at this space's size.

        `search_form` builds it as the supernet computes it (batch-norm without scale and shift, norm after pools), so
        that it can take over the supernet's weights.
        """


def global_pool(x: Tensor) -> Tensor:
    """[n, c, h, w] to [n, c]."""
    return torch.mean(dense_gradient(x), dim=(2, 3))


MAX_ANY_SETTING = 2**20
MAX_SETTINGS = {"nodes": 100, "cells": 1000, "cells_per_stage": 1000, "layers": 1000, "blocks": 1000}
"""Largest values of settings by name: larger networks take hours to build and are mistakes."""
SPACES: Registry[Space] = Registry("space", "softcell.spaces")
register_space = SPACES.add


def build_space(name: str, settings: Mapping[str, Any] | None = None) -> Space:
    """The space `name` with the given settings; anything not given keeps the paper's value.

    Example:
        >>> from softcell.spaces import build_space
        >>> space = build_space("darts", {"cells": 8, "channels": 16})
        >>> space.cells, space.nodes
        (8, 4)
    """
    found = build(SPACES.get(name), settings or {}, where=f"space {name}")
    for setting in fields(found):  # type: ignore[arg-type]
        value = getattr(found, setting.name)
        if type(value) is int:
            at_most(f"space.{setting.name}", value, MAX_SETTINGS.get(setting.name, MAX_ANY_SETTING))
    return found


def evaluation_scale(data: str) -> str:
    """The name of the training recipe, and of the sizes in `Space.evaluation`, that suit a dataset."""
    if data == "digits":
        return "small"
    return "imagenet" if data in ("imagenet", "cub200", "cub200-boxes") else "cifar"


def evaluation_space(name: str, data: str, settings: Mapping[str, Any] | None = None) -> Space:
    """The space at the size of its evaluation networks on `data`; `settings` override single values."""
    return build_space(name, merge(evaluation_sizes(SPACES.get(name), data), settings or {}))


def trained_space(
    name: str, data: str, searched: Mapping[str, Any], settings: Mapping[str, Any] | None = None
) -> Space:
    """`evaluation_space` with all settings of a search's space but sizes: nodes, candidates, form of the network.

    searched: settings of the search's space; data: a dataset, or the name of a training recipe.
    """
    kind = SPACES.get(name)
    left = kind.sizes() | kind.search_only
    kept = {key: value for key, value in searched.items() if key not in left}
    return build_space(name, merge(kept, evaluation_sizes(kind, data), settings or {}))


def evaluation_sizes(space: type[Space], data: str, recipe: str | None = None) -> Mapping[str, Any]:
    """Those of `Space.evaluation` for a dataset: under its own name, else those of the recipe that suits it.

    recipe: a requested one takes precedence.
    """
    own: Mapping[str, Any] = space.evaluation.get(evaluation_scale(data), {})
    return space.evaluation.get(data, own) if recipe is None else space.evaluation.get(recipe, {})


FIXED = ("nodes", "layers")
"""Settings of a space that a genotype determines: the number of nodes of its cells."""


def fixed_by(genotype: Genotype, space: Space) -> dict[str, Any]:
    """The values of the settings in `FIXED` for which cells of `space` have the nodes of `genotype`."""
    last = max(map(_last, genotype.cells.values()))
    found = {}
    for name in {one.name for one in fields(space)} & set(FIXED):  # type: ignore[arg-type]
        # Tried one by one: only the space knows how it numbers nodes (NOS: two numbers per node).
        for value in range(1, last + 2):
            try:
                layout = replace(space, **{name: value}).layout()  # type: ignore[type-var]
            except UserError:
                continue  # a number of nodes that this space does not have
            alike = all(layout.settings.get(key, own) == own for key, own in genotype.settings.items())
            if alike and max(map(_last, layout.tables)) == last:
                found[name] = value
                break
    return found


def fit_space(genotype: Genotype, space: Space, asked: Mapping[str, Any]) -> Space:
    """`space` with the settings that the genotype determines; those in `asked` must not contradict it."""
    fixed = fixed_by(genotype, space)
    for name, value in fixed.items():
        if name in asked and getattr(space, name) != value:
            raise UserError(
                f"the number of {name} must be that of the genotype, {value}, but got {name}={getattr(space, name)}; "
                f"leave it out, or search with space.{name}={getattr(space, name)}"
            )
    return replace(space, **fixed)  # type: ignore[type-var]


def _last(cell: Cell | Table) -> int:
    """The highest node number."""
    edges = cell.picks if isinstance(cell, Cell) else cell.choices
    return max(*cell.output, *(edge.target for edge in edges), 0)
