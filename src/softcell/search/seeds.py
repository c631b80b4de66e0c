"""One recipe with several seeds: on a GPU at the same time, elsewhere one after the other; the best one is pointed out.

The folder holds a complete run per seed (`seed-0`, `seed-1`, …), `seeds.json` with what each reached, and the best
one's `genotype.json`. Resuming goes on with what is unfinished and repeats nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from softcell.arch import Genotype
from softcell.engine import RunFolder, resolve_device
from softcell.engine.checkpoint import CURRENT, PREVIOUS
from softcell.engine.files import atomic_write_text
from softcell.engine.interleave import Running
from softcell.engine.seeds import run_seeds, seed_folder, seeds_folder, write_seeds
from softcell.engine.task import OnEvent
from softcell.reading import read_json_lines
from softcell.search.recipe import SearchRecipe
from softcell.search.run import FIRST, SearchResult, search_steps
from softcell.search.validation import ANEW

Keep = Literal["all", "best"]


@dataclass(frozen=True, slots=True)
class SeveralResult:
    """What several seeds left: results and errors by seed; `best` is None where none has finished."""

    folder: Path
    results: dict[int, SearchResult]
    errors: dict[int, Exception]
    best: int | None
    exit_code: int


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
) -> SeveralResult:
    """Searches with every seed; each result is that of the same search alone.

    keep: `best` removes the checkpoints of all but the best when all are done; records and genotypes stay.
    at_once: how many share the device; None for all of them on a GPU and one elsewhere.
    on_event: gives the listener of a seed's run.
    """
    with seeds_folder(out, seeds, "search", resume=resume, overwrite=overwrite) as folder:
        return _search_seeds(recipe, folder, seeds, keep, at_once, resume, overwrite, on_event)


def _search_seeds(
    recipe: SearchRecipe,
    folder: Path,
    seeds: Sequence[int],
    keep: Keep,
    at_once: int | None,
    resume: bool,
    overwrite: bool,
    on_event: Callable[[int], OnEvent] | None,
) -> SeveralResult:
    _write(folder, seeds, {}, {}, None)

    def start(seed: int) -> Running[SearchResult]:
        place = seed_folder(folder, seed)
        return search_steps(
            replace(recipe, seed=seed),
            place,
            resume=resume and (place / "run.json").is_file(),
            overwrite=overwrite,
            on_event=None if on_event is None else on_event(seed),
        )

    done = {seed: found for seed in seeds if resume and (found := _finished(folder, recipe, seed)) is not None}
    ran = run_seeds(start, seeds, done, resolve_device(recipe.device), at_once)
    results, errors = ran.results, ran.errors
    best = _best(results)
    _write(folder, seeds, results, errors, best)
    if best is not None:
        atomic_write_text(folder / "genotype.json", (seed_folder(folder, best) / "genotype.json").read_text("utf-8"))
    whole = not errors and all(result.genotype is not None for result in results.values())
    if keep == "best" and whole and best is not None:
        _drop_checkpoints(folder, [seed for seed in seeds if seed != best])
    return SeveralResult(folder, results, errors, best, ran.exit_code)


def figure(results: Iterable[SearchResult]) -> str:
    """What seeds are compared by: the accuracy with norms measured anew where every finished one has it."""
    done = [result for result in results if result.genotype is not None]
    return ANEW if done and all(_last(result, ANEW) is not None for result in done) else "val_accuracy"


def score(result: SearchResult, figure: str = "val_accuracy") -> float | None:
    """The last validation accuracy of a search by the figure named; of one without a supernet, of its best network."""
    return _last(result, "best_val_accuracy", figure)


def loss(result: SearchResult) -> float | None:
    """What they are compared by where an objective without labels has no accuracy: the last validation loss."""
    return _last(result, "val_loss")


def _last(result: SearchResult, *keys: str) -> float | None:
    return next((row[key] for row in reversed(result.metrics) for key in keys if row.get(key) is not None), None)


def _best(results: dict[int, SearchResult]) -> int | None:
    done, by = {seed: one for seed, one in results.items() if one.genotype is not None}, figure(results.values())
    ranks = {seed: value for seed, one in done.items() if (value := score(one, by)) is not None}
    ranks = ranks or {seed: -value for seed, one in done.items() if (value := loss(one)) is not None}
    return max(ranks, key=lambda seed: (ranks[seed], -seed), default=None)


def _finished(folder: Path, recipe: SearchRecipe, seed: int) -> SearchResult | None:
    place = seed_folder(folder, seed)
    if not (place / "run.json").is_file():
        return None
    run = RunFolder.open(place)
    if run.manifest["status"] != "finished":
        return None
    run.verify("genotype.json", "metrics.jsonl")
    rows = read_json_lines(place / "metrics.jsonl")
    return SearchResult(place, replace(recipe, seed=seed), Genotype.load(place), rows, 0)


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
                ANEW: None if result is None else _last(result, ANEW),
                "val_loss": None if result is None else loss(result),
                "error": None if error is None else str(error),
            }
        )
    write_seeds(folder, "search", listed, best)


def _drop_checkpoints(folder: Path, seeds: Sequence[int]) -> None:
    for seed in seeds:
        for place in (seed_folder(folder, seed), seed_folder(folder, seed) / FIRST):
            for name in (CURRENT, PREVIOUS):
                (place / name).unlink(missing_ok=True)
