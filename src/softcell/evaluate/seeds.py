"""One network trained with several seeds: mean and standard deviation over the trainings.

No seed is the best one: choosing it by its accuracy on the test set would make that a training set.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from softcell.arch import Genotype
from softcell.engine import resolve_device, set_deterministic
from softcell.engine.interleave import Running
from softcell.engine.seeds import run_seeds, seed_folder, seeds_folder, write_seeds
from softcell.engine.task import OnEvent
from softcell.evaluate.recipe import TrainRecipe
from softcell.evaluate.train import TrainResult, finished_training, train_steps
from softcell.text import Shown


@dataclass(frozen=True, slots=True, repr=False)
class TrainedSeeds(Shown):
    """Results and errors of trainings by seed."""

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

    def spread(self, figure: str) -> tuple[float, float | None, int] | None:
        """Mean, standard deviation (None for n = 1) and n of `accuracy`, `top5` or `recall_at_1` over finished runs."""
        values = [value for one in self.results.values() if (value := figures(one).get(figure)) is not None]
        if not values:
            return None
        return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values)


def figures(result: TrainResult) -> dict[str, float | None]:
    """The metrics of a training: accuracies, or the recall of a retrieval; {} if it is not finished."""
    if result.exit_code:
        return {}
    if result.recall is not None:
        return {"recall_at_1": result.recall[1]}
    return {"accuracy": result.accuracy, "top5": result.top5}


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
    """Trains with every seed, each in `out`/seed-N; each result is the same as of a single training.

    at_once: how many share the device; None for all of them on a GPU and one elsewhere.
    on_event: makes the listener of a seed's run.
    """
    set_deterministic(recipe.deterministic)  # before CUDA starts, which is when cuBLAS reads its setting
    with seeds_folder(out, seeds, "train", resume=resume, overwrite=overwrite) as folder:
        begun = [seed for seed in seeds if resume and (seed_folder(folder, seed) / "run.json").is_file()]

        def start(seed: int) -> Running[TrainResult]:
            return train_steps(
                genotype,
                replace(recipe, seed=seed),
                seed_folder(folder, seed),
                resume=seed in begun,
                overwrite=overwrite,
                on_event=None if on_event is None else on_event(seed),
            )

        _write(TrainedSeeds(folder, {}, {}, 0), seeds)
        found = {
            seed: finished_training(seed_folder(folder, seed), genotype, replace(recipe, seed=seed)) for seed in begun
        }
        done = {seed: result for seed, result in found.items() if result is not None}
        ran = run_seeds(start, seeds, done, resolve_device(recipe.device), at_once)
        result = TrainedSeeds(folder, ran.results, ran.errors, ran.exit_code)
        _write(result, seeds)
        return result


def _write(result: TrainedSeeds, seeds: Sequence[int]) -> None:
    rows = []
    for seed in seeds:
        found, error = result.results.get(seed), result.errors.get(seed)
        status = "failed" if error else "finished" if found is not None and not found.exit_code else "open"
        rows.append(
            {
                "seed": seed,
                "folder": seed_folder(result.folder, seed).name,
                "status": status,
                **({} if found is None else figures(found)),
                "error": None if error is None else str(error),
            }
        )
    together = {}
    for name in ("accuracy", "top5", "recall_at_1"):
        if (spread := result.spread(name)) is not None:
            together[name] = dict(zip(("mean", "std", "n"), spread, strict=True))
    write_seeds(result.folder, "train", rows, None, together=together)
