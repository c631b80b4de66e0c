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


def test_a_captured_table_of_addresses_is_freed_with_what_it_points_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trained network has another one, and there may be thousands in a process."""
    monkeypatch.setattr(backend, "_captured", set())
    parameter = torch.nn.Parameter(torch.zeros(2))
    kept = backend.KeptTable(((1, 2),), CPU)
    own = weakref.ref(kept)
    with monkeypatch.context() as during:
        during.setattr(kept, "_on_gpu", True)
        during.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        kept.await_copy(parameter)
    del kept
    gc.collect()
    assert own() is not None
    del parameter
    gc.collect()
    assert own() is None
