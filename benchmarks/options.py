"""Common options of the search-step benchmarks."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from softcell.engine.session import resolve_device, set_threads
from softcell.errors import UserError


def step_options(
    prog: str,
    doc: str | None,
    *,
    rounds: int,
    threads: int = 0,
    rounds_help: str = "timed steps of each",
    one_size: bool = False,
) -> argparse.ArgumentParser:
    """doc: the benchmark's docstring; its first line becomes the description.

    one_size: for benchmarks without a choice of size and precision.
    """
    parser = argparse.ArgumentParser(prog=prog, description=(doc or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    if not one_size:
        parser.add_argument("--paper", action="store_true", help="the paper's size instead of the small one")
        parser.add_argument("--precision", default="float32", help="on a GPU: float32 or bfloat16")
    parser.add_argument("--rounds", type=int, default=rounds, help=rounds_help)
    parser.add_argument("--threads", type=int, default=threads, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--out", type=Path, help="where to write the JSON record")
    return parser


def machine(
    parser: argparse.ArgumentParser, options: argparse.Namespace, *, threads: int | None = None, least_rounds: int = 1
) -> tuple[torch.device, int]:
    """Sets and returns the device and the number of CPU threads; wrong options are rejected before measuring.

    threads: for benchmarks without such an option.
    """
    if options.rounds < least_rounds:
        parser.error(f"--rounds must be at least {least_rounds}, but is {options.rounds}")
    if options.out is not None and (options.out.is_dir() or not options.out.parent.is_dir()):
        parser.error(f"--out must be a file in a folder that is there, but got {options.out}")
    try:
        return resolve_device(options.device), set_threads(options.threads if threads is None else threads)
    except UserError as error:
        parser.error(str(error))
