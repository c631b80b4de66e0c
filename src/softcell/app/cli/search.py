"""`softcell search`, and what other commands share with it: searches with one or several seeds, folders to resume."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from softcell.app import jobs
from softcell.app.cli import options as o
from softcell.app.cli import output
from softcell.app.cli.output import command, console, print_fields
from softcell.app.progress import Display, seed_listeners
from softcell.app.report.runs import is_phase
from softcell.app.report.trackers import Tracking
from softcell.data import datasets
from softcell.data.folder import is_split, scan
from softcell.engine import RunFolder
from softcell.engine.distributed import restarted_folder
from softcell.engine.runfolder import RUNS, output_folder
from softcell.engine.session import join_processes
from softcell.errors import UserError
from softcell.recipes import search_recipe, search_seeds_recipe
from softcell.search import SearchRecipe
from softcell.seeds import Keep, seed_folder

commands = typer.Typer()


@commands.command(
    "search",
    epilog=o.examples(
        "softcell search",
        "softcell search darts --space nb201 --data cifar10 --data-root ~/data",
        "softcell search --data photos/ --image-size 32 --epochs 20 --seed 1",
        "softcell search --set regime=unrolled --set space.cells=5 --set weights.lr=0.1",
        "softcell search snas --max-params 2.5M --data cifar10",
        "softcell search darts --space nb201 --select perturbation",
        "softcell search --seeds 4 --keep best",
        "softcell search --resume runs/darts-darts-digits-1",
        "softcell search --config runs/darts-darts-digits-1 --out again",
    ),
)
def search(
    method: Annotated[
        str | None,
        typer.Argument(help="Search method, see `softcell list methods`; with --resume, the run folder."),
    ] = None,
    space: Annotated[str | None, typer.Option(help="Search space, see `softcell list spaces`.")] = None,
    data: o.Data = None,
    data_root: o.DataRoot = None,
    image_size: o.ImageSize = None,
    classes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Use N random classes in the first of two phases (chosen by the seed). Default: all.",
        ),
    ] = None,
    epochs: o.Epochs = None,
    batch_size: o.BatchSize = None,
    seed: o.Seed = None,
    seeds: o.Seeds = None,
    keep: Annotated[
        Literal["all", "best"] | None,
        typer.Option(help="With --seeds: which checkpoints to keep at the end; records are always kept. Default: all."),
    ] = None,
    at_once: o.AtOnce = None,
    device: o.Device = None,
    scale: Annotated[
        str | None,
        typer.Option(
            metavar="small|paper|…",
            help="Sizes for a laptop or those of the paper, or another recipe of the method (`softcell list recipes`).",
        ),
    ] = None,
    resource: Annotated[
        Literal["none", "mild", "moderate", "aggressive"] | None,
        typer.Option(help="Strength of the resource penalty; for an exact weight use --set resource.weight=1e-3."),
    ] = None,
    max_params: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Maximum number of parameters of the network that `softcell train` builds, such as 2.5M."
        ),
    ] = None,
    max_flops: Annotated[
        str | None, typer.Option(metavar="N", help="Maximum multiply-adds of that network per image, such as 500M.")
    ] = None,
    max_latency: Annotated[
        float | None, typer.Option(metavar="T", help="Maximum latency of that network, in the unit of --latency-table.")
    ] = None,
    at_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Count budgets for images of N×N pixels instead of the searched size; resource.sizes and "
            "resource.num_classes (--set) give the size of the network and its number of classes.",
        ),
    ] = None,
    latency_table: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML or JSON file of candidate: time, or table: {candidate: time}."),
    ] = None,
    select: Annotated[
        Literal["method", "perturbation"] | None,
        typer.Option(
            help="How to select the architecture after the search: by the method itself, or by removing candidates "
            "from its supernet, edge by edge (DARTS-PT; epochs per edge: --set select.epochs=2).",
        ),
    ] = None,
    guide: Annotated[
        str | None,
        typer.Option(
            metavar="TEACHER",
            help="Imitate a teacher's attention: a run of `softcell teacher` or `train`, weights (.safetensors, .pt, "
            ".pth, .ckpt), a .pt2 program, or a name that a plugin registers.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Run folder. Default: runs/METHOD-SPACE-DATA-N with the next free N."),
    ] = None,
    config: o.Config = None,
    set_: o.Set = None,
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
    """Search for an architecture. Without arguments: DARTS cells on handwritten digits."""
    track = o.trackers(locals())
    method, out, resume, overwrite = resumed("search", method, out, resume, overwrite, restarts=seeds is None)
    start = o.RunOptions(
        out=out, config=config, resume=resume, overwrite=overwrite, at_once=at_once, quiet=quiet, track=track
    )
    given = o.settings(
        locals(),
        method=method,
        space=space,
        scale=scale,
        resource=resource,
        max_params=max_params,
        max_flops=max_flops,
        max_latency=max_latency,
        at_size=at_size,
        latency_table=latency_table,
        select=select,
        guide=guide,
        pretrain=None if classes is None else {"classes": classes},
    )
    if seeds is None and not start.resumes_seeds:
        for option, value in (("--keep", keep), ("--at-once", at_once)):
            if value is not None:
                raise UserError(f"{option} {value} requires --seeds K")
        return run_search(given, start)
    return run_seeds(given, start, seeds, keep or "all")


def run_search(given: dict[str, Any], start: o.RunOptions) -> int:
    """Searches and prints the result and the next command."""
    recipe = search_recipe(given, config=start.config, resume_from=start.out if start.resume else None)
    screen = console()
    with join_processes(recipe.device, recipe.deterministic) as world:
        folder = output_folder(start.out, world, recipe.method, recipe.space, recipe.data)
        output.already_finished(screen, folder, start.resume)
        heading = f"search {recipe.method}, space {recipe.space}, data {recipe.data}, seed {recipe.seed}: {folder}"
        with Display(screen, heading, start.quiet) as display, Tracking(start.track, folder, display) as listener:
            result = jobs.search(recipe, folder, resume=start.resume, overwrite=start.overwrite, on_event=listener)
    if result.genotype is None:
        output.interrupted(screen, "search", "--resume", str(folder))
        return result.exit_code
    output.show_search(screen, result)
    if not start.quiet:
        print_fields(screen, next=command("train", folder, *_training_data(recipe)))
    return 0


def run_seeds(
    given: dict[str, Any],
    start: o.RunOptions,
    seeds: int | None,
    keep: Keep = "all",
    *,
    hint: bool = True,
    again: Sequence[str] | None = None,
) -> int:
    """Searches with several seeds; prints the accuracy of each and the cells of the best.

    hint: whether to print the next command. again: the command that resumes the searches, by default this one.
    """
    start.check_at_once()
    screen = console()
    chosen, recipe, folder = search_seeds_recipe(
        given, config=start.config, seeds=seeds, out=start.out, resume=start.resume
    )
    heading = (
        f"search {recipe.method}, space {recipe.space}, data {recipe.data}, seeds {chosen[0]} to {chosen[-1]}: {folder}"
    )
    if not start.quiet:
        screen.print(heading, highlight=False)
    with Display(screen, "", start.quiet) as display, ExitStack() as tracked:
        result = jobs.search_seeds(
            recipe,
            folder,
            chosen,
            keep=keep,
            at_once=start.at_once,
            resume=start.resume,
            overwrite=start.overwrite,
            on_event=seed_listeners(display, folder, start.track, tracked),
        )
    if result.best is not None:
        output.show_search(screen, result.results[result.best])
    output.show_seeds(screen, result)
    not_started = len(chosen) - len(result.results) - len(result.errors)
    if not_started or any(one.genotype is None for one in result.results.values()):
        kept = () if keep == "all" else ("--keep", keep)
        output.interrupted(screen, *(again or ("search", "--resume", str(folder), *kept, *start.sharing)))
    elif hint and result.best is not None and not start.quiet:
        print_fields(screen, next=command("train", seed_folder(folder, result.best), *_training_data(recipe)))
    return result.exit_code


def _training_data(recipe: SearchRecipe) -> tuple[str, ...]:
    """Training uses the data of its search, unless these have no labels because the search needed none."""
    return ("--data", "IMAGES-WITH-CLASSES") if recipe.objective == "context" and not _has_classes(recipe) else ()


def _has_classes(recipe: SearchRecipe) -> bool:
    """Whether the data can be trained on: everything but folders of images without class folders."""
    path = Path(recipe.data_root or ".", recipe.data).expanduser()
    if recipe.data in datasets() or not path.is_dir():
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the training itself will repeat them
            scan(path / "train" if is_split(path) else path)
    except UserError:
        return False
    return True


def resumed(
    kind: str, first: str | None, out: Path | None, resume: bool, overwrite: bool, *, restarts: bool = True
) -> tuple[str | None, Path | None, bool, bool]:
    """`first`, `out`, `resume` and `overwrite` of a command once it is known which folder is resumed, if any.

    The folder is `--out` or the first argument. restarts: if torchrun has started all processes again with the same
    command, they resume what the first attempt began.
    """
    begun = restarted_folder() if restarts else None
    if begun is not None:
        return first, begun, True, False
    if not resume or out is not None:
        return first, out, resume, overwrite
    # A path without a folder is a mistake in the path, not the name of a method.
    if first is not None and (Path(first).is_dir() or "/" in first):
        return None, Path(first), resume, overwrite
    waiting = unfinished(kind)
    hint = (
        f"unfinished: {', '.join(shlex.quote(str(path)) for path in waiting)}"
        if waiting
        else "there is no unfinished run here"
    )
    wrong = "" if first is None else f", but {first!r} is not a folder"
    raise UserError(f"--resume needs the folder of the run, as `softcell {kind} --resume DIR`{wrong}; {hint}")


def unfinished(kind: str) -> list[Path]:
    """Runs below `runs/` that can be resumed, newest first."""
    found = []
    for file in sorted(RUNS.glob("**/run.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            manifest = RunFolder.open(file.parent).manifest
        except UserError:
            continue  # a broken folder cannot be resumed
        if manifest["kind"] == kind and manifest["status"] != "finished" and not is_phase(file.parent):
            found.append(file.parent)
    return found
