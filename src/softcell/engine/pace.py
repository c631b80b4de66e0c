"""Estimates the time left from the steps measured so far."""

import time


class Pace:
    """Mean duration of steps and of what lies between epochs, as measured in this process."""

    def __init__(self) -> None:
        self._steps = 0
        self._in_steps = 0.0
        self._ends = 0
        self._in_ends = 0.0
        self._warm = False
        self._last = time.perf_counter()

    def mark(self) -> None:
        """Start measuring from now."""
        self._last = time.perf_counter()

    def stepped(self) -> None:
        """A step has ended. The first one is left out: it pays for allocation, tuning or compilation."""
        seconds = self._since()
        if self._warm:
            self._steps += 1
            self._in_steps += seconds
        self._warm = True

    def ended_epoch(self) -> None:
        """The work after an epoch's last step, evaluation and saving, has ended."""
        self._ends += 1
        self._in_ends += self._since()

    def seconds_left(self, steps: int, epochs: int) -> float | None:
        """Return the time for `steps` more steps and `epochs` more ends of epochs; None while unknown."""
        if self._steps == 0:
            return None
        per_end = self._in_ends / self._ends if self._ends else 0.0
        return steps * self._in_steps / self._steps + epochs * per_end

    def _since(self) -> float:
        now = time.perf_counter()
        seconds = now - self._last
        self._last = now
        return seconds
