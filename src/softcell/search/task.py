"""A search over a supernet as a task of the engine's loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softcell.arch import Genotype, Plan
from softcell.data import Batch, Batches
from softcell.data.batches import Draft
from softcell.engine.capture import MAX_GRAPHS, CapturedStep, Engine, Readback, once, prepare_step
from softcell.engine.distributed import World, broadcast_module
from softcell.engine.metrics import Failure, Tally
from softcell.engine.optim import adam, load_optimiser, rate_at, set_lr, sgd
from softcell.engine.session import computing_in, in_precision
from softcell.kernels.backend import current_settings
from softcell.kernels.shared import norms_of
from softcell.methods import Method, Planner
from softcell.nn.objective import Objective
from softcell.search._meters import (
    ArchitectureMeter,
    ChildMeter,
    CollapseMeter,
    CostMeter,
    Epoch,
    EpochMeter,
    GuideMeter,
    MethodMeter,
    ObjectiveMeter,
    ObserverMeter,
    TrainingMeter,
    ValidationMeter,
)
from softcell.search.budget import Budget
from softcell.search.dry_pass import compile_ahead
from softcell.search.perturb import PerturbationSelection
from softcell.search.recipe import SearchRecipe
from softcell.search.resource import ResourcePenalty
from softcell.search.selection import evolved, strongest_within_budget
from softcell.search.steps import StepState, bilevel, single_level, unrolled, weight_step
from softcell.search.supernet import Validation, measure_child
from softcell.spaces import Supernet
from softcell.spaces.cell import MixedCell
from softcell.spaces.execution import NO_TRITON, can_fuse, modules_only


class SearchTask:
    """Supernet, method and optimisers, stepped by the recipe's regime.

    `weights` feeds the weights, `validation` the architecture (unless single-level), `held` measures accuracy without
    augmentation. `selecting`: the validation split for methods that derive from it and for evolution, often the same as
    `held`. `judged`: the images that a selection by perturbation measures on.
    """

    def __init__(
        self,
        recipe: SearchRecipe,
        supernet: Supernet,
        method: Method,
        objective: Objective,
        world: World,
        *,
        weights: Batches,
        validation: Batches,
        held: Batches,
        selecting: Batches,
        judged: Batches | None = None,
        notify: Callable[[str], None],
        resource: ResourcePenalty | None = None,
        budget: Budget | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.recipe, self.world, self.notify, self.about = recipe, world, notify, dict(about or {})
        self.supernet, self.method, self.objective = supernet, method, objective
        self.weights, self.held = weights, held
        self._validation, self._selecting, self._judged = validation, selecting, judged
        self._resource, self._budget = resource, budget
        supernet.use_drop_path(recipe.drop_path)
        for module in (supernet, method, objective):
            broadcast_module(module, world)
        self.step_state = _step_state(recipe, supernet, method, objective, world, resource)
        self.tally = Tally(world.device)
        self._compiled_ahead = False
        self._selected: dict[str, Any] = {}  # how the architecture was selected, for run.json
        self._plans, self._number = PlanQueue(method.planner), 0
        self._weights_only = False  # in the first epochs, where the recipe asks for that
        self._cells, engine = _cells_and_engine(recipe, supernet, method, world, notify)
        notify_once = once(notify)
        learn = in_precision(self._learn, recipe.precision, world.device)
        self._run = prepare_step(learn, engine, world, notify_once, divides=_divides(recipe))
        measured = [
            Validation(supernet, split, recipe.engine, world, self.in_step, notify_once)
            for split in ([held] if selecting is held else [held, selecting])
        ]
        self._collapse = CollapseMeter(recipe.collapse, method.layout, notify, recipe.epochs)
        self._validates = ValidationMeter(measured[0], measured[-1], held, notify)
        # In this order: `ValidationMeter` compares its accuracy with that of `TrainingMeter`, and makes the passes of a
        # selection, on which everything after it that derives an architecture depends.
        self._meters: tuple[EpochMeter, ...] = (
            TrainingMeter(),
            MethodMeter(),
            ObjectiveMeter(objective),
            GuideMeter(),
            self._validates,
            ChildMeter(),
            CostMeter(resource, budget),
            ArchitectureMeter(),
            self._collapse,
            ObserverMeter(method),
        )

    # The search

    @property
    def num_epochs(self) -> int:
        return self.recipe.epochs

    def steps_in(self, epoch: int) -> int:
        return self.weights.num_batches

    def begin_epoch(self, epoch: int) -> None:
        self.supernet.train()
        self.objective.train()
        # As in DARTS's code the drop rate stays below its final value; a method's schedule ends at 1 in the last epoch.
        self.supernet.drop_path.set_fraction(epoch / self.num_epochs)
        self.method.begin_epoch(epoch / max(1, self.num_epochs - 1))
        w = self.recipe.weights
        rate = rate_at(epoch, self.num_epochs, w.lr, w.lr_min, w.schedule, warmup=w.warmup)
        set_lr(self.step_state.weight_optimiser, rate)
        self._weights_only = epoch < round(self.recipe.architecture.after * self.num_epochs)
        if self.recipe.architecture.optimiser == "weights":
            set_lr(self.step_state.architecture_optimiser, rate)
        self.tally.begin_epoch()
        for meter in self._meters:
            meter.begin_epoch()

    def batches(self, epoch: int, start: int) -> Iterator[Draft]:
        """Drafts of training batches, each with that of a validation batch where the regime needs one."""
        # Plans and validation batches are functions of this number, so a resumed run repeats them.
        self._number = epoch * self.weights.num_batches + start
        train = self.weights.drafts(epoch, start)
        if self.recipe.regime == "single-level":
            return train
        # `_cycle` has no end: an epoch is one pass over the split of the weights, regardless of the other's size.
        pairs = zip(train, _cycle(self._validation, self._number), strict=False)
        return ((*own, *held) for own, held in pairs)

    def pair(self, drafts: Draft) -> tuple[Batch, Batch | None]:
        """The training batch and, unless single-level, the validation batch of a draft from `batches`."""
        size = self.weights.draft_size
        own, held = drafts[:size], drafts[size:]
        by_kernel = self._by_kernel()
        train = self.weights.finish(*own, by_kernel=by_kernel)
        return train, self._validation.finish(*held, by_kernel=by_kernel) if held else None

    def _by_kernel(self) -> bool:
        """Whether batches and metrics go through Triton kernels: those of a search with fused cells."""
        return self.recipe.fused and current_settings().batch_kernels

    def step(self, batch: Draft) -> None:
        if not self._compiled_ahead:
            self._compiled_ahead = True
            compile_ahead(self, batch)
        with self._planned() as plan:
            if isinstance(self._run, CapturedStep):
                # A step without an architecture update is another computation, and needs its own graph.
                self._run(*batch, key=("weights", plan) if self._weights_only else plan)
            else:
                self._run(*batch)
        self._number += 1

    @contextmanager
    def _planned(self) -> Iterator[Plan | None]:
        """Within this context the method follows the plan of the next step; None where it needs none."""
        planner = self.method.planner
        if planner is None:
            yield None
            return
        plan = planner.draw(self._number)
        if isinstance(self._run, CapturedStep) and plan is None:
            plan = self._plans.next()
        with planner.following(plan):
            yield plan

    def rehearse(self, batch: Draft) -> None:
        """The computations of a step and of a validation pass; `softcell.search.dry_pass` undoes what they change."""
        weights_only, plans = self._weights_only, self._plans.state_dict()
        learn = in_precision(self._learn, self.recipe.precision, self.world.device)
        try:
            with self._planned():
                # If only the weights learn in the first epochs, the architecture will learn later.
                for alone in {False, weights_only}:
                    self._weights_only = alone
                    learn(*batch)
        finally:
            self._weights_only = weights_only
            self._plans.load_state_dict(plans)
        train, _ = self.pair(batch)
        self._validates.rehearse(self, train.images, train.labels)

    def _learn(self, *drafts: Tensor) -> None:
        """One step of the regime on a training batch and, unless single-level, a validation batch.

        Everything here happens on the device, from the gathering of images on, so that it can be captured.
        """
        batch, other = self.pair(drafts)
        others: list[Tensor] = []
        with self._cells(), norms_of(self.recipe.norms):
            if self._weights_only:
                result = weight_step(self.step_state, batch.images, batch.labels)
            elif other is None:
                result = single_level(self.step_state, batch.images, batch.labels)
            else:
                train, validation = (batch.images, batch.labels), (other.images, other.labels)
                if self.recipe.regime == "unrolled":
                    result, held = unrolled(self.step_state, train, validation, self.recipe.unrolled)
                else:
                    result, held = bilevel(self.step_state, train, validation)
                others.append(held.loss)
        self.tally.update(result.loss, result.logits, batch.labels, *others, by_kernel=self._by_kernel())

    def end_epoch(self, epoch: int) -> dict[str, Any]:
        last = epoch + 1 == self.num_epochs
        ended = Epoch(self.method, epoch, last, last or (epoch + 1) % self.recipe.validate_every == 0)
        for meter in self._meters:
            ended.metrics |= meter.measure(self, ended)
        records = [meter.records(self, ended) for meter in self._meters]
        return {**ended.metrics, "_records": {name: row for found in records for name, row in found.items()}}

    # The result

    def derive(self) -> Genotype:
        """The architecture found: by evolution, within the budget, or the last one from before a collapse."""
        own = self._collapse.kept or self.method.derive()
        if self.recipe.evolution.is_on:
            # A learned architecture joins the first generation; without one (SPOS), evolution alone decides.
            found, self._selected = evolved(
                self.recipe,
                self.supernet,
                own,
                self.method.learns,
                self.weights,
                self._selecting,
                self._budget,
                self.world,
                self.notify,
            )
            return found
        if self._budget is None:
            return own
        strengths = None if self.method.selection is None else self.method.selection.strengths()
        if strengths is None:
            return self._budget.kept(own, self.notify)
        found, self._selected = strongest_within_budget(self.method.layout, strengths, own, self._budget, self.notify)
        return found

    def select(self, folder: Path) -> Genotype:
        """The architecture found; by perturbation where the recipe asks for it, with its progress in `folder`."""
        if self._judged is None:
            return self.derive()
        selection = PerturbationSelection(
            self.recipe,
            self.supernet,
            self.method,
            self.objective,
            self.world,
            weights=self.weights,
            judged=self._judged,
            in_step=self.in_step,
            notify=self.notify,
        )
        own = self.method.derive()
        found, self._selected = selection(folder)
        self._selected["perturbation"]["own"] = own.to_dict()["cells"]
        return found

    def conclude(self, genotype: Genotype) -> dict[str, Any]:
        """What is measured once, after the last epoch, on the architecture found."""
        selection = self.method.selection
        results: dict[str, Any] = {**({} if selection is None else selection.findings()), **self._selected}
        for remark in self.method.remarks():
            self.notify(remark)
        if self.recipe.child_every and self.objective.supervised:
            plain, calibrated = (
                measure_child(self.supernet, genotype, self.held.epoch(0), self.world, recalibrate=batches)
                for batches in (None, self.weights.epoch(0))
            )
            results |= {
                **plain.named("child"),
                "child_loss": plain.loss,
                **calibrated.named("child", "_bn"),
                "child_split": self.recipe.measured_split,
            }
        if self._budget is not None:
            found, message = self._budget.verdict(genotype)
            results |= found
            if message is not None:
                self.notify(message)
        return results

    # State

    def state_dict(self) -> dict[str, Any]:
        shared, local = (
            {meter.key: meter.state_dict() for meter in self._meters if meter.key is not None and meter.is_local is own}
            for own in (False, True)
        )
        return {
            **{name: module.state_dict() for name, module in self._modules().items()},
            "weight_optimiser": self.step_state.weight_optimiser.state_dict(),
            "architecture_optimiser": self.step_state.architecture_optimiser.state_dict(),
            **shared,
            "plans": self._plans.state_dict(),
            "step": self.tally.step,
            "_local": {"meter": self.tally.sums, **local},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, module in self._modules().items():
            module.load_state_dict(state[name])
        load_optimiser(self.step_state.weight_optimiser, state["weight_optimiser"])
        load_optimiser(self.step_state.architecture_optimiser, state["architecture_optimiser"])
        self._plans.load_state_dict(state.get("plans"))
        self.tally.load(state["step"], state.get("_local"))
        for meter in self._meters:
            if meter.key is not None and not meter.is_local:
                meter.load_state_dict(state[meter.key])
            elif meter.key is not None and "_local" in state:
                meter.load_state_dict(state["_local"][meter.key])

    def failed(self) -> Failure | None:
        return self.tally.failed()

    def _modules(self) -> dict[str, nn.Module]:
        found: dict[str, nn.Module] = {"supernet": self.supernet, "method": self.method, "objective": self.objective}
        return found if self._resource is None else {**found, "resource": self._resource}

    # For forward passes outside of steps

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Cells and precision as in a step."""
        with self._cells(), computing_in(self.recipe.precision, self.world.device):
            yield

    def calibration_batches(self) -> Iterator[Batch]:
        """The training batches that BatchNorm is recalibrated on."""
        return islice(self.weights.epoch(0), self.recipe.evolution.norm_batches)


