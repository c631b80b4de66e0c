"""The sections of one run in a report: numbers, cells, curves, signs of collapse, mistakes, provenance.

Mistakes are images with their Grad-CAM maps. Context auto-regression has pictures of reconstructed parts.
"""

from __future__ import annotations

import base64
import io
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from torch import Tensor

from softcell.app.report._overview import STATUS
from softcell.app.report.cells_svg import to_svg
from softcell.app.report.charts import Series, line_chart, series
from softcell.app.report.heatmaps import class_names, confusion, overlay, weights
from softcell.app.report.runs import DRAWN, Run, mapping, number, read_lines
from softcell.app.report.theme import Child, Html, big, el, facts, inside_page, join, percent
from softcell.arch import Genotype
from softcell.errors import UserError
from softcell.search.genotypes import best_so_far, genotype_of
from softcell.search.run import FIRST
from softcell.search.supernet import PICTURE

SHOWN = 12  # images with the most confidence in a wrong class
WIDEST = 1600  # pixels of a picture in a page


def section(run: Run, number_: int, *, label: bool, comparison: Html | None = None) -> Html:
    """Everything about one run; label: whether its name is shown; comparison: of this run with random architectures."""
    parts = [
        ("Cells", cells(run), "The derived architecture. Lines and marks show the kind of each operation."),
        ("Architecture weights", weights(run), None),
        ("Curves", curves(run), None),
        ("Context auto-regression", reconstructions(run), "Reconstruction of hidden image parts, without labels."),
        ("Decisions and collapse", signs(run), None),
        ("Confusion matrix", confusion(run), "On the test split."),
        ("Most confident mistakes", most_wrong(run), "Test images that were misclassified with the most confidence."),
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
        found.append(("top-5", percent(score.top5), "class among the top five"))
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
        limit = f", limit {duration(given)}" if given else ""
        found.append(("time", duration(seconds), f"spent in epochs{limit}"))
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
    """Every cell in a separate picture, which fits a narrow screen."""
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
    # Methods that sample architectures train networks one after another, and number them.
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
        ("attention transfer from the teacher, unweighted", {"guide_loss": "loss"}, False),
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
        line_chart("edges that changed since the previous epoch", changes),
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
    """(epoch, number of derived edges that the previous epoch did not have), from the second epoch on."""
    result: list[tuple[float, float]] = []
    before: set[str] | None = None
    for row in rows:
        edges = mapping(mapping(row.get("genotype")).get(table)).get("edges")
        epoch = number(row.get("epoch"))
        # Without tables the line is about one sampled architecture, not about what the search would derive.
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


def most_wrong(run: Run) -> Html | None:
    """The images with the most confidence in a wrong class, each with its Grad-CAM map where there is one."""
    found = run.predictions
    if found is None or "worst" not in found:
        return None
    names, heat = class_names(run), found.get("heat")
    cards = []
    for place, index in enumerate(found["worst"].tolist()[:SHOWN]):
        label, predicted = (names[max(0, int(found[key][index]))] for key in ("labels", "predicted"))
        confidence, truth = float(found["confidence"][index]), float(found["truth"][index])
        image = found["images"][place]
        described = f"test image {index}: {label}, classified as {predicted}"
        pictures = [_img(image, described, "plain")]
        if heat is not None:
            pictures.append(_img(overlay(image, heat[place]), f"Grad-CAM of {described}", "cam"))
        cards.append(
            el(
                "figure",
                el("div", pictures, class_="pictures"),
                el(
                    "figcaption",
                    join(el("span", "is ", el("b", label)), el("span", "classified as ", el("b", predicted))),
                    el("span", f"{percent(confidence, 0)} confident, {percent(truth, 0)} for {label}", class_="quiet"),
                ),
                class_="wrong",
            )
        )
    control = None
    if heat is not None:
        control = el(
            "label",
            el("input", type="checkbox", class_="cams", checked=True),
            " show Grad-CAM of the predicted class in the last cell (bright yellow: high, dark blue: low)",
            class_="check",
        )
    return el("div", control, el("div", cards, class_="gallery"), class_="mistakes cams-on")


def _img(pixels: Tensor, described: str, style: str) -> Html:
    """An image uint8 [c, h, w] as an element that holds its own bytes."""
    array = pixels.permute(1, 2, 0).contiguous().numpy()
    picture = Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
    sharp = " pixels" if max(pixels.shape[1:]) < 100 else ""
    return _element(picture, described, style + sharp)


def _element(picture: Image.Image, described: str, style: str) -> Html:
    stream = io.BytesIO()
    picture.save(stream, "PNG", optimize=True)
    source = "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode("ascii")
    return el("img", src=source, alt=described, class_=style, width=picture.width, height=picture.height)


def reconstructions(run: Run) -> Html | None:
    """Loss and pictures of context auto-regression, where a search began with this phase or consists of it."""
    first = run.folder / FIRST
    if run.kind != "search" or not (first.is_dir() or (run.folder / PICTURE).is_file()):
        return None
    parts: list[Html | None] = []
    if first.is_dir():
        rows = [row for row in read_lines(first, "metrics.jsonl", []) if number(row.get("epoch")) is not None]
        lines = series(rows, {"train_loss": "train", "val_loss": "validation"})
        chart = line_chart("phase 1: L1 distance to the hidden parts", lines)
        parts.append(None if chart is None else el("div", chart, class_="plots"))
    shown = _picture(first / PICTURE) or _picture(run.folder / PICTURE)
    if shown is not None:
        caption = "rows: images, the parts that the network saw, and its reconstruction"
        inner = el("div", shown, class_="scroll fade", tabindex=0)
        parts.append(el("figure", el("figcaption", caption), inner, class_="card"))
    return join(*parts) if any(parts) else None


def _picture(file: Path) -> Html | None:
    """A PNG file as an element; None if there is no readable one."""
    try:
        with Image.open(file, formats=["PNG"]) as opened:
            image = opened.convert("L" if opened.mode == "L" else "RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    image.thumbnail((WIDEST, WIDEST))
    return _element(image, "images, their visible parts and their reconstructions", "filled")
