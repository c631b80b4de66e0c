"""The workshop of the fuzz suite: made once, with a finished search, a finished training and a stopped training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.helpers.fuzz_workshop import Workshop


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Workshop(tmp_path_factory.mktemp("fuzz"))
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _in_the_workshop(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workshop.place)


@pytest.fixture
def cwd(workshop: Workshop) -> Path:
    return workshop.place
