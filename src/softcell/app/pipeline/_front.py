"""Several budgets from one search: `softcell run --max-params 50k,200k,1M`.

The images are inspected and a cell is searched once. Each budget then gets the cell that the supernet ranks highest
within it (`softcell.search.selection`), and is a separate run in its own folder: a competition, a final training, a
verdict, a report and exports, as for a single budget. What is left of the time after the search is divided in
proportion to the seconds of an epoch, so that all budgets train for about the same number of epochs: the largest takes
most of the time, and small ones add little. All final training runs together get at least 60% of the whole time.
Budgets are trained from the smallest to the largest, and each gets its part of the time that is left by then.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

from softcell.app.export.model import FRONT, PLAN
from softcell.app.pipeline._choose import Choice, plain_sizes
from softcell.app.pipeline._inspect import Inspection
from softcell.app.pipeline._plain import MIN_EPOCHS, epoch_seconds, plain_networks
from softcell.app.pipeline._plan import FINAL_SHARE, Load, Plan, RunRequest, TooLittleTimeError
from softcell.app.pipeline._summary import Summary
from softcell.app.progress import Screen
from softcell.app.report.charts import front_svg
from softcell.app.report.page import REPORT, write_report
from softcell.arch import Genotype
from softcell.engine import resolve_device
from softcell.errors import UserError
from softcell.files import atomic_write_text
from softcell.search.resource import quantity
from softcell.search.selection import Kind, derive_front
from softcell.search.supernet import restore
from softcell.spaces.costs import Cost
from softcell.text import clock, count_of

DRAWING = "front.svg"
MIN_SHARE = 0.5
"""Every budget gets at least this much of an equal share of the time: start-up and shutdown are the same for all."""
MAX_TRAINING = 0.85
"""Maximum share of a budget's time reserved for its final training: start-up and shutdown take the rest."""
USED, PAGE = 0.99, 2.0
"""Share of the time that the budgets fill, and CPU seconds for drawing and report after the last of them."""
COSTS = {"max_params": "parameters", "max_flops": "multiply_adds"}


class Job(Protocol):
    """The steps of a run for one budget (`softcell.app.pipeline._run`)."""

    def inspect(self) -> Inspection: ...
    def read_beside(self, inspection: Inspection) -> None: ...
    def choose(self, inspection: Inspection) -> Choice: ...
    def search(self, choice: Choice) -> Genotype | None: ...
    def whole(self) -> Summary: ...


@dataclass(frozen=True)
class FrontEntry:
    """The network of one budget: `budget` as it was given, such as `50k`, and the name of its folder in the run.

    Example:
        >>> from softcell.app.pipeline import FrontEntry, Row, Summary
        >>> row = Row("plain-1", "plain", "train", 0.9, 48_000, 900_000, latency=1.5, epochs=50, seconds=90.0)
        >>> summary = Summary(row, "it was the best", (), (), 0, count=400, most_frequent=0.5)
        >>> FrontEntry("50k", 50_000, summary).summary.delivered.parameters
        48000
    """

    budget: str
    limit: float
    summary: Summary


