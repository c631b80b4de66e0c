"""The kernels of derived cells, replaced by their plain twin, so that everything around them runs on a CPU.

Unlike the twins themselves, which autograd differentiates, this runs the code that a GPU runs between launches: inputs
are copied into buffers, nodes are parts of a buffer, and gradients arrive one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from softcell.kernels import derived
from softcell.kernels.derived import derived_cell_reference
from softcell.kernels.derived_program import Derived, Form
from softcell.kernels.schedule import Name, Schedule, Tensors
from softcell.spaces import _derived_plan, execution
from softcell.spaces.execution import is_modules_only


def use_twin_kernels(monkeypatch: Any) -> None:
    """Fused cells run on the CPU, also in float64, through `_DerivedCell`."""
    monkeypatch.setattr(derived, "triton_kernels", lambda family: TwinKernels)
    monkeypatch.setattr(_derived_plan, "triton_kernels", lambda family: TwinKernels)
    monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())


class TwinKernels:
    """Has the functions of `softcell.kernels.derived_triton` that `_DerivedCell` calls."""

    @staticmethod
    def forward_schedule(program: Derived, form: Form, device: torch.device) -> Schedule:
        schedule, (rows_in, rows) = _schedule(device), _rows(program, form)
        schedule.new("buffer", program.planes * rows * program.channels, form.dtype)
        if program.stride != 1:
            schedule.new("given", program.inputs * rows_in * program.channels, form.dtype)
        wide = torch.promote_types(form.dtype, torch.float32)
        schedule.new("state", 8 * program.planes * program.channels, wide)
        if program.is_raw:
            jobs = [(Name(f"input{i}"), *place) for i, place in enumerate(_places(program, form))]
            schedule.copy(jobs)

        def run(tensors: Tensors) -> None:
            states = _states(program, form, tensors)
            given = tensors["parameters"], tensors.get("running"), tensors.get("factors")
            out, moments = derived_cell_reference(program, form.dtype, *given, *states)
            _of_nodes(program, form, tensors["buffer"]).copy_(_as_stored(program, form, out))
            tensors["state"][: moments.numel()].copy_(moments.flatten())

        return _with(schedule, run)

    @staticmethod
    def backward_schedule(program: Derived, form: Form, device: torch.device) -> Schedule:
        def run(tensors: Tensors) -> None:
            given = [tensors["parameters"], *_states(program, form, tensors)]
            given = [x.detach().clone().requires_grad_() for x in given]
            known = tensors.get("running"), tensors.get("factors")
            with torch.enable_grad():
                out, _ = derived_cell_reference(program, form.dtype, given[0], *known, *given[1:])
            arrived = _of_nodes(program, form, tensors["buffer_gradient"])
            pull = torch.zeros_like(out)
            for number, node in enumerate(_node_views(program, pull)):
                node.copy_((arrived[number] if form.apart else _columns(program, arrived, number)).permute(0, 3, 1, 2))
            found = torch.autograd.grad(out, given, pull, materialize_grads=True)
            tensors["parameter_gradient"] = found[0]
            for i, gradient in enumerate(found[1:]):
                own = gradient.permute(0, 2, 3, 1).flatten()
                last = i + 1 == program.inputs
                if form.passed and last:
                    own += tensors["passed"].flatten()
                to = own.new_full((max(len(own), form.room if last else 0),), math.nan)
                to[: len(own)] = own
                tensors[f"input{i}_gradient"] = to

        return _with(_schedule(device), run)


def _schedule(device: torch.device) -> Schedule:
    return Schedule(device, {f"input{i}": torch.float64 for i in range(9)})


def _with(schedule: Schedule, run: Callable[[Tensors], None]) -> Schedule:
    """The work of the kernels is not seen by whatever counts operations."""

    def step(tensors: Tensors) -> None:
        with _disable_current_modes(), torch.no_grad():
            run(tensors)

    schedule._steps.append(step)
    return schedule


def _rows(program: Derived, form: Form) -> tuple[int, int]:
    n, height, width, _ = form.shapes[-1]
    return n * height * width, n * -(-height // program.stride) * -(-width // program.stride)


def _places(program: Derived, form: Form) -> list[tuple[Name, int, int]]:
    """Where the inputs of a part of a cell are copied to: buffer, start, length."""
    rows_in, _ = _rows(program, form)
    size = rows_in * program.channels
    if program.stride == 1:
        return [(Name("buffer"), (program.nodes + i) * size, size) for i in range(program.inputs)]
    return [(Name("given"), i * size, size) for i in range(program.inputs)]


def _states(program: Derived, form: Form, tensors: Tensors) -> list[Tensor]:
    """The input tensors [n, c_i, h_i, w_i]."""
    if not program.is_raw:
        return [tensors[f"input{i}"].permute(0, 3, 1, 2) for i in range(program.inputs)]
    found = (tensors[name][start : start + size] for name, start, size in _places(program, form))
    return [x.view(shape).permute(0, 3, 1, 2) for x, shape in zip(found, form.shapes, strict=True)]


def _of_nodes(program: Derived, form: Form, buffer: Tensor) -> Tensor:
    n, height, width, _ = form.shapes[-1]
    size = n, -(-height // program.stride), -(-width // program.stride)
    nodes, c = program.nodes, program.channels
    found = buffer[: nodes * c * size[0] * size[1] * size[2]]
    return found.view(nodes, *size, c) if form.apart else found.view(*size, nodes * c)


def _node_views(program: Derived, x: Tensor) -> tuple[Tensor, ...]:
    return torch.split(x, program.channels, 1)


def _columns(program: Derived, x: Tensor, number: int) -> Tensor:
    return x[..., number * program.channels : (number + 1) * program.channels]


def _as_stored(program: Derived, form: Form, out: Tensor) -> Tensor:
    if form.apart:
        return torch.stack([node.permute(0, 2, 3, 1) for node in _node_views(program, out)])
    return out.permute(0, 2, 3, 1)
