"""Every test starts with NaN in the free memory of the device."""

import pytest
import torch

SPOILT = 2**31
"""Bytes that are set to ones, which is NaN in every precision: a read of uninitialised memory then fails a test."""


def spoil_memory() -> None:
    """Leaves NaN in the memory that is allocated next."""
    blocks = [torch.full((SPOILT // 8,), 255, dtype=torch.uint8, device="cuda") for _ in range(8)]
    del blocks


@pytest.fixture(autouse=True)
def spoilt() -> None:
    if torch.cuda.is_available():
        spoil_memory()
