"""The candidate modules of a cell's edges, and how their outputs are combined to the value of a node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.arch import Mix, Pick, Table, WeightMix
from softcell.errors import UserError
from softcell.kernels.mix import weighted_sum
from softcell.kernels.norm import scaled
from softcell.nn.calibrate import Calibration
from softcell.nn.candidates import Spec, get_candidate

SpecOf = Callable[[int], Spec]
"""The spec of the outgoing candidates of a node."""


class Edges(nn.Module):
    """The candidate modules of a set of picks.

    `own` holds one module per edge and candidate, `shared` one per source and candidate that needs no weights. With
    `share_features` everything is shared by source (EnTranNAS, Eq 6). A duplicate candidate on one edge gets its
    own module.
    """

    def __init__(self, picks: Iterable[Pick], spec_of: SpecOf, *, share_features: bool = False) -> None:
        super().__init__()
        self.own, self.shared = nn.ModuleDict(), nn.ModuleDict()
        self.locations: list[tuple[str, str, str] | None] = []  # None: a zero candidate, which has no module
        counts: dict[Pick, int] = {}
        for pick in picks:
            kind, spec = get_candidate(pick.op), spec_of(pick.source)
            if kind.zero:
                self.locations.append(None)
                continue
            sharing = kind.shared(spec)
            group = self.shared if sharing else self.own
            by_source = sharing or share_features
            row = str(pick.source) if by_source else f"{pick.source}_{pick.target}"
            counts[pick] = counts.get(pick, 0) + 1
            column = pick.op if by_source or counts[pick] == 1 else f"{pick.op}__{counts[pick]}"
            modules = _row(group, row)
            if column not in modules:
                modules[column] = kind.build(spec)
            self.locations.append(("shared" if sharing else "own", row, column))

    def module(self, index: int) -> nn.Module | None:
        """The module of pick number `index`; the same object for picks that share it."""
        location = self.locations[index]
        if location is None:
            return None
        group, row, column = location
        modules = (self.shared if group == "shared" else self.own)[row]
        assert isinstance(modules, nn.ModuleDict)
        return modules[column]


def _row(group: nn.ModuleDict, name: str) -> nn.ModuleDict:
    if name not in group:
        group[name] = nn.ModuleDict()
    row = group[name]
    assert isinstance(row, nn.ModuleDict)
    return row


def narrowed(spec_of: SpecOf, ratio: int) -> SpecOf:
    """The specs of candidates that work on `ratio` times fewer channels than their cell has, at least one."""
    return lambda source: replace(spec_of(source), channels=max(1, spec_of(source).channels // ratio))


def check_ratios(channels: int, bottleneck: int, partial_channels: int) -> None:
    """Raises `UserError` unless candidates can work on that fraction of a space's channels."""
    for name, value in (("bottleneck", bottleneck), ("partial_channels", partial_channels)):
        if value < 1:
            raise UserError(f"`{name} >= 1` must hold, but got {name}={value}")
    if bottleneck > 1 and partial_channels > 1:
        raise UserError(
            f"a supernet has a bottleneck or partial channels, but got bottleneck={bottleneck}, "
            f"partial_channels={partial_channels}; set one of them to 1"
        )
    if channels % partial_channels:
        raise UserError(
            f"`channels` must be a multiple of `partial_channels`, but got channels={channels}, "
            f"partial_channels={partial_channels}; set space.partial_channels=1, or change --channels"
        )


class Bottleneck(nn.Module):
    """1×1 convolutions that narrow every node in `sources` and widen every node in `inner` (EnTranNAS, §2.5).

    Candidates between them work on fewer channels than the cell. They are only convolutions, as printed: every
    candidate has its own ReLU and norm. Supernets and networks in search form have them, evaluation networks do not.

    wide, narrow: the specs of candidates without and with the bottleneck.
    """

    def __init__(self, sources: Iterable[int], inner: Iterable[int], wide: Spec, narrow: Spec) -> None:
        super().__init__()
        c, few = wide.channels, narrow.channels
        self.reduce = nn.ModuleDict({str(node): nn.Conv2d(c, few, 1, bias=False) for node in sources})
        self.recover = nn.ModuleDict({str(node): nn.Conv2d(few, c, 1, bias=False) for node in inner})

    def reduce_source(self, node: int, x: Tensor) -> Tensor:
        """[n, c, h, w] to [n, c / ratio, h, w]"""
        return self.reduce[str(node)](x)  # type: ignore[no-any-return]

    def recover_target(self, node: int, x: Tensor) -> Tensor:
        """[n, c / ratio, h, w] to [n, c, h, w]"""
        return self.recover[str(node)](x)  # type: ignore[no-any-return]


