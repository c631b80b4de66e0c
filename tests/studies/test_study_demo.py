"""The study of the demo runs each seed once, and the documentation matches the record."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from softcell.app.baseline import claim, rank_sum
from softcell.arch import sample
from softcell.spaces import build_space
from studies import demo

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "results" / "demo" / "fresh.json"


def test_a_finished_seed_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started = []

    def run(words: list[str], **_: object) -> SimpleNamespace:
        started.append(words[words.index("demo") :])
        folder = Path(words[words.index("--out") + 1])
        for name in ("found-0", "random-1"):
            (folder / "train" / name).mkdir(parents=True)
            cell = sample(build_space("nb201").layout(), len(name))
            (folder / "train" / name / "genotype.json").write_text(json.dumps(cell.to_dict()), "utf-8")
        content = {"seed": 7, "accuracy": {"found-0": 0.9, "random-1": 0.8}, "p": 1.0, "claim": "nothing"}
        (folder / "demo.json").write_text(json.dumps(content), "utf-8")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(run=run))
    record = tmp_path / "record.json"
    for _ in range(2):
        words = ["demo", "--runs", str(tmp_path / "runs"), "--seeds", "7", "--record", str(record)]
        monkeypatch.setattr(sys, "argv", words)
        demo.main()
    assert len(started) == 1 and started[0][:3] == ["demo", "--seed", "7"]
    assert "a difference is claimed with 0 of 1 seeds" in capsys.readouterr().out
    (row,) = json.loads(record.read_text("utf-8"))["rows"]
    assert set(row["cells"]) == {"found-0", "random-1"} and row["cpu_seconds"] >= 0


def facts(sentence: str) -> list[str]:
    """The numbers and the verdict of a claim; the record was made with an earlier wording."""
    return re.findall(r"[\d.]+\d%?|better|worse|no difference", sentence)


def test_the_record_matches_its_accuracies_and_the_documentation() -> None:
    rows = json.loads(RECORD.read_text("utf-8"))["rows"]
    assert [row["seed"] for row in rows] == [0, 1, 2, 3, 4]  # all of them, whatever came out
    page = (ROOT / "docs" / "demo.md").read_text("utf-8")
    claims = []
    for row in rows:
        found, random = (
            [accuracy for name, accuracy in row["accuracy"].items() if name.startswith(kind)]
            for kind in ("found", "random")
        )
        claims.append(claim(found, random))
        assert (row["p"], facts(row["claim"])) == (rank_sum(found, random), facts(claims[-1]))
        cells = (", ".join(f"{100 * one:.1f}" for one in values) for values in (found, random))
        assert f"| {row['seed']} | {' | '.join(cells)} | {row['p']:.2g} |" in page
    assert claims[0].partition(", p = ")[0] in " ".join((ROOT / "README.md").read_text("utf-8").split())
