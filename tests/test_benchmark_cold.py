"""`python -m benchmarks.cold` without a GPU: its processes get the caches that their names promise."""

from __future__ import annotations

import json
import subprocess
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import cold
from softcell.kernels.warm_up import SWITCH


def test_two_processes_have_an_empty_cache_and_the_third_finds_that_of_the_second(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, str, bool]] = []

    def run(command: list[str], *, env: dict[str, str], **options: Any) -> Any:
        cache = Path(env["TRITON_CACHE_DIR"])
        asked.append((json.loads(command[-1])["space"], env[SWITCH], cache.exists()))
        cache.mkdir(exist_ok=True)
        row = {f"{part}_s": 1.0 for part in ("prepare", "first", "second", "validation")}
        row |= {f"{part}_kernels": 2 for part in ("prepare", "first", "second", "validation")}
        return types.SimpleNamespace(stdout=f"compiled 83 kernels in 6 s\n{json.dumps(row)}\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(cold, "load_libraries", lambda: None)
    monkeypatch.setattr(cold, "machine", lambda parser, options: (torch.device("cuda"), 1))
    monkeypatch.setattr(cold, "write_record", lambda path, module, **content: path.write_text(json.dumps(content)))
    monkeypatch.setattr("sys.argv", ["cold", "--space", "nb201", "--out", str(tmp_path / "record.json")])
    cold.main()
    assert asked == [("nb201", "0", False), ("nb201", "1", False), ("nb201", "1", True)]
    rows = json.loads((tmp_path / "record.json").read_text())["rows"]
    assert [row["way"] for row in rows] == ["one by one", "ahead", "warm"]
    assert rows[0]["notes"] == ["compiled 83 kernels in 6 s"]
    assert "2+2+2+2" in capsys.readouterr().out


@pytest.mark.parametrize(("space", "method"), cold.SPACES.items())
def test_every_space_has_a_recipe_of_its_method(space: str, method: str) -> None:
    from softcell.search import resolve

    recipe = resolve({"method": method, "space": space, "data": "digits", "scale": "paper", "batch_size": 64})
    assert (recipe.method, recipe.space) == (method, space)
