"""A report: one self-contained page for one or many runs, as a file or served as a live page.

No network, no framework, the same bytes for the same folders.

A live page is served only to this machine and only under its own name. A page of another site may ask a browser to
read from 127.0.0.1, or let its own name point there; such requests carry a foreign `Host`, `Origin` or `Sec-Fetch-Site`
and are rejected. Nothing but the page itself is served: no path leads to a file.
"""

from __future__ import annotations

import base64
import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path

from softcell.app.report._overview import (
    FRONT,
    SUMMARY,
    Outcome,
    front_section,
    in_order,
    list_of,
    outcome_section,
    overview,
    read_front,
    read_outcome,
)
from softcell.app.report._sections import headline, section
from softcell.app.report.heatmaps import shade_rules
from softcell.app.report.runs import Run, companions, labels, read_run
from softcell.app.report.theme import Html, el, join, page_sheet
from softcell.engine.runfolder import MANIFEST
from softcell.errors import UserError, one_line
from softcell.files import atomic_write_text

REPORT = "report.html"
LOOPBACK = "127.0.0.1"
MAX_RUNS = 24
"""Maximum number of runs on a live page."""
_FILES = (MANIFEST, "metrics.jsonl", "architecture.jsonl", "genotype.json", "predictions.safetensors")


def write_report(folders: Sequence[str | os.PathLike[str]], path: str | os.PathLike[str]) -> Path:
    """Writes the report of the runs in `folders`, including their random architectures, to `path` atomically.

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
                    problems.append(f"skipped: {error}")
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
    # Run folders may hold anyone's text: only this script may run, and nothing may be loaded from elsewhere.
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


class LivePage:
    """The page of all runs in or below `roots`, latest first, rendered again when one of their files changes.

    A folder that cannot be read at the moment keeps its position and its last readable content.
    """

    def __init__(self, roots: Sequence[Path], every: float = 2.0) -> None:
        self._roots, self._every = list(roots), every
        self._known: dict[Path, Run] = {}
        self._seen: object = None
        self._page = b""
        # Every request has its own thread.
        self._lock = threading.Lock()

    def get(self) -> tuple[bytes, str]:
        """The page and the tag of its content."""
        with self._lock:
            folders = self._folders()
            # `softcell train --random` trains the others while the run itself stays as it is.
            beside = [path for folder in folders for path in companions(folder)]
            seen = [
                (folder, *map(_stamp, (*(folder / name for name in _FILES), *_results_around(folder))))
                for folder in (*folders, *beside)
            ]
            if seen != self._seen or not self._page:
                self._page = self._render(folders).encode("utf-8")
                self._seen = seen
            return self._page, f'"{hashlib.sha256(self._page).hexdigest()[:32]}"'

    def _folders(self) -> list[Path]:
        found = {}
        for root in self._roots:
            below = [root / MANIFEST] if (root / MANIFEST).exists() else root.rglob(MANIFEST)
            for file in below:
                stamp = _stamp(file.with_name("metrics.jsonl")) or _stamp(file)
                found[file.parent] = stamp[0] if stamp else 0
        # The path decides a tie: folders of equal age keep their order.
        return sorted(found, key=lambda folder: (-found[folder], str(folder)))

    def _render(self, folders: Sequence[Path]) -> str:
        shown, notes = [], []
        for folder in folders:
            try:
                # Read ahead: only folders that can be read are labelled and counted.
                self._read(folder, folder.name)
                shown.append(folder)
            except UserError as error:
                notes.append(f"{folder.name} cannot be read yet: {error}")
        if len(shown) > MAX_RUNS:
            notes.append(f"the latest {MAX_RUNS} of {len(shown)} runs are shown; name folders to choose others")
        runs, beside = gather(shown[:MAX_RUNS], self._read)
        try:
            outcome = read_outcome(folders)
            front = read_front(folders) if outcome is None else None
            # Reports of the budgets are not served.
            results = None if front is None else front_section(front, links=False)
            return render(runs, beside, outcome=outcome, front=results, live=self._every, notes=notes)
        except Exception:  # the files may be damaged in any way
            runs, beside = ([_drawable(run) for run in some] for some in (runs, beside))
            return render(runs, beside, live=self._every, notes=notes)

    def _read(self, folder: Path, label: str) -> Run:
        """The run, or its last readable version while its `run.json` is damaged or half-written."""
        try:
            self._known[folder] = read_run(folder, label)
        except UserError:
            if folder not in self._known:
                raise
            old = self._known[folder]
            problem = f"{MANIFEST} cannot be read at the moment; this is its last readable version"
            return replace(old, label=label, problems=(*old.problems, problem))
        return self._known[folder]


def _drawable(run: Run) -> Run:
    """The run itself; where it cannot be drawn, only the facts of its manifest."""
    try:
        render([run])
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        problem = f"this run is damaged: its files cannot be drawn ({reason})"
        known = {key: run.manifest[key] for key in ("kind", "status", "seed") if key in run.manifest}
        manifest = {**known, "recipe": {}, "results": {}}
        return Run(run.folder, run.label, manifest, [], [], None, None, (*run.problems, problem))
    return run


def _results_around(folder: Path) -> tuple[Path, ...]:
    """The files with results of a `softcell run` around a run folder, for one budget and for several."""
    return folder.parent / SUMMARY, folder.parent / FRONT, folder.parent.parent / FRONT


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer
    server_version, sys_version = "softcell", ""
    protocol_version = "HTTP/1.0"  # a connection per request: none is left open when the server ends
    timeout = 30  # a silent client does not block a thread forever

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        if not self.server.is_own(self):
            self._send(403, b"this page is served only to the machine it runs on\n", "text/plain", with_body)
            return
        if self.path.partition("?")[0] != "/":
            self._send(404, b"the only page is /\n", "text/plain", with_body)
            return
        page, tag = self.server.page.get()
        if self.headers.get("If-None-Match") == tag:
            self._send(304, b"", "text/html; charset=utf-8", False, tag)
        else:
            self._send(200, page, "text/html; charset=utf-8", with_body, tag)

    def _send(self, code: int, body: bytes, kind: str, with_body: bool, tag: str | None = None) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        # In a 304 the length would be that of the page, which is not sent.
        if code != 304:
            self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Frame-Options", "DENY")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Referrer-Policy", "no-referrer")
        if tag is not None:
            self.send_header("ETag", tag)
        self.end_headers()
        if with_body:
            try:
                self.wfile.write(body)
            except ConnectionError:
                self.close_connection = True  # the client has closed the connection

    def log_message(self, format: str, *arguments: object) -> None:
        """Requests are not logged."""


class LiveServer(ThreadingHTTPServer):
    """Serves a `LivePage` on 127.0.0.1; port 0 means any free one. Run by `serve_forever`, ended by `shutdown`."""

    daemon_threads = True

    def __init__(self, page: LivePage, port: int = 0) -> None:
        self.page = page
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise UserError(f"port {port} of {LOOPBACK} cannot be used ({why}); choose another --port, or 0") from error
        self.names = {f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost")}

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/"

    def is_own(self, request: BaseHTTPRequestHandler) -> bool:
        """Whether a request comes from a page of this server or directly from a user."""
        hosts = request.headers.get_all("Host") or []
        if len(hosts) != 1 or hosts[0].lower() not in self.names:
            return False
        origin = request.headers.get("Origin")
        if origin is not None and origin.lower() not in {f"http://{name}" for name in self.names}:
            return False
        return request.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")
