"""Device, switches, generators, signals, and bfloat16 with float32 weights."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn

from softcell.engine.session import (
    Interrupt,
    exit_code,
    in_precision,
    keep_freed_memory,
    resolve_device,
    rng_state,
    seed_everything,
    set_deterministic,
    set_rng_state,
    set_tf32,
    set_threads,
)
from softcell.errors import UserError
from softcell.nn.conv import AveragePool
from softcell.search import resolve, search
from tests.helpers.kernel_runs import without_tf32

CPU = torch.device("cpu")


def test_auto_takes_cuda_if_available() -> None:
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
    with pytest.raises(UserError, match=r"cuda:1' requires at least 2 CUDA devices.*finds 1 usable CUDA device\."):
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
        with without_tf32():  # what tests of kernels use
            assert (torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32) == (False, False)
        assert (torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32) == (allowed, allowed)


def test_threads_are_set_or_left_to_torch() -> None:
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


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_first_signal_only_sets_a_flag(number: int, code: int) -> None:
    before = signal.getsignal(number)
    with Interrupt() as interrupt:
        assert interrupt.signal == 0
        send(number)
        assert interrupt.signal == number
        assert exit_code(interrupt.signal) == code
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_a_second_sigint_raises_at_once(first: int) -> None:
    with Interrupt():
        send(first)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_second_sigterm_changes_nothing() -> None:
    with Interrupt() as interrupt:
        send(signal.SIGINT)
        send(signal.SIGTERM)
    assert interrupt.signal == signal.SIGINT


def test_a_request_stops_all_runs_like_a_signal_wherever_it_is_made() -> None:
    for nested in (False, True):
        with Interrupt() as outer, Interrupt() as inner:
            (inner if nested else outer).request()
            assert outer.signal == inner.signal == signal.SIGTERM
        assert outer.signal == inner.signal == signal.SIGTERM
    with Interrupt() as later:
        assert later.signal == 0


def test_outside_the_main_thread_nothing_is_caught() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def body() -> None:
        with Interrupt() as interrupt:
            seen.extend([interrupt.signal, signal.getsignal(signal.SIGINT)])

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [0, before]


def test_a_step_computes_in_bfloat16_and_keeps_float32_weights() -> None:
    layer, seen = nn.Linear(4, 4), []

    def step(x: torch.Tensor) -> None:
        seen.append(layer(x).dtype)

    for precision in ("float32", "bfloat16"):
        in_precision(step, precision, torch.device("cpu"))(torch.randn(2, 4))
    assert seen == [torch.float32, torch.bfloat16]
    assert layer.weight.dtype == torch.float32


@pytest.mark.parametrize("method", ["darts", "random"])
def test_a_search_in_bfloat16_ends_near_one_in_float32(tmp_path: Path, method: str) -> None:
    losses = {}
    for precision in ("float32", "bfloat16"):
        settings = {"samples": 1} if method == "random" else {}
        recipe = resolve(
            {"method": method, "space": "nb201", "epochs": 1, "precision": precision, "method_settings": settings}
        )
        found = search(recipe, tmp_path / precision)
        losses[precision] = found.metrics[-1]["train_loss"]
    assert losses["float32"] != losses["bfloat16"]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none")
@pytest.mark.parametrize(
    "pool",
    [
        AveragePool(3, 1, 1, count_include_pad=False),
        AveragePool(3, 2, 1, count_include_pad=False),
        AveragePool(2, 2, ceil_mode=True, count_include_pad=False),
    ],
    ids=["stride 1", "stride 2", "without padding"],
)
def test_the_average_pool_has_the_gradient_of_the_cpu_on_a_gpu(pool: AveragePool) -> None:
    x = torch.randn(2, 4, 9, 6, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    here, there = x.clone().requires_grad_(), x.cuda().requires_grad_()
    y = pool(here)
    grad = torch.randn_like(y)
    (expected,) = torch.autograd.grad(y, here, grad)
    (found,) = torch.autograd.grad(pool(there), there, grad.cuda())
    torch.testing.assert_close(found.cpu(), expected)
    if pool.padding == 0:
        assert found.is_contiguous(memory_format=torch.channels_last)


FAULTS = """
import resource, sys
import numpy
from softcell.engine.session import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):  # as a training step does: the same sizes again and again
        [numpy.ones(1 << 20, numpy.float32) for _ in range(8)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = faults()
kept = keep_freed_memory()
faults()
print(kept, before, faults())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_freed_memory_stays_in_the_process() -> None:
    own = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    asked, before, after = subprocess.check_output([sys.executable, "-c", FAULTS], env=own, text=True).split()
    if asked == "False":
        pytest.skip("the C library has no mallopt")
    assert int(before) > 10_000 and int(after) < int(before) / 10


def test_thresholds_of_the_user_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert keep_freed_memory.__wrapped__() is False
