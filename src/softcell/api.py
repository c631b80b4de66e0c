"""Searching and training from Python, with the same defaults, checks and run folders as the command line.

from softcell.api import search, train

result = search("darts", data="digits", epochs=5)
trained = train(result.genotype, data="digits")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from softcell.app import jobs
from softcell.app.drawings import draw_search, draw_training
from softcell.app.export import export
from softcell.app.report.page import REPORT
from softcell.arch import Genotype
from softcell.engine.runfolder import free_folder
from softcell.engine.task import OnEvent
from softcell.errors import UserError
from softcell.evaluate import TrainRecipe, TrainResult, load_network
from softcell.evaluate.seeds import TrainedSeeds
from softcell.evaluate.seeds import train_seeds as run_train_seeds
from softcell.recipes import (
    check_trainable,
    resumed_folder,
    search_recipe,
    search_seeds_recipe,
    train_recipe,
    train_seeds_recipe,
    trust_named,
)
from softcell.search import SearchRecipe, SearchResult
from softcell.search import indicators as _indicators
from softcell.search.genotypes import read_genotype
from softcell.search.restored import restore
from softcell.search.seeds import Keep, SearchedSeeds
from softcell.search.seeds import search_seeds as run_search_seeds
from softcell.settings import layered
from softcell.spaces import Network, build_space
from softcell.spaces.teacher import register_teacher
from softcell.trust import trusting

__all__ = [
    "Genotype",
    "Network",
    "SearchResult",
    "TrainResult",
    "UserError",
    "build_space",
    "compare_indicators",
    "export",
    "free_folder",
    "load_network",
    "read_genotype",
    "register_teacher",
    "search",
    "search_seeds",
    "train",
    "train_seeds",
]


def search(
    method: str | None = None,
    *,
    space: str | None = None,
    data: str | Path | None = None,
    recipe: SearchRecipe | None = None,
    out: str | Path | None = None,
    config: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
    trust: bool = False,
    **settings: Any,
) -> SearchResult:
    """Searches an architecture and leaves a run folder with drawings; by default DARTS in its own space on `digits`.

    settings: keys of `SearchRecipe`, with nested mappings for its parts: `epochs=5, weights={"lr": 0.1},
        space_settings={"cells": 5}`. They win over `config`, a YAML or JSON file or an earlier run.
    recipe: a complete recipe instead of method, space, data, config and settings.
    out: a new folder; `runs/<method>-<space>-<data>-<n>` when None. `resume` continues the run in it, and returns the
        result of one that is finished.
    trust: run code that `config`, a resumed run or a teacher brings along; `plugins` named here are trusted anyway.

    Example:
        >>> from softcell.api import search
        >>> sizes = {"cells_per_stage": 1, "channels": 2}
        >>> result = search("darts", space="nb201", data="digits", epochs=1, space_settings=sizes, out="runs/example")
        >>> len(result.genotype.cells["cell"].picks), result.metrics[0]["val_split"]
        (6, 'validation')
    """
    given = _given(settings, method=method, space=space, data=data)
    with trusting(trust):
        if recipe is None:
            trust_named(given)
            recipe = search_recipe(given, config=config, resume_from=resumed_folder(out) if resume else None)
        else:
            _check_alone(given, config)
        return jobs.search(recipe, out, resume=resume, overwrite=overwrite, on_event=on_event)


def train(
    genotype: Genotype | str | Path | None = None,
    *,
    data: str | Path | None = None,
    recipe: str | TrainRecipe | None = None,
    out: str | Path | None = None,
    config: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
    trust: bool = False,
    **settings: Any,
) -> TrainResult:
    """Trains the network of a genotype from scratch and measures it once on the test set.

    genotype: a `Genotype`, its file, a run folder, RUN@EPOCH or any notation; None if `config` or the resumed run is
        that of a training.
    recipe: `small`, `cifar` or `imagenet`, by default the one that suits the data; or a complete recipe, which needs a
        `Genotype` and no further settings.
    settings: keys of `TrainRecipe`, such as `epochs=5, space_settings={"cells": 8}`; they win over `config`.
    out: a new folder; `runs/train-<space>-<data>-<n>` when None. `resume` continues the run in it, and returns the
        result of one that is finished.
    trust: run plugins that the genotype's run, `config` or a resumed run names; those named here are trusted anyway.

    Example:
        >>> from softcell.api import train
        >>> cell = "|skip_connect~0|+|none~0|skip_connect~1|+|none~0|none~1|nor_conv_3x3~2|"
        >>> sizes = {"cells_per_stage": 1, "channels": 2}
        >>> trained = train(cell, data="digits", epochs=1, space_settings=sizes, out="runs/example")
        >>> trained.split, trained.cost.parameters
        ('test', 2080)
    """
    given = _given(settings, data=data, recipe=recipe if isinstance(recipe, str) else None)
    with trusting(trust):
        if isinstance(recipe, TrainRecipe):
            _check_alone(given, config)
            if not isinstance(genotype, Genotype):
                raise UserError(f"a complete recipe needs a `Genotype`, but got {genotype!r}; use `read_genotype`")
        else:
            trust_named(given)
            before = resumed_folder(out) if resume else None
            genotype, recipe = train_recipe(genotype, given, config=config, resume_from=before)
            if not resume:
                check_trainable(genotype, recipe)
        return jobs.train(genotype, recipe, out, resume=resume, overwrite=overwrite, on_event=on_event)


def search_seeds(
    method: str | None = None,
    *,
    seeds: int | Sequence[int],
    space: str | None = None,
    data: str | Path | None = None,
    recipe: SearchRecipe | None = None,
    out: str | Path | None = None,
    keep: Keep = "all",
    at_once: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_event: Callable[[int], OnEvent] | None = None,
    trust: bool = False,
    **settings: Any,
) -> SearchedSeeds:
    """`search` with several seeds, on a GPU at the same time, each in its own folder in `out`.

    seeds: how many, counted from `seed` on; with a complete recipe, the seeds themselves.
    keep: whose checkpoints stay when all are finished. at_once: how many share the device; None for all of them on a
        GPU and one elsewhere. on_event: makes the listener of a seed's run.

    Example:
        >>> from softcell.api import search_seeds
        >>> sizes = {"cells_per_stage": 1, "channels": 2}
        >>> found = search_seeds("darts", seeds=2, space="nb201", epochs=1, space_settings=sizes, out="runs/seeds")
        >>> {seed: result.folder.name for seed, result in found.results.items()}, found.best in (0, 1)
        ({0: 'seed-0', 1: 'seed-1'}, True)
    """
    given = _given(settings, method=method, space=space, data=data)
    with trusting(trust):
        if recipe is None:
            trust_named(given)
            seeds, recipe, folder = search_seeds_recipe(given, seeds=_number(seeds), out=out, resume=resume)
        else:
            _check_alone(given)
            seeds, folder = _seeds_and_folder(seeds, out)
        result = run_search_seeds(
            recipe, folder, seeds, keep=keep, at_once=at_once, resume=resume, overwrite=overwrite, on_event=on_event
        )
    for one in result.results.values():
        if one.genotype is not None:
            draw_search(one)
    return result


def train_seeds(
    genotype: Genotype | str | Path | None = None,
    *,
    seeds: int | Sequence[int],
    data: str | Path | None = None,
    recipe: str | TrainRecipe | None = None,
    out: str | Path | None = None,
    at_once: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_event: Callable[[int], OnEvent] | None = None,
    trust: bool = False,
    **settings: Any,
) -> TrainedSeeds:
    """`train` with several seeds, on a GPU at the same time, each in its own folder in `out`; see `search_seeds`.

    Example:
        >>> from softcell.api import train_seeds
        >>> sizes = {"cells_per_stage": 1, "channels": 2}
        >>> trained = train_seeds("runs/search", seeds=2, epochs=1, space_settings=sizes, out="runs/seeds")
        >>> mean, std, n = trained.spread("accuracy")
        >>> n
        2
    """
    given = _given(settings, data=data, recipe=recipe if isinstance(recipe, str) else None)
    with trusting(trust):
        if isinstance(recipe, TrainRecipe):
            _check_alone(given)
            if not isinstance(genotype, Genotype):
                raise UserError(f"a complete recipe needs a `Genotype`, but got {genotype!r}; use `read_genotype`")
            seeds, folder = _seeds_and_folder(seeds, out)
        else:
            trust_named(given)
            seeds, genotype, recipe, folder = train_seeds_recipe(
                genotype, given, seeds=_number(seeds), out=out, resume=resume
            )
        result = run_train_seeds(
            genotype, recipe, folder, seeds, at_once=at_once, resume=resume, overwrite=overwrite, on_event=on_event
        )
    for one in result.results.values():
        if not one.exit_code and not (one.folder / REPORT).exists():
            draw_training(one)
    return result


def compare_indicators(
    folder: str | Path,
    by: Sequence[str] | None = None,
    *,
    images: int = 512,
    epochs: int = 1,
    device: str = "auto",
    data_root: str | None = None,
    notify: Callable[[str], None] | None = None,
    trust: bool = False,
) -> dict[str, Any]:
    """Indicators for every candidate of a search's supernet, the best ones by each, and Kendall's tau between them.

    by: `alpha`, `attention`, `perturbation`, `discretisation`; when None, those of the first three that the run has.
        See `softcell.search.indicators`.
    trust: run plugins that the run names.

    Example:
        >>> from softcell.api import compare_indicators
        >>> compared = compare_indicators("runs/search", ["alpha", "perturbation"], images=64)
        >>> compared["method"], compared["images"]
        ('darts', 64)
    """
    with trusting(trust):
        found = restore(folder, device=device, data_root=data_root)
    made = _indicators.compute(found, by, images=images, epochs=epochs, notify=notify or (lambda text: None))
    about = {"run": str(folder), "method": found.recipe.method, "space": found.recipe.space}
    used = None if made.baseline is None else made.baseline.images  # a split may have fewer than were asked for
    baseline = None if made.baseline is None else made.baseline.to_dict()
    said = _indicators.summary(found.supernet.layout, made.values, made.saying_nothing)
    return {**about, "images": used, "baseline": baseline, **said}


def _given(settings: Mapping[str, Any], **named: str | Path | None) -> dict[str, Any]:
    """Settings with those that have a parameter of their own; paths as text, None left out."""
    return layered(settings, {key: str(value) for key, value in named.items() if value is not None})


def _check_alone(given: Mapping[str, Any], config: str | Path | None = None) -> None:
    """A complete recipe leaves no room for settings."""
    if given or config is not None:
        more = [*given, *(["config"] if config is not None else [])]
        raise UserError(f"a complete recipe allows no further settings, but got {', '.join(more)}; leave them out")


def _number(seeds: int | Sequence[int]) -> int:
    if not isinstance(seeds, int):
        raise UserError(f"`seeds` must be a number of seeds unless `recipe` is complete, but got {seeds!r}")
    return seeds


def _seeds_and_folder(seeds: int | Sequence[int], out: str | Path | None) -> tuple[list[int], Path]:
    if isinstance(seeds, int) or out is None:
        raise UserError(f"a complete recipe needs a list of seeds and a folder, but got seeds={seeds!r}, out={out!r}")
    return list(seeds), Path(out)
