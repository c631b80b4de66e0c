"""The cell of a derived network: a graph that runs the picks of a genotype, with nothing left to mix.

Its candidate modules stand in `Edges` under the names they have in `MixedCell`, so weights come from there by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from torch import Tensor, nn

from softcell.arch import Cell, Pick
from softcell.arch.genotype import check_forward
from softcell.nn.calibrate import Calibration
from softcell.nn.stochastic import DropPath
from softcell.spaces.arrivals import node_value
from softcell.spaces.bottleneck import Bottleneck, narrowed
from softcell.spaces.derived_plan import DerivedCell, plan_derived
from softcell.spaces.derived_plan import Pick as DerivedPick
from softcell.spaces.edges import Edges, Runner, SpecOf
from softcell.spaces.fused import remembered
from softcell.spaces.fused_plan import Unfit


class PickedCell(nn.Module):
    """The picks of one genotype cell; a node is the plain sum of what arrives.

    Calibrating candidates are applied to the sum of the features that arrive, and added to it. A node in `residual`
    that no feature reaches calibrates its source itself; what a feature hands such a node is never dropped, being all
    that it gets.

    Example:
        >>> import torch
        >>> from softcell.arch import Cell, Pick
        >>> from softcell.nn import Spec
        >>> from softcell.nn.stochastic import DropPath
        >>> from softcell.spaces import PickedCell
        >>> picked = Cell((Pick(0, 1, "skip_connect"),), output=(1,))
        >>> cell = PickedCell(picked, 1, lambda source: Spec(channels=4), DropPath(0.0))
        >>> x = torch.rand(2, 4, 8, 8)
        >>> torch.equal(cell([x])[-1], x)
        True
    """

    def __init__(
        self,
        cell: Cell,
        inputs: int,
        spec_of: SpecOf,
        drop_path: DropPath,
        *,
        share_features: bool = False,
        bottleneck: int = 1,
        residual: Collection[int] = (),
    ) -> None:
        super().__init__()
        check_forward(cell, inputs)
        wide, spec_of = spec_of(0), narrowed(spec_of, bottleneck)
        self.cell, self.inputs = cell, inputs
        self._residual = {pick.target: pick.source for pick in cell.picks if pick.target in residual}
        self.edges = Edges(cell.picks, spec_of, share_features=share_features)
        present = [pick for index, pick in enumerate(cell.picks) if self.edges.module(index) is not None]
        self._kept = Counter((pick.source, pick.target) for pick in present)
        self._drop_path = [drop_path]  # in a list: the network owns it, and it must not appear once per cell
        self._nodes = max((*cell.targets, *cell.output), default=inputs - 1) + 1
        self._spec = spec_of(0)
        self._known: dict[bool, DerivedCell | None] = {}
        sources = sorted({pick.source for pick in cell.picks})
        inner = range(inputs, self._nodes)
        self.bottleneck = None if bottleneck == 1 else Bottleneck(sources, inner, wide=wide, narrow=self._spec)

    def forward(self, states: Sequence[Tensor]) -> list[Tensor]:
        """Values of the input nodes to those of all nodes, each [n, c, h, w]."""
        values = list(states)
        runners = [Runner(x, node, self.bottleneck) for node, x in enumerate(values)]
        for node in range(self.inputs, self._nodes):
            total: Tensor | None = None
            calibrations: dict[str, tuple[Calibration, Tensor]] = {}
            for index, pick in self._incoming(node):
                module = self.edges.module(index)
                if module is None:
                    continue
                output = runners[pick.source](module)
                if isinstance(module, Calibration):
                    output = self._drop_path[0](output)
                    kept = self._kept[pick.source, pick.target]
                    output = output if kept == 1 else output / kept  # as in `block`
                    made = output + calibrations[pick.op][1] if pick.op in calibrations else output
                    calibrations[pick.op] = module, made
                    continue
                if not isinstance(module, nn.Identity) and node not in self._residual:  # DARTS: identity stays
                    output = self._drop_path[0](output)
                total = output if total is None else total + output
            if total is None and node in self._residual:
                total = runners[self._residual[node]].value()
            base = total
            if base is not None and total is not None:
                for module, made in calibrations.values():
                    total = total + module.applied(base, made)
            values.append(node_value(node, total, states[0], self._spec, self.bottleneck))
            runners.append(Runner(values[-1], node, self.bottleneck))
        return values

    def fused(self, preprocess: Sequence[nn.Module], channels: int, stride: int) -> DerivedCell | None:
        """This cell and the modules that prepare its inputs as one operation; None where they must run one by one."""
        return remembered(self._known, True, lambda: self._plan(preprocess, channels, stride))

    def _plan(self, preprocess: Sequence[nn.Module], channels: int, stride: int) -> DerivedCell:
        if self.bottleneck is not None or self._residual:
            raise Unfit("something stands between the nodes")
        modules = ((pick, self.edges.module(index)) for index, pick in enumerate(self.cell.picks))
        picks = [DerivedPick(pick.source, pick.target, module) for pick, module in modules if module is not None]
        return plan_derived(preprocess, picks, self._nodes - self.inputs, channels, stride, self._drop_path[0])

    def _incoming(self, node: int) -> Iterator[tuple[int, Pick]]:
        return ((i, pick) for i, pick in enumerate(self.cell.picks) if pick.target == node)
