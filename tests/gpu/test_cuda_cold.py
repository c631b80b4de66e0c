"""A search whose kernels are in no cache: all of them are compiled in parallel before its first step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from softcell.kernels.backend import has_triton
from softcell.kernels.warm_up import SWITCH
from tests.helpers.search_toys import settings

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
    pytest.mark.skipif(not has_triton(), reason="needs Triton"),
]

DARTS = {"cells": 3, "channels": 4, "nodes": 2}
CASES: dict[str, dict[str, Any]] = {
    "darts": settings("darts", "digits", space_settings=DARTS, precision="bfloat16"),
    "nb201": settings("nb201", "digits", drop_path=0.3),
    "unrolled": settings("nb201", "digits", regime="unrolled"),
    "itnas": settings("nb201", "digits", method="itnas"),
    "nos": settings("nos", "digits", method="nos", space_settings={"cells": 3, "channels": 4, "nodes": 1}),
    "fullattention": settings(
        "fullattention",
        "digits",
        method="fullattention",
        space_settings={"layers": 1, "channels": 16, "candidates": ("local_sa_k3_h4", "non_local_sa")},
    ),
}


def searched(name: str, cache: Path, out: Path, *, ahead: bool = True) -> dict[str, Any]:
    """What `tests/helpers/cold_search.py` reports, from a separate process."""
    sizes = {"epochs": 1, "batch_size": 256, "child_every": 0}  # children are other networks, with other kernels
    given = {"precision": "float32", **CASES[name], **sizes, "device": "cuda", "deterministic": True, "threads": 0}
    ended = subprocess.run(
        [sys.executable, str(ROOT / "tests/helpers/cold_search.py"), json.dumps(given), str(out)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
            "TRITON_CACHE_DIR": str(cache),
            SWITCH: "1" if ahead else "0",
        },
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", CASES)
def test_no_kernel_is_compiled_after_the_warm_up(name: str, tmp_path: Path) -> None:
    cold = searched(name, tmp_path / "cache", tmp_path / "cold")
    assert not any("not compiled" in note for note in cold["notes"]), cold["notes"]
    (missing,) = cold["ahead"]
    assert missing > 0
    assert any(note.startswith(f"compiling {missing} kernels on ") for note in cold["notes"])
    assert cold["compiled"] == [], "compiled by the search itself"
    assert cold["found"] > 0, "nothing was fused"


def test_a_cold_search_a_warm_one_and_one_without_a_warm_up_are_the_same(tmp_path: Path) -> None:
    cold = searched("darts", tmp_path / "cache", tmp_path / "cold")
    warm = searched("darts", tmp_path / "cache", tmp_path / "warm")
    plain = searched("darts", tmp_path / "other", tmp_path / "plain", ahead=False)
    assert warm["ahead"] == [0]
    assert plain["ahead"] == []
    assert len(plain["compiled"]) <= cold["ahead"][0], "the warm-up compiles all that a search compiles"
    assert cold["metrics"] == warm["metrics"] == plain["metrics"]
