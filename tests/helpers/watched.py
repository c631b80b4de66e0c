"""Watches kernels in Triton's interpreter for what their results alone do not show.

The interpreter runs the programs of a launch one after the other, so that a race between them goes unnoticed, and
memory beside a tensor can be read like any other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

NOBODY, SEVERAL = -1, -2


class Watch:
    """`problems` counts, by kernel, accesses outside its tensors and places where programs of one launch meet."""

    def __init__(self) -> None:
        self.problems: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        self._kernel = ""
        self._starts = np.zeros(0, np.uint64)
        self._ends = np.zeros(0, np.uint64)
        self._sizes = np.zeros(0, np.uint64)
        self._written: list[Any] = []
        self._read: list[Any] = []

    def begin(self, kernel: str, arguments: list[Any]) -> None:
        tensors = {one.untyped_storage().data_ptr(): one for one in arguments if isinstance(one, Tensor)}
        found = [tensors[place] for place in sorted(tensors)]
        lengths = [one.untyped_storage().nbytes() for one in found]
        self._kernel = kernel
        self.launches[kernel] += 1
        self._starts = np.array(sorted(tensors), np.uint64)
        self._ends = self._starts + np.array(lengths, np.uint64)
        self._sizes = np.array([one.element_size() for one in found], np.uint64)
        counts = [length // one.element_size() for length, one in zip(lengths, found, strict=True)]
        self._written, self._read = ([np.full(count, NOBODY) for count in counts] for _ in range(2))

    def read(self, pointers: Any, mask: Any, program: int) -> None:
        for number, at in self._places("reads", pointers, mask):
            if self._others(self._written[number][at], program):
                self._note("reads what another program writes")
            before = self._read[number][at]
            self._read[number][at] = np.where((before == NOBODY) | (before == program), program, SEVERAL)

    def write(self, pointers: Any, mask: Any, program: int) -> None:
        for number, at in self._places("writes", pointers, mask):
            if len(np.unique(at)) < len(at):
                self._note("writes a place twice at once")
            if self._others(self._written[number][at], program):
                self._note("writes what another program writes")
            if self._others(self._read[number][at], program):
                self._note("writes what another program reads")
            self._written[number][at] = program

    def _places(self, verb: str, pointers: Any, mask: Any) -> Iterator[tuple[int, Any]]:
        """Of every tensor its number and the positions of accessed elements."""
        pointers, mask = np.broadcast_arrays(pointers, mask)
        given = pointers[mask.astype(bool)].astype(np.uint64)
        own = np.searchsorted(self._starts, given, side="right") - 1
        inside = own >= 0
        own = np.maximum(own, 0)
        inside &= given + self._sizes[own] <= self._ends[own]
        if not inside.all():
            self._note(f"{verb} outside its tensors")
        given, own = given[inside], own[inside]
        for number in np.unique(own):
            yield number, ((given[own == number] - self._starts[number]) // self._sizes[number]).astype(np.int64)

    @staticmethod
    def _others(programs: Any, program: int) -> bool:
        return bool(((programs != NOBODY) & (programs != program)).any())

    def _note(self, problem: str) -> None:
        self.problems[f"{self._kernel} {problem}"] += 1


@contextmanager
def watched() -> Iterator[Watch]:
    """Within this context all kernels are watched. Only Triton's interpreter can be watched."""
    from triton.runtime import interpreter  # type: ignore[import-not-found, unused-ignore]

    watch, builder = Watch(), interpreter.InterpreterBuilder
    start, load, store = (
        interpreter.GridExecutor._init_args_hst,
        builder.create_masked_load,
        builder.create_masked_store,
    )

    def begin(self: Any, given: Any, named: Any) -> Any:
        arguments, others = start(self, given, named)
        watch.begin(self.fn.__name__, list(chain(arguments, others.values())))
        return arguments, others

    def program(self: Any) -> int:
        (x, y, z), (_, height, depth) = self.grid_idx, self.grid_dim
        return int((x * height + y) * depth + z)

    def read(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        watch.read(pointers.data, mask.data, program(self))
        return load(self, pointers, mask, *rest)

    def write(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        watch.write(pointers.data, mask.data, program(self))
        return store(self, pointers, value, mask, *rest)

    with (
        patch.object(interpreter.GridExecutor, "_init_args_hst", begin),
        patch.object(builder, "create_masked_load", read),
        patch.object(builder, "create_masked_store", write),
    ):
        yield watch


@contextmanager
def filled_memory(value: float, small: int) -> Iterator[None]:
    """Within this context new tensors hold `value`, or `small` where they hold integers, until they are written."""

    def fill(tensor: Tensor) -> Tensor:
        return tensor.fill_(value if tensor.is_floating_point() else small)

    empty, like, new = torch.empty, torch.empty_like, Tensor.new_empty
    with (
        patch.object(torch, "empty", lambda *shape, **how: fill(empty(*shape, **how))),
        patch.object(torch, "empty_like", lambda *other, **how: fill(like(*other, **how))),
        patch.object(Tensor, "new_empty", lambda *shape, **how: fill(new(*shape, **how))),
    ):
        yield
