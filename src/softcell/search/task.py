"""A search over a supernet as a task of the engine's loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from softcell.arch import Genotype, Mix
from softcell.arch.relax import entropy
from softcell.data import Batch, Batches
from softcell.data.batches import Draft
from softcell.engine.capture import MAX_GRAPHS, CapturedStep, once, prepare_step
from softcell.engine.distributed import World, average_, broadcast_module, sum_
from softcell.engine.metrics import Failure, Meter, Tally
from softcell.engine.optim import adam, load_optimiser, rate_at, set_lr, sgd
from softcell.engine.session import computing_in, in_precision
from softcell.methods import Method, Pass
from softcell.nn.guide import Guided
from softcell.nn.objective import Objective
from softcell.search.budget import Budget
from softcell.search.child import measure_child, norms_measured_anew
from softcell.search.collapse import SKIP, CollapseWatch, share
from softcell.search.evolution import select
from softcell.search.genotypes import line
from softcell.search.guide import probe, read_gauges
from softcell.search.hypergradient import Unrolling
from softcell.search.perturb import PerturbationSelection
from softcell.search.plans import Plans
from softcell.search.recipe import SearchRecipe
from softcell.search.resource import ResourcePenalty
from softcell.search.selection import strongest_within_budget
from softcell.search.steps import Players, bilevel, single_level, unrolled
from softcell.search.validation import ANEW, Validation, doubt
from softcell.spaces import Bound, Supernet
from softcell.spaces.cell import MixedCell
from softcell.spaces.execution import can_fuse, modules_only


class SearchTask:
    """Supernet, method and optimisers, stepped by the recipe's regime.

    `weights` feeds the weights, `validation` the architecture (unless single-level), `held` measures accuracy without
    augmentation. `looked` is the validation split for methods that look at it to derive, often the same as `held`.
    `judged` is what a selection by perturbation measures on.
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
        looked: Batches,
        judged: Batches | None = None,
        notify: Callable[[str], None],
        resource: ResourcePenalty | None = None,
        budget: Budget | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.recipe, self.world, self.about = recipe, world, dict(about or {})
        self._resource, self._budget, self._notify = resource, budget, notify
        supernet.use_drop_path(recipe.drop_path)
        self.supernet, self.method, self.objective = supernet, method, objective
        self._weights, self._validation, self._held = weights, validation, held
        self._looked, self._judged = looked, judged
        for module in (supernet, method, objective):
            broadcast_module(module, world)
        w, a = recipe.weights, recipe.architecture
        own = [p for module in (supernet, objective) for p in module.parameters() if p.requires_grad]
        self.players = Players(
            supernet,
            method,
            objective,
            sgd(own, world.device, lr=w.lr, momentum=w.momentum, weight_decay=w.weight_decay),
            _architecture_optimiser(recipe, method, world),
            world,
            w.clip,
            a.clip,
            resource,
        )
        self._selection: dict[str, Any] = {}
        self._notify_overfit = once(notify)
        self._tally = Tally(world.device)
        self._collapse = CollapseWatch(recipe.collapse, method.layout, notify, recipe.epochs)
        learn = in_precision(self._learn, recipe.precision, world.device)
        self._cells: Callable[[], AbstractContextManager[None]] = nullcontext if recipe.fused else modules_only
        engine = recipe.engine
        kinds = None if method.planner is None else method.planner.num_plans()
        if kinds is not None and kinds > MAX_GRAPHS:
            # A recording pays where it is replayed.
            if engine != "eager" and world.device.type == "cuda":
                notify(f"steps draw one of {kinds:,} paths, of which hardly one comes twice: they are not recorded")
            engine, self._cells = "eager", modules_only  # nor is a fused cell planned for every path
        if self._cells is nullcontext:
            explain_modules(recipe, supernet, world, notify)
        notify_once = once(notify)
        self._run = prepare_step(learn, engine, world, notify_once)
        self._plans, self._number = Plans(method.planner), 0
        measured = [held] if looked is held else [held, looked]
        self._measure, *others = (
            Validation(supernet, own, recipe.engine, world, self._surroundings, notify_once) for own in measured
        )
        self._look = others[0] if others else None

    @property
    def num_epochs(self) -> int:
        return self.recipe.epochs

    def steps_in(self, epoch: int) -> int:
        return self._weights.num_batches

    def begin_epoch(self, epoch: int) -> None:
        self.supernet.train()
        self.objective.train()
        self.supernet.drop_path.set_fraction(epoch / self.num_epochs)
        self.method.begin_epoch(epoch / max(1, self.num_epochs - 1))
        for tables in self._observed().values():
            for sums in tables.values():
                sums.zero_()
        w = self.recipe.weights
        rate = rate_at(epoch, self.num_epochs, w.lr, w.lr_min, w.schedule, warmup=w.warmup)
        set_lr(self.players.weight_optimiser, rate)
        if self.recipe.architecture.optimiser == "weights":
            set_lr(self.players.architecture_optimiser, rate)
        self._tally.begin_epoch()
        for sums in self.objective.gauges().values():
            sums.zero_()

    def batches(self, epoch: int, start: int) -> Iterator[Draft]:
        """Drafts of training batches, each with that of the next validation batch where the regime wants one."""
        self._number = epoch * self._weights.num_batches + start
        train = self._weights.drafts(epoch, start)
        if self.recipe.regime == "single-level":
            return train
        first = epoch * self._weights.num_batches + start
        pairs = zip(train, _cycle(self._validation, first), strict=False)
        return ((*own, *held) for own, held in pairs)

    def pair(self, drafts: Draft) -> tuple[Batch, Batch | None]:
        """The training batch and, unless single-level, the validation batch of what `batches` yields."""
        size = self._weights.draft_size
        own, held = drafts[:size], drafts[size:]
        return self._weights.finish(*own), self._validation.finish(*held) if held else None

    def step(self, batch: Draft) -> None:
        planner = self.method.planner
        plan = None if planner is None else planner.draw(self._number)
        self._number += 1
        captured = isinstance(self._run, CapturedStep)
        if captured and plan is None:
            plan = self._plans.next()
        with nullcontext() if planner is None else planner.following(plan):
            if isinstance(self._run, CapturedStep):
                self._run(*batch, key=plan)
            else:
                self._run(*batch)

    def _learn(self, *drafts: Tensor) -> None:
        """One step of the regime on a training batch and, unless single-level, a validation batch.

        Everything here happens on the device, from the gathering of images on, so that it can be recorded.
        """
        batch, other = self.pair(drafts)
        others: list[Tensor] = []
        with self._cells():
            if other is None:
                result = single_level(self.players, batch.images, batch.labels)
            else:
                train, validation = (batch.images, batch.labels), (other.images, other.labels)
                if self.recipe.regime == "unrolled":
                    settings = Unrolling(self.recipe.unrolled.exact, self.recipe.unrolled.epsilon)
                    result, held = unrolled(self.players, train, validation, settings)
                else:
                    result, held = bilevel(self.players, train, validation)
                others.append(held.loss)
        self._tally.update(result.loss, result.logits, batch.labels, *others)

    def end_epoch(self, epoch: int) -> dict[str, Any]:
        trained = self._tally.read(self.world)
        metrics: dict[str, Any] = {
            "train_loss": trained.loss,
            **(trained.named("train") if self.objective.supervised else {}),
            "lr": float(self.players.weight_optimiser.param_groups[0]["lr"]),
        }
        metrics |= {name: float(value) for name, value in self.method.gauges().items()}
        metrics |= read_gauges(self.objective, self.world)
        if epoch == 0 and isinstance(self.objective, Guided):
            supernet, method = self.supernet, self.method
            with self._surroundings():  # as in a step, whose kernels are compiled
                metrics |= probe(
                    self.objective,
                    supernet,
                    lambda: Bound(supernet, method.relax()),
                    self.players.architecture(),
                    self._weights.epoch(0),
                    self.world,
                    self._notify,
                )
        last = epoch + 1 == self.num_epochs
        readings: dict[str, Any] = {}
        validates = last or (epoch + 1) % self.recipe.validate_every == 0
        selection = self.method.selection
        is_read = selection is None or last or (validates and not selection.last_epoch_only)
        if validates:
            metrics |= self._validate(last)
            found = {} if selection is None else selection.records()
            readings = {name: {"epoch": epoch, **row} for name, row in found.items()}
            many = self.method.many_cells
            text = doubt(metrics.get("train_accuracy"), metrics.get("val_accuracy"), many=many)
            # Early on running statistics fit no method's cells yet; those of many cells will fit none later either.
            if text is not None and (last or many):
                self._notify_overfit(text)
        genotype = self.method.derive()
        every = self.recipe.child_every if self.objective.supervised else 0
        if every and (last or (epoch + 1) % every == 0):
            child = measure_child(self.supernet, genotype, self._held.epoch(0), self.world)
            metrics |= {**child.named("child"), "child_loss": child.loss}
        metrics |= self._costs(epoch, genotype)
        probabilities = {name: p.detach().double().cpu() for name, p in self.method.probabilities().items()}
        metrics["entropy"] = _mean_entropy(list(probabilities.values()))
        for name, table in probabilities.items():
            metrics[f"entropy_{name}"] = _mean_entropy([table])
            metrics[f"skip_share_{name}"] = share(genotype.cells[name], SKIP, self.method.layout.table(name))
        stop = self._collapse.look(epoch, genotype)
        if stop is not None:
            metrics["_stop"] = stop
        metrics["_records"] = {
            "architecture": line(
                epoch,
                genotype,
                tables={name: table.tolist() for name, table in probabilities.items()},
                **({} if is_read else {"read": False}),
            ),
            **self._diagnosed(epoch),
            **readings,
        }
        return metrics

    def derive(self) -> Genotype:
        """The architecture found; the last one from before a collapse, or within the budget, where it has left that."""
        own = self._collapse.kept or self.method.derive()
        if not self.recipe.evolution.is_on:
            strengths = None if self.method.selection is None else self.method.selection.strengths()
            if self._budget is not None and strengths is not None:
                found, self._selection = strongest_within_budget(
                    self.method.layout, strengths, own, self._budget, self._notify
                )
                return found
            return own if self._budget is None else self._budget.kept(own, self._notify)
        # What a method learned takes part; one that learns no architecture (SPOS) leaves the choice to chance.
        learned = self.method.learns
        found, self._selection = select(
            self.recipe,
            self.supernet,
            own,
            learned,
            self._weights,
            self._looked,
            self._budget,
            self.world,
            self._notify,
        )
        return found

    def select(self, folder: Path) -> Genotype:
        """The architecture found; selected by perturbation where the recipe asks for it, which `folder` remembers."""
        if self._judged is None:
            return self.derive()
        selection = PerturbationSelection(
            self.recipe,
            self.supernet,
            self.method,
            self.objective,
            self.world,
            weights=self._weights,
            judged=self._judged,
            surroundings=self._surroundings,
            recalibrating=self._surroundings,
            notify=self._notify,
        )
        own = self.method.derive()
        found, self._selection = selection(folder)
        self._selection["perturbation"]["own"] = own.to_dict()["cells"]
        return found

    def conclude(self, genotype: Genotype) -> dict[str, Any]:
        """What is measured once, after the last epoch, on the architecture found."""
        selection = self.method.selection
        results: dict[str, Any] = {**({} if selection is None else selection.findings()), **self._selection}
        for remark in self.method.remarks():
            self._notify(remark)
        if self.recipe.child_every and self.objective.supervised:
            plain = measure_child(self.supernet, genotype, self._held.epoch(0), self.world)
            anew = measure_child(
                self.supernet, genotype, self._held.epoch(0), self.world, reestimate=self._weights.epoch(0)
            )
            results |= {
                **plain.named("child"),
                "child_loss": plain.loss,
                **anew.named("child", "_bn"),
                "child_split": self.recipe.measured_split,
            }
        if self._budget is not None:
            found, message = self._budget.verdict(genotype)
            results |= found
            if message is not None:
                self._notify(message)
        return results

    def state_dict(self) -> dict[str, Any]:
        return {
            **{name: module.state_dict() for name, module in self._modules().items()},
            "weight_optimiser": self.players.weight_optimiser.state_dict(),
            "architecture_optimiser": self.players.architecture_optimiser.state_dict(),
            "collapse": self._collapse.state_dict(),
            "budget": None if self._budget is None else self._budget.state_dict(),
            "plans": self._plans.state_dict(),
            "step": self._tally.step,
            "_local": {
                "meter": self._tally.sums,
                "diagnostics": self._observed(),
                "objective": self.objective.gauges(),
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, module in self._modules().items():
            module.load_state_dict(state[name])
        load_optimiser(self.players.weight_optimiser, state["weight_optimiser"])
        load_optimiser(self.players.architecture_optimiser, state["architecture_optimiser"])
        self._collapse.load_state_dict(state["collapse"])
        if self._budget is not None:
            self._budget.load_state_dict(state["budget"])
        self._plans.load_state_dict(state.get("plans"))
        self._tally.load(state["step"], state.get("_local"))
        if "_local" in state:
            for name, sums in self.objective.gauges().items():
                sums.copy_(state["_local"]["objective"][name])
            for name, tables in self._observed().items():
                for table, sums in tables.items():
                    sums.copy_(state["_local"]["diagnostics"][name][table])

    def failed(self) -> Failure | None:
        return self._tally.failed()

    def _modules(self) -> dict[str, nn.Module]:
        found: dict[str, nn.Module] = {"supernet": self.supernet, "method": self.method, "objective": self.objective}
        return found if self._resource is None else {**found, "resource": self._resource}

    def _costs(self, epoch: int, genotype: Genotype) -> dict[str, float]:
        """Expected costs of the architecture's distribution; with a budget, the derived network's own."""
        if self._resource is None:
            return {}
        expected = self._resource.expected(self.method.occupancy())
        metrics = {f"expected_{kind}": value for kind, value in expected.items()}
        return metrics if self._budget is None else metrics | self._budget.end_epoch(epoch, genotype)

    def _observed(self) -> dict[str, dict[str, Tensor]]:
        return {} if self.method.observer is None else self.method.observer.sums()

    def _diagnosed(self, epoch: int) -> dict[str, Any]:
        """A line per record of the method's diagnostics: means per step over all ranks, and their sums per choice."""
        if self.recipe.regime == "unrolled":  # its gradients are not those of one backward pass
            return {}
        records = {}
        for name, tables in self._observed().items():
            means = {table: sums.double() / self.steps_in(epoch) for table, sums in tables.items()}
            average_(means.values(), self.world)
            records[name] = {
                "epoch": epoch,
                "tables": {table: mean.tolist() for table, mean in means.items()},
                "choices": {table: mean.sum(1).tolist() for table, mean in means.items()},
            }
        return records

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        with self._cells(), computing_in(self.recipe.precision, self.world.device):
            yield

    def _validate(self, last: bool) -> dict[str, Any]:
        """Accuracy of the supernet itself, under the mix of the moment, on the validation split, as it is searched."""
        if not self.objective.supervised:
            return self._validate_objective(last)
        with torch.no_grad():
            passes = self._passes(last)
            whole = passes[0].mix if passes and passes[0].calibration is None else None
            if whole is not None and self._look is not None:
                self._look(whole)
            mix = whole if whole is not None and self._look is None else self.method.relax()
            held = self._measure(mix)
            anew = self._measure_anew(mix) if last and self.method.many_cells and whole is None else {}
            self._look_in_turn(passes)
            self._sum_up(passes)
        return {
            "val_loss": held.loss,
            **held.named("val"),
            "val_split": self.recipe.measured_split,
            "val_count": held.count,
            **anew,
        }

    def _measure_anew(self, mix: Mix) -> dict[str, float]:
        """The same with batch-norm's statistics of this very mix, over a few training batches."""
        batches = islice(self._weights.epoch(0), self.recipe.evolution.norm_batches)
        with norms_measured_anew(self.supernet, mix, batches, self._surroundings):
            return {ANEW: self._measure(mix).accuracy}

    @torch.no_grad()
    def _validate_objective(self, last: bool) -> dict[str, Any]:
        """The objective's own loss on the validation split; what it draws is the same each time and disturbs nothing.

        A method that derives from a pass over the split makes it here.
        """
        device, passes = self.world.device, self._passes(last)
        mix = passes[0].mix if passes and passes[0].calibration is None else self.method.relax()
        meter = Meter().to(device)
        self.supernet.eval()
        self.objective.eval()
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), self._surroundings():
            torch.manual_seed(self.recipe.seed)
            for batch in self._held.epoch(0):
                if batch.labels.shape[0]:
                    loss = self.objective(Bound(self.supernet, mix), batch.images, batch.labels).loss
                    meter.update(loss, None, batch.labels)
        self._look_in_turn(passes)
        self.supernet.train()
        self.objective.train()
        self._sum_up(passes)
        measured = meter.read(self.world)
        return {"val_loss": measured.loss, "val_split": self.recipe.measured_split, "val_count": measured.count}

    def _passes(self, last: bool) -> Sequence[Pass]:
        selection = self.method.selection
        return selection.passes() if selection is not None and (last or not selection.last_epoch_only) else ()

    def _look_in_turn(self, passes: Sequence[Pass]) -> None:
        """The passes that recalibrate BatchNorm first."""
        pairs = [(mix, calibration) for mix, calibration in passes if calibration is not None]
        if pairs:
            self._notify(f"selection in {len(pairs)} passes over the validation split")
        for mix, calibration in pairs:
            batches = islice(self._weights.epoch(0), self.recipe.evolution.norm_batches)
            with norms_measured_anew(self.supernet, calibration, batches, self._surroundings):
                (self._look or self._measure)(mix)

    def _sum_up(self, passes: Sequence[Pass]) -> None:
        if passes and self.method.selection is not None:
            for sums in self.method.selection.sums():
                sum_(sums, self.world)


def explain_modules(recipe: SearchRecipe, supernet: Supernet, world: World, notify: Callable[[str], None]) -> None:
    """Says why cells that could be fused on this GPU are not, where all that is missing is Triton."""
    wanted = recipe.fused and recipe.precision != "float64" and world.size == 1
    if not wanted or world.device.type != "cuda" or can_fuse():
        return
    if any(isinstance(module, MixedCell) and module.has_fused_form() for module in supernet.modules()):
        notify(
            "Triton is not installed: cells run module by module, several times slower than fused ones "
            "(`pip install triton`, on Linux)"
        )


def _architecture_optimiser(recipe: SearchRecipe, method: Method, world: World) -> torch.optim.Optimizer:
    w, a = recipe.weights, recipe.architecture
    if a.optimiser == "weights":
        return sgd(method.parameters(), world.device, lr=w.lr, momentum=w.momentum, weight_decay=w.weight_decay)
    groups = method.parameter_groups(a.lr, a.weight_decay)
    return adam(groups, world.device, lr=a.lr, betas=(a.beta1, a.beta2), weight_decay=a.weight_decay)


def _cycle(batches: Batches, first: int) -> Iterator[Draft]:
    """Drafts of batches `first`, `first` + 1, … of an endless run of epochs: a function of the position alone."""
    epoch, start = divmod(first, batches.num_batches)
    while True:
        yield from batches.drafts(epoch, start)
        epoch, start = epoch + 1, 0


def _mean_entropy(tables: list[torch.Tensor]) -> float:
    """Mean entropy in nats over the choices of all tables."""
    return float(torch.cat([entropy(table) for table in tables]).mean())
