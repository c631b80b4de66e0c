"""Networks compiled region by region: a cell is compiled once and serves all cells of its shape.

A whole supernet takes the compiler minutes; a cell takes seconds, and there are few kinds of them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

BACKEND = "inductor"
VARIANTS = 64  # cells differ in place, width and stride; the compiler's own limit is made for less


def compile_regions(regions: Iterable[nn.Module], notify: Callable[[str], None]) -> bool:
    """Compiles the `forward` of every region in place; where this machine cannot, says why and changes nothing."""
    modules = list(regions)
    if not modules:
        notify("engine=compile: this network has no regions to compile; going on without")
        return False
    reason = unable()
    if reason is not None:
        notify(f"engine=compile: {reason}; going on without")
        return False
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    # A region that the compiler cannot read runs as it is.
    torch._dynamo.config.suppress_errors = True
    _speak_plainly(notify)
    for module in modules:
        forward: Any = torch.compile(module.forward, backend=BACKEND, dynamic=False)
        module.forward = forward
    notify("engine=compile: the first steps take minutes, in which cells are compiled")
    return True


class _Once(logging.Handler):
    """Hands on in one line, and once, what the compiler would print in many."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._notify, self._sent = notify, False

    def emit(self, record: logging.LogRecord) -> None:
        if self._sent:
            return
        self._sent = True
        first = next((line.strip() for line in record.getMessage().splitlines() if line.strip()), record.name)
        self._notify(f"engine=compile: the compiler gave up on a part of the network, which runs as it is ({first})")


def _speak_plainly(notify: Callable[[str], None]) -> None:
    """What the compiler says from now on goes to `notify`; whoever sets TORCH_LOGS wants to read it as it is."""
    if os.environ.get("TORCH_LOGS"):
        return
    once = _Once(notify)
    for logger in (logging.getLogger(name) for name in ("torch._dynamo", "torch._inductor")):
        logger.handlers, logger.propagate = [once], False


def unable() -> str | None:
    """Why nothing can be compiled here: tried on a function of one line."""

    def probe(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch._dynamo.config.suppress_errors = False
    try:
        torch.compile(probe, backend=BACKEND)(torch.ones(8, device=device))
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"the compiler does not work here ({lines[0] if lines else type(error).__name__})"
    return None
