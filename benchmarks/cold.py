"""`python -m benchmarks.cold`: the first step of a search on a GPU, with kernels compiled in three ways.

one by one: empty cache, each kernel is compiled at its first launch. ahead: empty cache, kernels are compiled in
parallel before the first step. warm: the cache is full. Each runs in a separate process. This process first loads
CUDA's libraries, so that the first of them does not wait for the disk.

python -m benchmarks.cold --space darts --out cold.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.options import machine, step_options
from benchmarks.steps import Case
from softcell.kernels.warm_up import SWITCH, workers_ready
from studies.runs import write_record

SPACES = {"darts": "darts", "nb201": "darts", "nos": "nos", "fullattention": "fullattention"}
"""The method used to search each space."""
WAYS = {"one by one": ("one", "0"), "ahead": ("ahead", "1"), "warm": ("ahead", "1")}
"""For each name, the cache folder and whether kernels are compiled ahead; later ones reuse earlier caches."""
MAX_SECONDS = 180


def measured(space: str, caches: Path, way: str) -> dict[str, Any]:
    """Runs `report` in a separate process and returns what it prints."""
    folder, ahead = WAYS[way]
    given = json.dumps({"space": space, "began": time.time()})
    code = "import sys; from benchmarks.cold import report; report(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, given],
        env={**os.environ, "TRITON_CACHE_DIR": str(caches / folder), SWITCH: ahead},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=MAX_SECONDS,
    )
    *notes, row = done.stdout.splitlines()
    return {"space": space, "way": way, **json.loads(row), "notes": notes}


def report(request: str) -> None:
    """The body of that process: seconds of its parts, and the number of kernels that it compiled itself in each."""
    from triton import knobs  # type: ignore[import-not-found, unused-ignore]

    from benchmarks.gpu import VARIANTS, made_data, made_search, next_milliseconds
    from softcell.engine.session import open_session

    asked, compiled = json.loads(request), [0]

    def listen(*, cache_hit: bool, **_: Any) -> None:
        compiled[0] += not cache_hit

    def count() -> int:
        found, compiled[0] = compiled[0], 0
        return found

    knobs.compilation.listener = listen
    case = Case(asked["space"], {}, (3, 32, 32), 64, method=SPACES[asked["space"]])
    opened = open_session(device="cuda", seed=0, precision="float32", deterministic=False, threads=0)
    with opened as session, workers_ready(), made_data() as data:  # as `softcell.search` does it
        task = made_search(data, case, session, validate_every=1, **VARIANTS["fused bf16"])
        task.begin_epoch(0)
        batches = iter(task.batches(0, 0))
        torch.cuda.synchronize()
        row: dict[str, Any] = {"prepare_s": time.time() - asked["began"], "prepare_kernels": count()}
        row |= {"first_s": next_milliseconds(task, batches) / 1e3, "first_kernels": count()}
        row |= {"second_s": next_milliseconds(task, batches) / 1e3, "second_kernels": count()}
        began = time.perf_counter()
        task.end_epoch(0)
        torch.cuda.synchronize()
        row |= {"validation_s": time.perf_counter() - began, "validation_kernels": count()}
    print(json.dumps(row))


def load_libraries() -> None:
    """One step of a small network, which loads CUDA's libraries from the disk."""
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.Conv2d(16, 16, 1))
    network = network.cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(64, 3, 32, 32, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = torch.nn.functional.linear(network(images).mean((2, 3)), torch.randn(10, 16, device="cuda")).sum()
    torch.autograd.grad(loss, [*network.parameters()])
    torch.cuda.synchronize()


def main() -> None:
    parser = step_options(
        "python -m benchmarks.cold", __doc__, rounds=1, rounds_help="processes of each", one_size=True
    )
    parser.add_argument(
        "--space", action="append", choices=list(SPACES), help="space to search (default: darts); may be repeated"
    )
    options = parser.parse_args()
    device, threads = machine(parser, options)
    if device.type != "cuda":
        parser.error("kernels are compiled for a GPU: --device cuda")
    console, rows = Console(), list[dict[str, Any]]()
    began = time.perf_counter()
    load_libraries()
    console.print(f"libraries loaded in {time.perf_counter() - began:.1f} s")
    for space in options.space or ["darts"]:
        for _ in range(options.rounds):
            with TemporaryDirectory() as caches:
                for way in WAYS:
                    rows.append(row := measured(space, Path(caches), way))
                    console.print(f"{space}, {way}: first step {row['first_s']:.1f} s", highlight=False)
                    if options.out is not None:
                        write_record(options.out, "benchmarks.cold", threads=threads, cores=os.cpu_count(), rows=rows)
    table = Table("space", "kernels", "before, s", "first step, s", "second, s", "validation, s", "compiled")
    for row in rows:
        parts = [row[f"{part}_kernels"] for part in ("prepare", "first", "second", "validation")]
        times = [f"{row[f'{part}_s']:.1f}" for part in ("prepare", "first", "second", "validation")]
        table.add_row(row["space"], row["way"], *times, "+".join(map(str, parts)))
    console.print(table)


if __name__ == "__main__":
    main()
