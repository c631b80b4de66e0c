"""`softcell bench` with an artificial table: its output, its files and its errors."""

from __future__ import annotations

import csv
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from softcell.api import search
from softcell.app.cli.main import run
from softcell.methods.proxies import SUPERNET_PROXIES
from tests.helpers.bench_tables import write_made
from tests.helpers.report_runs import make_search, make_training

ARCH = "|nor_conv_3x3~0|+|skip_connect~0|none~1|+|none~0|none~1|nor_conv_1x1~2|"


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_made(tmp_path_factory.mktemp("table") / "made.csv"))


def test_an_architecture_is_looked_up_with_optimum_and_chance(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "nb201", ARCH, "--table", table]) == 0
    out = capsys.readouterr().out
    assert ARCH in out and "optimum" in out and "random cell" in out and "best of 10 random" in out
    line = next(line for line in out.splitlines() if line.startswith("cifar10 test"))
    # 10 + 5·2 + 2·3 + 4·1: worths times the weights of the column `cifar10_test`
    assert line.split()[2] == "30.00" and line.split()[-1] == "70.00"


def test_a_method_is_searched_with_several_seeds_and_reported(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--set", "space.cells_per_stage=1", "--set", "space.channels=2", "--set", "batch_size=256", "-q"]
    sizes += ["--set", "split={weights: 256, validation: 256}"]
    written = ["--svg", str(tmp_path / "t.svg"), "--csv", str(tmp_path / "t.csv"), "--out", str(tmp_path / "runs")]
    given = [
        "bench",
        "nb201",
        "--table",
        table,
        "--method",
        "darts",
        "--seeds",
        "2",
        "--epochs",
        "2",
        "--device",
        "cpu",
    ]
    assert run([*given, *sizes, *written]) == 0
    out = capsys.readouterr().out
    assert "darts (n=2)" in out and "±" in out and out.count("Kendall's tau-b per edge") == 2
    assert "darts, cifar10 valid" in out and "darts, cifar10 test" in out
    rows = list(csv.DictReader((tmp_path / "t.csv").open()))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    for row in rows:
        own = [float(value) for key, value in row.items() if "seed-" in key]
        assert len(own) == 2 and float(row["darts"]) == pytest.approx(sum(own) / 2)
    assert ET.parse(tmp_path / "t.svg").getroot().tag.endswith("svg")
    assert run(["bench", "nb201", str(tmp_path / "runs"), "--table", table]) == 0
    assert "darts (n=2)" in capsys.readouterr().out
    assert run(["bench", "nb201", str(tmp_path / "runs"), "--table", table, "--svg", str(tmp_path / "t.svg")]) == 2


def test_a_search_is_shown_once_in_a_terminal(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then writes as to a terminal
    sizes = ["--set", "space.cells_per_stage=1", "--set", "space.channels=2", "--set", "batch_size=256"]
    given = ["--table", table, "--method", "darts", "--seeds", "1", "--epochs", "1", "--device", "cpu"]
    assert run(["bench", "nb201", *given, *sizes, "--out", str(tmp_path / "runs")]) == 0
    out, err = capsys.readouterr()
    assert "seed 0" in out and "seed 0" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([ARCH, "--table", "absent.csv"], "does not exist"),
        (["--table", "TABLE"], "nothing to look up"),
        ([ARCH, "--table", "TABLE", "--column", "accuracy"], "--column must be one of"),
        (["--table", "TABLE", "--proxy", "magic"], "no proxy 'magic' for --proxy; known: fisher, grad_norm, "),
        (["--table", "TABLE", "--convert", "absent"], "already exists"),
        (["--table", "new.csv", "--convert", "absent"], "--convert takes"),
    ],
)
def test_impossible_requests_are_rejected(
    arguments: list[str], message: str, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "nb201", *(table if word == "TABLE" else word for word in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_help_names_the_proxies_of_supernets(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--help"]) == 0
    words = set(re.findall(r"\w+", capsys.readouterr().out))
    assert set(SUPERNET_PROXIES) <= words and "params" not in words


def test_a_run_of_another_space_is_rejected(table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"cells": 3, "channels": 2, "nodes": 1}
    search("darts", space="s2", data="digits", epochs=1, batch_size=512, space_settings=small, out=tmp_path / "run")
    assert run(["bench", "nb201", str(tmp_path / "run"), "--table", table]) == 2
    assert "must be a finished search in space nb201" in capsys.readouterr().err


SMALLER = "|nor_conv_3x3~0|+|nor_conv_3x3~0|none~1|"
SMALL_SEARCH = [
    "--set",
    "space.cells_per_stage=1",
    "--set",
    "space.channels=2",
    "--epochs",
    "1",
    "--device",
    "cpu",
    "-q",
]


def test_cells_of_another_shape_are_rejected_before_any_output(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"cells_per_stage": 1, "channels": 2, "nodes": 3}
    search("darts", space="nb201", data="digits", epochs=1, batch_size=512, space_settings=small, out=tmp_path / "run")
    capsys.readouterr()
    for what in ([SMALLER], [ARCH, SMALLER], [str(tmp_path / "run")], [ARCH, str(tmp_path / "run")]):
        assert run(["bench", "nb201", *what, "--table", table]) == 2
        out, error = capsys.readouterr()
        assert "cells of 4 nodes that end in node 3, but this one ends in 2" in error
        assert out == ""


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--method", "entrannas-dst"], "several on one edge"),
        (["--method", "darts", "--set", "space.nodes=3"], "ends in 2"),
        (["--method", "random", "--set", "space.candidates=[none, sep_conv_3x3]"], "this search also has sep_conv_3x3"),
        (["--method", "darts", SMALLER], "ends in 2"),
        (["--method", "darts", "EMPTY"], "holds no run"),
        (["--method", "darts", "--proxy", "params"], "no proxy 'params' for --proxy"),
        (["--method", "darts", "--csv", "TABLE"], "already exists"),
    ],
)
def test_a_search_outside_the_table_is_rejected_before_it_starts(
    given: list[str], message: str, table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    places = {"TABLE": table, "EMPTY": str(tmp_path / "empty")}
    words = [places.get(word, word) for word in given]
    folder = tmp_path / "runs"
    assert run(["bench", "nb201", "--table", table, *words, *SMALL_SEARCH, "--out", str(folder)]) == 2
    out, error = capsys.readouterr()
    assert message in error and out == "" and not folder.exists()


def test_groups_repeats_and_training_runs_are_distinguished(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "sweep"
    for seed in (0, 1):
        make_search(root / f"short-{seed}", seed=seed, epochs=2)
    make_search(root / "long", epochs=3, recipe={"batch_size": 128})
    make_training(root / "trained")
    shutil.copytree(root / "short-1", root / "short-1-copy")
    assert run(["bench", "nb201", str(root), "--table", table, "--csv", str(tmp_path / "t.csv")]) == 0
    out = capsys.readouterr().out
    assert "skipped: 1 × a train run" in out
    assert "short-1-copy repeats short-1" in out
    assert out.count("darts (epochs=2,") == out.count("darts (epochs=3,") == 2, "accuracies and trajectory"
    heads = next(line for line in out.splitlines() if "(n=2)" in line)
    assert "(n=1)" in heads
    rows = list(csv.DictReader((tmp_path / "t.csv").open()))
    assert [bool(row["darts (epochs=2, batch_size=64)"]) for row in rows] == [True, True, False]
    assert all(row["darts (epochs=3, batch_size=128)"] for row in rows)
    assert run(["bench", "nb201", str(root / "trained"), "--table", table]) == 2
    assert "must be a finished search in space nb201, but it is a train run" in capsys.readouterr().err


def test_a_table_that_is_too_wide_continues_below(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    for i, method in enumerate(("darts", "entrannas", "snas", "itnas", "spos")):
        make_search(tmp_path / method, method=method, seed=i)
    assert run(["bench", "nb201", str(tmp_path), "--table", table]) == 0
    accuracies = capsys.readouterr().out.split("of the cell derived after each epoch")[0].splitlines()
    rows = [line.split()[2:] for line in accuracies if line.startswith("cifar10 test")]
    numbers = [word for row in rows for word in row if word != "±"]
    assert len(rows) > 1 and len(numbers) == 5 + 2 + 2 + 1, (
        "five methods, chance and best of ten with deviations, optimum"
    )
    assert all(len(word.split(".")[1]) == 2 for word in numbers), "no number is cut"