class PlanQueue:
    """The plans of captured steps: which candidates run, known on the host without waiting for the device.

    An eager step makes its plan at once. What a captured step runs is fixed when it is captured; its plan is made
    before it, from the reading that was queued before the previous step. Deviation (EnTranNAS §2.2): such a plan is one
    step old.
    """

    def __init__(self, planner: Planner | None) -> None:
        self._planner, self._readback = planner, Readback()
        self._before: Plan | None = None

    @torch.no_grad()
    def next(self) -> Plan | None:
        """The plan of the next step; None where the method needs none. The first one synchronises with the device."""
        reading = None if self._planner is None else self._planner.reading()
        if self._planner is None or reading is None:
            return None
        earlier = self._readback.exchange(reading)
        known = reading.cpu() if earlier is None else earlier
        plan = self._planner.plan(known)
        self._before = plan if self._before is None else self._planner.widen(plan, known, self._before)
        return self._before

    def state_dict(self) -> dict[str, Any]:
        """The reading that the next plan comes from and the plan before it: a resumed run follows the same plans."""
        return {"reading": self._readback.pending(), "before": self._before}

    def load_state_dict(self, state: dict[str, Any] | Tensor | None) -> None:
        if not isinstance(state, dict):  # checkpoints of older versions have only the reading
            state = {"reading": state, "before": None}
        self._readback.restore(state["reading"])
        self._before = state["before"]


