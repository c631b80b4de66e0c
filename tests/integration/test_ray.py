"""Sweeps on a real Ray cluster of two nodes; `make integration` installs Ray."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.engine_launch import free_port
from tests.helpers.slurm_cluster import _descendants, until
from tests.helpers.sweep_runs import Sweep, environment, interrupted, search_processes

pytest.importorskip("ray", reason="Ray is not installed (the ray extra)")
pytestmark = pytest.mark.integration


class RayCluster:
    """A head and a worker node, each with one core; everything they write is in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.address = folder, f"127.0.0.1:{free_port()}"
        # Ray's nodes would use a token from the home folder if there is one; clients that name an address would not.
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        self.environment = {**environment(), "RAY_USAGE_STATS_ENABLED": "0", **token}
        self.nodes: list[subprocess.Popen[bytes]] = []

    def begin(self) -> None:
        self.start(
            "--head",
            f"--port={self.address.rpartition(':')[2]}",
            f"--temp-dir={self.folder}",
            "--include-dashboard=false",
        )
        until(lambda: self.alive() == 1, "the head node", 120)
        self.start(f"--address={self.address}")
        until(lambda: self.alive() == 2, "the second node", 120)

    def start(self, *options: str) -> None:
        sizes = ("--num-cpus=1", "--num-gpus=0", "--object-store-memory=80000000", "--block")
        with open(self.folder.with_suffix(".log"), "ab") as log:
            self.nodes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "ray.scripts.scripts", "start", *options, *sizes],
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def alive(self) -> int:
        code = (
            f"import ray; ray.init('{self.address}', log_to_driver=False); print(sum(n['Alive'] for n in ray.nodes()))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], env=self.environment, capture_output=True, text=True, check=False
        )
        return int(done.stdout.split()[-1]) if done.returncode == 0 else 0

    def lose(self, number: int) -> None:
        """Kills a node with everything that runs on it, as a loss of power does."""
        node = self.nodes[number]
        for process in [*_descendants(node.pid), node.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        node.wait()

    def stop(self) -> None:
        for number in reversed(range(len(self.nodes))):
            self.nodes[number].terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.nodes[number].wait(timeout=20)
            self.lose(number)


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    folder = Path(tempfile.mkdtemp(prefix="ray-"))
    found = RayCluster(folder)
    try:
        found.begin()
        yield found
    finally:
        found.stop()
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_suffix(".log").unlink(missing_ok=True)


def test_a_sweep_survives_an_interruption_a_killed_job_and_a_lost_node(cluster: RayCluster, tmp_path: Path) -> None:
    options = ("--on", "ray", "--cluster", f"address={cluster.address}", "--cluster", "num_cpus=1")
    sweep = Sweep(tmp_path, cluster.environment, *options)
    interrupted(sweep, lambda: search_processes(sweep.out))
    running = sweep.start()
    try:
        until(lambda: len(sweep.begun()) == 2, "two searches at the same time", 180)
        os.kill(search_processes(sweep.out)[0], signal.SIGKILL)
        cluster.lose(1)
        output, _ = running.communicate(timeout=400)
    finally:
        running.kill()
    assert running.returncode == 0, output
    assert "failed, will be retried" in output and "4/4" in output
    done = [json.loads(file.read_text())["status"] for file in sweep.out.glob("*/search/run.json")]
    assert done == ["finished"] * 4
    for job in ("darts-nb201-seed0", "gdas-nb201-seed1"):
        sweep.check_same_as_here(job)
