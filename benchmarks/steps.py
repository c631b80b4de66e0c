"""The cost of a search step (weight step + architecture step) compared with the plain formulation.

Both alternate in one process on the same inputs, so that their ratio is robust to other load on the machine; the
median over rounds is reported. On the CPU, peak memory comes from a fresh process per variant, because the system only
records the overall peak.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.plain import PlainCell, make_plain
from softcell.engine.distributed import World
from softcell.engine.session import place
from softcell.engine.timing import Stopwatch, Timing
from softcell.methods import METHODS, Method
from softcell.nn.objective import CrossEntropy
from softcell.search.steps import StepState, bilevel, single_level
from softcell.settings import build
from softcell.spaces import build_space
from softcell.spaces.execution import modules_only


@dataclass(frozen=True, slots=True)
class Case:
    """One supernet with one method at one input size."""

    space: str
    settings: dict[str, Any]
    shape: tuple[int, int, int]
    batch: int
    method: str = "darts"
    method_settings: dict[str, Any] = field(default_factory=dict)
    regime: str = "bilevel"

    def __str__(self) -> str:
        sizes = ", ".join(f"{key}={value}" for key, value in self.settings.items()) or "paper size"
        return f"{self.space} ({sizes}), batch {self.batch}, {'×'.join(map(str, self.shape))}"


SMALL = [
    Case("darts", {"cells": 4, "channels": 8}, (1, 8, 8), 64),
    Case("nb201", {"cells_per_stage": 1, "channels": 8}, (1, 8, 8), 64),
]
PAPER = [
    Case("darts", {}, (3, 32, 32), 64),
    Case("nb201", {}, (3, 32, 32), 64),
]


DRAWS = 12
"""Number of steps over which the memory of methods with random paths is averaged."""


def step_state(case: Case, device: torch.device, *, plain: bool) -> StepState:
    torch.manual_seed(0)
    space = build_space(case.space, case.settings)
    supernet = space.supernet(case.shape, 10)
    if plain:
        make_plain(supernet)
    # Plain cells consumed other random numbers: from here on, both draw the same paths.
    torch.manual_seed(0)
    kind = METHODS.get(case.method)
    assert issubclass(kind, Method)
    method = kind.for_supernet(build(kind.Settings, case.method_settings), supernet)
    if plain:
        supernet.to(device)
    else:
        place(supernet, device)
    method.to(device)
    architecture: torch.optim.Optimizer = torch.optim.Adam(
        # Adam rejects an empty list; methods without parameters never use this one.
        [*method.parameters()] or [torch.zeros(1, requires_grad=True)],
        lr=3e-4,
        betas=(0.5, 0.999),
        weight_decay=1e-3,
        foreach=True,
    )
    if dict(kind.recipes["paper"].get("architecture", {})).get("optimiser") == "weights":
        architecture = torch.optim.SGD(method.parameters(), lr=0.025, momentum=0.9, weight_decay=3e-4, foreach=True)
    return StepState(
        supernet,
        method,
        CrossEntropy(),
        torch.optim.SGD(supernet.parameters(), lr=0.025, momentum=0.9, weight_decay=3e-4, foreach=True),
        architecture,
        World(0, 1, 0, device),
        5.0,
        0.0,
    )


def batch(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(case.batch, *case.shape, generator=generator)
    return images.to(device), torch.randint(10, (case.batch,), generator=generator).to(device)


def step(actors: StepState, data: tuple[Tensor, Tensor], regime: str) -> None:
    """One search step: both parts on one batch, or first the architecture and then the weights.

    The plain formulation runs module by module outside of its cells, too.
    """
    is_plain = any(isinstance(module, PlainCell) for module in actors.supernet.modules())
    with modules_only() if is_plain else nullcontext():
        if regime == "single-level":
            single_level(actors, *data)
        else:
            bilevel(actors, data, data)


def once(actors: StepState, data: tuple[Tensor, Tensor], device: torch.device, regime: str = "bilevel") -> Timing:
    watch = Stopwatch(device)
    with watch:
        step(actors, data, regime)
    return watch.timing


def compare(case: Case, device: torch.device, rounds: int) -> dict[str, Any]:
    """Medians of both formulations, alternating after one warm-up each, and their ratios."""
    data = batch(case, device)
    actors = {name: step_state(case, device, plain=name == "plain") for name in ("plain", "softcell")}
    for actor in actors.values():
        once(actor, data, device)
    timings: dict[str, list[Timing]] = {name: [] for name in actors}
    for _ in range(rounds):
        for name, actor in actors.items():
            timings[name].append(once(actor, data, device))
    row: dict[str, Any] = {"case": asdict(case), "name": str(case), "device": device.type, "rounds": rounds}
    for name, values in timings.items():
        row[name] = {
            "wall_ms": 1e3 * statistics.median(t.wall_seconds for t in values),
            "cpu_ms": 1e3 * statistics.median(t.cpu_seconds for t in values),
            "peak_mb": peak_megabytes(case, device, plain=name == "plain"),
        }
    for key in ("wall_ms", "cpu_ms", "peak_mb"):
        row[f"ratio_{key.rsplit('_', 1)[0]}"] = row["plain"][key] / row["softcell"][key]
    return row


def peak_megabytes(case: Case, device: torch.device, *, plain: bool) -> float:
    """Peak memory of two steps in a separate process; on the CPU minus that of an idle process."""
    request = json.dumps({"case": asdict(case), "device": device.type, "plain": plain})
    code = "import sys; from benchmarks.steps import report_peak; report_peak(sys.argv[1])"
    # Return freed tensors to the system immediately: memory cached by the C library must not count.
    surroundings = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", code, request], capture_output=True, text=True, check=True, env=surroundings
    )
    return float(done.stdout.split()[-1])


def report_peak(request: str) -> None:
    """The body of that process: prints the peak in megabytes."""
    asked = json.loads(request)
    case = Case(**{**asked["case"], "shape": tuple(asked["case"]["shape"])})
    device = torch.device(asked["device"])
    data = batch(case, device)
    actors = step_state(case, device, plain=asked["plain"])
    if device.type == "cuda":
        print(max(once(actors, data, device, case.regime).peak_bytes for _ in range(2)) / 1e6)
        return
    before, peaks = _resident("VmRSS"), []
    planner = actors.method.planner
    drawn = planner is not None and planner.draw(0) is not None
    for number in range(DRAWS if drawn else 2):
        Path("/proc/self/clear_refs").write_text("5")  # Linux: the peak is counted from here on
        with nullcontext() if planner is None else planner.following(planner.draw(number)):
            step(actors, data, case.regime)
        peaks.append((_resident("VmHWM") - before) / 1e3)
    # Paths differ in size: methods are compared by the mean, not by the largest sampled path.
    print(statistics.fmean(peaks) if drawn else max(peaks))


def _resident(field: str) -> int:
    """A line of /proc/self/status in kibibytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise RuntimeError(f"this system does not report {field}; peak memory on the CPU is measured on Linux only")
