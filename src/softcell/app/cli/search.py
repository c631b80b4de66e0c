"""`softcell search`"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from softcell.app.cli import options as o
from softcell.errors import UserError

if TYPE_CHECKING:
    from softcell.engine.task import OnEvent
    from softcell.search import SearchRecipe

SEEDS = "seeds.json"  # as softcell.search.seeds has it, which would be slow to import here

EPILOG = o.examples(
    "softcell search",
    "softcell search darts --space nb201 --data cifar10 --data-root ~/data",
    "softcell search --data photos/ --image-size 32 --epochs 20 --seed 1",
    "softcell search --set regime=unrolled --set space.cells=5 --set weights.lr=0.1",
    "softcell search snas --max-params 2.5M --data cifar10",
    "softcell search darts --space nb201 --select perturbation",
    "softcell search --seeds 4 --keep best",
    "softcell search --resume runs/darts-darts-digits-1",
    "softcell search --config runs/darts-darts-digits-1 --out again",
)


def search(
    method: Annotated[
        str | None,
        typer.Argument(help="Search method, see `softcell list methods`; with --resume, the run folder will do."),
    ] = None,
    space: Annotated[str | None, typer.Option(help="Search space, see `softcell list spaces`.")] = None,
    data: o.Data = None,
    data_root: o.DataRoot = None,
    image_size: o.ImageSize = None,
    classes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="The first of two phases learns from N classes of its data, drawn at random by the seed; else all.",
        ),
    ] = None,
    epochs: o.Epochs = None,
    batch_size: o.BatchSize = None,
    seed: o.Seed = None,
    seeds: Annotated[
        int | None,
        typer.Option(metavar="K", help="Search K times, with seeds from --seed on; on a GPU all at the same time."),
    ] = None,
    keep: Annotated[
        Literal["all", "best"] | None,
        typer.Option(help="With --seeds: whose checkpoints stay when all are done (else all); records always do."),
    ] = None,
    at_once: Annotated[
        int | None, typer.Option(metavar="N", help="With --seeds: how many share the device; all on a GPU, else one.")
    ] = None,
    device: o.Device = None,
    scale: Annotated[
        str | None,
        typer.Option(
            metavar="small|paper|…",
            help="Sizes of a laptop or of the paper, or another recipe of the method (see `softcell list recipes`).",
        ),
    ] = None,
    resource: Annotated[
        Literal["none", "mild", "moderate", "aggressive"] | None,
        typer.Option(help="Strength of the resource penalty; any weight with --set resource.weight=1e-3."),
    ] = None,
    max_params: Annotated[
        str | None,
        typer.Option(metavar="N", help="Most parameters of the network that `softcell train` would build: 2.5M."),
    ] = None,
    max_flops: Annotated[
        str | None, typer.Option(metavar="N", help="Most multiply-adds of that network for one image: 500M.")
    ] = None,
    max_latency: Annotated[
        float | None, typer.Option(metavar="T", help="Most time of that network, in the unit of --latency-table.")
    ] = None,
    at_size: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Count budgets for images of N×N pixels, whatever is searched on; sizes of the network with "
            "--set resource.sizes=imagenet and --set resource.num_classes=1000.",
        ),
    ] = None,
    latency_table: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML or JSON of candidate: time, or table: {candidate: time}.")
    ] = None,
    select: Annotated[
        Literal["method", "perturbation"] | None,
        typer.Option(
            help="What selects the architecture after the search: the method itself, or the removal of candidates from "
            "its supernet, edge by edge (DARTS-PT); tuning epochs per edge with --set select.epochs=2.",
        ),
    ] = None,
    guide: Annotated[
        str | None,
        typer.Option(
            metavar="TEACHER",
            help="Follow a teacher's attention: a run of `softcell teacher` or `train`, weights (.safetensors, .pt, "
            ".pth, .ckpt), a .pt2 program, or a name that a plugin registers.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Run folder; else runs/METHOD-SPACE-DATA-N with the next free N.")
    ] = None,
    config: o.Config = None,
    set_: o.Set = None,
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
    """Search an architecture. Without arguments: DARTS cells on handwritten digits."""
    if resume:
        out, method = resumed_folder("search", method, out)
    limits: dict[str, Any] = {
        "preset": resource,
        "max_params": max_params,
        "max_flops": max_flops,
        "max_latency": max_latency,
        "image_size": at_size,
    }
    if latency_table is not None:
        limits["latency_table"] = str(latency_table.resolve())  # so that the run can be repeated from any folder
    given = o.settings(
        set_,
        plugin,
        resource={key: value for key, value in limits.items() if value is not None} or None,
        select=None if select is None else {"by": select},
        guide=None if guide is None else {"teacher": teacher_path(guide)},
        pretrain=None if classes is None else {"classes": classes},
        method=method,
        space=space,
        data=data,
        data_root=data_root,
        image_size=image_size,
        epochs=epochs,
        batch_size=batch_size,
        seed=seed,
        device=device,
        scale=scale,
        deterministic=deterministic,
        threads=threads,
        precision=precision,
        engine=engine,
    )
    if seeds is None and not (resume and out is not None and (out / SEEDS).is_file()):
        for option, value in (("--keep", keep), ("--at-once", at_once)):
            if value is not None:
                raise UserError(f"{option} {value} is about searches with several seeds: give --seeds K too")
        return run_search(given, config, out, resume=resume, overwrite=overwrite, quiet=quiet, tensorboard=tensorboard)
    return run_seeds(
        given,
        config,
        out,
        seeds,
        keep or "all",
        at_once=at_once,
        resume=resume,
        overwrite=overwrite,
        quiet=quiet,
        tensorboard=tensorboard,
    )


def teacher_path(source: str) -> str:
    """Absolute where it is a file or folder, so that the run can be resumed and repeated from any folder."""
    return str(Path(source).resolve()) if source.strip() and Path(source).exists() else source


def run_search(
    given: dict[str, Any],
    config: Path | None,
    out: Path | None,
    *,
    resume: bool,
    overwrite: bool,
    quiet: bool,
    hint: bool = True,
    tensorboard: bool = False,
    again: Sequence[str] | None = None,
) -> int:
    """Searches, shows and tells what comes next; `again` is the command that goes on, if not `search --resume`."""
    from softcell import api
    from softcell.app.cli import results
    from softcell.app.cli.console import command, console
    from softcell.app.cli.progress import Display

    recipe = api.search_recipe(given, config=config, resume_from=out if resume else None)
    screen = console()
    with api.joined(recipe.device, recipe.deterministic) as world:
        folder = api.agreed_folder(out, world, recipe.method, recipe.space, recipe.data)
        results.already(screen, folder, resume)
        heading = f"search {recipe.method}, space {recipe.space}, data {recipe.data}, seed {recipe.seed}: {folder}"
        with Display(screen, heading, quiet) as display:
            listener = logged(display, folder, tensorboard)
            result = api.search_with(recipe, folder, resume=resume, overwrite=overwrite, on_event=listener)
    if result.genotype is None:
        results.interrupted(screen, *(again or ("search", "--resume", str(folder))))
        return result.exit_code
    results.show_search(screen, result)
    if hint and not quiet:
        results.facts(screen, next=command("train", folder, *_on(recipe)))
    return 0


def run_seeds(
    given: dict[str, Any],
    config: Path | None,
    out: Path | None,
    seeds: int | None,
    keep: Literal["all", "best"],
    *,
    at_once: int | None,
    resume: bool,
    overwrite: bool,
    quiet: bool,
    tensorboard: bool = False,
) -> int:
    """Searches with several seeds, shows what each reached and the best one's cells."""
    from softcell import api
    from softcell.app.cli import results
    from softcell.app.cli.console import command, console
    from softcell.app.cli.progress import Display

    if at_once is not None and at_once < 1:
        raise UserError(f"--at-once must be at least 1, but is {at_once}; leave it out for the device's own number")
    screen = console()
    chosen, recipe, folder = api.seeds_recipe(given, config=config, seeds=seeds, out=out, resume=resume)
    heading = (
        f"search {recipe.method}, space {recipe.space}, data {recipe.data}, seeds {chosen[0]} to {chosen[-1]}: {folder}"
    )
    if not quiet:
        screen.print(heading, highlight=False)
    with Display(screen, heading, quiet) as display:
        result = api.search_seeds_with(
            recipe,
            folder,
            chosen,
            keep=keep,
            at_once=at_once,
            resume=resume,
            overwrite=overwrite,
            on_event=lambda seed: logged(
                display.beside(f"seed {seed}", str(folder / f"seed-{seed}")), folder / f"seed-{seed}", tensorboard
            ),
        )
    if result.best is not None:
        results.show_search(screen, result.results[result.best])
    results.show_seeds(screen, result)
    if any(one.genotype is None for one in result.results.values()):
        asked = () if keep == "all" else ("--keep", keep)
        shared = () if at_once is None else ("--at-once", str(at_once))
        results.interrupted(screen, "search", "--resume", str(folder), *asked, *shared)
    elif result.best is not None and not quiet:
        results.facts(screen, next=command("train", folder / f"seed-{result.best}", *_on(recipe)))
    return result.exit_code


