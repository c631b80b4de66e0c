"""Searching and training from Python, with the same defaults, strictness and run folders as the command line.

from softcell.api import search, train

result = search("darts", data="digits", epochs=5)
trained = train(result.genotype, data="digits")
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from softcell.app import drawings
from softcell.app.export import export
from softcell.app.report.page import REPORT, write_report
from softcell.arch import Genotype, empty_cells
from softcell.engine import RunFolder, distributed, resolve_device, set_deterministic
from softcell.engine.lock import locked
from softcell.engine.manifest import FORMAT
from softcell.engine.seeds import read_seeds, seed_folder
from softcell.engine.task import OnEvent
from softcell.errors import UserError
from softcell.evaluate import TrainRecipe, TrainResult, load_network, stored_training
from softcell.evaluate import resolve as resolve_training
from softcell.evaluate import train as run_training
from softcell.evaluate.seeds import TrainedSeeds
from softcell.evaluate.seeds import train_seeds as run_train_seeds
from softcell.evaluate.train import finished_training
from softcell.reading import read_json_lines
from softcell.registry import load_plugins
from softcell.search import SearchRecipe, SearchResult, resolve, stored_recipe
from softcell.search import indicators as _indicators
from softcell.search.genotypes import read_genotype, run_of
from softcell.search.recipe import read_mapping, stored_fields
from softcell.search.resource import Resource
from softcell.search.restored import restore
from softcell.search.run import search as run_search
from softcell.search.seeds import Keep, SeveralResult
from softcell.search.seeds import search_seeds as run_seeds
from softcell.settings import MOST_SEEDS, build, is_seed, merge
from softcell.spaces import SPACES, Network, build_space
from softcell.spaces.teacher import register_teacher
from softcell.trust import allow, trusting
from softcell.trust import trust as agree

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

RUNS = Path("runs")


def search(
    method: str | None = None,
    *,
    space: str | None = None,
    data: str | Path | None = None,
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
    out: a new folder; `runs/<method>-<space>-<data>-<n>` when None. `resume` goes on with the run in it.
    trust: run code that `config`, a resumed run or a teacher brings along; `plugins` named here are trusted anyway.
    """
    given = _given(settings, method=method, space=space, data=data)
    with trusting(trust):
        trust_named(given)
        recipe = search_recipe(given, config=config, resume_from=_resumed(out) if resume else None)
        return search_with(recipe, out, resume=resume, overwrite=overwrite, on_event=on_event)


def train(
    genotype: Genotype | str | Path | None = None,
    *,
    data: str | Path | None = None,
    recipe: str | None = None,
    out: str | Path | None = None,
    config: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
    trust: bool = False,
    **settings: Any,
) -> TrainResult:
    """Trains the network of a genotype from scratch and measures it once on the test set.

    genotype: a `Genotype`, its file, a run folder, RUN@EPOCH or any notation; None where `config` is the run of an
        earlier training.
    recipe: `small`, `cifar` or `imagenet`; the one that suits the data when None.
    settings: keys of `TrainRecipe`, such as `epochs=5, space_settings={"cells": 8}`; they win over `config`.
    out: a new folder; `runs/train-<space>-<data>-<n>` when None. `resume` goes on with the run in it.
    trust: run plugins that the genotype's run, `config` or a resumed run names; those named here are trusted anyway.
    """
    given = _given(settings, data=data, recipe=recipe)
    resume_from = _resumed(out) if resume else None
    with trusting(trust):
        trust_named(given)
        chosen, full = train_recipe(genotype, given, config=config, resume_from=resume_from)
        if not resume:
            check_trainable(chosen, full)
        return train_with(chosen, full, out, resume=resume, overwrite=overwrite, on_event=on_event)


def train_seeds(
    genotype: Genotype | str | Path | None = None,
    *,
    seeds: int,
    data: str | Path | None = None,
    recipe: str | None = None,
    out: str | Path | None = None,
    at_once: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    trust: bool = False,
    **settings: Any,
) -> TrainedSeeds:
    """`train` with `seeds` seeds from `seed` on, on a GPU at the same time, each in a folder of its own in `out`."""
    given = _given(settings, data=data, recipe=recipe)
    with trusting(trust):
        trust_named(given)
        chosen, wanted, full, folder = train_seeds_recipe(genotype, given, seeds=seeds, out=out, resume=resume)
        return train_seeds_with(wanted, full, folder, chosen, at_once=at_once, resume=resume, overwrite=overwrite)


