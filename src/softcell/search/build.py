"""From a recipe and its data to the task that the loop runs: supernet, method, objective, batches, penalty, budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from softcell.arch import Rule, sample
from softcell.data import Batches, Dataset
from softcell.data.batches import Feeds
from softcell.data.hashing import permutation
from softcell.engine.runfolder import notifier
from softcell.engine.session import Session
from softcell.engine.task import OnEvent
from softcell.engine.timing import choose_precision
from softcell.errors import UserError
from softcell.methods import METHODS, Method, UntrainedSampler
from softcell.nn.objective import ContextAutoRegression, Objective
from softcell.search.budget import Budget, counted_network
from softcell.search.guide import make_objective, supernet_maps, supernet_stages
from softcell.search.perturb import check_perturbable
from softcell.search.recipe import SearchRecipe, unmet
from softcell.search.resource import ResourcePenalty, check_steerable, with_latencies
from softcell.search.samplers import IndependentTask, UntrainedTask
from softcell.search.selection import check_selectable
from softcell.search.task import SearchTask
from softcell.settings import build
from softcell.spaces import Space, build_space
from softcell.spaces.costs import CostTables, count_candidates

AnyTask = SearchTask | IndependentTask | UntrainedTask


def with_precision(
    recipe: SearchRecipe, dataset: Dataset, parts: Mapping[str, Any], session: Session, on_event: OnEvent | None
) -> SearchRecipe:
    """The recipe with `precision` "auto" replaced by the fastest one, which is timed."""
    if recipe.precision != "auto":
        return recipe

    def make(precision: str) -> AnyTask:
        return build_task(replace(recipe, precision=precision), dataset, parts, session, None)  # type: ignore[arg-type]

    job = f"search {recipe.method}, {recipe.regime}, {recipe.space}, batch {recipe.batch_size}, {dataset.shape}"
    chosen = choose_precision(job, session.world, make, notifier(on_event, session.world))
    return replace(recipe, precision=chosen)  # type: ignore[arg-type]


def build_task(
    recipe: SearchRecipe, dataset: Dataset, parts: Mapping[str, Any], session: Session, on_event: OnEvent | None
) -> AnyTask:
    """The task of a complete recipe.

    parts: int64 [n] indices of training images by split. on_event: receives notes; None for none.
    """
    world = session.world
    kind, space = METHODS.get(recipe.method), build_space(recipe.space, recipe.space_settings)
    layout = space.layout()
    settings: Any = build(kind.Settings, recipe.method_settings, f"method {recipe.method}")
    feeds = Feeds(
        dataset, recipe.batch_size, recipe.seed, session.device, session.dtype, rank=world.rank, world=world.size
    )
    augment = replace(dataset.augment, cutout=recipe.cutout)
    weights = feeds.training(parts["weights"], augment)
    held = feeds.plain(dataset.train, parts[recipe.measured_split])

    notify = notifier(on_event, world)
    objective: Objective
    if not issubclass(kind, Method):
        if recipe.objective == "context":
            raise UserError(
                f"method {recipe.method!r} compares networks by accuracy, but context auto-regression has none; set "
                "objective=classify and pretrain.epochs=0"
            )
        if recipe.select.is_on:
            raise UserError(
                f"select.by={recipe.select.by} (--select) removes candidates from a trained supernet, but method "
                f"{recipe.method!r} trains architectures one by one; leave it out, or search with another method"
            )
        for name in _of_supernets(recipe):
            notify(f"`{name}` is ignored: {recipe.method} has no supernet")
        sampler = kind(layout, settings, recipe.seed)
        budget = _budget_of_draws(recipe, dataset, notify)
        if isinstance(sampler, UntrainedSampler):
            if recipe.guide.teacher is not None:
                notify(f"`guide` is ignored: {recipe.method} trains nothing")
            plain = feeds.plain(dataset.train, parts["weights"])
            return UntrainedTask(
                recipe, space, sampler, dataset.num_classes, world, weights=plain, notify=notify, budget=budget
            )

        def stages() -> list[tuple[int, int]]:
            with torch.device("meta"):
                network = space.network(sample(layout, 0), dataset.shape, dataset.num_classes).eval()
                return [(m.shape[-2], m.shape[-1]) for m in network.features(torch.zeros(1, *dataset.shape))]

        objective, about = make_objective(recipe.guide, stages, dataset.shape, session)
        return IndependentTask(
            recipe,
            space,
            sampler,
            objective,
            dataset.shape,
            dataset.num_classes,
            session,
            weights=weights,
            held=held,
            notify=notify,
            about=about,
            budget=budget,
        )
    for name in unmet(kind, type(space), recipe.scale):
        reason = "keeps its own" if name in recipe.space_settings else "has no such setting"
        notify(f"`space.{name}` of {recipe.method}'s recipe is ignored: space {recipe.space!r} {reason}")
    supernet = session.place(space.supernet(dataset.shape, dataset.num_classes))
    method = session.place(kind.for_supernet(settings, supernet))
    if recipe.select.is_on:
        check_perturbable(layout, method)
    resource, budget = _resource_of(recipe, space, method, dataset, session, notify)
    if recipe.objective == "context":
        maps = supernet_maps(supernet, method)
        objective, about = session.place(ContextAutoRegression(maps, dataset.shape)), {}
    else:
        objective, about = make_objective(
            recipe.guide, lambda: supernet_stages(supernet, method), dataset.shape, session
        )
    return SearchTask(
        recipe,
        supernet,
        method,
        objective,
        world,
        about=about,
        weights=weights,
        # With split.validation=0 both read the same images: one stream would give both the same batches.
        validation=feeds.training(parts.get("validation", parts["weights"]), augment, stream=1),
        held=held,
        selecting=_selecting(recipe, method, feeds, dataset, parts, held),
        judged=_judged(recipe, feeds, dataset, parts) if recipe.select.is_on else None,
        notify=notify,
        resource=resource,
        budget=budget,
    )


def _selecting(
    recipe: SearchRecipe, method: Method, feeds: Feeds, dataset: Dataset, parts: Mapping[str, Tensor], held: Batches
) -> Batches:
    """The validation split without augmentation, for methods that derive from a pass over it and for evolution."""
    selects = method.selection is not None or recipe.evolution.is_on
    if recipe.measured_split != "held" or not selects:
        return held
    if "validation" not in parts:
        raise UserError(
            "the architecture is selected on the `validation` split, so `split` must have one in addition to `held`"
        )
    return feeds.plain(dataset.train, parts["validation"])


def _judged(recipe: SearchRecipe, feeds: Feeds, dataset: Dataset, parts: Mapping[str, Tensor]) -> Batches:
    """The validation images that a selection by perturbation measures on, in a random order that the seed determines.

    BatchNorm may normalise by each batch, so no batch may have a single class or be much smaller than the others.
    """
    if "validation" not in parts:
        raise UserError(
            "the architecture is selected on the `validation` split, so `split` must have one in addition to `held`"
        )
    own = parts["validation"]
    own = own[permutation(recipe.seed, 0, len(own), "select")][: recipe.select.images or None]
    batches = feeds.plain(dataset.train, own)
    if recipe.select.norms == "batch" and len(own) > batches.batch_size:
        batches = feeds.plain(dataset.train, own[: len(own) // batches.batch_size * batches.batch_size])
    return batches


def _of_supernets(recipe: SearchRecipe) -> list[str]:
    """Settings of supernets that were given."""
    given = {
        "drop_path": recipe.drop_path > 0,
        "child_every": recipe.child_every > 0,
        "evolution": recipe.evolution.is_on,
    }
    return [name for name, is_given in given.items() if is_given]


def _resource_of(
    recipe: SearchRecipe,
    space: Space,
    method: Method,
    dataset: Dataset,
    session: Session,
    notify: Callable[[str], None],
) -> tuple[ResourcePenalty | None, Budget | None]:
    """The resource penalty and the budgets of a recipe; None where it has none."""
    settings = recipe.resource
    if not settings.is_on:
        return None, None
    selection = method.selection
    if selection is None:
        steerable = any(p.requires_grad for p in method.probabilities().values())
    else:
        steerable = selection.accepts_penalty
    selects = selection is not None and selection.strengths() is not None and bool(settings.budgets())
    penalised = steerable or settings.eta > 0 or not (recipe.evolution.is_on or selects)
    if penalised and not steerable:
        check_steerable(method.probabilities(), recipe.method)
    if penalised and settings.estimator != "expectation" and not method.is_distribution:
        raise UserError(
            f"`resource.estimator={settings.estimator}` draws one candidate per edge, but {recipe.method} keeps any "
            "number of them; use resource.estimator=expectation"
        )
    costs = _costs(recipe, space, dataset)
    # Where no gradient reaches the architecture, evolution or the method's own selection keeps to the budgets.
    penalty = session.place(ResourcePenalty(settings, costs)) if penalised else None
    if not settings.budgets():
        return penalty, None
    if selects and not recipe.evolution.is_on:
        check_selectable(space.layout(), settings.budgets())
    budget = _budget(recipe, penalty, dataset)
    budget.warn_of_other_sizes(notify)
    # Evolution breeds by the space's own rule.
    for rule in [method.rule, None] if recipe.evolution.is_on and method.rule is not None else [method.rule]:
        _find_cheapest(budget, recipe, dataset, rule)
    budget.check_reach(notify)
    return penalty, budget


def _budget_of_draws(recipe: SearchRecipe, dataset: Dataset, notify: Callable[[str], None]) -> Budget | None:
    """The budget that proposed architectures must meet. A penalty is rejected: a sampler has no gradient for it."""
    settings = recipe.resource
    if settings.preset != "none" or settings.weight is not None:
        raise UserError(
            f"a resource penalty works through a method's probabilities, and {recipe.method!r} has none; leave out "
            "`resource.preset` (--resource) and `resource.weight`, or pass a budget instead (--max-params, "
            "--max-flops, --max-latency), which every drawn architecture then meets"
        )
    if not settings.budgets():
        return None
    budget = _budget(recipe, None, dataset)
    budget.warn_of_other_sizes(notify)
    _find_cheapest(budget, recipe, dataset, None)
    return budget


def _budget(recipe: SearchRecipe, penalty: ResourcePenalty | None, dataset: Dataset) -> Budget:
    trained, shape, num_classes = counted_network(recipe, dataset.shape, dataset.num_classes)
    return Budget(recipe.resource, penalty, trained, shape, num_classes, recipe.epochs)


def _find_cheapest(budget: Budget, recipe: SearchRecipe, dataset: Dataset, rule: Rule | None) -> None:
    """At the sizes of the network that the budget applies to: at others, another candidate may be the cheapest."""
    trained, shape, num_classes = counted_network(recipe, dataset.shape, dataset.num_classes)
    costs = count_candidates(trained, shape, num_classes, trained=True)
    table = recipe.resource.latency_table
    budget.find_cheapest(trained.layout(), costs if table is None else with_latencies(costs, table), rule)


def _costs(recipe: SearchRecipe, space: Space, dataset: Dataset) -> CostTables:
    settings = recipe.resource
    printed = settings.pooling == "printed"
    costs = count_candidates(space, dataset.shape, dataset.num_classes, printed_pooling=printed)
    return costs if settings.latency_table is None else with_latencies(costs, settings.latency_table)
