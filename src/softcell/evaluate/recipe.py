"""The recipe for training from scratch, and the named recipes.

`cifar` and `imagenet` are the evaluation settings of DARTS (§3.2, A.2); those of other papers differ in single numbers.
`small` is a version of them for a laptop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from softcell.arch import Genotype
from softcell.data.folder import CUB_NAMES
from softcell.errors import UserError, nearest
from softcell.kernels.shared import Norms
from softcell.settings import (
    at_most,
    below_one,
    bounded_epochs,
    build,
    is_seed,
    layered,
    merge,
    not_negative,
    positive,
    to_dict,
)
from softcell.spaces import SPACES, build_space
from softcell.spaces.base import evaluation_scale, evaluation_sizes, fit_space
from softcell.text import clock, count_of, parse_time

Schedule = Literal["cosine", "linear", "exponential"]


@dataclass(frozen=True, repr=False)
class TrainRecipe:
    """SGD with momentum, from random weights unless `init` names others.

    `schedule`: how the learning rate falls from `lr` to `lr_min` over the epochs; `exponential` multiplies it by
    `lr_decay` every `lr_every` epochs instead. `warmup` epochs rise linearly to it. `drop_path` grows linearly
    over the epochs to its value. `auxiliary` weighs the loss of the auxiliary tower (0: no tower). `holdout` is the
    share of training images held back to measure accuracy after each epoch; the test set is read once, at the end.
    `test` false leaves it sealed: the result is then the accuracy on the held-out images.
    `time`: seconds until training, evaluation and writing are done; 0: no limit. Schedules then follow the time, step
    by step, and training ends with it; `epochs` 0 means no other limit. Such a run depends on the clock and
    cannot be repeated bit for bit. `per_step`: schedules follow every step without `time` too. In both cases a `warmup`
    below 1 is a share of the training.
    `ema`: the decay of a moving average of the weights, which is evaluated and saved in their place; 0: none.
    `task` "retrieve": instead of classes, an embedding of `embedding` numbers is learned from the first half of the
    classes (Proxy-NCA) and measured by retrieval among the second. `optimiser`: SGD with momentum, Adam, AdamW
    (weight decay for matrices and filters only), or RMSprop with momentum in TensorFlow's form.
    `flip`: whether images are mirrored at random; None: as the dataset defines. `auto`: settings among `FITTED` that
    are chosen by the data and the length when training starts; `run.json` has the chosen values.
    `fused`: on a GPU, cells that have a fused form run in fused kernels: those of DARTS, S1 to S3 and NAS-Bench-201 as
    one operation each, of NOS and S4 as a few. Values differ from those of modules by rounding.
    `norms`: with several processes, BatchNorm in training steps uses the statistics of the whole batch ("shared", equal
    to one process up to rounding) or of each process's part ("local", without communication).
    `init`: the folder of a finished training run from whose matching weights this one starts; None: random.
    `allow_empty`: train a genotype even if all paths through one of its cells are `none`.

    Example:
        >>> from softcell.arch import sample
        >>> from softcell.evaluate import resolve
        >>> from softcell.spaces import build_space
        >>> recipe = resolve(sample(build_space("darts").layout(), seed=0), {"recipe": "cifar", "epochs": 50})
        >>> recipe.epochs, recipe.batch_size, recipe.cutout
        (50, 96, 16)
    """

    recipe: str = "small"
    task: Literal["classify", "retrieve"] = "classify"
    embedding: int = 64
    optimiser: Literal["sgd", "adam", "adamw", "rmsprop"] = "sgd"
    data: str = "digits"
    data_root: str | None = None
    image_size: int | None = None
    space_settings: dict[str, Any] = field(default_factory=dict)
    epochs: int = 600
    time: float = 0.0
    batch_size: int = 96
    lr: float = 0.025
    lr_min: float = 0.0
    lr_decay: float = 0.97
    lr_every: int = 1
    schedule: Schedule = "cosine"
    warmup: float = 0
    per_step: bool = False
    ema: float = 0.0
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 3e-4
    clip: float = 5.0
    label_smoothing: float = 0.0
    auxiliary: float = 0.4
    drop_path: float = 0.2
    cutout: int = 16
    jitter: float = 0.0
    flip: bool | None = None
    auto: tuple[str, ...] = ()
    holdout: float = 0.0
    test: bool = True
    allow_empty: bool = False
    seed: int = 0
    device: str = "auto"
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    engine: Literal["auto", "eager", "graph"] = "auto"
    fused: bool = True
    norms: Norms = "shared"
    deterministic: bool = False
    threads: int = 0
    plugins: tuple[str, ...] = ()
    init: str | None = None

    def __post_init__(self) -> None:
        not_negative("time", self.time)
        if self.epochs == 0 and not self.time:
            raise UserError("`epochs >= 1` must hold without `time`, but got epochs=0; pass --epochs or --time")
        for name in ("batch_size", "lr_every", "embedding", *(("epochs",) if self.epochs else ())):
            if getattr(self, name) < 1:
                raise UserError(f"`{name} >= 1` must hold, but got {name}={getattr(self, name)}")
        bounded_epochs("epochs", self.epochs)
        at_most("embedding", self.embedding, 2**20)
        positive("lr", self.lr)
        for name in ("lr_min", "momentum", "weight_decay", "clip", "auxiliary", "cutout", "jitter", "warmup"):
            not_negative(name, getattr(self, name))
        is_seed("seed", self.seed)
        for name in ("drop_path", "holdout", "label_smoothing", "ema"):
            below_one(name, getattr(self, name))
        if self.follows_steps and self.schedule == "exponential":
            raise UserError(
                "a schedule that follows the time or every step must be cosine or linear, but got exponential; add "
                "--set schedule=cosine, or use --recipe fast"
            )
        if not self.follows_steps and self.warmup % 1:
            raise UserError(
                f"`warmup` must be a whole number of epochs, but got {self.warmup}; with `time` or `per_step=true` it "
                "may be a share of the training"
            )
        unknown = [name for name in self.auto if name not in FITTED]
        if unknown:
            raise UserError(f"`auto` may name {', '.join(FITTED)}, but got {', '.join(unknown)}")
        if self.task == "retrieve" and self.holdout:
            raise UserError(
                "retrieval trains on all images of seen classes and is measured on unseen ones, so `holdout = 0` "
                f"must hold, but got holdout={self.holdout}"
            )

    def __repr__(self) -> str:
        length = [count_of(self.epochs, "epoch")] if self.epochs else []
        length += [f"{clock(self.time)} of time"] if self.time else []
        return f"TrainRecipe({self.recipe} on {Path(self.data).name}, {', '.join(length)}, seed {self.seed})"

    @property
    def follows_steps(self) -> bool:
        """Whether schedules follow every step instead of every epoch."""
        return self.per_step or self.time > 0

    @property
    def scaled_to(self) -> int | None:
        """The size of photographs of birds before they are cropped; None for other datasets."""
        if self.task != "retrieve" or self.data not in CUB_NAMES:
            return None
        return round((self.image_size or RETRIEVED_SIZE) * RETRIEVED_FROM / RETRIEVED_SIZE)

    def to_dict(self) -> dict[str, Any]:
        result = to_dict(self)
        assert isinstance(result, dict)
        return result


FITTED = ("batch_size", "lr", "flip", "cutout")
"""Settings that can be chosen by the data, and the cutout by the number of epochs (`TrainRecipe.auto`)."""

RECIPES: dict[str, dict[str, Any]] = {
    # For minutes instead of days, from experiments on held-out training images (docs/training.md); `fit_data` and
    # `fit_length` have the settings that depend on the data and the number of epochs
    "fast": {
        "epochs": 20,
        "nesterov": True,
        "per_step": True,
        "warmup": 0.1,
        "weight_decay": 5e-4,
        "label_smoothing": 0.1,
        "auxiliary": 0.0,
        "drop_path": 0.0,
        "cutout": 0,
        "ema": 0.998,
        "holdout": 0.1,
        "auto": FITTED,
    },
    "small": {
        "epochs": 10,
        "batch_size": 64,
        "lr": 0.05,
        "drop_path": 0.1,
        "cutout": 2,
        "holdout": 0.1,
        "threads": 1,  # as in a small search: see `search.recipe.resolve`
    },
    "cifar": {},
    "imagenet": {
        "epochs": 250,
        "batch_size": 128,
        "lr": 0.1,
        "schedule": "exponential",
        "weight_decay": 3e-5,
        "label_smoothing": 0.1,
        "drop_path": 0.0,
        "cutout": 0,
        "jitter": 0.4,
    },
    # NOS, A.2; the learning rate is printed as 0.25
    "nos-cifar": {"batch_size": 128, "lr": 0.25, "drop_path": 0.3},
    "nos-cifar100": {"batch_size": 128, "lr": 0.25, "drop_path": 0.3, "weight_decay": 5e-4},
    "nos-imagenet": {
        "epochs": 300,
        "batch_size": 512,
        "lr": 0.25,
        "schedule": "linear",
        "warmup": 5,
        "weight_decay": 3e-5,
        "label_smoothing": 0.1,
        "drop_path": 0.0,
        "cutout": 0,
        "jitter": 0.4,
    },
    # Full-attention NAS, §IV-E and F: fine-grained recognition (448×448), zero-shot retrieval (227×227)
    "fine-grained": {
        "epochs": 200,
        "batch_size": 64,
        "lr": 0.02,
        "weight_decay": 5e-4,
        "drop_path": 0.0,
        "cutout": 0,
    },
    "retrieve": {"epochs": 50, "batch_size": 64, "weight_decay": 0.0, "drop_path": 0.0, "cutout": 0},
    # Full-attention NAS, §IV-C and D: standard augmentation, nothing else
    "fullattention-cifar": {
        "epochs": 500,
        "batch_size": 64,
        "lr": 0.04,
        "weight_decay": 4e-4,
        "drop_path": 0.0,
        "cutout": 0,
    },
    "fullattention-imagenet": {
        "epochs": 200,
        "batch_size": 64,
        "lr": 0.04,
        "weight_decay": 3e-5,
        "label_smoothing": 0.1,
        "drop_path": 0.0,
        "cutout": 0,
    },
    # IT-NAS, A.3: the network that was searched in ProxylessNAS's chain
    "proxyless-imagenet": {
        "epochs": 240,
        "batch_size": 1024,
        "lr": 0.5,
        "weight_decay": 4e-5,
        "label_smoothing": 0.1,
        "drop_path": 0.0,
        "cutout": 0,
        "jitter": 0.4,
    },
    # IT-NAS, A.6: with SE, "the same as DNA" (Li et al., 2020), by the command of its repository, which follows
    # EfficientNet's protocol. Deviation: its dropout of 0.2 before the classifier and its moving average of weights are
    # not supported.
    "dna-imagenet": {
        "epochs": 500,
        "batch_size": 1024,
        "optimiser": "rmsprop",
        "lr": 0.064,
        "schedule": "exponential",
        "lr_decay": 0.963,
        "lr_every": 3,
        "warmup": 5,
        "weight_decay": 1e-4,
        "clip": 0.0,
        "label_smoothing": 0.1,
        "drop_path": 0.0,
        "cutout": 0,
        "jitter": 0.06,
    },
}
"""Changes of each recipe to the defaults of `TrainRecipe`; sizes come from the space (`Space.evaluation`)."""
SIZES = {
    "fast": "small",
    "nos-cifar": "cifar",
    "nos-cifar100": "cifar",
    "nos-imagenet": "imagenet",
    "fullattention-cifar": "cifar",
    "fullattention-imagenet": "imagenet",
    "proxyless-imagenet": "imagenet",
    "dna-imagenet": "imagenet",
    "fine-grained": "imagenet",
    "retrieve": "imagenet",
}
"""The sizes of a recipe in `Space.evaluation`, if they have another name."""


R = TypeVar("R", bound=TrainRecipe)
RETRIEVED_SIZE, RETRIEVED_FROM = 227, 256
"""Photographs of birds are scaled to 256×256 and cropped to 227×227; 448×448 for classification (§IV-E and F)."""


def default_recipe(data: str, space: str = "") -> str:
    """The recipe for a dataset: that of the space's own paper if there is one, else that of DARTS."""
    if data in CUB_NAMES:
        return "fine-grained"
    scale = evaluation_scale(data)
    own = (f"{space}-{data}", f"{space}-{scale}")
    return next((name for name in own if name in RECIPES), scale)


