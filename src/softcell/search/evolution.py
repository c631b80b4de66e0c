"""Selection by evolution on a trained supernet, whatever method trained it (SPOS, §3.3).

An architecture is as good as its child: the derived network with the supernet's weights, batch-norm estimated anew on
some training batches, measured on the validation split.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from softcell.arch import Genotype
from softcell.arch.evolve import evolve
from softcell.data import Batches
from softcell.engine.distributed import World
from softcell.errors import UserError
from softcell.search.budget import Budget
from softcell.search.child import measure_child
from softcell.search.recipe import SearchRecipe
from softcell.spaces import Supernet


def select(
    recipe: SearchRecipe,
    supernet: Supernet,
    own: Genotype,
    joins: bool,
    weights: Batches,
    held: Batches,
    budget: Budget | None,
    world: World,
    notify: Callable[[str], None],
) -> tuple[Genotype, dict[str, Any]]:
    """The best architecture found within the budgets, and what is worth keeping of how it was found.

    own: what the method itself derives, measured in the same way for comparison; one of the first generation where it
        `joins`: what was learned is then never given up for less.
    """
    settings = recipe.evolution

    def score(genotype: Genotype) -> float:
        batches = islice(weights.epoch(0), settings.norm_batches)
        return measure_child(supernet, genotype, held.epoch(0), world, reestimate=batches).accuracy

    def allowed(genotype: Genotype) -> bool:
        return budget is None or budget.is_met(genotype)

    def note(generation: int, best: float, scored: int) -> None:
        notify(
            f"evolution, generation {generation + 1} of {settings.generations}: best {best:.2%} of {scored} measured"
        )

    starts, first = [] if budget is None else budget.cheapest, [own] if joins else []
    try:
        found = evolve(supernet.layout, settings, score, allowed, recipe.seed, starts, first, note)
    except UserError as error:
        notify(f"{error}; selecting without limits")
        found = evolve(supernet.layout, settings, score, lambda genotype: True, recipe.seed, (), first, note)
    about: dict[str, Any] = {
        "split": "validation",
        "accuracy": found.score,
        "accuracy_of_own": found.scored[own] if own in found.scored else score(own),
        "own": own.to_dict()["cells"],
        "measured": len(found.scored),
        "mean_accuracy": sum(found.scored.values()) / len(found.scored),
        "best_by_generation": list(found.history),
    }
    return found.best, {"evolution": about}
