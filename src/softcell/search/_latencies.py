"""Tables of measured times, for latency budgets: the time of each candidate, and of everything around them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from softcell.arch import Genotype, Layout
from softcell.arch.cost import CostTables
from softcell.engine.manifest import read_mapping
from softcell.errors import UserError, nearest
from softcell.nn.candidates import known_candidates

FIXED = "fixed"
"""The key of the time of everything around the candidates."""


def read_latencies(path: str) -> dict[str, object]:
    """A file of candidate: time, or of table: {candidate: time}.

    `fixed` is the time of everything around the candidates; `about` is for people to read (see `softcell latency`).
    """
    data = _read(path)
    data.pop("about", None)
    for name, value in data.items():
        rows = value if isinstance(value, Mapping) and name != FIXED else {name: value}
        for op, time in rows.items():
            if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time < math.inf:
                raise UserError(f"{path}: the time of {op!r} must be a number of 0 or more, got {time!r}")
    if not data:
        raise UserError(f"{path}: a latency table must have a time for every candidate, but it is empty")
    return data


def _read(path: str) -> dict[str, Any]:
    return read_mapping(path, option="--latency-table", holds="a latency table must be a mapping of candidate: time")


def _check_names(path: str, latencies: Mapping[str, object], layout: Layout) -> None:
    """Raises for unknown names, which are typing errors; known candidates that this search does not use are ignored."""
    tables = {table.name: {op for choice in table.choices for op in choice.candidates} for table in layout.tables}
    own = {op for ops in tables.values() for op in ops}
    for name, value in latencies.items():
        if isinstance(value, Mapping) and name not in tables:
            raise UserError(f"{path}: the space has no table {name!r}; {nearest(name, tables)}")
        for op in value if isinstance(value, Mapping) else [name]:
            if op != FIXED and op not in own and op not in known_candidates():
                raise UserError(f"{path}: there is no candidate {op!r}; {nearest(op, own)}")


def measured_for(path: str) -> Mapping[str, object]:
    """The `about` of a table: sizes of the measured network and of its input; empty for a table written by hand."""
    about = _read(path).get("about")
    return about if isinstance(about, Mapping) else {}


def latency_of(latencies: Mapping[str, object], table: str, op: str) -> float:
    """The time of one candidate; `none` takes 0 unless the file says otherwise."""
    own = latencies.get(table)
    rows = own if isinstance(own, Mapping) else latencies
    value = rows.get(op, 0.0 if op == "none" else None)
    if not isinstance(value, int | float):
        raise UserError(
            f"the latency table has no time for {op!r} of table {table!r}; it has {', '.join(map(str, rows))}"
        )
    return float(value)


def latency(genotype: Genotype, layout: Layout, latencies: Mapping[str, object]) -> float:
    """The sum over all sites and picks of the network, and the fixed time."""
    fixed = latencies.get(FIXED, 0.0)
    assert isinstance(fixed, int | float)  # `read_latencies` checks it
    return fixed + sum(
        latency_of(latencies, table, pick.op) for table in layout.sites for pick in genotype.cells[table].picks
    )


def with_latencies(costs: CostTables, path: str) -> CostTables:
    """The costs with the kind `latency` from a file."""
    layout, latencies = costs.layout, read_latencies(path)
    _check_names(path, latencies, layout)
    sites = []
    for name in layout.sites:
        table = layout.table(name)
        rows = torch.zeros(table.shape, dtype=torch.float64)
        for i, choice in enumerate(table.choices):
            for k, op in enumerate(choice.candidates):
                rows[i, k] = latency_of(latencies, name, op)
        sites.append(rows)
    return CostTables(layout, {**costs.kinds, "latency": tuple(sites)})
