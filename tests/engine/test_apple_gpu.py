"""`--device mps` if torch supports it. There is no Apple GPU: its limits are simulated on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from softcell import api
from softcell.engine import metrics, optim, resolve_device
from softcell.engine.distributed import World, start
from softcell.engine.metrics import Meter, sum_dtype
from softcell.engine.session import open_session, rng_state, set_rng_state
from softcell.engine.timing import Stopwatch
from softcell.errors import UserError
from softcell.evaluate import predictions
from softcell.evaluate.task import TrainTask
from softcell.search.task import SearchTask

MPS = torch.device("mps")
CELL = "|skip_connect~0|+|none~0|skip_connect~1|+|none~0|none~1|nor_conv_3x3~2|"
TINY: dict[str, Any] = {"epochs": 1, "channels": 2, "threads": 1, "batch_size": 512, "data": "digits"}


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)


def test_mps_is_refused_where_torch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(UserError, match="needs an Apple GPU"):
        resolve_device("mps")


@pytest.mark.usefixtures("apple")
def test_mps_is_accepted_but_never_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_device("mps") == MPS
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto").type == "cpu"


@pytest.mark.usefixtures("apple")
def test_what_an_apple_gpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"seed": 0, "deterministic": False, "threads": 1}
    with (
        pytest.raises(UserError, match="has no float64"),
        open_session(device="mps", precision="float64", **settings),
    ):
        pass
    for name, value in {
        "WORLD_SIZE": "2",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="runs one process"):
        start(MPS)


def test_its_generator_is_saved_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.tensor([1, 2, 3], dtype=torch.uint8)
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(torch.mps, "get_rng_state", lambda: own)
    monkeypatch.setattr(torch.mps, "set_rng_state", kept.append)
    state = rng_state(MPS)
    set_rng_state(state, MPS)
    assert [one.tolist() for one in kept] == [[1, 2, 3]]
    with pytest.warns(UserWarning, match="saved on an Apple GPU and is restored on cpu"):
        set_rng_state(state, torch.device("cpu"))
    assert "mps" not in rng_state(torch.device("cpu"))


def test_a_stopwatch_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waits.append(1))
    with Stopwatch(MPS) as watch:
        assert len(waits) == 1
    assert len(waits) == 2 and watch.timing.seconds >= 0


class NoFloat64(TorchDispatchMode):
    """Fails at the first operation that an Apple GPU does not have."""

    def __torch_dispatch__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else (found,):
            if isinstance(one, torch.Tensor) and one.dtype == torch.float64:
                raise TypeError(f"{function} gives float64")
        return found


@pytest.fixture
def steps_without_float64(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sums as on an Apple GPU, and no float64 in the given methods and functions; counts their calls."""
    for module in (metrics, predictions, optim):
        monkeypatch.setattr(module, "sum_dtype", lambda device: sum_dtype(MPS))

    def watch(calls: list[str], owner: Any, name: str) -> None:
        whole = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            with NoFloat64():
                return whole(*args, **kwargs)

        monkeypatch.setattr(owner, name, watched)

    return watch


def test_no_step_and_no_measurement_of_a_training_run_needs_float64(
    tmp_path: Path, steps_without_float64: Callable[..., None]
) -> None:
    calls: list[str] = []
    steps_without_float64(calls, TrainTask, "step")
    steps_without_float64(calls, __import__("softcell.evaluate.train", fromlist=["predict"]), "predict")
    trained = api.train(CELL, out=tmp_path / "run", ema=0.9, **TINY)
    assert set(calls) == {"step", "predict"} and trained.accuracy is not None


@pytest.mark.parametrize("method", ["darts", "snas"])
def test_no_step_of_a_search_needs_float64(
    method: str, tmp_path: Path, steps_without_float64: Callable[..., None]
) -> None:
    calls: list[str] = []
    steps_without_float64(calls, SearchTask, "step")
    found = api.search(method, space="nb201", out=tmp_path / "run", set={"space.cells_per_stage": 1}, **TINY)
    assert set(calls) == {"step"} and found.genotype is not None


def test_sums_in_float32_give_the_same_means() -> None:
    logits, labels = torch.randn(50, 10, generator=torch.Generator().manual_seed(0)), torch.arange(50) % 10
    exact, narrow = Meter(), Meter()
    narrow.sums = narrow.sums.float()
    for meter in (exact, narrow):
        for _ in range(20):
            meter.judge(logits, labels)
    world = World(0, 1, 0, torch.device("cpu"))
    assert exact.read(world).accuracy == pytest.approx(narrow.read(world).accuracy, rel=1e-6)
    assert exact.read(world).loss == pytest.approx(narrow.read(world).loss, rel=1e-6)
