"""What must hold on a CUDA device: the same numbers as on the CPU, repeatable runs, steps that do not wait."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from softcell.arch import sample
from softcell.data import load, split
from softcell.data.batches import Feeds
from softcell.engine.capture import CapturedStep
from softcell.engine.checkpoint import load_latest
from softcell.engine.session import Session, open_session
from softcell.evaluate import resolve as resolve_training
from softcell.evaluate.task import TrainTask
from softcell.methods.snas import Snas
from softcell.search import SearchRecipe, resolve, search
from softcell.search.steps import StepState, Unrolling, bilevel, single_level, unrolled
from softcell.spaces import build_space
from tests.helpers.search_toys import batch, remains, same, settings, state_of, step_state, training

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
]
DEVICE = "cuda"
REGIMES = ("single-level", "bilevel", "unrolled", "unrolled-exact")
TOLERANCE = 1e-6
"""All is float64 but the learning rate and Adam's bias correction, which recordable optimisers keep in float32."""
WARM = 6
"""Eager steps, the recording and a replay: what may wait is over then."""


def one_step(one: StepState, regime: str, device: str) -> None:
    train, validation = batch(1, device=device), batch(2, device=device)
    if regime == "single-level":
        single_level(one, *train)
    elif regime == "bilevel":
        bilevel(one, train, validation)
    else:
        unrolled(one, train, validation, Unrolling(exact=regime == "unrolled-exact"))


@pytest.mark.parametrize("space", ["nb201", "darts"])
@pytest.mark.parametrize("regime", REGIMES)
def test_a_step_on_cuda_equals_one_on_the_cpu(regime: str, space: str) -> None:
    there, here = step_state(space, device=DEVICE, clip_architecture=0.5), step_state(space, clip_architecture=0.5)
    one_step(there, regime, DEVICE)
    one_step(here, regime, "cpu")
    expected = {**here.supernet.state_dict(), **here.method.state_dict()}
    for name, value in {**there.supernet.state_dict(), **there.method.state_dict()}.items():
        assert value.device.type == DEVICE
        torch.testing.assert_close(
            value.cpu(), expected[name], rtol=0, atol=TOLERANCE, msg=lambda text, n=name: f"{n}: {text}"
        )


# --- waiting ---


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any operation for which the host waits for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_host_read_is_detected() -> None:
    value = torch.ones(1, device=DEVICE)
    with pytest.raises(RuntimeError, match="synchroniz"), no_waiting():
        value.item()


@contextmanager
def session(precision: str = "float32") -> Iterator[Session]:
    with open_session(device=DEVICE, seed=0, precision=precision, deterministic=False, threads=0) as opened:
        yield opened


def search_task(recipe: SearchRecipe, opened: Session, notify: list[Any]) -> Any:
    dataset = load(recipe.data)
    parts = split(dataset.train, recipe.split, recipe.seed)
    make = sys.modules["softcell.search.build"].build_task

    def on_event(event: Any) -> None:
        if not event.text.startswith(("compiling ", "compiled ")):  # which depends on what Triton's cache has
            notify.append(event)

    return make(recipe, dataset, parts, opened, on_event)


def train_task(given: dict[str, Any], opened: Session, notify: list[Any]) -> TrainTask:
    given = dict(given)
    space = build_space(given.pop("in"), given["space_settings"])
    genotype = sample(space.layout(), given.pop("genotype"))
    recipe = resolve_training(genotype, given)
    dataset = load(recipe.data)
    network = space.network(genotype, dataset.shape, dataset.num_classes, auxiliary=recipe.auxiliary > 0)
    feeds = Feeds(dataset, recipe.batch_size, recipe.seed, opened.device, opened.dtype)
    batches = feeds.training(torch.arange(len(dataset.train)), dataset.augment)
    return TrainTask(recipe, network.to(opened.device), opened.world, train=batches, held=None, notify=notify.append)


def warmed(task: Any, epoch: int = 1, more: int = 2) -> list[Any]:
    """Makes the first steps of an epoch that has begun, which may wait; gives `more` batches for those that may not."""
    ready = list(itertools.islice(task.batches(epoch, 0), WARM + more))
    assert len(ready) == WARM + more
    for one in ready[:WARM]:
        task.step(one)
    return ready[WARM:]


def continue_without_waiting(task: Any, ready: list[Any]) -> None:
    with no_waiting():
        for one in ready:
            task.step(one)
    assert task.failed() is None


def step_without_waiting(task: Any) -> None:
    task.begin_epoch(1)
    continue_without_waiting(task, warmed(task))


@pytest.mark.parametrize("engine", ["eager", "graph"])
@pytest.mark.parametrize("space", ["nb201", "darts"])
@pytest.mark.parametrize("regime", REGIMES)
def test_a_search_step_never_waits_for_the_device(regime: str, space: str, engine: str) -> None:
    exact = regime == "unrolled-exact"
    given = settings(space, "digits", device=DEVICE, engine=engine, unrolled={"exact": exact}, threads=0)
    notes: list[Any] = []
    with session() as opened:
        task = search_task(resolve({**given, "regime": regime.removesuffix("-exact")}), opened, notes)
        step_without_waiting(task)
    assert notes == [], "a step that cannot be recorded says so"


@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_a_training_step_never_waits_for_the_device(engine: str) -> None:
    notes: list[Any] = []
    with session() as opened:
        step_without_waiting(train_task(training("darts", "digits", device=DEVICE, engine=engine), opened, notes))
    assert notes == []


# --- recorded steps ---


