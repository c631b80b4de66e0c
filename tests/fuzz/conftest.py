"""The workshop of the fuzz suite: made once, with a finished search, a finished training run and an interrupted one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.fuzz_workshop import Workshop


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("fuzz"))


@pytest.fixture(autouse=True)
def _in_the_workshop(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workshop.place)


@pytest.fixture
def cwd(workshop: Workshop) -> Path:
    return workshop.place