@dataclass(frozen=True)
class Front:
    """One network per budget, the smallest budget first; `cost` names what is limited: parameters or multiply_adds.

    `left_out`: budgets without a network, and why.

    Example:
        >>> from softcell.app.pipeline import Front, FrontEntry, Row, Summary
        >>> row = Row("plain-1", "plain", "train", 0.9, 48_000, 900_000, latency=1.5, epochs=50, seconds=90.0)
        >>> summary = Summary(row, "it was the best", (), (), 0, count=400, most_frequent=0.5)
        >>> front = Front("parameters", (FrontEntry("50k", 50_000, summary),), left_out={"1M": "not enough time"})
        >>> front.to_dict()["points"][0]["accuracy"]
        0.9
    """

    cost: str
    entries: tuple[FrontEntry, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The content of `front.json`."""
        points = []
        for entry in self.entries:
            stored = entry.summary.to_dict()
            row = {**stored["delivered"], "folder": entry.budget}
            points.append({"budget": entry.budget, "limit": entry.limit, **row, "verdict": stored["verdict"]})
        images = self.entries[0].summary.count
        return {"version": 1, "cost": self.cost, "count": images, "points": points, "left_out": dict(self.left_out)}


def time_shares(epochs: Sequence[float]) -> list[float]:
    """Shares of the time for budgets whose epochs take these seconds: in proportion, but at least `MIN_SHARE` / n.

    Example:
        >>> from softcell.app.pipeline._front import time_shares
        >>> time_shares([1.0, 1.0, 6.0])  # the first two get the minimum share, a sixth
        [0.16..., 0.16..., 0.66...]
    """
    least = MIN_SHARE / len(epochs)
    small: set[int] = set()
    while True:
        rest = 1.0 - least * len(small)
        total = sum(seconds for i, seconds in enumerate(epochs) if i not in small)
        shares = [least if i in small else rest * seconds / total for i, seconds in enumerate(epochs)]
        # Rounding must not put a share below the least that equals it.
        below = {i for i, share in enumerate(shares) if share < least - 1e-12}
        if not below:
            return shares
        small |= below


def run_front(plan: Plan, screen: Screen, job_of: Callable[[Plan, Screen], Job]) -> Front:
    """Runs or resumes all budgets of a plan. job_of: creates the run for one budget, or for the part shared by all."""
    plan.status = "running"
    common = job_of(plan, screen)
    inspection = common.inspect()
    common.read_beside(inspection)
    choice = common.choose(inspection)
    if plan.front is None:
        try:
            plan.front = _planned(plan, choice, inspection)
        except UserError:
            plan.choice = plan.search = None  # nothing is decided: the folder of a rejected run is removed
            raise
        plan.save()
        _show_plan(plan, screen)
    genotype = common.search(choice)
    state = plan.front
    if "cells" not in state:
        cells = [] if genotype is None else _cells(plan, screen, genotype, state["budgets"])
        state |= {"cells": [cell.to_dict() for cell in cells], "shared": plan.used()}
        plan.save()
    parts = {budget: plan.folder / budget for budget in state["budgets"]}
    begun = {budget: Plan.open(part) for budget, part in parts.items() if (part / PLAN).is_file()}
    # A process that was killed has saved the time of its budget, but not that of the whole run.
    plan.seconds += max(0.0, state["shared"] + sum(each.seconds for each in begun.values()) - plan.used())
    for number, budget in enumerate(state["budgets"]):
        part = begun.get(budget) or (None if budget in state["left_out"] else _part(plan, choice, number))
        if part is None or part.status == "finished" or budget in state["left_out"]:
            continue
        try:
            _run_part(plan, part, screen, budget, job_of)
        except TooLittleTimeError as error:
            # The machine has become slower. The others get the time; an error would lose what they have.
            state["left_out"][budget] = "not enough time left"
            screen.print(f"budget {budget} skipped: {error}")
            if all(each in state["left_out"] for each in state["budgets"]):
                raise
            plan.save()
    front = read_front(plan)
    _write(plan, front, screen)
    plan.finish()
    return front


def read_front(plan: Plan) -> Front:
    """The front of a run whose budgets are all finished."""
    name, _ = _given(plan)
    state, entries = plan.front, []
    assert state is not None
    for budget in state["budgets"]:
        if budget in state["left_out"]:
            continue
        part = Plan.open(plan.folder / budget)
        if part.summary is None:
            raise UserError(f"{part.folder} is not finished; resume it with `softcell run --resume {plan.folder}`")
        summary = Summary.from_dict(part.summary, part.folder)
        entries.append(FrontEntry(budget, quantity(name, budget), summary))
    return Front(COSTS[name], tuple(entries), state["left_out"])


def _given(plan: Plan) -> tuple[str, tuple[str, ...]]:
    found = plan.request.front()
    assert found is not None
    return found


def _request(request: RunRequest, limited: str, budget: str) -> RunRequest:
    """The request with a single budget."""
    return replace(request, max_params=budget) if limited == "max_params" else replace(request, max_flops=budget)


def _planned(plan: Plan, choice: Choice, inspection: Inspection) -> dict[str, Any]:
    """Which budgets are trained, and their shares of the time."""
    (limited, budgets), largest = _given(plan), choice.plain[0]
    reference = Cost(largest.parameters, largest.multiply_adds)
    classes, is_gpu = len(inspection.train), resolve_device(plan.request.device).type == "cuda"

    def seconds(cost: Cost) -> float:
        return epoch_seconds(choice.epoch, reference, cost, is_gpu=is_gpu)

    networks = {
        budget: plain_networks(choice.shape, classes, _request(plan.request, limited, budget).limits())
        for budget in budgets
    }
    assert plan.search is not None
    reserved = PAGE * Load(plan.began).slowness()
    room = USED * plan.request.time - plan.used() - plan.search.get("expected", 0.0) - reserved
    shares = dict.fromkeys(budgets, 1.0)
    training = _training(plan, 1.0, room)
    for _ in range(3):  # shares and sizes depend on each other
        epochs: dict[str, float] = {}
        for budget in budgets:
            final = training * shares[budget] * room
            chosen = plain_sizes(networks[budget], lambda cost, f=final: f / seconds(cost), inspection.num_train)  # type: ignore[misc]
            first = Cost(chosen[0].parameters, chosen[0].multiply_adds) if chosen else networks[budget][-1][1]
            epochs[budget] = seconds(first)
        shares = dict(zip(budgets, time_shares(list(epochs.values())), strict=True))
    # Equal seconds mean the same network, which needs no second competition under a larger budget.
    kept = [one for i, one in enumerate(budgets) if i == 0 or epochs[one] != epochs[budgets[i - 1]]]
    shares = dict(zip(kept, time_shares([epochs[one] for one in kept]), strict=True))
    for budget in kept:
        least = MIN_EPOCHS * seconds(networks[budget][-1][1]) + reserved
        if shares[budget] * room < least:
            needed = plan.used() + plan.search.get("expected", 0.0) + reserved + 1.2 * least / shares[budget]
            raise UserError(
                f"--time {plan.request.time:.0f}s is too short for {count_of(len(kept), 'budget')}: {budget} gets "
                f"{max(0.0, shares[budget] * room):.0f} s, but {MIN_EPOCHS} epochs of its smallest network, report "
                f"and exports need {least:.0f} s; use at least --time {math.ceil(needed / 60 / USED)}m, or fewer "
                "budgets"
            )
    why = "there is no time for a larger network than that of the previous budget"
    left_out = dict.fromkeys((one for one in budgets if one not in kept), why)
    return {"budgets": kept, "shares": [shares[one] for one in kept], "left_out": left_out}


def _training(plan: Plan, share: float, room: float) -> float:
    """Share of a budget's time for its final training, if `share` of the budgets have `room` seconds.

    All final training runs together have `FINAL_SHARE` of the whole time, as that of a single budget has. The search
    comes out of the rest.
    """
    return min(MAX_TRAINING, share * FINAL_SHARE * plan.request.time / max(room, 1e-6))


def _show_plan(plan: Plan, screen: Screen) -> None:
    assert plan.front is not None and plan.search is not None
    parts = zip(plan.front["budgets"], plan.front["shares"], strict=True)
    lines = [
        f"plan for {clock(plan.request.time)}, from measured steps",
        f"  search       {plan.search['length']}{', for all budgets' if 'recipe' in plan.search else ''}",
        f"  budgets      {', '.join(f'{budget} {share:.0%}' for budget, share in parts)} of the time after it",
    ]
    lines += [f"  skipped      {budget}: {why}" for budget, why in plan.front["left_out"].items()]
    screen.print(*lines, "")


def _cells(plan: Plan, screen: Screen, own: Genotype, budgets: Sequence[str]) -> list[Genotype]:
    """The strongest cell within each budget, counted at the size of `softcell train`; `own` is the search's.

    Networks of a run are sized to their budget, so every cell can meet it. A cheaper cell is wider, and the competition
    decides whether it is better than a plain network. A budget that no cell meets at that size gets the cheapest one.
    """
    limited, _ = _given(plan)
    kind: Kind = "parameters" if limited == "max_params" else "flops"
    limits = [quantity(limited, budget) for budget in budgets]
    found: list[Genotype] = []
    try:
        restored = restore(plan.folder / "search", device=plan.request.device)
    except UserError:  # a method that trains architectures one by one has no supernet
        return [own] * len(limits)
    with screen.working("deriving one cell per budget") as step:
        while limits and not found:
            try:
                found = [point.genotype for point in derive_front(restored, kind, limits, on_step=step)]
            except UserError:  # the smallest budget is out of reach at that size
                limits = limits[1:]
    return [(found or [own])[0]] * (len(budgets) - len(found)) + found


def _part(plan: Plan, choice: Choice, number: int) -> Plan:
    """The plan of one budget, with what is decided already; its time is that budget's part of what is left."""
    (limited, _), state = _given(plan), plan.front
    assert state is not None
    shares = state["shares"][number:]
    room = USED * plan.request.time - plan.used() - PAGE * Load(plan.began).slowness()
    budget = state["budgets"][number]
    request = replace(
        _request(plan.request, limited, budget),
        time=max(1.0, room * shares[0] / sum(shares)),
        space=choice.space,
        method=choice.method,
        image_size=choice.image_size,
    )
    assert plan.search is not None
    search = {"length": plan.search["length"], "share": _training(plan, sum(shares), room)}
    if state["cells"]:
        search |= {"length": "one for all budgets, done", "genotype": state["cells"][number]}
    part = Plan(plan.folder / budget, request, provenance=plan.provenance, search=search)
    part.inspection, part.data = plan.inspection, plan.data
    part.folder.mkdir(exist_ok=True)
    part.save()
    return part


def _run_part(plan: Plan, part: Plan, screen: Screen, budget: str, job_of: Callable[[Plan, Screen], Job]) -> None:
    """Runs or resumes one budget; its time is saved in any case."""
    screen.print("", f"budget {budget}: {clock(part.request.time)} ({clock(plan.used())} of the whole run used)")
    # How busy the machine is follows from the whole process, so both plans have the same beginning.
    part.data = plan.data
    part.began, part.seconds = plan.began, part.seconds - (perf_counter() - plan.began)
    try:
        job_of(part, screen).whole()
    except BaseException:
        part.status = "interrupted"
        with suppress(UserError, OSError):
            part.save()
        raise
    plan.save()


def _write(plan: Plan, front: Front, screen: Screen) -> None:
    """`front.json`, the drawing and the report of all budgets."""
    folder, stored = plan.folder, front.to_dict()
    atomic_write_text(folder / FRONT, json.dumps(stored, indent=2) + "\n")
    points = [(point[front.cost], point["accuracy"], point["budget"]) for point in stored["points"]]
    name = front.cost.replace("_", "-")
    title = f"{Path(plan.request.data).name}: one network per budget"
    images = f"accuracy on {count_of(stored['count'], 'test image')}"
    atomic_write_text(folder / DRAWING, front_svg(points, title, name, images))
    with screen.working("writing the report"):
        made = [folder / "search"] if (folder / "search").is_dir() else []
        write_report([*made, *(folder / entry.budget / "train" for entry in front.entries)], folder / REPORT)
