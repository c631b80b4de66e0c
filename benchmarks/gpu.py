"""The GPU measurements of `python -m benchmarks`: search and training steps, eager and fast, in one run.

Steps are those of the real tasks, from gathering images to the optimisers; `plain` is the formulation of other
toolkits: one module per candidate, channels-first, float32, eager, without data.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.steps import PAPER, Case, batch, once, step, step_state
from benchmarks.traffic import bandwidth, traffic
from softcell.arch import Genotype, notation
from softcell.data import load
from softcell.data.batches import Feeds
from softcell.engine.capture import WARMUP
from softcell.engine.interleave import RunState
from softcell.engine.session import Session, open_session
from softcell.engine.task import Task
from softcell.evaluate import resolve as resolve_training
from softcell.evaluate.task import TrainTask
from softcell.search import resolve
from softcell.search.build import build_task as search_task
from softcell.search.steps import bilevel
from softcell.spaces import build_space
from softcell.spaces.execution import modules_only
from tests.reference.published_genotypes import DARTS_V2

VARIANTS: dict[str, dict[str, Any]] = {
    "modules": {"fused": False, "engine": "graph", "precision": "float32"},
    "modules bf16": {"fused": False, "engine": "graph", "precision": "bfloat16"},
    "fused": {"fused": True, "engine": "graph", "precision": "float32"},
    "fused bf16": {"fused": True, "engine": "graph", "precision": "bfloat16"},
}
TRAINING_MODES: dict[str, dict[str, Any]] = {
    "plain": {"engine": "eager", "precision": "float32", "fused": False, "channels_first": True},
    "modules": {"engine": "graph", "precision": "float32", "fused": False},
    "modules bf16": {"engine": "graph", "precision": "bfloat16", "fused": False},
    "fused bf16": {"engine": "graph", "precision": "bfloat16", "fused": True},
}


@contextmanager
def made_data(count: int = 4096, size: int = 32) -> Iterator[str]:
    """A file of random images, CIFAR-sized by default."""
    rng = np.random.default_rng(0)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "random.npz"
        images = rng.integers(0, 256, (count, size, size, 3), dtype=np.uint8)
        labels = np.arange(count) % 10
        np.savez(path, x_train=images, y_train=labels, x_test=images[:64], y_test=labels[:64])
        yield str(path)


def made_search(data: str, case: Case, session: Session, **settings: Any) -> Task:
    given = {"method": case.method, "space": case.space, "data": data, "scale": "paper", "batch_size": case.batch}
    recipe = resolve({**given, "device": "cuda", **settings})
    dataset = load(recipe.data)
    parts = recipe.parts(dataset.train)
    return search_task(recipe, dataset, parts, session, lambda event: print(getattr(event, "text", event)))


def made_training(
    data: str, session: Session, genotype: Genotype, *, channels_first: bool = False, **settings: Any
) -> TrainTask:
    recipe = resolve_training(genotype, {"data": data, "device": "cuda", **settings})
    dataset, space = load(recipe.data), build_space(genotype.space, recipe.space_settings)
    auxiliary = recipe.auxiliary > 0
    network = session.place(space.network(genotype, dataset.shape, dataset.num_classes, auxiliary=auxiliary))
    if channels_first:
        network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    feeds = Feeds(dataset, recipe.batch_size, recipe.seed, session.device, session.dtype)
    batches = feeds.training(torch.arange(len(dataset.train)), dataset.augment)
    return TrainTask(recipe, network, session.world, train=batches, held=None, notify=print)


def started(task: Task) -> Iterator[Any]:
    """Batches of a task in its second epoch, when every schedule is active."""
    task.begin_epoch(1)
    return cycle(list(task.batches(1, 0)))


def measure(task: Task, rounds: int) -> dict[str, Any]:
    """Milliseconds, kernels and busy time of a step, and its memory.

    `peak_gb`: peak memory of the tensors in a step, before it is captured. `held_gb`: device memory held by the process
    while the graph is replayed: weights, the graph's memory pool and caches.
    `first_ms`: the very first step, which compiles kernels that are not cached from an earlier run.
    """
    batches = started(task)
    first = next_milliseconds(task, batches)
    torch.cuda.reset_peak_memory_stats()
    task.step(next(batches))
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    for one in islice(batches, WARMUP + 2):
        task.step(one)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()  # from here on steps are replayed
    times = [next_milliseconds(task, batches) for _ in range(rounds)]
    held = torch.cuda.max_memory_reserved()
    events = _kernels(lambda: task.step(next(batches)))
    return {
        "ms": statistics.median(times),
        "first_ms": first,
        "busy_ms": _busy(events) / 1e3,
        "kernels": len(events),
        "peak_gb": peak / 1e9,
        "held_gb": held / 1e9,
        "longest": _longest(events),
    }


def _busy(events: list[Any]) -> float:
    """Microseconds during which at least one kernel ran."""
    busy, until = 0.0, -math.inf
    for begin, end in sorted((e.time_range.start, e.time_range.end) for e in events):
        busy += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return busy


def _longest(events: list[Any], count: int = 25) -> list[dict[str, Any]]:
    """The kernels with the largest share of a step, by name: candidates for optimisation."""
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for e in events:
        spent[e.name[:80]] += e.device_time / 1e3
        calls[e.name[:80]] += 1
    return [{"kernel": name, "ms": ms, "calls": calls[name]} for name, ms in spent.most_common(count)]


def next_milliseconds(task: Task, batches: Iterator[Any]) -> float:
    one = next(batches)
    torch.cuda.synchronize()
    began = time.perf_counter()
    task.step(one)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began)


def _kernels(work: Callable[[], object]) -> list[Any]:
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        work()
        torch.cuda.synchronize()
    return [e for e in record.events() if e.device_type == DeviceType.CUDA]


def plain(case: Case, session: Session) -> dict[str, Any]:
    actors, data = step_state(case, session.device, plain=True), batch(case, session.device)
    torch.cuda.reset_peak_memory_stats()
    once(actors, data, session.device)
    timings = [once(actors, data, session.device) for _ in range(3)]
    held = torch.cuda.max_memory_reserved()
    events = _kernels(lambda: step(actors, data, case.regime))
    return {
        "ms": 1e3 * statistics.median(t.wall_seconds for t in timings),
        "busy_ms": sum(e.device_time for e in events) / 1e3,
        "kernels": len(events),
        "peak_gb": max(t.peak_bytes for t in timings) / 1e9,
        "held_gb": held / 1e9,
    }


def floor(case: Case, session: Session) -> dict[str, float]:
    """Bytes moved by a bfloat16 step without fusion, and how long this device takes to move them."""
    actors, data = step_state(case, session.device, plain=False), batch(case, session.device)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            bilevel(actors, data, data)

    with modules_only():
        step()
        moved = traffic(step)
    return {"bytes": float(moved), "ms": 1e3 * moved / bandwidth(session.device)}


def busy_share(task: Task, steps: int) -> float:
    """The fraction of time in which the device computes while a search loads, augments and steps."""
    batches = started(task)
    for one in islice(batches, WARMUP + 3):
        task.step(one)
    torch.cuda.synchronize()

    def work() -> None:
        for one in islice(batches, steps):
            task.step(one)

    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    wall = time.perf_counter() - began
    # The profiler slows the host down; this is the share of kernels without it.
    busy = sum(e.device_time for e in _kernels(work)) / 1e6
    return float(min(1.0, busy / wall))


def together(data: str, case: Case, session: Session, count: int, seconds: float) -> float:
    """Milliseconds per step of one search when `count` searches share the device, each with separate state."""
    states = [RunState(session.device) for _ in range(count)]
    tasks: list[tuple[RunState, Task, Iterator[Any]]] = []
    for state in states:
        with state.active():
            task = made_search(data, case, session, **VARIANTS["fused bf16"])
            batches = started(task)
            for one in islice(batches, WARMUP + 2):
                task.step(one)
            tasks.append((state, task, batches))
    torch.cuda.synchronize()
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(5):
            for state, task, batches in tasks:
                with state.active():
                    task.step(next(batches))
            done += count
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / done


def forget() -> None:
    """Frees the memory of earlier measurements: captured graphs are in reference cycles, which keep their memory."""
    gc.collect()
    torch.cuda.empty_cache()


def run(rounds: int, spaces: list[str], say: Callable[[str], None]) -> dict[str, Any]:
    """All measurements, as plain data."""
    found: dict[str, Any] = {"steps": [], "training": [], "together": [], "floor": {}, "busy_share": {}}
    opened = open_session(device="cuda", seed=0, precision="float32", deterministic=False, threads=0)
    with opened as session, made_data() as data:
        for case in (case for case in PAPER if case.space in spaces):
            found["floor"][case.space] = floor(case, session)
            forget()
            rows = {"plain": plain(case, session)}
            for name, settings in VARIANTS.items():
                forget()
                rows[name] = measure(made_search(data, case, session, **settings), rounds)
            for name, row in rows.items():
                found["steps"].append({"space": case.space, "variant": name, **row})
                memory = f"{row['peak_gb']:.2f} GB (held {row['held_gb']:.2f})"
                say(f"{case.space} {name}: {row['ms']:.1f} ms, {memory}, {row['kernels']} kernels")
            task = made_search(data, case, session, **VARIANTS["fused bf16"])
            found["busy_share"][case.space] = busy_share(task, 40)
            del task
            for count in (1, 2, 4, 8):
                forget()
                each = together(data, case, session, count, 3.0)
                found["together"].append({"space": case.space, "searches": count, "ms_per_step": each})
                say(f"{case.space}, {count} at once: {each:.2f} ms per step")
        for name, settings in TRAINING_MODES.items():
            forget()
            task = made_training(data, session, notation.parse(DARTS_V2), recipe="cifar", **settings)
            row = measure(task, rounds)
            row["images_per_second"] = 1e3 * task.recipe.batch_size / row["ms"]
            found["training"].append({"variant": name, **row})
            say(f"training {name}: {row['images_per_second']:.0f} images/s")
            del task
    return found


def as_tables(found: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, columns and rows of the results of `run`."""
    steps = []
    for row in found["steps"]:
        first = next(r for r in found["steps"] if r["space"] == row["space"] and r["variant"] == "plain")
        floor_ms = found["floor"][row["space"]]["ms"]
        steps.append(
            [
                row["space"],
                row["variant"],
                f"{row['ms']:.1f}",
                f"{first['ms'] / row['ms']:.1f}",
                f"{row['busy_ms']:.1f}",
                str(row["kernels"]),
                f"{row['peak_gb']:.2f}",
                f"{row['held_gb']:.2f}",
                f"{row['ms'] / floor_ms:.2f}",
            ]
        )
    alone = {r["space"]: r["ms_per_step"] for r in found["together"] if r["searches"] == 1}
    shared = [
        [r["space"], str(r["searches"]), f"{r['ms_per_step']:.2f}", f"{alone[r['space']] / r['ms_per_step']:.2f}"]
        for r in found["together"]
    ]
    first = found["training"][0]["images_per_second"]
    training = [
        [
            r["variant"],
            f"{r['images_per_second']:.0f}",
            f"{r['images_per_second'] / first:.2f}",
            f"{r['ms']:.1f}",
            str(r["kernels"]),
            f"{r['peak_gb']:.2f}",
            f"{r['held_gb']:.2f}",
        ]
        for r in found["training"]
    ]
    data = [
        [
            space,
            f"{100 * share:.1f}%",
            f"{found['floor'][space]['bytes'] / 1e9:.1f}",
            f"{found['floor'][space]['ms']:.1f}",
        ]
        for space, share in found["busy_share"].items()
    ]
    return [
        (
            "one search step (architecture + weights), batch 64, CIFAR size",
            ["space", "variant", "ms", "× plain", "busy ms", "kernels", "peak GB", "held GB", "× floor"],
            steps,
        ),
        ("device busy in a search, and the floor: bf16 without fusing", ["space", "busy", "GB", "floor ms"], data),
        ("searches that share the device", ["space", "at once", "ms per step", "× one after another"], shared),
        (
            "training DARTS_V2, 20 cells × 36 channels, auxiliary tower, drop-path, batch 96",
            ["variant", "images/s", "× plain", "ms", "kernels", "peak GB", "held GB"],
            training,
        ),
    ]
