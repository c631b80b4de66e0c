"""Files change in one step."""

from pathlib import Path

import pytest

from softcell.engine.files import atomic_write_bytes, atomic_write_text
from softcell.errors import UserError


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    atomic_write_text(path, "old")
    atomic_write_text(str(path), "größer\r\n\n")
    assert path.read_bytes() == "größer\r\n\n".encode()
    atomic_write_bytes(path, b"\x00")
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]


def test_a_reader_never_sees_a_half_written_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    atomic_write_text(path, "old")
    seen: list[str] = []
    monkeypatch.setattr("os.fsync", lambda descriptor: seen.append(path.read_text()))
    atomic_write_text(path, "new")
    assert seen == ["old", "new"]


def test_a_missing_folder_is_explained(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be writable"):
        atomic_write_text(tmp_path / "none" / "a.txt", "x")
