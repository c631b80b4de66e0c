"""Two real processes on half batches against one on the whole batch, in float64, through `search` and `train`."""

import dataclasses
import functools
import json
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from softcell.engine.checkpoint import load_latest
from softcell.methods import METHODS
from softcell.methods.base import UntrainedSampler
from softcell.spaces import SPACES
from softcell.testing import tiny_space
from tests.helpers.search_forks import Forks, forks
from tests.helpers.search_toys import settings, training, write_data

TOLERANCE = 1e-10
DEFAULT = (("gdas", "nb201"), ("darts", "proxyless"))
"""Methods and spaces of the default run that the cases below do not have: one drawn path, and a mixed chain."""


def cases(data: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    double = {"precision": "float64", "epochs": 2}
    once = {**double, "epochs": 1}
    one = {"method_settings": {"samples": 2}, "method": "random"}
    return {
        "bilevel": ("search", settings("nb201", data, cutout=2, **double)),
        "bilevel-darts": ("search", settings("darts", data, **once)),
        "unrolled": ("search", settings("nb201", data, regime="unrolled", **once)),
        "unrolled-exact": ("search", settings("nb201", data, regime="unrolled", unrolled={"exact": True}, **once)),
        "single-level": ("search", settings("nb201", data, regime="single-level", **once)),
        "snas": (
            "search",
            settings("nb201", data, method="snas", drop_path=0.3, resource={"max_params": "80k"}, **double),
        ),
        "entrannas-dst": ("search", settings("nb201", data, method="entrannas-dst", child_every=0, **once)),
        "itnas-single": (
            "search",
            settings("nb201", data, method="itnas", method_settings={"paths": "single"}, **once),
        ),
        "random": ("search", settings("nb201", data, **one, **once)),
        "train": ("train", training("darts", data, **double)),
    }


NAMES = tuple(cases(Path("data.npz")))
FUSED: dict[str, dict[str, Any]] = {"bilevel-darts": {}, "snas": {}, "random": {}, "train": {}}
"""Cases that run again with fused cells, by the kernels' plain twins, on two ranks; and their settings for it."""
FAMILIES = [
    pytest.param(method, marks=[] if method in ("gdas", "entrannas-dst", "nos") else [pytest.mark.exhaustive])
    for method in METHODS
    if not issubclass(METHODS.get(method), UntrainedSampler) and method != "random"
]
"""Methods by the way they combine candidates: one drawn path, a changing set of live ones, calibrations; then all."""
PAIRS = [
    pytest.param(method, space, marks=[] if (method, space) in DEFAULT else [pytest.mark.exhaustive])
    for method in METHODS
    for space in SPACES
    if not issubclass(METHODS.get(method), UntrainedSampler)
]


class Twice:
    """The same run on one process and on two; `options` are those of `run_checked` on both of these."""

    def __init__(
        self, server: Forks, root: Path, kind: str, given: dict[str, Any], options: dict[str, Any] | None = None
    ) -> None:
        self.server, self.root, self.kind, self.given = server, root, kind, given
        self.options = options or {}
        self.one, self.two = root / "one", root / "two"
        server.run(root, f"run_{kind}", self.one, given)
        began = time.perf_counter()
        self.values = [job.wait().get() for job in self.start(self.two)]
        self.seconds = time.perf_counter() - began

    def start(self, folder: Path, options: dict[int, Any] | None = None, size: int = 2) -> list[Any]:
        """Rank 1 is given a separate folder, to which it must never write."""

        def arguments(rank: int) -> tuple[Any, ...]:
            out = folder if rank == 0 else self.not_for_writing(folder)
            return self.kind, out, self.given, {**self.options, **(options or {}).get(rank, {})}, folder

        return list(self.server.start_ranks(size, self.root, "run_checked", arguments))

    def not_for_writing(self, folder: Path) -> Path:
        return folder.with_name(folder.name + "-rank1")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "data.npz")


@pytest.fixture(scope="module")
def made(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Twice]:
    """By name, made once for all tests that want it."""

    @functools.cache
    def make(name: str) -> Twice:
        kind, given = cases(data)[name]
        return Twice(forks(), tmp_path_factory.mktemp(name), kind, given)

    return make


@pytest.fixture(params=NAMES)
def twice(request: pytest.FixtureRequest, made: Callable[[str], Twice]) -> Twice:
    return made(request.param)


