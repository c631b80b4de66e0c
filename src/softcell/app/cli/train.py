"""`softcell train`"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from softcell.app.cli import options as o
from softcell.errors import UserError

if TYPE_CHECKING:
    from softcell.arch import Genotype

EPILOG = o.examples(
    "softcell train runs/darts-darts-digits-1",
    "softcell train runs/darts-darts-digits-1 --random 3",
    "softcell train runs/darts-darts-digits-1 --seeds 3",
    "softcell train cell.json --data cub200 --from runs/train-darts-imagenet-1",
    "softcell train cell.json --data cifar10 --data-root ~/data --recipe cifar",
    "softcell train cell.json --cells 8 --channels 16 --set drop_path=0.3",
    "softcell train --resume runs/train-darts-digits-1",
    "softcell train --config runs/train-darts-digits-1 --out again",
)


def train(
    genotype: Annotated[
        str | None,
        typer.Argument(
            metavar="GENOTYPE",
            help="A genotype file, FILE@NAME, a run folder, RUN@EPOCH, DARTS notation, a NAS-Bench-201 string, or - "
            "for standard input; with --resume, the training's own folder.",
        ),
    ] = None,
    data: o.Data = None,
    data_root: o.DataRoot = None,
    image_size: o.ImageSize = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="small, cifar, imagenet, ... (`softcell list recipes`); else the one that suits the data."),
    ] = None,
    task: Annotated[
        Literal["classify", "retrieve"] | None,
        typer.Option(help="classify, or retrieve: embed the first half of the classes, look up images of the second."),
    ] = None,
    epochs: o.Epochs = None,
    batch_size: o.BatchSize = None,
    cells: Annotated[int | None, typer.Option(metavar="N", help="Depth of the network; else the recipe's.")] = None,
    channels: Annotated[int | None, typer.Option(metavar="N", help="Width at the start; else the recipe's.")] = None,
    seed: o.Seed = None,
    seeds: Annotated[
        int | None,
        typer.Option(metavar="K", help="Train K times, with seeds from --seed on; on a GPU all at the same time."),
    ] = None,
    at_once: Annotated[
        int | None, typer.Option(metavar="N", help="With --seeds: how many share the device; all on a GPU, else one.")
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN",
            help="Start from the weights of a finished training instead of random ones, wherever they fit: all but the "
            "classifier where the number of classes differs.",
        ),
    ] = None,
    device: o.Device = None,
    random: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Also train N random architectures of the space with the same recipe and seed (in OUT/random-1, ...) "
            "and compare.",
        ),
    ] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run folder; else runs/train-SPACE-DATA-N with the next free N.")
    ] = None,
    config: o.Config = None,
    set_: o.SetTraining = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out; its recipe is kept.")] = False,
    overwrite: o.Overwrite = False,
    deterministic: o.Deterministic = False,
    threads: o.Threads = None,
    precision: o.Precision = None,
    engine: o.Engine = None,
    plugin: o.Plugin = None,
    trust: o.Trust = False,
    tensorboard: o.Tensorboard = False,
    quiet: o.Quiet = False,
) -> int:
    """Train the network of an architecture from scratch; the test set is read once, at the end."""
    from softcell.app.cli.inputs import from_stdin
    from softcell.app.cli.search import SEEDS, resumed_folder, teacher_path

    if resume:
        out, genotype = resumed_folder("train", genotype, out)
    size = {key: value for key, value in (("cells", cells), ("channels", channels)) if value is not None}
    given = o.settings(
        set_,
        plugin,
        data=data,
        data_root=data_root,
        image_size=image_size,
        recipe=recipe,
        task=task,
        epochs=epochs,
        batch_size=batch_size,
        space=size or None,
        seed=seed,
        device=device,
        deterministic=deterministic,
        threads=threads,
        precision=precision,
        engine=engine,
        init=None if from_ is None else teacher_path(from_),
    )
    if seeds is not None or (resume and out is not None and (out / SEEDS).is_file()):
        if random:
            raise UserError(
                "--random trains other architectures with one seed and --seeds one architecture with several: run the "
                "two commands one after the other, and `softcell compare` both folders"
            )
        return run_seeds(
            from_stdin(genotype),
            given,
            config,
            out,
            seeds,
            at_once=at_once,
            resume=resume,
            overwrite=overwrite,
            quiet=quiet,
            tensorboard=tensorboard,
        )
    if at_once is not None:
        raise UserError(f"--at-once {at_once} is about trainings with several seeds: give --seeds K too")
    return run_train(
        from_stdin(genotype),
        given,
        config,
        out,
        random=random,
        resume=resume,
        overwrite=overwrite,
        quiet=quiet,
        tensorboard=tensorboard,
    )


def run_seeds(
    genotype: str | Genotype | None,
    given: dict[str, Any],
    config: Path | None,
    out: Path | None,
    seeds: int | None,
    *,
    at_once: int | None,
    resume: bool,
    overwrite: bool,
    quiet: bool,
    tensorboard: bool,
) -> int:
    """Trains one architecture with several seeds; shows what each reached, mean and standard deviation."""
    from softcell import api
    from softcell.app.cli import results
    from softcell.app.cli.console import console
    from softcell.app.cli.progress import Display
    from softcell.app.cli.search import logged
    from softcell.engine.seeds import seed_folder

    if at_once is not None and at_once < 1:
        raise UserError(f"--at-once must be at least 1, but is {at_once}; leave it out for the device's own number")
    chosen, wanted, recipe, folder = api.train_seeds_recipe(
        genotype, given, config=config, seeds=seeds, out=out, resume=resume
    )
    screen = console()
    heading = (
        f"train {wanted.space} network, recipe {recipe.recipe}, data {recipe.data}, seeds {chosen[0]} to {chosen[-1]}: "
        f"{folder}"
    )
    if not quiet:
        screen.print(heading, highlight=False)
    with Display(screen, heading, quiet) as display:
        result = api.train_seeds_with(
            wanted,
            recipe,
            folder,
            chosen,
            at_once=at_once,
            resume=resume,
            overwrite=overwrite,
            on_event=lambda seed: logged(
                display.beside(f"seed {seed}", str(seed_folder(folder, seed))), seed_folder(folder, seed), tensorboard
            ),
        )
    results.show_trained_seeds(screen, result)
    if any(one.exit_code for one in result.results.values()):
        shared = () if at_once is None else ("--at-once", str(at_once))
        results.interrupted(screen, "train", "--resume", str(folder), *shared)
    return result.exit_code


def run_train(
    genotype: str | Genotype | None,
    given: dict[str, Any],
    config: Path | None,
    out: Path | None,
    *,
    random: int,
    resume: bool,
    overwrite: bool,
    quiet: bool,
    tensorboard: bool = False,
    again: Sequence[str] | None = None,
) -> int:
    """Trains the architecture, then the random ones, and compares; `again` is the command that goes on."""
    from softcell import api
    from softcell.app.baseline import draw_random, missed_budget, random_baseline, with_budget, within_budget
    from softcell.app.cli import results
    from softcell.app.cli.console import console
    from softcell.app.cli.progress import Display
    from softcell.app.cli.search import logged
    from softcell.app.report.tensorboard import TensorBoard
    from softcell.engine import RunFolder

    chosen, recipe = api.train_recipe(genotype, given, config=config, resume_from=out if resume else None)
    if not resume:
        api.check_trainable(chosen, recipe)
    if random and recipe.task == "retrieve":
        raise UserError("--random compares accuracies of classifiers; train the random architectures on their own")
    if random and not resume:
        chosen = with_budget(chosen, genotype, recipe)
    others = draw_random(chosen, recipe, random) if random else []  # what is wrong is told before the first training
    screen = console()
    missed, within = missed_budget(chosen), within_budget(chosen) if random else None
    if missed is not None:
        compared = "; random architectures beside it meet it" if random else ""
        screen.print(f"note: {missed}{compared}", style="yellow", markup=False)

    with api.joined(recipe.device, recipe.deterministic) as world:
        folder = api.agreed_folder(out, world, "train", chosen.space, recipe.data)
        results.already(screen, folder, resume)
        heading = (
            f"train {chosen.space} network, recipe {recipe.recipe}, data {recipe.data}, seed {recipe.seed}: {folder}"
        )
        with Display(screen, heading, quiet) as display:
            listener = logged(display, folder, tensorboard)
            result = api.train_with(chosen, recipe, folder, resume=resume, overwrite=overwrite, on_event=listener)
        again = again or ["train", "--resume", str(folder), *(["--random", str(random)] if random else [])]
        if result.exit_code:
            results.interrupted(screen, *again)
            return result.exit_code
        if world.is_main:
            results.show_training(screen, result, RunFolder.open(folder).manifest["results"].get("count"))
        if not random:
            return 0
        if within is not None and world.is_main:
            screen.print(f"\nrandom architectures are drawn within the budget of the search: {within}", markup=False)
        with Display(screen, "", quiet) as display:
            listener = logged(display, folder, tensorboard)

            def begin(number: int, _: Genotype, place: Path) -> None:
                display.heading = f"\nrandom architecture {number} of {random}: {place}"
                if isinstance(listener, TensorBoard):
                    listener.folder = place

            baseline = random_baseline(
                chosen,
                recipe,
                folder,
                random,
                drawn=others,
                resume=resume,
                overwrite=overwrite,
                on_event=listener,
                on_start=begin,
            )
    if baseline.exit_code:
        results.interrupted(screen, *again)
        return baseline.exit_code
    results.show_comparison(screen, result, baseline)
    return 0
