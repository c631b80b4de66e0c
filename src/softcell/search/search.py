"""From a recipe to a run folder with a derived architecture."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softcell.arch import Genotype, empty_cells, sample
from softcell.data import Batches, Dataset, fingerprint
from softcell.data.batches import Feeds
from softcell.data.dataset import content_of
from softcell.data.guard import test_set_sealed
from softcell.data.hashing import permutation
from softcell.engine import RunFolder, checkpoint, new_manifest
from softcell.engine.distributed import World, barrier, broadcast_module, on_main
from softcell.engine.files import atomic_write_text
from softcell.engine.interleave import Running, drain
from softcell.engine.lock import occupied
from softcell.engine.loop import Outcome
from softcell.engine.runfolder import failure_recorded, notifier, record_failure, run_in_folder
from softcell.engine.session import Session, open_session
from softcell.engine.task import OnEvent
from softcell.engine.timing import choose_precision
from softcell.errors import UserError
from softcell.methods import METHODS, Method, UntrainedSampler
from softcell.nn.context import ContextAutoRegression
from softcell.nn.objective import Objective
from softcell.registry import load_plugins
from softcell.search.guide import make_objective, supernet_maps, supernet_stages
from softcell.search.history import about_of
from softcell.search.independent import IndependentTask
from softcell.search.limits import budget_of_draws, resource_of
from softcell.search.perturb import check_perturbable
from softcell.search.phases import (
    FIRST,
    LOGITS,
    first_phase,
    forget_phase,
    load_images,
    read_logits,
    unfitting,
    write_logits,
)
from softcell.search.recipe import SearchRecipe, resolve, unmet
from softcell.search.reconstruct import draw_reconstructions
from softcell.search.task import SearchTask
from softcell.search.untrained import UntrainedTask
from softcell.search.validation import ANEW
from softcell.search.within import stated
from softcell.settings import build, refuse_changes, without_auto
from softcell.spaces import build_space

AnyTask = SearchTask | IndependentTask | UntrainedTask


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search leaves; `genotype` is None when it was interrupted, `exit_code` what a program should end with."""

    folder: Path
    recipe: SearchRecipe
    genotype: Genotype | None
    metrics: list[dict[str, Any]]
    exit_code: int


def search(
    recipe: SearchRecipe,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
) -> SearchResult:
    """Runs `recipe` in the folder `out`. With `resume`, goes on with the run in it (see `stored_recipe`).

    The test set is sealed while this runs: whatever the method does, it cannot look at it.
    """
    return drain(searching(recipe, out, resume=resume, overwrite=overwrite, on_event=on_event))


def searching(
    recipe: SearchRecipe,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
) -> Running[SearchResult]:
    """`search`, giving way after every step, so that searches can share a device."""
    load_plugins(recipe.plugins)
    if recipe.pretrain.epochs:
        return (yield from _in_phases(recipe, Path(out), resume, overwrite, on_event))
    return (yield from _one_phase(recipe, Path(out), resume, overwrite, on_event))


def _in_phases(
    recipe: SearchRecipe, out: Path, resume: bool, overwrite: bool, on_event: OnEvent | None
) -> Running[SearchResult]:
    """A search by context auto-regression in `out`/phase-1, then the search itself from the logits it left.

    Each is a run like any other, with checkpoints of its own, so that both can be stopped and gone on with anywhere.
    """
    first = first_phase(recipe)
    with _session(recipe) as session:
        world = session.world
    with occupied(out, world):
        return (yield from _both_phases(recipe, first, out, world, resume, overwrite, on_event))