def _step_state(
    recipe: SearchRecipe,
    supernet: Supernet,
    method: Method,
    objective: Objective,
    world: World,
    resource: ResourcePenalty | None,
) -> StepState:
    w, a = recipe.weights, recipe.architecture
    own = [p for module in (supernet, objective) for p in module.parameters() if p.requires_grad]
    weight_optimiser = sgd(own, world.device, lr=w.lr, momentum=w.momentum, weight_decay=w.weight_decay)
    optimiser = _architecture_optimiser(recipe, method, world)
    return StepState(
        supernet, method, objective, weight_optimiser, optimiser, world, w.clip, a.clip, resource, recipe.norms
    )


def _divides(recipe: SearchRecipe) -> bool:
    """Whether gradients are all that the ranks exchange in a step, each after a backward pass.

    Norms exchange their statistics in the middle of it, and the unrolled regime averages in between.
    """
    return recipe.norms == "local" and recipe.regime != "unrolled"


def _cells_and_engine(
    recipe: SearchRecipe, supernet: Supernet, method: Method, world: World, notify: Callable[[str], None]
) -> tuple[Callable[[], AbstractContextManager[None]], Engine]:
    """The context in which cells run, fused or module by module, and the engine of steps."""
    cells: Callable[[], AbstractContextManager[None]] = nullcontext if recipe.fused else modules_only
    num_plans = None if method.planner is None else method.planner.num_plans()
    if num_plans is not None and num_plans > MAX_GRAPHS:
        # A captured graph is worth its cost only where it is replayed; nor is a fused cell planned for every path.
        if recipe.engine != "eager" and world.device.type == "cuda":
            notify(f"CUDA graphs disabled: {num_plans:,} sampled paths rarely repeat")
        return modules_only, "eager"
    if cells is nullcontext:
        warn_if_unfused(recipe, supernet, world, notify)
    return cells, recipe.engine