def assert_close(a: Any, b: Any, where: str = "") -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            if key not in ("seconds", "world_size", "local"):
                assert_close(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), where
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_close(x, y, f"{where}[{index}]")
    elif isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{where}: {text}")
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=TOLERANCE, abs=TOLERANCE), where
    else:
        assert a == b, where


def state(folder: Path) -> dict[str, Any]:
    """Weights, logits and optimisers in the last checkpoint."""
    loaded = load_latest(folder)
    assert loaded is not None
    found: dict[str, Any] = loaded.state["task"]
    return found


def rows(folder: Path, name: str = "metrics.jsonl") -> list[Any]:
    found = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in found]


def test_two_ranks_on_half_batches_equal_one_on_the_whole(twice: Twice) -> None:
    check_close(twice)


@pytest.mark.parametrize("name", FUSED)
def test_fused_cells_on_two_ranks_equal_modules_on_one(name: str, data: Path, tmp_path: Path) -> None:
    kind, given = cases(data)[name]
    # Factors of drop-path are float32 in fused cells.
    given |= {"drop_path": 0.0, "epochs": 1, **FUSED[name]}
    twice = Twice(forks(), tmp_path, kind, given, {"fuse": True})
    assert twice.values[0]["fused"] > 0
    check_close(twice)


@pytest.mark.parametrize(("method", "space"), PAIRS)
def test_every_method_in_every_space_gives_the_same_on_two_ranks_as_on_one(
    method: str, space: str, data: Path, tmp_path: Path
) -> None:
    check_close(Twice(forks(), tmp_path, "search", tiny_settings(method, space, data)))


@pytest.mark.parametrize("method", FAMILIES)
def test_every_method_with_fused_cells_on_two_ranks_equals_modules_on_one(
    method: str, data: Path, tmp_path: Path
) -> None:
    space = method if method in ("nos", "fullattention") else "darts"
    twice = Twice(forks(), tmp_path, "search", tiny_settings(method, space, data), {"fuse": True})
    (alone,) = [job.wait().get() for job in twice.start(tmp_path / "alone", size=1)]
    assert twice.values[0]["fused"] == alone["fused"], "no cell is fused on one process alone"
    assert (alone["fused"] > 0) == (method not in ("gdas", "spos")), "one drawn path has nothing to fuse"
    check_close(twice)


def tiny_settings(method: str, space: str, data: Path) -> dict[str, Any]:
    tiny: Any = tiny_space(space)
    sizes = {field.name: getattr(tiny, field.name) for field in dataclasses.fields(tiny) if field.init}
    given = settings("nb201", data, method=method, precision="float64", epochs=1)
    given |= {"space": space, "space_settings": sizes, "child_every": 0}
    given["evolution"] = {"generations": 0}
    if method == "random":
        given["method_settings"] = {"samples": 1}
    return given


def test_local_norms_give_the_same_on_all_ranks_and_not_what_shared_ones_give(
    data: Path, tmp_path: Path, made: Callable[[str], Twice]
) -> None:
    twice = made("bilevel")
    local = Twice(forks(), tmp_path, "search", {**twice.given, "norms": "local"})
    assert local.values[0]["checks"] == local.values[1]["checks"] > 0
    assert rows(local.one) == rows(twice.one), "one process has nothing to share"
    assert rows(local.two) != rows(twice.two)


def check_close(twice: Twice) -> None:
    assert_close(rows(twice.two), rows(twice.one))
    assert_close(state(twice.two), state(twice.one))
    if twice.kind == "search":
        assert_close(rows(twice.two, "architecture.jsonl"), rows(twice.one, "architecture.jsonl"))
        assert (twice.two / "genotype.json").read_text() == (twice.one / "genotype.json").read_text()
        if (twice.one / "credit.jsonl").exists():
            assert_close(rows(twice.two, "credit.jsonl"), rows(twice.one, "credit.jsonl"))
    else:
        results = [json.loads((folder / "run.json").read_text())["results"] for folder in (twice.two, twice.one)]
        for key in ("accuracy", "loss", "count"):
            assert results[0][key] == pytest.approx(results[1][key], rel=TOLERANCE)


def test_all_ranks_hold_the_same_after_every_step_and_report_the_same(twice: Twice) -> None:
    first, second = twice.values
    assert first["checks"] == second["checks"] > 0
    assert [{**row, "seconds": 0} for row in first["metrics"]] == [{**row, "seconds": 0} for row in second["metrics"]]


def test_only_rank_0_writes_files_and_messages(twice: Twice) -> None:
    assert not twice.not_for_writing(twice.two).exists()
    assert twice.values[1]["notes"] == []


