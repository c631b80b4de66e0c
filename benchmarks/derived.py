"""`python -m benchmarks.derived`: what each choice in the kernels of fused derived cells is worth, on one GPU.

A forward and backward pass of DARTS_V2's normal and reduction cells at the widths of 20 cells × 36 channels, batch 96,
by kernel: with the chosen sizes of blocks, and with each of `CHANGES` to them. Kernels of all settings are compiled
first, by as many processes as there are cores; then each is timed. With `--steps`, whole training steps and validation
passes follow, module by module and fused.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from collections import Counter
from dataclasses import asdict
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.training import cases, measured
from softcell.arch import notation
from softcell.kernels.backend import triton_kernels
from softcell.spaces import build_space
from softcell.spaces.darts import DartsNetwork
from softcell.spaces.execution import fused_networks, modules_only
from tests.reference.published_genotypes import DARTS_V2

CHANGES: dict[str, dict[str, int]] = {
    "chosen": {},
    "chosen, again": {},  # what differs from the first is noise
    "as before": {  # but for 144 channels, which had 64 rows
        "pitch": 1, "product_sums": 0, "stage_rows": 128, "stage_depth": 32, "stage_warps": 8, "lower_rows": 128,
        "lower_depth": 32, "weight_side": 64,
    },
    "no pitch": {"pitch": 1},
    "sums by shuffles": {"product_sums": 0},
    "stage depth 16": {"stage_depth": 16, "stage_warps": 4},
    "stage depth 32": {"stage_depth": 32, "stage_warps": 8},
    "stage rows 64": {"stage_rows": 64},
    "stage rows 128": {"stage_rows": 128},
    "lower depth 16, rows 64": {"lower_depth": 16, "lower_rows": 64},
    "lower depth 64": {"lower_depth": 64},
    "lower warps 4": {"lower_warps": 4},
    "weight side 64": {"weight_side": 64},
    "weight rows 128": {"weight_rows": 128},
    "weight programs 528": {"weight_programs": 528},
    "weight programs 2112": {"weight_programs": 2112},
    "gather rows 32": {"gather_rows": 32},
    "16 channels, gather rows 128": {"channels": 16, "gather_rows": 128},
}  # fmt: skip
"""Fields of `derived_layout_triton.Blocks` that differ from the chosen ones, by what they say."""

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
    return network.cuda().train()


def run(settings: dict[str, int], cases: list[str], batch: int, rounds: int) -> dict[str, Any]:
    """Microseconds by kernel and case."""
    kernels = triton_kernels("derived_layout")
    kernels.OVERRIDES = settings  # type: ignore[attr-defined]
    network = made_network()
    found: dict[str, Any] = {}
    for case in cases:
        _, size, number = CASES[case]
        step = cell_step(network, number, size, batch)
        for _ in range(3):
            step()
        torch.cuda.synchronize()
        if not rounds:
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


def _compile(job: tuple[dict[str, int], str, int]) -> str:
    settings, case, batch = job
    try:
        run(settings, [case], batch, 0)
    except Exception as error:  # a setting that does not fit the device is reported, not fatal
        return f"{settings} {case}: {type(error).__name__}: {str(error)[:200]}"
    return ""


def validation(rounds: int, batch: int) -> dict[str, float]:
    """Milliseconds of a pass without gradients in evaluation mode, not recorded, by way and precision."""
    triton_kernels("derived_layout").OVERRIDES = {}  # type: ignore[attr-defined]
    network = made_network().to(memory_format=torch.channels_last).eval()  # type: ignore[call-overload]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--settings", type=json.loads, help="a JSON object of changes to the chosen blocks by name, instead of CHANGES"
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", action="store_true", help="then whole training steps and validation passes")
    parser.add_argument("--out", help="a JSON file for the figures")
    given = parser.parse_args()
    changes: dict[str, dict[str, int]] = CHANGES if given.settings is None else given.settings
    record: dict[str, Any] = {"device": torch.cuda.get_device_name(), "batch": given.batch, "changes": changes}
    kernels = triton_kernels("derived_layout")
    record["chosen"] = {case: asdict(kernels.blocks_for(CASES[case][0])) for case in given.cases}

    def keep() -> None:
        if given.out:
            with open(given.out, "w", encoding="utf-8") as file:
                json.dump(record, file, indent=1)

    if given.steps:  # first: it decides, and its kernels are those of the chosen sizes
        record["steps"] = measured(cases()["darts"], ["modules", "fused"], 2 * given.rounds, print)
        for kernel in record["steps"][-1]["longest"]:
            print(f"  {kernel['ms']:7.3f} ms {kernel['calls']:5} × {kernel['kernel']}")
        record["validation_ms"] = validation(given.rounds, given.batch)
        print("validation, ms: " + ", ".join(f"{way} {ms:.1f}" for way, ms in record["validation_ms"].items()))
        keep()
    jobs = [(settings, case, given.batch) for settings in changes.values() for case in given.cases]
    bad: set[tuple[str, str]] = set()
    with multiprocessing.get_context("spawn").Pool(min(len(jobs), os.cpu_count() or 1)) as pool:
        for (settings, case, _), failure in zip(jobs, pool.imap(_compile, jobs), strict=True):
            if failure:
                print(failure, file=sys.stderr)
                bad.add((json.dumps(settings), case))
    record["microseconds"] = {}
    for name, settings in changes.items():
        fitting = [case for case in given.cases if (json.dumps(settings), case) not in bad]
        record["microseconds"][name] = found = run(settings, fitting, given.batch, given.rounds)
        print(f"{name} {json.dumps(settings)}")
        for case, spent in found.items():
            print(f"  {case}: " + "  ".join(f"{kernel} {us:.0f}" for kernel, us in spent.items()), flush=True)
        keep()


if __name__ == "__main__":
    main()