class PartialChannels:
    """Candidates work on the first 1/K of a node's channels, x₁; the others, x₂, bypass them (PC-DARTS, Eq 2).

    A node is the sum of shuffle(concat(Σ_k w_k·o_k(x₁), (Σ_k w_k)·x₂)) over its edges. At stride 2, x₂ is max-pooled
    2×2 (released code). Zero candidates count in Σ_k w_k. The shuffle is the same for all edges, so a node has one.

    ratio: K. wide, narrow: the specs of candidates that would work on all channels and of those that work on 1/K.
    """

    def __init__(self, ratio: int, wide: Spec, narrow: Spec) -> None:
        assert wide.channels == ratio * narrow.channels
        self._ratio, self._narrow = ratio, narrow
        self._other = replace(narrow, channels=wide.channels - narrow.channels)

    def reduce_source(self, node: int, x: Tensor) -> Tensor:
        """x₁: [n, c, h, w] to [n, c / K, h, w]"""
        last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
        # A copy, because kernels read dense maps.
        return x[:, : self._narrow.channels].contiguous(
            memory_format=torch.channels_last if last else torch.contiguous_format
        )

    def bypass(self, x: Tensor, stride: int) -> Tensor:
        """x₂: [n, c, h, w] to [n, c - c / K, h', w'] at the resolution of outgoing operations with `stride`."""
        rest = x[:, self._narrow.channels :]
        # ceil_mode only matters at odd sizes, where candidates round up too.
        return rest if stride == 1 else F.max_pool2d(rest, stride, stride, ceil_mode=True)

    def widen(self, output: Tensor | None, rest: Tensor) -> Tensor:
        """A candidate's output [n, c / K, h, w] (None: zeros) and what bypasses it, before the shuffle [n, c, h, w]."""
        if output is None:
            output = rest.new_zeros(rest.shape[0], self._narrow.channels, *rest.shape[2:])
        return torch.cat([output, rest], dim=1)

    def node_value(self, outputs: Tensor | None, rest: Tensor | None, like: Tensor) -> Tensor:
        """The value of a node [n, c, h, w] from the sums of outputs and of what bypasses them; like: a cell's input."""
        rest = zeros(like, self._other) if rest is None else rest
        return self.shuffle(self.widen(outputs, rest))

    def shuffle(self, x: Tensor) -> Tensor:
        """Channels of K groups in turn: [n, c, h, w] to the same."""
        n, c, h, w = x.shape
        return x.view(n, self._ratio, c // self._ratio, h, w).transpose(1, 2).flatten(1, 2)


Output = tuple[int, int, Tensor | None]
"""Choice, candidate and its output; None for zeros."""


@dataclass(slots=True)
class NodeInputs:
    """The inputs of a node of a mixed cell, as far as they are known."""

    outputs: list[Output] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)  # of features, weighted (and dropped) already
    summed: set[int] = field(default_factory=set)  # the candidates in these sums
    has_share: bool = False  # the sums contain the share of a residual node's source
    calibrations: list[tuple[Calibration, Tensor]] = field(default_factory=list)  # weighted sums already

    def plus(self, value: Tensor | None) -> Tensor | None:
        """The sums and `value`, the sum of the other features."""
        terms = self.sums if value is None else [*self.sums, value]
        return total(terms) if terms else None


