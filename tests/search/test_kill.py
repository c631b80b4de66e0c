"""Searches and training runs in real processes that are killed, interrupted, damaged and resumed."""

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from softcell.engine.checkpoint import CURRENT, PREVIOUS, load_latest
from tests.helpers.search_forks import Forks, forks
from tests.helpers.search_toys import THREE_EDGES, remains, same, settings, state_of, training, write_data


class Case:
    """One kind of run: its function and settings, and an unbroken run to compare with."""

    def __init__(self, server: Forks, root: Path, function: str, given: dict[str, Any]) -> None:
        self.server, self.root, self.function, self.given = server, root, function, given
        self.whole = root / "whole"
        began = time.perf_counter()
        server.run(root / "jobs", function, self.whole, given)
        self.seconds = time.perf_counter() - began

    def go(self, folder: Path, **options: Any) -> Any:
        return self.server.start(self.root / "jobs", self.function, folder, self.given, options)

    def check(self, folder: Path) -> None:
        assert remains(folder) == remains(self.whole)
        assert same(state_of(folder), state_of(self.whole))

    def fresh(self, name: str) -> Path:
        folder = self.root / name
        shutil.rmtree(folder, ignore_errors=True)
        return folder


CASES = ("darts-nb201", "unrolled-nb201", "random-nb201", "train-darts")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    root = tmp_path_factory.mktemp("kill")
    data = write_data(root / "data.npz")
    sizes = {"space_settings": THREE_EDGES}
    wanted = {
        "darts-nb201": ("run_search", settings("nb201", data, cutout=2, **sizes)),
        "unrolled-nb201": ("run_search", settings("nb201", data, regime="unrolled", epochs=2, **sizes)),
        "random-nb201": (
            "run_search",
            settings("nb201", data, method="random", epochs=2, method_settings={"samples": 2}, **sizes),
        ),
        "train-darts": ("run_train", training("darts", data)),
    }
    return {name: Case(forks(), root / name, function, given) for name, (function, given) in wanted.items()}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, cases: dict[str, Case]) -> Case:
    return cases[request.param]


def test_a_run_killed_at_random_moments_ends_like_an_uninterrupted_one(case: Case) -> None:
    kills, trial = 0, 0
    while kills < 2:
        folder = case.fresh(f"killed{trial}")
        stops, _ = case.server.until_finished(
            case.root, lambda folder=folder: [case.go(folder)], signal.SIGKILL, trial, longest=0.7 * case.seconds
        )
        case.check(folder)
        kills, trial = kills + stops, trial + 1


def test_a_run_stopped_within_an_epoch_saves_its_step(case: Case) -> None:
    """In the middle of an epoch and after the last step of one, before its evaluation."""
    folder = case.fresh("interrupted")
    strikes = [(signal.SIGTERM, 0, 1), (signal.SIGINT, 1, 2)]
    if len((case.whole / "metrics.jsonl").read_text().splitlines()) > 2:
        strikes.append((signal.SIGTERM, 2, 1))
    for number, epoch, step in strikes:
        ended = case.go(folder, strike=[number, epoch, step]).wait()
        assert ended.code == 128 + number, ended.output
        loaded = load_latest(folder)
        assert loaded is not None
        assert (loaded.state["epoch"], loaded.state["step"]) == (epoch, step)
        assert json.loads((folder / "run.json").read_text())["status"] == "interrupted"
    case.go(folder).wait().get()
    case.check(folder)


def test_a_run_interrupted_from_outside_at_random_moments_ends_the_same(cases: dict[str, Case]) -> None:
    case = cases["darts-nb201"]
    stops, trial = 0, 0
    while stops < 1:
        folder = case.fresh(f"terminated{trial}")
        more, _ = case.server.until_finished(
            case.root, lambda folder=folder: [case.go(folder)], signal.SIGTERM, trial, longest=0.7 * case.seconds
        )
        case.check(folder)
        stops, trial = stops + more, trial + 1


@pytest.mark.parametrize("kind", ["search", "train"])
def test_a_run_killed_at_its_birth_or_at_its_end_can_be_resumed(kind: str, tmp_path: Path) -> None:
    """Dies before each file operation up to the first checkpoint, and before each of those after the last one."""
    make = {"search": settings, "train": training}[kind]
    given = make("nb201", write_data(tmp_path / "data.npz", train=32), epochs=1, space_settings=THREE_EDGES)
    case = Case(forks(), tmp_path / "runs", f"run_{kind}", given)
    count = case.go(case.fresh("counted"), die_before=10**6).wait().get()["operations"]
    assert count > 16
    for number in (*range(8), *range(count - 6, count)):
        folder = case.fresh("born")
        ended = case.go(folder, die_before=number).wait()
        assert ended.code == -signal.SIGKILL, ended.output
        ended = case.go(folder).wait()
        assert ended.code == 0, f"killed before file operation {number}\n{ended.output}"
        case.check(folder)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_used(damage: str, cases: dict[str, Case]) -> None:
    case = cases["darts-nb201"]
    folder = case.fresh("spoilt")
    ended = case.go(folder, strike=[signal.SIGTERM, 2, 1]).wait()
    assert ended.code == 143, ended.output
    file = folder / CURRENT
    content = bytearray(file.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 1
    file.write_bytes({"cut": content[:-7], "flipped": content, "empty": b""}[damage])
    assert (folder / PREVIOUS).exists()
    value = case.go(folder).wait().get()
    assert any(CURRENT in note and PREVIOUS in note for note in value["notes"])
    case.check(folder)


def test_two_damaged_checkpoints_are_refused_with_a_fix(cases: dict[str, Case]) -> None:
    case = cases["darts-nb201"]
    folder = case.fresh("hopeless")
    shutil.copytree(case.whole, folder)
    for name in (CURRENT, PREVIOUS):
        (folder / name).write_bytes(b"nothing")
    found = case.server.run(case.root, "error_of", "search", folder, case.given)
    assert found["type"] == "UserError"
    assert "backup" in found["text"]


@pytest.mark.parametrize("name", ["darts-nb201", "train-darts"])
def test_a_run_repeats_from_its_run_json_alone(name: str, cases: dict[str, Case]) -> None:
    case = cases[name]
    folder = case.fresh("repeated")
    folder.mkdir()
    shutil.copy(case.whole / "run.json", folder)
    case.go(folder).wait().get()
    case.check(folder)


def test_a_finished_run_may_be_resumed_and_stays_as_it_is(case: Case) -> None:
    folder = case.fresh("again")
    shutil.copytree(case.whole, folder)
    case.go(folder).wait().get()
    case.check(folder)