def warn_if_unfused(recipe: SearchRecipe, supernet: Supernet, world: World, notify: Callable[[str], None]) -> None:
    """Warns where cells could be fused on this GPU and only Triton is missing."""
    wanted = recipe.fused and recipe.precision != "float64"
    if not wanted or world.device.type != "cuda" or can_fuse():
        return
    if any(isinstance(module, MixedCell) and module.has_fused_form() for module in supernet.modules()):
        notify(NO_TRITON)


def _architecture_optimiser(recipe: SearchRecipe, method: Method, world: World) -> torch.optim.Optimizer:
    w, a = recipe.weights, recipe.architecture
    if a.optimiser == "weights":
        return sgd(method.parameters(), world.device, lr=w.lr, momentum=w.momentum, weight_decay=w.weight_decay)
    groups = method.parameter_groups(a.lr, a.weight_decay)
    return adam(groups, world.device, lr=a.lr, betas=(a.beta1, a.beta2), weight_decay=a.weight_decay)


def _cycle(batches: Batches, first: int) -> Iterator[Draft]:
    """Drafts of batches `first`, `first` + 1, … of endless epochs: a function of the position only."""
    epoch, start = divmod(first, batches.num_batches)
    while True:
        yield from batches.drafts(epoch, start)
        epoch, start = epoch + 1, 0
