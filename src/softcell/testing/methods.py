"""The contracts of search methods, on any space."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from softcell.arch import Genotype, Layout, Mix, Table, WeightMix, check_against, sample
from softcell.arch.choice import LINK
from softcell.methods import METHODS, Method, Sampler
from softcell.nn.stochastic import SharedDraws
from softcell.settings import build, to_dict
from softcell.spaces import Space, Supernet
from softcell.testing.tools import NUM_CLASSES, SHAPE, build_supernet, images, require, require_close

MethodCheck = Callable[[type[Method], Space], None]
SamplerCheck = Callable[[type[Sampler], Space], None]

MAX_STEPS = 50
"""Steps in which every logit must get a gradient; three are enough where all candidates are mixed."""


def settings_are_plain_data(kind: type[Method], space: Space) -> None:
    """The defaults of a method's settings survive being written and read."""
    settings = kind.Settings()
    again: object = build(kind.Settings, to_dict(settings))
    require(again == settings, f"{kind.name}: settings {settings} came back as {again}")


def probabilities_are_distributions_over_real_candidates(kind: type[Method], space: Space) -> None:
    """Per choice they sum to 1, or are all 0 where the edge is removed; padding is exactly 0."""
    method = build_method(kind, space)
    tables, found = space.layout().tables, method.probabilities()
    require(set(found) == {t.name for t in tables}, f"{kind.name}: probabilities of each table, got {sorted(found)}")
    for table in tables:
        p = found[table.name].detach()
        where = f"{kind.name}: probabilities of table {table.name!r}"
        require(tuple(p.shape) == table.shape, f"{where} must be {table.shape}, got {tuple(p.shape)}")
        require(bool(p.isfinite().all()) and bool((p >= 0).all()), f"{where} must be finite and not negative")
        require(not bool(p[~table.mask()].any()), f"{where} must be exactly 0 on padding")
        sums = p.sum(1)
        right = ((sums - 1).abs() < 1e-9) | (sums == 0)
        require(bool(right.all()), f"{where} must sum to 1 (or be 0) per choice, got {sums.tolist()}")


def mix_fits_the_layout(kind: type[Method], space: Space) -> None:
    """Plain weights are finite, [choices, width] or one such per site, 0 on padding and 0 outside `live`."""
    method, layout = build_method(kind, space), space.layout()
    mix = method.relax()
    require(isinstance(mix, Mix), f"{kind.name}: relax must return a Mix, got {type(mix).__name__}")
    if not isinstance(mix, WeightMix):
        return
    for site, name in enumerate(layout.sites):
        table, weights = layout.table(name), mix.weights(site).detach()
        where = f"{kind.name}: weights of site {site} ({name})"
        require(tuple(weights.shape) == table.shape, f"{where} must be {table.shape}, got {tuple(weights.shape)}")
        require(bool(weights.isfinite().all()), f"{where} must be finite")
        require(not bool(weights[~table.mask()].any()), f"{where} must be exactly 0 on padding")
        live = mix.live(site)
        if live is not None:
            require(len(live) == len(table), f"{where}: live must list candidates of all {len(table)} choices")
            for choice, row in enumerate(weights.tolist()):
                lost = [k for k, weight in enumerate(row) if weight and k not in live[choice]]
                require(not lost, f"{where}: candidates {lost} of choice {choice} have weight but are not live")


