"""Helpers of the search tests serve here too; and memory of the device is never clean."""

import pytest
import torch

SPOILT = 2**31
"""Bytes that are all ones: NaN in every precision. What reads memory that nobody has written shows in a test."""


def spoil_memory() -> None:
    """Leaves NaN in the memory that is given out next."""
    blocks = [torch.full((SPOILT // 8,), 255, dtype=torch.uint8, device="cuda") for _ in range(8)]
    del blocks


@pytest.fixture(autouse=True)
def spoilt() -> None:
    if torch.cuda.is_available():
        spoil_memory()