def _on(recipe: SearchRecipe) -> tuple[str, ...]:
    """A training takes the data of its search, unless that needed no labels and they have none."""
    return ("--data", "IMAGES-WITH-CLASSES") if recipe.objective == "context" and not _has_classes(recipe) else ()


def _has_classes(recipe: SearchRecipe) -> bool:
    """Whether what was searched on can be trained on: all but folders of images that do not lie in class folders."""
    import warnings

    from softcell.data import datasets
    from softcell.data.folder import is_split, scan

    path = Path(recipe.data_root or ".", recipe.data).expanduser()
    if recipe.data in datasets() or not path.is_dir():
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of other files, which the training itself will tell
            scan(path / "train" if is_split(path) else path)
    except UserError:
        return False
    return True


def logged(display: OnEvent, folder: Path, tensorboard: bool) -> OnEvent:
    """What listens to a run: the display and, where wanted, TensorBoard's log in the run's folder."""
    from softcell.app.report.tensorboard import TensorBoard

    return TensorBoard(folder, display) if tensorboard else display


def resumed_folder(kind: str, first: str | None, out: Path | None) -> tuple[Path, str | None]:
    """The folder to go on with, and what is left of the first argument where that names the folder."""
    from softcell.errors import UserError

    if out is not None:
        return out, first
    if first is not None and (Path(first).is_dir() or "/" in first):
        return Path(first), None
    waiting = unfinished(kind)
    hint = (
        f"unfinished: {', '.join(shlex.quote(str(path)) for path in waiting)}" if waiting else "none is unfinished here"
    )
    raise UserError(f"--resume needs the folder of the run, as `softcell {kind} --resume DIR`; {hint}")


def unfinished(kind: str) -> list[Path]:
    """Runs below `runs/` that can be gone on with, the newest first."""
    from softcell.api import RUNS
    from softcell.app.report.runs import is_phase
    from softcell.engine import RunFolder
    from softcell.errors import UserError

    found = []
    for file in sorted(RUNS.glob("**/run.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            manifest = RunFolder.open(file.parent).manifest
        except UserError:
            continue  # a broken folder is nothing to offer
        if manifest["kind"] == kind and manifest["status"] != "finished" and not is_phase(file.parent):
            found.append(file.parent)
    return found
