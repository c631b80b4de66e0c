"""The contracts of candidate operations, and of layouts and derivation rules: no network."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from softcell.arch import Choice, Pick, Rule, Table, count
from softcell.nn.calibrate import Calibration
from softcell.nn.candidates import Spec, get_candidate
from softcell.nn.stochastic import SharedDraws
from softcell.spaces import Space
from softcell.testing.tools import images, require, require_close

CHANNELS = 6
"""The number of channels; a candidate that needs multiples of another number gets the next one."""
SIZES = ((8, 8), (9, 7), (5, 4))

CandidateCheck = Callable[[str], None]


def halves_by_rounding_up(name: str) -> None:
    """[n, c, h, w] leads to [n, c, ⌈h/s⌉, ⌈w/s⌉] for any size: all candidates of an edge can be added.

    A feature candidate returns such a map; a calibrating one a tensor that can be applied to it.
    """
    kind, channels = get_candidate(name), channels_for(name)
    for stride in (1, 2):
        module = _build(name, Spec(channels, stride, affine=False, pool_norm=True))
        for height, width in SIZES:
            output = module(images((channels, height, width), batch=2))
            expected = (2, channels, -(-height // stride), -(-width // stride))
            if kind.calibrates:
                require(isinstance(module, Calibration), f"{name} is of kind {kind.kind}: it must be a Calibration")
                assert isinstance(module, Calibration)
                _require_kind(name, output, expected)
                output = module.applied(images(expected[1:], batch=2), output)
            found = tuple(output.shape)
            require(
                found == expected,
                f"{name} with stride {stride} on {height}x{width} must return {expected}, but returned {found}",
            )


def is_applied_linearly(name: str) -> None:
    """The output of a calibrating candidate is applied linearly: sums over edges are applied at once."""
    module = _build(name, Spec(channels_for(name), 1, affine=False))
    if not isinstance(module, Calibration):
        return
    x, y = images((channels_for(name), 9, 7), seed=1), images((channels_for(name), 9, 7), seed=2)
    a, b = module(x), module(y)
    apart = 2.0 * module.applied(x, a) - 3.0 * module.applied(x, b)
    require_close(module.applied(x, 2.0 * a - 3.0 * b), apart, f"{name}: `applied` must be linear in what was made")


def affine_is_asked_for(name: str) -> None:
    """BatchNorm learns scale and shift exactly when the spec says so."""
    for affine in (False, True):
        for stride in (1, 2):
            module = _build(name, Spec(channels_for(name), stride, affine=affine, pool_norm=True))
            norms = [part for part in module.modules() if isinstance(part, nn.BatchNorm2d)]
            wrong = [norm for norm in norms if norm.affine != affine]
            require(not wrong, f"{name} must have affine={affine} in all its norms, but {wrong} differ")


def zero_means_zeros(name: str) -> None:
    """A candidate marked `zero` returns zeros; any other does not."""
    kind = get_candidate(name)
    for stride in (1, 2):
        output = _build(name, Spec(channels_for(name), stride, affine=False))(images((channels_for(name), 8, 8)))
        require(
            kind.zero == (not bool(output.any())),
            f"{name} says zero={kind.zero}, but its output is {'not ' if kind.zero else ''}all zeros",
        )


def shared_means_the_same_for_every_edge(name: str) -> None:
    """Two builds of a shared candidate have the same output, have no weights and draw no random numbers."""
    for stride in (1, 2):
        for affine in (False, True):
            for pool_norm in (False, True):
                spec = Spec(channels_for(name), stride, affine=affine, pool_norm=pool_norm)
                if not get_candidate(name).shared(spec):
                    continue
                first, second = _build(name, spec, seed=0), _build(name, spec, seed=1)
                require(
                    not list(first.parameters()), f"{name} says it is shared for {spec}, but it has its own weights"
                )
                x = images((channels_for(name), 9, 7))
                require_close(first(x), second(x), f"{name} says it is shared for {spec}, but two builds differ")


def gradients_reach_input_and_weights(name: str) -> None:
    """Every weight and the input get gradients; a blind candidate has no weights and passes no gradient."""
    kind = get_candidate(name)
    if kind.zero:
        return
    for stride in (1, 2):
        module = _build(name, Spec(channels_for(name), stride, affine=True, pool_norm=True))
        x = images((channels_for(name), 8, 8)).requires_grad_()
        output = module(x)
        if kind.blind:
            require(not output.requires_grad, f"{name} says it is blind, but a gradient passes through it")
            continue
        # Not a plain sum: that of a batch-norm's or a softmax's output is constant, so it has no gradient.
        (output * torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)).sum().backward()
        require(x.grad is not None and bool(x.grad.any()), f"{name}, stride {stride}: no gradient reaches the input")
        dead = [key for key, p in module.named_parameters() if p.grad is None or not bool(p.grad.any())]
        require(not dead, f"{name}, stride {stride}: no gradient reaches {dead}")


def input_stays_as_it_was(name: str) -> None:
    """The input is read by other candidates too, so nothing may write into it."""
    x = images((channels_for(name), 8, 8))
    before = x.clone()
    _build(name, Spec(channels_for(name), 1, affine=False, pool_norm=True))(x)
    require(torch.equal(x, before), f"{name} changes its input in place")


def evaluations_of_a_step_share_their_draws(name: str) -> None:
    """A second-order step evaluates a batch several times: random numbers come from `softcell.nn.stochastic`."""
    module, x = (
        _build(name, Spec(channels_for(name), 1, affine=False, pool_norm=True)),
        images((channels_for(name), 8, 8)),
    )
    draws, outputs = SharedDraws(), []
    for _ in range(2):
        with torch.no_grad(), draws.evaluation("train"):
            outputs.append(module(x))
    require_close(outputs[1], outputs[0], f"{name}: evaluations of a step must draw once (`softcell.nn.stochastic`)", 0)


CANDIDATE_CHECKS: tuple[CandidateCheck, ...] = (
    halves_by_rounding_up,
    is_applied_linearly,
    affine_is_asked_for,
    zero_means_zeros,
    shared_means_the_same_for_every_edge,
    gradients_reach_input_and_weights,
    input_stays_as_it_was,
    evaluations_of_a_step_share_their_draws,
)


def check_candidate(name: str) -> None:
    """Runs every candidate check on the registered operation `name`.

    Example:
        >>> from softcell.testing import check_candidate
        >>> check_candidate("skip_connect")  # raises AssertionError if a contract is broken
        >>> print("all contracts hold")
        all contracts hold
    """
    for check in CANDIDATE_CHECKS:
        check(name)


def _require_kind(name: str, output: Tensor, target: tuple[int, int, int, int]) -> None:
    """The output of a calibrating candidate for a map of shape `target` has the shape of its kind."""
    kind, found = get_candidate(name).kind, tuple(output.shape)
    if kind == "attention":
        fits = len(found) == 4 and all(have in (1, want) for have, want in zip(found, target, strict=True))
        require(fits, f"{name} is an attention: it must broadcast to {target}, but returned {found}")
    else:
        square = len(found) == 4 and found[2] == found[3] and found[2] % 2 == 1
        require(
            square and found[:2] == target[:2],
            f"{name} is a kernel: it must return {(*target[:2], 'k', 'k')} with an odd k, but returned {found}",
        )


def channels_for(name: str, least: int = CHANNELS) -> int:
    """The smallest width from `least` on that a candidate is built for."""
    multiple = get_candidate(name).multiple
    return -(-least // multiple) * multiple


def _build(name: str, spec: Spec, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return get_candidate(name).build(spec).double()


LIMIT = 3000
"""The most architectures that are enumerated."""


def layout_is_consistent(space: Space) -> None:
    """Sites name tables; edges run forward and are unique, in the order that rules expect."""
    layout = space.layout()
    require(layout.space == space.name, f"the layout of space {space.name!r} says it is of {layout.space!r}")
    names = [table.name for table in layout.tables]
    require(len(set(names)) == len(names), f"tables must have distinct names, got {names}")
    taken = [name for name in names if not name.isidentifier() or name in dir(nn.ParameterDict)]
    require(not taken, f"tables name parameters of methods, so {taken} cannot be their names; choose others")
    require(bool(layout.sites), "a layout needs at least one site")
    unknown = set(layout.sites) - set(names)
    require(not unknown, f"every site must name a table, but {sorted(unknown)} are not tables")
    for table in layout.tables:
        edges = [(choice.target, choice.source) for choice in table.choices]
        require(all(0 <= source <= target for target, source in edges), f"table {table.name!r}: edges must run forward")
        require(len(set(edges)) == len(edges), f"table {table.name!r}: a genotype names picks by edge, so once each")
        require(edges == sorted(edges), f"table {table.name!r}: choices must be ordered by target, then source")
        nodes = {*table.sources, *table.targets}
        require(
            bool(table.output) and set(table.output) <= nodes and len(set(table.output)) == len(table.output),
            f"table {table.name!r}: output must name nodes once each, got {table.output} of {sorted(nodes)}",
        )
        for choice in table.choices:
            for candidate in choice.candidates:
                get_candidate(candidate)


def mask_tells_candidates_from_padding(space: Space) -> None:
    """The mask of a table is True at exactly the candidates of each choice."""
    for table in space.layout().tables:
        mask = table.mask()
        require(tuple(mask.shape) == table.shape == (len(table.choices), table.width), "mask and table differ in shape")
        for choice, row in zip(table.choices, mask.tolist(), strict=True):
            real = len(choice.candidates)
            require(
                row == [True] * real + [False] * (table.width - real),
                f"table {table.name!r}, {choice}: the mask must be True for {real} candidates, got {row}",
            )
        everything = torch.stack([table.columns(name) for name in _names(table)]).sum(0)
        require(
            torch.equal(everything, mask.long()), f"table {table.name!r}: each real entry must belong to one candidate"
        )


def count_equals_enumeration(space: Space) -> None:
    """The closed form equals the number of enumerated architectures, on small cuts of the space's tables."""
    rule = _rule(space)
    for table in small_cuts(space):
        architectures = list(rule.enumerate(table))
        require(
            len(set(architectures)) == len(architectures), f"enumeration of {_text(table)} yields an architecture twice"
        )
        require(
            rule.count(table) == len(architectures),
            f"{_text(table)}: counted {rule.count(table)} architectures, enumerated {len(architectures)}",
        )
    require(count(space.layout()) >= 1, "a space must hold at least one architecture")


