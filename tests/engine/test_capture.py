"""When a step runs eagerly, is recorded and is replayed, key by key; CUDA is replaced by a stand-in."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from softcell.engine.capture import (
    EAGER_STEPS_PER_KEY,
    STREAM_POOL,
    STREAM_PRIORITIES,
    CapturedStep,
    Engine,
    Readback,
    between_parts,
    once,
    prepare_step,
)
from softcell.engine.distributed import World
from softcell.errors import UserError
from softcell.kernels import backend


class State:
    """The state of a generator, which counts what was drawn."""

    def __init__(self, drawn: int = 0) -> None:
        self.drawn, self.recorded = drawn, False


class Generator:
    """Stands in for a device's generator: like torch's, it refuses to draw after a failed recording."""

    def __init__(self) -> None:
        self.state = State()

    def clone_state(self) -> State:
        return State(self.state.drawn)

    def graphsafe_set_state(self, state: State) -> None:
        self.state = state

    def draw(self) -> int:
        assert not self.state.recorded, "offset increment outside graph capture"
        self.state.drawn += 1
        return self.state.drawn


class Recording:
    """Stands in for `torch.cuda.CUDAGraph`: replays what was called while it was being recorded."""

    generator = Generator()

    current: Recording | None = None

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.alive = True

    def capture_begin(self, pool: object) -> None:
        assert pool == "pool"
        assert not gc.isenabled(), "collected garbage may hold graphs, whose end ends the recording"
        Recording.current, self.state = self, Recording.generator.state
        self.state.recorded = True

    def capture_end(self) -> None:
        Recording.current = None
        if not self.calls:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.state.recorded = False

    def replay(self) -> None:
        assert self.alive, "a recording that was dropped must not be replayed"
        assert self.state is Recording.generator.state, "it would draw from a state that is never saved"
        for call in self.calls:
            call()

    def reset(self) -> None:
        self.alive = False


class Stream:
    """From a pool that starts over after as many streams as torch's; each priority has its own."""

    dealt: ClassVar[dict[int, int]] = {}

    def __init__(self, device: int | None = None, priority: int = 0) -> None:
        number = Stream.dealt[priority] = Stream.dealt.get(priority, -1) + 1
        self.cuda_stream = 1000 * (1 - priority) + number % STREAM_POOL

    def wait_stream(self, other: Stream) -> None: ...


@pytest.fixture(autouse=True)
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recording, "generator", Generator())
    monkeypatch.setattr(torch.cuda, "default_generators", (Recording.generator,))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(Stream, "dealt", {})
    gc.collect()  # frees the streams of earlier tests
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())


class Subject:
    """A step that notes (key, how it ran, what it read)."""

    def __init__(self, **options: Any) -> None:
        self.key: Any = None
        self.done: list[tuple[Any, str, float]] = []
        self.notes: list[str] = []
        self.drawn: list[int] = []
        self.run = CapturedStep(self.step, self.notes.append, **options)

    def step(self, x: Tensor) -> None:
        key = self.key
        if Recording.current is None:
            self._run("eager", key, x)
        elif key == "bad":
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        else:
            Recording.current.calls.append(lambda: self._run("replayed", key, x))

    def _run(self, how: str, key: Any, x: Tensor) -> None:
        self.done.append((key, how, float(x)))
        self.drawn.append(Recording.generator.draw())

    def __call__(self, key: Any, value: float) -> tuple[Any, str, float]:
        self.key = key
        self.run(torch.tensor(value), key=key)
        return self.done[-1]


def test_a_step_without_key_is_eager_at_first_and_then_replayed_on_new_inputs() -> None:
    subject = Subject(warmup=3)
    ran = [subject(None, float(i)) for i in range(6)]
    assert ran == [(None, "eager" if i < 3 else "replayed", float(i)) for i in range(6)]
    assert len(subject.done) == 6, "every call is one step"


def test_every_key_is_tried_eagerly_before_it_is_recorded() -> None:
    subject = Subject(warmup=3)
    keys = ["a", "b", "c", "a", "a", "b", "b", "a", "c", "b"]
    ran = [subject(key, float(i)) for i, key in enumerate(keys)]
    seen: dict[str, int] = {}
    for i, (key, (ran_key, how, value)) in enumerate(zip(keys, ran, strict=True)):
        seen[key] = seen.get(key, 0) + 1
        assert (ran_key, value) == (key, float(i))
        assert how == ("eager" if i < 3 or seen[key] <= EAGER_STEPS_PER_KEY else "replayed")


