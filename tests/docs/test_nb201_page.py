"""docs/nas-bench-201.md shows the searches in results/nb201 as they are."""

from __future__ import annotations

import json
import re
import statistics

from scripts import nb201_page
from studies.nb201 import ARMS


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
    for arm in ARMS:
        (line,) = re.findall(rf"^\| {re.escape(nb201_page.LABELS[arm])} \| (\d+) \| (.+)$", table, re.MULTILINE)[:1]
        found = [row["accuracies"]["cifar10_test"] for row in rows if row["arm"] == arm]
        assert line[0] == str(len(found))
        expected = f"{sum(found) / len(found):.2f}" if found else "not measured"
        assert line[1].split(" | ")[1].startswith(expected)
    assert table.count(", commit ") == len(rows)


def test_the_reading_compares_all_methods_with_enough_seeds_with_random_cells() -> None:
    record = json.loads((nb201_page.RESULTS / "nb201.json").read_text(encoding="utf-8"))
    rows = [json.loads(file.read_text()) for file in (nb201_page.RESULTS / "rows").glob("*-cifar10-*.json")]
    page = nb201_page.PAGE.read_text(encoding="utf-8")
    lines = re.findall(r"^- (.+?): (.+)$", page.split("**Summary.**")[1].split("## ")[0], re.MULTILINE)
    *lines, better, close, worse = lines
    limits = [float(value) for head, _ in lines for value in re.findall(r"([\d.]+)%", head)]
    assert limits == sorted(limits, reverse=True) and len(limits) == 3 == len(lines) - 1
    assert limits[-1] == round(record["random"]["cifar10_test"][0], 2)
    for arm in ARMS:
        found = [row["accuracies"]["cifar10_test"] for row in rows if row["arm"] == arm]
        number = sum(sum(found) / max(len(found), 1) <= limit for limit in limits)
        places = [i for i, (_, methods) in enumerate(lines) if f"{nb201_page.LABELS[arm]} (" in methods]
        assert places == ([number] if len(found) >= nb201_page.GOAL else [])
        timed = [name for name, methods in (better, close, worse) if f"{nb201_page.LABELS[arm]} (" in methods]
        random = next(
            (one["random"] for one in record["summary"] if (one["arm"], one["data"]) == (arm, "cifar10")), None
        )
        if len(found) < nb201_page.GOAL or random is None:
            assert not timed
        else:
            lead = statistics.mean(found) - random["mean"]
            error = (statistics.variance(found) / len(found) + random["std"] ** 2 / random["n"]) ** 0.5
            expected = close if abs(lead) < 2 * error else better if lead > 0 else worse
            assert timed == [expected[0]]