def derivation_equals_brute_force(space: Space) -> None:
    """The rule derives the architecture of the largest summed strength among all that it can derive."""
    rule, generator = _rule(space), torch.Generator().manual_seed(0)
    for table in small_cuts(space):
        architectures = list(rule.enumerate(table))
        for _ in range(4):
            strengths = torch.rand(table.shape, generator=generator, dtype=torch.float64)
            # Code that reads padding finds the largest value there.
            strengths = torch.where(table.mask(), strengths, 1e9)
            best = max(architectures, key=lambda picks: _strength(table, strengths, picks))
            derived = rule(table, strengths)
            require(
                derived == best,
                f"{_text(table)}: derived {list(map(str, derived))}, but brute force finds {list(map(str, best))}",
            )


def samples_are_architectures_of_the_rule(space: Space) -> None:
    """Random sampling returns enumerated architectures, and eventually each of them."""
    rule, rng = _rule(space), random.Random(0)
    for table in small_cuts(space):
        architectures = set(rule.enumerate(table))
        # 40 draws for each of up to 25: uniform sampling misses one with a probability below 1e-16.
        drawn = {rule.sample(table, rng) for _ in range(40 * min(len(architectures), 25))}
        require(drawn <= architectures, f"{_text(table)}: sampled what the rule cannot derive: {drawn - architectures}")
        if len(architectures) <= 25:
            require(drawn == architectures, f"{_text(table)}: never sampled {architectures - drawn}")


