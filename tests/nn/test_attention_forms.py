"""The implementations that local attention is benchmarked against compute the same."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks import attention


def test_the_naive_form_and_torchs_own_equal_ours() -> None:
    torch.manual_seed(0)
    packed, rows, columns = torch.randn(2, 3 * 8, 6, 5), torch.randn(4, 2, 3), torch.randn(4, 2, 3)
    with torch.no_grad():
        mine = attention.ours(packed, rows, columns)
        torch.testing.assert_close(attention.unfolded(packed, rows, columns), mine)
        torch.testing.assert_close(attention.flexed(packed, rows, columns, compiled=False), mine, rtol=1e-4, atol=1e-5)
        nothing = torch.zeros_like(rows)  # the masked form knows no positions
        torch.testing.assert_close(
            attention.masked(packed, nothing, nothing), attention.ours(packed, nothing, nothing), rtol=1e-4, atol=1e-5
        )


def test_what_is_not_measured_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    sizes = ["--sides", "4", "--extents", "3", "--batch", "2", "--width", "8", "--rounds", "1", "--device", "cpu"]
    attention.main([*sizes, "--out", str(file)])
    (row,) = json.loads(file.read_text())["rows"]
    assert row["flex"].startswith("not measured") and row["ours"]["ms"] > 0 and row["unfold"]["megabytes"] > 0
