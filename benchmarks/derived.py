"""`python -m benchmarks.derived`: measures each design choice in the kernels of fused derived cells on one GPU.

The most important measurements run first: `--cold` compiles the kernels of a training step into an empty cache,
`--steps` times whole training steps and validation passes, module by module and fused. Then a forward and backward pass
of DARTS_V2's normal and reduction cells, at the widths of 20 cells × 36 channels with batch 96, is timed kernel by
kernel: with the chosen block sizes, and with each of `CHANGES`, until `--minutes` have passed. Kernels of all settings
are compiled first, with one process per core. `--host` needs no GPU: it measures Python's time for a pass whose
launches do nothing.

python -m benchmarks.derived --cold --steps --settings chosen --minutes 5 --out derived.json
python -m benchmarks.derived --steps --ways --step-settings "row 26" --settings
python -m benchmarks.derived --settings chosen "gather rows 64" '{"gather_rows": 128, "gather_warps": 8}'
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections import Counter
from dataclasses import asdict
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.training import cases, measured
from softcell.arch import notation
from softcell.kernels.backend import triton_kernels
from softcell.kernels.warm_up import compilations, compile_all, current_target, warm_up
from softcell.spaces import build_space, execution
from softcell.spaces.darts import DartsNetwork
from softcell.spaces.execution import fused_networks, modules_only
from studies.runs import write_record
from tests.reference.published_genotypes import DARTS_V2

BEFORE = {"finish_rows": 1024, "lines_together": 1, "gather_registers": 80}
"""Disables rows 27 and 28 of NOTES.md."""
EARLIER = {"finish_rows": 1024, "weight_factors": 0, "lower_tiles": 0, "point_tiles": 0, "input_tiles": 0}
EARLIER |= {"gather_together": 0, "gather_registers": 0, "gather_rows": 64}
"""Also disables rows 22 to 26."""

CHANGES: dict[str, dict[str, int]] = {
    "chosen": {},
    "chosen, again": {},  # differences from the first are noise
    "row 21": EARLIER,
    "row 16": EARLIER
    | {  # also disables rows 17 to 21; `_lower` keeps 64 rows at 72 channels, not 128
        "beside": 0,
        "stage_lines": 0,
        "lower_apart": 0,
        "lower_inner": 64,
        "activate_lines": 0,
        "splits_block": 256,
    },
    "row 26": BEFORE,
    "without row 27": {"finish_rows": 1024},
    "memory as before": {"weight_factors": 2},  # depthwise results are recomputed instead of kept
    "one stream": {"beside": 0},  # gradients of weights run before the next gradients of planes, not in parallel
    "stage lines 1, no point tiles": {"point_tiles": 0, "stage_lines": 1},
    "without row 24": {"point_tiles": 0},
    "tile programs 16": {"tile_programs": 16},
    "depth programs 528": {"depth_programs": 528},
    "sums elements 2048": {"sums_elements": 2048},  # twice as many loads in flight in `_arrival_sums`
    "stages by pixels": {"stage_lines": 0},
    "activate by pixels": {"activate_lines": 0},
    "point side 64": {"point_side": 64},
    "splits 32": {"splits_block": 32},  # 64 partial sums at a time; chosen if there are 64 or more
    "splits 256": {"splits_block": 256},  # 8 at a time
    "weight programs 132": {"weight_programs": 132},  # leaves half of the registers to concurrent kernels
    "gather by pixels": {"gather_groups": 0},
    "gather groups 16": {"gather_groups": 16},
    "gather groups 4": {"gather_groups": 4},
    "weight stages 1": {"weight_stages": 1},  # loads pass through the L1 cache, which neighbouring taps share
    "weight stages 3": {"weight_stages": 3},
    "weight waves 1": {"weight_waves": 1},
    "weight programs 1056": {"weight_programs": 1056},
    "16 channels, gather rows 64": {"channels": 16, "gather_rows": 64},  # 40 channels are padded to 48, not 64
    "gather rows 64": {"gather_rows": 64},
    "stage warps 8": {"stage_warps": 8},
    "stage rows 128": {"stage_rows": 128},
    "stage depth 32": {"stage_depth": 32, "stage_warps": 8},
    "weight rows 128": {"weight_rows": 128},
    "weight side 64": {"weight_side": 64},
    "sums by shuffles": {"product_sums": 0},
    "no pitch": {"pitch": 1},
}
"""Named changes to the fields of `derived_layout_triton.Blocks`; the most promising first."""

CASES = {"36": (36, 32, 1), "72": (72, 16, 7), "144": (144, 8, 14), "reduce": (72, 32, 6)}
"""Channels, size of the input, number of the cell in the network."""


def cell_step(network: DartsNetwork, number: int, size: int, batch: int) -> Any:
    """A forward and backward pass of one cell on random maps."""
    plan, pre, cell = network.plans[number], network.pre[number], network.cells[number]
    states = []
    for width in plan.widths:
        x = torch.randn(batch, width, size, size, device="cuda", dtype=torch.bfloat16)
        states.append(x.to(memory_format=torch.channels_last).requires_grad_())
    fused = cell.fused((pre.older, pre.newer), plan.width, 2 if plan.reduces else 1)  # type: ignore[operator]
    assert fused is not None
    grad: Tensor | None = None

    def step() -> None:
        nonlocal grad
        with torch.autocast("cuda", torch.bfloat16):
            out = fused(states)
        grad = torch.randn_like(out) if grad is None else grad
        out.backward(grad)

    return step


def made_network() -> DartsNetwork:
    torch.manual_seed(0)
    genotype = notation.parse(DARTS_V2)
    space = build_space(genotype.space, {"cells": 20, "channels": 36})
    network = space.network(genotype, (3, 32, 32), 10, auxiliary=False)
    assert isinstance(network, DartsNetwork)
    network.drop_path.probability = 0.2
    return network.train()


def check(changes: dict[str, dict[str, int]], cases: list[str], batch: int) -> dict[str, dict[str, Any]]:
    """Relative differences from the kernels of row 16, and whether repeats are equal bit for bit; or an error."""

    def outcome(case: str, settings: dict[str, int]) -> dict[str, Tensor]:
        triton_kernels("derived_layout").OVERRIDES = settings  # type: ignore[attr-defined]
        network = made_network().cuda()
        _, size, number = CASES[case]
        plan, pre, cell = network.plans[number], network.pre[number], network.cells[number]
        states = [torch.randn(batch, width, size, size, device="cuda") for width in plan.widths]
        states = [x.bfloat16().to(memory_format=torch.channels_last).requires_grad_() for x in states]
        fused = cell.fused((pre.older, pre.newer), plan.width, 2 if plan.reduces else 1)  # type: ignore[operator]
        with torch.autocast("cuda", torch.bfloat16):
            out = fused(states)
        weights = [*pre.parameters(), *cell.parameters()]
        older, newer, *grads = torch.autograd.grad(out, (*states, *weights), torch.randn_like(out))
        parameters = torch.cat([grad.flatten() for grad in grads])
        return {"output": out.detach(), "parameters": parameters, "older": older, "newer": newer}

    found: dict[str, dict[str, Any]] = {name: {} for name in changes}
    for case in cases:
        theirs = outcome(case, CHANGES["row 16"])
        for name, settings in changes.items():
            try:
                mine, again = outcome(case, settings), outcome(case, settings)
            except Exception as error:  # failures are reported, not fatal
                found[name][case] = f"{type(error).__name__}: {str(error)[:200]}"
                print(f"check {name}, {case}: {found[name][case]}", flush=True)
                continue
            far = {key: float((x - theirs[key]).float().norm() / theirs[key].float().norm()) for key, x in mine.items()}
            far["repeats"] = float(all(torch.equal(x, again[key]) for key, x in mine.items()))
            found[name][case] = far
            print(f"check {name}, {case}: " + ", ".join(f"{key} {v:.2g}" for key, v in far.items()), flush=True)
    return found


def recorded(settings: dict[str, int], cases: list[str], batch: int, rounds: int) -> dict[str, float]:
    """Microseconds of a cell's captured step, in which parallel kernels count once."""
    triton_kernels("derived_layout").OVERRIDES = settings  # type: ignore[attr-defined]
    network = made_network().cuda()
    found = {}
    for case in cases:
        _, size, number = CASES[case]
        step = cell_step(network, number, size, batch)
        # As in the engine: kernels on the second stream have lower priority than the step.
        stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for repeat in range(rounds + 2):
            if repeat == 2:
                begin.record()
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        found[case] = 1e3 * begin.elapsed_time(end) / rounds
    return found


