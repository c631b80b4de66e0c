"""The record of a table: every run with command, seed, hardware and seconds, and the rows next to published numbers.

A record is made from the run folders alone, at any time: what is unfinished is recorded as such.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from softcell.app.jobs import has_run
from softcell.app.report.compare import LEVEL, summarise, welch
from softcell.app.reproduce.papers import PROTOCOL, PaperTable, Row
from softcell.app.reproduce.plan import Job, Plan
from softcell.app.reproduce.run import epochs_done, is_finished, num_epochs, status, untrainable
from softcell.arch import Genotype
from softcell.engine import RunFolder
from softcell.engine.manifest import collect, now
from softcell.files import atomic_write_text
from softcell.spaces.base import evaluation_space
from softcell.spaces.costs import count_genotype
from softcell.text import count_of

FORMAT, VERSION = "softcell-table", 1
NOT_MEASURED = "not measured"
_KEPT_SEARCH = ("val_accuracy", "val_accuracy_bn", "child_accuracy", "child_accuracy_bn", "val_split", "seconds")
_KEPT_TRAINING = ("accuracy", "top5", "split", "count", "seconds", "parameters", "multiply_adds")
_RECALL = tuple(f"recall_at_{k}" for k in (1, 2, 4, 8))
_CURVES = ("train_accuracy", "val_accuracy", "child_accuracy", "entropy")


@dataclass(frozen=True)
class Column:
    """How a figure is shown. factor: from the stored unit to the shown one."""

    heading: str
    factor: float = 1.0
    digits: int = 2
    lower_is_better: bool = True
    unit: str = ""


COLUMNS = {
    "search": Column("supernet, %", 100, lower_is_better=False),
    "search_bn": Column("supernet, BatchNorm recalibrated, %", 100, lower_is_better=False),
    "child": Column("child, %", 100, lower_is_better=False),
    "child_bn": Column("child, BatchNorm recalibrated, %", 100, lower_is_better=False),
    "loss_of_child": Column("supernet minus child, points", 100),
    "gap_bn": Column("supernet minus child, recalibrated, points", 100),
    "entropy": Column("entropy per edge", digits=3),
    "parameters": Column("parameters", 1e-6, unit="M"),
    "multiply_adds": Column("multiply-adds", 1e-6, 0, unit="M"),
    "cost": Column("search, minutes", 1 / 60, 1),
}
"""Figures of searches and networks. Ours: minutes on the device of the run; published: GPU-days."""
_OF_TRAINING = {
    "error": Column("test error, %", 100),
    "accuracy": Column("test accuracy, %", 100, lower_is_better=False),
    **{key: Column(f"Recall@{key[-1]}, %", 100, lower_is_better=False) for key in _RECALL},
}


def columns_of(table: PaperTable) -> dict[str, Column]:
    """The columns of a table, by key: those of its training runs are named after them."""
    found = {key: COLUMNS[key] for key in table.columns}
    for name, training in table.trainings.items():
        for figure in training.figures:
            own = _OF_TRAINING[figure]
            key = name if len(training.figures) == 1 else f"{name} {figure}"
            found[key] = Column(training.heading or own.heading, own.factor, own.digits, own.lower_is_better)
    return found


def make_record(plan: Plan, table: PaperTable, command: Sequence[str] | None = None) -> dict[str, Any]:
    """The record of a table from the runs in the plan's folder.

    Example:
        >>> from softcell.app.reproduce import make_plan, make_record
        >>> plan = make_plan("snas", "2", small=True)
        >>> record = make_record(plan, plan.tables[0])
        >>> record["complete"], record["rows"][0]["name"]
        (False, 'SNAS, mild')
    """
    runs = {str(job.folder): _run_facts(plan, job) for row in table.rows for job in plan.jobs_of(table, row)}
    rows = [_row_facts(plan, table, row) for row in table.rows]
    about = {**collect(), **({} if command is None else {"command": list(command)})}
    found: dict[str, Any] = without_folders(
        {
            "format": FORMAT,
            "version": VERSION,
            "date": now(),
            **about,
            "paper": plan.paper.key,
            "table": table.number,
            "title": table.title,
            "small": plan.small,
            "seeds": plan.num_seeds(table),
            "complete": all(run["status"] in ("finished", "not trainable") for run in runs.values()),
            "trainings": {
                name: {**asdict(one), "settings": dict(one.settings)} for name, one in table.trainings.items()
            },
            "protocol": list(PROTOCOL),
            "notes": list(table.notes),
            "rows": rows,
            "verdict": verdict(table, rows),
            "runs": runs,
        }
    )
    return found


def write_record(file: Path, record: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(file, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def _run_facts(plan: Plan, job: Job) -> dict[str, Any]:
    """One run: the command that repeats it, its progress and its results."""
    folder = plan.folder_of(job)
    facts: dict[str, Any] = {
        "kind": job.kind,
        "title": job.title,
        "command": plan.command(job),
        "seed": job.seed,
        "status": status(folder),
    }
    if (reason := untrainable(plan, job)) is not None:
        return {**facts, "status": "not trainable", "reason": reason}
    if not has_run(folder):
        return facts
    manifest, epochs = RunFolder.open(folder).manifest, epochs_done(folder)
    facts["epochs_done"] = len(epochs)
    facts |= {key: manifest[key] for key in ("recipe", "git", "versions", "hardware", "created", "finished")}
    kept = _KEPT_SEARCH if job.kind == "search" else (*_KEPT_TRAINING, *_RECALL)
    facts["results"] = {key: manifest["results"][key] for key in kept if manifest["results"].get(key) is not None}
    if job.kind == "search" and is_finished(folder):
        facts["genotype"] = Genotype.load(folder).to_dict()
    if job.kind == "search":
        facts["curves"] = {key: [row.get(key) for row in epochs] for key in _CURVES if any(key in r for r in epochs)}
    elif job.kind == "train":
        facts["genotype"] = manifest["results"]["genotype"]
    return facts


def _row_facts(plan: Plan, table: PaperTable, row: Row) -> dict[str, Any]:
    """The figures of a row: `networks` over its networks, `seeds` over the training seeds of its first network."""
    searches = [job for job in plan.searches(table, row) if is_finished(plan.folder_of(job))]
    values: dict[str, list[float]] = {}
    for job in searches:
        for key, value in _search_figures(plan, job).items():
            values.setdefault(key, []).append(value)
    seeds: dict[str, list[float]] = {}
    for name, networks in plan.trainings(table, row).items():
        figures = table.trainings[name].figures
        for number, jobs in enumerate(networks.values()):
            done = [job for job in jobs if is_finished(plan.folder_of(job))]
            for job in done:
                results = RunFolder.open(plan.folder_of(job)).manifest["results"]
                costs = {key: float(results[key]) for key in ("parameters", "multiply_adds")}
                for figure in figures:
                    key = name if len(figures) == 1 else f"{name} {figure}"
                    value = 1 - results["accuracy"] if figure == "error" else results[figure]
                    if len(jobs) > 1 and number == 0:
                        seeds.setdefault(key, []).append(float(value))
                    if job is jobs[0]:
                        values.setdefault(key, []).append(float(value))
                if job is jobs[0] and name == next(iter(plan.trainings(table, row))):
                    for key, cost in costs.items():
                        values.setdefault(f"trained {key}", []).append(cost)
    for key in ("parameters", "multiply_adds"):  # of what was trained, where it was
        values[key] = values.pop(f"trained {key}", []) or values.pop(key, [])
    own = {
        key: [job for job in plan.jobs_of(table, row) if job.kind == key] for key in ("search", "train", "classifier")
    }
    progress = {
        key: f"{sum(is_finished(plan.folder_of(job)) for job in jobs)} of {len(jobs)}"
        for key, jobs in own.items()
        if jobs
    }
    shown = columns_of(table)
    return {
        "name": row.name,
        "published": dict(row.published),
        "networks": {key: _summary(values[key]) for key in shown if values.get(key)},
        "seeds": {key: _summary(seeds[key]) for key in shown if seeds.get(key)},
        "finished": progress,
        "stopped": [text for job in plan.jobs_of(table, row) if (text := _unfinished(plan, job))],
    }


def _search_figures(plan: Plan, job: Job) -> dict[str, float]:
    """Figures of a finished search, by key of `COLUMNS`."""
    manifest, epochs = RunFolder.open(plan.folder_of(job)).manifest, epochs_done(plan.folder_of(job))
    results = manifest["results"]
    found: dict[str, Any] = {
        "search": results.get("val_accuracy"),
        # DARTS's supernet is measured with its running statistics, which fit it.
        "search_bn": results.get("val_accuracy_bn", results.get("val_accuracy")),
        "child": results.get("child_accuracy"),
        "child_bn": results.get("child_accuracy_bn"),
        "entropy": next((row["entropy"] for row in reversed(epochs) if "entropy" in row), None),
        "cost": sum(row["seconds"] for row in epochs),
    }
    for name, (first, second) in {"loss_of_child": ("search", "child"), "gap_bn": ("search_bn", "child_bn")}.items():
        if found[first] is not None and found[second] is not None:
            found[name] = found[first] - found[second]
    genotype, data = Genotype.load(plan.folder_of(job)), manifest["results"].get("data")
    if data and not results.get("empty_cells"):
        space = evaluation_space(genotype.space, str(manifest["recipe"]["data"]))
        cost = count_genotype(space, genotype, tuple(data["shape"]), data["num_classes"])
        found |= {"parameters": cost.parameters, "multiply_adds": cost.multiply_adds}
    return {key: float(value) for key, value in found.items() if value is not None}


def _summary(values: Sequence[float]) -> dict[str, Any]:
    found = summarise(values)
    return {"n": found.n, "mean": found.mean, "std": found.std, "values": list(values)}


def _unfinished(plan: Plan, job: Job) -> str | None:
    """The progress of a run that was started and is not finished, or why it cannot be."""
    folder = plan.folder_of(job)
    if (reason := untrainable(plan, job)) is not None:
        return f"{job.title}: {reason}"
    if not has_run(folder) or is_finished(folder):
        return None
    return f"{job.title}: {status(folder)} after {len(epochs_done(folder))} of {num_epochs(plan.recipe(job))} epochs"


def verdict(table: PaperTable, rows: Sequence[Mapping[str, Any]]) -> str:
    """What the table shows, in a sentence; two rows are compared by Welch's test."""
    if table.compare is None:
        return "not measured"
    first, second, key = table.compare
    column = columns_of(table)[key]
    by_name = {row["name"]: row for row in rows}
    values = [_compared(by_name[name], key) for name in (first, second)]
    if not all(values):
        missing = [name for name, own in zip((first, second), values, strict=True) if not own]
        return f"Not measured: {' and '.join(missing)}."
    means = [column.factor * statistics.fmean(own) for own in values]
    n = f"n = {len(values[0])} and {len(values[1])}"
    shown = " and ".join(f"{mean:.{column.digits}f}{column.unit}" for mean in means)
    tested = welch(*values)
    if tested is None:
        return f"{first} and {second}: {column.heading} {shown} ({n}): too few runs, or no spread, for a test."
    interval = " to ".join(f"{column.factor * end:+.{column.digits}f}" for end in tested.interval)
    facts = f"{column.heading} {shown}, difference {interval} (95 % interval, Welch, p = {tested.p:.3g}, {n})"
    if tested.p >= LEVEL:
        return f"No difference between {first} and {second} can be claimed: {facts}."
    is_better = (tested.difference < 0) == column.lower_is_better
    return f"{first} is {'better' if is_better else 'worse'} than {second}: {facts}."


