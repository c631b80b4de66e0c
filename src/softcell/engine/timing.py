"""Measures durations and peak memory on the device where the work is done, for benchmarks."""

import resource
import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch


@dataclass(frozen=True, slots=True)
class Timing:
    """One measurement.

    `seconds` is the device's own time between the two ends on CUDA (stream order, without the host's delay in
    reading it) and wall time on the CPU; `peak_bytes` is the most that was allocated on CUDA during the
    measurement, and the process's largest resident size ever on the CPU, where the system keeps no other.
    """

    seconds: float
    wall_seconds: float
    cpu_seconds: float
    peak_bytes: int


class Stopwatch:
    """Context that measures its body; read `timing` after it. It can be entered again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._timing: Timing | None = None

    @property
    def timing(self) -> Timing:
        """The last measurement."""
        if self._timing is None:
            raise RuntimeError("a Stopwatch has a timing after its `with` block has ended, but none has yet")
        return self._timing

    def __enter__(self) -> Self:
        self._timing = None
        if self.device.type == "cuda":
            # Work queued earlier must not be counted in.
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._begin.record(torch.cuda.current_stream(self.device))
        self._wall = time.perf_counter()
        self._cpu = time.process_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            return
        if self.device.type == "cuda":
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end.record(torch.cuda.current_stream(self.device))
            torch.cuda.synchronize(self.device)
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        seconds = self._begin.elapsed_time(end) / 1000.0 if self.device.type == "cuda" else wall
        self._timing = Timing(seconds, wall, cpu, self._peak())

    def _peak(self) -> int:
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        # The unit differs: kibibytes on Linux, bytes on macOS.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
