"""`python -m benchmarks.kernels`: captured search steps, module by module beside fused, in one run on a GPU.

python -m benchmarks.kernels                       # both spaces, float32 and bfloat16
python -m benchmarks.kernels --space darts --precision bfloat16 --top 20
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.steps import PAPER, Case, batch, bilevel, players
from softcell.engine.capture import WARMUP, CapturedStep
from softcell.engine.device import set_tf32
from softcell.engine.optim import adam, sgd
from softcell.engine.provenance import collect
from softcell.spaces.fused import modules_only

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def measure(case: Case, precision: str, *, fused: bool, rounds: int, top: int) -> dict[str, Any]:
    """One variant: milliseconds per captured step, busy milliseconds, kernels and peak memory of an eager one."""
    device = torch.device("cuda")
    actors = players(case, device, plain=False)
    actors.weight_optimiser = sgd(actors.supernet.parameters(), device, lr=0.025, momentum=0.9, weight_decay=3e-4)
    actors.architecture_optimiser = adam(
        actors.method.parameters(), device, lr=3e-4, betas=(0.5, 0.999), weight_decay=1e-3
    )
    images, labels = batch(case, device)
    dtype = PRECISIONS[precision]

    def step(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> None:
        cast = torch.autocast("cuda", dtype, enabled=dtype != torch.float32, cache_enabled=False)
        with cast, nullcontext() if fused else modules_only():
            bilevel(actors, (a, b), (c, d))

    data = (images, labels, images, labels)
    step(*data)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step(*data)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        step(*data)
        torch.cuda.synchronize()
    events = [e for e in record.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    recorded = CapturedStep(step, print)
    for _ in range(WARMUP + 3):
        recorded(*data)
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        recorded(*data)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    by_name: Counter[str] = Counter()
    for e in events:
        by_name[e.name[:80]] += e.device_time / 1e3
    return {
        "space": case.space,
        "precision": precision,
        "path": "fused" if fused else "modules",
        "graph_ms": statistics.median(times),
        "busy_ms": sum(e.device_time for e in events) / 1e3,
        "kernels": len(events),
        "peak_gb": peak / 1e9,
        "top": by_name.most_common(top),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--space", choices=[case.space for case in PAPER], help="one space instead of all")
    parser.add_argument("--precision", choices=list(PRECISIONS), help="one precision instead of both")
    parser.add_argument("--path", choices=["fused", "modules"], help="one path instead of both")
    parser.add_argument("--rounds", type=int, default=20, help="timed replays per variant")
    parser.add_argument("--top", type=int, default=0, help="kernels to list by name")
    parser.add_argument("--out", type=Path, help="where to write the JSON record")
    options = parser.parse_args()
    set_tf32(False)
    rows = []
    for case in PAPER:
        for precision in PRECISIONS:
            for path in ("modules", "fused"):
                asked = (options.space, options.precision, options.path)
                if any(a not in (None, b) for a, b in zip(asked, (case.space, precision, path), strict=True)):
                    continue
                row = measure(case, precision, fused=path == "fused", rounds=options.rounds, top=options.top)
                rows.append(row)
                print(
                    f"{row['space']:6} {precision:8} {path:8} {row['graph_ms']:8.2f} ms captured, "
                    f"busy {row['busy_ms']:8.2f} ms, {row['kernels']:6} kernels, peak {row['peak_gb']:.2f} GB",
                    flush=True,
                )
                for name, milliseconds in row["top"]:
                    print(f"    {milliseconds:8.2f} ms  {name}")
                torch.cuda.empty_cache()
    if options.out is not None:
        record = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **collect(), "rows": rows}
        options.out.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
