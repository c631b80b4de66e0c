"""The page of promises names tests that exist. Promises without a test elsewhere are tested here."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest

from softcell.app.cli.main import run

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_page_of_promises_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")))
    files = (ROOT / "tests").rglob("test_*.py")
    known = {name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text("utf-8"), re.MULTILINE)}
    assert len(named) > 25
    assert named - known == set()


def test_nothing_is_read_over_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def refuse(*given: Any, **named: Any) -> Any:
        asked.append(given)
        raise OSError("no network here")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.chdir(tmp_path)
    tiny = ("--set", "space.channels=2", "--set", "batch_size=256", "--epochs", "1", "--threads", "1", "-q")
    assert run(["search", "darts", "--space", "nb201", *tiny, "--out", "found"]) == 0
    assert run(["train", "found", *tiny, "--out", "trained"]) == 0
    assert run(["export", "trained", "--to", "safetensors"]) == 0
    assert run(["report", "found", "trained", "--out", "page.html"]) == 0
    assert asked == []
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"""(?:src|href)=["']?https?:""", page), "and a report fetches nothing"
