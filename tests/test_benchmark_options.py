"""Wrong options of `python -m benchmarks`: reported with exit code 2 before anything is measured."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import methods
from softcell.search import resolve


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--space", "nb102"], "invalid choice: 'nb102'"),
        (["--rounds", "0"], "--rounds must be at least 1, but is 0"),
        (["--device", "tpu"], "but got 'tpu'"),
        (["--threads", "-1"], "threads=-1"),
        (["--out", "nowhere/record.json"], "nowhere/record.json"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmarks, "compare", lambda *given: pytest.fail("something was measured"))
    with pytest.raises(SystemExit) as ended:
        benchmarks.main(["--device", "cpu", *arguments])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_a_cpu_runs_the_parts_that_need_no_gpu_and_names_those_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[list[str]] = []

    def run(words: list[str], *, check: bool) -> SimpleNamespace:
        started.append(words[1:])
        return SimpleNamespace(returncode=1)

    monkeypatch.setattr(benchmarks, "steps", lambda device, *given: started.append([device]))
    monkeypatch.setattr(benchmarks, "subprocess", SimpleNamespace(run=run))
    given = ["--device", "cpu", "--threads", "1", "--out", str(tmp_path / "found.json")]
    with pytest.raises(SystemExit, match="failed: training"):
        benchmarks.main(given)
    record = str(tmp_path / "found-training.json")
    assert started == [["cpu"], ["-m", "benchmarks.training", "--device", "cpu", "--threads", "1", "--out", record]]
    benchmarks.main([*given, "--part", "steps"])
    assert started[2:] == [["cpu"]]
    with pytest.raises(SystemExit) as ended:
        benchmarks.main([*given, "--part", "cold"])
    assert ended.value.code == 2 and "--part cold needs a GPU" in capsys.readouterr().err


@pytest.mark.parametrize("part", benchmarks.OTHERS)
def test_every_part_is_a_benchmark_with_these_options(
    part: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmark", "--help"])
    with pytest.raises(SystemExit):
        importlib.import_module(f"benchmarks.{part}").main()
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("--device", "--threads", "--out"))


@pytest.mark.parametrize("name", ["attention", "cold", "credit", "entrannas", "itnas", "methods", "sweep"])
def test_options_of_every_benchmark_are_checked(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmark", "--device", "tpu"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"benchmarks.{name}").main()
    assert ended.value.code == 2
    assert "but got 'tpu'" in capsys.readouterr().err


@pytest.mark.parametrize(("method", "space"), methods.SPACE_OF.items())
def test_every_method_can_search_where_it_is_measured(method: str, space: str) -> None:
    for way in methods.WAYS.values():
        recipe = resolve(
            {"method": method, "space": space, "data": "digits", "scale": "paper", "batch_size": 64, **way}
        )
        assert (recipe.method, recipe.space, recipe.engine) == (method, space, way["engine"])


def test_a_row_of_methods_says_what_was_not_measured() -> None:
    step = {"ms": 40.0, "busy_ms": 38.0, "kernels": 9, "first_ms": 2000.0}
    row = {"method": "nos", "space": "nos", "ways": {"recorded bf16": step}, "together": {"ms_per_step": None}}
    absent = "not measured"
    assert methods.cells_of(row) == ["nos, nos", absent, absent, "40.0", absent, "38.0", "9", "2.0", absent]
