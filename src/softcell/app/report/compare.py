"""Groups of runs that differ only by seed, the differences between them, and both as Markdown and CSV.

Statistics: mean and spread of a group, Welch's t-test of two, Holm's correction of many.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from softcell.app.report.runs import DRAWN, Run, number
from softcell.app.report.theme import big, clean
from softcell.search.genotypes import WHERE
from softcell.settings import flat, short_name
from softcell.text import Shown, count_of

LEVEL = 0.05


@dataclass(frozen=True, slots=True)
class Summary:
    """`std` is the sample standard deviation, `interval` the 95 % t-interval of the mean; None for n < 2."""

    n: int
    mean: float
    std: float | None
    interval: tuple[float, float] | None


def summarise(values: Sequence[float]) -> Summary:
    """The summary of at least one value."""
    n, mean = len(values), statistics.fmean(values)
    if n < 2:
        return Summary(n, mean, None, None)
    std = statistics.stdev(values)
    half = _quantile(n - 1) * std / math.sqrt(n)
    return Summary(n, mean, std, (mean - half, mean + half))


@dataclass(frozen=True, slots=True)
class Welch:
    """Difference of two means (first minus second), its 95 % interval and the two-sided p-value."""

    difference: float
    interval: tuple[float, float]
    p: float


def welch(first: Sequence[float], second: Sequence[float]) -> Welch | None:
    """Welch's test (1947), which allows different variances; None where it does not apply.

    It needs at least two values on each side, and some variance on one.
    """
    if min(len(first), len(second)) < 2:
        return None
    parts = [statistics.variance(values) / len(values) for values in (first, second)]
    error = math.sqrt(sum(parts))
    difference = statistics.fmean(first) - statistics.fmean(second)
    # Rounding leaves the variance of equal numbers just above 0.
    if error <= 1e-12 * max(1.0, *map(abs, first), *map(abs, second)):
        return None
    # Welch and Satterthwaite's degrees of freedom
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (first, second), strict=True)
    )
    from scipy.special import stdtr

    half = _quantile(freedom) * error
    p = min(1.0, 2.0 * float(stdtr(freedom, -abs(difference) / error)))
    return Welch(difference, (difference - half, difference + half), p)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction (1979): adjusted p-values that keep the chance of any false claim below the level."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def _quantile(freedom: float) -> float:
    """The 97.5 % point of Student's t distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 1.0 - LEVEL / 2))


_NAMED = {"method", "space", "data"}
_SEARCH, _RECIPE = "search", "recipe"
# Settings in which two methods or spaces may differ; a difference in others is worth a warning.
_OF_METHODS = {
    "method_settings",
    "regime",
    "split",
    "weights",
    "architecture",
    "unrolled",
    "drop_path",
    "resource",
    "collapse",
    "child_every",
    "validate_every",
    "fused",
}
_OF_SPACES = {"space_settings", "auxiliary"}


@dataclass(frozen=True, slots=True)
class Group:
    """Runs of one method in one space on the same data with the same recipe; `name` is unique among them."""

    name: str
    method: str
    space: str
    data: str
    measure: str
    recipe: Mapping[str, Any]
    runs: tuple[Run, ...]

    @property
    def values(self) -> list[float]:
        return [run.score.value for run in self.runs if run.score is not None]

    @property
    def summary(self) -> Summary:
        return summarise(self.values)

    @property
    def seeds(self) -> list[str]:
        return list(dict.fromkeys(run.seed for run in self.runs))

    @property
    def top5(self) -> Summary | None:
        """Top-5 accuracies, where all runs have one: older runs and data with at most five classes do not."""
        found = [run.score.top5 for run in self.runs if run.score is not None and run.score.top5 is not None]
        return summarise(found) if found and len(found) == len(self.values) else None

    def cost(self, what: str) -> Summary | None:
        """`parameters` or `multiply_adds` of the networks, where all of them were counted."""
        found = [number(run.results.get(what)) for run in self.runs]
        known = [value for value in found if value is not None]
        return summarise(known) if known and len(known) == len(found) else None


