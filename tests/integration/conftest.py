"""These tests start daemons and take minutes, so they run only when they are asked for: `-m integration`."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "integration" in config.getoption("markexpr").replace("not integration", ""):
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs `-m integration`; see `make integration`"))
