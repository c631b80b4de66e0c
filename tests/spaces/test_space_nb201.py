"""The NAS-Bench-201 space: its networks have the parameters listed in the benchmark's table."""

from __future__ import annotations

import csv
import gzip
import os
from pathlib import Path

import pytest
import torch

from softcell.arch import count
from softcell.arch.notation import from_nb201, to_nb201
from softcell.spaces import Space, build_space

TABLE = "nb201_200epochs.csv.gz"


def table_file() -> Path | None:
    """The benchmark's table: at SOFTCELL_NB201, or next to the repository."""
    given = os.environ.get("SOFTCELL_NB201")
    place = Path(given) if given else Path(__file__).parents[2].parent / "shared" / "data" / "nb201"
    file = place / TABLE if place.is_dir() else place
    return file if file.is_file() else None


@pytest.fixture(scope="module")
def rows() -> list[tuple[str, int]]:
    file = table_file()
    if file is None:
        pytest.skip(f"no table of NAS-Bench-201: set SOFTCELL_NB201 to {TABLE} or its folder")
    with gzip.open(file, "rt", encoding="utf-8", newline="") as stream:
        return [(row["arch"], int(row["params_cifar10"])) for row in csv.DictReader(stream)]


@pytest.fixture(scope="module")
def space() -> Space:
    return build_space("nb201", {"cells_per_stage": 5, "channels": 16})


def parameters(space: Space, text: str) -> int:
    with torch.device("meta"):
        network = space.network(from_nb201(text), (3, 32, 32), 10)
    return sum(p.numel() for p in network.parameters())


def test_a_fixed_sample_of_networks_has_the_parameters_of_the_table(rows: list[tuple[str, int]], space: Space) -> None:
    sample = rows[::521]
    assert len(sample) == 30
    assert {text: parameters(space, text) for text, _ in sample} == dict(sample)


@pytest.mark.exhaustive
def test_all_networks_have_the_parameters_of_the_table(rows: list[tuple[str, int]], space: Space) -> None:
    wrong = [text for text, expected in rows if parameters(space, text) != expected]
    assert not wrong


def test_the_table_holds_every_architecture_of_the_space_once(rows: list[tuple[str, int]], space: Space) -> None:
    known = {text for text, _ in rows}
    assert len(rows) == len(known) == count(space.layout()) == 15_625
    candidates = set(space.layout().tables[0].choices[0].candidates)
    assert all({pick.op for pick in from_nb201(text).cells["cell"].picks} <= candidates for text in known)


def test_parameters_of_two_networks_match_a_manual_count(space: Space) -> None:
    """What surrounds the cells, and what 3×3 convolutions on all six edges add; no table needed."""
    stem, last = 3 * 16 * 9 + 32, 2 * 64 + 64 * 10 + 10
    reductions = sum(a * b * 9 + 2 * b + b * b * 9 + 2 * b + a * b for a, b in ((16, 32), (32, 64)))
    empty = "|none~0|+|none~0|skip_connect~1|+|avg_pool_3x3~0|none~1|none~2|"
    assert parameters(space, empty) == stem + last + reductions
    full = to_nb201(
        from_nb201("+".join("|" + "|".join(f"nor_conv_3x3~{s}" for s in range(t)) + "|" for t in (1, 2, 3)))
    )
    cells = 5 * 6 * sum(c * c * 9 + 2 * c for c in (16, 32, 64))
    assert parameters(space, full) == stem + last + reductions + cells


def test_stages_have_the_published_widths_and_resolutions(space: Space) -> None:
    with torch.device("meta"):
        network = space.network(from_nb201("|none~0|+|none~0|none~1|+|skip_connect~0|none~1|none~2|"), (3, 32, 32), 10)
        features = network.features(torch.empty(1, 3, 32, 32))
    assert [tuple(f.shape[1:]) for f in features] == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]
