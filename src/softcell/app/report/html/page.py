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

from softcell.app.report.curves import _shades
from softcell.app.report.html.elements import Html, el, join
from softcell.app.report.html.outcome import Outcome, in_order, outcome_section, read_outcome
from softcell.app.report.html.overview import list_of, overview
from softcell.app.report.html.sections import headline, section
from softcell.app.report.runs import Run, companions, labels, read_run
from softcell.app.report.theme import page_sheet
from softcell.engine.files import atomic_write_text
from softcell.errors import UserError

REPORT = "report.html"


def write_report(folders: Sequence[str | os.PathLike[str]], path: str | os.PathLike[str]) -> Path:
    """Writes the report of the runs in `folders` to `path`, in one step; random architectures beside them count too."""
    chosen = [Path(folder) for folder in folders]
    atomic_write_text(path, report(chosen))
    return Path(path)


def report(folders: Sequence[Path]) -> str:
    """The page as text."""
    outcome = read_outcome(folders)
    runs, beside = gather(folders if outcome is None else in_order(folders))
    return render(runs, beside, outcome=outcome)


def gather(folders: Sequence[Path], read: Callable[[Path, str], Run] = read_run) -> tuple[list[Run], list[Run]]:
    """The runs themselves, and the random architectures trained beside them that are not among them.

    Of those beside, one that cannot be read is named in the problems of its run.
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
    live: float | None = None,
    notes: Sequence[str] = (),
) -> str:
    """The page. outcome: of one `softcell run`, to which all runs belong; live: seconds between two looks of a page
    that is being served; notes: lines to show on top."""
    title = _title(runs)
    several = len(runs) > 1
    top = overview(runs, beside) if outcome is None else join(outcome_section(outcome), list_of(runs))
    chooser = None
    if several:
        options = [el("option", f"{run.label} – {headline(run)}", value=f"run-{i}") for i, run in enumerate(runs)]
        chooser = el("label", "Show run ", el("select", options, class_="chooser"), class_="choose")
    said = el("ul", [el("li", note) for note in notes], class_="problems") if notes else None
    empty = None if runs else el("p", "No run here yet. This page looks again by itself.", class_="quiet")
    articles = [section(run, i, not several) for i, run in enumerate(runs)]
    # Of one run with random ones beside it, the run itself comes first.
    body = join(said, empty, top, chooser, articles) if several else join(said, empty, articles, top)
    script, style = _asset("page.js"), _asset("page.css") + page_sheet(*_shades())
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
    return resources.files("softcell.app.report.html").joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
