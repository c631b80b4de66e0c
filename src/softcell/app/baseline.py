"""The baseline of a searched architecture: random ones of its space, trained with the same recipe."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from itertools import count as count_up
from pathlib import Path
from typing import Any

from softcell.app import jobs
from softcell.app.report.page import REPORT, write_report
from softcell.arch import Genotype, Layout, check_against, count, sample
from softcell.data.catalogue import loaded_once
from softcell.engine import RunFolder, resolve_device
from softcell.engine.distributed import is_main_process
from softcell.engine.interleave import Running
from softcell.engine.lock import locked
from softcell.engine.session import join_processes
from softcell.engine.task import OnEvent
from softcell.errors import UserError
from softcell.evaluate import TrainRecipe, TrainResult
from softcell.evaluate.train import finished_training, train_steps
from softcell.recipes import check_trainable, train_recipe
from softcell.search.budget import ABOUT, format_cost, next_within, state_budget_for, stated_budget
from softcell.search.genotypes import run_of
from softcell.search.recipe import SearchRecipe, load_images, resolve
from softcell.seeds import Ran, run_all
from softcell.settings import MAX_RANDOM, at_most
from softcell.spaces import Shape, build_space
from softcell.text import count_of, percent

STRIDE = 1_000_003  # large and odd: neighbouring seeds draw from ranges far apart
APART = STRIDE // 2
"""Offset of the baselines of a random search, which itself draws from `seed * STRIDE` on."""
LEVEL = 0.05
"""A difference between several found cells and several random ones is claimed if its p-value is at most this."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """Training runs of random architectures; `exit_code` is not 0 if a signal interrupted them."""

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
    drawn: Sequence[Genotype],
    recipe: TrainRecipe,
    out: str | Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    on_event: OnEvent | None = None,
    on_start: Callable[[int, Path], None] | None = None,
) -> Baseline:
    """Trains the architectures of `draw_random` one after another, each in `out`/random-<k>.

    All are trained with the seed of `recipe`, on the same splits and batches; only the architecture differs.
    on_start: called before each with its number and folder.
    """
    results: list[TrainResult] = []
    # One block around all runs keeps the processes together between them, so that all agree on folders.
    with join_processes(recipe.device, recipe.deterministic):
        for number, genotype in enumerate(drawn, 1):
            folder = random_folder(out, number)
            if on_start is not None:
                on_start(number, folder)
            result = jobs.train(
                genotype,
                recipe,
                folder,
                resume=resume and jobs.has_run(folder),
                overwrite=overwrite,
                on_event=on_event,
            )
            results.append(result)
            if result.exit_code:
                return Baseline(results, result.split, result.exit_code)
        if is_main_process() and jobs.has_run(Path(out)):
            write_report([out], Path(out) / REPORT)  # now with the random architectures
    return Baseline(results, results[0].split, 0)


FOUND = "found"
"""The name of the network that random architectures are compared with."""


def random_folder(out: str | Path, number: int) -> Path:
    """The folder of a random architecture; they are counted from 1."""
    return Path(out) / f"random-{number}"


def train_with_random(
    found: Genotype,
    drawn: Sequence[Genotype],
    recipe: TrainRecipe,
    out: str | Path,
    *,
    at_once: int,
    resume: bool = False,
    overwrite: bool = False,
    on_event: Callable[[str, Path], OnEvent] | None = None,
) -> Ran[str, TrainResult]:
    """Trains `found` in `out` and the random architectures in `out`/random-<k>; `at_once` of them share the device.

    Each gives the same result as when trained alone, and a failure does not stop the others: results and errors are
    keyed by name, "found", "random-1", .... For one process.
    on_event: creates the listener for a run from its name and folder.
    """
    folder, numbered = Path(out), dict(enumerate(drawn, 1))
    networks = {FOUND: found, **{f"random-{number}": one for number, one in numbered.items()}}
    folders = {FOUND: folder, **{f"random-{number}": random_folder(folder, number) for number in numbered}}
    found_failed = False

    def start(name: str, resume: bool) -> Running[TrainResult]:
        nonlocal found_failed
        if found_failed:  # its folder is in use, its weights do not fit, ...: before hours of training for nothing
            raise UserError("not started: there is nothing to compare with, because the found network failed")
        run_folder = folders[name]
        listener = None if on_event is None else on_event(name, run_folder)
        try:
            result = yield from train_steps(
                networks[name], recipe, run_folder, resume=resume, overwrite=overwrite, on_event=listener
            )
        except Exception:
            found_failed = found_failed or name == FOUND
            raise
        jobs.draw_training(result, again=True)
        return result

    with join_processes(recipe.device, recipe.deterministic), locked(folder), loaded_once():
        begun = [name for name, run_folder in folders.items() if resume and jobs.has_run(run_folder)]
        known = {name: finished_training(folders[name], networks[name], recipe) for name in begun}
        for done in known.values():
            if done is not None:
                jobs.draw_training(done)
        ran = run_all(start, list(networks), known, resolve_device(recipe.device), at_once)
        if not ran.results and FOUND in ran.errors:  # as if the found network had been trained alone
            raise ran.errors[FOUND]
        if jobs.has_run(folder):
            write_report([folder], folder / REPORT)  # now with the random architectures
    return ran


def networks_to_train(
    genotype: str | Path | Genotype | None,
    given: Mapping[str, Any],
    config: str | Path | None,
    resume_from: Path | None,
    random: int,
) -> tuple[Genotype, list[Genotype], TrainRecipe]:
    """The network of a training run, `random` architectures to compare it with, and the recipe of all.

    Raises `UserError` if one of them cannot be trained. The other arguments are those of `train_recipe`.
    """
    chosen, recipe = train_recipe(genotype, given, config=config, resume_from=resume_from)
    # A resumed run passed these checks when it began.
    if resume_from is None:
        check_trainable(chosen, recipe)
        try:
            chosen = with_budget(chosen, genotype, recipe)
        except UserError:  # for example, its latency table has moved
            if random:
                raise
            # Only stored for a resumed run, which may add --random and has nothing but the genotype of its folder.
    if random and recipe.task == "retrieve":
        raise UserError("--random compares accuracies of classifiers; train the random architectures separately")
    return chosen, draw_random(chosen, recipe, random) if random else [], recipe


def draw_random(like: Genotype, recipe: TrainRecipe, count: int) -> list[Genotype]:
    """`count` random architectures to compare with `like`: always the same ones for the same seed.

    They are `sample` of the recipe's space with `seed * STRIDE + k` for k = 1, 2, ... in this order. If random search
    found `like`, `APART` is added, because it would otherwise be compared with its own samples. If `like` was searched
    under a budget, architectures that miss it are skipped, because larger networks would prove nothing about the
    search; costs are counted as in the search, regardless of the size that is trained.
    """
    if count < 1:
        raise UserError(f"`count >= 1` must hold for random architectures, but got count={count}")
    at_most("random", count, MAX_RANDOM)
    space = build_space(like.space, recipe.space_settings)
    layout = space.layout()
    check_same_form(like, layout)

    first = recipe.seed * STRIDE + 1 + (APART if like.about.get("method") == "random" else 0)

    def draw(number: int) -> Genotype:
        return sample(layout, first + number)

    known = stated_budget(like)
    if known is None:
        return [draw(number) for number in range(count)]
    # `found` describes `like`, not these.
    about = {key: value for key, value in like.about[ABOUT].items() if key != "found"}
    budget, found, last = known.budget(like.space), list[Genotype](), -1
    if known.missed() is not None:  # whether the budget can be met is not known yet
        budget.find_cheapest(layout, known.costs(space), None)
    for have in range(count):
        last, other = next_within(budget, draw, last + 1, have, "leave out --random, or search with a higher budget")
        found.append(replace(other, about={**other.about, ABOUT: about}))
    return found


def random_others(found: Genotype | None, layout: Layout, seed: int, num: int) -> list[Genotype]:
    """`num` random architectures of the space, all different from each other and from `found`.

    They repeat if the space has no others left. A random search draws its own from other seeds (see `APART`).
    """
    others: list[Genotype] = []
    taken = [] if found is None else [found.cells]
    for number in count_up(seed * STRIDE + APART):
        if len(others) == num:
            break
        other = sample(layout, number)
        if other.cells not in taken or count(layout) <= len(taken):
            others.append(other)
            taken.append(other.cells)
    return others


def with_budget(genotype: Genotype, source: str | Path | Genotype | None, recipe: TrainRecipe) -> Genotype:
    """`genotype` with the budget of the search run that `source` names, unless it contains a budget itself.

    Genotypes of single epochs and of older versions do not. recipe: the recipe of the training run, which has the
    current path of the data.
    """
    folder = None if isinstance(source, Genotype) else run_of(source)
    if folder is None or ABOUT in genotype.about:
        return genotype
    manifest = RunFolder.open(folder).manifest
    if manifest["kind"] != "search":
        return genotype
    searched = resolve(manifest["recipe"])
    if not searched.resource.budgets():
        return genotype
    shape, classes = _images(searched, manifest, recipe)
    return replace(genotype, about={**genotype.about, **state_budget_for(searched, shape, classes, genotype)})


def _images(searched: SearchRecipe, manifest: Mapping[str, Any], recipe: TrainRecipe) -> tuple[Shape, int]:
    """Shape and number of classes of a search's images; for runs of older versions the images are loaded."""
    stored = manifest["results"].get("data")
    if stored is not None:
        return tuple(stored["shape"]), stored["num_classes"]
    if searched.data == recipe.data:
        searched = replace(searched, data_root=recipe.data_root)
    dataset = load_images(searched)
    return dataset.shape, dataset.num_classes


