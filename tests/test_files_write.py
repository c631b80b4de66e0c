"""Files are written atomically."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from softcell.engine.metrics import History
from softcell.errors import UserError
from softcell.files import atomic_write_bytes, atomic_write_text


def test_a_file_is_replaced_without_leftover_files(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("number", "way_out"), [(errno.EACCES, "Make it writable or"), (errno.ENOSPC, "Free some space or")]
)
def test_the_way_out_of_a_failed_write_fits_its_cause(
    number: int, way_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(UserError, match=f"{os.strerror(number)}.* {way_out} choose another folder"):
        atomic_write_text(tmp_path / "a.txt", "x")


def test_a_link_in_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    """A run folder from an untrusted source must not cause writes outside of it."""
    (tmp_path / "precious").write_text("mine")
    (tmp_path / ".a.txt.tmp").symlink_to(tmp_path / "precious")
    atomic_write_text(tmp_path / "a.txt", "new")
    (tmp_path / "a.txt").unlink()
    (tmp_path / "a.txt").symlink_to(tmp_path / "precious")
    atomic_write_text(tmp_path / "a.txt", "newer")
    assert (tmp_path / "precious").read_text() == "mine" and (tmp_path / "a.txt").read_text() == "newer"


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "a/b", "", ".hidden", 3])
def test_records_of_a_checkpoint_stay_inside_the_folder(name: Any, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(UserError, match="named like a file"):
        History({name: ["{}"]}).write(tmp_path / "run")
    assert [path.name for path in tmp_path.rglob("*")] == ["run"]
