"""The contracts of search spaces."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from softcell.arch import Genotype, Layout, Mix, Pick, WeightMix, check_against, derive, sample
from softcell.errors import UserError
from softcell.nn.stochastic import fixed_noise
from softcell.settings import build, to_dict
from softcell.spaces import Network, Shape, Space
from softcell.testing.candidates import RULE_CHECKS
from softcell.testing.tools import (
    BATCH,
    NUM_CLASSES,
    SHAPE,
    build_supernet,
    called_modules,
    gather_statistics,
    images,
    one_hot,
    one_hot_live,
    random_weights,
    require,
    require_close,
    some_genotypes,
)

LARGE: Shape = (3, 48, 24)
"""Large enough that an ImageNet stem and two reductions still leave several pixels."""

SpaceCheck = Callable[[Space], None]


def settings_survive_json(space: Space) -> None:
    """A space is plain data: written and read again it is the same."""
    again = build(type(space), json.loads(json.dumps(to_dict(space))))
    require(again == space, f"settings must survive JSON, but {space} came back as {again}")
    require(again.layout() == space.layout(), "equal settings must produce equal layouts")


@fixed_noise()
def supernet_under_one_hot_weights_is_the_network_in_training(space: Space) -> None:
    """One architecture picked in the supernet computes the same as its own network, with batch statistics."""
    x, layout = images(), space.layout()
    for genotype in some_genotypes(layout):
        supernet = build_supernet(space).train()
        network = supernet.child(genotype).train()
        mine = supernet.features(x, WeightMix(layout, one_hot(layout, genotype)))
        _require_same_features(mine, network.features(x), supernet.head, network.head, "in training", genotype)


def supernet_under_one_hot_weights_is_the_network_in_evaluation(space: Space) -> None:
    """The same with running statistics, which a child copies from the supernet."""
    x, layout = images(), space.layout()
    supernet = build_supernet(space)
    gather_statistics(supernet, x)
    supernet.eval()
    for genotype in some_genotypes(layout):
        network = supernet.child(genotype).eval()
        mine = supernet.features(x, WeightMix(layout, one_hot(layout, genotype)))
        _require_same_features(mine, network.features(x), supernet.head, network.head, "in evaluation", genotype)


def candidates_outside_live_never_run(space: Space) -> None:
    """With one architecture live, the supernet runs the modules of that architecture and no other."""
    x, layout, supernet = images(), space.layout(), build_supernet(space)
    for genotype in some_genotypes(layout):
        mix = WeightMix(layout, one_hot(layout, genotype), one_hot_live(layout, genotype))
        network = supernet.child(genotype)
        ran = called_modules(supernet, lambda mix=mix: supernet(x, mix))  # type: ignore[misc]
        needed = called_modules(network, lambda network=network: network(x)) - {"drop_path"}  # type: ignore[misc]
        require(ran <= needed, f"candidates outside `live` must not run, but {sorted(ran - needed)} did")
        require(needed <= ran, f"live candidates must run, but {sorted(needed - ran)} did not")


@fixed_noise()
def live_gives_what_zero_weights_give(space: Space) -> None:
    """`live` only saves work: skipping candidates equals running them with weight 0."""
    x, layout, supernet = images(), space.layout(), build_supernet(space).train()
    for genotype in some_genotypes(layout):
        weights = one_hot(layout, genotype)
        zeroed = supernet(x, WeightMix(layout, weights))
        left_out = supernet(x, WeightMix(layout, weights, one_hot_live(layout, genotype)))
        require_close(left_out, zeroed, "candidates that are not live must count as weight 0")


@fixed_noise()
def combining_by_the_mix_gives_what_weights_give(space: Space) -> None:
    """A mix that combines a choice's outputs itself is called wherever plain weights would be read."""
    x, layout, supernet = images(), space.layout(), build_supernet(space).train()
    plain = WeightMix(layout, random_weights(layout, seed=3))
    require_close(supernet(x, _Combining(plain)), supernet(x, plain), "`Mix.combine` must serve where weights do")


