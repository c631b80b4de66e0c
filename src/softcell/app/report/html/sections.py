"""The sections of one run: what it is, its cells, weights, curves, signs of collapse, mistakes, origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from softcell.app.report.cells_svg import to_svg
from softcell.app.report.html.charts import Series, line_chart, series
from softcell.app.report.html.context import context
from softcell.app.report.html.elements import Child, Html, big, el, facts, join, percent
from softcell.app.report.html.mistakes import confusion, most_wrong
from softcell.app.report.html.weights import weights
from softcell.app.report.runs import Run, mapping, number
from softcell.app.report.theme import inside_page
from softcell.arch import Genotype
from softcell.errors import UserError
from softcell.search.history import best_so_far, genotype_of

STATUS = {"finished": "✓ finished", "running": "▶ running", "interrupted": "❚❚ interrupted", "failed": "✕ failed"}


def section(run: Run, number_: int, alone: bool) -> Html:
    """Everything about one run."""
    parts = [
        ("Cells", cells(run), "What was found. Lines and marks tell the kinds of operations apart."),
        ("Architecture weights", weights(run), None),
        ("Curves", curves(run), None),
        ("Context auto-regression", context(run), "Hidden parts of images, filled in without labels."),
        ("Decisions and collapse", signs(run), None),
        ("Confusion matrix", confusion(run), "On the test split."),
        ("Most wrong images", most_wrong(run), "Test images with the most confidence in a wrong class."),
        ("Load the model", loading(run), None),
        ("Recipe and provenance", origin(run), None),
    ]
    tag = f"run-{number_}"
    body = []
    for title, content, about in parts:
        if content is not None:
            quiet = None if about is None else el("p", about, class_="quiet")
            body.append(el("section", el("h3", title), quiet, content, id=f"{tag}-{title.lower().replace(' ', '-')}"))
    problems = el("ul", [el("li", text) for text in run.problems], class_="problems") if run.problems else None
    heading = el("h2", headline(run), el("span", STATUS.get(run.status, run.status), class_=f"badge {run.status}"))
    where = None if alone else el("p", run.label, class_="quiet mono")
    return el("article", heading, where, tiles(run), problems, body, class_="run", id=tag)


def headline(run: Run) -> str:
    if run.kind == "search":
        return f"{run.method} in {run.space} on {run.data}"
    found = "" if run.method == "given" else f", found by {run.method}"
    return f"{run.space} network on {run.data}{found}"


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
    found.append(("time", duration(seconds), "in epochs"))
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
    """Each cell drawn on its own, so that it fits a narrow screen."""
    genotype, note = run.genotype, None
    if genotype is None and run.architecture:
        try:
            genotype = genotype_of(best_so_far(run.architecture), run.space)
        except UserError:
            return None
        note = el("p", "Not final: derived from the weights so far.", class_="quiet")
    if genotype is None:
        return None
    drawn = []
    for name, cell in genotype.cells.items():
        one = Genotype(genotype.space, {name: cell}, genotype.settings)
        picture = Html(inside_page(to_svg(one, _cell(name), titled=False)))
        drawn.append(el("div", picture, class_="card drawing scroll fade", tabindex=0))
    return join(note, el("div", drawn, class_="drawings"))


def _split(run: Run) -> str:
    return next((str(row["val_split"]) for row in run.metrics if "val_split" in row), "validation")


def curves(run: Run) -> Html | None:
    split = _split(run)
    # Samplers number the networks that they train one by one.
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
    drawn = [
        line_chart(title, lines, shares=shares)
        for title, names, shares in plots
        if (lines := series(run.metrics, names))
    ]
    return el("div", drawn, class_="plots") if drawn else None


def signs(run: Run) -> Html | None:
    """Entropy, skip connections and how much the derived architecture still changes, with a plain statement."""
    tables = sorted({key.removeprefix("entropy_") for row in run.metrics for key in row if key.startswith("entropy_")})
    if not tables:
        return None
    warn = number(mapping(run.recipe.get("collapse")).get("warn_above"))
    rows = [*run.metrics]
    plots = [line_chart("entropy of the weights in nats", series(rows, {f"entropy_{t}": _cell(t) for t in tables}))]
    shares = series(rows, {f"skip_share_{t}": _cell(t) for t in tables})
    if shares:
        limit = None if warn is None else (warn, "warning")
        plots.append(line_chart("share of skip connections", shares, shares=True, limit=limit))
    changes = [Series(_cell(t), points) for t in tables if (points := changed(run.architecture, t))]
    if changes:
        plots.append(line_chart("edges that changed since the epoch before", changes))
    return join(el("p", _verdict(run, tables, shares, warn, changes)), el("div", plots, class_="plots"))


def _cell(name: str) -> str:
    return "cell" if name == "cell" else f"{name} cell"


def _verdict(
    run: Run, tables: Sequence[str], shares: Sequence[Series], warn: float | None, changes: list[Series]
) -> str:
    sentences = []
    high = [line for line in shares if warn is not None and line.points[-1][1] > warn]
    if high:
        worst = max(high, key=lambda line: line.points[-1][1])
        sentences.append(
            f"⚠ {percent(worst.points[-1][1], 0)} of the {worst.name}'s operations are skip connections: this search "
            "may have collapsed."
        )
    elif shares:
        sentences.append("No sign of a collapse to skip connections at the end.")
    last = number(run.metrics[-1].get("entropy"))
    first = number(run.metrics[0].get("entropy"))
    if last is not None and first is not None and len(run.metrics) > 1:
        decided = "hardly moved" if last > 0.95 * first else "fell"
        sentences.append(f"The entropy {decided}, from {first:.2f} to {last:.2f} nats (0 is decided).")
    if changes:
        still = sum(line.points[-1][1] for line in changes)
        text = "The derived architecture did not change in the last epoch."
        sentences.append(text if not still else f"In the last epoch {still:.0f} of its edges still changed.")
    stopped = run.results.get("stopped")
    if stopped:
        sentences.append(f"The search ended early: {stopped}.")
    return " ".join(sentences)


def changed(rows: Sequence[Mapping[str, Any]], table: str) -> list[tuple[float, float]]:
    """(epoch, number of derived edges that were not there in the row before), from the second row on."""
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
    """Code that makes the network of this run usable."""
    name = run.folder.resolve().name
    if run.kind == "search":
        if run.genotype is None:
            return None
        # The whole path, which is right wherever the reader stands.
        code = f"softcell train {_shell(str(run.folder.resolve()))}"
        return join(
            el("p", "A search leaves an architecture; this trains its network from scratch:"),
            _code(code, "shell"),
        )
    if run.status != "finished":
        return None
    data = mapping(run.results.get("data"))
    mean, std = (
        ", ".join(f"{v:.4f}" for v in map(number, data.get(k) or ()) if v is not None) for k in ("mean", "std")
    )
    shape = " × ".join(str(v) for v in data.get("shape") or ())
    code = (
        "import torch\n"
        "from softcell.api import load_network\n\n"
        f"network = load_network({name!r})  # the path of this run folder\n"
        f"mean, std = (torch.tensor(v).view(-1, 1, 1) for v in ([{mean}], [{std}]))\n\n"
        f"# images: float in 0..1, n × {shape}\n"
        "with torch.no_grad():\n"
        + (
            "    found = torch.nn.functional.normalize(network((images - mean) / std))\n"
            "likeness = found @ found.T  # cosine similarities\n"
            if run.recipe.get("task") == "retrieve"
            else "    chances = network((images - mean) / std).softmax(dim=1)\n"
        )
    )
    return _code(code, "python")


def _shell(word: str) -> str:
    import shlex

    return shlex.quote(word)


def _code(code: str, language: str) -> Html:
    return el(
        "div",
        el("button", "copy", type="button", class_="copy"),
        el("pre", el("code", code), tabindex=0, aria_label=f"{language} code"),
        class_="code",
    )


def origin(run: Run) -> Html:
    """Where the result comes from, enough to repeat it."""
    m = run.manifest
    versions, hardware, git = (mapping(m.get(key)) for key in ("versions", "hardware", "git"))
    command = m.get("command")
    memory = number(hardware.get("memory"))
    gpus = hardware.get("gpus")
    changed_ = " (with changes)" if git.get("dirty") else ""
    pairs: list[tuple[str, Child]] = [
        ("command", el("code", " ".join(_shell(str(word)) for word in command)) if isinstance(command, list) else None),
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
    again = f"softcell {run.kind} --config {_shell(run.folder.resolve().name)} --out again"
    repeat = join(el("p", "This run again (with the path of this folder):"), _code(again, "shell"))
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
