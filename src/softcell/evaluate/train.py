"""From a genotype to a trained network in a run folder, measured once on the test set."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save
from torch import nn

from softcell.arch import Genotype
from softcell.data import Augment, Dataset, fingerprint, load, split
from softcell.data.batches import Feeds
from softcell.data.dataset import content_of
from softcell.data.splits import exchange_seal, test_set_sealed
from softcell.engine import RunFolder, checkpoint, new_manifest
from softcell.engine.distributed import World, agree, barrier, on_main
from softcell.engine.interleave import PER_RUN_STATES, Running, drain
from softcell.engine.lock import locked
from softcell.engine.loop import Outcome
from softcell.engine.metrics import Measured
from softcell.engine.runfolder import failure_recorded, notifier, run_in_folder
from softcell.engine.session import Session, session_of
from softcell.engine.task import OnEvent
from softcell.engine.timing import TimeBudget, choose_precision, choose_threads, seconds_per_step
from softcell.errors import UserError
from softcell.evaluate._retrieval import RANKS, measure_retrieval, num_seen, zero_shot
from softcell.evaluate.predictions import Predictions, predict, write_predictions
from softcell.evaluate.recipe import TrainRecipe, cutout_side, fit_data, fit_length, resolve
from softcell.evaluate.task import TrainTask
from softcell.files import atomic_write_bytes, read_json_lines
from softcell.nn.classifiers import Classifier
from softcell.nn.objective import ProxyNCA
from softcell.registry import load_plugins
from softcell.settings import build, refuse_changes, to_dict, without_auto
from softcell.spaces import Inputs, Network, build_space
from softcell.spaces.base import fit_space
from softcell.spaces.costs import Cost, count_genotype
from softcell.spaces.pretrained import WEIGHTS, describe_initial, load_initial
from softcell.text import Shown, count_of, percent

R = TypeVar("R", bound=TrainRecipe)
PROBING_SHARE = 0.02
"""The share of a training run's time in which numbers of threads are timed, and steps to forecast its epochs."""
PER_RUN_STATES.append(exchange_seal)  # a finished training run reads the test set while others still run


@dataclass(frozen=True, slots=True, repr=False)
class TrainResult(Shown):
    """The result of a training run. `accuracy` is a share in 0..1 on `split` (`test`, or `holdout` if the recipe leaves
    the test set sealed), None if interrupted.

    Example:
        >>> from softcell.api import train
        >>> cell = "|skip_connect~0|+|none~0|skip_connect~1|+|none~0|none~1|nor_conv_3x3~2|"
        >>> tiny = {"cells_per_stage": 1, "channels": 2}
        >>> result = train(cell, data="digits", epochs=1, space_settings=tiny, out="runs/example")
        >>> result.split, 0 <= result.accuracy <= 1, result.cost.parameters
        ('test', True, 2080)
    """

    folder: Path
    recipe: TrainRecipe
    genotype: Genotype
    network: Network
    accuracy: float | None
    split: str
    cost: Cost
    metrics: list[dict[str, Any]]
    exit_code: int
    recall: Mapping[int, float] | None = None
    """For a retrieval, by k: the share of queries with an image of their class among the k nearest."""
    top5: float | None = None
    """The share of `split` whose class is among the five strongest; None with five classes or fewer."""

    def __repr__(self) -> str:
        figures = [f"{self.split} {percent(self.accuracy)}"] if self.accuracy is not None else []
        figures += [f"recall@{k} {percent(share)}" for k, share in (self.recall or {}).items()]
        state = "interrupted" if self.exit_code else ", ".join(figures) or "not measured"
        return (
            f"TrainResult({self.folder}: {self.genotype.space} network on {Path(self.recipe.data).name}, {state}, "
            f"{count_of(self.cost.parameters, 'parameter')})"
        )


def train(
    genotype: Genotype,
    recipe: TrainRecipe,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
) -> TrainResult:
    """Trains the network of `genotype` in the folder `out`; the test set is sealed until training is over.

    Example:
        >>> from softcell.arch import sample
        >>> from softcell.evaluate import resolve, train
        >>> from softcell.spaces import build_space
        >>> genotype = sample(build_space("nb201").layout(), seed=0)
        >>> sizes = {"cells_per_stage": 1, "channels": 2}
        >>> recipe = resolve(genotype, {"recipe": "small", "data": "digits", "epochs": 1, "space_settings": sizes})
        >>> train(genotype, recipe, "runs/example").exit_code
        0
    """
    return drain(train_steps(genotype, recipe, out, resume=resume, overwrite=overwrite, on_event=on_event))


