"""Commands run in this process with the real error handling, and in a separate process only if that is being tested."""

from __future__ import annotations

from pathlib import Path

import pytest

from softcell.app.cli.main import run
from tests.helpers.cli_calls import TINY, Answer, Softcell


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Softcell:
    """Runs `softcell ...` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def softcell_(*arguments: str | Path) -> Answer:
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Answer(code, captured.out, captured.err)

    return softcell_


@pytest.fixture(scope="session")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished tiny search; not to be changed."""
    folder = tmp_path_factory.mktemp("searched") / "run"
    steps = ("--batch-size", "128")  # enough of them for two epochs to differ
    assert run(["search", *TINY, *steps, "--epochs", "2", "--out", str(folder), "--quiet"]) == 0
    return folder
