"""Base classes of search methods.

A `Method` owns architecture parameters and nothing else: it passes the supernet a mix for each step and derives an
architecture at the end. A `Sampler` owns no parameters: it proposes architectures that are trained one by one, and is
given their scores. Neither depends on loops, devices or data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from softcell.arch import Genotype, Layout, Mix, Rule, WeightMix, derive
from softcell.arch.mix import contested_shares, contested_softmax, masked_softmax, normalised
from softcell.methods.parts import Observer, Planner, Selection
from softcell.registry import Registry
from softcell.spaces import Supernet

Regime = Literal["single-level", "bilevel", "unrolled"]


@dataclass(frozen=True)
class NoSettings:
    """For methods without settings."""


class Method(nn.Module, ABC):
    """Architecture parameters and what they mean.

    name, about: for `softcell list` and recipes. home: the space that is searched by default; None: the recipe's.
    regime: the step that the method is made for. recipes: by scale (`small`, `paper` or another name) the
    changes to the defaults of `SearchRecipe`; settings of a space apply to spaces that have them.
    rule: derives the architecture; None means the space's own. excludes: candidates that the method leaves out of
    its tables wherever an edge has others. learns: False for a method without parameters. is_distribution: whether
    `occupancy` sums to 1 per choice, so that it can be sampled.
    many_cells: whether weights learn in other cells than the one that is validated (samples, or the cell derived at
    that step). Running statistics of BatchNorm then fit no single cell, so validation recalibrates them.

    selection, planner, observer: parts that most methods do not have (`softcell.methods.parts`).

    Example:
        >>> from softcell.arch import WeightMix
        >>> from softcell.methods import Masks, Method, logits_like
        >>> from softcell.methods.base import NoSettings
        >>> from softcell.spaces import build_space
        >>> class Plain(Method):  # DARTS's relaxation
        ...     name = "plain"
        ...     def __init__(self, layout, settings):
        ...         super().__init__(layout, settings)
        ...         self.alpha, self.masks = logits_like(layout), Masks(layout)
        ...     def relax(self):
        ...         return WeightMix(self.layout, self.probabilities())
        ...     def probabilities(self):
        ...         return {name: self.masks.softmax(name, alpha) for name, alpha in self.alpha.items()}
        >>> method = Plain(build_space("nb201").layout(), NoSettings())
        >>> method.relax().weights(site=0).shape, method.derive().space
        (torch.Size([6, 5]), 'nb201')
    """

    name: ClassVar[str]
    about: ClassVar[str] = ""
    home: ClassVar[str | None] = None
    regime: ClassVar[Regime] = "bilevel"
    Settings: ClassVar[type] = NoSettings
    recipes: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    rule: ClassVar[Rule | None] = None
    excludes: ClassVar[tuple[str, ...]] = ()
    learns: ClassVar[bool] = True
    is_distribution: ClassVar[bool] = True
    many_cells: bool = False

    def __init__(self, layout: Layout, settings: Any) -> None:
        super().__init__()
        self.layout, self.settings = layout, settings
        self.selection: Selection | None = None
        self.planner: Planner | None = None
        self.observer: Observer | None = None

    @classmethod
    def for_supernet(cls, settings: Any, supernet: Supernet) -> Self:
        """The method for a supernet. Override it where parameters depend on the shapes of feature maps."""
        return cls(supernet.layout, settings)

    @abstractmethod
    def relax(self) -> Mix:
        """The mix of one step. It must not synchronise with the host: a step may be captured as a CUDA graph."""

    @abstractmethod
    def probabilities(self) -> dict[str, Tensor]:
        """Per table [choices, width] the probability of each candidate, padding 0; for records and derivation."""

    def derive(self) -> Genotype:
        """The architecture found so far; by default the method's or the space's rule on the probabilities."""
        return derive(self.layout, self.probabilities(), self.rule, about={"method": self.name})

    def begin_epoch(self, progress: float) -> None:
        """Moves schedules; `progress` runs from 0 to 1 over the search. Values go into buffers, in place."""

    def penalty(self, mix: Mix) -> Tensor | None:
        """A term [] that is added to the loss of the architecture; None for none."""
        return None

    def occupancy(self, mix: Mix | None = None) -> dict[str, Tensor]:
        """Per table [choices, width] how much of each candidate a derived network is expected to have.

        A resource penalty acts on it. mix: the mix of the step, after its forward pass; None outside of steps.
        """
        return self.probabilities()

    def parameter_groups(self, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """The groups of the architecture's optimiser; together they hold every parameter once."""
        return [{"params": list(self.parameters()), "lr": lr, "weight_decay": weight_decay}]

    def gauges(self) -> dict[str, Tensor]:
        """Single numbers [] for `metrics.jsonl`, such as a temperature; read once per epoch."""
        return {}

    def remarks(self) -> Sequence[str]:
        """Messages about the derived architecture for the user."""
        return ()


