"""Training a classifier of fixed architecture: a teacher for guided searches, or a network of NOS's Table 1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from softcell.data import load
from softcell.data.splits import test_set_sealed
from softcell.engine import RunFolder, new_manifest
from softcell.engine.distributed import barrier, on_main
from softcell.engine.interleave import Running, drain
from softcell.engine.lock import locked
from softcell.engine.metrics import Measured, measure
from softcell.engine.runfolder import failure_recorded, run_in_folder
from softcell.engine.session import session_of
from softcell.engine.task import OnEvent
from softcell.errors import UserError
from softcell.evaluate.recipe import TrainRecipe
from softcell.evaluate.train import facts_of, finish, prepare, save_weights
from softcell.nn.classifiers import Classifier, build_classifier, get_architecture
from softcell.registry import load_plugins
from softcell.settings import build, convert, layered, merge, refuse_changes, to_dict, without_auto
from softcell.spaces import Shape
from softcell.spaces.base import evaluation_scale
from softcell.spaces.costs import Cost, count_module
from softcell.spaces.teacher import classifier_metadata


@dataclass(frozen=True)
class TeacherRecipe(TrainRecipe):
    """The training of a classifier; settings of cells and auxiliary towers have no effect."""

    classifier: str = "pyramidnet"
    classifier_settings: dict[str, Any] = field(default_factory=dict)


RECIPES: dict[str, dict[str, Any]] = {
    # NOS, A.2.1: the learning rate is divided by 10 every 30 epochs; standard augmentation and nothing else
    "paper": {
        "epochs": 300,
        "batch_size": 32,
        "lr": 0.025,
        "schedule": "exponential",
        "lr_decay": 0.1,
        "lr_every": 30,
        "weight_decay": 1e-4,
    },
    "small": {
        "epochs": 6,
        "batch_size": 64,
        "lr": 0.05,
        "schedule": "exponential",
        "lr_decay": 0.1,
        "lr_every": 3,
        "weight_decay": 1e-4,
        "holdout": 0.1,
        "threads": 1,
    },
}
_FIXED: dict[str, Any] = {"auxiliary": 0.0, "drop_path": 0.0, "cutout": 0, "clip": 0.0}


@dataclass(frozen=True, slots=True)
class TeacherResult:
    """The result of a training run; `accuracy` on `split` is None if interrupted or without a test set."""

    folder: Path
    recipe: TeacherRecipe
    network: Classifier
    accuracy: float | None
    split: str
    cost: Cost
    metrics: list[dict[str, Any]]
    exit_code: int
    top5: float | None = None


def resolve_teacher(name: str, *layers: Mapping[str, Any]) -> TeacherRecipe:
    """A complete recipe for the classifier `name`; `classifier: {width: 16}` has settings of the network itself."""
    given = layered(*layers)
    if given.get("classifier", name) != name:
        raise UserError(
            f"the network is the argument, {name!r}, but got classifier={given['classifier']!r} too; leave that out, "
            f"or use `softcell teacher {given['classifier']}`"
        )
    if given.get("init") is not None:
        raise UserError("a teacher is trained from random weights; leave out `init`")
    if given.get("time"):
        raise UserError(f"a teacher is trained for a number of epochs; leave out time={given['time']}, pass --epochs")
    plugins = convert(tuple[str, ...], given.get("plugins", ()), "recipe.plugins")
    load_plugins(plugins)  # first: the network may use a candidate of theirs
    architecture = get_architecture(name)
    is_small = evaluation_scale(str(given.get("data", "digits"))) == "small"
    scale = str(given.get("recipe") or ("small" if is_small else "paper"))
    if scale not in RECIPES:
        raise UserError(f"the recipe of a teacher must be one of {', '.join(RECIPES)}, got {scale!r}")
    own = {"recipe": scale, "classifier": name}
    small = {"classifier_settings": dict(architecture.small)} if scale == "small" else {}
    others = [f"classifier.{one.name}" for one in fields(architecture) if one.init]  # type: ignore[arg-type]
    recipe = build(TeacherRecipe, merge(_FIXED, RECIPES[scale], small, own, given), where="recipe", elsewhere=others)
    full = to_dict(recipe)
    full["classifier_settings"] = to_dict(build(architecture, recipe.classifier_settings, f"classifier {name}"))
    return build(TeacherRecipe, full, where="recipe")


def stored_teacher(folder: str | Path, given: Mapping[str, Any]) -> TeacherRecipe:
    """The recipe of the run in `folder`; settings given with it must not contradict it."""
    manifest = RunFolder.open(folder).manifest
    if manifest["kind"] != "teacher":
        raise UserError(f"--resume needs a teacher's run, but {folder} is a `softcell {manifest['kind']}` run")
    stored = manifest["recipe"]
    recipe = build(TeacherRecipe, stored, f"{folder}: recipe")
    wanted = resolve_teacher(stored["classifier"], stored, without_auto(given))
    refuse_changes(recipe.to_dict(), wanted.to_dict())
    return recipe


def count_classifier(name: str, settings: Mapping[str, Any], shape: Shape, num_classes: int) -> Cost:
    """Parameters and multiply-adds, without memory for weights."""
    with torch.device("meta"):
        network = build_classifier(name, settings, shape[0], num_classes)
    return count_module(network, shape)


def train_teacher(
    recipe: TeacherRecipe,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
) -> TeacherResult:
    """Trains the classifier in the folder `out`; the test set is sealed until training is over."""
    return drain(teacher_steps(recipe, out, resume=resume, overwrite=overwrite, on_event=on_event))


def teacher_steps(
    recipe: TeacherRecipe,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
) -> Running[TeacherResult]:
    """`train_teacher` as a run whose steps can be interleaved with those of others (`softcell.engine.interleave`)."""
    load_plugins(recipe.plugins)
    out = Path(out)
    with session_of(recipe) as session, locked(out, session.world):
        world, recipe = session.world, replace(recipe, threads=recipe.threads or session.threads)
        with test_set_sealed():
            dataset = load(recipe.data, recipe.data_root, recipe.image_size)
            name, settings = recipe.classifier, recipe.classifier_settings
            cost = count_classifier(name, settings, dataset.shape, dataset.num_classes)
            network = session.place(build_classifier(name, settings, dataset.shape[0], dataset.num_classes))
            recipe, task, feeds, parts = prepare(
                recipe, dataset, network, session, f"teacher {name}, {settings}", on_event
            )

            def manifest() -> dict[str, Any]:
                known = facts_of(dataset, cost, parts)
                return {**new_manifest("teacher", recipe.to_dict(), recipe.seed), "results": known}

            folder, outcome = yield from run_in_folder(
                task, out, world, manifest, files={}, resume=resume, overwrite=overwrite, on_event=on_event
            )
        if outcome.status == "interrupted":
            return TeacherResult(out, recipe, network, None, "test", cost, outcome.metrics, outcome.exit_code)
        task.finish()
        network.eval()
        measured: Measured | None = None
        with failure_recorded(folder, world):
            if dataset.test is not None:
                measured = measure(network, feeds.plain(dataset.test).epoch(0), world)

        def conclude() -> None:
            save_weights(network, out, classifier_metadata(name, settings, dataset.shape[0], dataset.num_classes))
            finish(folder, measured, outcome.metrics)

        with failure_recorded(folder, world):
            on_main(conclude, world)
        barrier(world)
        accuracy = None if measured is None else measured.accuracy
        top5 = None if measured is None else measured.top5
        return TeacherResult(out, recipe, network, accuracy, "test", cost, outcome.metrics, 0, top5)
