"""What commands print and write: fields, files that a user asks for, and the results of a run at its end."""

from __future__ import annotations

import os
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from softcell.app.baseline import Baseline, verdict
from softcell.app.jobs import CELLS
from softcell.app.report import to_text
from softcell.app.report.page import REPORT
from softcell.engine import RunFolder
from softcell.engine.distributed import is_main_process
from softcell.errors import UserError
from softcell.evaluate import TrainResult
from softcell.search import SearchResult
from softcell.search.budget import format_cost, format_limit
from softcell.search.run import FIRST
from softcell.search.supernet import PICTURE, RECALIBRATED
from softcell.seeds import SearchedSeeds, TrainedSeeds, compared_by, last_accuracy, last_loss
from softcell.text import clock, count_of, percent


def console() -> Console:
    """Standard output, silent on all processes but the first; no highlighting, so that all numbers look the same."""
    return Console(highlight=False, soft_wrap=True, quiet=not is_main_process())


def print_fields(out: Console, **values: str) -> None:
    """Aligned lines of a name and a value."""
    for name, value in values.items():
        out.print(Text.assemble((f"{name.replace('_', '-'):<14}", "bold"), value))


def command(*words: str | Path) -> str:
    """A command line to copy."""
    return shlex.join(("softcell", *(str(word) for word in words)))


def check_absent(file: Path, overwrite: bool, way_out: str = "choose another name") -> None:
    """Raises if there is a file that may not be replaced."""
    if file.exists() and not overwrite:
        raise UserError(f"{file} already exists; {way_out}, or --overwrite to replace it")


def check_output_path(file: Path, overwrite: bool) -> Path | None:
    """Raises if `file` cannot be written, before the work it takes.

    Returns the topmost folder that will be created for it, if any.
    """
    if file.is_dir():
        raise UserError(f"{file} is a folder; pass the name of a file in it")
    check_absent(file, overwrite, "choose another name with --out")
    missing = [parent for parent in file.parents if not parent.exists()]
    existing = missing[-1].parent if missing else file.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        reason = "is not writable" if existing.is_dir() else "is not a folder"
        raise UserError(f"{file} cannot be written because {existing} {reason}; choose another path")
    return missing[-1] if missing else None


def output_path(file: Path, created: Path | None) -> str:
    """The path of a written file for a message; `created` is what `check_output_path` returned."""
    return str(file) if created is None else f"{file} (created the folder {created})"


def write(path: Path, text: str, overwrite: bool) -> None:
    """Writes a file that the user asked for; an existing one is kept unless `overwrite`."""
    check_absent(path, overwrite)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}); choose another path") from error


def show_search(out: Console, result: SearchResult) -> None:
    """The cells, the accuracies that the search measured, and the files."""
    assert result.genotype is not None
    out.print()
    out.print(to_text(result.genotype))
    out.print()
    print_fields(out, **search_accuracy(result.metrics))
    results = RunFolder.open(result.folder).manifest["results"]
    if "perturbation" in results:
        print_fields(out, selection=selected(results["perturbation"]))
    if "child_accuracy" in results:  # of the final architecture, which a budget may have taken from an earlier epoch
        print_fields(out, child=child_accuracy(results))
    for kind, limit in result.recipe.resource.budgets().items():
        found = results.get(f"derived_{kind}")
        if found is not None:  # random searches of older versions did not count costs
            print_fields(out, budget=against_budget(kind, found, limit))
    print_fields(out, genotype=str(result.folder / "genotype.json"), drawing=str(result.folder / CELLS))
    filled = next((p for p in (result.folder / FIRST / PICTURE, result.folder / PICTURE) if p.is_file()), None)
    if filled is not None:
        print_fields(out, filled_in=f"{filled} (hidden parts reconstructed by context auto-regression)")
    print_fields(out, report=str(result.folder / REPORT))


def against_budget(kind: str, found: float, limit: float) -> str:
    """A cost and whether it is within its budget."""
    met = "within the budget of" if found <= limit else "EXCEEDS the budget of"
    return f"{format_cost(kind, found)}, {met} {format_limit(kind, limit)}"


