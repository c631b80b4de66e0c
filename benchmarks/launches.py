"""Counts the operations that a search step dispatches on the GPU code path, without a GPU.

    python -m benchmarks.launches

Views and empty tensors launch nothing and are not counted. The features of a cell run as Triton kernels on a GPU. Their
launches are counted; the plain twins that run here instead are not. Operations on lists of tensors and two-stage sums
count as one, so a GPU launches a few per cent more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.steps import Case, batch, step, step_state
from benchmarks.traffic import is_view
from softcell.kernels import block_norm, calibrate, indicator, library_conv, local, mix, mixed_norm, window_mean
from softcell.kernels import cell as kernels
from softcell.nn import attention, conv
from softcell.nn import calibrate as calibrations
from softcell.nn import stack as stacked
from softcell.spaces import _executors, _fused_cell, block, execution

CASES = [
    Case("nos", {}, (3, 32, 32), 2, "nos"),
    Case("nb201", {}, (3, 32, 32), 2, "itnas", {"recompute": False}, "single-level"),
    Case(
        "nb201",
        {},
        (3, 32, 32),
        2,
        "itnas",
        {"recompute": False, "tokens": "flat", "token_norm": False},
        "single-level",
    ),
    Case("nb201", {}, (3, 32, 32), 2),
    Case("darts", {}, (3, 32, 32), 2),
    Case("fullattention", {}, (3, 32, 32), 2, "fullattention"),
]
KERNELS: list[tuple[Any, dict[str, int]]] = [
    (
        kernels,
        {
            **dict.fromkeys(
                ("pool", "convolve", "convolve_and_pool", "finish_moments", "normalise", "gradient_sums", "combine"), 1
            ),
            **dict.fromkeys(("input_gradient", "masked_input_gradient", "gather_gradient", "distribute_gradient"), 1),
            **{"normalise_gradient": 2, "weight_gradient": 2, "combine_gradient": 3},
        },
    ),
    (_fused_cell, {"compose": 1, "compose_gradient": 1}),
    (library_conv, {"store": 1}),
]
"""Launches of each kernel's host function when it has work to do."""
NOTHING = (torch.ops.aten._unsafe_view.default, torch.ops.aten.promote_types.default)
"""Operations that launch nothing, although their schemas do not show it."""


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()
        self.silent = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (self.silent or is_view(func) or func in NOTHING):
            self.found[str(func)] += 1
        return func(*args, **(kwargs or {}))

    def as_kernel(self, name: str, count: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, counted as `count` launches."""

        def run(*arguments: Any, **more: Any) -> Any:
            if all(len(given) for given in arguments if isinstance(given, list | tuple | range)):
                self.found[name] += count
            self.silent = True
            try:
                return function(*arguments, **more)
            finally:
                self.silent = False

        return run


class _Local:
    """Stand-in for the local attention kernels: counts their launches and returns zeros."""

    def __init__(self, counter: _Counter) -> None:
        self._counter = counter
        self.forward = counter.as_kernel("local", 1, self._forward)
        self.summed = counter.as_kernel("local_sums", 1, self._summed)

    def _forward(
        self, packed: Tensor, lines: Tensor, kinds: local.Kinds, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        y = packed.new_empty(*packed.shape[:-1], packed.shape[-1] // 3) if out is None else out
        return y.zero_(), packed.new_zeros(1)

    def backward(
        self, packed: Tensor, lines: Tensor, *rest: Any, positions: bool, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        def run() -> tuple[Tensor, Tensor | None]:
            dpacked = torch.empty_like(packed) if out is None else out
            return dpacked.zero_(), lines.new_zeros(2, *lines.shape) if positions else None

        # Queries with positions, keys with values.
        return self._counter.as_kernel("local_gradient", 2, run)()  # type: ignore[no-any-return]

    def _summed(self, partial: Tensor, extent: int = 0) -> Tensor:
        _, lines, c = partial.shape
        return partial.new_zeros((2, c, extent) if extent else (lines, c))


class _BlockNorm:
    """Stand-in for the kernels of norms with what follows them: counts their launches and returns zeros."""

    def __init__(self, counter: _Counter) -> None:
        self.forward = counter.as_kernel("block_norm", 3, self._forward)
        self.backward = counter.as_kernel("block_norm_gradient", 3, self._backward)

    def _forward(self, z: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        parts = more[-1]
        return z.new_zeros(parts, *z.shape[:3], z.shape[3] // parts), torch.zeros(3, z.shape[3])

    def _backward(self, z: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(z), torch.zeros(2, z.shape[3])


class _MixedNorm:
    """Stand-in for the kernels of weighted sums of norms: counts their launches and returns zeros."""

    def __init__(self, counter: _Counter) -> None:
        self.forward = counter.as_kernel("mixed_norm", 3, self._forward)
        self._of_sums = counter.as_kernel("mixed_norm_gradient", 3, self._backward)
        self._of_shortcut = counter.as_kernel("mixed_norm_gradient", 1, self._backward)

    def _forward(self, z: Tensor, *more: Any) -> tuple[Tensor, Tensor]:
        return z.new_zeros(z.shape[1:]), torch.zeros(3, len(z), z.shape[-1])

    def backward(self, *given: Any) -> tuple[Tensor | None, ...]:
        return (self._of_sums if given[-3] or given[-2] else self._of_shortcut)(*given)  # type: ignore[no-any-return]

    def _backward(self, z: Tensor, *given: Any) -> tuple[Tensor | None, ...]:
        maps, weights, shortcut = given[-3:]
        return (
            torch.zeros_like(z) if maps else None,
            torch.zeros(len(z)) if weights else None,
            z.new_zeros(z.shape[1:]) if shortcut else None,
        )


class _WindowMean:
    """Stand-in for the kernels of average pools: counts their launches and returns zeros."""

    def __init__(self, counter: _Counter) -> None:
        self.forward = counter.as_kernel("window_mean", 1, self._forward)
        self.backward = counter.as_kernel("window_mean_gradient", 1, self._backward)

    def _forward(self, x: Tensor, stride: int) -> Tensor:
        n, height, width, c = x.shape
        return x.new_zeros(n, -(-height // stride), -(-width // stride), c)

    def _backward(self, dy: Tensor, height: int, width: int, stride: int) -> Tensor:
        return dy.new_zeros(dy.shape[0], height, width, dy.shape[3])


class _Indicator:
    """Stand-in for the indicator token kernels: counts their launches and computes with the twin."""

    def __init__(self, counter: _Counter) -> None:
        self._counter = counter

    def forward(self, x: Tensor, laid: indicator.Laid, form: indicator.Form, keeps: bool) -> tuple[Tensor, ...]:
        launches = 2 if form.is_flat(x) else 1  # a product for whole maps
        found: tuple[Tensor, ...] = self._counter.as_kernel("indicate", launches, self._forward)(x, laid, form, keeps)
        return found

    def forward_again(
        self, x: Tensor, laid: indicator.Laid, form: indicator.Form, attention: Tensor
    ) -> tuple[Tensor, ...]:
        self._counter.found["indicate"] += 1
        return self._unread(attention.new_empty(attention.shape[0], *x.shape[1:], dtype=x.dtype), attention)

    def backward(self, x: Tensor, laid: indicator.Laid, form: indicator.Form, *more: Any) -> Any:
        # Three kernels and a sum; for whole maps one more kernel, two products and two copies.
        launches = 9 if form.is_flat(x) else 4
        return self._counter.as_kernel("indicate_gradient", launches, self._backward)(x, laid, form, *more)

    def _forward(self, x: Tensor, laid: indicator.Laid, form: indicator.Form, keeps: bool) -> tuple[Tensor, ...]:
        out, attention = indicator.indicate_reference(x, laid, form)
        return out, attention, *self._unread(out, attention)

    def _unread(self, out: Tensor, attention: Tensor) -> tuple[Tensor, ...]:
        """What the forward pass keeps, and the twin does not read."""
        return torch.empty_like(out), torch.empty_like(out), attention.new_empty(2, *attention.shape[:2])

    def _backward(
        self, x: Tensor, laid: indicator.Laid, form: indicator.Form, attention: Tensor, *kept: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        *_, gradient, towards = kept
        given = [one.detach().requires_grad_() for one in (x, *laid)]
        with torch.enable_grad():
            outputs = indicator.indicate_reference(given[0], indicator.Laid(*given[1:]), form)
        pulls = (gradient, torch.zeros_like(attention) if towards is None else towards)
        dx, *rest = torch.autograd.grad(outputs, given, pulls, materialize_grads=True)
        found = indicator.Laid(*rest)
        # The gradient of a shift that all maps share is counted once.
        return dx, indicator.vector(found._replace(shift=found.shift / laid.positions.shape[1]))


class _Calibrate:
    """Stand-in for the kernels that make and apply calibrations: counts their launches and computes with the twins."""

    def __init__(self, counter: _Counter) -> None:
        self.calibrate = counter.as_kernel("calibrate", 1, self._calibrate)
        self._of_kernels = counter.as_kernel("calibrate_gradient", 2, self._calibrate_gradient)
        self._of_one_tap = counter.as_kernel("calibrate_gradient", 3, self._calibrate_gradient)  # its parts are added
        self._of_attention = counter.as_kernel("calibrate_gradient", 1, self._calibrate_gradient)
        self._counter = counter
        self._made = counter.as_kernel("dynamic_kernels", 1, self._dynamic_kernels)
        self._of_maps = counter.as_kernel("dynamic_kernels_gradient", 1, self._gradients)
        self._of_weights = counter.as_kernel("dynamic_kernels_gradient", 5, self._gradients)  # two sums, conversions

        self.spatial_sums = counter.as_kernel("spatial_sums", 1, self._spatial_sums)
        self._of_hidden = counter.as_kernel("spatial_sums_gradient", 1, self._spatial_gradient)
        self._of_sums = counter.as_kernel("spatial_sums_gradient", 3, self._spatial_gradient)  # a sum, a conversion

    def _spatial_sums(self, *given: Any) -> tuple[Tensor, Tensor]:
        made = calibrate.spatial_sums_reference(*given)
        return made, made

    def spatial_sums_gradient(self, *given: Any) -> tuple[Tensor | None, ...]:
        return (self._of_sums if given[-1] else self._of_hidden)(*given)  # type: ignore[no-any-return]

    def _spatial_gradient(
        self, hidden: Tensor, gather: Tensor, weights: Tensor, maps: Tensor, gradient: Tensor, sums: bool
    ) -> tuple[Tensor, ...]:
        own = [one.detach().requires_grad_() for one in (hidden, gather, weights)]
        with torch.enable_grad():
            y = calibrate.spatial_sums_reference(own[0], own[1], own[2], None, (maps.shape[2], maps.shape[3]))
        return torch.autograd.grad(y, own, gradient)

    def _calibrate(self, rows: Tensor, *more: Any) -> Tensor:
        return calibrate.calibrate_reference(rows.permute(0, 3, 1, 2), *more).permute(0, 2, 3, 1)

    def calibrate_gradient(self, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        kernels = given[3]
        if kernels is None:
            return self._of_attention(*given)  # type: ignore[no-any-return]
        return (self._of_one_tap if kernels.shape[-1] == 1 else self._of_kernels)(*given)  # type: ignore[no-any-return]

    def _calibrate_gradient(
        self,
        rows: Tensor,
        channel: Tensor | None,
        spatial: Tensor | None,
        kernels: Tensor | None,
        dilation: int,
        gradient: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = rows.new_zeros(len(rows), rows.shape[-1], 1, 1) if kernels is None else kernels
        own, taps = (one.detach().requires_grad_() for one in (rows, given))
        seen = rows.new_zeros(len(rows), 1, *rows.shape[1:3]) if spatial is None else spatial.detach()
        seen.requires_grad_()
        with torch.enable_grad():
            y = calibrate.calibrate_reference(own.permute(0, 3, 1, 2), channel, seen, taps, dilation)
        dx, ds, dk = torch.autograd.grad(y, (own, seen, taps), gradient.permute(0, 3, 1, 2))
        return dx.contiguous(), ds.flatten(1), dk.permute(0, 2, 3, 1).flatten(1, 2).contiguous()

    def dynamic_kernels(self, *given: Any) -> tuple[Tensor | None, ...]:
        if given[-1] is not None:
            self._counter.found["attend"] += 1
        return self._made(*given)  # type: ignore[no-any-return]

    def _dynamic_kernels(self, *given: Any) -> tuple[Tensor | None, ...]:
        made = calibrate.dynamic_kernels_reference(*given)
        return made, made, made, *((None, None) if given[-1] is None else (made, made))

    def dynamic_kernels_gradient(self, *given: Any) -> tuple[Tensor | None, ...]:
        weights = given[-1]
        if given[6] is not None:
            self._counter.found["attend_gradient"] += 3 if weights else 1  # a sum, a conversion
        found = iter((self._of_weights if weights else self._of_maps)(*given))
        own = [None if one is None else next(found) for one in (*given[:4], *given[5:7])]
        return (*own,) if weights else (*own[:2], None, None, None, None)

    def _gradients(self, *given: Any) -> tuple[Tensor, ...]:
        own = [None if one is None else one.detach().requires_grad_() for one in (*given[:4], *given[5:7])]
        arguments: Any = (*own[:4], given[4], *own[4:])
        with torch.enable_grad():
            y = calibrate.dynamic_kernels_reference(*arguments)
        return torch.autograd.grad(y, [one for one in own if one is not None], given[-2])


@contextmanager
def as_on_a_gpu(counter: _Counter, *, together: bool) -> Iterator[None]:
    """Cells on the CPU take the GPU code path; together: also group calibrations and attention blocks."""
    with ExitStack() as stack:
        for module, counts in KERNELS:
            for name, count in counts.items():
                stack.enter_context(patch.object(module, name, counter.as_kernel(name, count, getattr(module, name))))
        stack.enter_context(patch.object(execution, "kernels_serve", lambda x: True))
        stack.enter_context(patch.object(execution, "grouping_blocks_pays", lambda x: together))
        for module in (attention, block_norm, conv, local, mixed_norm, stacked, window_mean):
            stack.enter_context(patch.object(module, "runs_triton", lambda x: True))
        stack.enter_context(patch.object(block_norm, "triton_kernels", lambda family: _BlockNorm(counter)))
        stack.enter_context(patch.object(mixed_norm, "triton_kernels", lambda family: _MixedNorm(counter)))
        stack.enter_context(patch.object(local, "triton_kernels", lambda family: _Local(counter)))
        stack.enter_context(patch.object(window_mean, "triton_kernels", lambda family: _WindowMean(counter)))
        stack.enter_context(patch.object(indicator, "fits", lambda x, form: True))
        stack.enter_context(patch.object(indicator, "triton_kernels", lambda family: _Indicator(counter)))
        for module in (calibrate, calibrations):
            stack.enter_context(patch.object(module, "fits", lambda x, compressed, taps: together))
        for module in (calibrate, _executors):
            stack.enter_context(patch.object(module, "runs_triton", lambda x: together))
        stack.enter_context(patch.object(calibrate, "triton_kernels", lambda family: _Calibrate(counter)))
        for module in (_executors, block):
            stack.enter_context(patch.object(module, "is_modules_only", lambda: not together))
        stack.enter_context(patch.object(execution, "grouping_calibrations_pays", lambda x: together))
        stack.enter_context(patch.object(mix, "copies_cheaply", lambda x: together))
        yield


def launches(case: Case, *, together: bool) -> Counter[str]:
    """Operations of one search step by name."""
    device = torch.device("cpu")
    actors, data = step_state(case, device, plain=False), batch(case, device)
    counter = _Counter()
    with as_on_a_gpu(counter, together=together):
        step(actors, data, case.regime)  # the first call creates the plans
        counter.found.clear()
        with counter:
            step(actors, data, case.regime)
    return counter.found


if __name__ == "__main__":
    for case in CASES:
        for together in (False, True) if case.space in ("nos", "fullattention") else (True,):
            found = launches(case, together=together)
            how = {True: "", False: ", calibrations or blocks one by one"}[together]
            print(f"{case.method} in {case}{how}: {found.total():,} operations")
            print("\n".join(f"{count:8,}  {name}" for name, count in found.most_common(16)))
