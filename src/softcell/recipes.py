"""Completes recipes from options, Python arguments, files and earlier runs.

The Python functions, the command line, sweeps and `softcell run` all get their recipes here. Python and the command
line share the names of their settings: `from_options` reads both, `SearchSettings` and `TrainSettings` list them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict

from softcell.arch import Genotype, empty_cells
from softcell.arch.evolve import Evolution
from softcell.engine import RunFolder
from softcell.engine.manifest import FORMAT, read_mapping, stored_fields
from softcell.engine.runfolder import free_folder
from softcell.errors import UserError
from softcell.evaluate import TrainRecipe, stored_training
from softcell.evaluate import resolve as resolve_training
from softcell.machine import num_processes
from softcell.registry import load_plugins
from softcell.search import SearchRecipe, resolve, stored_recipe
from softcell.search.genotypes import read_genotype, run_of
from softcell.search.guide import Guide
from softcell.search.recipe import ArchitectureOptimiser, Collapse, Pretrain, Select, WeightOptimiser
from softcell.search.resource import Resource
from softcell.search.steps import Unrolling
from softcell.seeds import read_seeds, seed_folder
from softcell.settings import MAX_SEEDS, assignments, build, is_seed, layered, nested, to_dict
from softcell.spaces import SPACES, Space, build_space
from softcell.trust import allow, trust

Part: TypeAlias = Mapping[str, Any]
"""Some settings of a part of a recipe; those that are left out keep the value of the method's recipe."""


class _Common(TypedDict, total=False):
    """Settings that searches and training runs share."""

    data_root: str | Path
    image_size: int
    epochs: int
    batch_size: int
    seed: int
    space_settings: Part | Space
    cells: int
    channels: int
    drop_path: float
    cutout: int
    device: str
    precision: Literal["auto", "float32", "bfloat16", "float64"]
    engine: Literal["auto", "eager", "graph"]
    fused: bool
    norms: Literal["shared", "local"]
    deterministic: bool
    threads: int
    plugins: Sequence[str | Path]
    plugin: str | Path | Sequence[str | Path]
    set: Mapping[str, Any] | Sequence[str]


class SearchSettings(_Common, total=False):
    """Keyword arguments of `softcell.api.search`: settings of `SearchRecipe` and options of `softcell search`.

    A part such as `weights` is a mapping, which changes only the settings in it, or an object such as
    `WeightOptimiser(lr=0.1)`, which replaces the whole part. `set` is `--set`: dotted names, `{"space.cells": 5}`.
    """

    scale: str
    classes: int
    regime: Literal["auto", "single-level", "bilevel", "unrolled"]
    split: Mapping[str, float | int]
    method_settings: Any
    weights: Part | WeightOptimiser
    architecture: Part | ArchitectureOptimiser
    unrolled: Part | Unrolling
    collapse: Part | Collapse
    resource: Literal["none", "mild", "moderate", "aggressive"] | Part | Resource
    max_params: float | str
    max_flops: float | str
    max_latency: float | str
    at_size: int
    latency_table: str | Path
    evolution: Part | Evolution
    select: Literal["method", "perturbation"] | Part | Select
    guide: str | Path | Part | Guide
    objective: Literal["classify", "context"]
    pretrain: Part | Pretrain
    validate_every: int
    child_every: int


class TrainSettings(_Common, total=False):
    """Keyword arguments of `softcell.api.train`: settings of `TrainRecipe` and options of `softcell train`."""

    task: Literal["classify", "retrieve"]
    embedding: int
    optimiser: Literal["sgd", "adam", "adamw", "rmsprop"]
    time: str | float
    per_step: bool
    ema: float
    flip: bool
    auto: Sequence[str]
    lr: float
    lr_min: float
    lr_decay: float
    lr_every: int
    schedule: Literal["cosine", "linear", "exponential"]
    warmup: float
    momentum: float
    nesterov: bool
    weight_decay: float
    clip: float
    label_smoothing: float
    auxiliary: float
    jitter: float
    holdout: float
    allow_empty: bool
    test: bool
    init: str | Path