@fixed_noise()
def every_site_reads_its_own_weights(space: Space) -> None:
    """Weights [sites, choices, width] that are equal act as one table; changing one site's changes the output."""
    x, layout, supernet = images(), space.layout(), build_supernet(space).train()
    shared = random_weights(layout, seed=4)
    per_site = {name: table.expand(len(layout.sites_of(name)), *table.shape).clone() for name, table in shared.items()}
    expected = supernet(x, WeightMix(layout, shared))
    require_close(supernet(x, WeightMix(layout, per_site)), expected, "equal weights per site must act as one table")
    other = random_weights(layout, seed=5)
    for name, table in other.items():
        for position, site in enumerate(layout.sites_of(name)):
            changed = {key: value.clone() for key, value in per_site.items()}
            changed[name][position] = table
            moved = (supernet(x, WeightMix(layout, changed)) - expected).abs().max() > 1e-9
            require(bool(moved), f"site {site} must read its own row of weights of table {name!r}, but it does not")


def supernet_holds_no_architecture_parameters(space: Space) -> None:
    """Every parameter of a supernet is a weight of some derived network."""
    genotypes = _covering(space.layout())
    with torch.device("meta"):
        left = {name for name, _ in space.supernet(SHAPE, NUM_CLASSES).named_parameters()}
        for genotype in genotypes:
            network = space.network(genotype, SHAPE, NUM_CLASSES, search_form=True)
            left -= {name for name, _ in network.named_parameters()}
            if not left:
                return
    raise AssertionError(f"a supernet holds weights only, but no derived network has {sorted(left)}")


def any_image_shape_works(space: Space) -> None:
    """Grey and colour, even and odd, square and not: logits [n, classes] from supernet and network."""
    layout = space.layout()
    genotype = sample(layout, seed=0)
    shapes: tuple[Shape, ...] = ((1, 9, 7), (3, 7, 12), (3, 8, 8))
    for shape in shapes:
        x, supernet = images(shape), build_supernet(space, shape)
        found = {"supernet": supernet(x, WeightMix(layout, random_weights(layout, 0)))}
        for form in (True, False):
            network = space.network(genotype, shape, NUM_CLASSES, search_form=form).double()
            found[f"network, search_form={form}"] = network(x)
        for what, logits in found.items():
            require(
                tuple(logits.shape) == (BATCH, NUM_CLASSES) and bool(logits.isfinite().all()),
                f"{what}: images {shape} must produce finite logits {(BATCH, NUM_CLASSES)}, got {tuple(logits.shape)}",
            )


def stages_are_one_per_resolution(space: Space) -> None:
    """Supernet and network expose equally many stages of equal shapes, each of lower resolution than the one before."""
    x, layout, supernet = images(LARGE, batch=2), space.layout(), build_supernet(space, LARGE)
    genotype = sample(layout, seed=1)
    mine = supernet.features(x, WeightMix(layout, random_weights(layout, 0)))
    sizes = [feature.shape[-2] * feature.shape[-1] for feature in mine]
    require(
        all(larger > smaller for larger, smaller in itertools.pairwise(sizes)),
        f"stages must fall in resolution, one feature map each, got {[tuple(f.shape) for f in mine]}",
    )
    theirs = supernet.child(genotype).features(x)
    require(
        [f.shape for f in mine] == [f.shape for f in theirs],
        f"stages of supernet {[tuple(f.shape) for f in mine]} and network {[tuple(f.shape) for f in theirs]} differ",
    )
    evaluated = space.network(genotype, LARGE, NUM_CLASSES).double().features(x)
    require(len(evaluated) == len(mine), f"an evaluation network must have {len(mine)} stages, got {len(evaluated)}")