def resolve(genotype: Genotype, *layers: Mapping[str, Any]) -> TrainRecipe:
    """A complete recipe for a genotype from layers of settings, the later winning.

    Settings of the space that the genotype determines are taken from it; the last layer must not contradict them.

    Example:
        >>> from softcell.arch import sample
        >>> from softcell.evaluate import resolve
        >>> from softcell.spaces import build_space
        >>> genotype = sample(build_space("nb201").layout(), seed=0)
        >>> resolve(genotype, {"recipe": "small"}, {"epochs": 3}).epochs  # later layers win
        3
    """
    given = _with_time(*layers)
    data, asked = str(given.get("data", "digits")), given.get("recipe")
    retrieving = given.get("task") == "retrieve"
    suited = "retrieve" if retrieving and data != "digits" else default_recipe(data, genotype.space)
    name = str(asked or suited)
    if name not in RECIPES:
        raise UserError(f"no training recipe {name!r}; {nearest(name, RECIPES)}")
    space = SPACES.get(genotype.space)
    sizes = evaluation_sizes(space, data, SIZES.get(name, name) if asked else None)
    base: dict[str, Any] = {"recipe": name, "space_settings": dict(sizes)}
    if not space.has_auxiliary or retrieving:
        base["auxiliary"] = 0.0
    if retrieving:  # nothing is held back: unseen classes are what is measured
        base |= {"optimiser": "adam", "lr": 4e-3, "holdout": 0.0}
        if data in CUB_NAMES:
            base["image_size"] = RETRIEVED_SIZE
    values = merge(RECIPES[name], base, given)
    values["auto"] = _left_to_data(RECIPES[name].get("auto", ()), *layers)
    others = [f"space.{one.name}" for one in fields(space) if one.init]  # type: ignore[arg-type]
    recipe = build(TrainRecipe, values, where="recipe", elsewhere=others)
    full = to_dict(recipe)
    explicit = layered(*layers[-1:]).get("space_settings", {})
    full["space_settings"] = to_dict(fit_space(genotype, build_space(genotype.space, recipe.space_settings), explicit))
    return build(TrainRecipe, full, where="recipe")