def train_steps(
    genotype: Genotype,
    recipe: TrainRecipe,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
    startup: float = 0.0,
    later: Callable[[], float] | None = None,
) -> Running[TrainResult]:
    """`train` as a run whose steps can be interleaved with those of others (`softcell.engine.interleave`).

    startup: up to this many seconds before the first step are not part of the recipe's time. later: how many seconds
    later than planned the training may end, called between steps; for one process.
    """
    budget = TimeBudget(recipe.time, startup, later) if recipe.time else None  # reading the data takes a part of it
    load_plugins(recipe.plugins)
    with session_of(recipe) as session, locked(out, session.world):
        if not recipe.time:  # otherwise `prepare` times steps to choose
            recipe = replace(recipe, threads=recipe.threads or session.threads)
        return (yield from _train(genotype, recipe, Path(out), session, resume, overwrite, on_event, budget))


def stored_training(folder: str | Path, given: Mapping[str, Any]) -> tuple[Genotype, TrainRecipe]:
    """Genotype and recipe of the training run in `folder`; settings given with it must not contradict it.

    Example:
        >>> from softcell.evaluate import stored_training
        >>> genotype, recipe = stored_training("runs/train", {})
        >>> genotype.space, recipe.data
        ('nb201', 'digits')
    """
    manifest = RunFolder.open(folder).manifest
    if manifest["kind"] != "train":
        raise UserError(f"--resume needs a training run, but {folder} is a `softcell {manifest['kind']}` run")
    load_plugins(manifest["recipe"].get("plugins", ()), f"the run in {folder}")
    genotype = Genotype.from_dict(manifest["results"]["genotype"], f"{folder}: genotype")
    recipe = build(TrainRecipe, manifest["recipe"], f"{folder}: recipe")
    space = fit_space(
        genotype, build_space(genotype.space, recipe.space_settings), {}
    )  # earlier versions stored other settings
    recipe = replace(recipe, space_settings=to_dict(space))
    wanted = resolve(genotype, manifest["recipe"], without_auto(given))
    refuse_changes(recipe.to_dict(), wanted.to_dict())
    return genotype, recipe


def finished_training(folder: Path, genotype: Genotype, recipe: TrainRecipe) -> TrainResult | None:
    """The result of the training run in `folder`; None if it is not finished."""
    run = RunFolder.open(folder)
    manifest = run.manifest
    if manifest["status"] != "finished":
        return None
    run.verify("metrics.jsonl")  # the weights are verified where they are loaded
    results = manifest["results"]
    cost = Cost(results["parameters"], results["multiply_adds"])
    rows = read_json_lines(folder / "metrics.jsonl")
    recall = {k: results[f"recall_at_{k}"] for k in RANKS} if recipe.task == "retrieve" else None
    accuracy, split = results.get("accuracy"), results["split"]
    network, top5 = load_network(folder), results.get("top5")
    return TrainResult(folder, recipe, genotype, network, accuracy, split, cost, rows, 0, recall, top5)


def load_network(folder: str | Path, *, trust: bool = False) -> Network:
    """The trained network of a finished training run, on the CPU and in eval mode. trust: run plugins that it names.

    Example:
        >>> import torch
        >>> from softcell.evaluate import load_network
        >>> network = load_network("runs/train")
        >>> network.training, network(torch.rand(3, 1, 8, 8)).shape
        (False, torch.Size([3, 10]))
    """
    return Network.from_pretrained(folder, trust=trust)


