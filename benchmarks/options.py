"""The options that benchmarks of a search step have in common."""

from __future__ import annotations

import argparse
from pathlib import Path


def step_options(
    prog: str, doc: str | None, *, rounds: int, threads: int = 0, rounds_help: str = "timed steps of each"
) -> argparse.ArgumentParser:
    """doc: the benchmark's docstring, of which the first line says what it does."""
    parser = argparse.ArgumentParser(prog=prog, description=(doc or "").splitlines()[0])
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--paper", action="store_true", help="the paper's size instead of the small one")
    parser.add_argument("--rounds", type=int, default=rounds, help=rounds_help)
    parser.add_argument("--threads", type=int, default=threads, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--precision", default="float32", help="on a GPU: float32 or bfloat16")
    parser.add_argument("--out", type=Path, help="where to write the JSON record")
    return parser
