"""Examples on digits run unchanged, but only on the first 240 images."""

from __future__ import annotations

import numpy as np
import pytest

from softcell.data import _small_datasets


@pytest.fixture
def few_digits(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 training and 40 test images, in this process."""
    file = tmp_path_factory.mktemp("digits") / "digits.npz"
    with np.load(_small_datasets._DIGITS, allow_pickle=False) as content:
        np.savez(file, **{name: content[name][:240] for name in ("images", "labels")})
    monkeypatch.setattr(_small_datasets, "_DIGITS", file)
    monkeypatch.setattr(_small_datasets, "_NUM_TRAINING_DIGITS", 200)