def _train(
    genotype: Genotype,
    recipe: TrainRecipe,
    out: Path,
    session: Session,
    resume: bool,
    overwrite: bool,
    on_event: OnEvent | None,
    budget: TimeBudget | None,
) -> Running[TrainResult]:
    world = session.world
    with test_set_sealed():
        dataset = load(recipe.data, recipe.data_root, recipe.image_size, scaled_to=recipe.scaled_to)
        space = build_space(genotype.space, recipe.space_settings)
        retrieving = recipe.task == "retrieve"
        if retrieving:
            dataset = zero_shot(dataset)
        outputs = recipe.embedding if retrieving else dataset.num_classes
        cost = count_genotype(space, genotype, dataset.shape, outputs)
        network = space.network(genotype, dataset.shape, outputs, auxiliary=recipe.auxiliary > 0)
        scaled_to = dataset.scaled_to or dataset.shape[1:]
        network.inputs = Inputs(dataset.classes, dataset.mean, dataset.std, scaled_to, dataset.whole)
        begun = resume and on_main(lambda: checkpoint.exists(out), world)
        # A resumed run gets its weights from the checkpoint, and the run they came from may be gone.
        initial = None if recipe.init is None or begun else load_initial(network, recipe.init)
        if initial is not None:
            notifier(on_event, world)(describe_initial(initial, recipe.holdout))
        criterion = session.place(ProxyNCA(num_seen(dataset), outputs)) if retrieving else None
        session.place(network)
        job = f"train {genotype.space}, {recipe.space_settings}"
        recipe, task, feeds, parts = prepare(recipe, dataset, network, session, job, on_event, criterion, budget)

        def manifest() -> dict[str, Any]:
            # Complete from the start: a run that is killed at once can be resumed, and repeated from run.json alone.
            known = {"genotype": genotype.to_dict(), **facts_of(dataset, cost, parts)}
            known["data"]["outputs"] = outputs
            if initial is not None:
                known["init"] = initial
            return {**new_manifest("train", recipe.to_dict(), recipe.seed), "results": known}

        files = {"genotype.json": genotype.dumps()}
        folder, outcome = yield from run_in_folder(
            task,
            out,
            world,
            manifest,
            files=files,
            resume=resume,
            overwrite=overwrite,
            on_event=on_event,
            budget=budget,
        )
    if outcome.status == "interrupted":
        return TrainResult(out, recipe, genotype, network, None, "test", cost, outcome.metrics, outcome.exit_code)
    task.finish()
    with failure_recorded(folder, world):
        result = _measure(
            genotype, recipe, network, dataset, feeds, cost, world, out, folder, outcome, on_event, budget
        )
    barrier(world)
    return result


def _measure(
    genotype: Genotype,
    recipe: TrainRecipe,
    network: Network,
    dataset: Dataset,
    feeds: Feeds,
    cost: Cost,
    world: World,
    out: Path,
    folder: RunFolder,
    outcome: Outcome,
    on_event: OnEvent | None,
    budget: TimeBudget | None,
) -> TrainResult:
    """After the last epoch: saves the weights, measures the test set, writes the results in the manifest."""
    network.eval()
    measured: Measured | None = None
    answers: Predictions | None = None
    if recipe.task == "retrieve":
        # Every rank measures all images, since each query is compared with all others.
        recall, count = measure_retrieval(network, dataset, replace(feeds, rank=0, world=1))

        def remember() -> None:
            save_weights(network, out)
            seconds = sum(row["seconds"] for row in outcome.metrics)
            shares = {f"recall_at_{k}": share for k, share in recall.items()}
            used = {} if budget is None else {"time_used": budget.elapsed()}
            folder.finish("finished", **shares, split="unseen classes", count=count, seconds=seconds, **used)

        on_main(remember, world)
        return TrainResult(out, recipe, genotype, network, None, "unseen classes", cost, outcome.metrics, 0, recall)
    if not recipe.test:
        measured = _held_out(outcome.metrics)
    elif dataset.test is not None:
        measured, answers = predict(network, feeds.plain(dataset.test).epoch(0), len(dataset.test), world)

    def conclude() -> None:
        save_weights(network, out)
        if dataset.test is not None and answers is not None:
            alone = replace(feeds, rank=0, world=1)
            write_predictions(out, answers, network, dataset.test, alone, notifier(on_event, world))
        finish(folder, measured, outcome.metrics, budget, measured_on)

    measured_on = "test" if recipe.test else "holdout"
    on_main(conclude, world)
    accuracy = None if measured is None else measured.accuracy
    top5 = None if measured is None else measured.top5
    return TrainResult(out, recipe, genotype, network, accuracy, measured_on, cost, outcome.metrics, 0, top5=top5)


def _held_out(metrics: Sequence[Mapping[str, Any]]) -> Measured | None:
    """What was measured on held-out images after the last epoch; None if no images are held out."""
    last = metrics[-1] if metrics else {}
    if "val_accuracy" not in last:
        return None
    return Measured(last["val_loss"], last["val_accuracy"], last["val_count"], last.get("val_top5"))