class Sampler(ABC):
    """A method that proposes whole architectures, each trained on its own without shared weights.

    Example:
        >>> from softcell.arch import sample
        >>> from softcell.methods import Sampler
        >>> from softcell.methods.base import NoSettings
        >>> from softcell.spaces import build_space
        >>> class ThreeDraws(Sampler):
        ...     name, num_samples = "three-draws", 3
        ...     def propose(self, number, scores):
        ...         return sample(self.layout, self.seed + number)
        >>> sampler = ThreeDraws(build_space("nb201").layout(), NoSettings(), seed=0)
        >>> sampler.propose(0, []) == sampler.propose(1, [0.9])
        False
    """

    name: ClassVar[str]
    about: ClassVar[str] = ""
    home: ClassVar[str | None] = None
    Settings: ClassVar[type] = NoSettings
    recipes: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __init__(self, layout: Layout, settings: Any, seed: int) -> None:
        self.layout, self.settings, self.seed = layout, settings, seed

    @property
    @abstractmethod
    def num_samples(self) -> int:
        """The number of architectures to propose."""

    @abstractmethod
    def propose(self, number: int, scores: list[float]) -> Genotype:
        """Architecture `number`, given the validation accuracies of those before it."""


class UntrainedSampler(Sampler):
    """A sampler whose architectures are not trained: a score of the network's initial weights replaces its accuracy.

    It handles budgets itself: `allowed` decides what may be proposed, `starts` are cheap architectures to begin with.

    Example:
        >>> from softcell.methods import METHODS, UntrainedSampler
        >>> from softcell.spaces import build_space
        >>> ZeroCost = METHODS.get("zero-cost")
        >>> sampler = ZeroCost(build_space("nb201").layout(), ZeroCost.Settings(), seed=0)
        >>> isinstance(sampler, UntrainedSampler), sampler.propose(0, []).space
        (True, 'nb201')
    """

    def __init__(self, layout: Layout, settings: Any, seed: int) -> None:
        super().__init__(layout, settings, seed)
        self.allowed: Callable[[Genotype], bool] = lambda genotype: True
        self.starts: Sequence[Genotype] = ()

    @property
    @abstractmethod
    def num_rounds(self) -> int:
        """The number of rounds of equal length in which the `num_samples` architectures are proposed."""

    @property
    @abstractmethod
    def num_images(self) -> int:
        """The number of training images passed to `score`, with their labels."""

    @abstractmethod
    def score(self, network: nn.Module, images: Tensor, labels: Tensor) -> float:
        """The score of an untrained network, larger is better. It may change the network.

        images: [n, c, h, w], normalised. labels: int64 [n].
        """

    @abstractmethod
    def findings(self) -> dict[str, Any]:
        """What the scores are, as JSON, for `run.json`."""


