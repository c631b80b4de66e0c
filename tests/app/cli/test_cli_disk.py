"""Full disks, folders in use, and files readable by everyone."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

import softcell
from softcell import api, files
from softcell.app.cli.main import run
from softcell.engine.task import EpochEnded
from softcell.errors import UserError
from tests.helpers.cli_calls import CELL, TINY, TINY_TRAIN, Softcell, process
from tests.helpers.full_disk import grow, small_disk


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert run(["train", CELL, *TINY_TRAIN, "--out", str(folder), "-q"]) == 0
    return folder


def status(folder: Path) -> str:
    return str(json.loads((folder / "run.json").read_text())["status"])


def without_time(folder: Path) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in rows]


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of files for which there is no space; at first none."""
    names: set[str] = set()
    real = os.fsync

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if any(name in path.name for name in names):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("which file is written cannot be seen on this system")
    monkeypatch.setattr(files.os, "fsync", fsync)
    return names


SEARCH = ("search", *TINY, "--epochs", "3", "-q")
TRAIN = ("train", CELL, *TINY_TRAIN, "-q")
TEACH = ("teacher", "resnet18", "--set", "classifier.width=4", "--epochs", "1", "--batch-size", "256", "-q")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (SEARCH, "checkpoint.bin"),
        (SEARCH, "metrics.jsonl"),
        (SEARCH, "genotype.json"),
        (TRAIN, "model.safetensors"),
        (TRAIN, "predictions.safetensors"),
        (TEACH, "model.safetensors"),
    ],
)
def test_a_full_disk_fails_in_one_line_and_the_run_resumes_when_there_is_space(
    command: tuple[str, ...], name: str, call: Softcell, full: set[str]
) -> None:
    full.add(name)
    answer = call(*command, "--out", "run")
    assert answer.code == 2 and answer.error.count("\n") == 1, answer.error
    assert "No space left on device" in answer.error and name in answer.error
    assert status(Path("run")) == "failed"
    assert not list(Path("run").glob(".*")), "neither a lock nor half a file stays"
    full.clear()
    assert call(command[0], "--resume", "run", "-q").code == 0
    assert status(Path("run")) == "finished"


def test_a_search_on_a_disk_that_fills_up_resumes_bit_for_bit(call: Softcell, tmp_path: Path) -> None:
    assert call(*SEARCH, "--out", "whole").code == 0
    with small_disk(tmp_path / "disk", "200k") as disk:
        answer = call(*SEARCH, "--out", disk / "run")
        assert answer.code == 2 and "No space left on device" in answer.error, answer.error
        assert status(disk / "run") == "failed"
        still = call("search", "--resume", disk / "run", "-q")
        assert still.code == 2 and status(disk / "run") == "failed"
        grow(disk, "20m")
        assert call("search", "--resume", disk / "run", "-q").code == 0
        assert status(disk / "run") == "finished"
        assert (disk / "run" / "genotype.json").read_bytes() == Path("whole/genotype.json").read_bytes()
        assert without_time(disk / "run") == without_time(Path("whole"))


def test_a_run_on_a_disk_filled_by_others_records_that_it_failed(tmp_path: Path) -> None:
    """Where not one byte is left when it fails: the lock has kept some."""

    def fill(event: object) -> None:
        if isinstance(event, EpochEnded):
            with contextlib.suppress(OSError), open(tmp_path / "disk" / "other", "wb", buffering=0) as other:
                while other.write(b"x" * 512):
                    pass

    with small_disk(tmp_path / "disk", "4m") as disk:
        with pytest.raises(UserError, match="No space left on device"):
            api.search(
                "darts",
                space="nb201",
                epochs=3,
                batch_size=128,
                space_settings={"channels": 2},
                out=disk / "run",
                on_event=fill,
            )
        assert os.statvfs(disk).f_bavail * os.statvfs(disk).f_bsize < 128 * 1024 and status(disk / "run") == "failed"
        (disk / "other").unlink()
        assert api.search(out=disk / "run", resume=True).genotype is not None


def test_a_full_disk_is_reported_before_a_run_starts(call: Softcell, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "16k") as disk:
        answer = call(*SEARCH, "--out", disk / "run")
        assert answer.code == 2 and "No space left" in answer.error and answer.error.count("\n") == 1
        assert list(disk.iterdir()) == []


