"""Choices, tables and layouts against hand-written values."""

from __future__ import annotations

import pytest
import torch

from softcell.arch import Choice, Layout, StrongestEach, Table
from softcell.errors import UserError

RAGGED = Table(
    "cell",
    (Choice(0, 2, ("a", "b", "c")), Choice(1, 2, ("b",)), Choice(0, 3, ("c", "a"))),
    output=(2, 3),
)


def test_a_ragged_table_is_as_wide_as_its_widest_choice_and_masks_the_rest() -> None:
    assert RAGGED.shape == (3, 3)
    assert RAGGED.mask().tolist() == [[True, True, True], [True, False, False], [True, True, False]]


def test_columns_find_a_candidate_at_any_position_and_never_in_padding() -> None:
    assert RAGGED.columns("a").tolist() == [[True, False, False], [False, False, False], [False, True, False]]
    assert RAGGED.columns("b").tolist() == [[False, True, False], [True, False, False], [False, False, False]]
    assert not RAGGED.columns("none").any()


def test_a_table_knows_its_graph() -> None:
    assert RAGGED.targets == (2, 3)
    assert RAGGED.sources == (0, 1)
    assert RAGGED.incoming(2) == (0, 1)
    assert RAGGED.incoming(3) == (2,)


@pytest.mark.parametrize("candidates", [(), ("a", "a")])
def test_a_choice_needs_distinct_candidates(candidates: tuple[str, ...]) -> None:
    with pytest.raises(UserError, match="0->1"):
        Choice(0, 1, candidates)


def test_a_table_needs_a_choice() -> None:
    with pytest.raises(UserError, match="'empty'"):
        Table("empty", (), (1,))


def test_a_layout_knows_which_sites_read_a_table() -> None:
    other = Table("other", (Choice(0, 1, ("a",)),), (1,))
    layout = Layout("toy", (RAGGED, other), ("cell", "other", "cell"), StrongestEach())
    assert layout.sites_of("cell") == (0, 2)
    assert layout.sites_of("other") == (1,)
    assert layout.first_sites() == {"cell": 0, "other": 1}
    assert layout.table("other") is other
    with pytest.raises(AssertionError, match="missing"):
        Layout("toy", (RAGGED,), ("missing",), StrongestEach())


def test_a_mask_is_on_the_given_device() -> None:
    assert RAGGED.mask(torch.device("meta")).device.type == "meta"