def gradients_reach_every_logit(kind: type[Method], space: Space) -> None:
    """Through the supernet's loss every architecture parameter learns; padding of a table of logits does not."""
    method, layout, supernet = build_method(kind, space), space.layout(), build_supernet(space)
    parameters = dict(method.named_parameters())
    require(
        bool(parameters) == kind.learns,
        f"{kind.name}: `learns` is {kind.learns}, but it has {len(parameters)} architecture parameters",
    )
    if not parameters:
        return
    free = {name: _learnable(kind, layout, name, p) for name, p in parameters.items()}
    sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for step in range(MAX_STEPS):
        torch.manual_seed(step)
        loss = _loss(method, supernet)
        for name, gradient in zip(
            sums, torch.autograd.grad(loss, list(parameters.values()), allow_unused=True), strict=True
        ):
            if gradient is not None:
                require(bool(gradient.isfinite().all()), f"{kind.name}: the gradient of {name} must be finite")
                sums[name] += gradient.abs()
        # A method that samples one candidate per edge learns nothing about edges that its sample cuts off.
        if step >= 2 and all(bool(total[free[name]].all()) and bool(total.any()) for name, total in sums.items()):
            break
    for name, total in sums.items():
        require(bool(total.any()), f"{kind.name}: no gradient reaches {name}")
        require(bool(total[free[name]].all()), f"{kind.name}: a gradient must reach every logit of {name}")
        for table in layout.tables:
            if _is_table(name, total, table.name, table.shape):
                mask = _taking_part(kind, table)
                require(not bool(total[~mask].any()), f"{kind.name}: padding of {name} must get no gradient")


def derived_architecture_belongs_to_the_space(kind: type[Method], space: Space) -> None:
    """`derive` returns a genotype of the layout, the same each time, from which a network can be built."""
    method = build_method(kind, space)
    genotype = method.derive()
    check_against(genotype, space.layout())
    require(method.derive() == genotype, f"{kind.name}: derive must return the same architecture when nothing changed")
    logits = space.network(genotype, SHAPE, NUM_CLASSES).double()(images())
    require(bool(logits.isfinite().all()), f"{kind.name}: the derived network must work")


def state_restores_mix_and_architecture(kind: type[Method], space: Space) -> None:
    """A method loaded from another's state relaxes and derives as that one."""
    supernet = build_supernet(space)
    method, other = build_method(kind, space, seed=0, progress=0.5), build_method(kind, space, seed=1)
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))
    other.load_state_dict(method.state_dict())
    require_close(
        _outcome(other, supernet), _outcome(method, supernet), f"{kind.name}: state_dict must hold all that relax reads"
    )
    require(other.derive() == method.derive(), f"{kind.name}: state_dict must hold all that derive reads")


def same_seed_gives_the_same_mix(kind: type[Method], space: Space) -> None:
    """Everything random comes from torch's generator."""
    supernet = build_supernet(space)
    first, second = (build_method(kind, space, seed=3) for _ in range(2))
    require_close(_outcome(first, supernet), _outcome(second, supernet), f"{kind.name}: a seed must repeat the mix", 0)


def evaluations_of_a_step_share_their_draws(kind: type[Method], space: Space) -> None:
    """A second-order step relaxes several times with the same random numbers, those of `softcell.nn.stochastic`."""
    method, supernet, draws = build_method(kind, space), build_supernet(space), SharedDraws()
    outcomes = []
    for _ in range(2):
        with torch.no_grad(), draws.evaluation("train"):
            outcomes.append(supernet(images(), method.relax()))
    require_close(
        outcomes[1],
        outcomes[0],
        f"{kind.name}: evaluations of one step must draw once, by the functions of softcell.nn.stochastic",
        0,
    )


def epochs_run_from_start_to_end(kind: type[Method], space: Space) -> None:
    """Schedules accept progress 0 to 1 and keep parameters and buffers where they are in memory."""
    method, supernet = build_method(kind, space), build_supernet(space)
    # A captured step reads the memory that it was captured with.
    places = {name: t.data_ptr() for name, t in [*method.named_parameters(), *method.named_buffers()]}
    for progress in (0.0, 0.5, 1.0):
        method.begin_epoch(progress)
        require(bool(_outcome(method, supernet).isfinite().all()), f"{kind.name}: finite mix at progress {progress}")
    moved = [
        name for name, t in [*method.named_parameters(), *method.named_buffers()] if t.data_ptr() != places.get(name)
    ]
    require(not moved, f"{kind.name}: schedules must fill their tensors in place, but {moved} were replaced")