def search_recipe(
    given: Mapping[str, Any], *, config: str | Path | None = None, resume_from: Path | None = None
) -> SearchRecipe:
    """The complete recipe of a search; that of the run in `resume_from` where there is one."""
    base = {} if config is None else _without_trust(_config(config, "search")[0])
    load_plugins(given.get("plugins", ()))  # first: they may stand for files of a run that are not here
    load_plugins(base.get("plugins", ()), _named_by(config))
    if resume_from is not None:
        # Plugins that are named beside a run stand for its own, wherever those lay.
        beside = {key: value for key, value in _without_trust(given).items() if key != "plugins"}
        return stored_recipe(resume_from, layered(base, beside))
    recipe = resolve(base, given)
    return replace(recipe, guide=replace(recipe.guide, trust=False))  # the next reader of the run decides for himself


def train_recipe(
    genotype: Genotype | str | Path | None,
    given: Mapping[str, Any],
    *,
    config: str | Path | None = None,
    resume_from: Path | None = None,
) -> tuple[Genotype, TrainRecipe]:
    """What is trained and how; both from the run in `resume_from` where there is one."""
    load_plugins(given.get("plugins", ()))  # first: they may stand for files of a run that are not here
    base, stored = ({}, None) if config is None else _config(config, "train")
    if resume_from is None and not isinstance(genotype, Genotype):
        base = layered(_inherited(genotype, layered(base, given)), base)
    plugins = list(dict.fromkeys((*base.get("plugins", ()), *given.get("plugins", ()))))
    load_plugins(plugins, _named_by(config if genotype is None or isinstance(genotype, Genotype) else genotype))
    if plugins and resume_from is None:
        given = {**given, "plugins": plugins}
    wanted = read_genotype(genotype) if genotype is not None else stored
    if resume_from is not None:
        beside = {key: value for key, value in given.items() if key != "plugins"}  # they stand for the run's own
        kept, recipe = stored_training(resume_from, layered(base, beside))
        if wanted is not None and wanted != kept:
            raise UserError(f"a resumed run keeps its genotype, but {resume_from} trains another one; leave it out")
        return kept, recipe
    if wanted is None:
        raise UserError("a training needs a genotype: a file, a run folder or a notation; none was given")
    return wanted, resolve_training(wanted, base, given)


def check_trainable(genotype: Genotype, recipe: TrainRecipe) -> None:
    """Raises `UserError` where a cell of the genotype hands on zeros, unless the recipe allows it."""
    empty = empty_cells(genotype, build_space(genotype.space, recipe.space_settings).layout())
    if empty and not recipe.allow_empty:
        raise UserError(
            f"every cell must lead from an input to its output, but all paths of {' and '.join(map(repr, empty))} are "
            "`none`; search again with a weaker penalty (--resource mild), take an earlier epoch (RUN@EPOCH), or train "
            "it all the same with --set allow_empty=true"
        )


def search_with(
    recipe: SearchRecipe,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
) -> SearchResult:
    """Runs a complete recipe; a finished run that is resumed gives its result at once."""
    if resume:
        done = _finished_search(_resumed(out), recipe)
        if done is not None:
            return done
    with joined(recipe.device, recipe.deterministic) as world:
        folder = agreed_folder(out, world, recipe.method, recipe.space, recipe.data)
        with locked(folder, world):
            result = run_search(recipe, folder, resume=resume, overwrite=overwrite, on_event=on_event)
            if world.is_main:
                _draw_search(result)
        return result


def seeds_recipe(
    given: Mapping[str, Any],
    *,
    config: str | Path | None = None,
    seeds: int | None = None,
    out: str | Path | None = None,
    resume: bool = False,
) -> tuple[list[int], SearchRecipe, Path]:
    """Seeds, recipe and folder of a search with several seeds; a resumed one has all three in its folder."""
    if resume:
        known, begun, folder = _resumed_seeds(out, "search", seeds)
        return known, stored_recipe(begun, layered(_without_trust(given), {"seed": _seed_of(begun)})), folder
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
    """Seeds, architecture, recipe and folder of a training with several seeds; a resumed one has all in its folder."""
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
    if seeds > MOST_SEEDS:
        raise UserError(
            f"--seeds is how many seeds, at most {MOST_SEEDS:,}, but is {seeds}; --seed is the first of them"
        )
    is_seed("seed", first + seeds - 1)  # the last of them
    return list(range(first, first + seeds))


