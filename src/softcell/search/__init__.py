"""The search itself: recipes, the three step regimes and the function that runs a recipe."""

from softcell.engine.manifest import read_config
from softcell.search.recipe import SearchRecipe, resolve
from softcell.search.run import SearchResult, search, stored_recipe

__all__ = ["SearchRecipe", "SearchResult", "read_config", "resolve", "search", "stored_recipe"]
