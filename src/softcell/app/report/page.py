"""One self-contained page for one or many runs: no network, no framework, the same bytes for the same folders."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path

from softcell.app.report.front import front_section, read_front
from softcell.app.report.heatmaps import shade_rules
from softcell.app.report.overview import Outcome, in_order, list_of, outcome_section, overview, read_outcome
from softcell.app.report.runs import Run, companions, labels, read_run
from softcell.app.report.sections import headline, section
from softcell.app.report.theme import Html, el, join, page_sheet
from softcell.engine.files import atomic_write_text
from softcell.errors import UserError

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
