"""The recipe of a search: plain frozen data, from which a run can be repeated.

A recipe is merged from the defaults below, the space's sizes and the method's recipe for the scale (`small`, `paper` or
another that the method names), a configuration file and single settings, the later winning. The result is complete:
`run.json` holds it, so that defaults of later versions do not change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from softcell.arch.evolve import Evolution
from softcell.data import Dataset, datasets, load, split
from softcell.data.dataset import SomeClasses
from softcell.data.folder import load_unlabelled
from softcell.data.images import Images
from softcell.errors import UserError
from softcell.kernels.shared import Norms
from softcell.methods import METHODS, Method, Sampler
from softcell.search.guide import Guide
from softcell.search.resource import Resource
from softcell.search.steps import Unrolling
from softcell.settings import below_one, bounded_epochs, build, is_seed, layered, merge, not_negative, positive, to_dict
from softcell.spaces import SPACES, Space, build_space
from softcell.spaces.base import evaluation_space
from softcell.text import count_of

SCALES = ("small", "paper")
"""Scales that every method has; a method's recipes may name others."""


@dataclass(frozen=True)
class WeightOptimiser:
    """SGD for the supernet's weights: the learning rate falls from `lr` to `lr_min` over the epochs, by `schedule`.

    It rises linearly to `lr` over `warmup` epochs before.
    """

    lr: float = 0.025
    lr_min: float = 0.001
    schedule: Literal["cosine", "linear"] = "cosine"
    warmup: int = 0
    momentum: float = 0.9
    weight_decay: float = 3e-4
    clip: float = 5.0

    def __post_init__(self) -> None:
        positive("weights.lr", self.lr)
        not_negative("weights.lr_min", self.lr_min)
        not_negative("weights.warmup", self.warmup)
        not_negative("weights.momentum", self.momentum)
        not_negative("weights.weight_decay", self.weight_decay)
        not_negative("weights.clip", self.clip)
        if self.lr_min > self.lr:
            raise UserError(f"`weights.lr_min <= weights.lr` must hold, but got lr_min={self.lr_min}, lr={self.lr}")


@dataclass(frozen=True)
class ArchitectureOptimiser:
    """Adam for the architecture parameters; `clip` 0 means no clipping.

    `after`: in this first share of the epochs only the weights learn.
    `optimiser` "weights": SGD with the settings and the learning rate of `weights` instead; of the settings here only
    `clip` then applies.
    """

    optimiser: Literal["adam", "weights"] = "adam"
    lr: float = 3e-4
    beta1: float = 0.5
    beta2: float = 0.999
    weight_decay: float = 1e-3
    clip: float = 0.0
    after: float = 0.0

    def __post_init__(self) -> None:
        positive("architecture.lr", self.lr)
        not_negative("architecture.weight_decay", self.weight_decay)
        not_negative("architecture.clip", self.clip)
        for name in ("beta1", "beta2", "after"):
            below_one(f"architecture.{name}", getattr(self, name))


@dataclass(frozen=True)
class Collapse:
    """Detects the collapse to skip connections.

    Warns when more than `warn_above` of a cell's picks are skip connections. With `stop`, the search ends once that has
    lasted for `patience` epochs, and keeps the architecture from before.

    The first epoch and the first `after` of all epochs are ignored: candidates without weights lead while convolutions
    are still random, and logits of neighbouring candidates differ little. DARTS collapses late.
    """

    warn_above: float = 0.5
    stop: bool = False
    patience: int = 1
    after: float = 0.25

    def __post_init__(self) -> None:
        if not 0.0 <= self.warn_above <= 1.0:
            raise UserError(f"`0 <= collapse.warn_above <= 1` must hold, but got {self.warn_above}")
        below_one("collapse.after", self.after)
        if self.patience < 1:
            raise UserError(f"`collapse.patience >= 1` must hold, but got {self.patience}")