def _with_time(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Layers of settings as one; a layer that sets a time but no epochs removes the limit of earlier layers."""
    given: dict[str, Any] = {}
    for layer in map(layered, layers):
        if "time" in layer:
            layer["time"] = seconds_in(layer["time"])
            layer.setdefault("epochs", 0 if layer["time"] else None)
        given = layered(given, layer)
    return given


def _left_to_data(auto: Any, *layers: Mapping[str, Any]) -> Any:
    """The settings missing from all layers; a layer that contains `auto` itself is a complete recipe."""
    for layer in map(layered, layers):
        auto = layer["auto"] if "auto" in layer else [name for name in auto if name not in layer]
    return auto


def seconds_in(time: Any) -> Any:
    """`"5m"` as seconds; what is not text is returned as it is, and checked with the other settings."""
    if not isinstance(time, str):
        return time
    try:
        return float(time)
    except ValueError:
        return parse_time(time)


SMALL_DATA, LARGE_DATA = 2_000, 20_000
"""Numbers of training images between which the batch size of `fit_data` grows."""


def fit_data(recipe: R, num_images: int, classes: Sequence[str], *, is_gpu: bool) -> R:
    """The recipe with the settings that it leaves to the data: batch size, peak rate and flip.

    num_images: for training. classes: their names. The cutout stays open (`fit_length`).
    """
    if not recipe.auto:
        return recipe
    batch = 32 if num_images < SMALL_DATA else 64 if num_images < LARGE_DATA else 128
    if "batch_size" not in recipe.auto:
        batch = recipe.batch_size
    elif is_gpu and num_images >= LARGE_DATA:
        batch = 512
    is_adam = recipe.optimiser in ("adam", "adamw")
    values: dict[str, Any] = {
        "batch_size": batch,
        "lr": (3e-3 if is_adam else 0.1) * math.sqrt(batch / 64),
        # A mirrored character is another one, or none.
        "flip": False if all(len(name) == 1 for name in classes) else None,
    }
    left = tuple(name for name in recipe.auto if name not in values)
    return replace(recipe, auto=left, **{name: values[name] for name in recipe.auto if name in values})


LONG_EPOCHS, MANY_IMAGES = 200, 20_000
"""Epochs, and training images, from which images are trained with cutout.

On 500 to 1,000 images cutout did not help in 10 to 200 epochs, even where networks memorised all of them
(docs/training.md). For all 50,000 images of CIFAR-10 its authors report gains (DeVries and Taylor, 2017).
"""
CUTOUT_PART = 4
"""The side of the image relative to that of the cutout."""


def cutout_side(epochs: float, num_images: int, side: int) -> int:
    """The side of the cutout in pixels, for `epochs` on `num_images` of `side` pixels; 0 for none."""
    return side // CUTOUT_PART if epochs >= LONG_EPOCHS and num_images >= MANY_IMAGES else 0


def fit_length(recipe: R, epochs: float, num_images: int, side: int) -> R:
    """The recipe with the setting that it leaves to its length: the cutout.

    epochs: those that the training will have, or has time for. num_images: for training. side: in pixels.
    """
    if "cutout" not in recipe.auto:
        return recipe
    auto = tuple(name for name in recipe.auto if name != "cutout")
    return replace(recipe, auto=auto, cutout=cutout_side(epochs, num_images, side))