def prepare(
    recipe: R,
    dataset: Dataset,
    network: Network | Classifier,
    session: Session,
    job: str,
    on_event: OnEvent | None,
    criterion: ProxyNCA | None = None,
    budget: TimeBudget | None = None,
) -> tuple[R, TrainTask, Feeds, dict[str, torch.Tensor]]:
    """The task that trains `network`, the recipe without settings left open, the feeds, and the splits.

    job: a description of the network; the precision that was timed for it is stored under this key.
    """
    world = session.world
    num_images, is_gpu = round(len(dataset.train) * (1.0 - recipe.holdout)), world.device.type == "cuda"
    recipe = fit_data(recipe, num_images, dataset.classes, is_gpu=is_gpu)
    feeds = Feeds(
        dataset, recipe.batch_size, recipe.seed, session.device, session.dtype, rank=world.rank, world=world.size
    )
    parts = parts_of(dataset, recipe)
    held = feeds.plain(dataset.train, parts["holdout"]) if "holdout" in parts else None
    batches, notify = feeds.training(parts["train"], augment_of(dataset, recipe)), notifier(on_event, world)

    def make(precision: str) -> TrainTask:
        """The task in a precision, to be timed and discarded."""
        tried = replace(recipe, precision=precision)  # type: ignore[arg-type]
        own, other = copy.deepcopy((network, criterion))
        quiet = notifier(None, world)  # the training itself says why its steps are not captured
        return TrainTask(tried, own, world, train=batches, held=None, notify=quiet, criterion=other)

    # Still 0 only with a time limit (`train_steps`): such a run cannot be repeated bit for bit anyway.
    if recipe.threads == 0:
        alone = world.size == 1 and not is_gpu
        most = PROBING_SHARE * recipe.time
        recipe = replace(recipe, threads=choose_threads(make("float32"), notify, most) if alone else session.threads)
    if recipe.precision == "auto":
        timed = f"{job}, batch {recipe.batch_size}, {dataset.shape}"
        recipe = replace(recipe, precision=choose_precision(timed, world, make, notify))  # type: ignore[arg-type]
    if "cutout" in recipe.auto:
        epochs, side = recipe.epochs or math.inf, dataset.shape[1]
        if recipe.time and cutout_side(epochs, num_images, side):  # unless the time ends it before
            pace = seconds_per_step(make(recipe.precision), world, PROBING_SHARE * recipe.time)
            # The clocks of ranks differ, their cutout must not.
            (used,) = agree([0 if budget is None else int(1000 * budget.elapsed())], world)
            epochs = min(epochs, (recipe.time - used / 1000) / (pace * batches.num_batches))
        recipe = fit_length(recipe, epochs, num_images, side)
        batches = feeds.training(parts["train"], augment_of(dataset, recipe))
    task = TrainTask(
        recipe,
        network,
        world,
        train=batches,
        held=held,
        notify=notify,
        criterion=criterion,
        budget=budget,
        num_tested=len(dataset.test) if budget is not None and dataset.test is not None and recipe.test else 0,
    )
    return recipe, task, feeds, parts


def finish(
    folder: RunFolder,
    measured: Measured | None,
    metrics: Sequence[Mapping[str, Any]],
    budget: TimeBudget | None = None,
    measured_on: str = "test",
) -> None:
    """Records that the run is finished, with its results on `measured_on`; measured: None without a test set."""
    folder.finish(
        "finished",
        accuracy=None if measured is None else measured.accuracy,
        top5=None if measured is None else measured.top5,
        loss=None if measured is None else measured.loss,
        split=measured_on,
        count=0 if measured is None else measured.count,
        seconds=sum(row["seconds"] for row in metrics),
        **({} if budget is None else {"time_used": budget.elapsed()}),
    )


def augment_of(dataset: Dataset, recipe: TrainRecipe) -> Augment:
    """The augmentation of training images."""
    flip = dataset.augment.flip if recipe.flip is None else recipe.flip
    augment = replace(dataset.augment, cutout=recipe.cutout, jitter=recipe.jitter, flip=flip)
    if recipe.task == "retrieve" and augment.resized_crop:  # §IV-F: scaled to 256, then cropped to 227 at random
        return replace(augment, resized_crop=False, window=True)
    return augment


def parts_of(dataset: Dataset, recipe: TrainRecipe) -> dict[str, torch.Tensor]:
    if recipe.holdout == 0.0:
        return {"train": torch.arange(len(dataset.train))}
    return split(dataset.train, {"train": 1.0 - recipe.holdout, "holdout": recipe.holdout}, recipe.seed)


def facts_of(dataset: Dataset, cost: Cost, parts: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Facts known before training that are needed to prepare inputs for the network."""
    return {
        "parameters": cost.parameters,
        "multiply_adds": cost.multiply_adds,
        "splits": {name: fingerprint(part) for name, part in parts.items()},
        "data": {
            "shape": list(dataset.shape),
            "classes": list(dataset.classes),
            "mean": list(dataset.mean),
            "std": list(dataset.std),
            "source": dataset.source,
            "scaled_to": list(dataset.scaled_to or dataset.shape[1:]),
            "whole": dataset.whole,
            "fingerprint": content_of(dataset),
        },
    }


def save_weights(network: nn.Module, out: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes the weights as safetensors, atomically and without the auxiliary tower."""
    state = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in network.state_dict().items()
        if not name.startswith("auxiliary.")
    }
    # Through memory: safetensors itself writes files that only their owner can read, and raises no OSError.
    atomic_write_bytes(out / WEIGHTS, save(state, metadata))
