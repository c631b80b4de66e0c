"""What comes after a search: training from scratch, counting, and classifying image files."""

from softcell.evaluate.predictions import ImagePrediction, classify, image_files
from softcell.evaluate.recipe import RECIPES, TrainRecipe, resolve
from softcell.evaluate.train import TrainResult, load_network, stored_training, train
from softcell.spaces.costs import Cost, count_genotype, count_module

__all__ = [
    "RECIPES",
    "Cost",
    "ImagePrediction",
    "TrainRecipe",
    "TrainResult",
    "classify",
    "count_genotype",
    "count_module",
    "image_files",
    "load_network",
    "resolve",
    "stored_training",
    "train",
]
