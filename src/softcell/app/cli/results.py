"""What is printed when a run has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from softcell.app.cli.console import command, percent

if TYPE_CHECKING:
    from softcell.app.baseline import Baseline
    from softcell.evaluate import TrainResult
    from softcell.evaluate.seeds import TrainedSeeds
    from softcell.search import SearchResult
    from softcell.search.seeds import SearchedSeeds


def show_search(out: Console, result: SearchResult) -> None:
    """The cells, how the search itself measured, and where everything is."""
    from softcell.app.report import to_text
    from softcell.engine import RunFolder
    from softcell.search.budget import format_cost
    from softcell.search.reconstruct import PICTURE
    from softcell.search.run import FIRST

    assert result.genotype is not None
    out.print()
    out.print(to_text(result.genotype))
    out.print()
    facts(out, **searched_accuracy(result.metrics))
    results = RunFolder.open(result.folder).manifest["results"]
    if "perturbation" in results:
        facts(out, selection=selected(results["perturbation"]))
    if "child_accuracy" in results:  # of the architecture found, which a budget may have taken from an earlier epoch
        facts(out, child=child_accuracy(results))
    for kind, limit in result.recipe.resource.budgets().items():
        found = results.get(f"derived_{kind}")
        if found is not None:  # random searches of older versions did not count
            verdict = "within" if found <= limit else "NOT within"
            facts(out, budget=f"{format_cost(kind, found)}, {verdict} {format_cost(kind, limit)}")
    facts(out, genotype=str(result.folder / "genotype.json"), drawing=str(result.folder / "genotype.svg"))
    filled = next((p for p in (result.folder / FIRST / PICTURE, result.folder / PICTURE) if p.is_file()), None)
    if filled is not None:
        facts(out, filled_in=f"{filled} (what context auto-regression made of hidden parts)")
    facts(out, report=str(result.folder / "report.html"))


def selected(selection: Mapping[str, Any]) -> str:
    """By what the architecture was selected, and how good the supernet is that was tuned down to it."""
    decisions = f"{len(selection['edges'])} edges"
    if selection["nodes"]:
        decisions += f" and {len(selection['nodes'])} nodes"
    reached = f"{percent(selection['accuracy'])} on {selection['images']:,} images of the {selection['split']} split"
    return f"by {selection['by']} ({selection['measure']}), {decisions} decided; {reached} at the end"


def child_accuracy(results: Mapping[str, Any]) -> str:
    """The derived network's accuracy with the supernet's weights; older runs have it without recalibration alone."""
    plain = f"{percent(results['child_accuracy'])}{top5_of(results.get('child_top5'))}"
    where = f"on the {results['child_split']} split, without training"
    if "child_accuracy_bn" not in results:
        return f"{plain} {where}"
    anew = f"{percent(results['child_accuracy_bn'])}{top5_of(results.get('child_top5_bn'))}"
    return f"{anew} {where} (BatchNorm recalibrated; {plain} with the supernet's)"


def top5_of(share: float | None) -> str:
    """Top-5 accuracy in brackets; nothing where it was not counted (at most five classes, or an older run)."""
    return "" if share is None else f" (top-5 {percent(share)})"


def searched_accuracy(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What a search had measured after these epochs, for people to read, under a name that says of what; {} before."""
    from softcell.search.validation import RECALIBRATED

    last: Mapping[str, Any] = next((row for row in reversed(rows) if "val_accuracy" in row), {})
    if rows and "best_score" in rows[-1]:
        best = rows[-1]["best_score"]
        shown = "not finite" if best is None else format(best, ".5g")
        return {"score": f"{shown}, the best of {rows[-1]['networks']} untrained networks"}
    if not last:
        return {}
    if "best_val_accuracy" in last:  # architectures that were trained one by one
        return {"accuracy": f"{percent(last['best_val_accuracy'])} on the {last['val_split']} split, the best one"}
    share = f"{percent(last['val_accuracy'])}{top5_of(last.get('val_top5'))}"
    text, calibrated = f"{share} on the {last['val_split']} split", last.get(RECALIBRATED)
    return {"supernet": text if calibrated is None else f"{text}, {percent(calibrated)} with BatchNorm recalibrated"}