def logits_like(layout: Layout, scale: float = 1e-3) -> nn.ParameterDict:
    """One logits matrix [choices, width] per table, drawn from a normal distribution of deviation `scale`.

    Example:
        >>> from softcell.methods import logits_like
        >>> from softcell.spaces import build_space
        >>> {name: tuple(alpha.shape) for name, alpha in logits_like(build_space("darts").layout()).items()}
        {'normal': (14, 8), 'reduce': (14, 8)}
    """
    return nn.ParameterDict({table.name: nn.Parameter(scale * torch.randn(*table.shape)) for table in layout.tables})


class Masks(nn.Module):
    """The masks of all tables as buffers, so that they move with the method.

    `excludes` names candidates that are ignored; an edge that has nothing else keeps them. `softmax` and `shares` know
    which choices of a table compete with each other (`Table.contests`).

    Example:
        >>> import torch
        >>> from softcell.methods import Masks
        >>> from softcell.spaces import build_space
        >>> layout = build_space("nb201").layout()
        >>> masks = Masks(layout, excludes=("none",))
        >>> masks.softmax("cell", torch.zeros(6, 5))[0]
        tensor([0.0000, 0.2500, 0.2500, 0.2500, 0.2500])
    """

    def __init__(self, layout: Layout, excludes: Sequence[str] = ()) -> None:
        super().__init__()
        for table in layout.tables:
            mask = table.mask()
            for name in excludes:
                left = mask & ~table.columns(name)
                mask = torch.where(left.any(1, keepdim=True), left, mask)
            # Not saved: masks follow from the layout.
            self.register_buffer(table.name, mask, persistent=False)
        self._members = nn.Module()  # bool [contests, choices] of the tables that have contests
        for table in layout.tables:
            if table.contests:
                rows = [[i in contest for i in range(len(table))] for contest in table.contests]
                self._members.register_buffer(table.name, torch.tensor(rows), persistent=False)

    def __getitem__(self, table: str) -> Tensor:
        return self.get_buffer(table)

    def members(self, table: str) -> Tensor | None:
        """bool [contests, choices]; None where nothing competes."""
        return dict(self._members.named_buffers()).get(table)

    def softmax(self, table: str, logits: Tensor, temperature: Tensor | float = 1.0) -> Tensor:
        """Probabilities [choices, width] of logits like them: per choice, and over the links of those that compete."""
        members = self.members(table)
        if members is None:
            return masked_softmax(logits, self[table], temperature)
        return contested_softmax(logits, self[table], members, temperature)

    def shares(self, table: str, strengths: Tensor) -> Tensor:
        """Strengths [choices, width], not negative, as shares: per choice, and over the links of those that compete."""
        members = self.members(table)
        return normalised(strengths) if members is None else contested_shares(strengths, members)


class SoftmaxMethod(Method):
    """The relaxation that DARTS introduced and others adopt: every choice mixes its candidates by a softmax of logits.

    `settings.init_scale` is the deviation of the normal distribution that logits start from.

    Example:
        >>> from softcell.methods import METHODS, SoftmaxMethod
        >>> from softcell.spaces import build_space
        >>> Darts = METHODS.get("darts")
        >>> darts = Darts(build_space("nb201").layout(), Darts.Settings())
        >>> isinstance(darts, SoftmaxMethod), darts.probabilities()["cell"].shape
        (True, torch.Size([6, 5]))
    """

    def __init__(self, layout: Layout, settings: Any) -> None:
        super().__init__(layout, settings)
        self.alpha = logits_like(layout, settings.init_scale)
        self.masks = Masks(layout)

    def relax(self) -> Mix:
        return WeightMix(self.layout, self.probabilities())

    def probabilities(self) -> dict[str, Tensor]:
        # DARTS, Eq 2; NOS, Eq 7; full attention, Eq 1.
        return {name: self.masks.softmax(name, alpha) for name, alpha in self.alpha.items()}


METHODS: Registry[Method | Sampler] = Registry("method", "softcell.methods")
register_method = METHODS.add
