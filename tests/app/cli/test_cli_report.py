"""The commands that present runs: report, compare, watch."""

from __future__ import annotations

import http.client
import json
import signal
import sys
from pathlib import Path

import pytest

from tests.helpers.cli_calls import CELL, TINY_TRAIN, Softcell, process
from tests.helpers.unsealed import unsealed


def test_every_run_leaves_a_report_and_report_joins_them(call: Softcell, searched: Path, tmp_path: Path) -> None:
    assert "Architecture weights" in (searched / "report.html").read_text()
    answer = call("train", CELL, *TINY_TRAIN, "--random", "1", "--out", "runs/t")
    assert answer.code == 0
    own = (tmp_path / "runs/t/report.html").read_text()
    assert "Most confident mistakes" in own and "Comparison with random architectures" in own
    assert "runs/t/report.html" in answer.out

    assert call("report", "runs/t").code == 0
    assert (tmp_path / "runs/t/report.html").read_text() == own
    assert call("report", "runs", "--out", "deep/all.html").code == 0
    assert "2 runs" in (tmp_path / "deep/all.html").read_text()
    again = call("report", "runs", "--out", "deep/all.html")
    assert (again.code, "--overwrite" in again.error) == (2, True)
    assert call("report", "runs", "--out", "deep/all.html", "--overwrite").code == 0


def test_bad_folders_are_one_line(call: Softcell, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "run.json").write_text("{")
    for command in ("report", "compare"):
        for folder, expected in (
            ("nowhere", "no such folder"),
            ("empty", "holds no run"),
            ("damaged", "damaged/run.json: not valid JSON"),
        ):
            answer = call(command, folder)
            assert (answer.code, answer.error.count("\n"), expected in answer.error) == (2, 1, True)
    assert "no such folder" in call("watch", "nowhere").error
    assert call("report", "damaged", "--out", ".").code == 2


def test_compare_writes_tables_markdown_and_csv(call: Softcell, searched: Path, tmp_path: Path) -> None:
    table = call("compare", searched)
    assert table.code == 0
    assert "accuracy of supernet, validation split, data digits" in table.out
    assert call("compare", searched, "--format", "markdown").out.startswith("| group | n |")
    assert call("compare", searched, "--format", "csv", "--of", "runs").out.startswith("run,group,measure,seed,")
    assert call("compare", searched, "--out", "table.txt").code == 0
    assert "darts in nb201" in (tmp_path / "table.txt").read_text()
    assert call("compare", searched, "--of", "pairs").code == 2
    half = {**unsealed(json.loads((searched / "run.json").read_text())), "status": "interrupted"}
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "run.json").write_text(json.dumps(half))
    answer = call("compare", "half")
    assert (answer.code, "status interrupted" in answer.error) == (2, True)


@pytest.mark.parametrize("how", [signal.SIGINT])
def test_watch_serves_until_interrupted(searched: Path, tmp_path: Path, how: signal.Signals) -> None:
    running = process("watch", searched, "--port", "0", cwd=tmp_path)
    assert running.stdout is not None and running.stderr is not None
    try:
        line = running.stdout.readline()
        port = int(line.split("127.0.0.1:")[1].split("/")[0])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/")
        assert "Architecture weights" in connection.getresponse().read().decode()
        running.send_signal(how)
        assert running.wait(timeout=30) == 0
        assert "Stopped watching; the runs continue." in running.stdout.read()
        assert running.stderr.read() == ""
    finally:
        running.kill()
        running.wait()


def test_tensorboard_is_logged_for_every_run_or_rejected_before_it_starts(
    call: Softcell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "tensorboard", None)
        without.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
        answer = call("train", CELL, *TINY_TRAIN, "--tensorboard", "--out", "t")
        assert (answer.code, "pip install 'softcell[tensorboard]'" in answer.error) == (2, True)
        assert not (tmp_path / "t").exists()
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed (the tensorboard extra)")
    assert call("train", CELL, *TINY_TRAIN, "--tensorboard", "--random", "1", "--out", "t", "-q").code == 0
    for folder in ("t", "t/random-1"):
        assert len(list((tmp_path / folder / "tensorboard").glob("events.out.tfevents.*"))) == 1


def test_a_dry_run_of_a_sweep_lists_its_jobs_below_the_given_folder(call: Softcell, tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(
        "{methods: [darts], spaces: [nb201], seeds: 2, search: {data: digits, epochs: 1}}"
    )
    answer = call("sweep", "plan.yaml", "--out", "runs/plan", "--dry-run")
    assert answer.code == 0
    assert answer.out.splitlines() == [f"to do     runs/plan/darts-nb201-seed{seed}" for seed in (0, 1)]
    assert not (tmp_path / "runs").exists()
