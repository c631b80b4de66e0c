"""Derived cells as programs of `softcell.kernels.cell`, and a network's pass through them.

Derived cells of ReLU-convolution-norm candidates (NAS-Bench-201) are the same programs as mixed cells. A node is
Σ γ·ŷ + β over its inputs instead of the Σ w·ŷ of a mixed cell: the same program with weights per channel, the scales
and shifts of the norms. Identities and pools without a norm have weight one. Drop-path scales γ·ŷ + β of every pick
except identities, which are never dropped (DARTS). Cells whose ReLUs follow their norms are planned by
`_rectified_plan`.

These classes own no parameters: weights and running statistics stay in the modules, under their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from softcell.nn.norm import updates_together
from softcell.nn.stochastic import DropPath
from softcell.spaces._fused_cell import FusedCell, Norms, prepared
from softcell.spaces._fused_plan import Entry, plan

if TYPE_CHECKING:
    from softcell.spaces.cell import PickedCell

RunCell = Callable[[Sequence[Tensor]], list[Tensor]]
"""Runs a cell: values of the input nodes to those of all nodes, each [n, c, h, w]."""


@dataclass(frozen=True, slots=True)
class AffineCell:
    """A derived cell's program and the modules it reads; `paths` is the number of picks that drop-path drops.

    places: by node of the cell the position of its value in what `cell` returns; None: they are the same.
    """

    cell: FusedCell
    drop_path: DropPath
    paths: int
    places: tuple[int, ...] | None = None

    @property
    def norms(self) -> Norms:
        return self.cell.norms

    def __call__(
        self, states: Sequence[Tensor], factors: Tensor | None = None, *, mix: Tensor | None = None
    ) -> list[Tensor]:
        """Values of the input nodes to those of all nodes, each [n, c, h, w].

        factors [1 + paths, n]: of drop-path, after a row of ones for identities; None: nothing is dropped. mix: of
        `affine_mixes`, if it is known.
        """
        values = self.cell(states, affine_mixes([self])[0] if mix is None else mix, factors)
        return values if self.places is None else [values[place] for place in self.places]

    def rows(self) -> list[Tensor]:
        """Ones, then the scale and shift of every norm, each [c]."""
        norms = [norm for _, norm in self.cell.norms]
        return [_ones(norms[0].weight), *(row for norm in norms for row in (norm.weight, norm.bias))]


def affine_mixes(cells: Sequence[AffineCell]) -> list[Tensor]:
    """The rows of every cell as a matrix [1 + 2 · norms, c], the weights of its mix."""
    rows = [cell.rows() for cell in cells]
    sizes = [len(own) * own[0].numel() for own in rows]
    parts = torch.split(torch.cat([row for own in rows for row in own]), sizes)
    return [part.view(len(own), -1) for part, own in zip(parts, rows, strict=True)]


_ONES: dict[tuple[int, torch.dtype, torch.device], Tensor] = {}


def _ones(like: Tensor) -> Tensor:
    """Ones like a parameter; cached, since creating them would take a launch for every cell.

    They are copied from the host synchronously, since later readers may be on other streams.
    """
    key = (like.shape[0], like.dtype, like.device)
    if key not in _ONES:
        _ONES[key] = torch.ones(key[0], dtype=key[1]).to(key[2])
    return _ONES[key]


def plan_affine(
    picks: Iterable[tuple[int, int, nn.Module]],
    inputs: int,
    nodes: int,
    channels: int,
    stride: int,
    drop_path: DropPath,
) -> AffineCell:
    """The fused form of a derived cell; raises `Unfit` with the reason if there is none.

    picks: source, target and module of every pick that is not zero. stride: of all outgoing operations of an input
    node.
    """
    entries, choice = [], 0
    for source, target, module in picks:
        dropped = not isinstance(module, nn.Identity)
        choice += dropped
        entries.append(Entry(source, target, 0, module, choice if dropped else 0))
    return AffineCell(plan(entries, inputs, nodes, channels, stride, affine=True), drop_path, choice)


@contextmanager
def fused_pass(cells: Iterable[PickedCell], x: Tensor, *, rectified: bool = False) -> Iterator[list[RunCell]]:
    """Yields a function that runs each cell: fused, or module by module without a fused form.

    Small operations run once for all cells, since each launch takes microseconds: drop-path factors are drawn,
    parameters are concatenated and running statistics are collected at the beginning; running statistics and batch
    counts are updated at the end.

    x: any tensor of the batch, [n, ...]. rectified: the cells' inputs are not negative, and their ReLUs follow their
    norms.
    """
    forms = [(cell, cell.fused_rectified() if rectified else cell.fused_affine()) for cell in cells]
    counts = [cell.num_dropped() if form is None else form.paths for cell, form in forms]
    drawn = _drawn(forms[0][0].drop_path, x, counts, [form is not None for _, form in forms])
    fused = [form for _, form in forms if form is not None]
    mixes = iter(affine_mixes(fused) if fused else ())
    with updates_together(), prepared([form.cell for form in fused], x):
        runs = zip(forms, drawn, strict=True)
        yield [
            partial(cell, factors=own) if form is None else partial(form, factors=own, mix=next(mixes))
            for (cell, form), own in runs
        ]


def _drawn(drop_path: DropPath, x: Tensor, counts: Sequence[int], fused: Sequence[bool]) -> list[Tensor | None]:
    """Each cell's factors [count, n], after a row of ones if it is fused; None if nothing is dropped.

    Row 0 of a fused cell's factors is for identities, which are never dropped.
    """
    if not (drop_path.training and drop_path.probability > 0.0 and any(counts)):
        return [None] * len(counts)
    own = torch.split(drop_path.factors(x, sum(counts)), list(counts))
    if any(fused):
        ones = own[0].new_ones(1, own[0].shape[1])
        sizes = [is_fused + count for is_fused, count in zip(fused, counts, strict=True)]
        rows = [
            row for is_fused, part in zip(fused, own, strict=True) for row in ([ones, part] if is_fused else [part])
        ]
        own = torch.split(torch.cat(rows), sizes)
    return [part if count else None for part, count in zip(own, counts, strict=True)]
