"""Every method that is registered on every space that is registered, against the conformance suite."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from softcell.methods import METHODS
from softcell.spaces import SPACES, Space
from softcell.testing import ALIKE, SOFTMAX_AT_HOME, RaggedSpace, check_name, checks_for, tiny_space
from softcell.testing import methods as checks
from tests.helpers.method_kinds import ALIKE as LIKE_ANOTHER
from tests.helpers.shared_supernets import shared_supernet

FOUND = tuple(METHODS)
PLACES = (*SPACES, "ragged")


def marks(method: str, space: str) -> list[pytest.MarkDecorator]:
    """A method in its own space and the two smallest, the other spaces under DARTS; all else in the exhaustive run.

    DARTS's own space is left to one method of each kind: the smallest one has two tables as well.
    """
    if method == "edge-normalised":  # PC-DARTS but for its recipe
        return [pytest.mark.exhaustive]
    own = space in ("nb201", "ragged", METHODS.get(method).home or ("" if method in LIKE_ANOTHER else "darts"))
    return [] if own or (method == "darts" and space not in ALIKE | SOFTMAX_AT_HOME) else [pytest.mark.exhaustive]


CASES = [
    pytest.param(check, method, space, id=f"{method}-{space}-{check_name(check)}", marks=marks(method, space))
    for method in FOUND
    for space in PLACES
    for check in checks_for(METHODS.get(method))
]


@pytest.fixture(autouse=True)
def one_supernet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "build_supernet", shared_supernet)


@pytest.fixture(scope="module")
def spaces() -> dict[str, Space]:
    return {**{name: tiny_space(name) for name in SPACES}, "ragged": RaggedSpace()}


@pytest.mark.parametrize(("check", "method", "space"), CASES)
def test_every_method_keeps_its_contracts_on_every_space(
    check: Callable[..., None], method: str, space: str, spaces: dict[str, Space]
) -> None:
    check(METHODS.get(method), spaces[space])


def test_discovery_finds_the_methods_that_ship() -> None:
    assert {"darts", "random"} <= set(FOUND)
