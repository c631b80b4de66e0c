"""The precision of a device: timed once, cached, and float32 unless bfloat16 is clearly faster; and the stopwatch."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from softcell.engine import timing
from softcell.engine.distributed import World
from softcell.search import resolve, search
from softcell.search.run import stored_recipe

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A fake GPU: seconds of a step by precision."""
    seconds = {"float32": 3.0, "bfloat16": 1.0}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Pretended")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: torch.no_grad())
    monkeypatch.setattr(timing, "time_steps", lambda task, device: seconds[task])
    return seconds


ALONE = World(0, 1, 0, CUDA)


def choose(world: World = ALONE, notes: list[str] | None = None, job: str = "job") -> str:
    make: Any = lambda precision: precision  # noqa: E731
    return timing.choose_precision(job, world, make, (notes if notes is not None else []).append)


def test_the_faster_one_is_chosen_reported_and_remembered(device: dict[str, float]) -> None:
    notes: list[str] = []
    assert choose(notes=notes) == "bfloat16"
    assert "float32 3000.0 ms, bfloat16 1000.0 ms" in notes[0]
    device["bfloat16"] = 100.0
    assert choose(notes=notes) == "bfloat16" and len(notes) == 1, "not timed again"
    assert choose(job="another") == "float32"
    assert set(json.loads(timing.cache_file().read_text()).values()) == {"bfloat16", "float32"}


def test_a_small_gain_does_not_choose_bfloat16(device: dict[str, float]) -> None:
    device["bfloat16"] = 2.9
    assert choose() == "float32"


def test_several_processes_do_not_try_but_use_what_is_known(device: dict[str, float]) -> None:
    several, notes = World(0, 2, 0, CUDA), []
    assert choose(several, notes) == "float32" and "single process" in notes[0]
    choose()
    assert choose(several) == "bfloat16"


@pytest.mark.parametrize("content", ["", "[1]", '{"a": "float8"}', "\x00"])
def test_a_damaged_cache_file_is_ignored(device: dict[str, float], content: str) -> None:
    timing.cache_file().parent.mkdir(parents=True)
    timing.cache_file().write_text(content)
    assert choose() == "bfloat16" and choose() == "bfloat16"


def test_a_full_disk_is_no_error(device: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert choose() == "bfloat16"
    assert not timing.cache_file().exists()


def test_a_cpu_computes_in_float32_and_a_run_says_so(tmp_path: Path) -> None:
    assert choose(World(0, 1, 0, CPU)) == "float32"
    recipe = resolve({"space": "nb201", "epochs": 1, "space_settings": {"cells_per_stage": 1, "channels": 2}})
    assert recipe.precision == "auto"
    found = search(recipe, tmp_path / "run")
    assert found.recipe.precision == "float32"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["recipe"]["precision"] == "float32"
    assert stored_recipe(tmp_path / "run", {"precision": "auto"}).precision == "float32"


def test_a_stopwatch_separates_wall_and_processor_time() -> None:
    watch = timing.Stopwatch(CPU)
    with pytest.raises(RuntimeError, match="only after its"):
        _ = watch.timing
    with watch:
        time.sleep(0.05)
    slept = watch.timing
    assert 0.05 <= slept.seconds == slept.wall_seconds < 5.0
    assert slept.cpu_seconds < slept.wall_seconds
    assert slept.peak_bytes > 10 * 2**20