def missed_budget(genotype: Genotype) -> str | None:
    """A sentence if the network was found under a budget and misses it; None otherwise."""
    known = stated_budget(genotype)
    missed = None if known is None else known.missed()
    return (
        None if missed is None else f"this network misses the budget of its search: it has {missed}, as counted there"
    )


def within_budget(genotype: Genotype) -> str | None:
    """The budget for random architectures compared with `genotype`, and the size it is counted at; None without one."""
    known = stated_budget(genotype)
    if known is None:
        return None
    budget = known.budget(genotype.space)
    limits = " and ".join(format_cost(kind, limit) for kind, limit in budget.limits.items())
    return f"at most {limits}, counted as in the search ({budget.sizes()})"


def check_same_form(genotype: Genotype, layout: Layout) -> None:
    """Raises `UserError` unless architectures of `layout` can be compared with `genotype`."""
    try:
        check_against(genotype, layout)
        for table in layout.tables:
            if set(genotype.cells[table.name].output) != set(table.output):
                raise UserError(
                    f"the {table.name} cell ends in nodes {sorted(genotype.cells[table.name].output)}, but that of the "
                    f"space in {sorted(table.output)}"
                )
    except UserError as error:
        raise UserError(
            f"random architectures must come from the space of the given one, but {error}; describe its space "
            "(for example --set space.nodes=3) or leave out --random"
        ) from error