def test_an_export_to_a_full_disk_leaves_no_files_and_one_error(call: Softcell, trained: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "76k") as disk:
        (disk / "out").mkdir()
        # In a separate process: torch aborts the one that writes a program to a full disk.
        done = process("export", trained, "--to", "torch-export", "--out", disk / "out", "-q", cwd=tmp_path)
        said = done.communicate()[1]
        assert done.returncode == 2 and "No space left on device" in said and said.count("\n") == 1, said
        assert list((disk / "out").iterdir()) == []
        for kind in ("python", "safetensors", *(("onnx",) if importlib.util.find_spec("onnxscript") else ())):
            answer = call("export", trained, "--to", kind, "--out", disk / "out", "-q")
            assert answer.code == 2 and "No space left on device" in answer.error, answer.error
            assert list((disk / "out").iterdir()) == []


def test_an_export_whose_second_file_fails_removes_the_first(call: Softcell, trained: Path, full: set[str]) -> None:
    for kind, name in (("python", "model.py"), ("safetensors", "model.json")):
        full.add(name)
        answer = call("export", trained, "--to", kind, "--out", "out")
        assert answer.code == 2 and not Path("out").exists(), answer.error
    full.clear()
    assert call("export", trained, "--to", "python", "--out", "out").code == 0
    assert sorted(path.name for path in Path("out").iterdir()) == ["model.py", "model.safetensors", "predict.py"]


@pytest.mark.exhaustive
def test_every_command_rejects_a_folder_in_use_and_names_it(call: Softcell, tmp_path: Path) -> None:
    first = process("search", *TINY, "--epochs", "100000", "--out", "run", "-q", cwd=tmp_path)
    try:
        until = time.monotonic() + 120
        while not (tmp_path / "run" / "checkpoint.bin").exists():
            assert first.poll() is None and time.monotonic() < until, first.communicate()[1]
            time.sleep(0.05)
        for command in (
            ("search", "--resume", "run", "-q"),
            ("search", *TINY, "--epochs", "1", "--out", "run", "--overwrite", "-q"),
            ("train", CELL, *TINY_TRAIN, "--out", "run", "--overwrite", "-q"),
            (*TEACH, "--out", "run", "--overwrite"),
        ):
            answer = call(*command)
            assert answer.code == 2 and f"in use by process {first.pid} on " in answer.error, answer.error
        assert status(tmp_path / "run") == "running"
        first.send_signal(signal.SIGTERM)
        assert first.wait(60) == 143
    finally:
        first.kill()
    assert not (tmp_path / "run" / ".lock").exists() and status(tmp_path / "run") == "interrupted"


@pytest.mark.exhaustive
def test_ranks_of_torchrun_respect_a_lock(tmp_path: Path) -> None:
    source = str(Path(softcell.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "softcell"]
    hold = (
        "import sys\nfrom softcell.engine.lock import locked\nwith locked('run'): print(flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", hold], cwd=tmp_path, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert other.stdout is not None
    other.stdout.readline()
    command = ["search", *TINY, "--epochs", "1", "--device", "cpu", "--out", "run", "-q"]
    rejected = subprocess.run([*start, *command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert rejected.returncode != 0 and f"in use by process {other.pid}" in rejected.stderr
    assert not (tmp_path / "run" / "run.json").exists()
    other.communicate()


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_every_file_of_a_run_follows_the_umask(mask: int, call: Softcell) -> None:
    before = os.umask(mask)
    try:
        assert call(*TRAIN, "--out", "run").code == 0
        assert call("export", "run", "--to", "python", "--to", "torch-export", "--out", "out", "-q").code == 0
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for place in ("run", "out") for path in Path(place).iterdir()}
    assert {name for name, mode in modes.items() if mode != 0o666 & ~mask} == set()


def test_overwriting_several_seeds_touches_no_folder_of_others(call: Softcell) -> None:
    Path("mine").mkdir()
    Path("mine/genotype.json").write_text("mine")
    answer = call("search", *TINY, "--epochs", "1", "--seeds", "2", "--out", "mine", "--overwrite", "-q")
    assert answer.code == 2 and Path("mine/genotype.json").read_text() == "mine"
    assert [path.name for path in Path("mine").iterdir()] == ["genotype.json"]


def test_overwriting_keeps_and_names_files_of_others(call: Softcell) -> None:
    assert call("search", *TINY, "--epochs", "1", "--out", "run", "-q").code == 0
    made = {path.name for path in Path("run").iterdir()}
    assert made == files.listed_files(Path("run")), "everything is listed"
    for name in ("notes.json", "figure.svg"):
        (Path("run") / name).write_text("mine")
    with pytest.warns(UserWarning, match="do not belong to the run and are kept: figure.svg, notes.json"):
        assert call("search", *TINY, "--epochs", "1", "--seed", "1", "--out", "run", "--overwrite", "-q").code == 0
    assert (Path("run") / "notes.json").read_text() == "mine"
    assert json.loads(Path("run/run.json").read_text())["seed"] == 1
