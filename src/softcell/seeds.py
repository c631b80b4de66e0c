"""One recipe with several seeds in one folder: a complete run per seed (`seed-0`, `seed-1`, …) and `seeds.json`.

On a GPU the runs share the device (`softcell.engine.interleave`), elsewhere they run one after another. Each gives the
same result as it would alone. Resuming continues unfinished runs and repeats nothing. `run_all` does this for runs of
any kind; random architectures are trained with it too (`softcell.app.baseline`).

Of several searches the best one by validation accuracy provides the folder's `genotype.json`. Of several training runs
none is the best: choosing it by its accuracy on the test set would make that a training set.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import torch

from softcell.arch import Genotype
from softcell.engine import resolve_device, set_deterministic
from softcell.engine.checkpoint import CURRENT, PREVIOUS
from softcell.engine.interleave import Running, interleave
from softcell.engine.lock import locked
from softcell.engine.runfolder import MANIFEST, SEEDS, entries
from softcell.engine.session import Interrupt, exit_code
from softcell.engine.task import OnEvent
from softcell.errors import UserError
from softcell.evaluate.recipe import TrainRecipe
from softcell.evaluate.train import TrainResult, finished_training, train_steps
from softcell.files import atomic_write_text, read_json
from softcell.search.recipe import SearchRecipe
from softcell.search.run import FIRST, SearchResult, finished_search, search_steps
from softcell.search.supernet import RECALIBRATED
from softcell.text import Shown, count_of

Keep = Literal["all", "best"]
K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


def seed_folder(folder: Path, seed: int) -> Path:
    """The folder of the run of a seed."""
    return folder / f"seed-{seed}"


def read_seeds(folder: Path, kind: str = "search") -> list[int]:
    """The seeds of several runs of one `kind` (`search`, `train`)."""
    try:
        found = read_json(folder / SEEDS)
        known, seeds = found.get("kind", "search"), [int(one["seed"]) for one in found["seeds"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{folder} is not a {kind} with several seeds: {SEEDS} is missing or damaged ({reason})"
        ) from error
    if known != kind:
        raise UserError(
            f"{folder} holds several runs of `softcell {known}`: resume it with `softcell {known} --resume`"
        )
    return seeds


@dataclass(frozen=True, slots=True, repr=False)
class SearchedSeeds(Shown):
    """Results and errors of searches by seed; `best` is None if none has finished.

    A seed that was not started because of a signal has neither.
    """

    folder: Path
    results: dict[int, SearchResult]
    errors: dict[int, Exception]
    best: int | None
    exit_code: int

    def __repr__(self) -> str:
        done = sum(one.genotype is not None for one in self.results.values())
        return (
            f"SearchedSeeds({self.folder}: {done} of {count_of(len(self.results), 'seed')} finished, best {self.best})"
        )


def search_seeds(
    recipe: SearchRecipe,
    out: str | Path,
    seeds: Sequence[int],
    *,
    keep: Keep = "all",
    at_once: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_event: Callable[[int], OnEvent] | None = None,
) -> SearchedSeeds:
    """Searches with every seed, each in `out`/seed-N.

    keep: `best` removes the checkpoints of all but the best when all are finished; records and genotypes stay.
    at_once: the number of runs that share the device; None for all of them on a GPU and one elsewhere.
    on_event: creates the listener for a seed's run.
    """
    set_deterministic(recipe.deterministic)  # before CUDA starts, which is when cuBLAS reads its setting
    with _locked_folder(out, seeds, "search", resume=resume, overwrite=overwrite) as folder:

        def write(ran: Ran[int, SearchResult], best: int | None) -> None:
            rows = [
                _row(ran, seed, folder, lambda result: result.genotype is not None, _search_metrics) for seed in seeds
            ]
            _write_seeds(folder, "search", rows, best)

        def start(seed: int, resume: bool) -> Running[SearchResult]:
            listener = None if on_event is None else on_event(seed)
            own, own_folder = replace(recipe, seed=seed), seed_folder(folder, seed)
            return search_steps(own, own_folder, resume=resume, overwrite=overwrite, on_event=listener)

        # Before the first run: without `seeds.json` an interrupted folder could not be resumed.
        write(Ran({}, {}, 0), None)
        begun = _begun(folder, seeds) if resume else []
        known = {seed: finished_search(seed_folder(folder, seed), replace(recipe, seed=seed)) for seed in begun}
        device = resolve_device(recipe.device)
        ran = run_all(start, seeds, known, device, num_sharing(len(seeds), device, at_once))
        best = _best(ran.results)
        write(ran, best)
        if best is not None:
            genotype = (seed_folder(folder, best) / "genotype.json").read_text("utf-8")
            atomic_write_text(folder / "genotype.json", genotype)
        done = [result for result in ran.results.values() if result.genotype is not None]
        if keep == "best" and len(done) == len(seeds) and best is not None:
            _remove_checkpoints(folder, [seed for seed in seeds if seed != best])
        return SearchedSeeds(folder, ran.results, ran.errors, best, ran.exit_code)


def compared_by(results: Iterable[SearchResult]) -> str:
    """The metric that searches are compared by: accuracy with recalibrated BatchNorm if all finished ones have it."""
    done = [result for result in results if result.genotype is not None]
    return RECALIBRATED if done and all(_last(result, RECALIBRATED) is not None for result in done) else "val_accuracy"


def last_accuracy(result: SearchResult, metric: str = "val_accuracy") -> float | None:
    """The last validation accuracy, by `metric`; without a supernet, the accuracy of the best network."""
    return _last(result, "best_val_accuracy", metric)


def last_loss(result: SearchResult) -> float | None:
    """The last validation loss, which searches are compared by if their objective has no labels and no accuracy."""
    return _last(result, "val_loss")


def _last(result: SearchResult, *keys: str) -> float | None:
    return next((row[key] for row in reversed(result.metrics) for key in keys if row.get(key) is not None), None)


def _search_metrics(result: SearchResult | None) -> dict[str, float | None]:
    """The metrics of a search in `seeds.json`."""
    if result is None:
        return {"val_accuracy": None, RECALIBRATED: None, "val_loss": None}
    return {
        "val_accuracy": last_accuracy(result),
        RECALIBRATED: _last(result, RECALIBRATED),
        "val_loss": last_loss(result),
    }


def _best(results: Mapping[int, SearchResult]) -> int | None:
    """The finished seed with the best accuracy, or the lowest loss if none has one; the smallest seed in a tie."""
    done, by = {seed: one for seed, one in results.items() if one.genotype is not None}, compared_by(results.values())
    ranks = {seed: value for seed, one in done.items() if (value := last_accuracy(one, by)) is not None}
    ranks = ranks or {seed: -value for seed, one in done.items() if (value := last_loss(one)) is not None}
    return max(ranks, key=lambda seed: (ranks[seed], -seed), default=None)


def _remove_checkpoints(folder: Path, seeds: Sequence[int]) -> None:
    for seed in seeds:
        for run in (seed_folder(folder, seed), seed_folder(folder, seed) / FIRST):
            for name in (CURRENT, PREVIOUS):
                (run / name).unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, repr=False)
class TrainedSeeds(Shown):
    """Results and errors of training runs by seed; one that was not started because of a signal has neither."""

    folder: Path
    results: dict[int, TrainResult]
    errors: dict[int, Exception]
    exit_code: int

    def __repr__(self) -> str:
        shown = []
        for name in ("accuracy", "recall_at_1"):
            if (found := self.spread(name)) is not None:
                mean, std, n = found
                spread = "" if std is None else f" ± {100 * std:.1f}"
                shown.append(f"{name} {100 * mean:.1f}{spread}% (n = {n})")
        return f"TrainedSeeds({self.folder}: {', '.join(shown) or 'none finished'})"

    def spread(self, metric: str) -> tuple[float, float | None, int] | None:
        """Mean, standard deviation (None for n = 1) and n of `accuracy`, `top5` or `recall_at_1` over finished runs."""
        values = [value for one in self.results.values() if (value := training_metrics(one).get(metric)) is not None]
        if not values:
            return None
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values)


def train_seeds(
    genotype: Genotype,
    recipe: TrainRecipe,
    out: str | Path,
    seeds: Sequence[int],
    *,
    at_once: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_event: Callable[[int], OnEvent] | None = None,
) -> TrainedSeeds:
    """Trains one network with every seed, each in `out`/seed-N.

    at_once: the number of runs that share the device; None as in `num_sharing`.
    on_event: creates the listener for a seed's run.
    """
    set_deterministic(recipe.deterministic)  # before CUDA starts, which is when cuBLAS reads its setting
    with _locked_folder(out, seeds, "train", resume=resume, overwrite=overwrite) as folder:

        def write(ran: Ran[int, TrainResult]) -> TrainedSeeds:
            result = TrainedSeeds(folder, ran.results, ran.errors, ran.exit_code)
            rows = [_row(ran, seed, folder, lambda one: not one.exit_code, training_metrics) for seed in seeds]
            spreads = {name: result.spread(name) for name in ("accuracy", "top5", "recall_at_1")}
            together = {
                name: dict(zip(("mean", "std", "n"), spread, strict=True))
                for name, spread in spreads.items()
                if spread is not None
            }
            _write_seeds(folder, "train", rows, None, together=together)
            return result

        def start(seed: int, resume: bool) -> Running[TrainResult]:
            listener = None if on_event is None else on_event(seed)
            own, own_folder = replace(recipe, seed=seed), seed_folder(folder, seed)
            return train_steps(genotype, own, own_folder, resume=resume, overwrite=overwrite, on_event=listener)

        write(Ran({}, {}, 0))  # before the first run, as in `search_seeds`
        begun = _begun(folder, seeds) if resume else []
        known = {
            seed: finished_training(seed_folder(folder, seed), genotype, replace(recipe, seed=seed)) for seed in begun
        }
        device = resolve_device(recipe.device)
        together = num_sharing(len(seeds), device, at_once, recipe.time)
        return write(run_all(start, seeds, known, device, together))


def training_metrics(result: TrainResult | None) -> dict[str, float | None]:
    """The metrics of a training run: accuracies, or the recall of a retrieval; {} if it is not finished."""
    if result is None or result.exit_code:
        return {}
    if result.recall is not None:
        return {"recall_at_1": result.recall[1]}
    return {"accuracy": result.accuracy, "top5": result.top5}


@contextmanager
def _locked_folder(
    out: str | Path, seeds: Sequence[int], kind: str, *, resume: bool, overwrite: bool
) -> Iterator[Path]:
    """The locked folder of several runs of one kind: a new one, or the one to resume."""
    if not seeds or len(set(seeds)) != len(seeds):
        raise UserError(f"seeds must be different and at least one, but got {list(seeds)}")
    folder = Path(out)
    with locked(folder):
        if resume:
            before = read_seeds(folder, kind)
            if before != list(seeds):
                raise UserError(
                    f"a {kind} must be resumed with its own seeds, but {folder} has {before} and got {list(seeds)}"
                )
        elif entries(folder) and not overwrite:
            raise UserError(f"a new {kind} needs an empty folder, but {folder} is not; use --resume, or another --out")
        elif entries(folder):
            read_seeds(folder, kind)  # raises unless it is such a folder
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def _begun(folder: Path, seeds: Sequence[int]) -> list[int]:
    return [seed for seed in seeds if (seed_folder(folder, seed) / MANIFEST).is_file()]


def num_sharing(num_runs: int, device: torch.device, at_once: int | None, time: float = 0.0) -> int:
    """How many of several runs share a device: `at_once` if given, else all of them on a GPU and one elsewhere.

    time: the time limit of each training run, 0 for none. A run with one gets the device to itself unless `at_once` is
    given: with others it would make fewer steps in its time than alone.
    """
    return at_once or (num_runs if device.type == "cuda" and not time else 1)


@dataclass(frozen=True, slots=True)
class Ran(Generic[K, T]):
    """Results and errors of several runs, by seed or name; runs that were not started because of a signal have neither.

    `exit_code`: 1 after an error, the signal's code after an interruption, else 0.
    """

    results: dict[K, T]
    errors: dict[K, Exception]
    exit_code: int


def run_all(
    start: Callable[[K, bool], Running[T]],
    runs: Sequence[K],
    begun: Mapping[K, T | None],
    device: torch.device,
    at_once: int,
) -> Ran[K, T]:
    """Run `start(run, resume)` for all seeds or names without a result, `at_once` at a time.

    begun: the runs that have begun, with the results of finished ones.
    """
    done = {run: result for run, result in begun.items() if result is not None}
    left = [run for run in runs if run not in done]
    # Around all runs: their own contexts share it, so that one signal stops all of them.
    with Interrupt() as interrupt:

        def unless_stopped(run: K) -> Running[T | None]:
            # Without this each of the others would load its data and make a step before it stops.
            return None if interrupt.signal else (yield from start(run, run in begun))

        found = interleave([partial(unless_stopped, run) for run in left], device, at_once)
        stopped = interrupt.signal
    errors = {run: value for run, value in zip(left, found, strict=True) if isinstance(value, Exception)}
    if not done and len(errors) == len(runs) and all(isinstance(error, UserError) for error in errors.values()):
        raise next(iter(errors.values()))  # the recipe is wrong, not one of the runs
    fresh = {
        run: value
        for run, value in zip(left, found, strict=True)
        if value is not None and not isinstance(value, Exception)
    }
    results = {run: {**done, **fresh}[run] for run in runs if run in done or run in fresh}
    return Ran(results, errors, exit_code(stopped) if stopped else int(bool(errors)))


def _row(
    ran: Ran[int, T],
    seed: int,
    folder: Path,
    is_finished: Callable[[T], bool],
    metrics: Callable[[T | None], Mapping[str, Any]],
) -> dict[str, Any]:
    """The row of a seed in `seeds.json`."""
    result, error = ran.results.get(seed), ran.errors.get(seed)
    status = "failed" if error else "finished" if result is not None and is_finished(result) else "open"
    return {
        "seed": seed,
        "folder": seed_folder(folder, seed).name,
        "status": status,
        **metrics(result),
        "error": None if error is None else str(error),
    }


def _write_seeds(folder: Path, kind: str, rows: Sequence[Mapping[str, Any]], best: int | None, **more: Any) -> None:
    """Write `seeds.json`: a row for each seed, the best seed (or None), and results over all seeds."""
    content = {"format": "softcell-seeds", "version": 1, "kind": kind, "best": best, **more, "seeds": list(rows)}
    atomic_write_text(folder / SEEDS, json.dumps(content, indent=2) + "\n")