@fixed_noise()
def samples_survive_json_and_rebuild(space: Space) -> None:
    """The network can be rebuilt from a genotype file."""
    layout, x = space.layout(), images()
    for seed in range(3):
        genotype = sample(layout, seed)
        check_against(genotype, layout)
        again = Genotype.loads(genotype.dumps())
        require(again == genotype, f"a genotype must survive JSON, but {genotype} came back as {again}")
        require(sample(layout, seed) == genotype, f"a random architecture must depend on its seed alone, seed {seed}")
        first, second = (_seeded_network(space, g) for g in (genotype, again))
        require_close(first(x), second(x), "a genotype read from JSON must build the same network")
    require(len({sample(layout, seed) for seed in range(20)}) > 1, "20 seeds must not all sample one architecture")


def any_subset_of_candidates_works(space: Space) -> None:
    """A space with a `candidates` setting accepts each of them alone, and any order."""
    if "candidates" not in {field.name for field in dataclasses.fields(space) if field.init}:  # type: ignore[arg-type]
        return
    candidates: tuple[str, ...] = space.candidates  # type: ignore[attr-defined]
    x = images()
    for subset in (*((name,) for name in candidates), candidates[::-2], candidates[1:3]):
        smaller: Space = dataclasses.replace(space, candidates=subset)  # type: ignore[type-var]
        layout = smaller.layout()
        logits = build_supernet(smaller)(x, WeightMix(layout, random_weights(layout, 0)))
        network = smaller.network(sample(layout, 0), SHAPE, NUM_CLASSES).double()
        require(
            bool(logits.isfinite().all()) and bool(network(x).isfinite().all()),
            f"supernet and network must work with the candidates {subset} alone",
        )


def norms_of_evaluation_networks_are_affine(space: Space) -> None:
    """A network for training learns scale and shift in every BatchNorm."""
    for genotype in some_genotypes(space.layout(), number=2):
        network = space.network(genotype, SHAPE, NUM_CLASSES)
        plain = [n for n, m in network.named_modules() if isinstance(m, nn.BatchNorm2d) and not m.affine]
        require(not plain, f"norms of an evaluation network must be affine, but {plain} are not")


def gradients_reach_every_weight(space: Space) -> None:
    """Under a uniform mix every weight of the supernet learns within a few batches: a narrow ReLU may be off in one."""
    layout, supernet = space.layout(), build_supernet(space, LARGE).train()
    uniform = {t.name: t.mask().double() / t.mask().sum(1, keepdim=True) for t in layout.tables}
    dead: list[str] = []
    for seed in range(8):
        logits = supernet(images(LARGE, seed=seed), WeightMix(layout, uniform))
        (logits * torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).view_as(logits)).sum().backward()
        dead = [name for name, p in supernet.named_parameters() if p.grad is None or not bool(p.grad.any())]
        if not dead:
            return
    raise AssertionError(f"under a uniform mix a gradient must reach every weight, but {dead} get none")


def auxiliary_tower_is_as_promised(space: Space) -> None:
    """Spaces with `has_auxiliary` return second logits on request; others raise an error."""
    genotype, x = sample(space.layout(), seed=0), images()
    try:
        network = space.network(genotype, SHAPE, NUM_CLASSES, auxiliary=True).double()
    except UserError:
        require(not space.has_auxiliary, "a space with has_auxiliary=True must build networks with a tower")
        return
    require(space.has_auxiliary, "a space with has_auxiliary=False must reject auxiliary=True with a UserError")
    logits, extra = network.forward_with_auxiliary(x)
    require(extra is not None and extra.shape == logits.shape, "the tower must return logits of the classifier's shape")
    plain = space.network(genotype, SHAPE, NUM_CLASSES).double()
    require(plain.forward_with_auxiliary(x)[1] is None, "a network without a tower must return None for its logits")


