"""What a search method is.

A `Method` owns architecture parameters and nothing else: it hands the supernet a mix for each step and, at the end,
says which architecture it found. A `Sampler` owns no parameters: it proposes architectures that are trained one by
one, and is told how they did. Neither knows of loops, devices or data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from softcell.arch import Genotype, Layout, Mix, Plan, Rule, WeightMix, derive
from softcell.arch.relax import (
    contested_shares,
    contested_softmax,
    masked_softmax,
    normalised,
)
from softcell.spaces import Supernet
from softcell.spaces.shapes import Shapes, output_shapes

Regime = Literal["single-level", "bilevel", "unrolled"]


@dataclass(frozen=True)
class NoSettings:
    """For methods that have nothing to set."""


class Method(nn.Module, ABC):
    """Architecture parameters and what they mean.

    `rule` derives the architecture; None stands for the space's own. `recipes` maps a scale (`small`, `paper`,
    others of its own, such as a dataset's name) to what its recipe changes in the defaults of `SearchRecipe`; settings
    of a space in it hold for spaces that have them. `excludes` names candidates that the method leaves out of its
    tables wherever an edge has others. `learns` is False where there are no parameters at all. `home` names the space
    that is searched when none is asked for; None leaves it to the recipe's default.

    A method some of whose sites do not run every candidate has a *plan* for each step: `reading` says on the device
    what the host needs for it, `plan` makes it, and `relax` follows `self.planned()`. Where a step is recorded, the
    plan is made before it, from numbers that are one step old (`softcell.search.plans`). A method whose host decides
    alone what runs (a random path) gives it in `draw`.

    A method whose parameters have the shape of feature maps sets `needs_shapes` and makes them in `fit`. A method that
    derives from what the supernet does with images, not from parameters, *looks*: `looking` gives the mix for one pass
    over the validation split, which adds to the tensors of `looked`.
    """

    name: ClassVar[str]
    about: ClassVar[str] = ""
    excludes: ClassVar[tuple[str, ...]] = ()
    regime: ClassVar[Regime] = "bilevel"
    learns: ClassVar[bool] = True
    is_distribution: ClassVar[bool] = (
        True  # what is penalised sums to 1 per choice, so that samples of it mean something
    )
    home: ClassVar[str | None] = None
    needs_shapes: ClassVar[bool] = False
    rule: ClassVar[Rule | None] = None
    Settings: ClassVar[type] = NoSettings
    recipes: ClassVar[Mapping[str, Mapping[str, Any]]] = {}

    def __init__(self, layout: Layout, settings: Any) -> None:
        super().__init__()
        self.layout, self.settings = layout, settings
        self._plan: Plan | None = None

    def fit(self, shapes: Shapes) -> None:
        """Makes what depends on the shapes of the candidates' outputs; called once, before anything else."""

    def regions(self) -> Sequence[nn.Module]:
        """Modules of its own that work on feature maps; `engine=compile` compiles them instead of the cells."""
        return ()

    @abstractmethod
    def relax(self) -> Mix:
        """The mix of one step. Runs on the device's clock: nothing in it may wait for the host."""

    @abstractmethod
    def probabilities(self) -> dict[str, Tensor]:
        """Per table how much each candidate is believed in, [choices, width], padding 0; for records and derivation."""

    def derive(self) -> Genotype:
        """The architecture found so far; by default the method's or the space's rule on the probabilities."""
        return derive(self.layout, self.probabilities(), self.rule, about={"method": self.name})

    @property
    def many_cells(self) -> bool:
        """Whether weights learn in other cells than the one that is validated (samples, or the cell of the moment).

        Batch-norm's running statistics are then those of no cell: the last validation is made with norms measured anew,
        too.
        """
        return False

    @property
    def reads(self) -> Literal["always", "validated", "last"]:
        """After which epochs `derive` says something new: all, those that are validated, or the last."""
        return "always"

    def looking(self) -> Mix | None:
        """The mix for a pass over the validation split that `derive` rests on, begun anew; None: it needs none."""
        return None

    def looking_in_turn(self) -> Sequence[tuple[Mix, Mix]]:
        """Mixes for one pass each over the validation split after the last epoch, begun anew.

        Before each pass batch-norm measures its statistics anew under the first mix of a pair, which takes no note: for
        supernets whose paths are trained one by one.
        """
        return ()

    def attending(self, table: str, choice: int) -> Mix:
        """A mix under which all candidates of a choice run, at all sites of its table; for looking at them."""
        return self.relax()

    def looked(self) -> Sequence[Tensor]:
        """Sums over images that a pass with the mix of `looking` has added to; the search adds those of all ranks."""
        return ()

    def readings(self) -> dict[str, Any]:
        """What the latest pass over the validation split read, by the name of a record: a line of `<name>.jsonl`."""
        return {}

    def strengths(self) -> dict[str, Tensor] | None:
        """Per table [choices, width] what the architecture within a budget shall have most of, in sum.

        For a method whose probabilities no penalty can move; None: it cannot select within a budget.
        """
        return None

    def findings(self) -> dict[str, Any]:
        """What the derived architecture rests on, as JSON, for `run.json`."""
        return {}

    def remarks(self) -> Sequence[str]:
        """What a user has to know about the derived architecture."""
        return ()

    def occupancy(self) -> dict[str, Tensor]:
        """How much of each candidate a derived network is expected to have, per table: what costs are recorded by."""
        return self.probabilities()

    def penalised(self, mix: Mix) -> dict[str, Tensor]:
        """The probabilities that a resource penalty acts on, after a forward pass under `mix`."""
        return self.probabilities()

    def is_steerable(self) -> bool:
        """Whether `penalised` carries gradients."""
        return any(p.requires_grad for p in self.probabilities().values())

    def reading(self) -> Tensor | None:
        """Numbers [n] that the host reads to plan a step; None: this method needs no plan. On the device's clock."""
        return None

    def plan(self, reading: Tensor) -> Plan:
        """What runs in a step, from a copy of `reading` on the host."""
        raise NotImplementedError(f"{type(self).__name__} has a `reading`, so it needs `plan` too")

    def draw(self, step: int) -> Plan | None:
        """What runs in step number `step` of the run, where the host decides that alone; None: it does not.

        It must depend on `step` and on what the seed gave the method, so that a resumed run draws the same.
        """
        return None

    def num_plans(self) -> int | None:
        """How many different plans `draw` can give; None: so few that each is worth a recording.

        Also for a method without `draw` whose `relax` decides on the host what runs: it cannot be recorded.
        """
        return None

    def planned(self) -> Plan:
        """The plan that is being followed; where there is none, one is made at once, which waits for the device."""
        if self._plan is not None:
            return self._plan
        with torch.no_grad():
            reading = self.reading()
        assert reading is not None
        return self.plan(reading.cpu())

    @contextmanager
    def following(self, plan: Plan | None) -> Iterator[None]:
        """Within this context `relax` follows `plan`; None: it makes its own at every call."""
        before, self._plan = self._plan, plan
        try:
            yield
        finally:
            self._plan = before

    def parameter_groups(self, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """The groups of the architecture's optimiser; together they hold every parameter once."""
        return [{"params": list(self.parameters()), "lr": lr, "weight_decay": weight_decay}]

    def begin_epoch(self, progress: float) -> None:
        """Moves schedules; `progress` runs from 0 to 1 over the search. Values go into buffers, in place."""

    def penalty(self, mix: Mix) -> Tensor | None:
        """A term added to the loss that trains the architecture, if the method has one."""
        return None

    def watched(self, mix: Mix) -> Sequence[Tensor]:
        """Tensors of the mix whose gradients `observe` wants; they come from the architecture's own backward pass."""
        return ()

    def observe(self, mix: Mix, gradients: Sequence[Tensor | None]) -> None:
        """Takes the gradients of what is watched, once per step on the device's clock; sums go into buffers, in place.

        Under several processes these are the gradients of this one's part of the batch.
        """

    def diagnostics(self) -> dict[str, dict[str, Tensor]]:
        """By name of a record the running sums per table [choices, width] that `observe` adds to.

        The search zeroes them before an epoch, saves them within one, and writes their mean per step, averaged over
        processes, to `<name>.jsonl`. They are no part of the method's state.
        """
        return {}

    def gauges(self) -> dict[str, Tensor]:
        """Single numbers [] for `metrics.jsonl`, such as a temperature; read once per epoch."""
        return {}


class Sampler(ABC):
    """A method that proposes whole architectures, each trained on its own without shared weights."""

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
        """How many architectures will be proposed."""

    @abstractmethod
    def propose(self, number: int, scores: list[float]) -> Genotype:
        """Architecture `number`, given the validation accuracies of those before it."""


class UntrainedSampler(Sampler):
    """A sampler whose architectures are not trained: a score of the network's first weights stands for its accuracy.

    It keeps to a budget by itself: `allowed` says what may be proposed, `starts` are cheap architectures to begin with.
    """

    def __init__(self, layout: Layout, settings: Any, seed: int) -> None:
        super().__init__(layout, settings, seed)
        self.allowed: Callable[[Genotype], bool] = lambda genotype: True
        self.starts: Sequence[Genotype] = ()

    @property
    @abstractmethod
    def num_rounds(self) -> int:
        """In how many rounds of equal length the `num_samples` architectures are proposed."""

    @property
    @abstractmethod
    def num_images(self) -> int:
        """How many training images `score` is given."""

    @abstractmethod
    def score(self, network: nn.Module, images: Tensor) -> float:
        """The score of an untrained network, larger is better; images [n, c, h, w]. It may change the network."""

    @abstractmethod
    def findings(self) -> dict[str, Any]:
        """What the scores are, as JSON, for `run.json`."""


M = TypeVar("M", bound=Method)


def fitted(kind: type[M], settings: Any, supernet: Supernet) -> M:
    """A method for the space and the image size of `supernet`."""
    method = kind(supernet.layout, settings)
    if kind.needs_shapes:
        method.fit(output_shapes(supernet))
    return method


def logits_like(layout: Layout, scale: float = 1e-3) -> nn.ParameterDict:
    """One logits matrix [choices, width] per table, drawn from a normal distribution of deviation `scale`."""
    return nn.ParameterDict({table.name: nn.Parameter(scale * torch.randn(*table.shape)) for table in layout.tables})


class Masks(nn.Module):
    """The masks of all tables as buffers, so that they move with the method.

    `excludes` names candidates that take no part; an edge that has nothing else keeps them. `softmax` and `shares` know
    which choices of a table compete with each other (`Table.contests`).
    """

    def __init__(self, layout: Layout, excludes: Sequence[str] = ()) -> None:
        super().__init__()
        for table in layout.tables:
            mask = table.mask()
            for name in excludes:
                left = mask & ~table.columns(name)
                mask = torch.where(left.any(1, keepdim=True), left, mask)
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
    """

    def __init__(self, layout: Layout, settings: Any) -> None:
        super().__init__(layout, settings)
        self.alpha = logits_like(layout, settings.init_scale)
        self.masks = Masks(layout)

    def relax(self) -> Mix:
        return WeightMix(self.layout, self.probabilities())

    def probabilities(self) -> dict[str, Tensor]:
        return {name: self.masks.softmax(name, alpha) for name, alpha in self.alpha.items()}
