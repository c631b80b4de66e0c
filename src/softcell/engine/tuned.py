"""The precision that suits a device, found by timing real steps once and remembered per device and job.

Short numbers help where memory traffic and matrix units decide, and cost time where they are emulated: nobody can tell
without trying. The choice is made before a run and becomes part of its recipe, so that it is never made twice for one
run.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from softcell.engine.capture import WARMUP
from softcell.engine.distributed import World
from softcell.engine.files import atomic_write_text
from softcell.engine.task import Task

CANDIDATES = ("float32", "bfloat16")
GAIN = 1.1  # short numbers must be at least so much faster: a tie goes to float32
TIMED = 5


def choose_precision(job: str, world: World, make: Callable[[str], Task], notify: Callable[[str], None]) -> str:
    """The precision for `job` on this run's device.

    job: what makes two jobs alike, as text. make: the task computing in a precision; it is thrown away, and the random
    numbers that it draws are given back.
    """
    if world.device.type != "cuda":
        return "float32"
    known = _remembered()
    key = f"{torch.cuda.get_device_name(world.device)}; torch {torch.__version__}; {job}"
    if key in known:
        return known[key]
    if world.size > 1:
        notify("precision=auto: nothing is known of this device, and several processes do not try; using float32")
        return "float32"
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        return "float32"
    times = {}
    for precision in CANDIDATES:
        with torch.random.fork_rng(devices=[world.device]):
            times[precision] = time_steps(make(precision), world.device)
        torch.cuda.empty_cache()
    chosen = "bfloat16" if times["bfloat16"] * GAIN < times["float32"] else "float32"
    each = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in times.items())
    notify(f"precision=auto: one step takes {each} on this device; using {chosen} (remembered in {cache_file()})")
    _remember(key, chosen)
    return chosen


def time_steps(task: Task, device: torch.device) -> float:
    """Median seconds of a step of a fresh task, after those in which it is recorded."""
    task.begin_epoch(0)
    batches = itertools.cycle(list(itertools.islice(task.batches(0, 0), WARMUP + TIMED)))
    for batch in itertools.islice(batches, WARMUP + 2):
        task.step(batch)
    seconds = []
    for batch in itertools.islice(batches, TIMED):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        task.step(batch)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def cache_file() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "softcell" / "precision.json"


def _remembered() -> dict[str, str]:
    """What was found before; a file that cannot be read counts for nothing."""
    try:
        data: Any = json.loads(cache_file().read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(data, dict):
        return {}
    return {str(key): value for key, value in data.items() if value in CANDIDATES}


def _remember(key: str, precision: str) -> None:
    file = cache_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(file, json.dumps({**_remembered(), key: precision}, indent=2) + "\n")
    except OSError:
        pass  # a home that cannot be written to: the next run tries again
