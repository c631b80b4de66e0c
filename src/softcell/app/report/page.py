"""A report: one self-contained page for one or many runs, and the sections of each run.

No network, no framework, the same bytes for the same folders. The sections of a run: numbers, cells, weights, curves,
signs of collapse, mistakes, provenance.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from softcell.app.report._overview import (
    STATUS,
    Outcome,
    front_section,
    in_order,
    list_of,
    outcome_section,
    overview,
    read_front,
    read_outcome,
)
from softcell.app.report.cells_svg import to_svg
from softcell.app.report.charts import Series, line_chart, series
from softcell.app.report.heatmaps import confusion, shade_rules, weights
from softcell.app.report.images import most_wrong, reconstructions
from softcell.app.report.runs import DRAWN, Run, companions, labels, mapping, number, read_run
from softcell.app.report.theme import Child, Html, big, el, facts, inside_page, join, page_sheet, percent
from softcell.arch import Genotype
from softcell.errors import UserError
from softcell.files import atomic_write_text
from softcell.search.genotypes import best_so_far, genotype_of

REPORT = "report.html"


def write_report(folders: Sequence[str | os.PathLike[str]], path: str | os.PathLike[str]) -> Path:
    """Writes the report of the runs in `folders`, and of the random architectures beside them, to `path` atomically.

    Example:
        >>> from pathlib import Path
        >>> from softcell.app.report import write_report
        >>> written = write_report(["runs/search", "runs/train"], "report.html")
        >>> Path("report.html").read_text().startswith("<!doctype html>")
        True
    """
    chosen = [Path(folder) for folder in folders]
    atomic_write_text(path, report(chosen))
    return Path(path)


def report(folders: Sequence[Path]) -> str:
    """The page as text."""
    outcome = read_outcome(folders)
    runs, beside = gather(folders if outcome is None else in_order(folders))
    front = read_front(folders) if outcome is None else None
    return render(runs, beside, outcome=outcome, front=None if front is None else front_section(front))


def gather(folders: Sequence[Path], read: Callable[[Path, str], Run] = read_run) -> tuple[list[Run], list[Run]]:
    """The runs, and the random architectures in their folders that are not among them.

    One that cannot be read is named in the problems of its run.
    """
    own = {folder.resolve() for folder in folders}
    runs, beside = [], []
    for folder, label in zip(folders, labels(folders), strict=True):
        problems = []
        for path in companions(folder):
            if path.resolve() not in own:
                try:
                    beside.append(read(path, f"{label}/{path.name}"))
                except UserError as error:
                    problems.append(f"left out: {error}")
        run = read(folder, label)
        runs.append(replace(run, problems=(*run.problems, *problems)))
    return runs, beside


def render(
    runs: Sequence[Run],
    beside: Sequence[Run] = (),
    *,
    outcome: Outcome | None = None,
    front: Html | None = None,
    live: float | None = None,
    notes: Sequence[str] = (),
) -> str:
    """The page.

    outcome, front: the result of the `softcell run` that all runs belong to, for one budget or for several.
    live: seconds between two refreshes of a page that is being served. notes: lines to show on top.
    """
    title = _title(runs)
    several = len(runs) > 1
    if outcome is not None:
        front = outcome_section(outcome)
    top = overview(runs, beside) if front is None else join(front, list_of(runs))
    chooser = None
    if several:
        options = [el("option", f"{run.label} – {headline(run)}", value=f"run-{i}") for i, run in enumerate(runs)]
        chooser = el("label", "Show run ", el("select", options, class_="chooser"), class_="choose")
    remarks = el("ul", [el("li", note) for note in notes], class_="problems") if notes else None
    empty = None if runs else el("p", "No runs yet. This page refreshes itself.", class_="quiet")
    if several:
        body = join(remarks, top, chooser, [section(run, i, label=True) for i, run in enumerate(runs)])
    else:
        body = join(remarks, empty, [section(run, i, label=False, comparison=top) for i, run in enumerate(runs)])
    script, style = _asset("page.js"), _asset("page.css") + page_sheet(*shade_rules(tables=True))
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'" + ("; connect-src 'self'" if live else "")
    )
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("meta", name="generator", content="softcell"),
        el("title", f"{title} · Softcell"),
        Html(f"<style>{style}</style>"),
    )
    bar = el(
        "header",
        el("div", el("strong", "Softcell"), el("span", title, class_="quiet"), class_="brand"),
        el("span", class_="state", role="status") if live else None,
        el("button", "theme: auto", type="button", class_="theme", title="auto, light or dark"),
    )
    page = el(
        "body",
        bar,
        el("main", body, class_="several" if several else None),
        Html(f"<script>{script}</script>"),
        data_live=live,
    )
    return f"<!doctype html>\n{el('html', head, page, lang='en')}\n"


def _title(runs: Sequence[Run]) -> str:
    if not runs:
        return "no runs"
    return f"{len(runs)} runs" if len(runs) > 1 else runs[0].label


@cache
def _asset(name: str) -> str:
    return resources.files("softcell.app.report").joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")


def section(run: Run, number_: int, *, label: bool, comparison: Html | None = None) -> Html:
    """Everything about one run; label: whether its name is shown; comparison: of this run with random architectures."""
    parts = [
        ("Cells", cells(run), "The derived architecture. Kinds of operations differ by line and mark."),
        ("Architecture weights", weights(run), None),
        ("Curves", curves(run), None),
        ("Context auto-regression", reconstructions(run), "Reconstruction of hidden image parts, without labels."),
        ("Decisions and collapse", signs(run), None),
        ("Confusion matrix", confusion(run), "On the test split."),
        ("Most wrong images", most_wrong(run), "Test images with the most confidence in a wrong class."),
        ("Load the model", loading(run), None),
        ("Recipe and provenance", origin(run), None),
    ]
    tag = f"run-{number_}"
    body = []
    for title, content, about in parts:
        if title == "Load the model" and comparison is not None:
            body.append(comparison)
        if content is not None:
            quiet = None if about is None else el("p", about, class_="quiet")
            body.append(el("section", el("h3", title), quiet, content, id=f"{tag}-{title.lower().replace(' ', '-')}"))
    problems = el("ul", [el("li", text) for text in run.problems], class_="problems") if run.problems else None
    heading = el("h2", headline(run), el("span", STATUS.get(run.status, run.status), class_=f"badge {run.status}"))
    where = el("p", run.label, class_="quiet mono") if label else None
    return el("article", heading, where, tiles(run), problems, body, class_="run", id=tag)


def headline(run: Run) -> str:
    if run.kind == "search":
        return f"Search with {run.method} in the {run.space} space on {run.data}"
    found = {"given": "", DRAWN: ", drawn at random"}.get(run.method, f", found by {run.method}")
    return f"Network of the {run.space} space trained on {run.data}{found}"


def tiles(run: Run) -> Html:
    """The few numbers that matter."""
    found: list[tuple[str, str, str]] = []
    score, results = run.score, run.results
    retrieving = run.recipe.get("task") == "retrieve"
    if score is not None:
        count = number(results.get("count"))
        images = f", {int(count):,} images" if count and run.kind == "train" else ""
        found.append(("recall@1" if retrieving else "accuracy", percent(score.value), score.measure + images))
    else:
        name = "recall@1" if retrieving else "accuracy"
        found.append((name, "–", "not measured yet" if run.status != "finished" else "not measured"))
    if score is not None and score.top5 is not None:
        found.append(("top-5", percent(score.top5), "class among the five strongest"))
    further = {k: number(results.get(f"recall_at_{k}")) for k in (2, 4, 8)}
    found += [(f"recall@{k}", percent(share), "") for k, share in further.items() if share is not None]
    for key, name, unit in (("parameters", "parameters", ""), ("multiply_adds", "multiply-adds", "for one image")):
        value = number(results.get(key))
        if value is not None:
            found.append((name, big(value), unit or f"{int(value):,}"))
    guide = mapping(results.get("guide"))
    if guide:
        own = number(guide.get("accuracy"))
        more = "accuracy not measured" if own is None else f"on its {guide.get('split')} split"
        found.append(("teacher", "–" if own is None else percent(own), more))
    done, planned = len(run.metrics), number(run.recipe.get("epochs"))
    many = run.kind == "search" and any("architecture" in row for row in run.metrics)
    of = f"of {int(planned)}" if planned and not many else "over all architectures" if many else ""
    found.append(("epochs", str(done), of))
    seconds = sum(number(row.get("seconds")) or 0.0 for row in run.metrics)
    given, used = number(run.recipe.get("time")), number(results.get("time_used"))
    if given and used:
        found.append(("time", duration(used), f"of {duration(given)} given"))
    else:
        found.append(("time", duration(seconds), f"in epochs, of {duration(given)} given" if given else "in epochs"))
    found.append(("seed", run.seed, ""))
    return el(
        "div",
        [
            el("div", el("span", name, class_="name"), el("b", value), el("span", more, class_="more"), class_="tile")
            for name, value, more in found
        ],
        class_="tiles",
    )


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def cells(run: Run) -> Html | None:
    """Every cell in a picture of its own, which fits a narrow screen."""
    genotype, note = run.genotype, None
    if genotype is None and run.architecture:
        try:
            genotype = genotype_of(best_so_far(run.architecture), run.space)
        except UserError:
            return None
        note = el("p", "Not final: derived from the weights of the last epoch so far.", class_="quiet")
    if genotype is None:
        return None
    drawn = []
    for name, cell in genotype.cells.items():
        one = Genotype(genotype.space, {name: cell}, genotype.settings)
        picture = Html(inside_page(to_svg(one, _cell(name), titled=False)))
        drawn.append(el("div", picture, class_="card drawing scroll fade", tabindex=0))
    return join(note, el("div", drawn, class_="drawings"))


def curves(run: Run) -> Html | None:
    split = next((str(row["val_split"]) for row in run.metrics if "val_split" in row), "validation")
    # Methods that sample architectures train one network after the other, and number them.
    of = "supernet" if run.kind == "search" and not any("architecture" in row for row in run.metrics) else "network"
    plots: list[tuple[str, Mapping[str, str], bool]] = [
        (
            "accuracy",
            {
                "train_accuracy": f"{of}, train",
                "val_accuracy": f"{of}, {split}",
                "child_accuracy": f"derived network, {split}",
                "best_val_accuracy": f"best so far, {split}",
            },
            True,
        ),
        (
            "top-5 accuracy",
            {
                "train_top5": f"{of}, train",
                "val_top5": f"{of}, {split}",
                "child_top5": f"derived network, {split}",
            },
            True,
        ),
        ("loss", {"train_loss": "train", "val_loss": split, "child_loss": f"derived network, {split}"}, False),
        ("attention transfer from the teacher, without its weight", {"guide_loss": "loss"}, False),
        ("learning rate", {"lr": "learning rate"}, False),
        ("temperature", {"temperature": "temperature"}, False),
        (
            "expected parameters of the architecture",
            {"expected_parameters": "expected", "derived_parameters": "derived"},
            False,
        ),
    ]
    charts = [line_chart(title, series(run.metrics, names), shares=shares) for title, names, shares in plots]
    drawn = [chart for chart in charts if chart is not None]
    return el("div", drawn, class_="plots") if drawn else None


def signs(run: Run) -> Html | None:
    """Entropy, skip connections and changes of the derived architecture, with a statement on each."""
    tables = sorted({key.removeprefix("entropy_") for row in run.metrics for key in row if key.startswith("entropy_")})
    if not tables:
        return None
    warn = number(mapping(run.recipe.get("collapse")).get("warn_above"))
    shares = [line for line in series(run.metrics, {f"skip_share_{t}": _cell(t) for t in tables}) if line.known]
    changes = [Series(_cell(t), points) for t in tables if (points := changed(run.architecture, t))]
    plots = [
        line_chart("entropy of the weights in nats", series(run.metrics, {f"entropy_{t}": _cell(t) for t in tables})),
        line_chart("share of skip connections", shares, shares=True, limit=None if warn is None else (warn, "warning")),
        line_chart("edges that changed since the epoch before", changes),
    ]
    drawn = [chart for chart in plots if chart is not None]
    return join(el("p", _verdict(run, shares, warn, changes)), el("div", drawn, class_="plots")) if drawn else None


def _cell(name: str) -> str:
    return "cell" if name == "cell" else f"{name} cell"


def _verdict(run: Run, shares: Sequence[Series], warn: float | None, changes: Sequence[Series]) -> str:
    sentences = []
    high = [line for line in shares if warn is not None and line.known[-1][1] > warn]
    if high:
        worst = max(high, key=lambda line: line.known[-1][1])
        sentences.append(
            f"⚠ {percent(worst.known[-1][1], 0)} of the {worst.name}'s operations are skip connections: this search "
            "may have collapsed."
        )
    elif shares:
        sentences.append("No sign of a collapse to skip connections.")
    last = number(run.metrics[-1].get("entropy"))
    first = number(run.metrics[0].get("entropy"))
    if last is not None and first is not None and len(run.metrics) > 1:
        decided = "barely moved" if last > 0.95 * first else "fell"
        sentences.append(
            f"The entropy {decided}, from {first:.2f} to {last:.2f} nats (0 means that every edge is decided)."
        )
    if changes:
        still = sum(line.known[-1][1] for line in changes)
        text = "The derived architecture did not change in the last epoch."
        sentences.append(text if not still else f"{still:.0f} of its edges changed in the last epoch.")
    stopped = run.results.get("stopped")
    if stopped:
        sentences.append(f"The search stopped early: {stopped}.")
    return " ".join(sentences)


def changed(rows: Sequence[Mapping[str, Any]], table: str) -> list[tuple[float, float]]:
    """(epoch, number of derived edges that the epoch before did not have), from the second epoch on."""
    result: list[tuple[float, float]] = []
    before: set[str] | None = None
    for row in rows:
        edges = mapping(mapping(row.get("genotype")).get(table)).get("edges")
        epoch = number(row.get("epoch"))
        if not isinstance(edges, list) or epoch is None or "tables" not in row:
            continue
        now = {str(edge) for edge in edges}
        if before is not None:
            result.append((epoch + 1, float(len(now - before))))
        before = now
    return result


def loading(run: Run) -> Html | None:
    """Commands and code that use the result of this run, with the whole path of its folder."""
    folder = str(run.folder.resolve())
    if run.kind == "search":
        if run.genotype is None:
            return None
        text = "A search derives an architecture. This command trains its network from scratch:"
        return join(el("p", text), _code(f"softcell train {shlex.quote(folder)}", "shell"))
    if run.status != "finished":
        return None
    shape = " × ".join(str(v) for v in mapping(run.results.get("data")).get("shape") or ())
    use = (
        "    embeddings = torch.nn.functional.normalize(network(network.normalise(pixels)))\n"
        "similarity = embeddings @ embeddings.T  # cosine similarities\n"
        if run.recipe.get("task") == "retrieve"
        else "    probabilities = network(network.normalise(pixels)).softmax(dim=1)\n"
    )
    code = (
        "import torch\n"
        "from softcell.api import load_network\n\n"
        f"network = load_network({folder!r})\n"
        f"# pixels: float in 0..1, n × {shape}\n"
        f"with torch.no_grad():\n{use}"
    )
    return _code(code, "python")


def _code(code: str, language: str) -> Html:
    return el(
        "div",
        el("button", "copy", type="button", class_="copy"),
        el("pre", el("code", code), tabindex=0, aria_label=f"{language} code"),
        class_="code",
    )


def origin(run: Run) -> Html:
    """Command, versions, hardware, data and recipe: what is needed to repeat the run."""
    m = run.manifest
    versions, hardware, git = (mapping(m.get(key)) for key in ("versions", "hardware", "git"))
    command = m.get("command")
    memory = number(hardware.get("memory"))
    gpus = hardware.get("gpus")
    changed_ = " (with changes)" if git.get("dirty") else ""
    pairs: list[tuple[str, Child]] = [
        (
            "command",
            el("code", " ".join(shlex.quote(str(word)) for word in command)) if isinstance(command, list) else None,
        ),
        ("started", str(m.get("created") or "")),
        ("ended", str(m.get("finished") or "")),
        ("status", run.status),
        ("seed", run.seed),
        ("commit", f"{git['commit']}{changed_}" if git.get("commit") else "not in a git checkout"),
        ("versions", ", ".join(f"{key} {value}" for key, value in versions.items() if value)),
        ("processor", f"{hardware.get('cpu')}, {hardware.get('cores')} cores; threads used: {m.get('threads')}"),
        ("memory", f"{memory / 2**30:.1f} GiB" if memory else None),
        ("GPUs", ", ".join(map(str, gpus)) if isinstance(gpus, list) and gpus else "none"),
        ("data", str(mapping(run.results.get("data")).get("source") or run.data)),
        ("splits", ", ".join(f"{k} {v}" for k, v in mapping(run.results.get("splits")).items())),
    ]
    recipe = el("details", el("summary", "the complete recipe"), facts(_settings(run.recipe)))
    again = f"softcell {run.kind} --config {shlex.quote(str(run.folder.resolve()))} --out again"
    repeat = join(el("p", "This command repeats the run:"), _code(again, "shell"))
    return join(el("div", facts(pairs), class_="card"), repeat, recipe)


def _settings(recipe: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Child]]:
    result: list[tuple[str, Child]] = []
    for key, value in recipe.items():
        if isinstance(value, Mapping):
            result += _settings(value, f"{prefix}{key}.")
        else:
            shown = ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)
            result.append((f"{prefix}{key}", shown))
    return result