def relax_works_without_gradients(kind: type[Method], space: Space) -> None:
    """Weight steps relax under `no_grad`; the mix is the same and needs no gradients."""
    method, supernet = build_method(kind, space), build_supernet(space).requires_grad_(False)
    torch.manual_seed(0)
    with torch.no_grad():
        mix = method.relax()
    without = supernet(images(), mix)
    require(not without.requires_grad, f"{kind.name}: a mix made under no_grad must not require gradients")
    require_close(without, _outcome(method, supernet), f"{kind.name}: no_grad must not change the mix")


def kept_mix_takes_new_numbers(kind: type[Method], space: Space) -> None:
    """A refreshed mix, as captured steps read it, equals a new one."""
    method, supernet = build_method(kind, space), build_supernet(space)
    x = images()
    with torch.no_grad():
        torch.manual_seed(0)
        kept = method.relax().copy()
        supernet(x, kept)
        for parameter in method.parameters():
            parameter.mul_(1.25)  # changes all weights and no order, so that the same candidates run
        torch.manual_seed(0)
        new = method.relax()
        if kept.signature() is None or kept.signature() != new.signature():
            return
        kept.take(new)
        torch.manual_seed(0)  # candidates may draw too
        old = supernet(x, kept)
        torch.manual_seed(0)
        require_close(old, supernet(x, new), f"{kind.name}: a mix must take all numbers of another")


def planted_architecture_is_derived(kind: type[Method], space: Space) -> None:
    """Where the logits of one architecture are far above all others, its picks are derived.

    Applies to methods with one parameter of a table's shape per table, named after it.
    """
    layout = space.layout()
    for seed in range(3):
        method, genotype = build_method(kind, space), sample(layout, seed)
        planted = 0
        for table in layout.tables:
            for name, parameter in method.named_parameters():
                if _is_table(name, parameter, table.name, table.shape):
                    _plant(parameter, table.choices, genotype, table.name)
                    planted += 1
        if not planted:
            return
        derived = method.derive()
        for name, cell in genotype.cells.items():
            planted_picks = [pick for pick in cell.picks if pick.op not in kind.excludes]
            missing = [str(pick) for pick in planted_picks if pick not in derived.cells[name].picks]
            require(not missing, f"{kind.name}: {missing} have by far the largest logits but were not derived")


def precision_is_that_of_the_method(kind: type[Method], space: Space) -> None:
    """A float64 method computes in float64, a float32 method in float32."""
    for dtype in (torch.float64, torch.float32):
        method = build_method(kind, space).to(dtype)
        for name, p in method.probabilities().items():
            require(p.dtype == dtype, f"{kind.name}: probabilities of {name!r} must be {dtype}, got {p.dtype}")
        mix = method.relax()
        if isinstance(mix, WeightMix):
            kinds = {mix.weights(site).dtype for site in range(len(space.layout().sites))}
            require(kinds == {dtype}, f"{kind.name}: weights of a {dtype} method must be {dtype}, got {kinds}")


def relax_never_waits_for_the_host(kind: type[Method], space: Space) -> None:
    """Nothing in `relax` and `Planner.reading` reads a value: they work on tensors that have none, given a plan."""
    method = build_method(kind, space)
    planner = method.planner
    plan = None if planner is None or planner.reading() is None else planner.current()
    method = method.to("meta")
    try:
        if planner is None:
            mix = method.relax()
        else:
            planner.reading()
            with planner.following(plan):
                mix = method.relax()
    except (RuntimeError, NotImplementedError) as error:
        raise AssertionError(f"{kind.name}: relax must not read values on the host, but: {error}") from error
    if isinstance(mix, WeightMix):
        devices = {mix.weights(site).device.type for site in range(len(space.layout().sites))}
        require(devices == {"meta"}, f"{kind.name}: weights must be on the method's device, got {devices}")


