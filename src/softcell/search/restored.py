"""What a search leaves to look at: its trained supernet and method, and reconstructions of context auto-regression."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from softcell.arch import Mix, WeightMix
from softcell.data import Dataset
from softcell.data.augment import normalise
from softcell.data.batches import Feeds
from softcell.data.dataset import content_of
from softcell.engine import RunFolder, resolve_device
from softcell.engine.checkpoint import check_identity, identity_of, load_latest
from softcell.engine.session import Session, computing_in, place
from softcell.errors import UserError
from softcell.files import atomic_write_bytes
from softcell.methods import METHODS, Method
from softcell.nn.objective import ContextAutoRegression, draw_masks
from softcell.registry import load_plugins
from softcell.search.recipe import SearchRecipe, load_images, resolve
from softcell.settings import build
from softcell.spaces import Bound, Supernet, build_space

if TYPE_CHECKING:  # the task imports the indicators, which restore searches
    from softcell.search.task import SearchTask


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


PICTURE = "reconstructions.png"
NUMBER = 8
SIDE = 96
"""The minimum height of one picture in the grid."""


@torch.no_grad()
def draw_reconstructions(task: SearchTask, dataset: Dataset, chosen: Tensor, session: Session, folder: Path) -> None:
    """Writes `reconstructions.png`: a column per image; rows are the image, its visible part, and the filled image."""
    objective = task.objective
    assert isinstance(objective, ContextAutoRegression)
    raw = dataset.train.fetch(chosen[:NUMBER])
    images = normalise(raw.to(session.device), dataset.mean, dataset.std, session.dtype)
    task.supernet.eval()
    objective.eval()
    forked = torch.random.fork_rng(devices=[session.device] if session.device.type == "cuda" else [])
    with forked, computing_in(task.recipe.precision, session.device):  # as it was searched
        torch.manual_seed(0)
        hidden = draw_masks(images)
        imagined = objective.rebuild(Bound(task.supernet, task.method.relax()), images, hidden).to(images.dtype)
    task.supernet.train()
    objective.train()
    shown = images.masked_fill(hidden, 0.0)
    _save_grid([images, shown, torch.where(hidden, imagined, images)], dataset, folder / PICTURE)


def _save_grid(rows: list[Tensor], dataset: Dataset, file: Path) -> None:
    """Rows of normalised images [n, c, h, w] as one PNG, enlarged by a whole number, written atomically."""
    mean, std = (torch.tensor(v, dtype=torch.float32).view(1, -1, 1, 1) for v in (dataset.mean, dataset.std))
    height, width = rows[0].shape[-2:]
    by = max(1, -(-SIDE // height))
    lines = []
    for row in rows:
        pixels = ((row.float().cpu() * std + mean).clamp(0, 1) * 255).round().to(torch.uint8)
        pixels = F.interpolate(pixels, size=(by * height, by * width), mode="nearest")
        pixels = F.pad(pixels, (2, 2, 2, 2), value=255)
        lines.append(torch.cat(list(pixels), 2))
    grid = torch.cat(lines, 1)
    array = grid[0].numpy() if grid.shape[0] == 1 else grid.permute(1, 2, 0).contiguous().numpy()
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, format="PNG")
    atomic_write_bytes(file, buffer.getvalue())