def _compared(row: Mapping[str, Any], key: str) -> list[float]:
    """The values of a row over its networks; of a single network, over its training seeds."""
    networks, seeds = (list(row.get(part, {}).get(key, {}).get("values", [])) for part in ("networks", "seeds"))
    return seeds if len(networks) < 2 and len(seeds) > 1 else networks


def table_cells(table: PaperTable, record: Mapping[str, Any] | None) -> tuple[list[str], list[list[str]]]:
    """Human-readable headings and rows of a table: ours as `mean ± std (n)`, the paper's in separate columns.

    record: None if nothing has been run.
    """
    columns = columns_of(table)
    rows = {row["name"]: row for row in record["rows"]} if record is not None else {}
    printed = {key for row in table.rows for key in row.published}
    repeated = {key for row in rows.values() for key in row["seeds"]}
    headings = [""]
    for key, column in columns.items():
        headings.append(column.heading)
        headings += [f"{column.heading}, seeds of one network"] if key in repeated else []
        headings += [f"paper: {'GPU-days' if key == 'cost' else column.heading}"] if key in printed else []
    lines = []
    for row in table.rows:
        own = rows.get(row.name, {"networks": {}, "seeds": {}})
        line = [row.name]
        for key, column in columns.items():
            line.append(_shown(own["networks"].get(key), column, _applies(table, row, key)))
            line += [_shown(own["seeds"].get(key), column, False)] if key in repeated else []
            line += [row.published.get(key, "–")] if key in printed else []
        lines.append(line)
    return headings, lines


