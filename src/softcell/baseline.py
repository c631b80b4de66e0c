"""Random architectures trained like the found one: the yardstick without which an accuracy says little."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from softcell.api import is_main, joined, train_with
from softcell.arch import Genotype, Layout, check_against, sample
from softcell.engine.events import OnEvent
from softcell.engine.runfolder import MANIFEST
from softcell.errors import UserError
from softcell.evaluate import TrainRecipe, TrainResult
from softcell.report.html import REPORT, write_report
from softcell.spaces import build_space

STRIDE = 1_000_003  # large and odd: the architectures of neighbouring seeds stay apart


@dataclass(frozen=True, slots=True)
class Baseline:
    """Trainings of random architectures; `exit_code` is not 0 where a signal ended them early."""

    results: list[TrainResult]
    split: str
    exit_code: int

    @property
    def accuracies(self) -> list[float]:
        return [result.accuracy for result in self.results if result.accuracy is not None]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.accuracies)

    @property
    def std(self) -> float | None:
        """Sample standard deviation; None for fewer than two architectures."""
        return statistics.stdev(self.accuracies) if len(self.accuracies) > 1 else None


def random_baseline(
    like: Genotype,
    recipe: TrainRecipe,
    out: str | Path,
    count: int = 3,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
    on_start: Callable[[int, Genotype, Path], None] | None = None,
) -> Baseline:
    """Trains `count` random architectures of the space of `like`, each in a folder `out`/random-<k> with k from 1.

    All are trained by `recipe` with its seed, hence on the same splits and batches; what differs is the architecture.
    Number k is `sample` of the recipe's space with `seed * STRIDE + k`: the same ones whenever the same seed is used.
    """
    if count < 1:
        raise UserError(f"`count >= 1` must hold for random architectures, but got count={count}")
    layout = build_space(like.space, recipe.space_settings).layout()
    check_same_form(like, layout)
    results: list[TrainResult] = []
    with joined(recipe.device, recipe.deterministic):
        for number in range(1, count + 1):
            genotype, folder = sample(layout, recipe.seed * STRIDE + number), Path(out) / f"random-{number}"
            if on_start is not None:
                on_start(number, genotype, folder)
            result = train_with(
                genotype,
                recipe,
                folder,
                resume=resume and (folder / "run.json").exists(),
                overwrite=overwrite,
                on_event=on_event,
            )
            results.append(result)
            if result.exit_code:
                return Baseline(results, result.split, result.exit_code)
        if is_main() and (Path(out) / MANIFEST).is_file():
            write_report([out], Path(out) / REPORT)  # now with the random ones beside it
    return Baseline(results, results[0].split, 0)


def check_same_form(genotype: Genotype, layout: Layout) -> None:
    """Raises `UserError` unless architectures of `layout` can be compared with `genotype`."""
    try:
        check_against(genotype, layout)
        for table in layout.tables:
            if set(genotype.cells[table.name].output) != set(table.output):
                raise UserError(
                    f"the {table.name} cell ends in nodes {sorted(genotype.cells[table.name].output)}, those of the "
                    f"space in {sorted(table.output)}"
                )
    except UserError as error:
        raise UserError(
            f"random architectures must come from the space of the given one, but {error}; describe its space "
            "(for example --set space.nodes=3) or leave out --random"
        ) from error


def verdict(accuracy: float, baseline: Baseline) -> str:
    """What the comparison shows and what it does not, in one sentence."""
    difference, n = accuracy - baseline.mean, len(baseline.accuracies)
    points = f"{abs(difference) * 100:.1f} points {'above' if difference >= 0 else 'below'} the mean of {n} random"
    if baseline.std is None:
        return f"{points}; one random architecture has no spread to compare with, so nothing follows from this."
    if abs(difference) <= baseline.std:
        return f"{points}, within their spread of {baseline.std * 100:.1f}: no difference can be claimed."
    return (
        f"{points}, more than their spread of {baseline.std * 100:.1f}: a hint, not a proof, with one seed and "
        f"{n} architectures."
    )