def _resumed_seeds(out: str | Path | None, kind: str, seeds: int | None) -> tuple[list[int], Path, Path]:
    """The seeds of a folder, the first run in it that has begun, and the folder."""
    _check_alone()
    folder = _resumed(out)
    known = read_seeds(folder, kind)
    if seeds is not None and seeds != len(known):
        raise UserError(f"a resumed {kind} keeps its seeds, but {folder} has {len(known)} and --seeds is {seeds}")
    places = [seed_folder(folder, seed) for seed in known]
    begun = next((place for place in places if (place / "run.json").is_file()), None)
    if begun is None:
        raise UserError(f"none of the seeds of {folder} has begun; start anew with --overwrite")
    return known, begun, folder


def _seed_of(folder: Path) -> int:
    return int(RunFolder.open(folder).manifest["seed"])


def _check_alone() -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "several seeds share one device in one process, but torchrun started several; leave out --seeds"
        )


def search_seeds_with(
    recipe: SearchRecipe,
    folder: Path,
    seeds: Sequence[int],
    *,
    keep: Keep = "all",
    at_once: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_event: Callable[[int], OnEvent] | None = None,
) -> SeveralResult:
    """Runs a complete recipe with several seeds and draws each run."""
    set_deterministic(recipe.deterministic)
    result = run_seeds(
        recipe, folder, seeds, keep=keep, at_once=at_once, resume=resume, overwrite=overwrite, on_event=on_event
    )
    for one in result.results.values():
        if one.genotype is not None and not (one.folder / drawings.CELLS).exists():
            _draw_search(one)
    return result


def search_seeds(
    method: str | None = None,
    *,
    seeds: int,
    space: str | None = None,
    data: str | Path | None = None,
    out: str | Path | None = None,
    keep: Keep = "all",
    at_once: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    trust: bool = False,
    **settings: Any,
) -> SeveralResult:
    """`search` with `seeds` seeds from `seed` on, on a GPU at the same time; `keep` says whose checkpoints stay."""
    given = _given(settings, method=method, space=space, data=data)
    with trusting(trust):
        trust_named(given)
        chosen, recipe, folder = seeds_recipe(given, seeds=seeds, out=out, resume=resume)
        return search_seeds_with(recipe, folder, chosen, keep=keep, at_once=at_once, resume=resume, overwrite=overwrite)


def train_with(
    genotype: Genotype,
    recipe: TrainRecipe,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
) -> TrainResult:
    """Trains by a complete recipe; a finished run that is resumed gives its result at once."""
    if resume:
        done = finished_training(_resumed(out), genotype, recipe)
        if done is not None:
            return done
    with joined(recipe.device, recipe.deterministic) as world:
        folder = agreed_folder(out, world, "train", genotype.space, recipe.data)
        with locked(folder, world):
            result = run_training(genotype, recipe, folder, resume=resume, overwrite=overwrite, on_event=on_event)
            if world.is_main:
                _draw_training(result)
        return result


def train_seeds_with(
    genotype: Genotype,
    recipe: TrainRecipe,
    folder: Path,
    seeds: Sequence[int],
    *,
    at_once: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_event: Callable[[int], OnEvent] | None = None,
) -> TrainedSeeds:
    """Trains by a complete recipe with several seeds and draws each run."""
    set_deterministic(recipe.deterministic)
    result = run_train_seeds(
        genotype, recipe, folder, seeds, at_once=at_once, resume=resume, overwrite=overwrite, on_event=on_event
    )
    for one in result.results.values():
        if not one.exit_code and not (one.folder / REPORT).exists():
            _draw_training(one)
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
    """What indicators say of every candidate of a search's supernet, the best by each, and Kendall's tau between them.

    by: `alpha`, `attention`, `perturbation`, `discretisation`; the first three that there are when None. See
    `softcell.search.indicators`.
    trust: run plugins that the run names.
    """
    with trusting(trust):
        found = restore(folder, device=device, data_root=data_root)
    made = _indicators.compute(found, by, images=images, epochs=epochs, notify=notify or (lambda text: None))
    about = {"run": str(folder), "method": found.recipe.method, "space": found.recipe.space}
    used = None if made.baseline is None else made.baseline.images  # a split may have fewer than were asked for
    baseline = None if made.baseline is None else made.baseline.to_dict()
    said = _indicators.summary(found.supernet.layout, made.values, made.saying_nothing)
    return {**about, "images": used, "baseline": baseline, **said}


def free_folder(*parts: str) -> Path:
    """`runs/<parts>-<n>` with the first n that is free."""
    stem = "-".join(re.sub(r"[^\w.]+", "-", Path(part).name).strip("-.") or "data" for part in parts)
    number = 1
    while (RUNS / f"{stem}-{number}").exists():
        number += 1
    return RUNS / f"{stem}-{number}"


def agreed_folder(out: str | Path | None, world: distributed.World, *parts: str) -> Path:
    """`out`, or a free folder that all processes agree on."""
    return Path(out) if out is not None else distributed.broadcast_object(free_folder(*parts), world)


