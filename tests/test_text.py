from __future__ import annotations

import pytest

from softcell.text import clock, count_of


@pytest.mark.parametrize(
    ("number", "noun", "expected"),
    [
        (1, "epoch", "1 epoch"),
        (0, "image", "0 images"),
        (2, "class", "2 classes"),
        (3, "entry", "3 entries"),
        (1234, "test image", "1,234 test images"),
    ],
)
def test_counts_have_the_right_plural(number: int, noun: str, expected: str) -> None:
    assert count_of(number, noun) == expected


def test_durations_look_like_a_clock() -> None:
    assert [clock(s) for s in (0.2, 7, 59.6, 750, 3600, 10930)] == [
        *("0:00", "0:07", "1:00", "12:30"),
        *("1:00:00", "3:02:10"),
    ]
