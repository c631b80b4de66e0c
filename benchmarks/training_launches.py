"""Counts the operations that a training step of a derived network dispatches on the GPU code path, without a GPU.

    python -m benchmarks.training_launches --network nos

Forward and backward pass, module by module and fused; optimiser, augmentation and loss are not counted. Triton kernels
are counted by their launches, which requires Triton but no GPU (`benchmarks.launches` does the same for search steps).
Operations on lists of tensors count as one.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.launches import _Counter, as_on_a_gpu
from benchmarks.training import Case, cases
from softcell.arch import notation, sample
from softcell.evaluate import resolve
from softcell.kernels import calibrate
from softcell.kernels.backend import triton_kernels
from softcell.kernels.derived import Derived, Form, derived_cell_reference, derived_nodes_reference
from softcell.kernels.shared import shares_norms
from softcell.nn import calibrate as calibrations
from softcell.spaces import Network, _derived_plan, build_space
from softcell.spaces.execution import fused_networks, modules_only

CPU = torch.device("cpu")


class _Program(torch.autograd.Function):
    """Stand-in for a program of derived cells: counts its launches, computes with the twin, gives zero gradients."""

    @staticmethod
    def forward(
        ctx: Any, counter: _Counter, apart: bool, program: Derived, dtype: torch.dtype, *given: Any
    ) -> tuple[Tensor, ...]:
        parameters, running, factors, *states = given
        shapes = [(n, height, width, c) for n, c, height, width in (x.shape for x in states)]
        known, drops = running is not None, factors is not None
        form = Form.of(dtype, shapes, parameters.numel(), known=known, drops=drops, shared=shares_norms())
        ctx.set_materialize_grads(False)
        ctx.kept = counter, program, form, apart
        ctx.save_for_backward(parameters, *states)
        kernels = triton_kernels("derived")
        counter.found["derived, forward"] += len(kernels.forward_schedule(program, form, CPU).launches)
        counter.found["derived, copies"] += program.is_raw
        with _silent(counter):
            run: Any = derived_nodes_reference if apart else derived_cell_reference
            out, moments = run(program, torch.float32, parameters, running, factors, *(x.float() for x in states))
            values = [x.to(dtype) for x in (out if apart else [out])]
        ctx.mark_non_differentiable(moments)
        return *values, moments

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        counter, program, form, apart = ctx.kept
        parameters, *states = ctx.saved_tensors
        counter.found["derived, backward"] += len(
            triton_kernels("derived").backward_schedule(program, form, CPU).launches
        )
        counter.found["derived, copies"] += program.nodes if apart else 1
        with _silent(counter):
            own = [torch.zeros_like(x) for x in (parameters, *states)]
        return None, None, None, None, own[0], None, None, *own[1:]


@contextmanager
def _silent(counter: _Counter) -> Iterator[None]:
    counter.silent = True
    try:
        yield
    finally:
        counter.silent = False


@contextmanager
def _programs(counter: _Counter) -> Iterator[None]:
    def cell(program: Derived, dtype: torch.dtype, *given: Any, shared: bool) -> tuple[Tensor, Tensor]:
        out, moments = _Program.apply(counter, False, program, dtype, *given)  # type: ignore[no-untyped-call]
        return out, moments

    def nodes(program: Derived, dtype: torch.dtype, *given: Any, shared: bool) -> tuple[list[Tensor], Tensor]:
        *found, moments = _Program.apply(counter, True, program, dtype, *given)  # type: ignore[no-untyped-call]
        return found, moments

    with patch.object(_derived_plan, "derived_cell", cell), patch.object(_derived_plan, "derived_nodes", nodes):
        yield


@contextmanager
def _as_fused(counter: _Counter) -> Iterator[None]:
    def fits(x: Tensor, compressed: Tensor, taps: tuple[int, ...]) -> bool:
        widest = max(x.shape[2], compressed.shape[2] // len(taps))
        return widest <= calibrate.LARGEST and max(taps) <= calibrate.TAPS

    sizes = patch.object(calibrate, "fits", fits), patch.object(calibrations, "fits", fits)
    with as_on_a_gpu(counter, together=True), _programs(counter), fused_networks(), sizes[0], sizes[1]:
        yield


def network_of(case: Case) -> Network:
    """The network that `benchmarks.training` measures."""
    genotype = sample(build_space(case.space).layout(), 0) if case.genotype is None else notation.parse(case.genotype)
    recipe = resolve(genotype, {"recipe": case.recipe, "data": "cifar10", **case.settings})
    space = build_space(genotype.space, recipe.space_settings)
    return space.network(genotype, (3, case.size, case.size), 10, auxiliary=recipe.auxiliary > 0)


def launches(network: Network, size: int, *, fused: bool, training: bool = True) -> Counter[str]:
    """Operations of one pass by name, in bfloat16 and with drop-path; in training including the backward pass."""
    counter = _Counter()
    network.train(training).use_drop_path(0.3)
    images = torch.randn(2, 3, size, size).contiguous(memory_format=torch.channels_last)

    def step() -> None:
        network.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(training):
            logits, auxiliary = network.forward_with_auxiliary(images)
        if training:
            (logits.float().sum() + (0.0 if auxiliary is None else auxiliary.float().sum())).backward()  # type: ignore[no-untyped-call]

    with _as_fused(counter) if fused else modules_only():
        step()  # the first pass plans the cells
        counter.found.clear()
        with counter:
            step()
    return counter.found


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m benchmarks.training_launches", description=__doc__)
    parser.add_argument("--network", choices=list(cases()), default="nos")
    options = parser.parse_args()
    case = cases()[options.network]
    network = network_of(case)
    for training in (True, False):
        for fused in (False, True):
            found = launches(network, case.size, fused=fused, training=training)
            how = f"{'fused' if fused else 'module by module'}, {'training' if training else 'evaluation'}"
            print(f"{options.network}, {how}: {found.total():,} operations")
            print("\n".join(f"{count:8,}  {name}" for name, count in found.most_common(16)))
