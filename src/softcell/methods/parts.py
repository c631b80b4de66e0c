"""Parts that some methods have and most do not.

A method creates a selection from passes over images, a planner of partial execution or an observer of gradients in
`__init__` and assigns it to `Method.selection`, `Method.planner` or `Method.observer`. The search uses the parts that
are there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from softcell.arch import Layout, Mix, Plan, count


class Pass(NamedTuple):
    """One pass of a selection over the validation split, under `mix`.

    calibration: BatchNorm is recalibrated under this mix before the pass; None keeps the running statistics.

    Example:
        >>> import torch
        >>> from softcell.arch import WeightMix
        >>> from softcell.methods import Pass
        >>> from softcell.spaces import build_space
        >>> mix = WeightMix(build_space("nb201").layout(), {"cell": torch.full((6, 5), 0.2)})
        >>> Pass(mix).calibration is None  # running statistics are kept
        True
    """

    mix: Mix
    calibration: Mix | None = None


class Selection(ABC):
    """Derivation from images: passes over the validation split fill sums, from which `Method.derive` derives.

    last_epoch_only: passes are made only after the last epoch; else after every epoch that is validated.
    accepts_penalty: whether gradients of a resource penalty reach the method through `Method.occupancy`.

    Example:
        >>> from softcell.methods import METHODS, Selection
        >>> from softcell.methods.itnas import ItNas, ItNasSettings
        >>> from softcell.testing import tiny_space
        >>> supernet = tiny_space("nb201").supernet((3, 8, 8), 10)
        >>> method = ItNas.for_supernet(ItNasSettings(), supernet)
        >>> isinstance(method.selection, Selection), len(method.selection.passes())
        (True, 1)
    """

    last_epoch_only: bool = False
    accepts_penalty: bool = True

    @abstractmethod
    def passes(self) -> Sequence[Pass]:
        """Clears the sums and returns the passes that fill them."""

    @abstractmethod
    def sums(self) -> Sequence[Tensor]:
        """The sums over images. The search adds them over processes after the passes."""

    @abstractmethod
    def mix_with(self, table: str, choice: int) -> Mix:
        """A mix that runs all candidates of a choice, at all sites of its table."""

    def records(self) -> dict[str, Any]:
        """By file name, a JSON line for `<name>.jsonl` about the latest passes."""
        return {}

    def findings(self) -> dict[str, Any]:
        """What the derived architecture is based on, as JSON, for `run.json`."""
        return {}

    def strengths(self) -> dict[str, Tensor] | None:
        """Per table [choices, width] the values whose sum is maximised within a budget.

        For methods that no penalty can move; None: the method cannot select within a budget.
        """
        return None


class Planner:
    """Partial execution: which candidates run at each site in a step.

    `reading` returns on the device what the host needs, `plan` makes a plan from a copy of it, and `Method.relax`
    follows `current()`. Where steps are captured as CUDA graphs the plan is made before the step, from a reading
    that is one step old (`softcell.search.task.PlanQueue`). A host that decides alone (a random path) returns the plan
    in `draw`.

    Example:
        >>> import torch
        >>> from softcell.methods import Planner
        >>> class Strongest(Planner):  # runs one candidate on each of two edges of one site
        ...     def __init__(self, logits):
        ...         super().__init__()
        ...         self.logits = logits
        ...     def reading(self):
        ...         return self.logits.argmax(1)
        ...     def plan(self, reading):
        ...         return (tuple((k,) for k in reading.tolist()),)
        >>> Strongest(torch.tensor([[0.1, 0.9], [0.8, 0.2]])).current()
        (((1,), (0,)),)
    """

    def __init__(self) -> None:
        self._plan: Plan | None = None

    def reading(self) -> Tensor | None:
        """Numbers [n] that the host reads to make a plan; None: no plan. Must not synchronise with the host."""
        return None

    def plan(self, reading: Tensor) -> Plan:
        """The plan of a step, from a copy of `reading` on the host."""
        raise NotImplementedError(f"{type(self).__name__} has a `reading`, so it needs `plan` too")

    def widen(self, plan: Plan, reading: Tensor, before: Plan) -> Plan:
        """What a captured step runs where `plan`, made from `reading`, is needed and the step before ran `before`.

        A method whose `relax` assigns a weight of zero to unneeded candidates can return a plan that runs more: plans
        that change less often need fewer CUDA graphs.
        """
        return plan

    def draw(self, step: int) -> Plan | None:
        """The plan of step number `step` of the run, where the host decides alone; None where it does not.

        It must depend on `step` and on the method's state only, so that a resumed run draws the same plans.
        """
        return None

    def num_plans(self) -> int | None:
        """The number of different plans; None: few enough to capture a graph for each.

        Also for a method without `draw` whose `relax` decides on the host: its steps cannot be captured.
        """
        return None

    def current(self) -> Plan:
        """The plan that is followed. Outside of `following` one is made at once, which synchronises with the device."""
        if self._plan is not None:
            return self._plan
        with torch.no_grad():
            reading = self.reading()
        assert reading is not None
        return self.plan(reading.cpu())

    @contextmanager
    def following(self, plan: Plan | None) -> Iterator[None]:
        """Within this context `current` is `plan`; None: a new one at every call."""
        before, self._plan = self._plan, plan
        try:
            yield
        finally:
            self._plan = before


class PathPlanner(Planner):
    """One random path per step, drawn on the host from the run's key and the step's number.

    owner: gets the key as a buffer, so that it is saved with the method. path: maps a seed to its plan.

    Example:
        >>> import random
        >>> from torch import nn
        >>> from softcell.arch.mix import uniform_path
        >>> from softcell.methods import PathPlanner
        >>> from softcell.spaces import build_space
        >>> layout = build_space("nb201").layout()
        >>> planner = PathPlanner(nn.Module(), layout, lambda seed: uniform_path(layout, random.Random(seed)))
        >>> planner.draw(step=3) == planner.draw(step=3), planner.num_plans()
        (True, 15625)
    """

    def __init__(self, owner: nn.Module, layout: Layout, path: Callable[[str], Plan]) -> None:
        super().__init__()
        owner.register_buffer("key", torch.randint(2**31, (1,)))
        # A checkpoint replaces the key.
        owner.register_load_state_dict_post_hook(self._forget_key)  # type: ignore[no-untyped-call]
        self._owner, self._layout, self._path = owner, layout, path
        self._known_key: int | None = None

    def reading(self) -> Tensor:
        """The key: outside of steps the same path always runs, so that accuracies of epochs can be compared."""
        return self._owner.get_buffer("key")

    def plan(self, reading: Tensor) -> Plan:
        return self._path(str(int(reading)))

    def draw(self, step: int) -> Plan:
        if self._known_key is None:
            self._known_key = int(self.reading())  # synchronises with the device, once per run
        return self._path(f"{self._known_key} {step}")

    def num_plans(self) -> int:
        return count(self._layout)

    def _forget_key(self, owner: nn.Module, incompatible: object) -> None:
        self._known_key = None


class Observer(ABC):
    """Gradients of the mix, read from the backward pass that trains the architecture anyway.

    Example:
        >>> import torch
        >>> from softcell.arch import WeightMix
        >>> from softcell.methods import Observer
        >>> from softcell.spaces import build_space
        >>> class GradientSums(Observer):
        ...     def __init__(self, layout):
        ...         self.total = {table.name: torch.zeros(table.shape) for table in layout.tables}
        ...     def watched(self, mix):
        ...         return list(mix.tables.values())
        ...     def observe(self, mix, gradients):
        ...         for name, gradient in zip(mix.tables, gradients, strict=True):
        ...             self.total[name] += gradient
        ...     def sums(self):
        ...         return {"gradients": self.total}
        >>> layout = build_space("nb201").layout()
        >>> observer, mix = GradientSums(layout), WeightMix(layout, {"cell": torch.zeros(6, 5)})
        >>> observer.observe(mix, [torch.ones(6, 5) for tensor in observer.watched(mix)])
        >>> observer.sums()["gradients"]["cell"].sum()
        tensor(30.)
    """

    @abstractmethod
    def watched(self, mix: Mix) -> Sequence[Tensor]:
        """The tensors of the mix whose gradients `observe` needs."""

    @abstractmethod
    def observe(self, mix: Mix, gradients: Sequence[Tensor | None]) -> None:
        """Adds the gradients of the watched tensors to `sums`, in place, once per step, without synchronising.

        With several processes these are the gradients of this process's part of the batch.
        """

    @abstractmethod
    def sums(self) -> dict[str, dict[str, Tensor]]:
        """By file name, per table [choices, width].

        The search zeroes them before an epoch, saves them in checkpoints within one, and writes their mean per step,
        averaged over processes, to `<name>.jsonl`. They are not part of the method's state.
        """
