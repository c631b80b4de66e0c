"""The end of a run: the delivered network in numbers, the verdict on the search, report and exports."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from softcell.app.export import export
from softcell.app.pipeline._inspect import Inspection, OwnModel
from softcell.app.pipeline._plain import MIN_EPOCHS
from softcell.app.pipeline._plan import Kind, Plan, RunTime
from softcell.app.progress import Screen
from softcell.app.report.page import REPORT, write_report
from softcell.data import load
from softcell.data.images import Images
from softcell.engine import resolve_device
from softcell.errors import UserError
from softcell.evaluate import TrainResult
from softcell.evaluate.latency import measure_module
from softcell.files import atomic_write_text
from softcell.settings import build, to_dict
from softcell.spaces import Network
from softcell.text import count_of

SUMMARY = "summary.json"
VERSION = 2
"""Of summary.json; the first version had no competition, and reports still show it."""
EQUAL = 0.1
"""Costs that differ by no more than this share count as equal in the verdict."""


@dataclass(frozen=True)
class Result:
    """A network in one round: its accuracy on the held-out images for every seed, epochs per seed, and all seconds.

    Example:
        >>> from softcell.app.pipeline import Result
        >>> Result("found", accuracies=(0.7, 0.8), epochs=5, seconds=12.0).accuracy  # the mean
        0.75
    """

    name: str
    accuracies: tuple[float, ...]
    epochs: int
    seconds: float

    @property
    def accuracy(self) -> float:
        return statistics.fmean(self.accuracies)


@dataclass(frozen=True)
class Round:
    """`seconds`: of every training run of the largest size. `kept`: the networks that stay, best first; the last round
    keeps one.

    Example:
        >>> from softcell.app.pipeline import Result, Round
        >>> results = (Result("plain-1", (0.7,), epochs=5, seconds=3.0), Result("found", (0.6,), epochs=5, seconds=3.0))
        >>> Round(3.0, seeds=1, results=results, kept=("plain-1",)).of("found").accuracy
        0.6
    """

    seconds: float
    seeds: int
    results: tuple[Result, ...]
    kept: tuple[str, ...]

    def of(self, name: str) -> Result | None:
        return next((result for result in self.results if result.name == name), None)


def standard_error(first: float, second: float, count: int) -> float:
    """The standard error of the difference of two accuracies, each measured on `count` images."""
    # Accuracies of 0 and 1 have an estimated variance of 0, which no finite number of images can show.
    return math.sqrt(max(first * (1 - first) + second * (1 - second), 0.5 / count) / count)


@dataclass(frozen=True)
class Decision:
    """The winner, and why, in words and as data.

    `rule`: `best` (ahead of all others), `longer` (a smaller plain network was ahead, but the final training is much
    longer), `unclear` (the network ahead leads by one standard error or less), `smaller` or `cell` (a clear lead over
    the largest, or the best, plain network) and `none` (no competition). `ahead` is the network that was ahead, `lead`
    its lead over the plain network that it was compared with, and `error` the standard error of that lead, all as
    shares. `longer`: epochs of the final training relative to those of the round.

    Example:
        >>> from softcell.app.pipeline import Decision
        >>> Decision("plain-1", "it was the best", "best", ahead="plain-1").winner
        'plain-1'
    """

    winner: str
    why: str
    rule: Literal["best", "longer", "unclear", "smaller", "cell", "none"] = "none"
    ahead: str = ""
    lead: float = 0.0
    error: float = 0.0
    longer: float = 0.0


@dataclass(frozen=True)
class Entry:
    """A network of the competition, with its costs.

    Example:
        >>> from softcell.app.pipeline import Entry
        >>> Entry("plain-1", "plain", parameters=170_234, multiply_adds=16_571_264).kind
        'plain'
    """

    name: str
    kind: Kind
    parameters: int
    multiply_adds: int


@dataclass(frozen=True)
class Row:
    """The delivered network. `accuracy` is a share of the test images, `latency` milliseconds for one image.

    Example:
        >>> from softcell.app.pipeline import Row
        >>> row = Row("plain-1", "plain", "runs/photos/train", 0.9, 1000, 5000, latency=1.5, epochs=50, seconds=90.0)
        >>> row.name, row.accuracy
        ('plain-1', 0.9)
    """

    name: str
    kind: Kind
    folder: str
    accuracy: float
    parameters: int
    multiply_adds: int
    latency: float
    epochs: int
    seconds: float


@dataclass(frozen=True)
class Beside:
    """The user's own model, and its accuracy on the same test images.

    Example:
        >>> from softcell.app.pipeline import Beside
        >>> Beside("mine.onnx", 0.88).accuracy
        0.88
    """

    file: str
    accuracy: float


@dataclass(frozen=True)
class Summary:
    """The delivered network, `count` test images it was measured on, and the competition that chose it.

    `why`: the reason for the choice, `decision`: the same as data. `held_out`: the number of training images that the
    competition measured on, and `most_frequent` the accuracy of always predicting the most frequent class.

    Example:
        >>> from softcell.app.pipeline import Entry, Result, Round, Row, Summary
        >>> delivered = Row("found", "found", "runs/photos/train", 0.97, 900, 5000, 1.5, epochs=50, seconds=90.0)
        >>> entries = [Entry(name, name.split("-")[0], 900, 5000) for name in ("plain-1", "found", "random-1")]
        >>> results = tuple(Result(entry.name, (0.9,), epochs=5, seconds=3.0) for entry in entries)
        >>> rounds = (Round(3.0, 1, results, kept=("found",)),)
        >>> summary = Summary(delivered, "it was the best", tuple(entries), rounds, 1000, count=400, most_frequent=0.5)
        >>> summary.to_dict()["delivered"]["name"], summary.kind_of("random-1")
        ('found', 'random')
    """

    delivered: Row
    why: str
    entries: tuple[Entry, ...]
    rounds: tuple[Round, ...]
    held_out: int
    count: int
    most_frequent: float
    beside: Beside | None = None
    decision: Decision | None = None

    def kind_of(self, name: str) -> Kind:
        return next(entry.kind for entry in self.entries if entry.name == name)

    def of_kind(self, kind: Kind, number: int) -> list[Result]:
        """The results of a kind of network in a round, counted from 0; best first."""
        found = [result for result in self.rounds[number].results if self.kind_of(result.name) == kind]
        return sorted(found, key=lambda result: -result.accuracy)

    def to_dict(self) -> dict[str, Any]:
        """For files; the folder is relative to the run, which may be moved."""
        worth, lines = verdict(self)
        data = to_dict(self)
        data["delivered"]["folder"] = Path(self.delivered.folder).name
        return {"version": VERSION, **data, "worth_it": worth, "verdict": lines}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], folder: Path) -> Summary:
        """The inverse of `to_dict`, for a run that is now in `folder`."""
        own = {key: value for key, value in data.items() if key not in ("version", "worth_it", "verdict")}
        delivered = str(folder / Path(str(own["delivered"]["folder"])).name)
        return build(cls, {**own, "delivered": {**own["delivered"], "folder": delivered}}, "summary")


def verdict(summary: Summary) -> tuple[bool, list[str]]:
    """Whether the search was worth it, judged by the competition, and the reasons in sentences.

    Example:
        >>> from softcell.app.pipeline import Entry, Result, Round, Row, Summary, verdict
        >>> delivered = Row("plain-1", "plain", "runs/photos/train", 0.97, 900, 5000, 1.5, epochs=50, seconds=90.0)
        >>> entries = [Entry(name, name.split("-")[0], 900, 5000) for name in ("plain-1", "found", "random-1")]
        >>> results = [Result("plain-1", (0.95,), 5, 3.0), Result("found", (0.9,), 5, 3.0)]
        >>> rounds = (Round(3.0, 1, tuple(results), ("plain-1",)),)
        >>> summary = Summary(delivered, "it was the best", tuple(entries), rounds, 1000, count=400, most_frequent=0.5)
        >>> worth, reasons = verdict(summary)
        >>> worth
        False
    """
    lines, worth = _compared(summary)
    delivered, count = summary.delivered, summary.count
    if summary.beside is not None:
        own = summary.beside.accuracy
        chance = 2 * standard_error(delivered.accuracy, own, count)
        lines.append(
            f"Delivered against {summary.beside.file} ({own:.1%}), on the same {count_of(count, 'test image')}: "
            f"{_claim(delivered.accuracy - own, chance)}"
        )
    if delivered.epochs < MIN_EPOCHS:
        lines.append(
            f"The delivered network was trained for {count_of(delivered.epochs, 'epoch')}, and fewer than "
            f"{MIN_EPOCHS} are too few to learn much: the machine became slower during the training. Run again with "
            "more --time, or when the machine is idle."
        )
    share = summary.most_frequent
    if share == 1.0:
        lines.append("All test images are of one class, so their accuracy does not show whether anything was learned.")
    elif delivered.accuracy <= share + 2 * standard_error(delivered.accuracy, share, count):
        lines.append(f"Always predicting the most frequent class gives {share:.1%}: nothing useful was learned.")
    return worth, lines


def _compared(summary: Summary) -> tuple[list[str], bool]:
    """The found network against random ones and the best plain one, at equal time."""
    if not any(entry.kind == "found" for entry in summary.entries):
        return ["There was no time for a search, so nothing can be said about one."], False
    if not summary.rounds:
        return ["There was no time for a competition, so nothing can be said about the search."], False
    lines: list[str] = []
    found, random = summary.of_kind("found", 0), summary.of_kind("random", 0)
    beats, loses = False, False
    if found and len(random) > 1:
        accuracies = [result.accuracy for result in random]
        mean, spread = statistics.fmean(accuracies), statistics.stdev(accuracies)
        chance = max(spread, 2 * standard_error(found[0].accuracy, mean, summary.held_out))
        lines.append(
            f"Found against {count_of(len(random), 'random architecture')} ({_how(summary, 0)}): "
            f"{_claim(found[0].accuracy - mean, chance)}{_unequal(summary, random)}"
        )
        beats, loses = found[0].accuracy - mean > chance, mean - found[0].accuracy > chance
    last = max(i for i in range(len(summary.rounds)) if summary.of_kind("found", i) and summary.of_kind("plain", i))
    best, own = summary.of_kind("plain", last)[0], summary.of_kind("found", last)[0]
    chance = 2 * standard_error(own.accuracy, best.accuracy, summary.held_out)
    ahead = own.accuracy - best.accuracy
    lines.append(
        f"Found against {best.name}, the best plain network ({_how(summary, last)}): {_claim(ahead, chance)}"
        f"{_unequal(summary, [best])}"
    )
    worth = ahead > chance and not loses
    if worth:
        lines.append(
            f"The search was worth it here, as far as {count_of(summary.rounds[last].seeds, 'seed')} can show."
        )
    elif ahead < -chance:
        lines.append("The search was not worth it here: the plain network is better.")
    elif beats:
        lines.append("The search found a better cell than random ones; whether it beats a plain network is not clear.")
    else:
        lines.append("As far as these results show, the search was not worth it here.")
    return lines, worth


def _how(summary: Summary, number: int) -> str:
    own = summary.rounds[number]
    seeds, images = count_of(own.seeds, "seed"), count_of(summary.held_out, "held-out image")
    return f"round {number + 1}, {own.seconds:.1f} s each, {seeds}, {images}"


def _claim(difference: float, chance: float) -> str:
    points = f"{abs(difference) * 100:.1f} points {'better' if difference >= 0 else 'worse'}"
    if abs(difference) < 0.0005:
        points = "equal"
    within = "; no difference can be claimed" if abs(difference) <= chance else ""
    return f"{points}; chance may explain up to {chance * 100:.1f} points{within}."


def _unequal(summary: Summary, others: Sequence[Result]) -> str:
    """The costs of the found network and the others, where they differ by more than `EQUAL`; else nothing.

    Networks are sized to equal multiply-adds, in steps of a few channels. Their numbers of parameters may differ a lot.
    """
    entries = {entry.name: entry for entry in summary.entries}
    found = next(entry for entry in summary.entries if entry.kind == "found")
    stated = []
    for kind, noun in (("parameters", "parameters"), ("multiply_adds", "multiply-adds")):
        own, costs = getattr(found, kind), sorted(getattr(entries[result.name], kind) for result in others)
        if any(abs(own - cost) > EQUAL * min(own, cost) for cost in costs):
            least, most = f"{costs[0]:,}", f"{costs[-1]:,}"
            stated.append(f"{own:,} {noun} against {least if least == most else f'{least} to {most}'}")
    return f" Their sizes differ: {', '.join(stated)}." if stated else ""


def summarise(
    plan: Plan, screen: Screen, trained: TrainResult, inspection: Inspection, own: OwnModel | None = None
) -> Summary:
    """Measures the latency and the user's own model, and writes `summary.json`."""
    state, results = plan.competition, json.loads((trained.folder / "run.json").read_text(encoding="utf-8"))["results"]
    assert state is not None and trained.accuracy is not None
    entries = tuple(
        Entry(*(each[key] for key in ("name", "kind", "parameters", "multiply_adds"))) for each in state["candidates"]
    )
    rounds = tuple(
        Round(
            each["seconds"],
            each["seeds"],
            tuple(
                Result(name, tuple(own["accuracies"]), own["epochs"], own["seconds"])
                for name, own in each["results"].items()
            ),
            tuple(each["kept"]),
        )
        for each in state["rounds"]
    )
    with screen.working("measuring the latency"):
        latency = _latency(resolve_device(plan.request.device), trained.folder)
    beside = None
    if own is not None:
        with screen.working(f"measuring {own.file.name}"):
            beside = Beside(own.file.name, own.accuracy(_test_images(plan, own)))
    delivered = Row(
        state["winner"],
        next(entry.kind for entry in entries if entry.name == state["winner"]),
        str(trained.folder),
        trained.accuracy,
        trained.cost.parameters,
        trained.cost.multiply_adds,
        latency,
        trained.metrics[-1]["epoch"] + 1,
        round(sum(line["seconds"] for line in trained.metrics), 1),
    )
    summary = Summary(
        delivered,
        state["why"],
        entries,
        rounds,
        state.get("count", 0),
        results["count"],
        inspection.most_frequent,
        beside,
        None if state.get("decision") is None else build(Decision, state["decision"], "plan: decision"),
    )
    plan.summary = summary.to_dict()
    plan.save()
    atomic_write_text(plan.folder / SUMMARY, json.dumps(plan.summary, indent=2) + "\n")
    return summary