@dataclass(frozen=True)
class Pretrain:
    """A first phase by context auto-regression, without labels, whose architecture logits the search starts from.

    `epochs` 0: no such phase. `data`, `data_root`, `image_size`: the images it learns from; None for those of the
    search. A folder without a root is found by its path, and may hold images in any order. `classes`: only that many
    classes, drawn at random by the seed; None for all. `architecture_lr`, `batch_size`: None for those of the search.
    """

    epochs: int = 0
    data: str | None = None
    data_root: str | None = None
    image_size: int | None = None
    classes: int | None = None
    batch_size: int | None = None
    architecture_lr: float | None = None

    def __post_init__(self) -> None:
        not_negative("pretrain.epochs", self.epochs)
        bounded_epochs("pretrain.epochs", self.epochs)
        if self.data is not None and not self.epochs:
            raise UserError(
                f"`pretrain.data` needs a first phase, but got {self.data!r} with pretrain.epochs=0; set "
                "pretrain.epochs, or leave out pretrain.data"
            )
        for name, least in (("batch_size", 1), ("image_size", 4), ("classes", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UserError(f"`pretrain.{name} >= {least}` must hold, but got {value}")
        if self.architecture_lr is not None:
            positive("pretrain.architecture_lr", self.architecture_lr)
        if self.classes is not None and not self.epochs:
            raise UserError(
                f"pretrain.classes={self.classes} (--classes) needs a first phase, which this search does not have; "
                "set pretrain.epochs too, or classes=N for the data of the search itself"
            )


@dataclass(frozen=True)
class Select:
    """How the architecture is selected once the supernet is trained (evolution has its own settings).

    `by` "method": as the method derives. "perturbation": DARTS-PT, edge by edge, the candidate whose removal lowers the
    supernet's `measure` (accuracy or loss) on the validation split most. `epochs` epochs tune the weights after each
    decision (0: none), at `lr` with cosine decay to `weights.lr_min` (None: a tenth of `weights.lr`). `images`:
    number of validation images for each measurement (0: all). `norms`: the statistics of BatchNorm while measuring:
    those of each batch, as in the authors' code, recalibrated ones for every removal, or the running ones, which suit
    only methods that train the same mix that is measured.
    """

    by: Literal["method", "perturbation"] = "method"
    measure: Literal["accuracy", "loss"] = "accuracy"
    epochs: int = 5
    images: int = 0
    lr: float | None = None
    norms: Literal["batch", "recalibrated", "running"] = "batch"

    def __post_init__(self) -> None:
        not_negative("select.epochs", self.epochs)
        bounded_epochs("select.epochs", self.epochs)
        not_negative("select.images", self.images)
        if self.lr is not None:
            positive("select.lr", self.lr)

    @property
    def is_on(self) -> bool:
        return self.by != "method"


@dataclass(frozen=True, repr=False)
class SearchRecipe:
    """All settings of a search.

    `regime` "auto" and an empty `split` are resolved before the run, by method and regime.
    `classes`: only that many classes of the data, drawn at random by the seed; None for all.
    `split`: weights learn from `weights`, the architecture from `validation`. Accuracies are measured on `validation`,
    or on `held` if that is given, which is not used for training. `validation` 0: both levels learn from all images of
    `weights`, and accuracies are measured on these too, unless `held` is given.
    `evolution`: with `generations` above 0, architectures are bred and measured with the trained supernet's weights,
    and the best within the budgets is derived instead of the method's own.
    `select`: with `by` "perturbation", the architecture is selected on the trained supernet by DARTS-PT, for any
    method.
    `drop_path`: the output of a choice is dropped in training, per image, with a probability that grows linearly over
    the epochs to this. `child_every`: number of epochs between measurements of the derived network with the supernet's
    weights (0: never). `precision` "auto" is resolved at the start, by timing steps on the device. `fused`: on a GPU
    whole cells run in the kernels of `softcell.kernels`, if these support all candidates. `norms`: with several
    processes, BatchNorm in steps uses the statistics of the whole batch ("shared", equal to one process up to rounding)
    or of each process's part ("local", without communication). `objective`: `classify`, or `context` for context
    auto-regression, which needs no labels. `pretrain`: that as a first phase.

    Example:
        >>> from softcell.search import resolve
        >>> recipe = resolve({"method": "snas", "data": "digits"})
        >>> recipe.scale, recipe.regime, recipe.epochs
        ('small', 'single-level', 12)
    """

    method: str = "darts"
    space: str = "darts"
    scale: str = "small"
    data: str = "digits"
    data_root: str | None = None
    image_size: int | None = None
    classes: int | None = None
    epochs: int = 50
    batch_size: int = 64
    seed: int = 0
    regime: Literal["auto", "single-level", "bilevel", "unrolled"] = "auto"
    split: dict[str, float | int] = field(default_factory=dict)
    cutout: int = 0
    drop_path: float = 0.0
    method_settings: dict[str, Any] = field(default_factory=dict)
    space_settings: dict[str, Any] = field(default_factory=dict)
    weights: WeightOptimiser = field(default_factory=WeightOptimiser)
    architecture: ArchitectureOptimiser = field(default_factory=ArchitectureOptimiser)
    unrolled: Unrolling = field(default_factory=Unrolling)
    collapse: Collapse = field(default_factory=Collapse)
    resource: Resource = field(default_factory=Resource)
    evolution: Evolution = field(default_factory=Evolution)
    select: Select = field(default_factory=Select)
    guide: Guide = field(default_factory=Guide)
    objective: Literal["classify", "context"] = "classify"
    pretrain: Pretrain = field(default_factory=Pretrain)
    validate_every: int = 1
    child_every: int = 0
    device: str = "auto"
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    engine: Literal["auto", "eager", "graph"] = "auto"
    fused: bool = True
    norms: Norms = "shared"
    deterministic: bool = False
    threads: int = 0
    plugins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "validate_every"):
            if getattr(self, name) < 1:
                raise UserError(f"`{name} >= 1` must hold, but got {name}={getattr(self, name)}")
        for name in ("cutout", "threads", "child_every"):
            if getattr(self, name) < 0:
                raise UserError(f"`{name} >= 0` must hold, but got {name}={getattr(self, name)}")
        bounded_epochs("epochs", self.epochs)
        is_seed("seed", self.seed)
        below_one("drop_path", self.drop_path)
        if self.weights.warmup >= max(1, self.epochs):
            raise UserError(
                f"`weights.warmup < epochs` must hold, but got warmup={self.weights.warmup}, epochs={self.epochs}"
            )
        if self.objective == "context" and self.pretrain.epochs:
            raise UserError("a search by context auto-regression has no first phase: set pretrain.epochs=0")
        if self.objective == "context" and self.guide.teacher is not None:
            raise UserError("a guided search needs objective=classify; leave out --guide with objective=context")
        if self.objective == "context" and self.evolution.is_on:
            raise UserError(
                "evolution compares accuracies, but objective=context has none; set evolution.generations=0"
            )
        if self.select.is_on:
            self._check_select()
        if self.image_size is not None and self.image_size < 4:
            raise UserError(f"`image_size >= 4` must hold, but got image_size={self.image_size}")
        if self.classes is not None and self.classes < 2:
            raise UserError(f"`classes >= 2` must hold, but got classes={self.classes}")

    def _check_select(self) -> None:
        """Raises if something else selects the architecture, or nothing can be measured."""
        if self.evolution.is_on:
            raise UserError(
                f"select.by={self.select.by} (--select) and evolution both select the architecture; leave out one of "
                "them (--set evolution.generations=0 for evolution)"
            )
        if self.objective == "context":
            raise UserError(
                f"select.by={self.select.by} (--select) compares accuracies, but objective=context has none; "
                "leave it out"
            )
        if self.resource.budgets():
            raise UserError(
                f"select.by={self.select.by} (--select) cannot meet a budget, but got "
                f"{', '.join(self.resource.budgets())}; leave out one of them, or let evolution "
                "select (--set evolution.generations=20)"
            )

    @property
    def title(self) -> str:
        """`darts in space nb201 on digits`."""
        return f"{self.method} in space {self.space} on {Path(self.data).name}"

    def __repr__(self) -> str:
        return f"SearchRecipe({self.title}, {count_of(self.epochs, 'epoch')}, seed {self.seed})"

    @property
    def measured_split(self) -> str:
        """The split that accuracies are measured on."""
        if "held" in self.split:
            return "held"
        return "validation" if self.split.get("validation", 1) else "weights"

    def parts(self, images: Images | Tensor) -> dict[str, Tensor]:
        """Indices of training images (or of labels int64 [N]) for each part of `split`, int64 [n].

        With `split.validation=0` the validation part is that of the weights.
        """
        found = split(images, {name: share for name, share in self.split.items() if share}, self.seed)
        return {**found, "validation": found["weights"]} if "validation" in self.split.keys() - found.keys() else found

    def to_dict(self) -> dict[str, Any]:
        result = to_dict(self)
        assert isinstance(result, dict)
        return result


def load_images(recipe: SearchRecipe) -> Dataset:
    """The data of a search; from any folder of images, without labels, if the objective needs none."""
    if recipe.classes is not None:
        return load(recipe.data, recipe.data_root, recipe.image_size, some=SomeClasses(recipe.classes, recipe.seed))
    if recipe.objective == "context" and recipe.data not in datasets():
        path = Path(recipe.data) if recipe.data_root is None else Path(recipe.data_root) / recipe.data
        if path.expanduser().is_dir():
            return load_unlabelled(path.expanduser().resolve(), recipe.image_size)
    return load(recipe.data, recipe.data_root, recipe.image_size)


def resolve(*layers: Mapping[str, Any]) -> SearchRecipe:
    """A complete recipe from layers of settings, the later winning over the earlier.

    Example:
        >>> from softcell.search import resolve
        >>> resolve({"method": "darts", "epochs": 5}, {"epochs": 7}).epochs  # later layers win
        7
    """
    given = layered(*layers)
    names = {key: given.get(key, getattr(SearchRecipe, key)) for key in ("method", "space", "data")}
    method = METHODS.get(_text(names, "method"))
    if "space" not in given and method.home is not None:
        names["space"] = given["space"] = method.home
    space = SPACES.get(_text(names, "space"))
    scale = given.get("scale", default_scale(method, names["data"]))
    known = [*SCALES, *(name for name in method.recipes if name not in SCALES)]
    if scale not in known:
        raise UserError(f"recipe.scale must be one of {', '.join(known)} for method {names['method']!r}, got {scale!r}")
    base: dict[str, Any] = {"scale": scale}
    if scale == "small":
        base["space_settings"] = dict(space.small)
        base["threads"] = 1  # tensors this small gain nothing from a second thread, and on a busy machine they lose
    else:
        # A validation pass is a sixth of a first-order epoch: one forward pass against two forward and backward passes.
        # Recalibrating BatchNorm makes it up to a third. Passes are to take at most a twentieth of a search.
        base["validate_every"] = 6
    own = dict(method.recipes.get(scale, {}))
    wanted = own.get("space_settings", {})
    own["space_settings"] = {key: value for key, value in wanted.items() if key not in unmet(method, space, scale)}
    others = [f"space.{one.name}" for one in fields(space) if one.init]  # type: ignore[arg-type]
    others += [f"method.{one.name}" for one in fields(method.Settings) if one.init]
    recipe = build(SearchRecipe, merge(base, own, given), where="recipe", elsewhere=others)
    full = to_dict(recipe)
    full["method_settings"] = to_dict(build(method.Settings, recipe.method_settings, f"method {recipe.method}"))
    full["space_settings"] = to_dict(build_space(recipe.space, recipe.space_settings))
    evaluation_space(recipe.space, recipe.data, recipe.resource.network)  # rejects settings unknown to the space
    regime = recipe.regime
    if regime == "auto":
        full["regime"] = regime = method.regime if issubclass(method, Method) else "bilevel"
    if not recipe.split:
        # DARTS: half for the weights, half for the architecture. A single-level search learns from one split, so it
        # holds back only a tenth, to measure accuracy on.
        full["split"] = (
            {"weights": 0.9, "validation": 0.1} if regime == "single-level" else {"weights": 0.5, "validation": 0.5}
        )
    elif recipe.split.get("validation") == 0 and "weights" not in recipe.split:
        full["split"] = {**recipe.split, "weights": _left(recipe.split)}
    _check_split(full["split"], regime)
    if full["split"].get("validation") == 0 and "held" not in full["split"]:
        _check_measurable(recipe, method)
    if "held" in full["split"]:  # first, so that searches of different kinds with one seed hold back the same images
        full["split"] = {"held": full["split"]["held"], **full["split"]}
    return build(SearchRecipe, full, where="recipe")


def default_scale(method: type[Method | Sampler], data: object) -> str:
    """`small` for digits, else the method's recipe of the dataset's name, else `paper`."""
    if data == "digits":
        return "small"
    return data if isinstance(data, str) and data in method.recipes else "paper"


OF_DARTS_CELLS = {"candidates", "bottleneck"}
"""Space settings of a method's recipe that apply to the space `darts` only."""


def unmet(method: type[Method | Sampler], space: type[Space], scale: str) -> list[str]:
    """Space settings of the method's recipe that do not apply to this space.

    Those in `OF_DARTS_CELLS` are meant for the space of the paper; they would change what another space is.
    """
    has = {field.name for field in fields(space) if field.init}  # type: ignore[arg-type]
    has -= set() if space.name == "darts" else OF_DARTS_CELLS
    return [key for key in method.recipes.get(scale, {}).get("space_settings", {}) if key not in has]


def _text(names: Mapping[str, Any], key: str) -> str:
    value = names[key]
    if not isinstance(value, str):
        raise UserError(f"recipe.{key} must be text, got {value!r}")
    return value


def _left(shares: Mapping[str, float | int]) -> float:
    """The share of images for the weights if `validation` is 0."""
    held = shares.get("held", 0.0)
    if isinstance(held, int) and held > 0:
        raise UserError(
            f"with split.held={held} as a count, split.weights must be a count too: pass --set split.weights=N, or "
            "split.held as a share such as 0.1"
        )
    return 1.0 - held


def _check_measurable(recipe: SearchRecipe, method: type[Method | Sampler]) -> None:
    """Raises if architectures would be chosen by their accuracy on images that their weights learned from."""
    chooser = None if issubclass(method, Method) else f"method {recipe.method!r}"
    if recipe.evolution.is_on:
        chooser = "evolution"
    if recipe.select.is_on:
        chooser = f"select.by={recipe.select.by} (--select)"
    if chooser is not None:
        raise UserError(
            f"{chooser} needs images that no weights were trained on, but split.validation=0 leaves none; pass "
            "--set split.validation=0.1, or hold some back with split.held"
        )


def _check_split(split: Mapping[str, Any], regime: str) -> None:
    wanted = {"weights"} if regime == "single-level" and "held" in split else {"weights", "validation"}
    if not wanted <= set(split) <= {"weights", "validation", "held"}:
        raise UserError(
            "`split` must have `weights` and `validation`, and may have `held` to measure on, but got "
            f"{sorted(split)}; pass both, as --set split.weights=0.8 --set split.validation=0.2, or "
            "--set split.validation=0 alone: all images for both"
        )
    for name in ("weights", "held"):
        share = split.get(name, 1)
        if isinstance(share, bool) or not isinstance(share, int | float) or not share > 0:
            raise UserError(f"`split.{name}` must be a share above 0 or a number of images, got {share!r:.40}")
