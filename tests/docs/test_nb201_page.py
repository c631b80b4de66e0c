"""docs/nas-bench-201.md shows the searches in results/nb201 as they are."""

from __future__ import annotations

import json
import re

from scipy import stats

from scripts import nb201_page
from softcell.app.report.compare import holm
from studies.nb201 import ARMS, ON_REQUEST


def test_the_page_matches_the_records() -> None:
    same = nb201_page.PAGE.read_text(encoding="utf-8") == nb201_page.page()
    assert same, "records changed: run `python -m scripts.nb201_page` and read docs/nas-bench-201.md"
    for drawing in nb201_page.RESULTS.glob("anytime-*.svg"):
        shown = nb201_page.IMAGES / f"nb201-{drawing.stem.removeprefix('anytime-')}.svg"
        assert shown.read_bytes() == drawing.read_bytes()


def test_the_table_in_the_readme_matches_the_records() -> None:
    record = json.loads((nb201_page.RESULTS / "nb201.json").read_text(encoding="utf-8"))
    readme = nb201_page.README.read_text(encoding="utf-8")
    assert readme == nb201_page.with_summary(readme, record), "records changed: run `python -m scripts.nb201_page`"
    rows = re.findall(r"^\| (.+?) \| (\d+) \| ([\d.]+)", readme, re.MULTILINE)
    *methods, (name, seeds, mean) = rows
    assert {name for name, *_ in methods} <= set(nb201_page.LABELS.values())
    means = [float(mean) for *_, mean in methods]
    assert len(means) > 5 and means == sorted(means, reverse=True)
    assert name == f"random search in the time of {methods[0][0]}"
    (first,) = (one for one in record["summary"] if nb201_page.LABELS[one["arm"]] == methods[0][0])
    assert (seeds, mean) == (str(first["random"]["n"]), f"{first['random']['mean']:.2f}")


def test_every_method_has_a_row_and_every_search_a_line() -> None:
    """Read independently of the script: seeds and means of each arm, from the rows themselves."""
    page = nb201_page.PAGE.read_text(encoding="utf-8")
    table = page.split("## Searched on CIFAR-10")[1].split("## Searched on")[0]
    rows = [json.loads(file.read_text()) for file in sorted((nb201_page.RESULTS / "rows").glob("*-cifar10-*.json"))]
    (unmeasured,) = re.findall(r"^Not measured: (.+)\.$", table, re.MULTILINE)
    for arm in ARMS:
        lines = re.findall(rf"^\| {re.escape(nb201_page.LABELS[arm])} \| (\d+) \| (.+)$", table, re.MULTILINE)
        found = [row["accuracies"]["cifar10_test"] for row in rows if row["arm"] == arm]
        if arm in ON_REQUEST and not found:
            assert not lines and nb201_page.LABELS[arm] in unmeasured.split("; ")
            continue
        line = lines[0]
        assert line[0] == str(len(found))
        expected = f"{sum(found) / len(found):.2f}" if found else "not measured"
        assert line[1].split(" | ")[1].startswith(expected)
    assert table.count(", commit ") == len(rows)


def test_the_summary_claims_only_significant_differences() -> None:
    """Recomputed from the rows with scipy's tests: every method with enough seeds is in one line of each list."""
    record = json.loads((nb201_page.RESULTS / "nb201.json").read_text(encoding="utf-8"))
    values: dict[str, list[float]] = {}
    for file in (nb201_page.RESULTS / "rows").glob("*-cifar10-*.json"):
        row = json.loads(file.read_text())
        values.setdefault(row["arm"], []).append(row["accuracies"]["cifar10_test"])
    values = {arm: own for arm, own in values.items() if len(own) >= nb201_page.ENOUGH}
    page = nb201_page.PAGE.read_text(encoding="utf-8").split("**Summary.**")[1].split("**Protocol**")[0]
    lines = re.findall(r"^- (.+?): (.+)$", page, re.MULTILINE)
    (largest,) = re.findall(r"^With every seed, these find the largest cell.*: (.+)\.$", page, re.MULTILINE)
    assert (
        {"SNAS", "zero-cost search, number of parameters"} <= set(largest.split("; ")) <= {*nb201_page.LABELS.values()}
    )
    assert all(
        (nb201_page.LABELS[arm] in largest.split("; ")) == all(round(value, 2) == 93.76 for value in own)
        for arm, own in values.items()
    )
    limits = [float(value) for head, _ in lines for value in re.findall(r"better than .+ \(([\d.]+)%\)", head)]
    exact = [record["random"], *record["best_of"].values()]
    assert limits == sorted((round(own["cifar10_test"][0], 2) for own in exact), reverse=True)
    cells, search = lines[: len(limits) + 2], lines[len(limits) + 2 :]
    for arm, own in values.items():
        where = [head for head, methods in cells if f"{nb201_page.LABELS[arm]} (" in methods]
        assert len(where) == 1
        better = [limit for limit in limits if stats.ttest_1samp(own, limit, alternative="greater").pvalue < 0.025]
        if better:
            assert f"({max(better):.2f}%)" in where[0]
        else:
            is_worse = stats.ttest_1samp(own, limits[-1], alternative="less").pvalue < 0.025
            assert where[0].startswith("worse than" if is_worse else "no difference from")
    random = {one["arm"]: one["random"] for one in record["summary"] if one["data"] == "cifar10" and one["random"]}
    timed = [arm for arm in values if arm in random]
    p_values = [stats.ttest_ind(values[arm], random[arm]["values"], equal_var=False).pvalue for arm in timed]
    assert len(timed) > 3
    for arm, p in zip(timed, holm(p_values), strict=True):
        ((verdict, methods),) = [line for line in search if f"{nb201_page.LABELS[arm]} (" in line[1]]
        is_better = sum(values[arm]) / len(values[arm]) > random[arm]["mean"]
        assert verdict == ("no difference can be claimed" if p >= 0.05 else "better" if is_better else "worse")
        assert f"against {random[arm]['mean']:.2f}, p = {p:.1e}" in methods or f"p = {p:.3f}" in methods
    assert sum(methods.count(", p = ") for _, methods in search) == len(timed)
