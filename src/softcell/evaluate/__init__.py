"""What comes after a search: training from scratch and counting."""

from softcell.evaluate.recipe import RECIPES, TrainRecipe, resolve
from softcell.evaluate.train import TrainResult, load_network, stored_training, train
from softcell.spaces.costs import Cost, count_genotype, count_module

__all__ = [
    "RECIPES",
    "Cost",
    "TrainRecipe",
    "TrainResult",
    "count_genotype",
    "count_module",
    "load_network",
    "resolve",
    "stored_training",
    "train",
]