RULE_CHECKS: tuple[Callable[[Space], None], ...] = (
    layout_is_consistent,
    mask_tells_candidates_from_padding,
    count_equals_enumeration,
    derivation_equals_brute_force,
    samples_are_architectures_of_the_rule,
)


def small_cuts(space: Space) -> list[Table]:
    """Ragged pieces of the space's tables, small enough to enumerate all their architectures.

    Each keeps the first nodes of a table and, by turns, one to three of each edge's candidates.
    """
    rule, cuts = _rule(space), []
    for table in space.layout().tables:
        for start in range(3):
            for nodes in range(len(table.targets), 0, -1):
                kept = [choice for choice in table.choices if choice.target in table.targets[:nodes]]
                choices = tuple(
                    Choice(c.source, c.target, c.candidates[: 1 + (start + i) % 3]) for i, c in enumerate(kept)
                )
                cut = Table(table.name, choices, (choices[-1].target,))
                if rule.count(cut) <= LIMIT:
                    cuts.append(cut)
                    break
    return cuts


def _rule(space: Space) -> Rule:
    rule = space.layout().rule
    assert isinstance(rule, Rule), f"the rule of a space must be a softcell.arch.Rule, got {rule!r}"
    return rule


def _names(table: Table) -> list[str]:
    return sorted({name for choice in table.choices for name in choice.candidates})


def _strength(table: Table, strengths: Tensor, picks: Sequence[Pick]) -> float:
    rows = {(choice.source, choice.target): index for index, choice in enumerate(table.choices)}
    total = 0.0
    for pick in picks:
        row = rows[pick.source, pick.target]
        total += float(strengths[row, table.choices[row].candidates.index(pick.op)])
    return total


def _text(table: Table) -> str:
    return ", ".join(f"{choice}:{'|'.join(choice.candidates)}" for choice in table.choices)
