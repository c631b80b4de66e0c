"""A search in two phases: what the first is, and what it hands to the second (full-attention NAS, §III-D).

Phase 1 searches by context auto-regression, phase 2 on the target task. Only architecture parameters carry over:
weights start anew.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from softcell.arch.evolve import Evolution
from softcell.data import Dataset, datasets, load
from softcell.data.dataset import SomeClasses
from softcell.data.folder import load_unlabelled
from softcell.engine.files import LISTED, atomic_write_bytes
from softcell.engine.runfolder import MANIFEST, clear
from softcell.errors import UserError
from softcell.methods import Method
from softcell.search.guide import Guide
from softcell.search.recipe import Pretrain, SearchRecipe, Select
from softcell.search.resource import Resource

FIRST = "phase-1"
LOGITS = "logits.safetensors"


def first_phase(recipe: SearchRecipe) -> SearchRecipe:
    """The recipe of phase 1: the same search by another objective.

    Budgets, teachers and selection belong to the target task.
    """
    own = recipe.pretrain
    rate = recipe.architecture.lr if own.architecture_lr is None else own.architecture_lr
    same = own.data is None
    # A folder is where its path says; named data lie where those of the search do.
    root = recipe.data_root if same or own.data in datasets() else None
    return replace(
        recipe,
        objective="context",
        pretrain=Pretrain(),
        epochs=own.epochs,
        data=recipe.data if own.data is None else own.data,
        data_root=root if own.data_root is None else own.data_root,
        image_size=recipe.image_size if same and own.image_size is None else own.image_size,
        classes=recipe.classes if same and own.classes is None else own.classes,
        batch_size=own.batch_size or recipe.batch_size,
        architecture=replace(recipe.architecture, lr=rate),
        weights=replace(recipe.weights, warmup=min(recipe.weights.warmup, own.epochs - 1)),
        resource=Resource(),
        evolution=Evolution(),
        select=Select(),
        guide=Guide(),
        child_every=0,
    )


def forget_phase(folder: Path) -> None:
    """Removes the first phase of an earlier search from a folder that is overwritten: none may go on with it."""
    place = folder / FIRST
    if all((path / MANIFEST).is_file() for path in (folder, place)):
        clear(place)
        for name in (MANIFEST, LISTED):
            (place / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # what the user has put there stays
            place.rmdir()


def load_images(recipe: SearchRecipe) -> Dataset:
    """The data of a search; without labels from any folder of images where it needs none."""
    if recipe.classes is not None:
        return load(recipe.data, recipe.data_root, recipe.image_size, some=SomeClasses(recipe.classes, recipe.seed))
    if recipe.objective == "context" and recipe.data not in datasets():
        path = Path(recipe.data) if recipe.data_root is None else Path(recipe.data_root) / recipe.data
        if path.expanduser().is_dir():
            return load_unlabelled(path.expanduser().resolve(), recipe.image_size)
    return load(recipe.data, recipe.data_root, recipe.image_size)


def write_logits(method: Method, file: Path) -> None:
    """The architecture parameters, put in place in one step."""
    state = {name: p.detach().cpu().contiguous() for name, p in method.named_parameters()}
    atomic_write_bytes(file, save(state))


@torch.no_grad()
def read_logits(method: Method, file: Path) -> None:
    """Fills the architecture parameters with those of an earlier phase."""
    try:
        state = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"the logits of phase 1 cannot be read from {file} ({error}); search again") from error
    own = dict(method.named_parameters())
    if {name: p.shape for name, p in own.items()} != {name: t.shape for name, t in state.items()}:
        raise UserError(unfitting(method.name, f"in {file}"))
    for name, parameter in own.items():
        parameter.copy_(state[name])


def unfitting(method: str, which: str) -> str:
    """What to tell of architecture parameters that cannot be handed on."""
    return (
        f"the architecture parameters {which} do not fit those of method {method!r}; phases must have one method and "
        "space, and for methods that look at feature maps one image size"
    )
