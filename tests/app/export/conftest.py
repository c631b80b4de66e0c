from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from softcell.api import train

CELL = "|nor_conv_3x3~0|+|none~0|skip_connect~1|+|nor_conv_1x1~0|none~1|avg_pool_3x3~2|"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished tiny training; not to be changed."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(CELL, data="digits", epochs=1, out=folder, batch_size=256, space_settings={"channels": 2})
    return folder
