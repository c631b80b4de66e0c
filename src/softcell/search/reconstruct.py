"""Reconstructions of a search by context auto-regression, as a grid of pictures."""

from __future__ import annotations

import io
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from softcell.data import Dataset
from softcell.data.augment import normalise
from softcell.engine.session import Session, computing_in
from softcell.files import atomic_write_bytes
from softcell.nn.objective import ContextAutoRegression, draw_masks
from softcell.search.task import SearchTask
from softcell.spaces import Bound

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
    save_grid([images, shown, torch.where(hidden, imagined, images)], dataset, folder / PICTURE)


def save_grid(rows: list[Tensor], dataset: Dataset, file: Path) -> None:
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
