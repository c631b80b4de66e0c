"""Devices, global switches, generators and the stopwatch."""

import random
import time

import numpy
import pytest
import torch

from softcell.engine.session import (
    resolve_device,
    rng_state,
    seed_everything,
    set_deterministic,
    set_rng_state,
    set_tf32,
    set_threads,
)
from softcell.engine.timing import Stopwatch
from softcell.errors import UserError

CPU = torch.device("cpu")


def test_auto_takes_what_is_there() -> None:
    assert resolve_device("cpu") == CPU
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["gpu", "meta", "cuda:x", ""])
def test_unknown_devices_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="must be"):
        resolve_device(name)


def test_an_absent_cuda_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolve_device("cuda") == torch.device("cuda")
    with pytest.raises(UserError, match=r"cuda:1.*finds 1"):
        resolve_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"finds 0.*'cpu'"):
        resolve_device("cuda")


def test_deterministic_and_tf32_switch_all_of_torchs_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    cudnn = torch.backends.cudnn
    try:
        set_deterministic(True)
        assert torch.are_deterministic_algorithms_enabled()
        assert (cudnn.deterministic, cudnn.benchmark) == (True, False)
    finally:
        set_deterministic(False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert not cudnn.deterministic
    for allowed in (True, False):
        set_tf32(allowed)
        assert (torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32) == (allowed, allowed)


def test_threads_are_set_or_left() -> None:
    before = torch.get_num_threads()
    try:
        assert set_threads(0) == before
        assert set_threads(1) == torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
    with pytest.raises(UserError, match="threads=-1"):
        set_threads(-1)


def test_one_seed_sets_all_generators() -> None:
    draws = []
    for seed in (3, 3, 4, 2**40):
        seed_everything(seed)
        draws.append((torch.rand(1).item(), random.random(), float(numpy.random.rand())))
    assert draws[0] == draws[1]
    assert all(a != b for a, b in zip(draws[0], draws[2], strict=True))


def test_a_restored_generator_repeats_itself() -> None:
    state = rng_state(CPU)
    first = torch.rand(3)
    set_rng_state(state, CPU)
    assert torch.equal(torch.rand(3), first)


def test_a_move_between_kinds_of_device_warns() -> None:
    with pytest.warns(UserWarning, match="saved on a CUDA device"):
        set_rng_state({"cpu": torch.get_rng_state(), "cuda": torch.zeros(16, dtype=torch.uint8)}, CPU)


def test_a_stopwatch_separates_wall_and_processor_time() -> None:
    watch = Stopwatch(CPU)
    with pytest.raises(RuntimeError, match="only after its"):
        _ = watch.timing
    with watch:
        time.sleep(0.05)
    slept = watch.timing
    assert 0.05 <= slept.seconds == slept.wall_seconds < 5.0
    assert slept.cpu_seconds < slept.wall_seconds
    assert slept.peak_bytes > 10 * 2**20
