"""Write docs/results.md from the records in results/ and the plans of `softcell reproduce`.

A table of a plan shows `results/<paper>/table-<number>.json` if it exists, otherwise 'not measured'. Older records of
the studies follow, each with its length; the numbers in the text about them come from the record.

python scripts/results_page.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from softcell.app.reproduce.papers import PAPERS, PROTOCOL, Paper, PaperTable
from softcell.app.reproduce.record import table_cells, unfinished

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "results.md"
RESULTS = ROOT / "results"
NOT_MEASURED = "not measured"

Figures = Mapping[str, Any]


def record(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return found


def link(name: str) -> str:
    return f"[record](../results/{name})"


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def share(figure: Figures | str, digits: int = 1) -> str:
    """`66.5 ± 0.3 % (2)` from fractions; a single value has no spread."""
    if isinstance(figure, str):
        return figure
    mean = f"{100 * figure['mean']:.{digits}f}"
    spread = "" if figure["std"] is None else f" ± {100 * figure['std']:.{digits}f}"
    return f"{mean}{spread} % ({figure['n']})"


def millions(figure: Figures) -> str:
    spread = "" if figure["std"] is None else f" ± {figure['std'] / 1e6:.2f}"
    return f"{figure['mean'] / 1e6:.2f}M{spread} ({figure['n']})"


def made_with(found: Mapping[str, Any]) -> str:
    """Device, commit and date of a record."""
    git = found["git"] or {}
    where = ", ".join(found["hardware"]["gpus"]) or f"{found['hardware']['cores']} CPU cores"
    changed = " with changes" if git.get("dirty") else ""
    return f"{where}, commit {str(git.get('commit', 'unknown'))[:7]}{changed}, {found['date'][:10]}"


def published_cells(table: PaperTable) -> tuple[list[str], list[list[str]]]:
    """The published numbers of a table of which nothing is measured yet."""
    headings, rows = table_cells(table, None)
    kept = [number for number, heading in enumerate(headings) if heading.startswith("paper")]
    return ["", "ours", *(headings[i] for i in kept)], [[row[0], NOT_MEASURED, *(row[i] for i in kept)] for row in rows]


def plan_section(paper: Paper, table: PaperTable) -> str:
    """One table of a plan: verdict, our numbers next to the published ones, unfinished runs, the command."""
    parts = [f"### Table {table.number}: {table.title}"]
    if table.missing:
        return "\n\n".join([*parts, f"{table.missing[0].upper()}{table.missing[1:]}."])
    file = f"{paper.key}/table-{table.number}.json"
    found = record(file) if (RESULTS / file).is_file() else None
    verdict = "Not measured at this length." if found is None else found["verdict"]
    parts += [f"**{verdict}**", markdown(*(published_cells(table) if found is None else table_cells(table, found)))]
    parts += [f"- {note}" for note in table.notes]
    if found is not None:
        state = "complete" if found["complete"] else "not complete"
        parts.append(f"{made_with(found)}; {state} ({link(file)}).")
        parts += [f"- {text}" for text in unfinished(found)]
    parts.append(f"```console\n$ softcell reproduce {paper.key} --table {table.number} --data-root ~/data --run\n```")
    # Items of a list belong together, but the first one needs a blank line after a table.
    return "\n\n".join(parts).replace("\n\n- ", "\n- ").replace("|\n- ", "|\n\n- ")


def snas() -> list[str]:
    name, levels = "snas/children-cifar10.json", "snas/levels-monte-carlo-cifar10.json"
    found = record(name)
    epochs = found["rows"][0]["epochs"]
    labels = {"snas-mild": "SNAS, mild", "snas-moderate": "SNAS, moderate", "snas-aggressive": "SNAS, aggressive"}
    labels["darts"] = "DARTS, first order"
    rows = [
        [
            labels[arm],
            *(share(own[key]) for key in ("search_accuracy", "child_accuracy", "child_accuracy_bn")),
            millions(own["parameters"]),
        ]
        for arm, own in found["summary"].items()
    ]
    lost = [100 * own["loss_of_child"]["mean"] for arm, own in found["summary"].items() if arm != "darts"]
    darts = found["summary"]["darts"]["child_accuracy"]["mean"]
    weights = record(levels)
    sizes = ", ".join(
        f"{level} {millions(own)}"
        for level, own in zip(("mild", "moderate", "aggressive"), weights["parameters"].values(), strict=True)
    )
    return [
        f"**{epochs} of 150 epochs (cf. Table 1).** Children of SNAS keep the accuracy of their supernets (mean "
        f"difference {-max(lost):+.1f} to {-min(lost):+.1f} points); those of DARTS fall to {100 * darts:.1f} %. Two "
        f"seeds, `architecture.lr=0.003` instead of 0.0003, penalty on the expected cost. {made_with(found)} "
        f"({link(name)}).",
        markdown(
            ["", "supernet", "child", "child, recalibrated", "parameters (20 cells × 36)"],
            [*rows, ["paper: SNAS, mild, 150 epochs", "88.54 %", "90.67 %", "–", "2.9M"]],
        ),
        f"**Sizes by level, {weights['rows'][0]['epochs']} epochs**: {sizes}; paper: 2.9M, 2.8M, 2.3M. On average the "
        f"order matches the paper ({link(levels)}).",
    ]


def entrannas() -> list[str]:
    name = "entrannas/search-cifar10.json"
    found, rows = record(name), []
    for row in found["rows"]:
        own = row["result"]
        rows.append(
            [
                row["method"],
                f"{row['epochs_done']} of {row['epochs']}",
                f"{100 * own['supernet_accuracy']:.1f} %",
                f"{100 * own['derived_accuracy_bn']:.1f} %",
                f"{own['seconds'] / 60:.1f}",
            ]
        )
    stopped = []
    lengths = {"dst-cifar10-speed": 50, "dst-cifar10-lambda3": 50, "dst-cifar10-50": 50, "dst-cifar10": 25}
    for file, total in ((f"entrannas/{stem}.json", total) for stem, total in lengths.items()):
        for row in record(file)["rows"]:
            last, done = row["curve"][-1], row["epochs_done"]
            stopped.append(
                [
                    row["settings"]["schedule"],
                    f"{row['settings']['sparsity']:g}",
                    f"{row['settings']['threshold_speed']:g}",
                    f"{total} of {total}" if done == total else f"stopped after {done} of {total}",
                    f"{100 * last['val_accuracy']:.1f} %",
                    f"{last['parameters'] / 1e6:.1f}M",
                    link(file),
                ]
            )
    chosen = record("entrannas/dst-cifar10-speed.json")["rows"][0]["result"]
    engines = record("entrannas/engines-digits.json")["summary"]
    gaps = ", ".join(f"{arm} {100 * own['gap_bn']['mean']:.1f}" for arm, own in engines.items())
    return [
        f"**50-epoch searches; one seed each is not a result.** Nothing was trained from scratch (paper: "
        f"2.22 % error, 0.07 GPU-days). {made_with(found)} ({link(name)}).",
        markdown(["", "epochs", "supernet", "child, recalibrated", "minutes"], rows),
        "**EnTranNAS-DST by schedule, λ and threshold speed**, one seed each. The recipe (the first row) "
        f"derives a network of {chosen['parameters'] / 1e6:.1f}M parameters, with "
        f"{100 * chosen['derived_accuracy_bn']:.1f} % before it is trained itself (its supernet: "
        f"{100 * chosen['supernet_accuracy_bn']:.1f} %, both recalibrated). No row was trained from scratch.",
        markdown(["schedule", "λ", "speed", "epochs", "supernet", "parameters", ""], stopped),
        f"**Engines on digits**, 3 seeds, gap between supernet and child in points: {gaps} "
        f"({link('entrannas/engines-digits.json')}).",
    ]


def nos() -> list[str]:
    rows, gains = [], []
    for name, size in (("nos/guidance-cifar10.json", "paper's"), ("nos/small/guidance-cifar10.json", "small")):
        found = record(name)
        searched, trained = found["rows"][0]["epochs_done"]
        teacher = f"{found['teacher']['architecture']}, {100 * found['teacher']['test_accuracy']:.1f} %"
        for arm, own in found["summary"].items():
            lengths = f"{searched} of 25, {trained} of 600"
            values = [share(own["search_accuracy"]), share(own["test_accuracy"])]
            rows.append([f"{arm}, {size} size", lengths, *values, teacher, link(name)])
        gains.append(found["guided_less_unguided"]["test_accuracy"])
    supernets = [record(name)["guided_less_unguided"]["search_accuracy"]["mean"] for name in _NOS]
    direction = " and ".join(f"{100 * gain['mean']:+.1f} ± {100 * gain['std']:.1f}" for gain in gains)
    return [
        f"**Shorter runs (cf. Table 4).** Guided supernets are better by {100 * min(supernets):.1f} to "
        f"{100 * max(supernets):.1f} points, as in Figure 5. The derived networks, trained at 8 cells × 16 channels, "
        f"differ by {direction} points (n = 2 each): undecided. {made_with(record(_NOS[0]))}.",
        markdown(["", "epochs: search, training", "supernet", "trained, test accuracy", "teacher", ""], rows),
        "Published: test error 3.44 % without and 2.53 % with guidance, 25 and 600 epochs, 20 cells × 36 channels.",
    ]


_NOS = ("nos/guidance-cifar10.json", "nos/small/guidance-cifar10.json")


def itnas() -> list[str]:
    name = "itnas/nb201-cifar10.json"
    found = record(name)
    labels = {"itnas": "IT-NAS", "snas": "SNAS", "darts": "DARTS", "entrannas": "EnTranNAS"}
    columns = ("cifar10_valid", "cifar10_test", "cifar100_test", "imagenet16_test")
    rows = []
    for method, own in found["summary"]["accuracies"].items():
        published = found["published"].get(method, "–").split()
        shown = [
            f"{own[key]['mean']:.2f}" + ("" if own[key]["std"] is None else f" ± {own[key]['std']:.2f}")
            for key in columns
        ]
        printed = published[1].replace("±", " ± ") if len(published) > 1 else "–"
        rows.append([f"{labels[method]} ({own['cifar10_test']['n']})", *shown, printed])
    (post_norm,) = (own for own in record("nb201/nb201.json")["summary"] if own["arm"] == "itnas-post-norm")
    its_searches = made_with(record("nb201/rows/itnas-post-norm-cifar10-0.json"))
    shown = [
        f"{post_norm['accuracies'][key]['mean']:.2f} ± {post_norm['accuracies'][key]['std']:.2f}" for key in columns
    ]
    rows.insert(1, [f"IT-NAS without the norm on tokens ({post_norm['n']})", *shown, "93.65 ± 0.04"])
    drawn = [f"{found['random'][key][0]:.2f} ± {found['random'][key][1]:.2f}" for key in columns]
    ours = found["summary"]["accuracies"]["itnas"]["cifar10_test"]
    return [
        f"**NAS-Bench-201 (Table 5), 50 epochs.** IT-NAS is {93.65 - ours['mean']:.1f} points below its published "
        f"93.65 ± 0.04 on CIFAR-10, with a spread of {ours['std']:.1f} over {ours['n']} seeds; other methods have one "
        f"seed. {made_with(found)} ({link(name)}); without the norm: {its_searches} "
        f"({link('nb201/nb201.json')}).",
        markdown(
            [
                "(seeds)",
                "CIFAR-10 valid",
                "CIFAR-10 test",
                "CIFAR-100 test",
                "ImageNet-16-120 test",
                "paper: CIFAR-10 test",
            ],
            [*rows, ["a cell drawn at random", *drawn, "–"]],
        ),
    ]


def fullattention() -> list[str]:
    name = "fullattention/phases-cifar10.json"
    found, rows = record(name), []
    labels = {"both": "stages and phase 1", "alone": "stages, without phase 1"}
    for arm, own in found["summary"].items():
        lengths = next(row["epochs_done"] for row in found["rows"] if row["arm"] == arm)
        rows.append(
            [
                labels[arm],
                f"{lengths[0]} + {lengths[1]}, {lengths[2]}",
                share(own["search_accuracy"]),
                share(own["test_accuracy"], 2),
            ]
        )
    means = {arm: own["test_accuracy"]["mean"] for arm, own in found["summary"].items()}
    behind = 100 * (means["alone"] - means["both"])
    word = "behind" if behind > 0 else "ahead of"
    return [
        f"**Shorter runs (cf. Table VII).** At equal cost the networks found with phase 1 are {abs(behind):.1f} "
        f"points {word} those found without it (n = 2 each; paper: 0.38 ahead). {made_with(found)} ({link(name)}).",
        markdown(["", "epochs: phases, training", "supernet", "trained, test accuracy"], rows),
        "Published: test error 4.08 % without and 3.70 % with phase 1, 20 + 50 and 500 epochs, 80 channels.",
    ]


OTHERS = {
    "entrannas/dst-digits.json": "EnTranNAS-DST on digits by λ, 12 epochs, 3 seeds",
    "entrannas/sparsity-digits.json": "the same at a constant temperature, 5 seeds (older form)",
    "entrannas/sparsity-nb201.json": "the same in the NAS-Bench-201 space, 120 epochs, 3 seeds",
    "itnas/readings-post-norm.json": "IT-NAS without the norm on tokens: other aggregates of the attention, 3 seeds",
    "itnas/positions-digits.json": "IT-NAS on digits: content against position encodings, 3 seeds × 2 orders",
    "nos/dynamic-digits.json": "NOS on digits: why dynamic convolutions are rarely picked, 3 seeds",
    "nos/dynamic-cifar10.json": "dynamic convolutions of NOS before the first step on CIFAR-10",
}
OLDER = {"snas": snas, "entrannas": entrannas, "nos": nos, "itnas": itnas, "fullattention": fullattention}


def page() -> str:
    """The whole page."""
    tables = [(paper, table) for paper in PAPERS.values() for table in paper.tables if not table.missing]
    files = [f"{paper.key}/table-{table.number}.json" for paper, table in tables]
    present = [file for file in files if (RESULTS / file).is_file()]
    complete = [file for file in present if record(file)["complete"]]
    parts = [
        "# Results",
        "<!-- Written by scripts/results_page.py from the records in results/; a test compares them. -->",
        "Every table of the five papers, with our numbers next to the published ones. Ours are `mean ± std (n)`; "
        "columns that begin with *paper* are copied from the papers, at full training length, and are never ours.",
        f"**{len(complete)} of {len(tables)} tables are complete at the length of the protocol, {len(present)} have "
        "been started.** Measurements so far are shorter and are listed under each paper with their length.",
        "## Protocol",
        "Fixed before the first run, printed with every plan and stored in every record:",
        "\n".join(f"- {rule}" for rule in PROTOCOL),
        "To run it in stages and on several machines, see [Reproducing a paper's tables](reproduce.md).",
    ]
    for paper in PAPERS.values():
        parts.append(f"## {paper.name}")
        parts.append(f"Equations, settings and deviations: [{paper.name}]({paper.page}).")
        parts += [plan_section(paper, table) for table in paper.tables]
        parts.append("### Shorter runs on record")
        parts += OLDER[paper.key]()
    parts.append("## Other records")
    shown = "\n".join(parts)
    others = [name for name in records() if f"(../results/{name})" not in shown]
    rows = [[f"[{OTHERS.get(name, name)}](../results/{name})", made_with(record(name))] for name in others]
    parts.append(markdown(["record", "device, commit, date"], rows))
    return "\n\n".join(parts) + "\n"


def records() -> list[str]:
    """All records of the papers and of their common benchmark, by path in `results/`."""
    files = [path for key in PAPERS for path in sorted((RESULTS / key).rglob("*.json"))]
    return [path.relative_to(RESULTS).as_posix() for path in [*files, *sorted((RESULTS / "nb201").glob("*.json"))]]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