def selected(selection: Mapping[str, Any]) -> str:
    """How the architecture was selected, and the accuracy of the supernet after that."""
    decisions = count_of(len(selection["edges"]), "edge")
    if selection["nodes"]:
        decisions += f" and {count_of(len(selection['nodes']), 'node')}"
    images = f"{count_of(selection['images'], 'image')} of the {selection['split']} split"
    return (
        f"by {selection['by']} ({selection['measure']}), {decisions} decided; final accuracy "
        f"{percent(selection['accuracy'])} on {images}"
    )


def child_accuracy(results: Mapping[str, Any]) -> str:
    """The derived network's accuracy with the supernet's weights; older runs have it only without recalibration."""
    plain = f"{percent(results['child_accuracy'])}{top5_of(results.get('child_top5'))}"
    where = f"on the {results['child_split']} split, without training"
    if "child_accuracy_bn" not in results:
        return f"{plain} {where}"
    recalibrated = f"{percent(results['child_accuracy_bn'])}{top5_of(results.get('child_top5_bn'))}"
    return f"{recalibrated} {where} (BatchNorm recalibrated; {plain} with the supernet's)"


def top5_of(share: float | None) -> str:
    """Top-5 accuracy in brackets; nothing if it was not measured (at most five classes, or an older run)."""
    return "" if share is None else f" (top-5 {percent(share)})"


