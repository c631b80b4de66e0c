"""How many operations a NOS search step dispatches along the GPU's path, counted without a GPU.

    python -m benchmarks.launches

Views and empty tensors launch nothing and are not counted. The features of a cell run as Triton kernels on a GPU; their
plain twins, which run here instead, are left out, so that what is counted stands around those kernels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.steps import Case, batch, players, step
from benchmarks.traffic import is_view
from softcell.kernels import mix
from softcell.kernels.cell import _MixedCell
from softcell.spaces import cell, edges
from softcell.spaces.fused_cell import _Flat

CASE = Case("nos", {}, (3, 32, 32), 2, "nos")
NOTHING = (torch.ops.aten._unsafe_view.default, torch.ops.aten.promote_types.default)
"""Operations that launch nothing though their schemas do not tell."""


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.silent = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (self.silent or is_view(func) or func in NOTHING):
            self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))

    def skipping(self, function: Callable[..., Any]) -> staticmethod[..., Any]:
        """The same function, which counts nothing."""

        def run(*arguments: Any) -> Any:
            self.silent = True
            try:
                return function(*arguments)
            finally:
                self.silent = False

        return staticmethod(run)


@contextmanager
def as_on_a_gpu(counter: _Counter, *, together: bool) -> Iterator[None]:
    """Cells on the CPU take the GPU's path; together: calibrations too, which otherwise run module by module."""
    with ExitStack() as stack:
        for program in (_MixedCell, _Flat):
            for name in ("forward", "backward"):
                stack.enter_context(patch.object(program, name, counter.skipping(getattr(program, name))))
        stack.enter_context(patch.object(cell, "serves", lambda x: True))
        stack.enter_context(patch.object(cell, "literal", lambda: not together))
        stack.enter_context(patch.object(edges, "gathers", lambda x: together))
        stack.enter_context(patch.object(mix, "copies_cheaply", lambda x: together))
        yield


def launches(case: Case, *, together: bool) -> Counter[str]:
    """Operations of one search step by name."""
    device = torch.device("cpu")
    actors, data = players(case, device, plain=False), batch(case, device)
    counter = _Counter()
    with as_on_a_gpu(counter, together=together):
        step(actors, data, case.regime)  # plans are made in the first
        with counter:
            step(actors, data, case.regime)
    return counter.found


if __name__ == "__main__":
    print(CASE)
    for together in (False, True):
        found = launches(CASE, together=together)
        print(f"calibrations {'together' if together else 'module by module'}: {found.total():,} operations")
        print("\n".join(f"{count:8,}  {name}" for name, count in found.most_common(12)))