def test_a_key_that_never_repeats_is_never_recorded() -> None:
    subject = Subject(warmup=1)
    assert [subject(key, 0.0)[1] for key in range(50)] == ["eager"] * 50


def test_tables_that_kernels_read_live_as_long_as_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search of many architectures records each of them; their tables must not add up."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Recording.current is not None)
    made: list[weakref.ref[backend.KeptTable]] = []

    class Launching(Subject):
        def step(self, x: Tensor) -> None:
            super().step(x)
            kept = backend.KeptTable(((len(made),),), torch.device("cpu"))
            kept._on_gpu = True
            made.append(weakref.ref(kept))
            # As kernels of a backward pass do, in a thread of autograd's.
            thread = threading.Thread(target=kept.await_copy)
            thread.start()
            thread.join()

    subject = Launching(warmup=1)
    before = set(backend._captured)
    assert [subject(None, 0.0)[1] for _ in range(4)] == ["eager", "eager", "replayed", "replayed"]
    assert [table() is not None for table in made] == [False, False, True], "only a recording reads by address"
    assert backend._captured == before
    del subject
    gc.collect()
    assert all(table() is None for table in made)


def test_too_many_recordings_are_dropped_together_and_made_again_on_demand() -> None:
    """One that ends takes what others of its stream work with."""
    subject = Subject(warmup=0, kept=2)
    for key in ("a", "b"):
        assert [subject(key, 0.0)[1] for _ in range(EAGER_STEPS_PER_KEY + 1)][-1] == "replayed"
    recorded: list[Any] = [graph for own in subject.run._graphs.values() for graph in own._graphs]
    for _ in range(EAGER_STEPS_PER_KEY):
        subject("c", 2.0)
    assert subject("a", 1.0) == ("a", "replayed", 1.0) and all(graph.alive for graph in recorded)
    assert subject("c", 2.0) == ("c", "replayed", 2.0) and not any(graph.alive for graph in recorded)
    assert list(subject.run._graphs) == ["c"]
    assert subject("b", 3.0) == ("b", "replayed", 3.0), "it was tried before, so it is recorded again at once"
    assert list(subject.run._graphs) == ["c", "b"]


def test_no_two_live_steps_share_a_stream_however_many_torch_has_handed_out() -> None:
    mine = [Subject(warmup=1) for _ in range(3)]
    for subject in mine:
        subject("a", 0.0)
    for _ in range(STREAM_POOL):
        Stream()  # streams of others; the next one is the first again
    more = [Subject(warmup=1) for _ in range(STREAM_POOL)]
    for subject in more:
        subject("a", 0.0)
    handles = [subject.run._side.cuda_stream for subject in (*mine, *more) if subject.run._side is not None]
    assert len(set(handles)) == len(handles) == STREAM_POOL + 3


def test_freed_streams_are_reused_and_too_many_at_once_are_refused() -> None:
    for _ in range(3 * STREAM_POOL * len(STREAM_PRIORITIES)):
        Subject(warmup=1)("a", 0.0)
    alive = [Subject(warmup=1) for _ in range(STREAM_POOL * len(STREAM_PRIORITIES))]
    for subject in alive:
        subject("a", 0.0)
    with pytest.raises(UserError, match="let fewer runs share it"):
        Subject(warmup=1)("a", 0.0)


def test_a_key_that_cannot_be_recorded_makes_all_steps_eager_and_says_so_once() -> None:
    subject = Subject(warmup=0)
    for _ in range(EAGER_STEPS_PER_KEY + 2):
        assert subject("bad", 1.0)[1] == "eager"
    assert subject("a", 1.0)[1] == "eager"
    (reason,) = subject.notes
    assert "not permitted" in reason
    assert "more" not in reason


