"""`softcell teacher`, `search --guide` and `softcell study` as a user types them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from softcell.nn import candidates
from softcell.text import percent
from tests.helpers.cli_calls import TINY, Softcell

SMALL = ("--set", "classifier.width=2", "--batch-size", "128", "--epochs", "1", "--threads", "1")


def test_a_teacher_is_trained_and_guides_a_search(call: Softcell, tmp_path: Path) -> None:
    taught = call("teacher", "resnet18", *SMALL, "--out", "teacher")
    assert taught.code == 0, taught.error
    assert "on the test split" in taught.out and "--guide teacher" in taught.out
    top5 = json.loads((tmp_path / "teacher/run.json").read_text())["results"]["top5"]
    assert f"(top-5 {percent(top5)})" in taught.out
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
    assert wrong.code == 2 and "is a `softcell teacher` run" in wrong.error


def test_unknown_teachers_are_rejected(call: Softcell) -> None:
    for arguments, message in (
        (("teacher", "resnet19"), "no built-in classifier 'resnet19'"),
        (("teacher", "pyramidnet", "--set", "classifier.depth=100"), "9n + 2"),
        (("teacher", "resnet18", "--set", "drop_path=0.2", *SMALL), "drops no paths"),
        (("teacher", "pyramidnet", "--set", "classifier=resnet18"), "the network is the argument"),
        (("teacher", "--set", "classifier=resnet18"), "the network is the argument"),
        (("teacher", "resnet18", "--set", "plugins=mine.py"), "plugins must be a list"),
        (("search", *TINY, "--epochs", "1", "--guide", "nowhere"), "no teacher at 'nowhere'"),
        (("search", *TINY, "--guide", "resnet18"), "first `softcell teacher resnet18"),
        (("search", *TINY, "--set", "guide.weight=5"), "guide.weight says how a teacher guides, but there is none"),
    ):
        answer = call(*arguments)
        assert answer.code == 2 and message in answer.error, answer.error


def test_files_without_a_teacher_are_rejected(call: Softcell, tmp_path: Path) -> None:
    (tmp_path / "junk.pt").write_text("hello")
    (tmp_path / "junk.pt2").write_text("x")
    for arguments, message in (
        (("--guide", "junk.pt"), "cannot be read as weights alone"),
        (("--guide", "junk.pt2", "--set", "guide.trust=true"), "cannot be read as an exported program"),
    ):
        answer = call("search", *TINY, *arguments)
        assert answer.code == 2 and message in answer.error, answer.error


PLUGIN = """
from softcell.nn.calibrate import ChannelAttention
from softcell.nn.candidates import candidate

@candidate("own_attention", kind="attention")
def build(spec):
    return ChannelAttention(spec.channels)
"""


def test_a_teacher_accepts_operations_of_a_plugin(
    call: Softcell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(candidates._REGISTRY)
    monkeypatch.setattr(candidates, "_REGISTRY", dict(before))
    own = ("teacher", "resnet18", "--set", "classifier.operation=own_attention", *SMALL, "--out", "teacher")
    unknown = call(*own)
    assert unknown.code == 2 and "--plugin FILE" in unknown.error
    (tmp_path / "own.py").write_text(PLUGIN)
    taught = call(*own, "--plugin", "own.py")
    assert taught.code == 0, taught.error
    recipe = json.loads((tmp_path / "teacher" / "run.json").read_text())["recipe"]
    assert recipe["plugins"] == [str((tmp_path / "own.py").resolve())]
    # As in another process, which knows of the operation by the run alone.
    monkeypatch.setattr(candidates, "_REGISTRY", dict(before))
    monkeypatch.delitem(sys.modules, "softcell_plugin_own")
    other = call("teacher", "pyramidnet", "--resume", "--out", "teacher")
    assert other.code == 2 and "keeps its network, resnet18, but got pyramidnet" in " ".join(other.error.split())
    again = call("teacher", "--resume", "teacher")
    assert again.code == 0, again.error


def test_the_study_omits_the_papers_numbers_for_other_networks(call: Softcell) -> None:
    for arguments in (("--width", "32"), ("--classes", "100")):
        out = call("study", *arguments).out
        assert "ours" in out and "555.42M" not in out and "4.63/22.63" not in out
        assert "width 64 with 10 classes" in " ".join(out.split())


def test_the_study_prints_our_counts_next_to_the_papers(call: Softcell) -> None:
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
    alone = " ".join(call("info", "nos", "--set", "space.attentions=[]", "--set", "space.dynamics=[]").out.split())
    assert "14 choices, up to 7 candidates" in alone and "1.0e+09" in alone
    assert "2.5e+12" not in alone and "two tiers" not in alone