_BUDGETS = {name: name for name in ("max_params", "max_flops", "max_latency", "latency_table")} | {
    "at_size": "image_size"
}
"""Options of the command line -> settings of `resource`."""
_FIRST_SETTING = {"resource": "preset", "select": "by", "guide": "teacher"}
"""Parts that may be given by a single word, and the setting that it sets."""


def from_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a recipe from options of the command line or keyword arguments; None is left out.

    Options for a setting inside a part are expanded, and objects become mappings.

    Example:
        >>> from softcell.recipes import from_options
        >>> from_options({"max_params": "1M", "select": "perturbation", "set": {"space.nodes": 3}, "cells": 8})
        {'resource': {'max_params': '1M'}, 'select': {'by': 'perturbation'}, 'space_settings': {'nodes': 3, 'cells': 8}}
    """
    layers: list[Mapping[str, Any]] = []
    for key, value in options.items():
        if isinstance(value, Space):
            layers.append({"space": type(value).name, "space_settings": to_dict(value)})
        elif is_dataclass(value) and not isinstance(value, type):
            layers.append({key: to_dict(value)})
        elif key == "set":
            layers.append(
                nested(value)
                if isinstance(value, Mapping)
                else assignments([value] if isinstance(value, str) else value or ())
            )
        elif key in _BUDGETS:
            # Absolute, so that the run can be repeated from any folder.
            path = absolute(value) if key == "latency_table" and value is not None else value
            layers.append({} if value is None else {"resource": {_BUDGETS[key]: path}})
        elif key in _FIRST_SETTING and isinstance(value, str | Path):
            layers.append({key: {_FIRST_SETTING[key]: absolute(value) if key == "guide" else str(value)}})
        elif key in ("cells", "channels"):
            layers.append({} if value is None else {"space_settings": {key: value}})
        elif key in ("plugin", "plugins") and value is not None:
            paths = [value] if isinstance(value, str | Path) else value
            layers.append({"plugins": [absolute(path) for path in paths]})
        elif key == "init" and value is not None:
            layers.append({key: absolute(value)})
        else:
            layers.append({key: str(value) if isinstance(value, Path) else value})
    return layered(*layers)


def absolute(source: str | Path) -> str:
    """An absolute path if `source` is a file or folder, so that the run can be resumed and repeated from any folder."""
    return str(Path(source).resolve()) if str(source).strip() and Path(source).exists() else str(source)


def search_recipe(
    given: Mapping[str, Any], *, config: str | Path | None = None, resume_from: Path | None = None
) -> SearchRecipe:
    """The complete recipe of a search; if `resume_from` is a run, the recipe of that run."""
    base = {} if config is None else _without_trust(_config(config, "search")[0])
    load_plugins(given.get("plugins", ()))  # first: they may replace files of a run that do not exist here
    load_plugins(base.get("plugins", ()), _named_by(config))
    if resume_from is not None:
        # Plugins that are given here replace those of the run, which may be missing.
        beside = {key: value for key, value in _without_trust(given).items() if key != "plugins"}
        return stored_recipe(resume_from, layered(base, beside))
    recipe = resolve(base, given)
    return replace(recipe, guide=replace(recipe.guide, trust=False))  # each reader of the run decides again


def train_recipe(
    genotype: Genotype | str | Path | None,
    given: Mapping[str, Any],
    *,
    config: str | Path | None = None,
    resume_from: Path | None = None,
) -> tuple[Genotype, TrainRecipe]:
    """Genotype and complete recipe of a training run; if `resume_from` is a run, those of that run."""
    load_plugins(given.get("plugins", ()))  # first: they may replace files of a run that do not exist here
    base, stored = ({}, None) if config is None else _config(config, "train")
    if resume_from is None and not isinstance(genotype, Genotype):
        base = layered(_inherited(genotype, layered(base, given)), base)
    plugins = list(dict.fromkeys((*base.get("plugins", ()), *given.get("plugins", ()))))
    load_plugins(plugins, _named_by(config if genotype is None or isinstance(genotype, Genotype) else genotype))
    if plugins and resume_from is None:
        given = {**given, "plugins": plugins}
    wanted = read_genotype(genotype) if genotype is not None else stored
    if resume_from is not None:
        beside = {key: value for key, value in given.items() if key != "plugins"}  # they replace the run's own
        kept, recipe = stored_training(resume_from, layered(base, beside))
        if wanted is not None and wanted != kept:
            raise UserError(f"a resumed run keeps its genotype, but {resume_from} trains another; leave it out")
        return kept, recipe
    if wanted is None:
        raise UserError("training needs a genotype: pass a file, a run folder, or DARTS or NAS-Bench-201 notation")
    return wanted, resolve_training(wanted, base, given)


def check_trainable(genotype: Genotype, recipe: TrainRecipe) -> None:
    """Raises `UserError` if a cell of the genotype outputs zeros, unless the recipe allows it."""
    empty = empty_cells(genotype, build_space(genotype.space, recipe.space_settings).layout())
    if empty and not recipe.allow_empty:
        raise UserError(
            f"every cell must lead from an input to its output, but all paths of {' and '.join(map(repr, empty))} are "
            "`none`; search again with a weaker penalty (--resource mild), use an earlier epoch (RUN@EPOCH), or train "
            "it anyway with --set allow_empty=true"
        )


def search_seeds_recipe(
    given: Mapping[str, Any],
    *,
    config: str | Path | None = None,
    seeds: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
) -> tuple[list[int], SearchRecipe, Path]:
    """Seeds, recipe and folder of a search with several seeds; a resumed search has all three in its folder."""
    if resume:
        known, begun, folder = _resumed_seeds(out, "search", seeds)
        # The recipes of all seeds differ in the seed only, so the first run that has begun represents the others.
        kept = layered(given, {"seed": _seed_of(begun)})
        return known, search_recipe(kept, config=config, resume_from=begun), folder
    recipe = search_recipe(given, config=config)
    chosen = _chosen_seeds(recipe.seed, seeds)
    folder = Path(out) if out is not None else free_folder(recipe.method, recipe.space, recipe.data)
    return chosen, recipe, folder


def train_seeds_recipe(
    genotype: Genotype | str | Path | None,
    given: Mapping[str, Any],
    *,
    config: str | Path | None = None,
    seeds: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
) -> tuple[list[int], Genotype, TrainRecipe, Path]:
    """Seeds, genotype, recipe and folder of training with several seeds; a resumed one has all in its folder."""
    if resume:
        known, begun, folder = _resumed_seeds(out, "train", seeds)
        kept = layered(_without_trust(given), {"seed": _seed_of(begun)})
        wanted, recipe = train_recipe(genotype, kept, config=config, resume_from=begun)
        return known, wanted, recipe, folder
    wanted, recipe = train_recipe(genotype, given, config=config)
    check_trainable(wanted, recipe)
    chosen = _chosen_seeds(recipe.seed, seeds)
    folder = Path(out) if out is not None else free_folder("train", wanted.space, recipe.data)
    return chosen, wanted, recipe, folder


def _chosen_seeds(first: int, seeds: int | None) -> list[int]:
    _check_alone()
    if seeds is None or seeds < 1:
        raise UserError(f"--seeds must be at least 1, but is {seeds}")
    if seeds > MAX_SEEDS:
        raise UserError(
            f"--seeds is the number of seeds, at most {MAX_SEEDS:,}, but is {seeds}; --seed sets the first one"
        )
    is_seed("seed", first + seeds - 1)  # the last of them
    return list(range(first, first + seeds))


def _resumed_seeds(out: str | Path | None, kind: str, seeds: int | None) -> tuple[list[int], Path, Path]:
    """The seeds of a folder, the first run in it that has started, and the folder."""
    _check_alone()
    folder = resumed_folder(out)
    known = read_seeds(folder, kind)
    if seeds is not None and seeds != len(known):
        raise UserError(f"a resumed {kind} keeps its seeds, but {folder} has {len(known)} and --seeds is {seeds}")
    folders = [seed_folder(folder, seed) for seed in known]
    begun = next((one for one in folders if (one / "run.json").is_file()), None)
    if begun is None:
        raise UserError(f"no seed of {folder} has started; start again with --overwrite")
    return known, begun, folder


def _seed_of(folder: Path) -> int:
    return int(RunFolder.open(folder).manifest["seed"])


def _check_alone() -> None:
    if num_processes() > 1:
        raise UserError("several seeds share one process, but torchrun started several processes; leave out --seeds")


def resumed_folder(out: str | Path | None) -> Path:
    """The folder of the run to resume, which must be given."""
    if out is None:
        raise UserError("`resume` needs the folder of the run to resume: pass it as `out`")
    return Path(out)


def trust_named(given: Mapping[str, Any]) -> None:
    """Trusts what the user names: plugins, and with `guide.trust` the program of a teacher.

    given: settings from the command line or a Python call, never from a file.
    """
    plugins, guide = given.get("plugins"), given.get("guide")
    if isinstance(plugins, list | tuple):
        for path in plugins:
            if isinstance(path, str | Path):  # anything else is rejected with the rest of the recipe
                trust(path)
    if isinstance(guide, Mapping) and guide.get("trust") is True:
        allow("program")


def _without_trust(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without `guide.trust`, which only the user may pass."""
    guide = settings.get("guide")
    if not isinstance(guide, Mapping):
        return dict(settings)
    return {**settings, "guide": {key: value for key, value in guide.items() if key != "trust"}}


