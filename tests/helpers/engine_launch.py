"""Starts a function of a plain module in several processes, as torchrun would, and brings back what it returns.

Run as a script it is one of those processes. The modules import neither pytest nor hypothesis, to start quickly.
"""

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.helpers.search_forks import forks

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOURCE = ROOT / "src"


def environment() -> dict[str, str]:
    """The environment of a child: this checkout's package, one thread, nothing of an outer torchrun."""
    outer = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    inherited = {name: value for name, value in os.environ.items() if name not in outer}
    return {**inherited, "PYTHONPATH": os.pathsep.join([str(SOURCE), str(ROOT)]), "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_ranks(size: int, module: str, function: str, folder: Path) -> list[subprocess.Popen[str]]:
    """Start `function(world, folder)` of `<module>.py` next to this file, in `size` processes."""
    port = str(free_port())
    return [
        subprocess.Popen(
            [sys.executable, str(HERE / "engine_launch.py"), module, function, str(folder)],
            env={
                **environment(),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]


def results(processes: list[subprocess.Popen[str]], folder: Path, timeout: float = 60.0) -> list[Any]:
    """Wait for the processes and return what each function returned; their output is shown on failure."""
    import torch

    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [0] * len(codes), f"exit codes {codes}\n" + "\n--- next rank ---\n".join(outputs)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(len(processes))]


def on_ranks(size: int, module: str, function: str, folder: Path) -> list[Any]:
    """Run `function(world, folder)` in `size` processes and return their results by rank.

    The processes are forked and need not import torch. CUDA does not survive a fork: use `start_ranks` for it.
    """
    import torch

    for job in forks().start_ranks(size, folder, "run_on_rank", lambda rank: (module, function, folder)):
        job.wait().get()
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(size)]


def run_as_rank(module: str, function: str, folder: Path) -> None:
    import torch

    from softcell.engine import distributed

    description = importlib.util.spec_from_file_location(module, HERE / f"{module}.py")
    assert description is not None
    assert description.loader is not None
    loaded = importlib.util.module_from_spec(description)
    description.loader.exec_module(loaded)
    torch.set_num_threads(1)
    world = distributed.start("cpu")
    try:
        torch.save(getattr(loaded, function)(world, folder), folder / f"rank{world.rank}.pt")
    finally:
        distributed.stop()
    # A thread of a group that something still holds would be ended by the interpreter's own end, at times by an abort.
    left = [name for name in thread_names() if "gloo" in name]
    assert not left, f"the process group is left, but its threads run on: {left}"


def thread_names() -> list[str]:
    """The names of this process's threads, those of libraries too; none where the system does not report them."""
    names = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append(path.read_text().strip())
    return names


if __name__ == "__main__":
    run_as_rank(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
