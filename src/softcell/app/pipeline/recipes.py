"""The searches and trainings of a run, as recipes: what was asked for and chosen, put into settings."""

from __future__ import annotations

from typing import Any

from softcell.app.pipeline.choose import Choice
from softcell.app.pipeline.plan import Plan
from softcell.arch import Genotype
from softcell.evaluate import TrainRecipe
from softcell.evaluate import resolve as resolve_training
from softcell.methods import METHODS, Method
from softcell.search import SearchRecipe, resolve

HOLDOUT = 0.1
"""Of the training images: watched during a training, never learnt from."""


def search_recipe(plan: Plan, choice: Choice, epochs: int) -> SearchRecipe:
    """The small recipe of the chosen method, as long as the time allows, within the limits asked for."""
    wishes, limits = plan.wishes, plan.wishes.limits()
    resource: dict[str, Any] = {"preset": "none"}
    if limits and issubclass(METHODS.get(choice.method), Method):
        resource |= {"max_params": limits.get("parameters"), "max_flops": limits.get("multiply_adds")}
        resource = {key: value for key, value in resource.items() if value is not None}
        resource["network"] = choice.network
    return resolve(
        {
            "method": choice.method,
            "space": choice.space,
            "data": str(plan.data),
            "data_root": None if wishes.is_folder() else wishes.data_root,
            "image_size": choice.image_size,
            "scale": "small",
            "epochs": epochs,
            "batch_size": choice.batch_size,
            "cutout": choice.shape[1] // 4,
            "child_every": 0,
            "seed": wishes.seed,
            "device": wishes.device,
            "threads": wishes.threads,
            "space_settings": choice.search_space,
            "resource": resource,
        }
    )


def train_recipe(plan: Plan, choice: Choice, genotype: Genotype, settings: dict[str, Any], epochs: int) -> TrainRecipe:
    """The same for every network that is compared, but for the network's own settings."""
    wishes = plan.wishes
    return resolve_training(
        genotype,
        {
            "recipe": "small",
            "data": str(plan.data),
            "data_root": None if wishes.is_folder() else wishes.data_root,
            "image_size": choice.image_size,
            "space_settings": settings,
            "epochs": epochs,
            "batch_size": choice.batch_size,
            "lr": 0.05 * max(0.25, min(2.0, choice.batch_size / 64)),
            "cutout": choice.shape[1] // 4,
            "auxiliary": 0.0,
            "holdout": HOLDOUT,
            "seed": wishes.seed,
            "device": wishes.device,
            "threads": wishes.threads,
        },
    )