def _test_images(plan: Plan, own: OwnModel) -> Images:
    """The test images of the run, at the size that the user's own model accepts."""
    root = None if plan.request.is_folder() else plan.request.data_root
    size = own.shape[1] if plan.request.is_folder() else None
    dataset = load(str(plan.data), root, size)
    assert dataset.test is not None  # the delivered network was measured on it
    return dataset.test


def _latency(device: torch.device, folder: Path) -> float:
    """Milliseconds for one image."""
    network = Network.from_pretrained(folder).to(device)
    return measure_module(network, torch.rand(1, *network.shape, device=device)).median


def finish(plan: Plan, screen: Screen, time: RunTime) -> None:
    """Writes report and exports; a run interrupted here writes both again when resumed.

    The ONNX file takes most of this and can be written later, so it is skipped first.
    """
    folder = plan.folder
    with screen.working("writing the report"):
        made = [folder / name for name in ("search", "train") if (folder / name).is_dir()]
        write_report(made, folder / REPORT)
    with screen.working("exporting"):
        export(folder / "train", "safetensors", folder / "export", overwrite=True)
        export(folder / "train", "python", folder / "export", overwrite=True)
        if not time.has_time_for_onnx():
            later = f"`softcell export {folder} --to onnx --out {folder / 'export'} --overwrite`"
            screen.print(f"note: ONNX export skipped: not enough time; {later} writes it")
            return
        try:
            export(folder / "train", "onnx", folder / "export", overwrite=True)
        except UserError as error:  # the extra is not installed
            screen.print(f"note: {error}")
