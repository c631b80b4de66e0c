"""Searching, training, comparing and drawing from Python: the commands of `softcell`, with the same names and defaults.

from softcell.api import search, train

result = search("darts", data="digits", epochs=5)
trained = train(result)

Results, genotypes, comparisons and reports are displayed in notebooks. Progress is shown in terminals and notebooks;
`quiet=True` hides it, `quiet=False` shows it anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, Unpack

from softcell.app import jobs, pipeline
from softcell.app.export import export
from softcell.app.export import predict as predict_images
from softcell.app.pipeline import Plan, RunRequest, RunResult, parse_time
from softcell.app.progress import RunScreen, listening, listening_to_seeds, python_console
from softcell.app.report import compare as comparisons
from softcell.app.report.cells_svg import to_svg
from softcell.app.report.compare import Comparison
from softcell.app.report.notebook import Drawing, Report, report_html
from softcell.app.report.page import REPORT, write_report
from softcell.app.report.runs import check_intact, find_runs, read_runs
from softcell.app.report.theme import el, join
from softcell.arch import Genotype
from softcell.data.arrays import KeptArrays
from softcell.engine.runfolder import RUNS, free_folder, output_folder
from softcell.engine.session import join_processes
from softcell.engine.task import OnEvent
from softcell.errors import UserError
from softcell.evaluate import TrainRecipe, TrainResult, load_network
from softcell.evaluate.predictions import ImagePrediction
from softcell.recipes import (
    SearchSettings,
    TrainSettings,
    absolute,
    check_trainable,
    from_options,
    resumed_folder,
    search_recipe,
    search_seeds_recipe,
    train_recipe,
    train_seeds_recipe,
    trust_named,
)
from softcell.search import SearchRecipe, SearchResult
from softcell.search import indicators as _indicators
from softcell.search.genotypes import read_genotype
from softcell.search.supernet import restore
from softcell.seeds import Keep, SearchedSeeds, TrainedSeeds
from softcell.settings import build, layered
from softcell.spaces import Network, Space, build_space
from softcell.spaces.teacher import register_teacher
from softcell.text import VIEWS
from softcell.trust import trusting

__all__ = [
    "Comparison",
    "Drawing",
    "Genotype",
    "Network",
    "Report",
    "RunResult",
    "SearchResult",
    "TrainResult",
    "UserError",
    "build_space",
    "compare",
    "compare_indicators",
    "draw",
    "export",
    "free_folder",
    "load_network",
    "predict",
    "read_genotype",
    "register_teacher",
    "report",
    "run",
    "search",
    "search_seeds",
    "train",
    "train_seeds",
]

Data: TypeAlias = Any
"""A dataset: a name, a path, (images, labels) as arrays or tensors, a torch dataset, or a mapping of them.

