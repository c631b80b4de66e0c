"""`python -m benchmarks.derived`: kernels of fused derived cells by the sizes of their blocks, on one GPU.

A forward and backward pass of DARTS_V2's normal and reduction cells at the widths of 20 cells × 36 channels, batch 96.
Kernels of all settings are compiled first, by as many processes as there are cores; then each is timed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from softcell.arch import notation
from softcell.kernels.backend import triton_kernels
from softcell.spaces import build_space
from softcell.spaces.darts import DartsNetwork
from tests.reference.published_genotypes import DARTS_V2

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
    kernels = triton_kernels("derived")
    kernels.BLOCKS = replace(kernels.Blocks(), **settings)  # type: ignore[attr-defined]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--settings", type=json.loads, default=[{}], help="a JSON list of changes to the default blocks"
    )
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", help="a JSON file for the figures")
    given = parser.parse_args()
    jobs = [(settings, case, given.batch) for settings in given.settings for case in given.cases]
    bad: set[str] = set()
    with multiprocessing.get_context("spawn").Pool(min(len(jobs), os.cpu_count() or 1)) as pool:
        for (settings, _, _), failure in zip(jobs, pool.imap(_compile, jobs), strict=True):
            if failure:
                print(failure, file=sys.stderr)
                bad.add(json.dumps(settings))
    rows = []
    for settings in given.settings:
        if json.dumps(settings) in bad:
            continue
        found = run(settings, given.cases, given.batch, given.rounds)
        rows.append({"settings": settings, "microseconds": found})
        print(json.dumps(settings))
        for case, spent in found.items():
            print(f"  {case}: " + "  ".join(f"{name} {us:.0f}" for name, us in spent.items()), flush=True)
    if given.out:
        kernels = triton_kernels("derived")
        record = {"device": torch.cuda.get_device_name(), "default": asdict(kernels.Blocks()), "rows": rows}
        with open(given.out, "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
