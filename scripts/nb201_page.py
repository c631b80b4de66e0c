"""Write docs/nas-bench-201.md from the record of `studies.nb201` in results/nb201.

Every arm of the study has a row; what no search has measured yet says so.

python -m scripts.nb201_page
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.results_page import NOT_MEASURED, made_with, markdown
from softcell.app.report.bench201 import shown
from softcell.files import atomic_write_text
from studies.nb201 import ARMS, ON_REQUEST, PUBLISHED, SEPARATE, read_rows

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "nas-bench-201.md"
RESULTS = ROOT / "results" / "nb201"
IMAGES = ROOT / "docs" / "images"
GOAL = 4
"""Seeds that a row needs at least."""

LABELS = {
    "darts": "DARTS, first order",
    "darts-2nd": "DARTS, second order",
    "darts-pt": "DARTS, selection by perturbation",
    "snas": "SNAS",
    "gdas": "GDAS",
    "drnas": "DrNAS",
    "beta-darts": "β-DARTS",
    "darts-minus": "DARTS−",
    "pc-darts": "PC-DARTS",
    "edge-normalised": "PC-DARTS's edge normalisation alone",
    "entrannas": "EnTranNAS",
    "itnas": "IT-NAS",
    "itnas-post-norm": "IT-NAS without the norm on tokens",
    "itnas-pt": "IT-NAS, selection by perturbation",
    "spos": "SPOS with evolution",
    "random": "random search, 10 cells of 10 epochs",
    "evolution": "regularised evolution, 10 cells of 10 epochs",
    "zero-cost": "zero-cost search, SynFlow",
    "gdas-released": "GDAS with the released code's gradient",
    "gdas-250": "GDAS, the authors' recipe: released gradient, 250 epochs",
    "beta-darts-100": "β-DARTS, the authors' recipe: 100 epochs",
    "pc-darts-256": "PC-DARTS, the authors' batches of 256 and learning rate",
    "darts-partial-100": "DARTS with partial channels, 100 epochs (DrNAS's code)",
    "itnas-fixed-values": "IT-NAS, W_v fixed, no feed-forward network",
}
COLUMNS = {
    "cifar10_valid": "CIFAR-10 valid",
    "cifar10_test": "CIFAR-10 test",
    "cifar100_test": "CIFAR-100 test",
    "imagenet16_test": "ImageNet-16-120 test",
}
NAMES = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100"}

INTRODUCTION = """# NAS-Bench-201: every method under one recipe

All 15,625 cells of this space were trained by its authors, so a search takes minutes and the accuracy of what it
finds is looked up, not trained. The page is written by `python -m scripts.nb201_page` from the records in
`results/nb201`.