class Combiner:
    """Combines outputs of a table's candidates, each [n, c, h, w], by a mix; None where there are only zeros."""

    def __init__(self, table: Table) -> None:
        self._table, self._width, self._contest_of = table, table.width, table.contest_of
        self._index_cache: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}

    def combine(self, outputs: list[Output], mix: Mix, site: int, factors: Tensor | None) -> Tensor | None:
        """The sum of all outputs; with drop-path (factors [choices, n]), choice by choice."""
        if factors is None:
            return self.sum(outputs, mix, site)
        if self._contest_of and not isinstance(mix, WeightMix):  # drop-path then drops the maps that compete
            outputs = [
                (c, k, scaled(x, factors, c) if x is not None and c in self._contest_of else x) for c, k, x in outputs
            ]
        value = self._compete(outputs, mix, site)
        outputs = [output for output in outputs if isinstance(mix, WeightMix) or output[0] not in self._contest_of]
        for choice in sorted({choice for choice, _, _ in outputs}):
            own = self.sum([output for output in outputs if output[0] == choice], mix, site)
            if own is not None:
                kept = scaled(own, factors, choice)
                value = kept if value is None else value + kept
        return value

    def sum(self, outputs: list[Output], mix: Mix, site: int) -> Tensor | None:
        """The sum of all outputs, none dropped; plain weights take one pass over all of them."""
        if isinstance(mix, WeightMix):
            present = [(choice, candidate, x) for choice, candidate, x in outputs if x is not None]
            if not present:
                return None
            if mix.is_picked(site):
                return total([x for _, _, x in present])
            return weighted_sum([x for _, _, x in present], self.weights_of([one[:2] for one in present], mix, site))
        value = self._compete(outputs, mix, site)
        for choice in sorted({choice for choice, _, _ in outputs if choice not in self._contest_of}):
            own = mix.combine(site, choice, {k: x for c, k, x in outputs if c == choice})
            if own is not None:
                value = own if value is None else value + own
        return value

    def _compete(self, outputs: list[Output], mix: Mix, site: int) -> Tensor | None:
        """The sum over contests of their combined choices; None where no choices compete, and for plain weights."""
        contests: dict[tuple[int, ...], dict[int, dict[int, Tensor | None]]] = {}
        for choice, candidate, x in () if isinstance(mix, WeightMix) else outputs:
            if choice in self._contest_of:
                contests.setdefault(self._contest_of[choice], {}).setdefault(choice, {})[candidate] = x
        found = [mix.compete(site, own) for own in contests.values()]
        present = [x for x in found if x is not None]
        return total(present) if present else None

    def sum_bypassed(
        self, node: int, rests: Mapping[int, Tensor], mix: WeightMix, site: int, factors: Tensor | None
    ) -> Tensor | None:
        """Σ (Σ_k w_k)·x₂ over the edges into a node and their live candidates (`PartialChannels`).

        rests: x₂ by source. factors [choices, n]: of drop-path.
        """
        live = mix.live(site) or tuple(tuple(range(len(one.candidates))) for one in self._table.choices)
        choices = [choice for choice in self._table.incoming(node) if live[choice]]
        if not choices:
            return None
        weights = self.weights_of([(choice, k) for choice in choices for k in live[choice]], mix, site)
        shares = torch.stack([own.sum() for own in torch.split(weights, [len(live[choice]) for choice in choices])])
        terms = [rests[self._table.choices[choice].source] for choice in choices]
        if factors is not None:
            terms = [scaled(x, factors, choice) for choice, x in zip(choices, terms, strict=True)]
        return weighted_sum(terms, shares)

    def weights_of(self, entries: Sequence[tuple[int, int]], mix: WeightMix, site: int) -> Tensor:
        """The weights [entries] of a mix by choice and candidate."""
        weights = mix.weights(site).flatten()
        index = self._index(weights.device, tuple(choice * self._width + k for choice, k in entries))
        return weights.index_select(0, index)

    def _index(self, device: torch.device, positions: tuple[int, ...]) -> Tensor:
        """Positions as a tensor on the device; kept, since copying them each step would stall a GPU."""
        key = (device, positions)
        if key not in self._index_cache:
            self._index_cache[key] = torch.tensor(positions, device=device)
        return self._index_cache[key]


def total(terms: Sequence[Tensor]) -> Tensor:
    """Σ terms, all of one shape."""
    value = terms[0]
    for term in terms[1:]:
        value = value + term
    return value


def node_value(node: int, summed: Tensor | None, like: Tensor, spec: Spec, bottleneck: Bottleneck | None) -> Tensor:
    """The value of a node from the sum of its inputs, None if it has none; like: an input of the cell."""
    if summed is not None:
        value = summed
    elif bottleneck is None and spec.stride == 1 and spec.c_in == spec.channels:
        # The same as `zeros`, but without sizes: exported cells of all widths then share one class.
        value = torch.zeros_like(like, memory_format=torch.contiguous_format)
    else:
        value = zeros(like, spec)
    return value if bottleneck is None else bottleneck.recover_target(node, value)


def zeros(like: Tensor, spec: Spec) -> Tensor:
    """The value of a node without inputs, at the output resolution of candidates of `spec` for `like`."""
    n, _, height, width = like.shape
    return like.new_zeros(n, spec.channels, -(-height // spec.stride), -(-width // spec.stride))