@dataclass(frozen=True, slots=True)
class Pair:
    """Two groups, the test of their difference (None if it cannot be tested) and one sentence on it."""

    first: Group
    second: Group
    test: Welch | None
    p_adjusted: float | None
    sentence: str


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Shown):
    """Groups of runs and what the differences between them say; `str` is Markdown.

    Example:
        >>> from softcell.api import compare
        >>> found = compare(["runs/train"])
        >>> found, found.groups[0].summary.n
        (Comparison(1 group, 1 run), 1)
    """

    groups: tuple[Group, ...]
    pairs: tuple[Pair, ...]
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        runs = sum(len(group.runs) for group in self.groups)
        return f"Comparison({count_of(len(self.groups), 'group')}, {count_of(runs, 'run')})"

    def __str__(self) -> str:
        return markdown(self)

    @property
    def sentences(self) -> list[str]:
        """One for every pair that could be tested, and one for all others together."""
        tested = [pair.sentence for pair in self.pairs if pair.test is not None]
        untested = [pair for pair in self.pairs if pair.test is None]
        if len(untested) < 2:
            return tested + [pair.sentence for pair in untested]
        groups = {id(group): group for pair in untested for group in (pair.first, pair.second)}.values()
        few = [group.name for group in groups if len(group.runs) < 2]
        reason = f"at least 2 runs are needed, but n = 1 for {', '.join(few)}" if few else "the runs do not vary"
        return [*tested, f"{len(untested)} pairs of groups cannot be compared: {reason}."]


def compare(runs: Sequence[Run]) -> Comparison:
    """Groups the runs that have a score; compares all pairs of groups measured in the same way on the same data."""
    notes = []
    for run in runs:
        if run.score is None:
            why = f"status {run.status}" if run.status != "finished" else "no accuracy was measured"
            notes.append(f"{run.label}: {why}; not counted")
    kept, repeated = without_repeats([run for run in runs if run.score is not None])
    notes += repeated
    groups = _groups(kept)
    measures = list(dict.fromkeys(group.measure for group in groups))
    if len(measures) > 1:
        listed = "; ".join(measures)
        notes.append(f"accuracies of different kinds are never compared: {listed}")
    couples = [
        pair
        for pair in itertools.combinations(groups, 2)
        if (pair[0].measure, pair[0].data) == (pair[1].measure, pair[1].data)
    ]
    tests = [welch(first.values, second.values) for first, second in couples]
    adjusted = iter(holm([test.p for test in tests if test is not None]))
    count = sum(test is not None for test in tests)
    pairs = []
    for (first, second), test in zip(couples, tests, strict=True):
        p = None if test is None else next(adjusted)
        pairs.append(Pair(first, second, test, p, _sentence(first, second, test, p, count)))
    return Comparison(tuple(groups), tuple(pairs), tuple(notes))