@contextmanager
def joined(device: str, deterministic: bool) -> Iterator[distributed.World]:
    """Joins torchrun's processes for a whole block of runs, so that all of them agree on its folders."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        yield distributed.current()
        return
    set_deterministic(deterministic)  # before CUDA starts, which is when cuBLAS reads its setting
    world = distributed.start(resolve_device(device))
    try:
        yield world
    finally:
        distributed.stop()


def is_main() -> bool:
    """Whether this is the process that speaks and writes."""
    return int(os.environ.get("RANK", "0")) == 0


def layered(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Layers of settings in one, the later winning; `space: {cells: 5}` is short for `space_settings: {cells: 5}`."""
    return merge(
        *(
            {f"{k}_settings" if k in ("method", "space") and isinstance(v, Mapping) else k: v for k, v in layer.items()}
            for layer in layers
        )
    )


def trust_named(given: Mapping[str, Any]) -> None:
    """Trusts what the user names himself: plugins, and with `guide.trust` the program of a teacher.

    given: settings from the command line or a Python call, never those of a file.
    """
    plugins, guide = given.get("plugins"), given.get("guide")
    if isinstance(plugins, list | tuple):
        for path in plugins:
            if isinstance(path, str | Path):  # anything else is refused with the rest of the recipe
                agree(path)
    if isinstance(guide, Mapping) and guide.get("trust") is True:
        allow("program")


def _without_trust(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without a word on trust, which no file can give itself."""
    guide = settings.get("guide")
    if not isinstance(guide, Mapping):
        return dict(settings)
    return {**settings, "guide": {key: value for key, value in guide.items() if key != "trust"}}


def _named_by(source: str | Path | None) -> str:
    return "the recipe" if source is None else str(source)


def _given(settings: Mapping[str, Any], **named: str | Path | None) -> dict[str, Any]:
    """Settings with those that have a parameter of their own; paths as text, None left out."""
    return layered(settings, {key: str(value) for key, value in named.items() if value is not None})


def _resumed(out: str | Path | None) -> Path:
    if out is None:
        raise UserError("`resume` needs the folder of the run to go on with: give it as `out`")
    return Path(out)


def _config(path: str | Path, kind: str) -> tuple[dict[str, Any], Genotype | None]:
    """Settings from a file; from a run also the genotype that it trained."""
    data = read_mapping(path)
    if data.get("format") != FORMAT:
        return layered(data), None
    manifest = stored_fields(data, path)
    if manifest["kind"] != kind:
        raise UserError(f"--config of a {kind} must be a {kind} run, but {path} is a {manifest['kind']} run")
    stored = manifest["results"].get("genotype")
    return manifest["recipe"], None if stored is None else Genotype.from_dict(stored, f"{path}: genotype")


def _inherited(source: str | Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a training takes over from the run that its genotype comes from: plugins, data and, of a search, the space.

    Not the sizes of its supernet, but those of the network for which a budget was counted. given: what was asked for;
    with other data where they lie and how large their images are is another matter too.
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
    # A budget for other data says nothing of the network that is trained on these.
    counted = resource.network if resource.budgets() and not resource.elsewhere else {}
    return {**found, "space_settings": {**kept, **counted}}


def _rows(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    return read_json_lines(file) if file.is_file() else []


def _finished_search(folder: Path, recipe: SearchRecipe) -> SearchResult | None:
    run = RunFolder.open(folder)
    if run.manifest["status"] != "finished":
        return None
    run.verify("genotype.json", "metrics.jsonl", "architecture.jsonl")
    result = SearchResult(folder, recipe, Genotype.load(folder), _rows(folder), 0)
    if is_main() and not (folder / drawings.CELLS).exists():
        _draw_search(result)
    return result


def _draw_training(result: TrainResult) -> None:
    title = f"{result.genotype.space} network on {result.recipe.data}"
    drawings.draw_genotype(result.folder, result.genotype, title)
    drawings.draw_curves(result.folder, result.metrics, title)
    write_report([result.folder], result.folder / REPORT)


def _draw_search(result: SearchResult) -> None:
    recipe = result.recipe
    title = f"{recipe.method} in space {recipe.space} on {recipe.data}"
    if result.genotype is not None:
        drawings.draw_genotype(result.folder, result.genotype, title)
    drawings.draw_curves(result.folder, result.metrics, title)
    layout = build_space(recipe.space, recipe.space_settings).layout()
    drawings.draw_architecture(result.folder, layout, title)
    write_report([result.folder], result.folder / REPORT)