def verdict(accuracy: float, baseline: Baseline) -> str:
    """What the comparison shows, in one sentence."""
    difference, n = accuracy - baseline.mean, len(baseline.accuracies)
    side = "above" if difference >= 0 else "below"
    points = f"{abs(difference) * 100:.1f} points {side} the mean of {count_of(n, 'random architecture')}"
    if baseline.std is None:
        return f"{points}; one random architecture has no spread to compare with, so this proves nothing."
    if abs(difference) <= baseline.std:
        return f"{points}, within their spread of {baseline.std * 100:.1f}: no difference can be claimed."
    return (
        f"{points}, more than their spread of {baseline.std * 100:.1f}: a hint, not a proof, with one seed and "
        f"{count_of(n, 'architecture')}."
    )


def rank_sum(first: Sequence[float], second: Sequence[float]) -> float:
    """The two-sided p-value of the exact rank-sum test (Wilcoxon, 1945); equal values share their mean rank.

    If a search chose its cells at random, every way to mark `len(first)` of all values as found would be equally
    likely. The p-value is twice the share of ways whose marked values rank at least as high (or as low) as `first`
    does. It assumes nothing about the distribution of accuracies, which for random cells is far from normal. All ways
    are counted, so this suits a dozen values on each side, not hundreds.

    Example:
        >>> from softcell.app.baseline import rank_sum
        >>> rank_sum([0.97, 0.98], [0.91, 0.95, 0.96])  # the best two of five: 1 way of 10, on either side
        0.2
    """
    values = [*first, *second]
    # Twice the mean rank of each value: whole numbers, so that sums compare exactly.
    ranks = [2 * sum(other < value for other in values) + values.count(value) + 1 for value in values]
    found = sum(ranks[: len(first)])
    sums = [sum(chosen) for chosen in combinations(ranks, len(first))]
    tail = min(sum(one >= found for one in sums), sum(one <= found for one in sums))
    return min(1.0, 2 * tail / len(sums))


def claim(found: Sequence[float], random: Sequence[float]) -> str:
    """What accuracies of several found and several random cells show, in one sentence.

    Example:
        >>> from softcell.app.baseline import claim
        >>> claim([0.97, 0.98], [0.91, 0.95, 0.96]).partition(":")[0]
        'Between 2 found cells and 3 random ones, no difference can be claimed'
    """
    p, means = rank_sum(found, random), (statistics.fmean(found), statistics.fmean(random))
    ours, others = count_of(len(found), "found cell"), count_of(len(random), "random one")
    figures = f"{percent(means[0])} against {percent(means[1])} on average, p = {p:.2g} (exact rank-sum test)"
    if p > LEVEL:
        return f"Between {ours} and {others}, no difference can be claimed: {figures}."
    # By ranks, as in the test: one failed training run can shift the mean across.
    wins = sum((one > other) - (one < other) for one in found for other in random)
    return f"The {ours} are {'better' if wins > 0 else 'worse'} than the {others}: {figures}."