def relax_follows_the_plan_it_is_given(kind: type[Method], space: Space) -> None:
    """A plan made from a copy of the reading is the planner's own; under another plan its candidates run."""
    method, layout = build_method(kind, space), space.layout()
    planner = method.planner
    reading = None if planner is None else planner.reading()
    if planner is None or reading is None:
        return
    own = planner.plan(reading.detach().clone())
    require(own == planner.current(), f"{kind.name}: `plan` must depend on the reading alone")
    require(len(own) == len(layout.sites), f"{kind.name}: a plan names every site, got {len(own)} of them")
    hash(own)  # captured steps are kept by plan
    first_planned = next((site for site, live in enumerate(own) if live is not None), None)
    if first_planned is None:
        return
    last = tuple((len(choice.candidates) - 1,) for choice in layout.table(layout.sites[first_planned]).choices)
    other = tuple(last if site == first_planned else live for site, live in enumerate(own))
    with planner.following(other):
        require(method.relax().live(first_planned) == last, f"{kind.name}: relax must follow the plan it is given")
    require(method.relax().live(first_planned) == own[first_planned], f"{kind.name}: a plan must end with its context")


def groups_hold_every_parameter_once(kind: type[Method], space: Space) -> None:
    """The optimiser's groups cover the method's parameters without repetition."""
    method = build_method(kind, space)
    grouped = [id(p) for group in method.parameter_groups(0.1, 0.0) for p in group["params"]]
    own = [id(p) for p in method.parameters()]
    require(sorted(grouped) == sorted(own), f"{kind.name}: parameter_groups must hold every parameter exactly once")


METHOD_CHECKS: tuple[MethodCheck, ...] = (
    settings_are_plain_data,
    probabilities_are_distributions_over_real_candidates,
    mix_fits_the_layout,
    gradients_reach_every_logit,
    derived_architecture_belongs_to_the_space,
    state_restores_mix_and_architecture,
    same_seed_gives_the_same_mix,
    evaluations_of_a_step_share_their_draws,
    epochs_run_from_start_to_end,
    relax_works_without_gradients,
    kept_mix_takes_new_numbers,
    planted_architecture_is_derived,
    precision_is_that_of_the_method,
    relax_never_waits_for_the_host,
    relax_follows_the_plan_it_is_given,
    groups_hold_every_parameter_once,
)


def sampler_has_plain_settings(kind: type[Sampler], space: Space) -> None:
    """The defaults of a sampler's settings survive being written and read."""
    settings = kind.Settings()
    require(build(kind.Settings, to_dict(settings)) == settings, f"{kind.name}: settings {settings} do not survive")


def proposals_belong_to_the_space(kind: type[Sampler], space: Space) -> None:
    """Every proposal is a genotype of the layout from which a network is built."""
    sampler = kind(space.layout(), kind.Settings(), 0)
    require(sampler.num_samples >= 1, f"{kind.name}: at least one architecture must be proposed")
    for number in range(min(4, sampler.num_samples)):
        genotype = sampler.propose(number, [0.5] * number)
        check_against(genotype, space.layout())
        space.network(genotype, SHAPE, NUM_CLASSES)


def proposals_depend_on_seed_number_and_scores_alone(kind: type[Sampler], space: Space) -> None:
    """A resumed search proposes what the uninterrupted one would have."""
    first, second = (kind(space.layout(), kind.Settings(), 5) for _ in range(2))
    scores = [0.3, 0.9, 0.1]
    in_order = [first.propose(number, scores[:number]) for number in range(4)]
    require(second.propose(3, scores) == in_order[3], f"{kind.name}: proposal 3 depends on earlier calls")
    require(second.propose(0, []) == in_order[0], f"{kind.name}: a proposal must not change when asked again")


def seeds_give_other_proposals(kind: type[Sampler], space: Space) -> None:
    """Different seeds search differently."""
    runs = {kind(space.layout(), kind.Settings(), seed).propose(0, []) for seed in range(20)}
    require(len(runs) > 1, f"{kind.name}: 20 seeds propose the same architecture")


