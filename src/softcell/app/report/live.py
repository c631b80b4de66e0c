"""Serves the report of running searches as a live page, to this machine alone and only under its own name.

A page of another site may ask a browser to read from 127.0.0.1, or let its own name point there; such requests carry a
foreign `Host`, `Origin` or `Sec-Fetch-Site` and are refused. Nothing but the page itself is served: no path leads to a
file.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from softcell.app.report._overview import SUMMARY, read_outcome
from softcell.app.report.page import gather, render
from softcell.app.report.runs import Run, read_run
from softcell.engine.runfolder import MANIFEST
from softcell.errors import UserError

LOOPBACK = "127.0.0.1"
MOST_RUNS = 24
_FILES = (MANIFEST, "metrics.jsonl", "architecture.jsonl", "genotype.json", "predictions.safetensors")


class LivePage:
    """The page of all runs in or below `roots`, the latest first, rendered again when one of their files changes.

    A folder that cannot be read at the moment keeps its position and its last readable content.
    """

    def __init__(self, roots: Sequence[Path], every: float = 2.0) -> None:
        self._roots, self._every = list(roots), every
        self._known: dict[Path, Run] = {}
        self._seen: object = None
        self._page = b""
        self._lock = threading.Lock()

    def get(self) -> tuple[bytes, str]:
        """The page and the tag of its content."""
        with self._lock:
            folders = self._folders()
            seen = [
                (folder, *map(_stamp, (*(folder / name for name in _FILES), folder.parent / SUMMARY)))
                for folder in folders
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
                self._read(folder, folder.name)
                shown.append(folder)
            except UserError as error:
                notes.append(f"{folder.name} cannot be read yet: {error}")
        if len(shown) > MOST_RUNS:
            notes.append(f"the latest {MOST_RUNS} of {len(shown)} runs are shown; name folders to choose others")
        runs, beside = gather(shown[:MOST_RUNS], self._read)
        try:
            return render(runs, beside, outcome=read_outcome(folders), live=self._every, notes=notes)
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
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        problem = f"this run is damaged: its files cannot be drawn ({reason})"
        known = {key: run.manifest[key] for key in ("kind", "status", "seed") if key in run.manifest}
        manifest = {**known, "recipe": {}, "results": {}}
        return Run(run.folder, run.label, manifest, [], [], None, None, (*run.problems, problem))
    return run


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
    timeout = 30  # a silent client does not hold a thread for ever

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        if not self.server.is_own(self):
            self._send(403, b"this page is for the machine it runs on\n", "text/plain", with_body)
            return
        if self.path.partition("?")[0] != "/":
            self._send(404, b"there is only /\n", "text/plain", with_body)
            return
        page, tag = self.server.page.get()
        if self.headers.get("If-None-Match") == tag:
            self._send(304, b"", "text/html; charset=utf-8", False, tag)
        else:
            self._send(200, page, "text/html; charset=utf-8", with_body, tag)

    def _send(self, code: int, body: bytes, kind: str, with_body: bool, tag: str | None = None) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
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
            raise UserError(f"port {port} of {LOOPBACK} cannot be used ({error}); give another --port, or 0") from error
        self.names = {f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost")}

    @property
    def address(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/"

    def is_own(self, request: BaseHTTPRequestHandler) -> bool:
        """Whether a request comes from a page of this server or from a person."""
        hosts = request.headers.get_all("Host") or []
        if len(hosts) != 1 or hosts[0].lower() not in self.names:
            return False
        origin = request.headers.get("Origin")
        if origin is not None and origin.lower() not in {f"http://{name}" for name in self.names}:
            return False
        return request.headers.get("Sec-Fetch-Site", "none") in ("none", "same-origin")