def run(settings: dict[str, int], cases: list[str], batch: int, rounds: int) -> dict[str, Any]:
    """Microseconds by kernel and case; for a case that does not fit the device, the reason."""
    triton_kernels("derived_layout").OVERRIDES = settings  # type: ignore[attr-defined]
    network = made_network().cuda()
    found: dict[str, Any] = {}
    for case in cases:
        _, size, number = CASES[case]
        step = cell_step(network, number, size, batch)
        try:
            for _ in range(3):
                step()
            torch.cuda.synchronize()
        except Exception as error:  # failures are reported, not fatal
            found[case] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(rounds):
                step()
            torch.cuda.synchronize()
        spent: Counter[str] = Counter()
        for event in profile.events():
            name = event.name if event.name.startswith("_") else "torch"
            spent[name.split("(")[0]] += event.device_time / rounds
        found[case] = {"total": sum(spent.values()), **dict(spent.most_common(14))}
    return found


def compile_settings(changes: dict[str, dict[str, int]], cases: list[str], batch: int) -> int:
    """Compiles the kernels of all settings and cases in parallel; returns their number."""
    network, jobs = made_network(), []
    for settings in changes.values():
        triton_kernels("derived_layout").OVERRIDES = settings  # type: ignore[attr-defined]
        for case in cases:
            _, size, number = CASES[case]
            cell = network._fused(number)
            assert cell is not None
            shapes = [(batch, width, size, size) for width in network.plans[number].widths]
            jobs += compilations(cell.schedules(shapes, torch.bfloat16, torch.device("cpu"), training=True))
    return compile_all(dict.fromkeys(jobs), current_target())


