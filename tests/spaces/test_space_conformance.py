"""Every space that is registered, and some sizes and shapes of them, against the conformance suite."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from softcell.spaces import SPACES, Space, build_space
from softcell.spaces.darts import DartsSpace
from softcell.testing import SPACE_CHECKS, RaggedSpace, check_name, tiny_space
from softcell.testing import spaces as checks
from softcell.testing.candidates import RULE_CHECKS, small_cuts
from tests.helpers.shared_supernets import shared_supernet

FOUND = tuple(SPACES)
ALIKE = {"s2", "s3", "nb1shot1-1", "nb1shot1-3"}
"""DARTS with some of its candidates, which `any_subset_of_candidates_works` covers; other numbers of parents."""


@dataclasses.dataclass(frozen=True)
class PrunedDarts(DartsSpace):
    """DARTS cells whose edges have candidates of their own, as in the spaces S1 and NOS."""

    def edge_candidates(self, table: str, source: int, target: int) -> tuple[str, ...]:
        everything = ("none", "skip_connect", "max_pool_3x3", "sep_conv_3x3")
        return everything[: 1 + (source + target) % 4] if table == "normal" else everything[source:]


VARIANTS = {
    "ragged": RaggedSpace(),
    "darts-pruned": PrunedDarts(cells=3, channels=2, nodes=2),
    "darts-shared": DartsSpace(cells=3, channels=2, nodes=2, share_features=True),
    "darts-narrow": DartsSpace(cells=3, channels=4, nodes=2, share_features=True, bottleneck=2),
    "darts-partial": DartsSpace(cells=3, channels=4, nodes=2, partial_channels=2),
    "darts-imagenet": DartsSpace(
        cells=3, channels=2, nodes=1, stem="imagenet", candidates=("none", "skip_connect", "sep_conv_3x3")
    ),
    "nb201-narrow": build_space(
        "nb201", {"cells_per_stage": 1, "channels": 4, "nodes": 3, "share_features": True, "bottleneck": 2}
    ),
    "nb201-deep": build_space("nb201", {"cells_per_stage": 2, "channels": 2, "nodes": 3}),
}


@pytest.fixture(autouse=True)
def one_supernet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "build_supernet", shared_supernet)


@pytest.mark.parametrize("check", SPACE_CHECKS, ids=check_name)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.exhaustive] if n in ALIKE else []) for n in FOUND])
def test_every_space_keeps_its_contracts(name: str, check: Callable[[Space], None]) -> None:
    check(tiny_space(name))


SAME_LAYOUT = {"darts-shared", "darts-narrow"}
"""Variants whose layout is that of DARTS: checks of rules are left out."""


@pytest.mark.parametrize(
    ("name", "check"),
    [
        pytest.param(name, check, id=f"{name}-{check_name(check)}")
        for name in VARIANTS
        for check in SPACE_CHECKS
        if name not in SAME_LAYOUT or check not in RULE_CHECKS
    ],
)
def test_variants_keep_the_contracts_of_spaces(name: str, check: Callable[[Space], None]) -> None:
    check(VARIANTS[name])


def test_discovery_finds_the_spaces_that_ship() -> None:
    assert {"darts", "nb201"} <= set(FOUND)


@pytest.mark.parametrize("name", FOUND)
def test_tables_are_cut_to_ragged_pieces_worth_enumerating(name: str) -> None:
    space = tiny_space(name)
    cuts = small_cuts(space)
    assert any(not cut.mask().all() for cut in cuts)
    assert max(space.layout().rule.count(cut) for cut in cuts) > 3  # type: ignore[attr-defined]
