"""Tables of kernels live as long as what reads them."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from softcell.kernels import backend
from softcell.kernels.backend import kept_table, table

CPU = torch.device("cpu")


@pytest.mark.parametrize("captured", [True, False])
def test_a_table_that_a_captured_step_reads_outlives_the_cache(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_captured", set())
    rows = ((1, 2), (3, 4))
    own = weakref.ref(kept_table(rows, CPU))
    with monkeypatch.context() as during:
        during.setattr(kept_table(rows, CPU), "_on_gpu", True)
        during.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
        assert table(rows, CPU).tolist() == [[1, 2], [3, 4]]
    for number in range(kept_table.cache_parameters()["maxsize"]):
        table(((number, -1),), CPU)
    gc.collect()
    assert (own() is not None) == captured