def test_random_numbers_continue_after_a_recording_that_failed() -> None:
    """As if nothing had been recorded; another step's recording is made again, with the numbers that follow."""
    good, bad = Subject(warmup=0), Subject(warmup=0)
    for _ in range(EAGER_STEPS_PER_KEY + 2):
        good("a", 0.0)
    for _ in range(EAGER_STEPS_PER_KEY + 2):
        bad("bad", 0.0)
    assert good("a", 0.0)[1] == "replayed"
    assert bad("bad", 0.0)[1] == "eager"
    assert good("a", 0.0)[1] == "replayed"
    assert sorted(good.drawn + bad.drawn) == list(range(1, 2 * EAGER_STEPS_PER_KEY + 8))
    assert not good.notes and len(bad.notes) == 1


@pytest.mark.parametrize(
    ("engine", "device", "size", "said"),
    [
        ("graph", "cpu", 1, "needs a CUDA device"),
        ("graph", "cuda", 2, "norms=local can be captured"),
        ("auto", "cuda", 2, "norms=local can be captured"),
        ("auto", "cpu", 1, None),
        ("eager", "cuda", 2, None),
    ],
)
def test_a_run_that_records_nothing_says_why_once(
    engine: Engine, device: str, size: int, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    notes: list[str] = []
    notify, steps = once(notes.append), [lambda: None, lambda: None]
    for step in steps:
        assert prepare_step(step, engine, World(0, size, 0, torch.device(device)), notify) is step
    assert len(notes) == (said is not None)
    assert said is None or (said in notes[0] and f"engine={engine}" in notes[0])


@pytest.mark.parametrize(("backend", "divides"), [("nccl", False), ("nccl", True), ("gloo", True)])
def test_steps_of_several_processes_are_recorded_if_their_collectives_can_be(
    backend: str, divides: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: backend)
    world = World(0, 2, 0, torch.device("cuda"))
    step = prepare_step(lambda: None, "auto", world, pytest.fail, divides=divides)
    assert isinstance(step, CapturedStep)


class Divided:
    """A step of two parts with a call on the host between them; each adds its name to what was done."""

    def __init__(self, fails: bool = False) -> None:
        self.done: list[str] = []
        self.notes: list[str] = []
        self._fails = fails
        self.run = CapturedStep(self.step, self.notes.append, warmup=0)

    def step(self, x: Tensor) -> None:
        self._device("first", x)
        between_parts(lambda: self.done.append(f"host {x.item():g}"))
        if self._fails and Recording.current is not None:
            raise RuntimeError("not permitted")
        self._device("second", x)

    def _device(self, name: str, x: Tensor) -> None:
        def work() -> None:
            self.done.append(f"{name} {x.item():g}")

        work() if Recording.current is None else Recording.current.calls.append(work)

    def __call__(self, value: float) -> list[str]:
        self.done.clear()
        self.run(torch.tensor(value), key="a")
        return list(self.done)


def test_a_recording_is_divided_at_host_calls() -> None:
    subject = Divided()
    for value in range(EAGER_STEPS_PER_KEY + 3):
        expected = [f"first {value}", f"host {value}", f"second {value}"]
        assert subject(float(value)) == expected, "eager, recorded or replayed, in this order and once"
    (graph,) = subject.run._graphs.values()
    assert len(graph._graphs) == 2
    assert not subject.notes


def test_a_divided_recording_that_fails_leaves_an_eager_step() -> None:
    subject = Divided(fails=True)
    for value in range(EAGER_STEPS_PER_KEY + 2):
        assert subject(float(value)) == [f"first {value}", f"host {value}", f"second {value}"]
    assert len(subject.notes) == 1
    subject.done.clear()
    between_parts(lambda: subject.done.append("now"))
    assert subject.done == ["now"], "no recording is left open"


def test_a_readback_returns_the_value_of_the_previous_call() -> None:
    back, value = Readback(), torch.zeros(2)
    assert back.exchange(value) is None
    value += 1
    first = back.exchange(value)
    assert first is not None
    assert first.tolist() == [0.0, 0.0], "a copy: what happens to the tensor later is not seen"
    other = Readback()
    other.restore(back.pending())
    value += 1
    again, there = other.exchange(value), back.exchange(value)
    assert again is not None
    assert there is not None
    assert again.tolist() == there.tolist() == [1.0, 1.0]
