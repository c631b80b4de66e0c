from __future__ import annotations

from pathlib import Path

import pytest

from softcell.api import train

CELL = "|nor_conv_3x3~0|+|none~0|skip_connect~1|+|nor_conv_1x1~0|none~1|avg_pool_3x3~2|"


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished tiny training; not to be changed."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    train(CELL, data="digits", epochs=1, out=folder, batch_size=256, space_settings={"channels": 2})
    return folder