def cold_start(batch: int) -> dict[str, float]:
    """Seconds to compile the kernels of training and validation into an empty cache, and to find them there."""
    network = made_network()
    schedules = network.schedules(batch, torch.bfloat16, training=True)
    schedules += network.schedules(batch, torch.float32, training=False)
    found: dict[str, float] = {}
    with TemporaryDirectory() as folder, patch.dict(os.environ, {"TRITON_CACHE_DIR": folder}):
        for when in ("cold", "warm"):
            began = time.perf_counter()
            found[f"{when}_kernels"] = warm_up(schedules)
            found[f"{when}_s"] = time.perf_counter() - began
    return found


def host_time(rounds: int, batch: int = 2) -> dict[str, float]:
    """Minimum milliseconds of processor time of a validation pass on a CPU with launches that do nothing."""

    class Nothing:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *given, **options: self

    network = made_network().eval()
    schedules = network.schedules(batch, torch.float32, training=False)
    for schedule in schedules:
        for launch in schedule.launches:
            launch.kernel = Nothing()
    images = torch.randn(batch, 3, 32, 32)
    times = []
    serves = patch.object(execution, "kernels_serve", lambda x: True)
    with torch.no_grad(), serves, fused_networks():
        for _ in range(rounds + 1):
            began = time.process_time()
            network(images)
            times.append(1e3 * (time.process_time() - began))
    return {"ms": min(times[1:]), "launches": sum(len(schedule.launches) for schedule in schedules)}


