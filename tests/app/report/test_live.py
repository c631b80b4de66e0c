"""The live page: served only to this machine, and robust to files that are being written."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from softcell.app.report._overview import list_of
from softcell.app.report.page import LivePage, LiveServer, write_report
from softcell.app.report.runs import find_runs, read_run
from softcell.errors import UserError
from tests.helpers.browser import Browser, find_browser
from tests.helpers.report_runs import make_search, make_training
from tests.helpers.unsealed import unsealed

PROGRAM = find_browser()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    make_search(tmp_path / "runs" / "first", epochs=4, status="running")
    with LiveServer(LivePage([tmp_path / "runs"], every=0.1)) as served:
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def ask(server: LiveServer, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    connection.request(method, path, headers=named)
    answer = connection.getresponse()
    body = answer.read().decode("utf-8")
    connection.close()
    return answer.status, body, dict(answer.getheaders())


def test_the_page_is_served_to_this_machine_only(server: LiveServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    status, body, headers = ask(server)
    assert status == 200 and "▶ running" in body and "connect-src 'self'" in body
    assert headers["X-Frame-Options"] == "DENY"
    assert ask(server, If_None_Match=headers["ETag"])[:2] == (304, "")
    assert ask(server, method="HEAD")[:2] == (200, "")


def test_other_names_and_other_sites_are_refused(server: LiveServer) -> None:
    port = server.server_port
    for host in (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1",
        f"127.0.0.1:{port + 1}",
        f"localhost.evil:{port}",
        "",
    ):
        status, body, _ = ask(server, Host=host)
        assert status == 403 and "running" not in body, host
    for allowed in (f"localhost:{port}", f"127.0.0.1:{port}", f"LOCALHOST:{port}"):
        assert ask(server, Host=allowed)[0] == 200
    assert ask(server, Origin="http://evil.example")[0] == 403
    assert ask(server, Origin="null")[0] == 403
    assert ask(server, Origin=f"http://localhost:{port}")[0] == 200
    assert ask(server, Sec_Fetch_Site="cross-site")[0] == 403
    for path in ("/first/run.json", "/../run.json", "/etc/passwd", "http://evil.example/"):
        assert ask(server, path)[0] in (403, 404), path
    assert ask(server, method="POST")[0] == 501


def test_two_host_lines_are_refused(server: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as raw:
        own = f"Host: localhost:{server.server_port}\r\n"
        raw.sendall(f"GET / HTTP/1.1\r\n{own}{own}Connection: close\r\n\r\n".encode())
        assert raw.recv(12) == b"HTTP/1.0 403"


def test_half_written_files_do_not_break_the_page(server: LiveServer, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    _, before, _ = ask(server)
    whole = (folder / "run.json").read_text()
    (folder / "run.json").write_text(whole[: len(whole) // 2])
    (folder / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes()[:-30])
    status, during, _ = ask(server)
    assert status == 200 and "cannot be read at the moment" in during and "Architecture weights" in during
    (folder / "run.json").write_text(whole)
    status, after, _ = ask(server)
    assert status == 200 and "metrics.jsonl: 1 unreadable line skipped" in after
    (tmp_path / "runs" / "second").mkdir()
    (tmp_path / "runs" / "second" / "run.json").write_text("{")
    assert "second cannot be read yet" in ask(server)[1]
    assert before != after


def test_runs_come_and_go_while_it_is_watched(server: LiveServer, tmp_path: Path) -> None:
    import shutil

    make_search(tmp_path / "runs" / "second", seed=1)
    assert "2 runs" in ask(server)[1]
    shutil.rmtree(tmp_path / "runs" / "first")
    assert "second" in ask(server)[1]
    shutil.rmtree(tmp_path / "runs")
    assert "No runs yet" in ask(server)[1]


def test_random_architectures_in_a_watched_run_are_followed(tmp_path: Path) -> None:
    """`softcell train --random`: the run itself is finished, and only those beside it change."""
    folder = make_training(tmp_path / "train")
    page = LivePage([folder])
    alone, tag = page.get()
    assert page.get()[1] == tag
    beside = make_training(folder / "random-1", method="random", seed=1)
    both, with_one = page.get()
    assert with_one != tag and b"Comparison with random architectures" in both
    assert b"Comparison with random architectures" not in alone
    manifest = json.loads((beside / "run.json").read_text())
    manifest["results"]["parameters"] += 1
    (beside / "run.json").write_text(json.dumps(unsealed(manifest)))
    assert page.get()[1] != with_one


def test_several_budgets_have_their_table_as_soon_as_it_is_written(tmp_path: Path) -> None:
    make_search(tmp_path / "search")
    for budget in ("3k", "25k"):
        make_training(tmp_path / budget / "train")
    page = LivePage([tmp_path])
    assert b"One network per budget" not in page.get()[0]
    points = [
        {"budget": budget, "folder": budget, "name": "found", "accuracy": 0.9, "parameters": 2000, "epochs": 3}
        | {"multiply_adds": 10_000, "latency": 1.5, "verdict": [f"{budget} was worth it."]}
        for budget in ("3k", "25k")
    ]
    front = {"points": points, "cost": "parameters", "count": 40, "left_out": {}}
    (tmp_path / "front.json").write_text(json.dumps(front))
    live, written = page.get()[0].decode(), write_report(find_runs([tmp_path]), tmp_path / "report.html").read_text()
    for shown in (live, written):
        assert "One network per budget" in shown and "25k was worth it." in shown
    # No other file is served.
    assert 'href="3k/report.html"' in written and "report.html" not in live
    (tmp_path / "front.json").write_text(json.dumps({**front, "cost": "unknown"}))
    assert b"25k" in page.get()[0], "a damaged file does not end the page"


def test_a_taken_port_is_a_clear_error(server: LiveServer, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"\(Address already in use\); choose another --port"):
        LiveServer(LivePage([tmp_path]), server.server_port)


@pytest.mark.skipif(PROGRAM is None, reason="no Chromium here; `make browser` installs it, or set SOFTCELL_BROWSER")
def test_the_page_follows_a_search_and_keeps_what_was_chosen(server: LiveServer, tmp_path: Path) -> None:
    assert PROGRAM is not None
    folder, browser = tmp_path / "runs" / "first", Browser(PROGRAM, tmp_path / "profile")
    try:
        browser.open(server.address)
        browser.wait("document.querySelector('.state').textContent === 'live'")
        browser.run("s = document.querySelector('.epochs'); s.value = 1; s.dispatchEvent(new Event('input')); 0")
        browser.run("document.querySelector('details').open = true; scrollTo(0, 300); 0")
        for name in ("metrics.jsonl", "architecture.jsonl"):
            lines = (folder / name).read_text().splitlines()
            more = {**json.loads(lines[-1]), "epoch": 4}
            (folder / name).write_text("\n".join([*lines, json.dumps(more)]) + "\n")
        browser.wait("document.querySelector('.epochs').max === '4'")
        assert browser.run("document.querySelector('output').textContent") == "epoch 2"
        assert browser.run("document.querySelector('details').open") is True
        assert browser.run("scrollY") == 300
        assert browser.errors == []
        server.shutdown()
        server.server_close()
        browser.wait("document.querySelector('.state').textContent.startsWith('no answer')")
    finally:
        browser.close()


@pytest.mark.parametrize(
    ("status", "recipe", "expected"),
    [
        ("running", {"epochs": 10}, "▶ running, epoch 6/10, 0:16 left"),
        ("interrupted", {"epochs": 10}, "❚❚ interrupted, epoch 6/10"),
        ("running", {"epochs": 0, "time": 60.0}, "▶ running, epoch 6, 0:36 left"),
        ("running", {"epochs": 100, "time": 60.0}, "▶ running, epoch 6/100, 0:36 left"),
        ("finished", {"epochs": 6}, "✓ finished"),
    ],
)
def test_rows_of_running_runs_show_epoch_time_left_and_accuracy(
    status: str, recipe: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    make_search(tmp_path / "a", status=status, recipe=recipe)
    rows = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row["seconds"] = 4.0
    (tmp_path / "a" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(tmp_path / "a", "a")
    page = str(list_of([run]))
    assert f"<td>{expected}</td>" in page
    if status != "finished":
        assert f"{100 * rows[-1]['val_accuracy']:.1f} %" in page and "so far, validation split" in page
        assert run.score is None, "and are compared with nothing"