def without_repeats(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Every experiment once: a repeated seed is not new evidence."""
    seen: dict[str, Run] = {}
    notes = []
    for run in runs:
        # Recipe and seed decide the architecture of a search, but not that of a training run.
        cells = None if run.genotype is None or run.kind == "search" else run.genotype.to_dict()["cells"]
        key = json.dumps([run.kind, run.seed, run.method, run.space, _done(run), cells], sort_keys=True, default=str)
        if key in seen:
            notes.append(f"{run.label} repeats {seen[key].label} (same recipe, seed and architecture): counted once")
        else:
            seen[key] = run
    return list(seen.values()), notes


def what(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe without the settings of where and how it was run."""
    return {key: value for key, value in recipe.items() if key not in WHERE}


def _done(run: Run) -> dict[str, Any]:
    """The settings of a run except its seed; a training run also has those of its search, as `search`."""
    # Earlier versions did not write settings that are None.
    given = {key: value for key, value in what(run.recipe).items() if value is not None}
    return {**given, **({_SEARCH: dict(run.searched)} if run.searched else {})}


def _groups(runs: Sequence[Run]) -> list[Group]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        assert run.score is not None
        key = [run.score.measure, run.data, run.space, run.method, _done(run)]
        found.setdefault(json.dumps(key, sort_keys=True, default=str), []).append(run)
    members = sorted(found.values(), key=lambda group: (_measure(group[0]), *_place(group[0])))
    names = []
    for group in members:
        first = group[0]
        alike = [
            other[0] for other in members if _place(other[0]) == _place(first) and _measure(other[0]) == _measure(first)
        ]
        # A name has only the settings in which groups of the same method, space and data differ. Different recipes
        # differ in many settings; the name of the recipe represents all of them.
        settings, own = [texts(_done(run)) for run in alike], texts(_done(first))
        same_recipe = [other for other in settings if other.get(_RECIPE) == own.get(_RECIPE)]
        differing = [key for key in varying(settings) if key == _RECIPE or key in varying(same_recipe)]
        listed = (
            ", ".join(f"{short_name(key)}={shown(_value(own, key))}" for key in differing) for shown in (_rounded, str)
        )
        names.append([f"{first.method} in {first.space}" + (f" ({values})" if values else "") for values in listed])
    # Groups that rounding would make equal all get exact names.
    alike_named = Counter(
        (group[0].data, _measure(group[0]), short) for group, (short, _) in zip(members, names, strict=True)
    )
    result = []
    for group, (short, exact) in zip(members, names, strict=True):
        first, measure = group[0], _measure(group[0])
        name = short if alike_named[first.data, measure, short] == 1 else exact
        result.append(Group(name, first.method, first.space, first.data, measure, _done(first), tuple(group)))
    return result


def _measure(run: Run) -> str:
    assert run.score is not None
    return run.score.measure


def _place(run: Run) -> tuple[str, str, str]:
    return run.data, run.space, run.method


def texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """Nested settings by dotted names, their values as text."""
    return {key: str(value) for key, value in flat(settings).items()}


def _value(settings: Mapping[str, str], key: str) -> str:
    """The value of a setting; for a search only those that differ from its method's recipe are recorded."""
    return settings.get(key, "default" if key.startswith(f"{_SEARCH}.") else str(None))


def _rounded(value: str) -> str:
    """A fraction with at most four digits, as for a measured time; anything else unchanged, such as a seed or limit."""
    if value.lstrip("+-").isdigit():
        return value
    try:
        short = f"{float(value):.4g}"
    except ValueError:
        return value
    return value if float(short) == float(value) else short


def varying(recipes: Sequence[Mapping[str, str]]) -> list[str]:
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    return [key for key in keys if len({recipe.get(key) for recipe in recipes}) > 1]


def _sentence(first: Group, second: Group, test: Welch | None, p: float | None, count: int) -> str:
    names = f"{first.name} and {second.name}"
    unequal = _unequal(first, second)
    if test is None or p is None:
        few = [group.name for group in (first, second) if len(group.runs) < 2]
        needed = f"at least 2 runs are needed, but n = 1 for {' and '.join(few)}"
        return f"{names} cannot be compared: {needed if few else 'the runs do not vary'}.{unequal}"
    low, high = (100 * min(1.0, max(-1.0, bound)) for bound in test.interval)  # no difference is larger than 100 points
    if test.difference < 0:
        first, second, low, high = second, first, -high, -low
    by = f"{abs(test.difference) * 100:.2f} points higher"
    facts = f"95 % interval {low:+.2f} to {high:+.2f}, p = {p:{'.3f' if p >= 0.001 else '.1e'}} by Welch's t-test"
    facts += f", corrected for {count} comparisons" if count > 1 else ""
    shared = [g for g in (first, second) if len(g.seeds) < 2]
    seeds = "".join(f" All runs of {g.name} share one seed, so they vary by architecture only." for g in shared)
    if p < LEVEL:
        verdict = "a significant difference at the 5 % level"
    else:
        verdict = "no significant difference, which does not show that they are equal"
    return f"{first.name} is {by} than {second.name} ({facts}): {verdict}.{seeds}{unequal}"


def _unequal(first: Group, second: Group) -> str:
    """A warning if the groups differ in more than method and space."""
    ignored = set(_NAMED)
    if first.recipe.get("method") != second.recipe.get("method"):  # of searches; a training recipe has no method
        ignored |= _OF_METHODS
    if first.space != second.space:
        ignored |= _OF_SPACES
    of_search = set(_OF_METHODS if first.method != second.method else ()) | set(
        _OF_SPACES if first.space != second.space else ()
    )
    if DRAWN in (first.method, second.method):
        ignored.add(_SEARCH)  # an architecture that was drawn at random had no search
    kept = [{key: value for key, value in group.recipe.items() if key not in ignored} for group in (first, second)]
    settings = [texts(recipe) for recipe in kept]
    keys = [key for key in varying(settings) if not (key.startswith(f"{_SEARCH}.") and key.split(".")[1] in of_search)]
    if not keys:
        return ""
    listed = []
    for key in keys[:4]:
        exact = [_value(one, key) for one in settings]
        short = [_rounded(value) for value in exact]
        listed.append(f"{short_name(key)} {' and '.join(exact if short[0] == short[1] else short)}")
    return f" Caution: they also differ in {', '.join(listed)}{' and more' if len(keys) > 4 else ''}."


HEADER = ("group", "n", "mean, %", "std", "top-5, %", "parameters", "data", "accuracy of", "seeds")
NUMERIC = (1, 2, 3, 4, 5)


def group_row(group: Group) -> tuple[str, ...]:
    """One human-readable line of the table."""
    s, top5, cost = group.summary, group.top5, group.cost("parameters")
    return (
        group.name,
        str(s.n),
        f"{100 * s.mean:.2f}",
        "–" if s.std is None else f"{100 * s.std:.2f}",
        "–" if top5 is None else f"{100 * top5.mean:.2f}",
        "–" if cost is None else big(cost.mean),
        group.data,
        group.measure,
        ", ".join(group.seeds),
    )


def markdown(found: Comparison) -> str:
    """The table, a sentence for each pair, and the notes."""
    lines = [_line(HEADER), _line("---:" if i in NUMERIC else "---" for i in range(len(HEADER)))]
    lines += [_line(group_row(group)) for group in found.groups]
    lines += ["", *(f"- {_plain(said)}" for said in found.sentences)] if found.pairs else []
    lines += ["", *(f"- Note: {_plain(note)}" for note in found.notes)] if found.notes else []
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(_plain(cell) for cell in cells)} |"


