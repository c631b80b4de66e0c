"""How genotypes, results, comparisons and reports show themselves in a notebook; importing this is enough.

Pictures are embedded as images, which a notebook shows even if it does not trust the page, and whose style sheets stay
inside them.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from softcell.app.report.cells_svg import to_svg
from softcell.app.report.charts import curves_svg
from softcell.app.report.compare import HEADER, Comparison, group_row
from softcell.app.report.theme import Child, Html, el, join
from softcell.arch import Genotype
from softcell.evaluate import TrainResult
from softcell.files import atomic_write_text
from softcell.search import SearchResult
from softcell.seeds import SearchedSeeds, TrainedSeeds, compared_by, last_accuracy, training_metrics
from softcell.text import VIEWS, Shown, percent

REPORT_HEIGHT = 640


@dataclass(frozen=True, slots=True, repr=False)
class Drawing(Shown):
    """A picture of cells; `svg` is the whole file.

    Example:
        >>> from softcell.api import draw
        >>> drawing = draw("|nor_conv_3x3~0|+|none~0|skip_connect~1|+|none~0|none~1|skip_connect~2|")
        >>> drawing.save("cell.svg"), drawing.svg.startswith("<svg")
        (PosixPath('cell.svg'), True)
    """

    svg: str

    def __repr__(self) -> str:
        return f"Drawing({len(self.svg):,} characters of SVG)"

    def save(self, path: str | Path) -> Path:
        """Writes the SVG file."""
        atomic_write_text(path, self.svg)
        return Path(path)


@dataclass(frozen=True, slots=True)
class Report(Shown):
    """A self-contained page about runs; a notebook shows it whole.

    Example:
        >>> from softcell.api import report
        >>> report("runs/train").path.name
        'report.html'
    """

    path: Path


def picture(svg: str, alt: str) -> Html:
    data = base64.b64encode(svg.encode("utf-8")).decode("ascii")
    return el("img", src=f"data:image/svg+xml;base64,{data}", alt=alt, style="max-width: 100%")


def rows_of(pairs: Iterable[tuple[str, Child]]) -> Html:
    """Names and values as a table."""
    return el("table", [el("tr", el("th", name), el("td", value)) for name, value in pairs])


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> Html:
    """A table without classes, which notebooks and documentation pages style themselves."""
    lines = [el("tr", [el("td", cell) for cell in row]) for row in rows]
    return el("table", el("thead", el("tr", [el("th", name) for name in header])), el("tbody", lines))


def _genotype_html(genotype: Genotype) -> Html:
    return picture(to_svg(genotype), repr(genotype))


def _search_html(result: SearchResult) -> Html:
    facts = [("folder", str(result.folder)), ("recipe", repr(result.recipe)), *_accuracy(result.metrics)]
    cells = _genotype_html(result.genotype) if result.genotype is not None else el("p", "Interrupted; resume it.")
    return join(rows_of(facts), cells, _curves(result.metrics))


def _train_html(result: TrainResult) -> Html:
    measured = [(name, percent(value)) for name, value in training_metrics(result).items() if value is not None]
    facts: list[tuple[str, Child]] = [("folder", str(result.folder)), ("recipe", repr(result.recipe))]
    facts += [(f"{name} ({result.split})", value) for name, value in measured]
    facts += [("parameters", f"{result.cost.parameters:,}"), ("multiply-adds", f"{result.cost.multiply_adds:,}")]
    return join(rows_of(facts), _genotype_html(result.genotype), _curves(result.metrics))


def _searched_seeds_html(result: SearchedSeeds) -> Html:
    by = compared_by(result.results.values())
    rows = [
        [
            str(seed),
            "–" if (value := last_accuracy(one, by)) is None else percent(value),
            "best" if seed == result.best else "",
        ]
        for seed, one in result.results.items()
    ]
    best = None if result.best is None else result.results[result.best].genotype
    found = table(("seed", by.replace("_", " "), ""), rows)
    errors = [el("li", f"seed {seed}: {error}") for seed, error in result.errors.items()]
    return join(found, el("ul", errors) if errors else None, None if best is None else _genotype_html(best))


def _trained_seeds_html(result: TrainedSeeds) -> Html:
    known = [
        name for one in result.results.values() for name, value in training_metrics(one).items() if value is not None
    ]
    names = list(dict.fromkeys(known))
    rows = [
        [str(seed), *("–" if (value := training_metrics(one).get(name)) is None else percent(value) for name in names)]
        for seed, one in result.results.items()
    ]
    return join(table(("seed", *names), rows), el("p", repr(result)))


def _comparison_html(found: Comparison) -> Html:
    sentences = [el("li", text) for text in (*found.sentences, *(f"Note: {note}" for note in found.notes))]
    return join(table(HEADER, [group_row(group) for group in found.groups]), el("ul", sentences))


def report_html(report: Report) -> Html:
    """The page in a separate frame, whose scripts cannot touch the notebook."""
    style = f"width: 100%; height: {REPORT_HEIGHT}px; border: 0"
    page = report.path.read_text(encoding="utf-8")
    return el("iframe", srcdoc=page, sandbox="allow-scripts", style=style, title=str(report.path))


def _accuracy(metrics: Sequence[Mapping[str, Any]]) -> list[tuple[str, Child]]:
    last = metrics[-1] if metrics else {}
    found = last.get("best_val_accuracy", last.get("val_accuracy"))
    return [] if found is None else [(f"accuracy ({last.get('val_split', 'validation')})", percent(found))]


def _curves(metrics: Sequence[Mapping[str, Any]]) -> Html | None:
    names = [name for name in ("train_accuracy", "val_accuracy") if any(name in row for row in metrics)]
    if len(metrics) < 2 or not names:
        return None
    rows = [{"epoch": row["epoch"] + 1, **{name: row[name] for name in names if name in row}} for row in metrics]
    return picture(curves_svg(rows, names, "accuracy"), "accuracy over the epochs")


VIEWS |= {
    Genotype: _genotype_html,
    Drawing: lambda drawing: picture(drawing.svg, "cells"),
    Report: report_html,
    SearchResult: _search_html,
    TrainResult: _train_html,
    SearchedSeeds: _searched_seeds_html,
    TrainedSeeds: _trained_seeds_html,
    Comparison: _comparison_html,
}