def _both_phases(
    recipe: SearchRecipe,
    first: SearchRecipe,
    out: Path,
    world: World,
    resume: bool,
    overwrite: bool,
    on_event: OnEvent | None,
) -> Running[SearchResult]:
    place = out / FIRST
    if not resume:
        _check_phases(first, recipe)
        manifest = new_manifest("search", recipe.to_dict(), recipe.seed)
        on_main(lambda: RunFolder.create(out, manifest, overwrite), world)
        on_main(lambda: forget_phase(out), world)
    on_main(lambda: RunFolder.open(out).update(status="running"), world)
    notify = notifier(on_event, world)
    # Folders are the first process's affair; the others are told.
    begun = on_main(lambda: resume and (place / "run.json").is_file(), world)
    try:
        if not begun or on_main(lambda: str(RunFolder.open(place).manifest["status"]), world) != "finished":
            which = first.data if first.classes is None else f"{first.classes} classes of {first.data}"
            notify(f"phase 1 of 2: context auto-regression on {which}, {_epochs(first)}: {place}")
            done = yield from _one_phase(first, place, begun, overwrite, on_event)
            if done.genotype is None:
                on_main(lambda: RunFolder.open(out).finish("interrupted"), world)
                return SearchResult(out, recipe, None, done.metrics, done.exit_code)
        notify(f"phase 2 of 2: {recipe.method} on {recipe.data}, {_epochs(recipe)}, from the logits of phase 1")
        return (yield from _one_phase(recipe, out, True, overwrite, on_event, start=place / LOGITS))
    except Exception:
        if world.is_main:
            record_failure(RunFolder.open(out), world)
        raise


