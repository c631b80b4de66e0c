"""A step recorded once as a CUDA graph and replayed: thousands of kernel launches become one.

A captured step must be a function of tensors on the device alone. It writes its results (weights, optimiser state,
meters) in place, its schedules come from buffers filled in place, and nothing in it may ask the device for a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from softcell.engine.distributed import World

Step = Callable[..., None]
Engine = Literal["auto", "eager", "graph"]

# Real steps before the recording: cuDNN picks its algorithms and optimisers make their state in them.
WARMUP = 3


class CapturedStep:
    """Calls `step` eagerly a few times, then records it and replays the recording.

    The first calls are real steps of the run, not rehearsals: nothing has to be undone. When recording fails, `tell` is
    given the reason once and the step stays eager.
    """

    def __init__(self, step: Step, tell: Callable[[str], None], warmup: int = WARMUP) -> None:
        self._step, self._tell, self._left = step, tell, warmup
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._gave_up = False

    def __call__(self, *inputs: Tensor) -> None:
        if self._gave_up:
            self._step(*inputs)
        elif self._graph is not None:
            for own, given in zip(self._inputs, inputs, strict=True):
                own.copy_(given)
            self._graph.replay()
        elif self._left > 0:
            self._left -= 1
            self._eager_on_side_stream(*inputs)
        else:
            self._record(*inputs)

    def _eager_on_side_stream(self, *inputs: Tensor) -> None:
        """Recording happens on a stream of its own, and what it uses must have been made off the default one."""
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            self._step(*inputs)
        current.wait_stream(side)

    def _record(self, *inputs: Tensor) -> None:
        self._inputs = [tensor.clone() for tensor in inputs]
        graph = torch.cuda.CUDAGraph()
        try:
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                self._step(*self._inputs)
        except RuntimeError as error:
            self._gave_up = True
            self._inputs = []
            reason = str(error).strip().splitlines()[0]
            self._tell(f"this step cannot be recorded as a CUDA graph ({reason}); going on with the eager engine")
            self._step(*inputs)
            return
        self._graph = graph
        graph.replay()  # recording runs nothing: this is the step itself


def prepare_step(step: Step, engine: Engine, world: World, tell: Callable[[str], None]) -> Step:
    """`step` as the chosen engine runs it; `auto` records on a single CUDA device and is eager elsewhere."""
    if engine == "eager":
        return step
    reason = None
    if world.device.type != "cuda":
        reason = f"recording needs a CUDA device, and this run is on {world.device.type}"
    elif world.size > 1:
        reason = "recording is for runs of one process, and this one has several"
    if reason is None:
        return CapturedStep(step, tell)
    if engine == "graph":
        tell(f"engine=graph: {reason}; using the eager engine")
    return step