def show_seeds(out: Console, result: SearchedSeeds) -> None:
    """What each seed reached, with mean and spread; the best one is named."""
    import statistics

    from softcell.search.seeds import figure, loss, score
    from softcell.search.validation import RECALIBRATED

    out.print()
    reached: list[float] = []
    by = figure(result.results.values())
    where = "on the validation split" + (", BatchNorm recalibrated" if by == RECALIBRATED else "")
    for seed, one in result.results.items():
        value = score(one, by)
        if value is not None and one.genotype is not None:
            reached.append(value)
        state = "" if one.genotype is not None else ", unfinished"
        text = "not measured" if value is None else f"{percent(value)} {where}"
        if value is None and (wrong := loss(one)) is not None:
            text = f"loss {wrong:.4f} on the validation split"
        facts(out, **{f"seed {seed}": f"{text}{state}{'  (best)' if seed == result.best else ''}"})
    for seed, error in result.errors.items():
        facts(out, **{f"seed {seed}": f"failed: {error}"})
    if len(reached) > 1:
        spread = statistics.stdev(reached) * 100
        facts(out, all=f"{statistics.mean(reached) * 100:.1f} ± {spread:.1f}%  mean ± std (n={len(reached)})")


def show_training(out: Console, result: TrainResult, count: int | None) -> None:
    """Accuracy with its split, and what the network costs."""
    out.print()
    if result.recall is not None:
        images = f" ({count:,} images)" if count else ""
        shown = ", ".join(f"@{k} {percent(share)}" for k, share in result.recall.items())
        facts(out, recall=f"{shown} among images of {result.split}{images}")
    elif result.accuracy is None:
        facts(out, accuracy="not measured: the data has no test split")
    else:
        images = f" ({count:,} images)" if count else ""
        facts(out, accuracy=f"{percent(result.accuracy)}{top5_of(result.top5)} on the {result.split} split{images}")
    cost = result.cost
    facts(
        out,
        parameters=f"{cost.parameters:,}",
        multiply_adds=f"{cost.multiply_adds:,}",
        weights=str(result.folder / "model.safetensors"),
        report=str(result.folder / "report.html"),
    )


def show_trained_seeds(out: Console, result: TrainedSeeds) -> None:
    """What each seed reached, then mean and standard deviation."""
    out.print()
    names = {"accuracy": "accuracy", "top5": "top-5", "recall_at_1": "recall@1"}
    for seed, one in result.results.items():
        if one.exit_code:
            facts(out, **{f"seed {seed}": "unfinished"})
        elif one.recall is not None:
            facts(out, **{f"seed {seed}": f"recall@1 {percent(one.recall[1])} among images of {one.split}"})
        elif one.accuracy is None:
            facts(out, **{f"seed {seed}": "not measured: the data has no test split"})
        else:
            facts(out, **{f"seed {seed}": f"{percent(one.accuracy)}{top5_of(one.top5)} on the {one.split} split"})
    for seed, error in result.errors.items():
        facts(out, **{f"seed {seed}": f"failed: {error}"})
    for figure, name in names.items():
        if (spread := result.spread(figure)) is not None:
            mean, std, n = spread
            around = "" if std is None else f" ± {100 * std:.2f}"
            facts(out, **{name: f"{100 * mean:.2f}{around}%  mean{' ± std' if around else ''} (n={n})"})
    first = next((one for one in result.results.values() if not one.exit_code), None)
    if first is not None:
        facts(out, parameters=f"{first.cost.parameters:,}", multiply_adds=f"{first.cost.multiply_adds:,}")
    facts(out, runs=str(result.folder))


def show_comparison(out: Console, result: TrainResult, baseline: Baseline) -> None:
    """The found architecture beside the random ones."""
    from softcell.app.baseline import verdict

    if result.accuracy is None or not baseline.accuracies:
        return
    n = len(baseline.accuracies)
    spread = "" if baseline.std is None else f" ± {baseline.std * 100:.1f}"
    each = ", ".join(percent(accuracy) for accuracy in baseline.accuracies)
    out.print()
    out.print(Text(f"accuracy on the {baseline.split} split, all trained alike (seed {result.recipe.seed})", "bold"))
    facts(
        out,
        found=percent(result.accuracy),
        random=f"{baseline.mean * 100:.1f}{spread}%  mean{' ± std' if spread else ''} (n={n}): {each}",
    )
    out.print(Text(verdict(result.accuracy, baseline)))


def already(out: Console, folder: Path, resume: bool) -> None:
    """Says so when a run that is to be resumed has nothing left to do."""
    from softcell.engine import RunFolder

    if resume and RunFolder.open(folder).manifest["status"] == "finished":
        out.print(Text(f"{folder} is finished already; this is its result."))


def interrupted(out: Console, *resume: str) -> None:
    """The exact command that goes on."""
    out.print()
    out.print(Text("interrupted; the state is saved. Go on with:", "yellow"))
    out.print(Text(f"  {command(*resume)}"))


def facts(out: Console, **values: str) -> None:
    """Aligned lines of a name and a value."""
    for name, value in values.items():
        out.print(Text.assemble((f"{name.replace('_', '-'):<14}", "bold"), value))
