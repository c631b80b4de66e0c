"""From a recipe to a run folder with a derived architecture.

A search may have two phases (full-attention NAS, §III-D): phase 1 searches by context auto-regression, phase 2 on the
target task. Only architecture parameters carry over; phase 2 starts from new weights.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from softcell.arch import Genotype, empty_cells
from softcell.arch.evolve import Evolution
from softcell.data import Dataset, datasets, fingerprint
from softcell.data.dataset import content_of
from softcell.data.splits import test_set_sealed
from softcell.engine import RunFolder, checkpoint, new_manifest
from softcell.engine.distributed import barrier, broadcast_module, on_main
from softcell.engine.interleave import Running, drain
from softcell.engine.lock import locked
from softcell.engine.loop import Outcome
from softcell.engine.runfolder import MANIFEST, clear, failure_recorded, notifier, record_failure, run_in_folder
from softcell.engine.session import Session, seed_everything, session_of
from softcell.engine.task import OnEvent
from softcell.errors import UserError
from softcell.files import FILE_LIST, atomic_write_bytes, atomic_write_text, read_json_lines
from softcell.kernels.warm_up import workers_ready
from softcell.methods import METHODS, Method
from softcell.registry import load_plugins
from softcell.search.budget import state_budget
from softcell.search.build import AnyTask, build_task, with_precision
from softcell.search.dry_pass import launches_kernels
from softcell.search.genotypes import about_of
from softcell.search.guide import Guide
from softcell.search.recipe import Pretrain, SearchRecipe, Select, load_images, resolve
from softcell.search.resource import Resource
from softcell.search.supernet import RECALIBRATED, draw_reconstructions
from softcell.search.task import SearchTask
from softcell.settings import refuse_changes, without_auto
from softcell.spaces import build_space
from softcell.text import Shown, count_of, percent

FIRST = "phase-1"
LOGITS = "logits.safetensors"


@dataclass(frozen=True, slots=True, repr=False)
class SearchResult(Shown):
    """The result of a search; `genotype` is None if it was interrupted; a program should end with `exit_code`.

    Example:
        >>> from softcell.api import search
        >>> sizes = {"cells_per_stage": 1, "channels": 2}
        >>> result = search("random", space="nb201", epochs=1, space_settings=sizes, method_settings={"samples": 2})
        >>> result.exit_code, result.genotype.space, str(result.folder)
        (0, 'nb201', 'runs/random-nb201-digits-1')
    """

    folder: Path
    recipe: SearchRecipe
    genotype: Genotype | None
    metrics: list[dict[str, Any]]
    exit_code: int

    def __repr__(self) -> str:
        last = self.metrics[-1] if self.metrics else {}
        found = last.get("best_val_accuracy", last.get("val_accuracy"))
        state = "interrupted" if self.genotype is None else count_of(len(self.metrics), "epoch")
        accuracy = "" if found is None else f", {last.get('val_split', 'validation')} {percent(found)}"
        return f"SearchResult({self.folder}: {self.recipe.title}, {state}{accuracy})"


def search(
    recipe: SearchRecipe,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
) -> SearchResult:
    """Runs `recipe` in the folder `out`. With `resume`, continues the run in it (see `stored_recipe`).

    The test set is sealed during the search: the method cannot read it.

    Example:
        >>> from softcell.search import resolve, search
        >>> sizes = {"cells_per_stage": 1, "channels": 2}
        >>> recipe = resolve({"method": "random", "space": "nb201", "epochs": 1, "space_settings": sizes})
        >>> search(recipe, "runs/example").genotype.space
        'nb201'
    """
    return drain(search_steps(recipe, out, resume=resume, overwrite=overwrite, on_event=on_event))


def search_steps(
    recipe: SearchRecipe,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
) -> Running[SearchResult]:
    """`search` as a run whose steps can be interleaved with those of others (`softcell.engine.interleave`)."""
    out = Path(out)
    load_plugins(recipe.plugins)
    with session_of(recipe) as session, locked(out, session.world):
        # Several ranks would each start a worker per core, and samplers have no supernet whose kernels are compiled.
        alone = session.world.size == 1 and issubclass(METHODS.get(recipe.method), Method)
        with workers_ready(alone and launches_kernels(session.world, recipe.precision)):
            phases = _two_phases if recipe.pretrain.epochs else _one_phase
            return (yield from phases(recipe, out, session, resume, overwrite, on_event))


def _two_phases(
    recipe: SearchRecipe, out: Path, session: Session, resume: bool, overwrite: bool, on_event: OnEvent | None
) -> Running[SearchResult]:
    """A search by context auto-regression in `out`/phase-1, then the search itself from the logits it left.

    Each phase is a run like any other, with its own checkpoints, so that both can be interrupted and resumed anywhere.
    """
    first, first_folder, world = first_phase(recipe), out / FIRST, session.world
    if not resume:
        _check_phases(first, recipe, session)
        manifest = new_manifest("search", recipe.to_dict(), recipe.seed)
        on_main(lambda: RunFolder.create(out, manifest, overwrite), world)
        on_main(lambda: _remove_first_phase(out), world)
    on_main(lambda: RunFolder.open(out).update(status="running"), world)
    notify = notifier(on_event, world)
    # Only the main process reads folders; the others receive the result.
    is_begun = on_main(lambda: resume and (first_folder / "run.json").is_file(), world)
    try:
        if not is_begun or on_main(lambda: str(RunFolder.open(first_folder).manifest["status"]), world) != "finished":
            data = first.data if first.classes is None else f"{first.classes} classes of {first.data}"
            notify(f"phase 1 of 2: context auto-regression on {data}, {_epochs(first)}: {first_folder}")
            done = yield from _one_phase(first, first_folder, session, is_begun, overwrite, on_event)
            if done.genotype is None:
                on_main(lambda: RunFolder.open(out).finish("interrupted"), world)
                return SearchResult(out, recipe, None, done.metrics, done.exit_code)
        notify(f"phase 2 of 2: {recipe.method} on {recipe.data}, {_epochs(recipe)}, from the logits of phase 1")
        # `resume`, since the folder exists: `_search` sees by its checkpoint whether this phase has begun.
        return (yield from _one_phase(recipe, out, session, True, overwrite, on_event, start=first_folder / LOGITS))
    except Exception:
        # A phase records a failure in its own folder; the search in `out` has failed too.
        if world.is_main:
            record_failure(RunFolder.open(out), world)
        raise


def _check_phases(first: SearchRecipe, second: SearchRecipe, session: Session) -> None:
    """Raises the errors that either phase would raise at its start, before there is a folder."""
    shapes = []
    for phase in (first, second):
        with test_set_sealed(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the phase itself will warn
            dataset = load_images(phase)
            # Neither task is ever run, so nothing is captured and no precision is timed.
            precision = "float32" if phase.precision == "auto" else phase.precision
            plain = replace(phase, engine="eager", precision=precision)
            task = build_task(plain, dataset, phase.parts(dataset.train), session, None)
            assert isinstance(task, SearchTask)  # others have no first phase
            shapes.append({name: parameter.shape for name, parameter in task.method.named_parameters()})
    if not shapes[0]:
        raise UserError(
            f"phase 1 passes on architecture parameters, but method {second.method!r} has none; set pretrain.epochs=0"
        )
    if shapes[0] != shapes[1]:
        raise UserError(_mismatched_logits(second.method, "of phase 1"))


def _epochs(recipe: SearchRecipe) -> str:
    return "1 epoch" if recipe.epochs == 1 else f"{recipe.epochs} epochs"


def finished_search(folder: Path, recipe: SearchRecipe) -> SearchResult | None:
    """The result of the search in `folder`; None if it is not finished."""
    run, metrics = RunFolder.open(folder), folder / "metrics.jsonl"
    if run.manifest["status"] != "finished":
        return None
    run.verify("genotype.json", "metrics.jsonl", "architecture.jsonl")
    rows = read_json_lines(metrics) if metrics.is_file() else []
    return SearchResult(folder, recipe, Genotype.load(folder), rows, 0)


def stored_recipe(folder: str | Path, given: Mapping[str, Any]) -> SearchRecipe:
    """The recipe of the run in `folder`; settings given with it must not contradict it.

    Example:
        >>> from softcell.search import stored_recipe
        >>> stored_recipe("runs/search", {}).method
        'darts'
    """
    manifest = RunFolder.open(folder).manifest
    if manifest["kind"] != "search":
        raise UserError(f"--resume needs a search run, but {folder} is a `softcell {manifest['kind']}` run")
    stored = manifest["recipe"]
    load_plugins(stored.get("plugins", ()), f"the run in {folder}")
    # Before anything else: settings of one method or space mean nothing to another.
    named = {key: stored[key] for key in ("method", "space")}
    refuse_changes(named, {key: given.get(key, value) for key, value in named.items()})
    recipe, wanted = resolve(stored), resolve(stored, without_auto(given))
    refuse_changes(recipe.to_dict(), wanted.to_dict())
    return recipe


def _one_phase(
    recipe: SearchRecipe,
    out: Path,
    session: Session,
    resume: bool,
    overwrite: bool,
    on_event: OnEvent | None,
    start: Path | None = None,
) -> Running[SearchResult]:
    """One search in `out`. start: the file of logits of an earlier phase; `out` then exists."""
    seed_everything(recipe.seed)  # each phase draws what it would draw alone
    with locked(out, session.world), test_set_sealed():
        # The number of threads decides how sums are split on a CPU: a run is repeatable only with the same number.
        recipe = replace(recipe, threads=recipe.threads or session.threads)
        return (yield from _search(recipe, out, session, resume, overwrite, on_event, start))


def _search(
    recipe: SearchRecipe,
    out: Path,
    session: Session,
    resume: bool,
    overwrite: bool,
    on_event: OnEvent | None,
    start: Path | None,
) -> Running[SearchResult]:
    world = session.world
    # Data first: a wrong path must not leave a run folder behind.
    dataset = load_images(recipe)
    parts = recipe.parts(dataset.train)
    recipe = with_precision(recipe, dataset, parts, session, on_event)
    task = build_task(recipe, dataset, parts, session, on_event)

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
            # `_two_phases` wrote the manifest before precision and threads were chosen and the data were read.
            begun.update(recipe=recipe.to_dict(), results={**begun.manifest["results"], **manifest()["results"]})

        on_main(note, world)
    made = start is not None and not on_main(lambda: checkpoint.exists(out), world)  # the second of two phases begins
    if resume and not made:
        on_main(lambda: _check_teacher(out, task.about), world)
    if overwrite and not resume:
        on_main(lambda: _remove_first_phase(out), world)
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
    """After the last epoch: derives the architecture, writes its file and the results in the manifest."""
    world = session.world
    found = task.select(out) if isinstance(task, SearchTask) else task.derive()
    empty = empty_cells(found, build_space(recipe.space, recipe.space_settings).layout())
    if empty:
        notifier(on_event, world)(
            f"cell {' and cell '.join(map(repr, empty))} is empty: all paths from its inputs to its output are `none`. "
            "`softcell train` rejects it. Search with a weaker penalty (--resource mild) or longer (--epochs), or use "
            f"the cells of an earlier epoch ({out}@EPOCH)."
        )
    about: dict[str, Any] = {**about_of(recipe.to_dict()), "epochs": len(outcome.metrics)}
    results = task.conclude(Genotype(found.space, found.cells, found.settings, about))
    results |= {"empty_cells": empty} if empty else {}
    about |= state_budget(recipe, dataset.shape, dataset.num_classes, results)
    genotype = Genotype(found.space, found.cells, found.settings, about)

    def conclude() -> None:
        if isinstance(task, SearchTask) and not task.objective.supervised:
            _write_logits(task.method, out / LOGITS)
            draw_reconstructions(task, dataset, parts[recipe.measured_split], session, out)
        atomic_write_text(out / "genotype.json", genotype.dumps())
        last: dict[str, Any] = next((row for row in reversed(outcome.metrics) if "val_accuracy" in row), {})
        folder.finish(
            "finished",
            stopped=outcome.reason,
            val_accuracy=last.get("best_val_accuracy", last.get("val_accuracy")),  # of the architecture that is taken
            **{key: last[key] for key in ("val_top5", RECALIBRATED) if key in last and "best_val_accuracy" not in last},
            val_split=recipe.measured_split,
            seconds=sum(row["seconds"] for row in outcome.metrics),
            **results,
        )

    on_main(conclude, world)
    return genotype


def _check_teacher(folder: Path, about: Mapping[str, Any]) -> None:
    """A resumed search must have the teacher it started with."""
    before, now = RunFolder.open(folder).manifest["results"].get("guide"), about.get("guide")
    if before is not None and now is not None and before["digest"] != now["digest"]:
        raise UserError(
            f"a resumed run keeps its teacher, but the weights of {now['teacher']} are not those it started with "
            f"({before['teacher']}); put the old weights back, or start a new run"
        )


def first_phase(recipe: SearchRecipe) -> SearchRecipe:
    """The recipe of phase 1: the same search by another objective.

    Budgets, teachers and selection belong to the target task.
    """
    own = recipe.pretrain
    rate = recipe.architecture.lr if own.architecture_lr is None else own.architecture_lr
    same = own.data is None
    # A folder is found by its path; named data are in the root of the search's.
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


def _remove_first_phase(folder: Path) -> None:
    """Removes the first phase of an earlier search from a folder that is overwritten, so that none resumes it."""
    first_folder = folder / FIRST
    if all((path / MANIFEST).is_file() for path in (folder, first_folder)):
        clear(first_folder)
        for name in (MANIFEST, FILE_LIST):
            (first_folder / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # files of the user stay
            first_folder.rmdir()


def _write_logits(method: Method, file: Path) -> None:
    """Writes the architecture parameters atomically."""
    state = {name: p.detach().cpu().contiguous() for name, p in method.named_parameters()}
    atomic_write_bytes(file, save(state))


@torch.no_grad()
def read_logits(method: Method, file: Path) -> None:
    """Sets the architecture parameters to those of an earlier phase."""
    try:
        state = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"the logits of phase 1 cannot be read from {file} ({error}); search again") from error
    own = dict(method.named_parameters())
    if {name: p.shape for name, p in own.items()} != {name: t.shape for name, t in state.items()}:
        raise UserError(_mismatched_logits(method.name, f"in {file}"))
    for name, parameter in own.items():
        parameter.copy_(state[name])


def _mismatched_logits(method: str, which: str) -> str:
    """The message for architecture parameters that cannot be passed on."""
    return (
        f"the architecture parameters {which} do not fit those of method {method!r}; phases must have one method and "
        "space, and for methods that look at feature maps one image size"
    )
