"""A search's supernet as a whole: its accuracy and that of its children, and reading it from a run folder.

A child is a derived network with the supernet's own weights, without any training. SNAS, Table 1: a child far below its
supernet shows that the search is biased. `recalibrated` and `batch_statistics` set the statistics that BatchNorm uses
in such measurements.

`restore` returns the supernet and the method of a search in their latest checkpoint. `draw_reconstructions` shows how a
supernet reconstructs hidden parts of images after a search by context auto-regression.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from softcell.arch import Genotype, Mix, WeightMix
from softcell.data import Batch, Batches, Dataset
from softcell.data.augment import normalise
from softcell.data.batches import Feeds
from softcell.data.dataset import content_of
from softcell.engine import RunFolder, resolve_device
from softcell.engine.capture import MAX_GRAPHS, CapturedStep, Engine, prepare_step
from softcell.engine.checkpoint import check_identity, identity_of, load_latest
from softcell.engine.distributed import World
from softcell.engine.metrics import Measured, Meter, measure
from softcell.engine.session import Session, computing_in, forked_rng, place
from softcell.errors import UserError, one_line
from softcell.files import atomic_write_bytes
from softcell.methods import METHODS, Method
from softcell.nn.objective import ContextAutoRegression, draw_masks
from softcell.nn.stochastic import Dropout, DropPath
from softcell.registry import load_plugins
from softcell.search.recipe import SearchRecipe, load_images, resolve
from softcell.settings import build
from softcell.spaces import Bound, Network, Supernet, build_space

if TYPE_CHECKING:  # which imports this module
    from softcell.search.task import SearchTask

StepContext = Callable[[], AbstractContextManager[object]]
"""A context for forward passes: precision and kind of cells as in a step of the search."""

RECALIBRATED = "val_accuracy_bn"
"""The metric that says that `val_accuracy` was measured with BatchNorm recalibrated, and has its value.

Searches of earlier versions have it only after the last epoch; their `val_accuracy` has running statistics.
"""
OVERFIT_RATIO = 3.0
"""Training accuracy over validation accuracy above which a supernet's validation accuracy is suspicious."""


class Validation:
    """Measures a supernet on `held`; `in_step` is entered around every forward pass.

    A pass is hundreds of forward passes under the same mix. Captured once as a CUDA graph, with its own buffers for the
    mix, it costs the host almost nothing in later epochs.
    """

    def __init__(
        self,
        supernet: Supernet,
        held: Batches,
        engine: Engine,
        world: World,
        in_step: StepContext,
        notify: Callable[[str], None],
    ) -> None:
        self._supernet, self._held, self._world, self._in_step = supernet, held, world, in_step
        self._meter = Meter(world.device)
        self._mix: Mix | None = None
        self._kept: dict[Hashable, Mix] = {}
        self._run = prepare_step(self._forward, engine, world, notify, divides=True)  # it has no collectives

    @torch.no_grad()
    def __call__(self, mix: Mix) -> Measured:
        """Loss and accuracy over all images and all ranks, in evaluation mode, under `mix`."""
        self._supernet.eval()
        self._meter.reset()
        captured = False
        self._mix, key = mix, mix.signature()
        if isinstance(self._run, CapturedStep) and key is not None:
            captured = self._copy_into_buffers(mix, key)
        size = self._held.batch_size // self._world.size
        for draft in self._held.drafts(0):
            # A graph has one batch size: a short last batch runs eagerly.
            if captured and draft[0].shape[0] == size:
                self._run(*draft, key=key)
            elif draft[0].shape[0]:  # a rank's part of a short last batch may be empty
                self._forward(*draft)
        self._mix = None
        self._supernet.train()
        return self._meter.read(self._world)

    @torch.no_grad()
    def rehearse(self, mix: Mix) -> None:
        """One forward pass for every size of batch, measuring nothing: what `__call__` launches."""
        if isinstance(self._run, CapturedStep) and mix.signature() is not None:
            mix = mix.copy()  # as captured passes read it
        self._supernet.eval()
        for size in self._held.sizes - {0}:
            with self._in_step():
                self._supernet(self._held.blank(size), mix)
        self._supernet.train()

    def _copy_into_buffers(self, mix: Mix, key: Hashable) -> bool:
        """Copies the mix into the buffers that its graph reads; False where there are too many kinds to capture."""
        if key not in self._kept:
            if len(self._kept) >= MAX_GRAPHS:
                return False
            self._kept[key] = mix.copy()  # never dropped: the graph keeps reading it
        self._kept[key].take(mix)
        self._mix = self._kept[key]
        return True

    def _forward(self, *draft: Tensor) -> None:
        batch = self._held.finish(*draft)
        assert self._mix is not None
        with torch.no_grad(), self._in_step():
            logits = self._supernet(batch.images, self._mix)
        self._meter.judge(logits, batch.labels)