@pytest.mark.parametrize("regime", ["single-level", "bilevel", "unrolled"])
def test_recorded_steps_and_plain_ones_give_the_same_search(regime: str, tmp_path: Path) -> None:
    """Over three epochs, so that a learning rate frozen into the recording would show."""
    runs = {}
    for engine in ("eager", "graph"):
        given = settings("nb201", "digits", device=DEVICE, engine=engine, regime=regime, batch_size=64)
        runs[engine] = search(resolve(given, {"precision": "float64"}), tmp_path / engine).metrics
    for plain, recorded in zip(runs["eager"], runs["graph"], strict=True):
        for key, value in plain.items():
            if isinstance(value, float) and key != "seconds":
                assert recorded[key] == pytest.approx(value, rel=1e-6, abs=1e-8), key


def test_evaluations_of_a_recorded_unrolled_step_share_their_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every replay has new numbers, but one set for all its evaluations: else the gradient is noise divided by ε."""
    one = step_state("nb201", device=DEVICE, method=Snas)
    one.supernet.use_drop_path(0.3)
    one.supernet.drop_path.set_fraction(1.0)
    train, validation = batch(1, device=DEVICE), batch(2, device=DEVICE)
    found = torch.zeros(sum(p.numel() for p in one.method.parameters()), dtype=torch.float64, device=DEVICE)

    def keep(step_state: StepState, gradients: Any, **options: Any) -> None:
        found.copy_(torch.cat([gradient.flatten() for gradient in gradients]))

    monkeypatch.setattr(StepState, "learn_architecture", keep)
    notes: list[str] = []
    step = CapturedStep(lambda: (unrolled(one, train, validation, Unrolling(epsilon=1e-6)), None)[1], notes.append)
    gradients = []
    for _ in range(2 * WARM):
        step()
        gradients.append(found.clone())
    assert notes == []
    assert all(float(gradient.norm()) < 50 for gradient in gradients), "noise would be of the order of 1/ε"
    assert all(float((a - b).norm()) > 1e-6 for a, b in itertools.combinations(gradients, 2)), "replays must draw"


# --- repeating ---


def run(kind: str, folder: Path, given: dict[str, Any], options: dict[str, Any] | None = None) -> int:
    """A job in a fresh process: cuBLAS reads what makes it repeatable when CUDA starts."""
    path = os.pathsep.join([str(SOURCE), str(ROOT)])
    environment = {name: value for name, value in os.environ.items() if name != "CUBLAS_WORKSPACE_CONFIG"}
    ended = subprocess.run(
        [
            sys.executable,
            str(ROOT / "tests" / "helpers" / "search_jobs.py"),
            f"run_{kind}",
            json.dumps([str(folder), given, options or {}]),
        ],
        env={**environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode in (0, 143), ended.stdout + ended.stderr
    return ended.returncode


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "search-bilevel": ("search", settings("darts", "digits", batch_size=64)),
    "search-unrolled": ("search", settings("nb201", "digits", batch_size=64, regime="unrolled")),
    # Concrete samples and dropped paths inside the recorded step: a resumed run must draw what an unbroken one does.
    "search-snas-drop-path": (
        "search",
        settings("darts", "digits", method="snas", drop_path=0.3, engine="graph", batch_size=64),
    ),
    "search-snas-unrolled": (
        "search",
        settings("nb201", "digits", method="snas", regime="unrolled", drop_path=0.3, engine="graph", batch_size=64),
    ),
    # Gamma variables and one-hot samples inside the recorded step.
    "search-drnas-unrolled": (
        "search",
        settings("nb201", "digits", method="drnas", regime="unrolled", engine="graph", batch_size=64),
    ),
    "search-gdas": ("search", settings("nb201", "digits", method="gdas", engine="graph", batch_size=64)),
    # Each of three architectures is captured; the run is interrupted in the second one.
    "search-random": (
        "search",
        settings("nb201", "digits", method="random", method_settings={"samples": 3}, epochs=1, batch_size=64),
    ),
    "train": ("train", training("darts", "digits", batch_size=128)),
}


@pytest.mark.parametrize("name", CASES)
def test_deterministic_runs_repeat_bit_by_bit_also_when_interrupted(name: str, tmp_path: Path) -> None:
    kind, given = CASES[name]
    given = {**given, "device": DEVICE, "deterministic": True, "threads": 0}
    assert run(kind, tmp_path / "first", given) == 0
    assert run(kind, tmp_path / "second", given) == 0
    assert remains(tmp_path / "first") == remains(tmp_path / "second")
    assert same(state_of(tmp_path / "first"), state_of(tmp_path / "second"))

    broken = tmp_path / "broken"
    assert run(kind, broken, given, {"strike": [signal.SIGTERM, 1, 5]}) == 143
    loaded = load_latest(broken)
    assert loaded is not None
    assert (loaded.state["epoch"], loaded.state["step"]) == (1, 5)
    assert run(kind, broken, given) == 0
    assert remains(broken) == remains(tmp_path / "first")
    assert same(state_of(broken), state_of(tmp_path / "first"))


def test_a_resumed_optimiser_keeps_its_rate_on_the_device() -> None:
    """A rate on the host would be frozen into the recording of a resumed run."""
    with session() as opened:
        recipe = resolve(settings("nb201", "digits", device=DEVICE))
        task, other = (search_task(recipe, opened, []) for _ in range(2))
        task.begin_epoch(0)
        task.step(next(iter(task.batches(0, 0))))
        state = task.state_dict()
        for part in ("weight_optimiser", "architecture_optimiser"):
            for group in state[part]["param_groups"]:
                group["lr"] = torch.as_tensor(group["lr"]).cpu()
        other.load_state_dict(state)
        for optimiser in (other.step_state.weight_optimiser, other.step_state.architecture_optimiser):
            rate = optimiser.param_groups[0]["lr"]
            assert isinstance(rate, torch.Tensor)
            assert rate.device.type == DEVICE
