"""Tables of NAS-Bench-201 for tests: a made one that is complete, and where the real one may lie."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from softcell.evaluate.nb201 import COLUMNS, OPERATIONS, write_table

WORTH = {"none": 0.0, "avg_pool_3x3": 1.0, "skip_connect": 2.0, "nor_conv_1x1": 4.0, "nor_conv_3x3": 5.0}


def text_of(ops: tuple[str, ...]) -> str:
    a, b, c, d, e, f = ops
    return f"|{a}~0|+|{b}~0|{c}~1|+|{d}~0|{e}~1|{f}~2|"


def accuracy(ops: tuple[str, ...], position: int) -> float:
    """A sum of worths by edge, with other weights in every column."""
    return 10.0 + sum(WORTH[op] * (1 + (edge + position) % 3) for edge, op in enumerate(ops))


def made_rows() -> dict[str, dict[str, float]]:
    return {
        text_of(ops): {column: accuracy(ops, i) for i, column in enumerate(COLUMNS)}
        for ops in itertools.product(OPERATIONS, repeat=6)
    }


def write_made(path: Path) -> Path:
    write_table(path, made_rows())
    return path


def real_table() -> Path | None:
    given = os.environ.get("SOFTCELL_NB201")
    place = Path(given) if given else Path(__file__).parents[2].parent / "shared" / "data" / "nb201"
    file = place / "nb201_200epochs.csv.gz" if place.is_dir() else place
    return file if file.is_file() else None