**Protocol**, fixed before the first look-up. Supernet, data split, batch size, optimiser of the weights and length
(50 epochs) are those of IT-NAS's recipe for all methods; each method keeps its own settings. Nothing is tuned on the
table. A method's row has at least {goal} seeds before anything is claimed; fewer are shown as they are. Random
search, evolution and zero-cost search have no supernet: they train, or score, cells by themselves. *Random, same
time* is what random search had found after as many seconds. *Tau* is Kendall's between a method's indicator and the
accuracies of the cells, mean over edges and seeds. The last rows, from *GDAS with the released code's gradient* on,
were added after the first look-up, to find out why some methods miss their published means: they follow the authors'
code in place of the common recipe, or change one part of IT-NAS. The pages of [GDAS](papers/gdas.md#evidence),
[β-DARTS](papers/beta-darts.md#evidence), [PC-DARTS](papers/pc-darts.md#evidence) and
[IT-NAS](papers/it-nas.md#with-fixed-values) say what each one tests.

**State: {complete} of {total} methods have {goal} seeds or more, {begun} have at least one.** Published means are the
papers' own numbers, with their own recipes; the other columns are ours.
"""

ENDING = """## Earlier searches

IT-NAS with the norm (3 seeds, 91.53 ± 2.96), SNAS, DARTS and EnTranNAS (one seed each) were searched with an earlier
form of this study; [Results](results.md#table-5-nas-bench-201) has their numbers. The [page of
IT-NAS](papers/it-nas.md) says what was tried to reach its published mean.

## Repeat or extend it

```console
$ python -m studies.nb201 --data-root ~/data --table nb201.csv.gz --arms snas gdas --seeds 0 1 --minutes 30
$ python -m studies.nb201 --data-root ~/data --table nb201.csv.gz --arms zero-cost --device cpu   # minutes per seed
$ python -m scripts.nb201_page
```

Every finished search is a file in `results/nb201/rows`, so that any number of commands and machines fill the table.
[Benchmarks](bench.md) has the form of the table of trained cells.
"""


def row(arm: str, found: Mapping[str, Any] | None, data: str) -> list[str]:
    published = PUBLISHED.get(arm) if data == "cifar10" else None
    paper = "–" if published is None else shown(*published)
    if found is None:
        return [LABELS[arm], "0", *[NOT_MEASURED] * len(COLUMNS), *["–"] * 4, paper]
    random = found["random"]
    return [
        LABELS[arm],
        str(found["n"]),
        *(_spread(found["accuracies"][column]) for column in COLUMNS),
        f"{found['seconds']['mean']:.0f}",
        "–" if found["memory"] is None else f"{found['memory']['mean'] / 2**30:.1f}",
        "–" if arm in SEPARATE else NOT_MEASURED if random is None else _spread(random),
        "–" if found["tau"] is None else f"{found['tau']:+.2f}",
        paper,
    ]


def _spread(figure: Mapping[str, Any]) -> str:
    return shown(figure["mean"], figure["std"])


def table(record: Mapping[str, Any], data: str) -> str:
    found = {own["arm"]: own for own in record["summary"] if own["data"] == data}
    headings = [
        "",
        "seeds",
        *COLUMNS.values(),
        "seconds of the device",
        "GPU memory, GB",
        "random, same time",
        "tau",
        "published",
    ]
    rows = [row(arm, found.get(arm), data) for arm in ARMS]
    chance = [shown(*record["random"][key]) for key in COLUMNS]
    best = [f"{record['optimum'][key]:.2f}" for key in COLUMNS]
    rows += [["a cell drawn at random", "", *chance, *["–"] * 5], ["the best cell", "", *best, *["–"] * 5]]
    return markdown(headings, rows)


def cells(rows: Sequence[Mapping[str, Any]], data: str) -> str:
    headings = ["", "seed", "cell", "CIFAR-10 test", "seconds", "made with"]
    lines = []
    for own in rows:
        if own["data"] == data:
            cell = own["architecture"].replace("|", "\\|")
            accuracy = f"{own['accuracies']['cifar10_test']:.2f}"
            seconds = f"{own['seconds']:.0f}" + (f", {own['at_once']} at once" if own["at_once"] > 1 else "")
            lines.append([LABELS[own["arm"]], str(own["seed"]), f"`{cell}`", accuracy, seconds, made_with(own)])
    return markdown(headings, lines)


def page() -> str:
    record = json.loads((RESULTS / "nb201.json").read_text(encoding="utf-8"))
    rows = read_rows(RESULTS / "rows")
    methods = [arm for arm in ARMS if arm not in ON_REQUEST]
    seeds = {arm: sum(own["arm"] == arm and own["data"] == "cifar10" for own in rows) for arm in methods}
    parts = [
        INTRODUCTION.format(
            goal=GOAL,
            complete=sum(number >= GOAL for number in seeds.values()),
            begun=sum(number > 0 for number in seeds.values()),
            total=len(methods),
        )
    ]
    for data, name in NAMES.items():
        measured = any(own["data"] == data for own in rows)
        parts.append(f"## Searched on {name}\n\n" + (table(record, data) if measured else "Not measured."))
        if measured:
            parts.append(
                "Accuracies in percent, mean ± standard deviation over seeds "
                "([record](../results/nb201/nb201.json)). Seconds are those of the device that the next table names; "
                "where several searches shared it, their time is divided equally.\n\n"
                f"![Accuracy of the derived cell over the seconds of the device](images/nb201-{data}.svg)\n\n"
                f"Every search:\n\n{cells(rows, data)}"
            )
    parts.append(ENDING)
    return "\n\n".join(part.strip() for part in parts) + "\n"


def main() -> None:
    for drawing in RESULTS.glob("anytime-*.svg"):
        target = IMAGES / f"nb201-{drawing.stem.removeprefix('anytime-')}.svg"
        atomic_write_text(target, drawing.read_text(encoding="utf-8"))
    atomic_write_text(PAGE, page())
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