def _named_by(source: str | Path | None) -> str:
    return "the recipe" if source is None else str(source)


def _config(path: str | Path, kind: str) -> tuple[dict[str, Any], Genotype | None]:
    """Settings from a file; from a run also the genotype that it trained."""
    data = read_mapping(path)
    if data.get("format") != FORMAT:
        return layered(data), None
    manifest = stored_fields(data, path)
    if manifest["kind"] != kind:
        raise UserError(
            f"--config of `softcell {kind}` must be one of its own runs, but {path} was created by `softcell "
            f"{manifest['kind']}`"
        )
    stored = manifest["results"].get("genotype")
    return manifest["recipe"], None if stored is None else Genotype.from_dict(stored, f"{path}: genotype")


def _inherited(source: str | Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that training inherits from the run of its genotype: plugins, data and, from a search, the space.

    The sizes of the supernet are not inherited, but those of the network that a budget was counted for. given: settings
    of the user; with other data, root and image size are not inherited either.
    """
    folder = run_of(source)
    if folder is None:
        return {}
    manifest = RunFolder.open(folder).manifest
    recipe = manifest["recipe"]
    found: dict[str, Any] = {"plugins": list(recipe.get("plugins", ()))}
    if given.get("data", recipe["data"]) == recipe["data"]:
        found |= {key: recipe[key] for key in ("data", "data_root", "image_size") if recipe.get(key) is not None}
    if manifest["kind"] != "search":
        return found
    load_plugins(found["plugins"], f"the run in {folder}")
    space = SPACES.get(recipe["space"])
    left = space.sizes() | space.search_only
    kept = {key: value for key, value in recipe["space_settings"].items() if key not in left}
    resource = build(Resource, recipe.get("resource") or {}, "recipe.resource")
    # A budget for other data does not apply to the network that is trained here.
    counted = resource.network if resource.budgets() and not resource.elsewhere else {}
    return {**found, "space_settings": {**kept, **counted}}
