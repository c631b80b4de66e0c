"""`softcell teacher`, `search --guide` and `softcell study` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

from cli_calls import TINY, Softcell

SMALL = ("--set", "classifier.width=2", "--batch-size", "128", "--epochs", "1", "--threads", "1")


def test_a_teacher_is_trained_and_guides_a_search(call: Softcell, tmp_path: Path) -> None:
    taught = call("teacher", "resnet18", *SMALL, "--out", "teacher")
    assert taught.code == 0, taught.error
    assert "on the test split" in taught.out and "--guide teacher" in taught.out
    found = call("search", "darts", *TINY, "--epochs", "1", "--guide", "teacher", "--out", "run")
    assert found.code == 0, found.error
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    assert manifest["recipe"]["guide"]["teacher"] == str((tmp_path / "teacher").resolve())
    assert (
        manifest["results"]["guide"]["accuracy"]
        == json.loads((tmp_path / "teacher/run.json").read_text())["results"]["accuracy"]
    )
    assert "guide_loss" in json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    report = (tmp_path / "run" / "report.html").read_text()
    assert "attention transfer from the teacher" in report and "on its test split" in report
    wrong = call("train", "--resume", "teacher")
    assert wrong.code == 2 and "teacher run" in wrong.error


def test_what_cannot_be_a_teacher_is_told(call: Softcell) -> None:
    for arguments, message in (
        (("teacher", "resnet19"), "no built-in classifier 'resnet19'"),
        (("teacher", "pyramidnet", "--set", "classifier.depth=100"), "9n + 2"),
        (("teacher", "resnet18", "--set", "drop_path=0.2", *SMALL), "drops no paths"),
        (("search", *TINY, "--epochs", "1", "--guide", "nowhere"), "no teacher at 'nowhere'"),
    ):
        answer = call(*arguments)
        assert answer.code == 2 and message in answer.error, answer.error


def test_the_study_prints_ours_beside_the_papers(call: Softcell) -> None:
    answer = call("study")
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert any("resnet18" in line and "555.423M" in line and "555.42M" in line for line in lines)
    dynamic = next(line for line in lines if "dynamic_conv_3x3" in line and "dil" not in line)
    assert "+3.863M" in dynamic and "+3.85M" in dynamic and "4.63/22.63" in dynamic
    assert "not measured" in answer.out


def test_info_prints_the_size_of_the_space(call: Softcell) -> None:
    out = " ".join(call("info", "nos").out.split())
    assert "18 choices, up to 11 candidates" in out and "5.6e+14" in out and "1.0e+09" in out
