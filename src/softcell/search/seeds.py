"""One recipe searched with several seeds: on a GPU at the same time, elsewhere one after the other.

The folder holds a complete run per seed (`seed-0`, `seed-1`, …), `seeds.json` with their accuracies, and the
`genotype.json` of the best seed. Resuming continues what is unfinished and repeats nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from softcell.engine import resolve_device, set_deterministic
from softcell.engine.checkpoint import CURRENT, PREVIOUS
from softcell.engine.interleave import Running
from softcell.engine.seeds import run_seeds, seed_folder, seeds_folder, write_seeds
from softcell.engine.task import OnEvent
from softcell.files import atomic_write_text
from softcell.search.recipe import SearchRecipe
from softcell.search.run import FIRST, SearchResult, finished_search, search_steps
from softcell.search.validation import RECALIBRATED
from softcell.text import Shown, count_of

Keep = Literal["all", "best"]


@dataclass(frozen=True, slots=True, repr=False)
class SearchedSeeds(Shown):
    """Results and errors of searches by seed; `best` is None if none has finished."""

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
    """Searches with every seed; each result is the same as of a single search.

    keep: `best` removes the checkpoints of all but the best when all are finished; records and genotypes stay.
    at_once: how many share the device; None for all of them on a GPU and one elsewhere.
    on_event: makes the listener of a seed's run.
    """
    set_deterministic(recipe.deterministic)  # before CUDA starts, which is when cuBLAS reads its setting
    with seeds_folder(out, seeds, "search", resume=resume, overwrite=overwrite) as folder:
        begun = [seed for seed in seeds if resume and (seed_folder(folder, seed) / "run.json").is_file()]

        def start(seed: int) -> Running[SearchResult]:
            return search_steps(
                replace(recipe, seed=seed),
                seed_folder(folder, seed),
                resume=seed in begun,
                overwrite=overwrite,
                on_event=None if on_event is None else on_event(seed),
            )

        _write(folder, seeds, {}, {}, None)
        found = {seed: finished_search(seed_folder(folder, seed), replace(recipe, seed=seed)) for seed in begun}
        done = {seed: result for seed, result in found.items() if result is not None}
        ran = run_seeds(start, seeds, done, resolve_device(recipe.device), at_once)
        best = _best(ran.results)
        _write(folder, seeds, ran.results, ran.errors, best)
        if best is not None:
            genotype = (seed_folder(folder, best) / "genotype.json").read_text("utf-8")
            atomic_write_text(folder / "genotype.json", genotype)
        is_complete = not ran.errors and all(result.genotype is not None for result in ran.results.values())
        if keep == "best" and is_complete and best is not None:
            _remove_checkpoints(folder, [seed for seed in seeds if seed != best])
        return SearchedSeeds(folder, ran.results, ran.errors, best, ran.exit_code)


def figure(results: Iterable[SearchResult]) -> str:
    """The metric that seeds are compared by: accuracy with recalibrated BatchNorm if all finished searches have it."""
    done = [result for result in results if result.genotype is not None]
    return RECALIBRATED if done and all(_last(result, RECALIBRATED) is not None for result in done) else "val_accuracy"


def score(result: SearchResult, figure: str = "val_accuracy") -> float | None:
    """The last validation accuracy, by the metric `figure`; without a supernet, the accuracy of the best network."""
    return _last(result, "best_val_accuracy", figure)


def loss(result: SearchResult) -> float | None:
    """The last validation loss, which searches are compared by if their objective has no labels and no accuracy."""
    return _last(result, "val_loss")


def _last(result: SearchResult, *keys: str) -> float | None:
    return next((row[key] for row in reversed(result.metrics) for key in keys if row.get(key) is not None), None)


def _best(results: dict[int, SearchResult]) -> int | None:
    done, by = {seed: one for seed, one in results.items() if one.genotype is not None}, figure(results.values())
    ranks = {seed: value for seed, one in done.items() if (value := score(one, by)) is not None}
    ranks = ranks or {seed: -value for seed, one in done.items() if (value := loss(one)) is not None}
    return max(ranks, key=lambda seed: (ranks[seed], -seed), default=None)


def _write(
    folder: Path,
    seeds: Sequence[int],
    results: dict[int, SearchResult],
    errors: dict[int, Exception],
    best: int | None,
) -> None:
    listed: list[dict[str, Any]] = []
    for seed in seeds:
        result, error = results.get(seed), errors.get(seed)
        status = "failed" if error else "finished" if result is not None and result.genotype is not None else "open"
        listed.append(
            {
                "seed": seed,
                "folder": seed_folder(folder, seed).name,
                "status": status,
                "val_accuracy": None if result is None else score(result),
                RECALIBRATED: None if result is None else _last(result, RECALIBRATED),
                "val_loss": None if result is None else loss(result),
                "error": None if error is None else str(error),
            }
        )
    write_seeds(folder, "search", listed, best)


def _remove_checkpoints(folder: Path, seeds: Sequence[int]) -> None:
    for seed in seeds:
        for place in (seed_folder(folder, seed), seed_folder(folder, seed) / FIRST):
            for name in (CURRENT, PREVIOUS):
                (place / name).unlink(missing_ok=True)