def foreign_genotypes_are_refused(space: Space) -> None:
    """A genotype that does not fit raises `UserError`."""
    genotype = sample(space.layout(), seed=0)
    name, cell = next(iter(genotype.cells.items()))
    first = cell.picks[0]
    unknown = dataclasses.replace(cell, picks=(Pick(first.source, first.target, "no_such_operation"), *cell.picks[1:]))
    loop = dataclasses.replace(cell, picks=(Pick(97, first.target, first.op), *cell.picks[1:]))
    wrong: Mapping[str, Mapping[str, Any]] = {
        "without its cells": {"no_such_cell": cell},
        "with an unknown operation": {**genotype.cells, name: unknown},
        "with an edge from a node that does not exist": {**genotype.cells, name: loop},
    }
    for what, cells in wrong.items():
        try:
            space.network(Genotype(genotype.space, cells, genotype.settings), SHAPE, NUM_CLASSES)
        except UserError:
            continue
        raise AssertionError(f"a genotype {what} must be rejected with a UserError, but a network was built")


SPACE_CHECKS: tuple[SpaceCheck, ...] = (
    *RULE_CHECKS,
    settings_survive_json,
    supernet_under_one_hot_weights_is_the_network_in_training,
    supernet_under_one_hot_weights_is_the_network_in_evaluation,
    candidates_outside_live_never_run,
    live_gives_what_zero_weights_give,
    combining_by_the_mix_gives_what_weights_give,
    every_site_reads_its_own_weights,
    supernet_holds_no_architecture_parameters,
    any_image_shape_works,
    stages_are_one_per_resolution,
    samples_survive_json_and_rebuild,
    any_subset_of_candidates_works,
    norms_of_evaluation_networks_are_affine,
    gradients_reach_every_weight,
    auxiliary_tower_is_as_promised,
    foreign_genotypes_are_refused,
)


def check_space(space: Space) -> None:
    """Runs every space check; choose a small size, the checks build supernets in float64.

    Example:
        >>> from softcell.testing import SPACE_CHECKS, check_name, tiny_space
        >>> SPACE_CHECKS[0](tiny_space("nb201"))  # `check_space` runs all of them
        >>> check_name(SPACE_CHECKS[0])
        'layout_is_consistent'
    """
    for check in SPACE_CHECKS:
        check(space)


class _Combining(Mix):
    """Plain weights, applied one choice at a time."""

    def __init__(self, plain: WeightMix) -> None:
        self._plain = plain

    def combine(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> Tensor | None:
        return self._plain.combine(site, choice, outputs)


def _require_same_features(
    mine: list[Tensor],
    theirs: list[Tensor],
    my_head: Callable[[Tensor], Tensor],
    their_head: Callable[[Tensor], Tensor],
    when: str,
    genotype: Genotype,
) -> None:
    contract = f"the supernet under one-hot weights must equal the derived network {when}, for {dict(genotype.cells)}"
    require(len(mine) == len(theirs), f"{contract}: {len(mine)} and {len(theirs)} stages")
    for left, right in zip(mine, theirs, strict=True):
        require_close(left, right, contract)
    require_close(my_head(mine[-1]), their_head(theirs[-1]), contract)


def _covering(layout: Layout) -> list[Genotype]:
    """Architectures that together pick every candidate the rule can pick on every edge."""
    found, left = [], {table.name: table.mask().double() for table in layout.tables}
    while True:  # as many at once as the rule allows
        genotype = derive(layout, left)
        fresh = [(name, picks, left[name] * picks) for name, picks in one_hot(layout, genotype).items()]
        if not any(bool(new.any()) for _, _, new in fresh):
            break
        found.append(genotype)
        left = {name: left[name] * (1 - picks) for name, picks, _ in fresh}
    for table in layout.tables:  # the rest one by one
        for row, column in left[table.name].nonzero().tolist():
            strengths = {other.name: torch.zeros(other.shape) for other in layout.tables}
            strengths[table.name][row, column] = 1.0
            found.append(derive(layout, strengths))
    return found


def _seeded_network(space: Space, genotype: Genotype) -> Network:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return space.network(genotype, SHAPE, NUM_CLASSES).double()