def validation(rounds: int, batch: int) -> dict[str, float]:
    """Milliseconds of a pass without gradients in evaluation mode, not captured, by way and precision."""
    triton_kernels("derived_layout").OVERRIDES = {}  # type: ignore[attr-defined]
    network = made_network().cuda().to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
    images = torch.randn(batch, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    found = {}
    for half, way in product((False, True), ("modules", "fused")):
        context = modules_only() if way == "modules" else fused_networks()
        with torch.no_grad(), context, torch.autocast("cuda", torch.bfloat16, enabled=half):
            times = []
            for _ in range(rounds + 3):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                begin.record()
                network(images)
                end.record()
                torch.cuda.synchronize()
                times.append(begin.elapsed_time(end))
        found[f"{way}, {'bfloat16' if half else 'float32'}"] = statistics.median(times[3:])
    return found


def print_longest(rows: list[dict[str, Any]]) -> None:
    for kernel in (kernel for row in rows for kernel in row["longest"]):
        print(f"  {kernel['ms']:7.3f} ms {kernel['calls']:5} × {kernel['kernel'][:60]}", flush=True)


def chosen_changes(given: list[str] | None) -> dict[str, dict[str, int]]:
    """Settings by name or as JSON objects; all of `CHANGES` if none are named."""
    if given is None:
        return CHANGES
    return {one: CHANGES[one] if one in CHANGES else json.loads(one) for one in given}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="*", help="names of CHANGES or JSON objects, instead of all")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", action="store_true", help="time whole training steps and validation passes first")
    parser.add_argument("--ways", nargs="*", default=["fused", "modules"], help="`fused`, `modules`, both or none")
    parser.add_argument(
        "--step-settings", nargs="*", default=[], help="with --steps, also time fused steps with these settings"
    )
    parser.add_argument("--check", nargs="*", help="first compare these settings (default: `chosen`) with row 16")
    parser.add_argument("--cold", action="store_true", help="time compilation into an empty cache first")
    parser.add_argument("--host", action="store_true", help="only measure Python's time, without a GPU")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no further setting after this time")
    parser.add_argument("--out", type=Path, help="where to write the JSON record")
    given = parser.parse_args()
    if given.host:
        print(host_time(given.rounds))
        return
    began = time.monotonic()
    changes = chosen_changes(given.settings)
    record: dict[str, Any] = {"batch": given.batch, "changes": changes, "microseconds": {}}
    blocks_for = triton_kernels("derived_layout").blocks_for
    record["chosen"] = {case: asdict(blocks_for(CASES[case][0])) for case in given.cases}

    def keep() -> None:
        if given.out:
            write_record(given.out, "benchmarks.derived", **record)

    if given.cold:
        record["cold_start"] = cold_start(given.batch)
        print("cold start: " + ", ".join(f"{name} {value:.1f}" for name, value in record["cold_start"].items()))
        keep()
    if given.check is not None:
        checked = chosen_changes(given.check or ["chosen"])
        compile_settings(checked | {"row 16": CHANGES["row 16"]}, given.cases, given.batch)
        print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
        record["check"] = check(checked, given.cases, given.batch)
        triton_kernels("derived_layout").OVERRIDES = {}  # type: ignore[attr-defined]
        keep()
    if given.steps:
        record["steps"] = measured("darts", cases()["darts"], given.ways, 2 * given.rounds, print)
        print_longest(record["steps"][:1])
        keep()
        for name, settings in chosen_changes(given.step_settings).items():
            triton_kernels("derived_layout").OVERRIDES = settings  # type: ignore[attr-defined]
            print(name, json.dumps(settings), flush=True)
            rows = measured("darts", cases()["darts"], ["fused"], 2 * given.rounds, print)
            record["steps"] += [{"setting": name, **row} for row in rows]
            print_longest(rows)
            keep()
        if given.ways:
            record["validation_ms"] = validation(given.rounds, given.batch)
            print("validation, ms: " + ", ".join(f"{way} {ms:.1f}" for way, ms in record["validation_ms"].items()))
            keep()
    if changes:
        print(f"{compile_settings(changes, given.cases, given.batch)} kernels compiled", flush=True)
    done: dict[str, dict[str, int]] = {}
    for name, settings in changes.items():
        if time.monotonic() - began > 60 * given.minutes:
            print(f"{given.minutes} minutes have passed: {name} and what follows were not measured", file=sys.stderr)
            break
        record["microseconds"][name] = found = run(settings, given.cases, given.batch, given.rounds)
        done[name] = settings
        print(f"{name} {json.dumps(settings)}")
        for case, spent in found.items():
            line = spent if isinstance(spent, str) else "  ".join(f"{kernel} {us:.0f}" for kernel, us in spent.items())
            print(f"  {case}: {line}", flush=True)
        keep()
    record["recorded"] = {}
    for name, settings in done.items():  # last, since a failed capture would disturb later measurements
        record["recorded"][name] = times = recorded(settings, given.cases, given.batch, given.rounds)
        print(f"recorded, {name}: " + "  ".join(f"{case} {us:.0f}" for case, us in times.items()), flush=True)
        keep()


if __name__ == "__main__":
    main()
