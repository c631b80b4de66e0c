"""Counts the operations that a training step of a derived network dispatches on the GPU code path, without a GPU.

    python -m benchmarks.training_launches --network nos

Forward and backward pass, module by module and fused; optimiser, augmentation and loss are not counted. Triton kernels
are counted by their launches, which requires Triton but no GPU (`benchmarks.launches` does the same for search steps).
Operations on lists of tensors count as one if all of their layouts agree. What operations copy internally, such as the
operands of a batched product, is not seen.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.launches import NOTHING, _Counter, as_on_a_gpu
from benchmarks.traffic import is_view
from benchmarks.training import Case, cases
from softcell.arch import notation, sample
from softcell.evaluate import resolve
from softcell.kernels import calibrate
from softcell.kernels.backend import cell_settings, default_settings, has_triton
from softcell.kernels.schedule import Launch
from softcell.nn import calibrate as calibrations
from softcell.nn import conv
from softcell.spaces import Network, base, build_space, darts
from softcell.spaces.execution import fused_networks, modules_only


class _Launches(_Counter):  # type: ignore[no-untyped-call]
    """Also counts elementwise operations on maps that are laid out differently, or have gaps.

    torch reads those value by value with computed addresses, several times slower than maps without gaps. Lists of maps
    whose layouts differ are copied one by one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.uneven: Counter[str] = Counter()

    def clear(self) -> None:
        self.found.clear()
        self.uneven.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if not (self.silent or is_view(func) or func in NOTHING):
            name = str(func)
            if name.startswith("aten._foreach_copy_"):
                pairs = [is_uneven(pair) for pair in zip(args[0], args[1], strict=True)]
                self.found[name] += len(pairs) - 1 if any(pairs) else 0
                self.uneven[name] += sum(pairs)
            elif name.startswith(ELEMENTWISE):
                self.uneven[name] += is_uneven([x for x in (*args, out) if isinstance(x, Tensor)])
        return out


ELEMENTWISE = tuple(
    f"aten.{name}."
    for name in ("mul", "add", "add_", "copy_", "clone", "div", "_to_copy", "threshold_backward", "zero_", "relu")
)


def is_uneven(tensors: Sequence[Tensor]) -> bool:
    """Whether an elementwise operation on these tensors computes addresses, and one of them is a map or part of one."""
    largest = max(tensors, key=Tensor.numel)
    if largest.dim() < 3 or largest.numel() // len(largest) < MAP:
        return False
    own = [x for x in tensors if x.dim() > 0]
    even = all(x.shape == largest.shape and _strides(x) == _strides(largest) for x in own)
    return not (even and torch.ops.aten.is_non_overlapping_and_dense(largest))


MAP = 4096
"""The fewest values per image of what counts as a map."""


def _strides(x: Tensor) -> tuple[int, ...]:
    return tuple(stride if length > 1 else 0 for length, stride in zip(x.shape, x.stride(), strict=True))


@contextmanager
def _programs(counter: _Counter) -> Iterator[None]:
    """The kernels of programs are counted instead of launched; everything around them runs."""

    def launch(self: Launch, tensors: Any) -> None:
        counter.found["derived"] += 1

    with patch.object(Launch, "__call__", launch):
        yield


def _dense_gradient(x: Tensor) -> Tensor:
    """As on a GPU."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    return conv._DenseGradient.apply(x)  # type: ignore[no-any-return, no-untyped-call]


@contextmanager
def _as_fused(counter: _Counter) -> Iterator[None]:
    def fits(x: Tensor, compressed: Tensor, taps: tuple[int, ...]) -> bool:
        widest = max(x.shape[2], compressed.shape[2] // len(taps))
        return widest <= calibrate.LARGEST and max(taps) <= calibrate.TAPS

    with ExitStack() as stack:
        for entered in (as_on_a_gpu(counter, together=True), _programs(counter), fused_networks()):
            stack.enter_context(entered)
        for module in (calibrate, calibrations):
            stack.enter_context(patch.object(module, "fits", fits))
        for module in (conv, base, darts):
            stack.enter_context(patch.object(module, "dense_gradient", _dense_gradient))
        yield


def network_of(case: Case) -> Network:
    """The network that `benchmarks.training` measures, with its weights channels-last."""
    layout = build_space(case.space).layout()
    genotype = sample(layout, case.seed) if case.genotype is None else notation.parse(case.genotype)
    recipe = resolve(genotype, {"recipe": case.recipe, "data": "cifar10", **case.settings})
    space = build_space(genotype.space, recipe.space_settings)
    network = space.network(genotype, (3, case.size, case.size), 10, auxiliary=recipe.auxiliary > 0)
    return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def launches(network: Network, size: int, *, fused: bool, training: bool = True) -> tuple[Counter[str], Counter[str]]:
    """Operations of one pass by name, and those of them on maps with gaps (`is_uneven`).

    In bfloat16 and with drop-path; in training including the backward pass.
    """
    counter = _Launches()
    network.train(training).use_drop_path(0.3)
    images = torch.randn(4, 3, size, size).contiguous(memory_format=torch.channels_last)

    def step() -> None:
        network.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(training):
            logits, auxiliary = network.forward_with_auxiliary(images)
        if training:
            (logits.float().sum() + (0.0 if auxiliary is None else auxiliary.float().sum())).backward()  # type: ignore[no-untyped-call]

    with _as_fused(counter) if fused else modules_only():
        step()  # the first pass plans the cells
        counter.clear()
        with counter:
            step()
    return counter.found, counter.uneven


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m benchmarks.training_launches", description=__doc__)
    parser.add_argument("--network", choices=list(cases()), default="nos")
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--library-channels", type=int, default=default_settings.library_channels)
    options = parser.parse_args()
    if not has_triton():
        parser.error("kernels are counted by their launches, which requires Triton: `pip install triton`")
    case = cases()[options.network]
    network = network_of(case)
    for training in (True, False):
        for fused in (False, True):
            with cell_settings(library_channels=options.library_channels):
                found, uneven = launches(network, case.size, fused=fused, training=training)
            how = f"{'fused' if fused else 'module by module'}, {'training' if training else 'evaluation'}"
            print(f"{options.network}, {how}: {found.total():,} operations, {uneven.total():,} on maps with gaps")
            for name, count in found.most_common(options.rows):
                gaps = f", {uneven[name]:,} with gaps" if uneven[name] else ""
                print(f"{count:8,}  {name}{gaps}")
