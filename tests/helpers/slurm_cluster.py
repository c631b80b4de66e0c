"""A Slurm cluster of several nodes on this machine: munged, slurmctld and one slurmd per node, in one folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "squeue", "sinfo")


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])


def until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Wait for a condition; daemons and schedulers give no other sign."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.2)


@dataclass
class Slurm:
    """A running cluster; its commands need `environment`."""

    folder: Path
    nodes: tuple[str, ...]
    environment: dict[str, str]
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def run(self, *words: str) -> str:
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout

    def states(self) -> dict[str, str]:
        """By node, `idle`, `alloc`, `down`, ..."""
        lines = self.run("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        return dict(line.split() for line in lines)

    def jobs(self) -> list[tuple[str, str, str]]:
        """Number, state and node of each job in the queue."""
        lines = self.run("squeue", "--noheader", "--format=%i|%T|%N").splitlines()
        return [(number, state, node) for number, state, node in (line.split("|") for line in lines)]

    def start(self, name: str, *words: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as log:
            self.daemons[name] = subprocess.Popen(
                words, env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def start_node(self, node: str) -> None:
        self.start(node, "slurmd", "-D", "-N", node, "-f", str(self.folder / "slurm.conf"))

    def lose_node(self, node: str) -> None:
        """Kills the daemon of a node and all processes that run on it, as a loss of power does."""
        daemon = self.daemons.pop(node)
        children = [*_descendants(daemon.pid), *self._steps(node)]
        daemon.kill()
        daemon.wait()
        for process in children:
            for each in [process, *_descendants(process)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)

    def _steps(self, node: str) -> list[int]:
        """The processes of jobs on a node: children of `slurmstepd`, which detaches from its slurmd."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_step = b"slurmstepd" in (entry / "cmdline").read_bytes()
                conf = str(self.folder).encode()
                environment = (entry / "environ").read_bytes()
                if is_step and conf in environment + (entry / "cmdline").read_bytes():
                    for child in _descendants(int(entry.name)):
                        with contextlib.suppress(OSError):
                            if f"SLURMD_NODENAME={node}\0".encode() in Path(f"/proc/{child}/environ").read_bytes():
                                found += [int(entry.name), child]
        return list(dict.fromkeys(found))

    def stop(self) -> None:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", "--user=root", "--signal=KILL")
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _descendants(process: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                found += [int(child), *_descendants(int(child))]
    return found


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


@contextlib.contextmanager
def slurm_cluster(folder: Path, nodes: tuple[str, ...] = ("one", "two")) -> Iterator[Slurm]:
    """Starts the daemons and stops them, by their own processes, at the end."""
    host, controller, *ports = socket.gethostname(), *_free_ports(1 + len(nodes))
    environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    listed = "".join(
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1\n"
        for node, port in zip(nodes, ports, strict=True)
    )
    # Linux has no process table per node here, and root runs everything: no cgroups, no task plugin, no accounting.
    (folder / "slurm.conf").write_text(
        f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
ReturnToService=2
SlurmdTimeout=10
KillWait=20
MinJobAge=10
UnkillableStepTimeout=20
{listed}PartitionName=all Nodes=ALL Default=YES State=UP MaxTime=INFINITE
"""
    )
    cluster = Slurm(folder, nodes, environment)
    try:
        # --force: munged refuses to run as root otherwise.
        cluster.start(
            "munged",
            *("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket"),
            *(
                f"--pid-file={folder}/munged.pid",
                f"--log-file={folder}/munged.log",
                f"--seed-file={folder}/munged.seed",
            ),
        )
        until((folder / "munge.socket").exists, "the socket of munged")
        cluster.start("slurmctld", "slurmctld", "-D", "-f", str(folder / "slurm.conf"))
        for node in nodes:
            cluster.start_node(node)

        def ready() -> bool:
            with contextlib.suppress(AssertionError):
                return set(cluster.states().values()) == {"idle"}
            return False

        until(ready, f"idle nodes; see the logs in {folder}")
        yield cluster
    finally:
        cluster.stop()
