"""The study of inherited weights trains both arms from one search and evaluates on images that neither has seen."""

import json
import sys
from pathlib import Path

import pytest

from studies import inherit


def test_both_arms_share_a_search_and_differ_in_their_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    starts: list[str | None] = []
    whole = inherit.train

    def train(genotype: object, recipe: object, folder: Path) -> object:
        starts.append(recipe.init)  # type: ignore[attr-defined]
        assert recipe.holdout == 0.0  # type: ignore[attr-defined]
        return whole(genotype, recipe, folder)  # type: ignore[arg-type]

    monkeypatch.setattr(inherit, "train", train)
    record = tmp_path / "record.jsonl"
    sizes = ["--images", "64", "--held", "32", "--channels", "2", "--search", "1", "--epochs", "1", "--seeds", "1"]
    monkeypatch.setattr(sys, "argv", ["inherit", *sizes, "--arms", "random", "supernet", "--record", str(record)])
    inherit.main()
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert [row["arm"] for row in rows] == ["random", "supernet"] and all(0 <= row["accuracy"] <= 1 for row in rows)
    assert starts[0] is None and Path(str(starts[1])).name == "search"
    assert len(capsys.readouterr().out.splitlines()) == 2