@pytest.fixture(params=["bilevel", "train"])
def broken(request: pytest.FixtureRequest, made: Callable[[str], Twice]) -> Twice:
    return made(request.param)


def check_same(twice: Twice, folder: Path) -> None:
    """Bit by bit what two unbroken ranks leave."""
    assert rows(folder) == rows(twice.two)
    assert (folder / "genotype.json").read_text() == (twice.two / "genotype.json").read_text()
    equal(state(folder), state(twice.two))


def equal(a: Any, b: Any) -> None:
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        for x, y in zip(a, b, strict=True):
            equal(x, y)
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_two_killed_ranks_resume_bit_by_bit(broken: Twice) -> None:
    stops, trial = 0, 0
    while stops < 1:
        folder = broken.root / f"killed{trial}"
        more, _ = broken.server.until_finished(
            broken.root, lambda folder=folder: broken.start(folder), signal.SIGKILL, trial, 0.8 * broken.seconds
        )
        check_same(broken, folder)
        stops, trial = stops + more, trial + 1


def test_a_signal_to_one_rank_stops_both_within_the_epoch(broken: Twice) -> None:
    """Rank 1 alone gets the signal: events reach rank 0 only, so the job strikes by a patched step."""
    folder = broken.root / "signalled"
    shutil.rmtree(folder, ignore_errors=True)
    ended = [job.wait() for job in broken.start(folder, {1: {"strike_at_check": [signal.SIGTERM, 1]}})]
    assert [one.code for one in ended] == [143, 143], ended[0].output + ended[1].output
    loaded = load_latest(folder)
    assert loaded is not None
    assert (loaded.state["epoch"], loaded.state["step"]) == (0, 1)
    assert len(loaded.state["local"]) == 2
    for job in broken.start(folder):
        job.wait().get()
    check_same(broken, folder)


def resumed(twice: Twice, before: int, now: int, trial: int = 0) -> Path:
    """The folder of a run that is stopped after its first step and resumed with another number of processes."""
    folder = twice.root / f"from-{before}-to-{now}-{trial}"
    ended = [job.wait() for job in twice.start(folder, {0: {"strike_at_check": [signal.SIGTERM, 1]}}, before)]
    assert [one.code for one in ended] == [143] * before, ended[0].output
    loaded = load_latest(folder)
    assert loaded is not None and (loaded.state["world_size"], loaded.state["step"]) == (before, 1)
    first, *_ = [job.wait().get() for job in twice.start(folder, size=now)]
    assert any(f"had {before} processes and now has {now}" in note for note in first["notes"])
    return folder


@pytest.mark.parametrize("name", ["snas", "train"])
@pytest.mark.parametrize(("before", "now"), [(2, 1), (1, 2)])
def test_a_run_resumes_within_an_epoch_with_another_number_of_processes(
    made: Callable[[str], Twice], name: str, before: int, now: int
) -> None:
    """Up to rounding it leaves what one process leaves; `snas` also records sums of an observer within the epoch."""
    twice = made(name)
    folder = resumed(twice, before, now)
    assert_close(rows(folder), rows(twice.one))
    assert_close(state(folder), state(twice.one))
    if name == "snas":
        assert_close(rows(folder, "credit.jsonl"), rows(twice.one, "credit.jsonl"))
    # Only sums round otherwise: random numbers and schedules do not depend on the number of processes at all.
    loaded, unbroken = load_latest(folder), load_latest(twice.one)
    assert loaded is not None and unbroken is not None
    equal(loaded.state["rng"], unbroken.state["rng"])
    schedules = [[(row["lr"], row.get("temperature")) for row in rows(one)] for one in (folder, twice.one)]
    assert schedules[0] == schedules[1]
    for key, value in unbroken.state["task"].items():
        if key.endswith("optimiser"):
            equal(loaded.state["task"][key]["param_groups"], value["param_groups"])


def test_the_same_numbers_of_processes_repeat_a_run_bit_by_bit_and_others_round_otherwise(
    made: Callable[[str], Twice],
) -> None:
    twice = made("train")
    first, second = (resumed(twice, 2, 1, trial) for trial in (1, 2))
    assert rows(first) == rows(second)
    equal(state(first), state(second))
    # Parts of a batch are summed on each process and then over processes: another order of additions.
    for other in (twice.one, twice.two):
        with pytest.raises(AssertionError):
            equal(state(first), state(other))