def _plain(text: str) -> str:
    """Text escaped for Markdown: no part of it opens a cell, a tag or a link."""
    return "".join(f"\\{c}" if c in "\\`*_[]<>|" else c for c in clean(text))


def groups_csv(found: Comparison) -> str:
    """One row per group with full precision; shares are 0..1."""
    header = "method space data measure group n mean std ci95_low ci95_high min max"
    header += " top5_mean top5_std parameters_mean multiply_adds_mean seeds runs"
    rows: list[Sequence[object]] = []
    for group in found.groups:
        s, values = group.summary, group.values
        low, high = s.interval if s.interval is not None else (None, None)
        costs = [cost.mean if (cost := group.cost(what)) else None for what in ("parameters", "multiply_adds")]
        runs = " ".join(run.label for run in group.runs)
        row = (group.method, group.space, group.data, group.measure, group.name, s.n, s.mean, s.std, low, high)
        top5 = (None, None) if group.top5 is None else (group.top5.mean, group.top5.std)
        rows.append((*row, min(values), max(values), *top5, *costs, " ".join(group.seeds), runs))
    return plain_csv(header.split(), rows)


def pairs_csv(found: Comparison) -> str:
    """One row per pair of groups; empty where no test can be made."""
    header = "first second difference ci95_low ci95_high p p_holm statement"
    rows: list[Sequence[object]] = []
    for pair in found.pairs:
        test = pair.test
        numbers = (None,) * 4 if test is None else (test.difference, *test.interval, test.p)
        rows.append((pair.first.name, pair.second.name, *numbers, pair.p_adjusted, pair.sentence))
    return plain_csv(header.split(), rows)


def runs_csv(found: Comparison) -> str:
    """One row per run that was counted."""
    header = "run group measure seed accuracy top5 parameters multiply_adds"
    rows: list[Sequence[object]] = []
    for group in found.groups:
        for run, value in zip(group.runs, group.values, strict=True):
            costs = [run.results.get(what) for what in ("parameters", "multiply_adds")]
            top5 = None if run.score is None else run.score.top5
            rows.append((run.label, group.name, group.measure, run.seed, value, top5, *costs))
    return plain_csv(header.split(), rows)


def plain_csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows as CSV; None is an empty cell."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        writer.writerow([_cell(value) for value in row])
    return stream.getvalue()


def _cell(value: object) -> object:
    """A value for CSV; a text that a spreadsheet would read as a formula is quoted."""
    if isinstance(value, str):
        text = clean(value)
        return f"'{text}" if text[:1] in ("=", "+", "-", "@") else text
    return "" if value is None else value
