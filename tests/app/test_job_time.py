"""The time of a job, measured on its first steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from softcell.app import jobs
from softcell.app.jobs import ENOUGH_ENDS, JobTime, measure_job
from softcell.app.pipeline._choose import expected_start
from softcell.engine.task import EpochEnded, OnEvent, Started, Stepped

READING, STEP, END, SLOW = 3.0, 0.5, 1.0, 4.5


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that is set by the test."""
    moment = [100.0]
    monkeypatch.setattr(jobs.time, "perf_counter", lambda: moment[0])
    return moment


def job(now: list[float], ended: list[int], steps: int = 4, slow: int = 1) -> Callable[[Path, OnEvent], None]:
    """Reads data, then trains; the first `slow` steps take `SLOW` seconds longer than others."""

    def run(folder: Path, watch: OnEvent) -> None:
        folder.mkdir()
        now[0] += READING
        watch(Started(0, 0, 100))
        for epoch in range(100):
            for step in range(steps):
                now[0] += STEP + (SLOW if epoch == 0 and step < slow else 0.0)
                watch(Stepped(epoch, step + 1, steps, 0.0, None))
            now[0] += END
            ended.append(epoch)
            watch(EpochEnded(epoch, {}))

    return run


@pytest.mark.parametrize("slow", [1, 3])
def test_the_start_is_separated_from_whole_epochs_and_no_files_are_left(
    tmp_path: Path, now: list[float], slow: int
) -> None:
    ended: list[int] = []
    found = measure_job(job(now, ended, slow=slow), tmp_path / "scratch", 20.0, evaluated=9.0, tested=1.0)
    assert found.epoch == pytest.approx(4 * STEP + END)
    assert found.startup == pytest.approx(READING + slow * SLOW)  # slow steps are part of it, as recorded steps are
    assert found.total(7) == pytest.approx(READING + slow * SLOW + 7 * (4 * STEP + END) + found.tail)
    assert 2 <= len(ended) < 9 and not (tmp_path / "scratch").exists()


def test_without_two_epochs_the_time_is_measured_from_steps(tmp_path: Path, now: list[float]) -> None:
    ended: list[int] = []
    short = measure_job(job(now, ended), tmp_path / "scratch", 0.6, evaluated=1.0, tested=0.0)
    assert not ended and short.startup == pytest.approx(READING + SLOW + STEP)
    assert short.epoch == pytest.approx(4 * STEP * (1 + jobs.EVALUATION))
    one = measure_job(job(now, ended), tmp_path / "scratch", 3.0, evaluated=9.0, tested=0.0)
    assert len(ended) == 1 and one.epoch == pytest.approx(4 * STEP + END)


def test_a_measurement_ends_early_after_enough_steps_and_epochs(tmp_path: Path, now: list[float]) -> None:
    ended: list[int] = []
    measure_job(job(now, ended, steps=50), tmp_path / "scratch", 1e6, evaluated=0.0, tested=0.0)
    assert len(ended) == ENOUGH_ENDS
    ended.clear()
    measure_job(job(now, ended, steps=4), tmp_path / "scratch", 1e6, evaluated=0.0, tested=0.0)
    assert len(ended) == 26 - 1  # 101 steps with the first one, which is not counted; within the 26th epoch


def test_later_starts_are_expected_to_take_less_than_the_first() -> None:
    assert [expected_start(JobTime(start, 1.0), is_gpu=False) for start in (0.2, 30.0)] == [0.2, 1.0]
    assert [expected_start(JobTime(start, 1.0), is_gpu=True) for start in (2.0, 30.0)] == [2.0, 4.0]


def test_epochs_that_fit_never_exceed_the_time() -> None:
    found = JobTime(2.0, 3.0, 1.0)
    for seconds in (0.0, 3.0, 5.9, 6.0, 100.0):
        epochs = found.epochs_in(seconds)
        assert epochs == 0 or found.total(epochs) <= seconds < found.total(epochs + 1)
