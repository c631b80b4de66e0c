"""Commands given damaged files, impossible values or endless input: one sentence and exit code 2."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from softcell.app.report import _sections
from softcell.app.report.page import LivePage
from tests.helpers.cli_calls import CELL, TINY, Softcell
from tests.helpers.unsealed import unseal

DEEP = "[" * 5000 + "]" * 5000
LONG = "1" * 5000


def error_of(call: Softcell, *words: str | Path) -> str:
    """The one line that a command says."""
    answer = call(*words)
    assert answer.code == 2, answer
    assert answer.error.startswith("error: ") and answer.error.count("\n") == 1, answer.error
    return answer.error


@pytest.fixture
def old(searched: Path, tmp_path: Path) -> Path:
    """A finished search without checksums, to be damaged."""
    return unseal(shutil.copytree(searched, tmp_path / "old"))


@pytest.mark.parametrize("text", [DEEP, LONG, "{", "[]", "3", '{"epoch": ' + LONG + "}", "\x00", ""])
def test_damaged_metrics_of_a_finished_run(call: Softcell, old: Path, text: str) -> None:
    (old / "metrics.jsonl").write_text(text + "\n")
    assert "metrics.jsonl" in error_of(call, "search", "--resume", old)
    assert call("compare", old).code == 0  # the score is in run.json
    assert call("report", old).code == 0


@pytest.mark.parametrize("text", [DEEP, LONG, '{"format": "softcell-run", "version": ' + LONG + "}", "null", "\ud7ff"])
def test_run_json_beyond_all_limits(call: Softcell, old: Path, text: str) -> None:
    (old / "run.json").write_text(text)
    for words in (("info", old), ("show", old), ("report", old), ("train", old), ("search", "--resume", old)):
        error_of(call, *words)


WRONG: list[Any] = [None, [], {}, "text", -1, True, 1e308, [[None]], 10**30]


@pytest.mark.parametrize("field", ["recipe", "results", "seed", "recipe.space", "recipe.data", "recipe.space_settings"])
def test_fields_of_wrong_types(call: Softcell, old: Path, field: str) -> None:
    whole = json.loads((old / "run.json").read_text())
    *parents, last = field.split(".")
    for wrong in [*WRONG, "missing"]:
        manifest = json.loads(json.dumps(whole))
        place = manifest
        for parent in parents:
            place = place[parent]
        place[last] = wrong
        if wrong == "missing":
            del place[last]
        (old / "run.json").write_text(json.dumps(manifest))
        for words in (("info", old), ("train", old, "--epochs", "0"), ("search", "--resume", old, "--epochs", "0")):
            assert call(*words).code in (0, 2)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("epochs: 12:30:45", "must be a whole number"),
        ("epochs: 2001-99-99", "must be a whole number"),
        (f"epochs: {LONG}", "digits"),
        (f"epochs: {DEEP}", "nested deeper|64"),
        ("data: 2001-99-99", "2001-99-99"),
    ],
)
def test_odd_yaml_is_rejected_in_files_and_on_the_command_line(
    call: Softcell, tmp_path: Path, text: str, why: str
) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    assert re.search(why, error_of(call, "search", "--config", "recipe.yaml", "--out", "out"))
    key, _, value = text.partition(": ")
    if len(value) < 10_000:
        assert re.search(why, error_of(call, "search", "--set", f"{key}={value}", "--out", "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("resource.network={x: 1}", "no setting 'x'"),
        ("pretrain.data=nothere", "pretrain.epochs=0"),
        ("epochs=2000000000", "epochs <= 1,000,000"),
        ("epochs=99999999999999999999", "below 2**63"),
        ("space.cells=1000000", "space.cells <= 1,000"),
        ("space.nodes=5000", "space.nodes <= 100"),
    ],
)
def test_meaningless_or_endless_settings_are_rejected(call: Softcell, setting: str, why: str) -> None:
    assert why in error_of(call, "search", "--set", setting, "--out", "out")


def cell_json(change: Callable[[dict[str, Any]], None]) -> str:
    from softcell.arch import notation

    data = notation.parse(CELL).to_dict()
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda data: data["cells"].update(extra=data["cells"]["cell"]), "one cell, named 'cell'"),
        (lambda data: data["cells"]["cell"].update(output=[99]), "ends in its last node"),
        (lambda data: data["cells"]["cell"].update(output=[2, 3]), "ends in its last node"),
        (lambda data: data["cells"]["cell"]["edges"].append(data["cells"]["cell"]["edges"][0]), "a duplicate"),
        (lambda data: data["cells"]["cell"].update(output=[10**6]), "up to number 100"),
        (lambda data: data["cells"]["cell"]["edges"].append([0, 10**6, "none"]), "a number up to 100"),
    ],
)
def test_genotypes_with_parts_that_would_be_ignored_are_rejected(
    call: Softcell, tmp_path: Path, change: Any, why: str
) -> None:
    (tmp_path / "cell.json").write_text(cell_json(change))
    assert why in error_of(call, "info", "cell.json")
    error_of(call, "train", "cell.json", "--epochs", "1", "--out", "out")


@pytest.mark.parametrize("count", ["99999999999999", "1001"])
def test_the_number_of_random_architectures_is_bounded(call: Softcell, count: str) -> None:
    assert "random <= 1,000" in error_of(call, "train", CELL, "--random", count, "--out", "out")
    if len(count) > 4:
        assert "count <= 1,000,000" in error_of(call, "random", "--count", count)


def test_a_label_of_a_billion_is_rejected(call: Softcell, tmp_path: Path) -> None:
    labels = np.array([0, 1, 0, 1, 10**9])
    np.savez(tmp_path / "data.npz", images=np.zeros((5, 8, 8), np.uint8), labels=labels)
    assert "every class present" in error_of(call, "search", *TINY, "--data", "data.npz", "--out", "out")


def test_a_pipe_among_images_is_rejected(call: Softcell, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(4):
            Image.fromarray(np.full((8, 8), 20 * i, np.uint8)).save(tmp_path / "images" / name / f"{i}.png")
    os.mkfifo(tmp_path / "images" / "a" / "pipe.png")
    with pytest.warns(UserWarning, match=r"pipe\.png"):
        assert call("search", *TINY, "--data", "images", "--epochs", "1", "--out", "out", "-q").code == 0


def test_a_bad_genotype_is_one_damaged_row_of_the_live_page(
    searched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("good", "bad"):
        unseal(shutil.copytree(searched, tmp_path / "runs" / name))
    (tmp_path / "runs" / "bad" / "genotype.json").write_text(
        cell_json(lambda data: data.update(cells={"": {"edges": [], "output": [0]}}))
    )
    text = LivePage([tmp_path / "runs"]).get()[0].decode()
    assert "good" in text and "bad" in text
    drawn = _sections.cells

    def broken(run: Any) -> Any:
        if run.label == "bad" and run.genotype is not None:
            raise ZeroDivisionError("a drawing that fails")
        return drawn(run)

    monkeypatch.setattr(_sections, "cells", broken)
    text = LivePage([tmp_path / "runs"]).get()[0].decode()
    assert text.count("this run is damaged") == 1 and "a drawing that fails" in text
    assert text.count("<svg") > 3, "the other one is drawn"


def test_a_plugin_that_is_not_a_python_file(call: Softcell, tmp_path: Path) -> None:
    (tmp_path / "passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    assert "must name a Python file" in error_of(call, "list", "methods", "--plugin", "passwd")
    (tmp_path / "broken.py").write_text("root:x:0:0:root:/root:/bin/bash\n")
    assert "SyntaxError" in error_of(call, "list", "methods", "--plugin", "broken.py")
