"""The trained supernet and method of a search run, for analysis."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from softcell.arch import Mix, WeightMix
from softcell.data import Dataset
from softcell.data.batches import Feeds
from softcell.data.dataset import content_of
from softcell.engine import RunFolder, resolve_device
from softcell.engine.checkpoint import check_identity, identity_of, load_latest
from softcell.engine.session import place
from softcell.errors import UserError
from softcell.methods import METHODS, Method
from softcell.registry import load_plugins
from softcell.search.recipe import SearchRecipe, load_images, resolve
from softcell.settings import build
from softcell.spaces import Supernet, build_space


@dataclass(frozen=True, slots=True)
class Restored:
    """The state of a search in its latest checkpoint, with its data and their split."""

    folder: Path
    recipe: SearchRecipe
    dataset: Dataset
    parts: Mapping[str, Tensor]
    supernet: Supernet
    method: Method
    device: torch.device
    is_finished: bool

    def feeds(self, batch_size: int | None = None) -> Feeds:
        dtype = next(self.supernet.parameters()).dtype
        return Feeds(self.dataset, batch_size or self.recipe.batch_size, self.recipe.seed, self.device, dtype)

    def by_paths(self) -> bool:
        """Whether no mix runs all candidates, since the supernet was trained path by path."""
        planner = self.method.planner
        return self.method.selection is not None and planner is not None and planner.num_plans() is not None

    @torch.no_grad()
    def mix(self, at: tuple[str, int] | None = None) -> Mix:
        """The mix of the method's probabilities: no sample, and the same for all cells.

        at: the choice of a table that must run all its candidates, where the rest is a single path.
        """
        selection = self.method.selection
        if selection is None:
            return WeightMix(self.supernet.layout, self.method.probabilities())
        return self.method.relax() if at is None else selection.mix_with(*at)


def restore(folder: str | Path, *, device: str = "auto", data_root: str | None = None) -> Restored:
    """Loads the latest checkpoint of the search in `folder`; nothing in the folder changes."""
    folder = Path(folder)
    manifest = RunFolder.open(folder).manifest
    if manifest["kind"] != "search":
        raise UserError(f"a supernet comes from a search, but {folder} holds a {manifest['kind']} run")
    load_plugins(manifest["recipe"].get("plugins", ()), f"the run in {folder}")
    recipe = resolve(manifest["recipe"])
    kind = METHODS.get(recipe.method)
    if not issubclass(kind, Method):
        raise UserError(f"{recipe.method} trains architectures one by one: {folder} has no supernet")
    loaded = load_latest(folder)
    if loaded is None:
        raise UserError(
            f"{folder} has no checkpoint: its search ended before the first one, or only the best seed was kept"
        )
    dataset = load_images(replace(recipe, data_root=data_root or recipe.data_root))
    if loaded.note:
        warnings.warn(loaded.note, stacklevel=2)
    where = resolve_device(device)
    dtype = torch.float64 if recipe.precision == "float64" else torch.float32
    with torch.random.fork_rng(devices=[]):
        space = build_space(recipe.space, recipe.space_settings)
        supernet = place(space.supernet(dataset.shape, dataset.num_classes), where, dtype)
        settings: object = build(kind.Settings, recipe.method_settings, f"method {recipe.method}")
        method = place(kind.for_supernet(settings, supernet), where, dtype)
    now = identity_of({**manifest, "recipe": recipe.to_dict()})
    check_identity(loaded.state, {**now, "data": content_of(dataset)}, folder)
    try:
        supernet.load_state_dict(loaded.state["task"]["supernet"])
        method.load_state_dict(loaded.state["task"]["method"])
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the checkpoint in {folder} does not fit the search there ({reason[:200]})") from error
    supernet.eval()
    parts = recipe.parts(dataset.train)
    done = manifest["status"] == "finished"
    return Restored(folder, recipe, dataset, parts, supernet, method, where, done)