def _applies(table: PaperTable, row: Row, key: str) -> bool:
    """Whether a row will have a value in a column."""
    if key in COLUMNS:
        return key in ("parameters", "multiply_adds") or row.search is not None
    return key.split(" ")[0] in (row.trainings or table.trainings)


def _shown(summary: Mapping[str, Any] | None, column: Column, applies: bool) -> str:
    if summary is None:
        return NOT_MEASURED if applies else "–"
    mean = f"{column.factor * summary['mean']:.{column.digits}f}{column.unit}"
    if summary["std"] is None:
        return f"{mean} (1)"
    return f"{mean} ± {column.factor * summary['std']:.{column.digits}f} ({summary['n']})"


def unfinished(record: Mapping[str, Any]) -> list[str]:
    """What a table still lacks, in a line for each kind of run, and runs that were stopped."""
    counts: dict[str, int] = {}
    for run in record["runs"].values():
        if run["status"] not in ("finished", "not trainable"):
            counts[run["kind"]] = counts.get(run["kind"], 0) + 1
    words = {"train": "training", "classifier": "training", "search": "search run", "teacher": "teacher"}
    left = [count_of(number, words[kind]) for kind, number in counts.items()]
    stopped = dict.fromkeys(text for row in record["rows"] for text in row["stopped"])
    return [*([f"left: {', '.join(left)}"] if left else []), *stopped]


def without_folders(value: Any) -> Any:
    """The same without the folders of this machine, which mean nothing elsewhere: `DIR/name` instead."""
    if isinstance(value, str):
        words = value.split(" ")
        return " ".join(f"DIR/{Path(word).name}" if word[1:] and word[0] in "/~" else word for word in words)
    if isinstance(value, Mapping):
        return {key: without_folders(inner) for key, inner in value.items()}
    return [without_folders(inner) for inner in value] if isinstance(value, list | tuple) else value