def search_accuracy(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The accuracy that a search had measured after these epochs, by the name of what was measured; {} if none."""
    last: Mapping[str, Any] = next((row for row in reversed(rows) if "val_accuracy" in row), {})
    if rows and "best_score" in rows[-1]:
        best = rows[-1]["best_score"]
        text = "not finite" if best is None else format(best, ".5g")
        return {"score": f"{text}, the best of {count_of(rows[-1]['networks'], 'untrained network')}"}
    if not last:
        return {}
    if "best_val_accuracy" in last:  # architectures trained one by one
        return {"accuracy": f"{percent(last['best_val_accuracy'])} on the {last['val_split']} split, the best one"}
    share = f"{percent(last['val_accuracy'])}{top5_of(last.get('val_top5'))}"
    text, recalibrated = f"{share} on the {last['val_split']} split", last.get(RECALIBRATED)
    if recalibrated == last["val_accuracy"]:
        return {"supernet": f"{text}, BatchNorm recalibrated"}
    # Searches of earlier versions measured with running statistics, and once more after the last epoch.
    return {
        "supernet": text if recalibrated is None else f"{text}, {percent(recalibrated)} with BatchNorm recalibrated"
    }


def show_seeds(out: Console, result: SearchedSeeds) -> None:
    """The accuracy of each seed, with mean and spread; the best one is marked."""
    out.print()
    reached: list[float] = []
    by = compared_by(result.results.values())
    where = "on the validation split" + (", BatchNorm recalibrated" if by == RECALIBRATED else "")
    for seed, one in result.results.items():
        value = last_accuracy(one, by)
        if value is not None and one.genotype is not None:
            reached.append(value)
        state = "" if one.genotype is not None else ", unfinished"
        text = "not measured" if value is None else f"{percent(value)} {where}"
        if value is None and (validation_loss := last_loss(one)) is not None:
            text = f"loss {validation_loss:.4f} on the validation split"
        print_fields(out, **{f"seed {seed}": f"{text}{state}{'  (best)' if seed == result.best else ''}"})
    for seed, error in result.errors.items():
        print_fields(out, **{f"seed {seed}": f"failed: {error}"})
    if len(reached) > 1:
        spread = statistics.stdev(reached) * 100
        print_fields(out, all=f"{statistics.mean(reached) * 100:.1f} ± {spread:.1f}%  mean ± std (n={len(reached)})")


def time_of(given: float, used: float | None) -> str:
    """The time of a training run that had a limit, used and given."""
    return f"{clock(given)} given" if used is None else f"{clock(used)} of {clock(given)}"


def show_training(out: Console, result: TrainResult, found: Mapping[str, Any]) -> None:
    """Accuracy with its split, and the cost of the network. found: the results in `run.json`."""
    out.print()
    count, given = found.get("count"), result.recipe.time
    if result.recall is not None:
        images = f" ({count_of(count, 'image')})" if count else ""
        shown = ", ".join(f"@{k} {percent(share)}" for k, share in result.recall.items())
        print_fields(out, recall=f"{shown} among images of {result.split}{images}")
    elif result.accuracy is None:
        print_fields(out, accuracy="not measured: the data has no test split")
    else:
        images = f" ({count_of(count, 'image')})" if count else ""
        print_fields(
            out, accuracy=f"{percent(result.accuracy)}{top5_of(result.top5)} on the {result.split} split{images}"
        )
    if given:
        epochs = count_of(len(result.metrics), "epoch")
        print_fields(out, time=f"{time_of(given, found.get('time_used'))}, {epochs}")
    cost = result.cost
    print_fields(
        out,
        parameters=f"{cost.parameters:,}",
        multiply_adds=f"{cost.multiply_adds:,}",
        weights=str(result.folder / "model.safetensors"),
        report=str(result.folder / REPORT),
    )


def show_trained_seeds(out: Console, result: TrainedSeeds) -> None:
    """The accuracy of each seed, then mean and standard deviation."""
    out.print()
    names = {"accuracy": "accuracy", "top5": "top-5", "recall_at_1": "recall@1"}
    for seed, one in result.results.items():
        if one.exit_code:
            print_fields(out, **{f"seed {seed}": "unfinished"})
        elif one.recall is not None:
            print_fields(out, **{f"seed {seed}": f"recall@1 {percent(one.recall[1])} among images of {one.split}"})
        elif one.accuracy is None:
            print_fields(out, **{f"seed {seed}": "not measured: the data has no test split"})
        else:
            print_fields(
                out, **{f"seed {seed}": f"{percent(one.accuracy)}{top5_of(one.top5)} on the {one.split} split"}
            )
    for seed, error in result.errors.items():
        print_fields(out, **{f"seed {seed}": f"failed: {error}"})
    for key, name in names.items():
        if (spread := result.spread(key)) is not None:
            mean, std, n = spread
            around = "" if std is None else f" ± {100 * std:.2f}"
            print_fields(out, **{name: f"{100 * mean:.2f}{around}%  mean{' ± std' if around else ''} (n={n})"})
    first = next((one for one in result.results.values() if not one.exit_code), None)
    if first is not None:
        print_fields(out, parameters=f"{first.cost.parameters:,}", multiply_adds=f"{first.cost.multiply_adds:,}")
    print_fields(out, runs=str(result.folder))


def show_comparison(out: Console, result: TrainResult, baseline: Baseline) -> None:
    """The found architecture compared with the random ones."""
    if result.accuracy is None or not baseline.accuracies:
        return
    n = len(baseline.accuracies)
    spread = "" if baseline.std is None else f" ± {baseline.std * 100:.1f}"
    each = ", ".join(percent(accuracy) for accuracy in baseline.accuracies)
    out.print()
    out.print(
        Text(
            f"accuracy on the {baseline.split} split, all trained with the same recipe (seed {result.recipe.seed})",
            "bold",
        )
    )
    print_fields(
        out,
        found=percent(result.accuracy),
        random=f"{baseline.mean * 100:.1f}{spread}%  mean{' ± std' if spread else ''} (n={n}): {each}",
    )
    out.print(Text(verdict(result.accuracy, baseline)))


def already_finished(out: Console, folder: Path, resume: bool) -> None:
    """Prints that a run to be resumed is already finished."""
    if resume and RunFolder.open(folder).manifest["status"] == "finished":
        out.print(Text(f"{folder} is already finished; this is its result."))


def interrupted(out: Console, *resume: str) -> None:
    """Prints the exact command that resumes the run."""
    out.print()
    out.print(Text("Interrupted; the state is saved. Resume with:", "yellow"))
    out.print(Text(f"  {command(*resume)}"))