def overfit_warning(trained: float | None, held: float | None, *, is_recalibrated: bool) -> str | None:
    """A warning where the supernet's validation accuracy is far below the one in training, else None.

    None: not measured. is_recalibrated: whether BatchNorm has the statistics of the mix that is validated.
    """
    if trained is None or held is None or trained <= OVERFIT_RATIO * held:
        return None
    both = f"the supernet is right for {held:.1%} of its validation images, but for {trained:.1%} in training. "
    if is_recalibrated:
        return both + (
            "Its method trains many cells, and one of them is validated, with BatchNorm recalibrated for it: either "
            "the supernet overfits, or this cell is a poor one (a sample may be all `none`). More images may help. "
            "Do not compare seeds by this figure."
        )
    return both + (
        "Every step of its method trains all candidates, so either the supernet overfits, or BatchNorm's running "
        "statistics lag behind its weights (few steps, or a high learning rate). More images or a smaller "
        "--set weights.lr may help. Do not compare seeds by this figure."
    )


def make_child(supernet: Supernet, genotype: Genotype) -> Network:
    """The child. The random numbers that building it draws are restored, so that it changes no search."""
    with torch.random.fork_rng(devices=[]):
        return supernet.child(genotype)


def measure_child(
    supernet: Supernet,
    genotype: Genotype,
    held: Iterable[Batch],
    world: World,
    recalibrate: Iterable[Batch] | None = None,
) -> Measured:
    """Loss and accuracy of the child on `held`, with the supernet's running statistics of BatchNorm.

    recalibrate: training batches over which these are averaged first.
    """
    child = make_child(supernet, genotype)
    if recalibrate is not None:
        recalibrate_(child, recalibrate)
    child.eval()
    return measure(child, held, world)


@torch.no_grad()
def recalibrate_(network: nn.Module, batches: Iterable[Batch]) -> None:
    """Replaces the running statistics of all BatchNorms by their mean over the batches; nothing else changes."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None  # the plain average over all batches
    network.train()
    for batch in batches:
        network(batch.images)


@contextmanager
def recalibrated(
    supernet: Supernet, mix: Mix, batches: Iterable[Batch], in_step: StepContext = nullcontext
) -> Iterator[None]:
    """Within this context all BatchNorms have the mean of their statistics over `batches` under `mix`.

    Nothing is dropped, as in evaluation; random numbers are restored. in_step: entered around these forward
    passes, so that they have the precision of the evaluation.
    """
    norms = [module for module in supernet.modules() if isinstance(module, nn.BatchNorm2d)]
    kept = [({k: v.clone() for k, v in norm.state_dict().items()}, norm.momentum) for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    try:
        with torch.no_grad(), _training_without_drops(supernet), in_step():
            for batch in batches:
                supernet(batch.images, mix)
        yield
    finally:
        # In place, because captured validation passes read these buffers.
        for norm, (state, momentum) in zip(norms, kept, strict=True):
            norm.load_state_dict(state)
            norm.momentum = momentum


@contextmanager
def batch_statistics(supernet: Supernet) -> Iterator[None]:
    """Within this context all BatchNorms normalise by the batch itself; running statistics stay as they are.

    Nothing is dropped; random numbers are restored.
    """
    norms = [module for module in supernet.modules() if isinstance(module, nn.BatchNorm2d)]
    kept = [{k: v.clone() for k, v in norm.state_dict().items()} for norm in norms]
    try:
        with _training_without_drops(supernet):
            yield
    finally:
        for norm, state in zip(norms, kept, strict=True):
            norm.load_state_dict(state)


@contextmanager
def _training_without_drops(supernet: Supernet) -> Iterator[None]:
    """The supernet in training mode, with nothing dropped; mode, drop rates and random numbers are restored."""
    drops = [module for module in supernet.modules() if isinstance(module, DropPath | Dropout)]
    chances = [drop.current.clone() for drop in drops]
    was_training, device = supernet.training, next(supernet.parameters()).device
    supernet.train()
    for drop in drops:
        drop.set_fraction(0.0)
    try:
        with forked_rng(device):
            yield
    finally:
        supernet.train(was_training)
        for drop, chance in zip(drops, chances, strict=True):
            drop.current.copy_(chance)


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
        raise UserError(f"a supernet comes from a search, but {folder} is a `softcell {manifest['kind']}` run")
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
        raise UserError(f"the checkpoint in {folder} does not fit the search there ({one_line(error)})") from error
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
    with forked_rng(session.device), computing_in(task.recipe.precision, session.device):  # as it was searched
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