See `softcell.data.keep_arrays` for the last three. They are written to a file next to the run folder, named by their
content, so that the run can be resumed and repeated without the program that made them.
"""
Architecture: TypeAlias = Genotype | SearchResult | TrainResult | str | Path
"""A genotype, a result with one, its file, a run folder, RUN@EPOCH or any notation."""
AnyRun: TypeAlias = str | Path | SearchResult | TrainResult | SearchedSeeds | TrainedSeeds
"""A run folder, a folder of runs, or a result."""


def search(
    method: str | None = None,
    *,
    space: str | Space | None = None,
    data: Data | None = None,
    recipe: SearchRecipe | None = None,
    out: str | Path | None = None,
    config: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
    trust: bool = False,
    quiet: bool | None = None,
    tensorboard: bool = False,
    mlflow: bool = False,
    wandb: bool = False,
    **settings: Unpack[SearchSettings],
) -> SearchResult:
    """Searches for an architecture and writes a run folder with drawings; by default DARTS in its space on `digits`.

    space: a name, or an object such as `build_space("darts", {"cells": 5})`.
    data: a name, a path, or images in memory (`Data`).
    settings: keys of `SearchRecipe`, with mappings or objects for its parts (`epochs=5, weights={"lr": 0.1}`), and the
        options of `softcell search` (`max_params="1M", set={"space.cells": 5}`). They override `config`, a YAML or JSON
        file or an earlier run.
    recipe: a complete recipe instead of method, space, data, config and settings.
    out: a new folder; `runs/<method>-<space>-<data>-<n>` when None. `resume` continues the run in it, and returns the
        result of one that is finished.
    trust: run code that comes with `config`, a resumed run or a teacher; `plugins` named here are trusted anyway.

    Example:
        >>> from softcell.api import search
        >>> sizes = {"cells_per_stage": 1, "channels": 2}
        >>> result = search("darts", space="nb201", data="digits", epochs=1, space_settings=sizes, out="runs/example")
        >>> len(result.genotype.cells["cell"].picks), result.metrics[0]["val_split"]
        (6, 'validation')
    """
    named, kept = _data(data, out)
    given = layered(from_options({**settings, "method": method, "space": space}), named)
    with trusting(trust):
        if recipe is None:
            trust_named(given)
            recipe = search_recipe(given, config=config, resume_from=resumed_folder(out) if resume else None)
        else:
            _check_alone(given, config)
        if kept is not None:
            kept.write()
        # Joined here too, since heading and trackers need the folder; `jobs.search` then gets the same world.
        with join_processes(recipe.device, recipe.deterministic) as world:
            folder = output_folder(out, world, recipe.method, recipe.space, recipe.data)
            heading = f"search {recipe.title}, seed {recipe.seed}: {folder}"
            track = _track(tensorboard, mlflow, wandb)
            with listening(heading, folder, quiet, track, on_event) as listener:
                return jobs.search(recipe, folder, resume=resume, overwrite=overwrite, on_event=listener)


def train(
    genotype: Architecture | None = None,
    *,
    data: Data | None = None,
    recipe: str | TrainRecipe | None = None,
    out: str | Path | None = None,
    config: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
    trust: bool = False,
    quiet: bool | None = None,
    tensorboard: bool = False,
    mlflow: bool = False,
    wandb: bool = False,
    **settings: Unpack[TrainSettings],
) -> TrainResult:
    """Trains the network of a genotype from scratch and measures it once on the test set.

    genotype: a `Genotype`, its file, a run folder, RUN@EPOCH or any notation; or the result of `search`, whose data and
        space are used too. None if `config` or the resumed run is a training run.
    data: a name, a path, or images in memory (`Data`).
    recipe: `small`, `cifar` or `imagenet`, by default the one that suits the data; or a complete recipe, which needs a
        `Genotype` and no further settings.
    settings: keys of `TrainRecipe` and options of `softcell train` (`epochs=5, cells=8`); they override `config`.
    out: a new folder; `runs/train-<space>-<data>-<n>` when None. `resume` continues the run in it, and returns the
        result of one that is finished.
    trust: run plugins that the genotype's run, `config` or a resumed run names; those named here are trusted anyway.

    Example:
        >>> from softcell.api import train
        >>> cell = "|skip_connect~0|+|none~0|skip_connect~1|+|none~0|none~1|nor_conv_3x3~2|"
        >>> sizes = {"cells_per_stage": 1, "channels": 2}
        >>> trained = train(cell, data="digits", epochs=1, space_settings=sizes, out="runs/example")
        >>> trained.split, trained.cost.parameters
        ('test', 2080)
    """
    named, kept = _data(data, out)
    given = layered(from_options(settings), {"recipe": recipe if isinstance(recipe, str) else None}, named)
    genotype = _source(genotype, recipe)
    with trusting(trust):
        if isinstance(recipe, TrainRecipe):
            _check_alone(given, config)
            if not isinstance(genotype, Genotype):
                raise UserError(f"a complete recipe needs a `Genotype`, but got {genotype!r}; use `read_genotype`")
        else:
            trust_named(given)
            before = resumed_folder(out) if resume else None
            genotype, recipe = train_recipe(genotype, given, config=config, resume_from=before)
            # A resumed run passed this check when it began.
            if not resume:
                check_trainable(genotype, recipe)
        if kept is not None:
            kept.write()
        with join_processes(recipe.device, recipe.deterministic) as world:
            folder = output_folder(out, world, "train", genotype.space, recipe.data)
            heading = f"train {genotype.space} network on {Path(recipe.data).name}, seed {recipe.seed}: {folder}"
            track = _track(tensorboard, mlflow, wandb)
            with listening(heading, folder, quiet, track, on_event) as listener:
                return jobs.train(genotype, recipe, folder, resume=resume, overwrite=overwrite, on_event=listener)


def search_seeds(
    method: str | None = None,
    *,
    seeds: int | Sequence[int],
    space: str | Space | None = None,
    data: Data | None = None,
    recipe: SearchRecipe | None = None,
    out: str | Path | None = None,
    keep: Keep = "all",
    at_once: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_event: Callable[[int], OnEvent] | None = None,
    trust: bool = False,
    quiet: bool | None = None,
    tensorboard: bool = False,
    mlflow: bool = False,
    wandb: bool = False,
    **settings: Unpack[SearchSettings],
) -> SearchedSeeds:
    """`search` with several seeds, on a GPU at the same time, each in its own folder in `out`.

    seeds: the number of seeds, starting at `seed`; with a complete recipe, the list of seeds.
    keep: which checkpoints to keep once all runs are finished. at_once: the number of runs that share the device; None
        for all of them on a GPU and one elsewhere. on_event: creates the listener for a seed's run.

    Example:
        >>> from softcell.api import search_seeds
        >>> sizes = {"cells_per_stage": 1, "channels": 2}
        >>> found = search_seeds("darts", seeds=2, space="nb201", epochs=1, space_settings=sizes, out="runs/seeds")
        >>> {seed: result.folder.name for seed, result in found.results.items()}, found.best in (0, 1)
        ({0: 'seed-0', 1: 'seed-1'}, True)
    """
    named, kept = _data(data, out)
    given = layered(from_options({**settings, "method": method, "space": space}), named)
    with trusting(trust):
        if recipe is None:
            trust_named(given)
            seeds, recipe, folder = search_seeds_recipe(given, seeds=_number(seeds), out=out, resume=resume)
        else:
            _check_alone(given)
            # A complete recipe has one seed, so the seeds are given in full.
            seeds, folder = _seeds_and_folder(seeds, out)
        if kept is not None:
            kept.write()
        with listening_to_seeds(folder, quiet, _track(tensorboard, mlflow, wandb), on_event) as listener:
            return jobs.search_seeds(
                recipe, folder, seeds, keep=keep, at_once=at_once, resume=resume, overwrite=overwrite, on_event=listener
            )


def train_seeds(
    genotype: Architecture | None = None,
    *,
    seeds: int | Sequence[int],
    data: Data | None = None,
    recipe: str | TrainRecipe | None = None,
    out: str | Path | None = None,
    at_once: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_event: Callable[[int], OnEvent] | None = None,
    trust: bool = False,
    quiet: bool | None = None,
    tensorboard: bool = False,
    mlflow: bool = False,
    wandb: bool = False,
    **settings: Unpack[TrainSettings],
) -> TrainedSeeds:
    """`train` with several seeds, on a GPU at the same time, each in its own folder in `out`; see `search_seeds`.

    Example:
        >>> from softcell.api import train_seeds
        >>> sizes = {"cells_per_stage": 1, "channels": 2}
        >>> trained = train_seeds("runs/search", seeds=2, epochs=1, space_settings=sizes, out="runs/seeds")
        >>> mean, std, n = trained.spread("accuracy")
        >>> n
        2
    """
    named, kept = _data(data, out)
    given = layered(from_options(settings), {"recipe": recipe if isinstance(recipe, str) else None}, named)
    genotype = _source(genotype, recipe)
    with trusting(trust):
        if isinstance(recipe, TrainRecipe):
            _check_alone(given)
            if not isinstance(genotype, Genotype):
                raise UserError(f"a complete recipe needs a `Genotype`, but got {genotype!r}; use `read_genotype`")
            seeds, folder = _seeds_and_folder(seeds, out)
        else:
            trust_named(given)
            seeds, genotype, recipe, folder = train_seeds_recipe(
                genotype, given, seeds=_number(seeds), out=out, resume=resume
            )
        if kept is not None:
            kept.write()
        with listening_to_seeds(folder, quiet, _track(tensorboard, mlflow, wandb), on_event) as listener:
            return jobs.train_seeds(
                genotype, recipe, folder, seeds, at_once=at_once, resume=resume, overwrite=overwrite, on_event=listener
            )


def run(
    data: Data | None = None,
    *,
    time: str | float | None = None,
    max_params: str | float | Sequence[str | float] | None = None,
    max_flops: str | float | Sequence[str | float] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    trust: bool = False,
    quiet: bool | None = None,
    **settings: Any,
) -> RunResult:
    """Turns images into a trained and exported network within a given time and budget: `softcell run`.

    data: a folder of CLASS/IMAGE files, a name, an .npz file or images in memory (`Data`).
    max_params, max_flops: several budgets, as a list or "50k,200k,1M", give one network each, from one search.
    time: such as "30m", or seconds. settings: further options of `softcell run`, such as `seed=1`.
    resume: continues the run in `out`, which keeps its settings, or returns the result of a finished one.

    Example:
        >>> from softcell.api import UserError, run
        >>> try:
        ...     run("digits", time="soon")
        ... except UserError as error:
        ...     print(error)
        --time must be a duration such as 30m, 90s or 1h30m, got 'soon'
    """
    seconds = parse_time(time) if isinstance(time, str) else time
    limits = {"max_params": max_params, "max_flops": max_flops}
    texts = {name: None if limit is None else _budgets(limit) for name, limit in limits.items()}
    # Absolute, so that the run can be resumed from any folder.
    paths = {key: absolute(value) if isinstance(value, Path) else value for key, value in settings.items()}
    given = layered(paths, {"time": seconds}, texts)
    with trusting(trust):
        if resume:
            if data is not None or given:
                raise UserError("a resumed run keeps its settings; leave out everything but `resume` and `out`")
            plan = Plan.open(resumed_folder(out))
        else:
            if data is None:
                raise UserError("`data` must name the images: a folder, an .npz file, a dataset, or arrays")
            named, kept = _data(data, out)
            request = build(RunRequest, layered(given, named), "run")
            if kept is not None:
                kept.write()
            plan = Plan.create(free_folder("run", request.data) if out is None else Path(out), request)
        console, is_quiet = python_console(quiet)
        return pipeline.run(plan, RunScreen(console, is_quiet))


def _budgets(given: str | float | Sequence[str | float]) -> str:
    """One budget or several as text, as on the command line."""
    return ",".join(map(str, given)) if isinstance(given, Sequence) and not isinstance(given, str) else str(given)


def _run_html(result: RunResult) -> str:
    page = result.folder / REPORT
    said = [el("p", text) for text in result.verdict] or [el("p", repr(result))]
    return join(said, report_html(Report(page)) if page.is_file() else None)


VIEWS[RunResult] = _run_html


def predict(
    run: str | Path | TrainResult | RunResult,
    images: str | Path | Sequence[str | Path],
    *,
    top: int = 3,
    device: str = "auto",
    trust: bool = False,
) -> list[ImagePrediction]:
    """The `top` most likely classes of image files, as printed by `softcell predict`; a folder means all images in it.

    run: a finished training run or its folder, a result or folder of `run`, an exported folder, or an ONNX file.
    trust: run plugins that the folder names.

    Example:
        >>> from PIL import Image
        >>> from softcell.api import predict
        >>> Image.new("L", (8, 8), 200).save("grey.png")
        >>> (found,) = predict("runs/train", "grey.png", top=1)
        >>> found.file.name, len(found.classes)
        ('grey.png', 1)
    """
    source = run if isinstance(run, str | Path) else run.folder
    return predict_images(source, images, top=top, device=device, trust=trust)


def compare(runs: AnyRun | Sequence[AnyRun]) -> Comparison:
    """Compares runs over seeds: n, mean, std, and which differences are significant, as `softcell compare` does.

    Example:
        >>> from softcell.api import compare
        >>> found = compare(["runs/search", "runs/train"])
        >>> found, len(found.pairs)  # accuracies of a supernet and of a network are not compared
        (Comparison(2 groups, 2 runs), 0)
    """
    folders = find_runs(_folders(runs))
    check_intact(folders)
    found = comparisons.compare(read_runs(folders))
    if not found.groups:
        raise UserError(f"no run has an accuracy to compare: {'; '.join(found.notes) or 'no runs were given'}")
    return found


def report(runs: AnyRun | Sequence[AnyRun], out: str | Path | None = None, *, overwrite: bool = False) -> Report:
    """Writes one self-contained HTML page about runs, as `softcell report` does.

    out: a file; by default `report.html` in the folder of a single run or folder, which is replaced, else here.

    Example:
        >>> from softcell.api import report
        >>> report(["runs/search", "runs/train"], "both.html").path.name
        'both.html'
    """
    given = _folders(runs)
    folders = find_runs(given)
    check_intact(folders)
    own = given[0] / REPORT if len(given) == 1 else None
    path = Path(out) if out is not None else own or Path(REPORT)
    if path.exists() and path != own and not overwrite:
        raise UserError(f"{path} already exists; choose another name, or overwrite=True to replace it")
    path.parent.mkdir(parents=True, exist_ok=True)
    return Report(write_report(folders, path))


def draw(genotype: Architecture, *, title: str | None = None) -> Drawing:
    """A picture of the cells of an architecture.

    Example:
        >>> from softcell.api import draw
        >>> drawing = draw("runs/search", title="What DARTS found")
        >>> "What DARTS found" in drawing.svg
        True
    """
    source = _source(genotype)
    assert source is not None
    return Drawing(to_svg(read_genotype(source), title))


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
    """Indicators for every candidate of a search's supernet, the best candidates by each, and Kendall's tau between
    them.

    by: `alpha`, `attention`, `perturbation`, `discretisation`; when None, those of the first three that the run has.
        See `softcell.search.indicators`.
    trust: run plugins that the run names.

    Example:
        >>> from softcell.api import compare_indicators
        >>> compared = compare_indicators("runs/search", ["alpha", "perturbation"], images=64)
        >>> compared["method"], compared["images"]
        ('darts', 64)
    """
    with trusting(trust):
        found = restore(folder, device=device, data_root=data_root)
    made = _indicators.compute(found, by, images=images, epochs=epochs, notify=notify or (lambda text: None))
    about = {"run": str(folder), "method": found.recipe.method, "space": found.recipe.space}
    used = None if made.baseline is None else made.baseline.images  # a split may have fewer than were asked for
    baseline = None if made.baseline is None else made.baseline.to_dict()
    said = _indicators.summary(found.supernet.layout, made.values, made.saying_nothing)
    return {**about, "images": used, "baseline": baseline, **said}


def _data(data: Data | None, out: str | Path | None) -> tuple[dict[str, str], KeptArrays | None]:
    """The settings that name a dataset, and what to write next to the run folder if the data is in memory.

    It is written once the recipe is complete: a call with a wrong setting leaves nothing.
    """
    if data is None or isinstance(data, str | Path):
        return ({} if data is None else {"data": str(data)}), None
    kept = KeptArrays.of(data, RUNS if out is None else Path(out).parent)
    # Absolute, so that the run can be resumed from any folder.
    return {"data": kept.path.name, "data_root": str(kept.path.parent.resolve())}, kept


def _source(genotype: Architecture | None, recipe: str | TrainRecipe | None = None) -> Genotype | str | Path | None:
    """Replaces a result by its folder, which also names data and space; for a complete recipe, by its genotype."""
    if not isinstance(genotype, SearchResult | TrainResult):
        if not isinstance(genotype, Genotype | str | Path | None):
            raise UserError(
                f"a genotype must be a Genotype, a result, a path or notation, but got {type(genotype).__name__}"
            )
        return genotype
    return genotype.genotype if isinstance(recipe, TrainRecipe) else genotype.folder


def _folders(runs: AnyRun | Sequence[AnyRun]) -> list[Path]:
    listed = [runs] if isinstance(runs, str) or not isinstance(runs, Sequence) else list(runs)
    return [Path(one) if isinstance(one, str | Path) else one.folder for one in listed]


def _track(tensorboard: bool, mlflow: bool, wandb: bool) -> list[str]:
    asked = {"tensorboard": tensorboard, "mlflow": mlflow, "wandb": wandb}
    return [name for name, is_on in asked.items() if is_on]


def _check_alone(given: Mapping[str, Any], config: str | Path | None = None) -> None:
    """Raises if settings are given with a complete recipe."""
    if given or config is not None:
        more = [*given, *(["config"] if config is not None else [])]
        raise UserError(f"a complete recipe allows no further settings, but got {', '.join(more)}; leave them out")


def _number(seeds: int | Sequence[int]) -> int:
    if not isinstance(seeds, int):
        raise UserError(f"`seeds` must be a number of seeds unless `recipe` is complete, but got {seeds!r}")
    return seeds


def _seeds_and_folder(seeds: int | Sequence[int], out: str | Path | None) -> tuple[list[int], Path]:
    if isinstance(seeds, int) or out is None:
        raise UserError(f"a complete recipe needs a list of seeds and a folder, but got seeds={seeds!r}, out={out!r}")
    return list(seeds), Path(out)
