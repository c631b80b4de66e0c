"""Where tests of Triton's kernels run: on a GPU, or on a CPU by Triton's interpreter (`TRITON_INTERPRET=1`)."""

from __future__ import annotations

import os

import pytest
import torch

from softcell.kernels.backend import has_triton

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cpu" and not INTERPRETED, reason="needs a CUDA device or TRITON_INTERPRET=1"),
    pytest.mark.skipif(not has_triton(), reason="needs Triton"),
]
