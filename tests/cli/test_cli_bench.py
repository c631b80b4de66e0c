"""`softcell bench` on a made table: what is printed and written, and what is refused."""

from __future__ import annotations

import csv
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from softcell.api import search
from softcell.cli.main import run

sys.path.insert(0, str(Path(__file__).parents[1] / "evaluate"))
from bench_tables import write_made

ARCH = "|nor_conv_3x3~0|+|skip_connect~0|none~1|+|none~0|none~1|nor_conv_1x1~2|"


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_made(tmp_path_factory.mktemp("table") / "made.csv"))


def test_an_architecture_is_looked_up_beside_optimum_and_chance(table: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "nb201", ARCH, "--table", table]) == 0
    out = capsys.readouterr().out
    assert ARCH in out and "optimum" in out and "random cell (n=15,625)" in out
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([ARCH, "--table", "absent.csv"], "does not exist"),
        (["--table", "TABLE"], "nothing to look up"),
        ([ARCH, "--table", "TABLE", "--column", "accuracy"], "--column must be one of"),
        (["--table", "TABLE", "--proxy", "magic"], "--proxy must be one of naswot, synflow"),
        (["--table", "TABLE", "--convert", "absent"], "exists already"),
        (["--table", "new.csv", "--convert", "absent"], "--convert takes"),
    ],
)
def test_what_cannot_be_done_is_told(
    arguments: list[str], message: str, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "nb201", *(table if word == "TABLE" else word for word in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_a_run_of_another_space_is_refused(table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"cells": 3, "channels": 2, "nodes": 1}
    search("darts", space="s2", data="digits", epochs=1, batch_size=512, space_settings=small, out=tmp_path / "run")
    assert run(["bench", "nb201", str(tmp_path / "run"), "--table", table]) == 2
    assert "must be a finished search in space nb201" in capsys.readouterr().err
