"""What a search is told of costs, by its recipe: the penalty that presses on them, and the budget that must be met."""

from __future__ import annotations

from collections.abc import Callable

from softcell.arch import Rule
from softcell.arch.cost import CostTables
from softcell.data import Dataset
from softcell.engine.session import Session
from softcell.errors import UserError
from softcell.methods import Method
from softcell.search.budget import Budget
from softcell.search.latencies import with_latencies
from softcell.search.recipe import SearchRecipe
from softcell.search.resource import ResourcePenalty, check_steerable
from softcell.search.selection import check_selectable
from softcell.search.within import counted_network
from softcell.spaces import Space
from softcell.spaces.costs import count_candidates


def resource_of(
    recipe: SearchRecipe,
    space: Space,
    method: Method,
    dataset: Dataset,
    session: Session,
    notify: Callable[[str], None],
) -> tuple[ResourcePenalty | None, Budget | None]:
    """The resource penalty, and the budgets that drive it, where the recipe asks for them."""
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
        _look_for_cheapest(budget, recipe, dataset, rule)
    budget.check_reach(notify)
    return penalty, budget


def budget_of_draws(
    recipe: SearchRecipe, space: Space, dataset: Dataset, notify: Callable[[str], None]
) -> Budget | None:
    """The budget that proposed architectures must meet. Nothing can be pushed: a penalty is refused."""
    settings = recipe.resource
    if settings.preset != "none" or settings.weight is not None:
        raise UserError(
            f"a resource penalty works through a method's probabilities, and {recipe.method!r} has none; leave out "
            "`resource.preset` (--resource) and `resource.weight`, or state a budget instead (--max-params, "
            "--max-flops, --max-latency), which every architecture drawn then meets"
        )
    if not settings.budgets():
        return None
    budget = _budget(recipe, None, dataset)
    budget.warn_of_other_sizes(notify)
    _look_for_cheapest(budget, recipe, dataset, None)
    return budget


def _budget(recipe: SearchRecipe, penalty: ResourcePenalty | None, dataset: Dataset) -> Budget:
    trained, shape, num_classes = counted_network(recipe, dataset.shape, dataset.num_classes)
    return Budget(recipe.resource, penalty, trained, shape, num_classes, recipe.epochs)


def _look_for_cheapest(budget: Budget, recipe: SearchRecipe, dataset: Dataset, rule: Rule | None) -> None:
    """At the sizes of the network that is bounded: at others another candidate may be the cheapest."""
    trained, shape, num_classes = counted_network(recipe, dataset.shape, dataset.num_classes)
    costs = count_candidates(trained, shape, num_classes, trained=True)
    table = recipe.resource.latency_table
    budget.look_for_cheapest(trained.layout(), costs if table is None else with_latencies(costs, table), rule)


def _costs(recipe: SearchRecipe, space: Space, dataset: Dataset) -> CostTables:
    settings = recipe.resource
    printed = settings.pooling == "printed"
    costs = count_candidates(space, dataset.shape, dataset.num_classes, printed_pooling=printed)
    return costs if settings.latency_table is None else with_latencies(costs, settings.latency_table)
