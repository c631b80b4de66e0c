"""Sweeps and searches on a real Slurm cluster of two nodes; `make integration` installs it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.slurm_cluster import Slurm, missing_programs, slurm_cluster, until
from tests.helpers.sweep_runs import Sweep, environment, interrupted

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(missing_programs()), reason=f"not installed: {', '.join(missing_programs())}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="the daemons of Slurm are configured for root"),
]
PAGE = Path(__file__).parents[2] / "docs" / "cluster.md"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: a socket's path has at most 107 characters
    try:
        with slurm_cluster(folder) as found:
            found.environment.update({k: v for k, v in environment().items() if k != "PATH"})
            found.environment["PATH"] = f"{Path(sys.executable).parent}:{found.environment['PATH']}"
            yield found
    finally:
        shutil.rmtree(folder)


def test_a_sweep_survives_an_interruption_a_killed_job_and_a_lost_node(cluster: Slurm, tmp_path: Path) -> None:
    sweep = Sweep(tmp_path, cluster.environment, "--on", "slurm", "--cluster", "timeout_min=30")
    first = interrupted(sweep, cluster.jobs)
    running = sweep.start()
    try:
        until(lambda: len(sweep.begun()) == 2, "two searches at the same time", 180)
        number = next(number for number, state, node in cluster.jobs() if node == "one" and state == "RUNNING")
        cluster.run("scancel", "--signal=KILL", "--full", number)
        until(lambda: number not in [job[0] for job in cluster.jobs()], "the end of the killed job")
        cluster.lose_node("two")
        until(lambda: cluster.states()["two"].startswith("down"), "Slurm's notice of the lost node", 120)
        output, _ = running.communicate(timeout=400)
    finally:
        running.kill()
        cluster.start_node("two")
    assert running.returncode == 0, output
    assert "failed, will be retried" in output and "4/4" in output
    for text in (first, output):
        assert "accounting" not in text and "sacct" not in text, text
    done = [json.loads(file.read_text())["status"] for file in sweep.out.glob("*/search/run.json")]
    assert done == ["finished"] * 4
    for job in ("darts-nb201-seed0", "gdas-nb201-seed1"):
        sweep.check_same_as_here(job)
    until(lambda: cluster.states()["two"] == "idle", "the return of the lost node", 60)


def test_a_search_is_one_job_of_two_nodes_and_resumes_when_it_is_requeued(cluster: Slurm, tmp_path: Path) -> None:
    """With the batch script of the documentation, as it is printed there."""
    script = next(part for part in PAGE.read_text().split("```bash\n") if part.startswith("#!"))
    (tmp_path / "search.sbatch").write_text(script.partition("```")[0])
    tiny = ["darts", "--space", "nb201", "--set", "space.channels=2", "--set", "space.cells_per_stage=1"]
    tiny += ["--batch-size", "128", "--epochs", "20", "--threads", "1", "--precision", "float64", "--device", "cpu"]
    log, metrics = tmp_path / "log.txt", tmp_path / "two" / "metrics.jsonl"
    words = [
        "sbatch",
        "--parsable",
        "--nodes=2",
        f"--chdir={tmp_path}",
        f"--output={log}",
        "search.sbatch",
        "two",
        *tiny,
    ]
    submitted = subprocess.run(words, env=cluster.environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    number = submitted.stdout.strip()

    def has_ended() -> bool:
        return number not in [job[0] for job in cluster.jobs()]

    def has_begun() -> bool:
        return metrics.exists() and len(metrics.read_text().splitlines()) > 2

    until(lambda: has_begun() or has_ended(), "three epochs", 180)
    assert has_begun(), log.read_text()
    assert [node for job, _, node in cluster.jobs() if job == number] == ["one,two"]
    cluster.run("scontrol", "requeue", number)
    until(has_ended, "the end of the job", 400)
    text = log.read_text()
    assert json.loads((tmp_path / "two" / "run.json").read_text())["status"] == "finished", text
    assert "resuming at epoch" in text, text
    words = [sys.executable, "-m", "softcell", "search", *tiny, "--out", "one", "--quiet"]
    subprocess.run(words, cwd=tmp_path, env=environment(), check=True)
    rows = [[json.loads(line) for line in (tmp_path / n / "metrics.jsonl").open()] for n in ("one", "two")]
    assert len(rows[0]) == len(rows[1]) == 20
    for one, two in zip(*rows, strict=True):
        assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-8)
