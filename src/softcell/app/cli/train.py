"""`softcell train` and `teacher`: networks with a searched or a fixed architecture."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console

from softcell.app import jobs
from softcell.app.baseline import (
    FOUND,
    Baseline,
    missed_budget,
    networks_to_train,
    random_baseline,
    train_with_random,
    within_budget,
)
from softcell.app.cli import options as o
from softcell.app.cli import output
from softcell.app.cli.output import command, console, print_fields
from softcell.app.cli.search import resumed
from softcell.app.process import explain_failure, record_error
from softcell.app.progress import Display, listener_beside, seed_listeners
from softcell.app.report.trackers import Tracking
from softcell.arch import Genotype
from softcell.engine import RunFolder
from softcell.engine.runfolder import output_folder
from softcell.engine.session import join_processes
from softcell.errors import UserError
from softcell.evaluate import TrainRecipe
from softcell.evaluate.teacher import resolve_teacher, stored_teacher, train_teacher
from softcell.recipes import train_seeds_recipe
from softcell.seeds import num_sharing
from softcell.text import clock, count_of, parse_time, percent

commands = typer.Typer()


@commands.command(
    "train",
    epilog=o.examples(
        "softcell train runs/darts-darts-digits-1",
        "softcell train runs/darts-darts-digits-1 --random 3",
        "softcell train runs/darts-darts-digits-1 --seeds 3",
        "softcell train cell.json --data photos --recipe fast --time 5m",
        "softcell train cell.json --data cub200 --from runs/train-darts-imagenet-1",
        "softcell train runs/snas-nb201-digits-1 --channels 8 --from runs/snas-nb201-digits-1",
        "softcell train cell.json --data cifar10 --data-root ~/data --recipe cifar",
        "softcell train cell.json --cells 8 --channels 16 --set drop_path=0.3",
        "softcell train --resume runs/train-darts-digits-1",
        "softcell train --config runs/train-darts-digits-1 --out again",
    ),
)
def train(
    genotype: Annotated[
        str | None,
        typer.Argument(
            metavar="GENOTYPE",
            help="A genotype file, FILE@NAME, a run folder, RUN@EPOCH, DARTS notation, a NAS-Bench-201 string, or - "
            "for standard input; with --resume, the folder of the training run.",
        ),
    ] = None,
    data: o.Data = None,
    data_root: o.DataRoot = None,
    image_size: o.ImageSize = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="small, fast, cifar, imagenet, ... (`softcell list recipes`). Default: chosen by the data."),
    ] = None,
    task: Annotated[
        Literal["classify", "retrieve"] | None,
        typer.Option(
            help="classify, or retrieve: learn from the first half of the classes, retrieve images of the rest."
        ),
    ] = None,
    epochs: o.Epochs = None,
    time: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Train for a time such as 5m, 90s or 1h30m, evaluation included, instead of a number of epochs; with "
            "--epochs, whichever ends first. The learning rate follows the time.",
        ),
    ] = None,
    batch_size: o.BatchSize = None,
    cells: o.Cells = None,
    channels: o.Channels = None,
    seed: o.Seed = None,
    seeds: o.Seeds = None,
    at_once: o.AtOnceTraining = None,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Start from the weights of a finished training run or of a search's supernet, layer by layer where "
            "they fit; a classifier with a different number of classes stays random.",
        ),
    ] = None,
    device: o.Device = None,
    random: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Also train N random architectures of the space with the same recipe and seed (in OUT/random-1, ...) "
            "and compare them. All share a GPU (--at-once).",
        ),
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Run folder. Default: runs/train-SPACE-DATA-N with the next free N."),
    ] = None,
    config: o.Config = None,
    set_: o.SetTraining = None,
    resume: o.Resume = False,
    overwrite: o.Overwrite = False,
    deterministic: o.Deterministic = False,
    threads: o.Threads = None,
    precision: o.Precision = None,
    engine: o.Engine = None,
    plugin: o.Plugin = None,
    trust: o.Trust = False,
    tensorboard: o.Tensorboard = False,
    mlflow: o.Mlflow = False,
    wandb: o.Wandb = False,
    quiet: o.Quiet = False,
) -> int:
    """Train the network of an architecture from scratch and test it once, at the end."""
    track = o.trackers(locals())
    genotype, out, resume, overwrite = resumed("train", genotype, out, resume, overwrite, restarts=seeds is None)
    start = o.RunOptions(
        out=out, config=config, resume=resume, overwrite=overwrite, at_once=at_once, quiet=quiet, track=track
    )
    seconds = None if time is None else parse_time(time)
    given = o.settings(locals(), recipe=recipe, task=task, cells=cells, channels=channels, init=from_, time=seconds)
    if seeds is not None or start.resumes_seeds:
        if random:
            raise UserError(
                "--random trains several architectures with one seed and --seeds one architecture with several: run "
                "the two commands separately, and `softcell compare` both folders"
            )
        return run_seeds(o.from_stdin(genotype), given, start, seeds)
    if at_once is not None and not random:
        raise UserError(f"--at-once {at_once} requires --seeds K or --random N")
    return run_train(o.from_stdin(genotype), given, start, random)


def run_seeds(genotype: str | None, given: dict[str, Any], start: o.RunOptions, seeds: int | None) -> int:
    """Trains one architecture with several seeds; prints the accuracy of each, mean and standard deviation."""
    start.check_at_once()
    chosen, wanted, recipe, folder = train_seeds_recipe(
        genotype, given, config=start.config, seeds=seeds, out=start.out, resume=start.resume
    )
    screen = console()
    heading = (
        f"train {wanted.space} network, recipe {recipe.recipe}, data {recipe.data}, {_length(recipe)}seeds {chosen[0]} "
        f"to {chosen[-1]}: {folder}"
    )
    if not start.quiet:
        screen.print(heading, highlight=False)
    with Display(screen, "", start.quiet) as display, ExitStack() as tracked:
        result = jobs.train_seeds(
            wanted,
            recipe,
            folder,
            chosen,
            at_once=start.at_once,
            resume=start.resume,
            overwrite=start.overwrite,
            on_event=seed_listeners(display, folder, start.track, tracked),
        )
    output.show_trained_seeds(screen, result)
    not_started = len(chosen) - len(result.results) - len(result.errors)
    if not_started or any(one.exit_code for one in result.results.values()):
        output.interrupted(screen, "train", "--resume", str(folder), *start.sharing)
    return result.exit_code


def run_train(genotype: str | None, given: dict[str, Any], start: o.RunOptions, random: int) -> int:
    """Trains the architecture and `random` random ones, on a GPU at the same time, and compares them."""
    start.check_at_once()
    chosen, others, recipe = networks_to_train(
        genotype, given, start.config, start.out if start.resume else None, random
    )
    screen = console()
    missed, within = missed_budget(chosen), within_budget(chosen) if random else None
    if missed is not None:
        compared = "; the random architectures meet it" if random else ""
        screen.print(f"note: {missed}{compared}", style="yellow", markup=False)

    with join_processes(recipe.device, recipe.deterministic) as world:
        folder = output_folder(start.out, world, "train", chosen.space, recipe.data)
        output.already_finished(screen, folder, start.resume)
        heading = (
            f"train {chosen.space} network, recipe {recipe.recipe}, data {recipe.data}, "
            f"{_length(recipe)}seed {recipe.seed}: {folder}"
        )
        if start.at_once is not None and world.size > 1:
            raise UserError(
                f"--at-once {start.at_once} needs one process, but torchrun started {world.size}; leave it out"
            )
        together = num_sharing(1 + random, world.device, start.at_once, recipe.time)
        if random and together > 1 and world.size == 1:
            return _train_sharing(screen, heading, chosen, others, recipe, folder, start, together=together)
        with Display(screen, heading, start.quiet) as display, Tracking(start.track, folder, display) as listener:
            result = jobs.train(
                chosen, recipe, folder, resume=start.resume, overwrite=start.overwrite, on_event=listener
            )
        again = ["train", "--resume", str(folder), *(["--random", str(random)] if random else [])]
        if result.exit_code:
            output.interrupted(screen, *again)
            return result.exit_code
        if world.is_main:
            output.show_training(screen, result, RunFolder.open(folder).manifest["results"])
        if not random:
            return 0
        if within is not None and world.is_main:
            screen.print(f"\nrandom architectures are sampled within the budget of the search: {within}", markup=False)
        with Display(screen, "", start.quiet) as display, Tracking(start.track, folder, display) as listener:

            def begin(number: int, run_folder: Path) -> None:
                display.heading = f"\nrandom architecture {number} of {random}: {run_folder}"
                # Trackers log every architecture as a separate run.
                listener.folder = run_folder

            baseline = random_baseline(
                others,
                recipe,
                folder,
                resume=start.resume,
                overwrite=start.overwrite,
                on_event=listener,
                on_start=begin,
            )
    if baseline.exit_code:
        output.interrupted(screen, *again)
        return baseline.exit_code
    output.show_comparison(screen, result, baseline)
    return 0


def _train_sharing(
    screen: Console,
    heading: str,
    found: Genotype,
    others: Sequence[Genotype],
    recipe: TrainRecipe,
    folder: Path,
    start: o.RunOptions,
    *,
    together: int,
) -> int:
    """`run_train` with random architectures that share the device with the found one."""
    if not start.quiet:
        screen.print(f"{heading}, with {count_of(len(others), 'random architecture')}", highlight=False)
        if (within := within_budget(found)) is not None:
            screen.print(f"random architectures are sampled within the budget of the search: {within}", markup=False)
    with Display(screen, "", start.quiet) as display, ExitStack() as tracked:
        ran = train_with_random(
            found,
            others,
            recipe,
            folder,
            at_once=together,
            resume=start.resume,
            overwrite=start.overwrite,
            on_event=lambda name, run_folder: listener_beside(display, name, run_folder, start.track, tracked),
        )
    result = ran.results.get(FOUND)
    if result is not None and not result.exit_code:
        output.show_training(screen, result, RunFolder.open(folder).manifest["results"])
    for name, error in ran.errors.items():
        reason = explain_failure(error) or str(error)
        record_error(f"{name}: {reason}")
        print_fields(screen, **{name: f"failed: {reason}"})
    not_started = 1 + len(others) - len(ran.results) - len(ran.errors)
    if not_started or any(one.exit_code for one in ran.results.values()):
        output.interrupted(screen, "train", "--resume", str(folder), "--random", str(len(others)), *start.sharing)
    elif result is not None and not ran.errors:
        random = [one for name, one in ran.results.items() if name != FOUND]
        output.show_comparison(screen, result, Baseline(random, result.split, 0))
    return ran.exit_code


def _length(recipe: TrainRecipe) -> str:
    """The time of a training run, for its heading; nothing if it has no limit."""
    return f"time {clock(recipe.time)}, " if recipe.time else ""


@commands.command(
    "teacher",
    epilog=o.examples(
        "softcell teacher pyramidnet --data cifar10 --data-root ~/data --out teachers/pyramidnet",
        "softcell search nos --data cifar10 --data-root ~/data --guide teachers/pyramidnet",
        "softcell teacher resnet18 --set classifier.width=16 --epochs 5",
        "softcell teacher resnet18 --set classifier.operation=dynamic_conv_3x3 --data cifar10",
        "softcell teacher --resume teachers/pyramidnet",
    ),
)
def teacher(
    name: Annotated[
        str | None, typer.Argument(help="pyramidnet (NOS's) or resnet18; with --resume, the run folder.")
    ] = None,
    data: o.Data = None,
    data_root: o.DataRoot = None,
    image_size: o.ImageSize = None,
    recipe: Annotated[
        str | None, typer.Option(help="paper or small. Default: small for digits, paper for all other data.")
    ] = None,
    epochs: o.Epochs = None,
    batch_size: o.BatchSize = None,
    seed: o.Seed = None,
    device: o.Device = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Run folder. Default: runs/teacher-NAME-DATA-N with the next free N."),
    ] = None,
    set_: o.SetTraining = None,
    resume: o.Resume = False,
    overwrite: o.Overwrite = False,
    deterministic: o.Deterministic = False,
    threads: o.Threads = None,
    precision: o.Precision = None,
    engine: o.Engine = None,
    plugin: o.Plugin = None,
    trust: o.Trust = False,
    quiet: o.Quiet = False,
) -> int:
    """Train a network of fixed architecture to guide searches (`softcell search --guide DIR`)."""
    name, out, resume, overwrite = resumed("teacher", name, out, resume, overwrite)
    given = o.settings(locals(), recipe=recipe)
    resuming = out is not None and resume
    full = stored_teacher(str(out), given) if resuming else resolve_teacher(name or "pyramidnet", given)
    if name not in (None, full.classifier):
        raise UserError(f"a resumed run keeps its network, {full.classifier}, but got {name}; leave out the name")
    screen = console()
    with join_processes(full.device, full.deterministic) as world:
        folder = output_folder(out, world, "teacher", full.classifier, full.data)
        output.already_finished(screen, folder, resume)
        heading = f"teacher {full.classifier}, recipe {full.recipe}, data {full.data}, seed {full.seed}: {folder}"
        with Display(screen, heading, quiet) as display:
            result = train_teacher(full, folder, resume=resume, overwrite=overwrite, on_event=display)
    if result.exit_code:
        output.interrupted(screen, "teacher", "--resume", str(folder))
        return result.exit_code
    accuracy = "not measured: the data has no test split"
    if result.accuracy is not None:
        accuracy = f"{percent(result.accuracy)}{output.top5_of(result.top5)} on the {result.split} split"
    print_fields(
        screen,
        accuracy=accuracy,
        parameters=f"{result.cost.parameters:,}",
        multiply_adds=f"{result.cost.multiply_adds:,}",
    )
    if not quiet:
        root = () if full.data_root is None else ("--data-root", full.data_root)
        print_fields(screen, next=command("search", "nos", "--data", full.data, *root, "--guide", folder))
    return 0
