"""Watching a search for its best-known failure: every edge turning into a skip connection."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from softcell.arch import Cell, Genotype, Layout, Table
from softcell.search.recipe import Collapse

SKIP = "skip_connect"


def share(cell: Cell, op: str, table: Table) -> float:
    """The share of a cell's picks that are `op`; `none` does not count as a pick.

    Nor do edges that only choose whether to be there (the parents of NAS-Bench-1Shot1): they say nothing of operations.
    """
    links = {(c.source, c.target) for c in table.choices if set(c.candidates) == {op, "none"}}
    picks = [pick for pick in cell.picks if pick.op != "none" and (pick.source, pick.target) not in links]
    return sum(pick.op == op for pick in picks) / len(picks) if picks else 0.0


class CollapseWatch:
    """Warns once per cell, and ends the search when asked to.

    `kept` is the last architecture from before the collapse that ended a search.
    """

    def __init__(self, settings: Collapse, layout: Layout, notify: Callable[[str], None], epochs: int) -> None:
        self._settings, self._layout, self._notify = settings, layout, notify
        self._first = 0 if settings.after == 0 or epochs == 1 else max(1, math.ceil(settings.after * epochs))
        self._streaks: dict[str, int] = {}
        self._warned: set[str] = set()
        self._healthy: Genotype | None = None
        self.kept: Genotype | None = None

    def look(self, epoch: int, genotype: Genotype) -> str | None:
        """Takes note of an epoch's architecture; gives the reason to stop, if there is one."""
        shares = {name: share(cell, SKIP, self._layout.table(name)) for name, cell in genotype.cells.items()}
        if all(value <= self._settings.warn_above for value in shares.values()):
            self._healthy = genotype
        if epoch < self._first:
            return None
        for name, value in shares.items():
            collapsed = value > self._settings.warn_above
            self._streaks[name] = self._streaks.get(name, 0) + 1 if collapsed else 0
            if collapsed and name not in self._warned:
                self._warned.add(name)
                self._notify(
                    f"epoch {epoch + 1}: {value:.0%} of the {_of(name)} operations are skip connections (warning "
                    f"above {self._settings.warn_above:.0%}). The search may be collapsing: fewer epochs, or "
                    "--set collapse.stop=true to keep the architecture from before."
                )
        worst = max(self._streaks, key=lambda name: self._streaks[name])
        if self._settings.stop and self._streaks[worst] >= self._settings.patience:
            self.kept = self._healthy
            return (
                f"collapse: {shares[worst]:.0%} of the {_of(worst)} operations are skip connections for "
                f"{self._streaks[worst]} epoch(s)"
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        return {
            "streaks": dict(self._streaks),
            "warned": sorted(self._warned),
            "healthy": None if self._healthy is None else self._healthy.to_dict(),
            "kept": None if self.kept is None else self.kept.to_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._streaks, self._warned = dict(state["streaks"]), set(state["warned"])
        self._healthy = None if state["healthy"] is None else Genotype.from_dict(state["healthy"])
        self.kept = None if state["kept"] is None else Genotype.from_dict(state["kept"])


def _of(table: str) -> str:
    return "cell's" if table == "cell" else f"{table} cell's"
