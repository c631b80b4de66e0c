"""`python predict.py image.jpg ...`, the exported file as a command."""

from __future__ import annotations

import os
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from softcell.api import export
from softcell.app.cli.main import run

Answer = tuple[int, str, str]


@pytest.fixture(scope="module")
def file(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(trained, "python", tmp_path_factory.mktemp("written")).files[1]


@pytest.fixture
def call(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """Runs the file in a folder with two pictures and gives its exit code and what it says."""
    monkeypatch.chdir(tmp_path)
    for number in range(2):
        pixels = np.random.default_rng(number).integers(0, 256, (9, 12), dtype=np.uint8)
        Image.fromarray(pixels).save(f"{number}.png")

    def model(*arguments: str) -> Answer:
        monkeypatch.setattr(sys, "argv", [str(file), *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(file), run_name="__main__")
        said = capsys.readouterr()
        return int(str(ended.value.code)), said.out, said.err

    return model


def test_classes_of_pictures_are_printed_with_file_names_for_several(call: Callable[..., Answer]) -> None:
    first, second = (call(name) for name in ("0.png", "1.png"))
    assert first[::2] == second[::2] == (0, "")
    assert len(first[1].splitlines()) == 3 and first[1] != second[1]
    assert call("0.png", "1.png") == (0, f"0.png\n{first[1]}1.png\n{second[1]}", "")


def test_unreadable_files_are_named_and_the_others_classified(call: Callable[..., Answer]) -> None:
    Path("text.png").write_text("no picture")
    whole = Path("0.png").read_bytes()
    Path("half.png").write_bytes(whole[: len(whole) // 2])
    Image.open("0.png").save("damaged.bmp")
    damaged = bytearray(Path("damaged.bmp").read_bytes())
    damaged[46] ^= 0xFF  # the size of the palette: Pillow raises a ValueError
    Path("damaged.bmp").write_bytes(damaged)
    Path("folder").mkdir()
    code, out, error = call("nowhere.png", "0.png", "text.png", "half.png", "damaged.bmp", "folder", "1.png")
    assert code == 2
    assert [line for line in out.splitlines() if "%" not in line] == ["0.png", "1.png"]
    names = ("nowhere.png", "text.png", "half.png", "damaged.bmp", "folder")
    assert [line.split(" cannot be read as an image: ")[0] for line in error.splitlines()] == list(names)
    assert call("nowhere.png") == (2, "", "nowhere.png cannot be read as an image: No such file or directory\n")


def test_a_missing_package_raises_an_import_error(call: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError):
        call("0.png")


def test_usage_is_printed_without_pictures_and_for_help(call: Callable[..., Answer]) -> None:
    code, out, error = call()
    assert (code, out) == (2, "") and "usage: predict.py [-h] IMAGE" in error
    code, out, error = call("--help")
    assert (code, error) == (0, "") and "usage: predict.py [-h] IMAGE" in out


def test_a_closed_pipe_is_no_error(call: Callable[..., Answer], file: Path) -> None:
    """As `head` does; Python keeps lines back, and complains once more at its end if it cannot write them."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    running = subprocess.Popen(
        [sys.executable, str(file), "0.png", "1.png"],
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stdout is not None and running.stderr is not None
    running.stdout.close()
    assert running.stderr.read() == ""
    assert running.wait(timeout=60) == 0


def test_the_command_that_an_export_prints_classifies_an_image(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["export", str(trained), "--to", "python", "--out", "my model"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("use ")]
    command, _, imports = line.removeprefix("use").strip().partition(", or: ")
    Image.fromarray(np.zeros((8, 8), np.uint8)).save("image.jpg")
    _, *words = shlex.split(command)
    shown = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True).stdout
    assert "%" in shown
    subprocess.run([sys.executable, "-c", f"{imports}; load()"], cwd="my model", check=True)