def _check_phases(first: SearchRecipe, second: SearchRecipe) -> None:
    """Raises what either phase would raise at its start: before there is a folder, not after the first phase."""
    handed = []
    for recipe in (first, second):
        with _session(recipe) as session, test_set_sealed(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the phase itself will warn
            dataset = load_images(recipe)
            # As plain as can be: neither is ever run.
            plain = replace(
                recipe, engine="eager", precision="float32" if recipe.precision == "auto" else recipe.precision
            )
            task = _task(plain, dataset, recipe.parts(dataset.train), session, None)
            assert isinstance(task, SearchTask)  # others have no first phase
            handed.append({name: parameter.shape for name, parameter in task.method.named_parameters()})
    if not handed[0]:
        raise UserError(
            f"a first phase hands on architecture parameters, and method {second.method!r} has none; set "
            "pretrain.epochs=0"
        )
    if handed[0] != handed[1]:
        raise UserError(unfitting(second.method, "of phase 1"))


def _epochs(recipe: SearchRecipe) -> str:
    return "1 epoch" if recipe.epochs == 1 else f"{recipe.epochs} epochs"


def _one_phase(
    recipe: SearchRecipe,
    out: Path,
    resume: bool,
    overwrite: bool,
    on_event: OnEvent | None,
    start: Path | None = None,
) -> Running[SearchResult]:
    with _session(recipe) as session, occupied(out, session.world), test_set_sealed():
        # The number of threads decides how sums are split on a CPU: it is part of what makes a run repeatable.
        recipe = replace(recipe, threads=recipe.threads or session.threads)
        return (yield from _search(recipe, out, session, resume, overwrite, on_event, start))


def _session(recipe: SearchRecipe) -> AbstractContextManager[Session]:
    return open_session(
        device=recipe.device,
        seed=recipe.seed,
        precision=recipe.precision,
        deterministic=recipe.deterministic,
        threads=recipe.threads,
    )


def stored_recipe(folder: str | Path, given: Mapping[str, Any]) -> SearchRecipe:
    """The recipe of the run in `folder`; settings given beside it must not contradict it."""
    manifest = RunFolder.open(folder).manifest
    if manifest["kind"] != "search":
        raise UserError(f"--resume of a search needs a search run, but {folder} holds a {manifest['kind']} run")
    stored = manifest["recipe"]
    load_plugins(stored.get("plugins", ()), f"the run in {folder}")
    # First of all: settings of one method or space mean nothing to another.
    named = {key: stored[key] for key in ("method", "space")}
    refuse_changes(named, {key: given.get(key, value) for key, value in named.items()})
    recipe, wanted = resolve(stored), resolve(stored, without_auto(given))
    refuse_changes(recipe.to_dict(), wanted.to_dict())
    return recipe


def _search(
    recipe: SearchRecipe,
    out: Path,
    session: Session,
    resume: bool,
    overwrite: bool,
    on_event: OnEvent | None,
    start: Path | None,
) -> Running[SearchResult]:
    """start: logits of an earlier phase to begin with; `out` is then there already."""
    world = session.world
    # Data first: a wrong path must not leave a run folder behind.
    dataset = load_images(recipe)
    parts = recipe.parts(dataset.train)
    recipe = _with_precision(recipe, dataset, parts, session, on_event)
    task = _task(recipe, dataset, parts, session, on_event)

    def manifest() -> dict[str, Any]:
        data: dict[str, Any] = {
            "shape": list(dataset.shape),
            "num_classes": dataset.num_classes,
            "fingerprint": content_of(dataset),
        }
        if recipe.classes is not None:
            data["classes"] = list(dataset.classes)
        known = {"splits": {name: fingerprint(part) for name, part in parts.items()}, "data": data, **task.about}
        return {**new_manifest("search", recipe.to_dict(), recipe.seed), "results": known}

    notify = notifier(on_event, world)
    if recipe.measured_split == "weights":
        notify(
            "split.validation=0: weights and architecture learn from all training images, and accuracies are measured "
            "on the same images (without augmentation); hold some back with --set split.held=0.1"
        )
    if recipe.scale != "small" and world.device.type == "cpu":
        notify("these are the paper's sizes, made for a GPU; on a CPU `--scale small` takes minutes, not days")
    if start is not None:
        assert isinstance(task, SearchTask)
        on_main(lambda: RunFolder.open(start.parent).verify(start.name), world)
        if world.is_main:
            read_logits(task.method, start)
        broadcast_module(task.method, world)

        def note() -> None:
            begun = RunFolder.open(out)
            begun.update(recipe=recipe.to_dict(), results={**begun.manifest["results"], **manifest()["results"]})

        on_main(note, world)
    made = start is not None and not on_main(lambda: checkpoint.exists(out), world)  # the second of two phases begins
    if resume and not made:
        on_main(lambda: _check_teacher(out, task.about), world)
    if overwrite and not resume:
        on_main(lambda: forget_phase(out), world)
    folder, outcome = yield from run_in_folder(
        task,
        out,
        world,
        manifest,
        files={},
        resume=resume and not made,
        overwrite=overwrite,
        on_event=on_event,
        made=made,
    )
    if outcome.status == "interrupted":
        return SearchResult(out, recipe, None, outcome.metrics, outcome.exit_code)
    with failure_recorded(folder, world):
        genotype = _conclude(recipe, task, dataset, parts, session, out, folder, outcome, on_event)
    barrier(world)
    return SearchResult(out, recipe, genotype, outcome.metrics, 0)


def _conclude(
    recipe: SearchRecipe,
    task: AnyTask,
    dataset: Dataset,
    parts: Mapping[str, Any],
    session: Session,
    out: Path,
    folder: RunFolder,
    outcome: Outcome,
    on_event: OnEvent | None,
) -> Genotype:
    """What comes after the last epoch: the architecture, its file, and the results in the manifest."""
    world = session.world
    found = task.select(out) if isinstance(task, SearchTask) else task.derive()
    empty = empty_cells(found, build_space(recipe.space, recipe.space_settings).layout())
    if empty:
        notifier(on_event, world)(
            f"cell {' and cell '.join(map(repr, empty))} is empty: all paths from its inputs to its output are `none`. "
            "`softcell train` refuses it. Search with a weaker penalty (--resource mild) or longer (--epochs), or take "
            f"the cells of an earlier epoch ({out}@EPOCH)."
        )
    about: dict[str, Any] = {**about_of(recipe.to_dict()), "epochs": len(outcome.metrics)}
    results = task.conclude(Genotype(found.space, found.cells, found.settings, about))
    results |= {"empty_cells": empty} if empty else {}
    about |= stated(recipe, dataset.shape, dataset.num_classes, results)
    genotype = Genotype(found.space, found.cells, found.settings, about)

    def conclude() -> None:
        if isinstance(task, SearchTask) and not task.objective.supervised:
            write_logits(task.method, out / LOGITS)
            draw_reconstructions(task, dataset, parts[recipe.measured_split], session, out)
        atomic_write_text(out / "genotype.json", genotype.dumps())
        last: dict[str, Any] = next((row for row in reversed(outcome.metrics) if "val_accuracy" in row), {})
        folder.finish(
            "finished",
            stopped=outcome.reason,
            val_accuracy=last.get("best_val_accuracy", last.get("val_accuracy")),  # of the architecture that is taken
            **{key: last[key] for key in ("val_top5", ANEW) if key in last and "best_val_accuracy" not in last},
            val_split=recipe.measured_split,
            seconds=sum(row["seconds"] for row in outcome.metrics),
            **results,
        )

    on_main(conclude, world)
    return genotype


def _check_teacher(folder: Path, about: Mapping[str, Any]) -> None:
    """A resumed search must have the teacher it began with."""
    before, now = RunFolder.open(folder).manifest["results"].get("guide"), about.get("guide")
    if before is not None and now is not None and before["digest"] != now["digest"]:
        raise UserError(
            f"a resumed run keeps its teacher, but the weights of {now['teacher']} are others than those it began with "
            f"({before['teacher']}); put the old ones back, or start again"
        )


def _with_precision(
    recipe: SearchRecipe, dataset: Dataset, parts: Mapping[str, Any], session: Session, on_event: OnEvent | None
) -> SearchRecipe:
    if recipe.precision != "auto":
        return recipe

    def make(precision: str) -> AnyTask:
        return _task(replace(recipe, precision=precision), dataset, parts, session, None)  # type: ignore[arg-type]

    job = f"search {recipe.method}, {recipe.regime}, {recipe.space}, batch {recipe.batch_size}, {dataset.shape}"
    chosen = choose_precision(job, session.world, make, notifier(on_event, session.world))
    return replace(recipe, precision=chosen)  # type: ignore[arg-type]


def _task(
    recipe: SearchRecipe, dataset: Dataset, parts: Mapping[str, Any], session: Session, on_event: OnEvent | None
) -> AnyTask:
    world = session.world
    kind, space = METHODS.get(recipe.method), build_space(recipe.space, recipe.space_settings)
    layout = space.layout()
    settings: Any = build(kind.Settings, recipe.method_settings, f"method {recipe.method}")
    feeds = Feeds(
        dataset, recipe.batch_size, recipe.seed, session.device, session.dtype, rank=world.rank, world=world.size
    )
    augment = replace(dataset.augment, cutout=recipe.cutout)
    weights = feeds.training(parts["weights"], augment)
    held = feeds.plain(dataset.train, parts[recipe.measured_split])

    notify = notifier(on_event, world)
    objective: Objective
    if not issubclass(kind, Method) and recipe.objective == "context":
        raise UserError(
            f"method {recipe.method!r} compares networks by accuracy, which context auto-regression has none of; set "
            "objective=classify and pretrain.epochs=0"
        )
    if not issubclass(kind, Method) and recipe.select.is_on:
        raise UserError(
            f"select.by={recipe.select.by} (--select) removes candidates from a trained supernet, but method "
            f"{recipe.method!r} trains architectures one by one; leave it out, or search with another method"
        )
    if not issubclass(kind, Method):
        for name in _of_supernets(recipe):
            notify(f"`{name}` belongs to searches with a supernet: {recipe.method} ignores it")
        sampler = kind(layout, settings, recipe.seed)
        budget = budget_of_draws(recipe, space, dataset, notify)
        if isinstance(sampler, UntrainedSampler):
            if recipe.guide.teacher is not None:
                notify(f"`guide` is ignored: {recipe.method} trains nothing")
            plain = feeds.plain(dataset.train, parts["weights"])
            return UntrainedTask(
                recipe, space, sampler, dataset.num_classes, world, weights=plain, notify=notify, budget=budget
            )

        def stages() -> list[tuple[int, int]]:
            with torch.device("meta"):
                network = space.network(sample(layout, 0), dataset.shape, dataset.num_classes).eval()
                return [(m.shape[-2], m.shape[-1]) for m in network.features(torch.zeros(1, *dataset.shape))]

        objective, about = make_objective(recipe.guide, stages, dataset.shape, session)
        return IndependentTask(
            recipe,
            space,
            sampler,
            objective,
            dataset.shape,
            dataset.num_classes,
            session,
            weights=weights,
            held=held,
            notify=notify,
            about=about,
            budget=budget,
        )
    for name in unmet(kind, type(space), recipe.scale):
        reason = "keeps its own" if name in recipe.space_settings else "has no such setting"
        notify(f"`space.{name}` of {recipe.method}'s recipe is ignored: space {recipe.space!r} {reason}")
    supernet = session.place(space.supernet(dataset.shape, dataset.num_classes))
    method = session.place(kind.for_supernet(settings, supernet))
    if recipe.select.is_on:
        check_perturbable(layout, method)
    resource, budget = resource_of(recipe, space, method, dataset, session, notify)
    if recipe.objective == "context":
        maps = supernet_maps(supernet, method)
        objective, about = session.place(ContextAutoRegression(maps, dataset.shape)), {}
    else:
        objective, about = make_objective(
            recipe.guide, lambda: supernet_stages(supernet, method), dataset.shape, session
        )
    return SearchTask(
        recipe,
        supernet,
        method,
        objective,
        world,
        about=about,
        weights=weights,
        validation=feeds.training(parts.get("validation", parts["weights"]), augment, stream=1),
        held=held,
        looked=_looked(recipe, method, feeds, dataset, parts, held),
        judged=_judged(recipe, feeds, dataset, parts) if recipe.select.is_on else None,
        notify=notify,
        resource=resource,
        budget=budget,
    )


def _looked(
    recipe: SearchRecipe, method: Method, feeds: Feeds, dataset: Dataset, parts: Mapping[str, Tensor], held: Batches
) -> Batches:
    """The validation split as it is, for methods that derive from a pass over it and for evolution."""
    selects = method.selection is not None or recipe.evolution.is_on
    if recipe.measured_split != "held" or not selects:
        return held
    if "validation" not in parts:
        raise UserError("an architecture is selected on the `validation` split, so `split` must name one beside `held`")
    return feeds.plain(dataset.train, parts["validation"])


def _judged(recipe: SearchRecipe, feeds: Feeds, dataset: Dataset, parts: Mapping[str, Tensor]) -> Batches:
    """The validation images that a selection by perturbation measures on, in a random order of the seed.

    BatchNorm may normalise by each batch, so no batch may hold a single class, nor be far shorter than the others.
    """
    if "validation" not in parts:
        raise UserError("an architecture is selected on the `validation` split, so `split` must name one beside `held`")
    own = parts["validation"]
    own = own[permutation(recipe.seed, 0, len(own), "select")][: recipe.select.images or None]
    batches = feeds.plain(dataset.train, own)
    if recipe.select.norms == "batch" and len(own) > batches.batch_size:
        batches = feeds.plain(dataset.train, own[: len(own) // batches.batch_size * batches.batch_size])
    return batches


def _of_supernets(recipe: SearchRecipe) -> list[str]:
    """Settings that say something about a supernet and were given."""
    given = {
        "drop_path": recipe.drop_path > 0,
        "child_every": recipe.child_every > 0,
        "evolution": recipe.evolution.is_on,
    }
    return [name for name, is_given in given.items() if is_given]