SAMPLER_CHECKS: tuple[SamplerCheck, ...] = (
    sampler_has_plain_settings,
    proposals_belong_to_the_space,
    proposals_depend_on_seed_number_and_scores_alone,
    seeds_give_other_proposals,
)


def checks_for(kind: type[Method] | type[Sampler]) -> tuple[Callable[..., None], ...]:
    """The suite for a method's kind.

    Example:
        >>> from softcell.methods import METHODS
        >>> from softcell.testing import METHOD_CHECKS, SAMPLER_CHECKS, checks_for
        >>> checks_for(METHODS.get("darts")) is METHOD_CHECKS, checks_for(METHODS.get("random")) is SAMPLER_CHECKS
        (True, True)
    """
    return METHOD_CHECKS if issubclass(kind, Method) else SAMPLER_CHECKS


def check_method(method: str | type[Method] | type[Sampler], space: Space) -> None:
    """Runs every check for a method, given by name or class, on one space.

    Example:
        >>> from softcell.spaces import build_space
        >>> from softcell.testing import check_method
        >>> check_method("random", build_space("nb201", {"cells_per_stage": 1, "channels": 2}))
        >>> print("all contracts hold")
        all contracts hold
    """
    kind = METHODS.get(method) if isinstance(method, str) else method
    for check in checks_for(kind):
        check(kind, space)


def build_method(kind: type[Method], space: Space, seed: int = 0, progress: float = 0.0) -> Method:
    """The method with its default settings in float64, at the beginning of an epoch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        method = kind.for_supernet(kind.Settings(), build_supernet(space)).double()
    method.begin_epoch(progress)
    return method


def _outcome(method: Method, supernet: Supernet) -> Tensor:
    """Logits [n, classes] of the supernet under one mix, which can be compared for any kind of mix."""
    torch.manual_seed(0)
    with torch.no_grad():
        logits: Tensor = supernet(images(), method.relax())
        return logits


def _loss(method: Method, supernet: Supernet) -> Tensor:
    mix = method.relax()
    logits = supernet(images(), mix)
    loss: Tensor = (logits * torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits)).sum()
    penalty = method.penalty(mix)
    return loss if penalty is None else loss + penalty


def _taking_part(kind: type[Method], table: Table) -> Tensor:
    """The mask of a table without the method's `excludes`; an edge with no other candidate keeps them."""
    mask = table.mask()
    for op in kind.excludes:
        left = mask & ~table.columns(op)
        mask = torch.where(left.any(1, keepdim=True), left, mask)
    return mask


def _learnable(kind: type[Method], layout: Layout, name: str, parameter: Tensor) -> Tensor:
    """Where the logits of a table must learn, bool of their shape; nowhere for any other parameter."""
    free = torch.zeros_like(parameter, dtype=torch.bool)
    for table in layout.tables:
        if _is_table(name, parameter, table.name, table.shape):
            mask = _taking_part(kind, table)
            # A softmax over one candidate is always 1: there is nothing to learn.
            free = mask & (mask.sum(1, keepdim=True) > 1)
            for contest in table.contests:  # one softmax over their links; `none` is what they leave
                free[list(contest), 0] = False
                free[list(contest), LINK] &= len(contest) > 1
    return free


def _is_table(name: str, parameter: Tensor, table: str, shape: tuple[int, int]) -> bool:
    return name.rpartition(".")[2] == table and tuple(parameter.shape) == shape


def _plant(parameter: Tensor, choices: Any, genotype: Genotype, table: str) -> None:
    rows = {(choice.source, choice.target): index for index, choice in enumerate(choices)}
    with torch.no_grad():
        for pick in genotype.cells[table].picks:
            row = rows[pick.source, pick.target]
            parameter[row, choices[row].candidates.index(pick.op)] = 50.0
