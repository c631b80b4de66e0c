"""IT-NAS: attention against the literal twin, which candidates are tokens, selection, margins, recomputation."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from softcell.arch import Layout, Mix, Plan
from softcell.errors import UserError
from softcell.methods.itnas import ItMix, ItNas, ItNasSettings
from softcell.methods.itnas.attention import AGGREGATES, Aggregate, Moments, margins
from softcell.methods.itnas.transformer import LiteEnsemble
from softcell.spaces import Supernet, build_space
from softcell.spaces.costs import output_shapes
from tests.reference.reference_itnas import encoder

SIZES = {
    "nb201": {"cells_per_stage": 1, "channels": 4},
    "darts": {"cells": 3, "channels": 2, "nodes": 2},
    "s1": {"cells": 3, "channels": 2},
}
CHAIN = {"width": 0.25, "depths": (2, 1, 1, 1, 1, 1), "head": 16}


def make(space: str = "nb201", seed: int = 0, **settings: object) -> tuple[Supernet, ItNas]:
    """Supernet and method in float64, attention spread out so that candidates differ."""
    torch.manual_seed(seed)
    supernet = build_space(space, SIZES.get(space, CHAIN)).supernet((1, 8, 8), 3).double().eval()
    method = ItNas.for_supernet(ItNasSettings(**settings), supernet).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return supernet, method


def images(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Literal(Mix):
    """The same network by the literal twin; keeps every image's indicator rows by site and choice."""

    def __init__(self, method: ItNas) -> None:
        self.method, self.rows = method, dict[tuple[int, int], Tensor]()

    def combine(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> Tensor | None:
        table = self.method.layout.table(self.method.layout.sites[site])
        names = table.choices[choice].candidates
        allowed = {k: x for k, x in outputs.items() if names[k] != "none" or self.method.layout.space == "nb201"}
        module = self.method.transformer(site, choice)
        every, attention = encoder(module, allowed)
        row = torch.zeros(every.shape[0], table.width, dtype=every.dtype)
        row[:, list(allowed)] = attention[:, 0, 1:]
        self.rows[site, choice] = row
        return every[:, 0]


def whole_pass(method: ItNas) -> ItMix:
    """The mix of the one pass that a selection over all paths makes."""
    ((mix, calibration),) = method.selection.passes()
    assert isinstance(mix, ItMix) and calibration is None
    return mix


def look(supernet: Supernet, method: ItNas, batches: list[Tensor]) -> None:
    mix = whole_pass(method)
    with torch.no_grad():
        for batch in batches:
            supernet(batch, mix)


@pytest.mark.parametrize("space", ["nb201", "darts", "s1"])
@pytest.mark.parametrize("settings", [{"recompute": False}, {}, {"token_norm": False}, {"shared": True}], ids=str)
def test_edges_run_together_are_those_run_one_by_one(
    space: str, settings: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    supernet, method = make(space, **settings)
    supernet.use_drop_path(0.5)
    supernet.drop_path.set_fraction(1.0)
    supernet.train()
    x, wanted = images(4), [*supernet.parameters(), *method.parameters()]
    ran: list[int] = []
    buffers = {name: buffer.clone() for name, buffer in supernet.named_buffers()}

    def outcome(together: bool) -> list[Tensor]:
        def serves(ensemble: LiteEnsemble, maps: list[Tensor]) -> bool:
            ran.append(len(maps))
            return together

        monkeypatch.setattr(LiteEnsemble, "serves", serves)
        supernet.load_state_dict(buffers, strict=False)  # running statistics
        torch.manual_seed(1)
        mix = method.relax()
        y = supernet(x, mix)
        assert isinstance(mix, ItMix)
        rows = [mix.rows.mean(table.name) for table in method.layout.tables]
        loss = y.square().sum() + sum(row.square().sum() for row in rows)
        assert isinstance(loss, Tensor)
        look(supernet.eval(), method, [x])
        seen = list(method.selection.indicator().values())
        supernet.train()
        return [y, *rows, *seen, *torch.autograd.grad(loss, wanted, materialize_grads=True)]

    one_by_one, count = outcome(False), len(ran)
    at_once = outcome(True)
    assert len(ran) == 2 * count and max(ran) > len(method.layout.tables[0].choices[0].candidates)
    for a, b in zip(at_once, one_by_one, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-8)  # drop-path's factors are float32


def test_weight_steps_of_a_bilevel_search_leave_lite_transformers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    supernet, method = make()
    monkeypatch.setattr(LiteEnsemble, "serves", lambda ensemble, maps: True)
    with torch.no_grad():
        mix = method.relax()
    gradients = torch.autograd.grad(
        supernet(images(2), mix).sum(), [*supernet.parameters(), *method.parameters()], allow_unused=True
    )
    assert any(g is not None for g in gradients[: len(list(supernet.parameters()))])
    assert all(g is None for g in gradients[len(list(supernet.parameters())) :])


def test_a_kept_mix_uses_new_lite_transformers_although_a_recording_reads_the_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    supernet, method = make()
    monkeypatch.setattr(LiteEnsemble, "serves", lambda ensemble, maps: True)
    with torch.no_grad():
        kept = method.relax()
        supernet(images(2), kept)
        assert isinstance(kept, ItMix) and kept._laid
        memory = [x for groups in kept._laid.values() for laid in groups for x in laid]
        places, before = [x.data_ptr() for x in memory], [x.clone() for x in memory]
        for parameter in method.parameters():
            parameter += 0.1
        kept.take(method.relax())
        laid_again = [x for groups in kept._laid.values() for laid in groups for x in laid]
    assert [x.data_ptr() for x in laid_again] == places
    assert all(not torch.equal(a, b) for a, b in zip(laid_again, before, strict=True) if a.numel())


@pytest.mark.parametrize("space", ["nb201", "darts"])
@pytest.mark.parametrize("tokens", ["pooled", "flat"])
@pytest.mark.parametrize("settings", [{}, {"token_norm": False}, {"shared": True}], ids=str)
def test_network_and_indicator_match_the_literal_twin(space: str, tokens: str, settings: dict[str, bool]) -> None:
    supernet, method = make(space, tokens=tokens, **settings)
    x, literal = images(5), Literal(method)
    with torch.no_grad():
        torch.testing.assert_close(supernet(x, method.relax()), supernet(x, literal), rtol=1e-9, atol=1e-9)
    look(supernet, method, [x])
    for table in method.layout.tables:
        sites = method.layout.sites_of(table.name)
        expected = torch.stack(
            [torch.stack([literal.rows[s, c] for s in sites]).mean((0, 1)) for c in range(len(table))]
        )
        torch.testing.assert_close(method.selection.indicator()[table.name], expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("how", AGGREGATES)
@pytest.mark.parametrize("space", ["nb201", "darts"])
def test_every_aggregate_matches_the_literal_rows(space: str, how: Aggregate) -> None:
    """From single images and sites, one number after the other."""
    supernet, method = make(space, aggregate=how)
    x, literal = images(5), Literal(method)
    with torch.no_grad():
        supernet(x, literal)
    look(supernet, method, [x[:2], x[2:]])
    selected = method.selection.margins().edges
    for table in method.layout.tables:
        sites = method.layout.sites_of(table.name)
        own = method.selection.by_site(table.name)
        for c, choice in enumerate(table.choices):
            rows = torch.stack([literal.rows[s, c] for s in sites])  # [sites, images, width]
            torch.testing.assert_close(own.means[:, c], rows.mean(1), rtol=1e-9, atol=1e-12)
            real = rows[0, 0] > 0
            torch.testing.assert_close(own.logs[:, c, real], rows[..., real].log().mean(1), rtol=1e-9, atol=1e-9)
            shapes = [method.transformer(s, c).shape for s in sites]
            last = [i for i, shape in enumerate(shapes) if shape == shapes[-1]]
            votes = torch.bincount(rows.mean(1).argmax(1), minlength=table.width).double()
            expected = {
                "mean": rows.mean((0, 1)),
                "log-mean": torch.where(real, rows.clamp(min=1e-30).log().mean((0, 1)).exp(), 0.0),
                "vote": (votes + rows.mean((0, 1))) / (len(sites) + 1),
                "last": rows[-1].mean(0),
                "last-stage": rows[last].mean((0, 1)),
            }[how]
            torch.testing.assert_close(method.selection.indicator()[table.name][c], expected, rtol=1e-9, atol=1e-12)
            # The error of the lead: over images by single images, over sites by single sites.
            margin, names = selected[table.name][c], choice.candidates
            best, second = names.index(margin.best), names.index(str(margin.runner_up))
            used = {"last": rows[-1:], "last-stage": rows[last]}.get(how, rows)
            used = used.clamp(min=1e-30).log() if how == "log-mean" else used
            paired = (used[..., best] - used[..., second]).mean(0)
            if how == "vote":
                first = rows.mean(1).argmax(1)
                by_site = (first == best).double() - (first == second).double()
                assert margin.image_error == 0.0
            else:
                by_site = (used[..., best] - used[..., second]).mean(1)
                assert margin.image_error == pytest.approx(float(paired.std()) / 5**0.5)
                assert margin.margin == pytest.approx(float(paired.mean()))
            spread = float(by_site.std()) / len(by_site) ** 0.5 if len(by_site) > 1 else 0.0
            assert margin.site_error == pytest.approx(spread, abs=1e-12)
            assert margin.standard_error == pytest.approx((margin.image_error**2 + spread**2) ** 0.5)


def test_cells_of_one_shape_share_lite_transformers_with_the_setting() -> None:
    """NAS-Bench-201 with two cells a stage: as many as edges and stages, and each learns from both of its cells."""
    sizes = {"cells_per_stage": 2, "channels": 4}
    torch.manual_seed(0)
    supernet = build_space("nb201", sizes).supernet((1, 8, 8), 3).double().eval()
    counts = {}
    for shared in (False, True):
        method = ItNas.for_supernet(ItNasSettings(shared=shared), supernet).double()
        counts[shared] = len(method.transformers)
        for stage in range(3):
            for choice in range(6):
                first, second = (method.transformer(2 * stage + k, choice) for k in range(2))
                assert (first is second) is shared
        assert method.transformer(0, 0) is not method.transformer(2, 0), "of another shape"
        assert method.transformer(0, 0) is not method.transformer(0, 1), "of another edge"
    assert counts == {False: 36, True: 18}
    assert len(method.selection.by_site("cell").means) == 6, "rows are those of every cell still"

    # As if each cell had its own, of the same numbers: the gradients of both add up.
    apart = ItNas.for_supernet(ItNasSettings(), supernet).double()
    for site in range(6):
        for choice in range(6):
            apart.transformer(site, choice).load_state_dict(method.transformer(site, choice).state_dict())
    x = images(3)
    for one in (method, apart):
        supernet(x, one.relax()).square().sum().backward()
    for choice in range(6):
        parts = [dict(apart.transformer(site, choice).named_parameters()) for site in (2, 3)]
        for name, p in method.transformer(2, choice).named_parameters():
            first, second = (part[name].grad for part in parts)
            assert p.grad is not None and first is not None and second is not None
            torch.testing.assert_close(p.grad, first + second, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("how", AGGREGATES)
def test_before_the_first_look_every_aggregate_is_uniform(how: Aggregate) -> None:
    supernet, method = make(aggregate=how)
    for rows in method.selection.indicator().values():
        torch.testing.assert_close(rows, torch.full_like(rows, 1 / 6))
    assert float(method.gauges()["own_attention_cell"]) == pytest.approx(1 / 6)
    look(supernet, method, [images(3)])
    kept = float(method.gauges()["own_attention_cell"])
    assert kept == pytest.approx(float(1 - method.selection.by_site("cell").means.sum(2).mean())), (
        "attention, by any aggregate"
    )


def test_a_checkpoint_from_before_sums_by_site_is_read() -> None:
    supernet, method = make()
    look(supernet, method, [images(3)])
    old = {name: value for name, value in method.state_dict().items() if not name.startswith("site_sums")}
    assert len(old) < len(method.state_dict())
    _, again = make(seed=1)
    again.load_state_dict(old)
    assert again.derive() == method.derive()
    assert all(m.site_error == 0.0 and m.sites is None for m in again.selection.margins().edges["cell"])


def test_none_is_a_candidate_only_if_it_can_be_derived() -> None:
    for space, takes_part in (("nb201", True), ("darts", False)):
        supernet, method = make(space)
        look(supernet, method, [images(3)])
        for table in method.layout.tables:
            attention = method.selection.indicator()[table.name][table.columns("none")]
            assert bool((attention > 0).all()) is takes_part
            assert bool((attention == 0).all()) is not takes_part


def test_a_table_of_ragged_choices_may_exclude_what_an_edge_has_nothing_else_than() -> None:
    supernet = build_space("nb201", {**SIZES["nb201"], "candidates": ["none", "skip_connect"], "nodes": 3}).supernet(
        (1, 8, 8), 3
    )
    layout = supernet.layout
    alone = replace(layout.tables[0].choices[0], candidates=("none",))
    table = replace(layout.tables[0], choices=(alone, *layout.tables[0].choices[1:]))
    method = ItNas(Layout("toy", (table,), ("cell",), layout.rule), ItNasSettings())
    shapes = {place: seen for place, seen in output_shapes(supernet).items() if place[0] == 0}
    method.fit(
        {place: replace(seen, by_candidate={0: None}) if place[1] == 0 else seen for place, seen in shapes.items()}
    )
    assert "0_0" not in method.transformers
    assert method.relax().combine(0, 0, {0: None}) is None
    mix = whole_pass(method)
    for choice in (1, 2):
        mix.combine(0, choice, {0: None, 1: torch.randn(2, 4, 8, 8)})
    assert method.selection.indicator()["cell"][0].tolist() == [0.5, 0.0], "zeros alone: uniform over them and the IT"
    assert method.selection.findings()["selection"]["edges"]["cell"][0]["runner_up"] is None


def test_selection_does_not_depend_on_how_images_are_grouped() -> None:
    supernet, method = make("darts")
    x = images(12)
    look(supernet, method, [x])
    whole, genotype = method.selection.indicator(), method.derive()
    for size in (1, 5):
        look(supernet, method, list(x.split(size)))
        assert method.derive() == genotype
        assert int(method.moments["normal"].count) == 12, "a pass begins from zero"
        for name, rows in method.selection.indicator().items():
            torch.testing.assert_close(rows, whole[name], rtol=1e-12, atol=1e-14)


def test_the_inputs_with_the_strongest_attention_stay() -> None:
    _, method = make("darts")
    table = method.layout.table("normal")
    rows = torch.full(table.shape, 0.01)
    # Node 3 has inputs 0, 1, 2. Normalised, the edge from 1 is surest; by attention it is the weakest.
    strongest = {0: 0.5, 1: 0.2, 2: 0.4}
    for index in table.incoming(3):
        source = table.choices[index].source
        rows[index, 4] = strongest[source]
        if source != 1:
            rows[index, 5] = strongest[source] - 0.01
    moments = method.moments["normal"]
    assert isinstance(moments, Moments)
    moments.add(rows.flatten()[None])
    picks = [pick for pick in method.derive().cells["normal"].picks if pick.target == 3]
    assert [(pick.source, pick.op) for pick in picks] == [(0, "sep_conv_3x3"), (2, "sep_conv_3x3")]


def test_margins_and_their_errors_match_paired_differences() -> None:
    table = build_space("nb201", SIZES["nb201"]).layout().tables[0]
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(50, *table.shape)) * 0.1 + rng.normal(size=(50, 1, 1))  # images differ in common
    moments = Moments(rows[0].size)
    for part in np.array_split(rows, 3):
        moments.add(torch.from_numpy(part).flatten(1))
    found = margins(table, moments.mean().view(table.shape), moments.mean_products(), 50)
    for index, margin in enumerate(found):
        mean = rows[:, index].mean(0)
        second, best = np.argsort(mean)[-2:]
        paired = rows[:, index, best] - rows[:, index, second]
        names = table.choices[index].candidates
        assert (margin.best, margin.runner_up) == (names[best], names[second])
        assert margin.margin == pytest.approx(paired.mean())
        assert margin.standard_error == pytest.approx(paired.std(ddof=1) / 50**0.5)
        assert margin.close == (paired.mean() < 2 * margin.standard_error)
    assert {m.close for m in found} == {True, False}, "both kinds must occur to be told apart"


def test_moments_stay_float64_when_a_method_moves() -> None:
    _, method = make()
    method.float()
    assert all(sums.dtype == torch.float64 for sums in method.selection.sums())
    assert all(p.dtype == torch.float32 for p in method.parameters())


def test_recomputing_changes_no_gradient() -> None:
    found = []
    for recompute in (True, False):
        supernet, method = make(recompute=recompute)
        loss = supernet(images(3), method.relax()).square().sum()
        found.append(torch.autograd.grad(loss, [*supernet.parameters(), *method.parameters()], allow_unused=True))
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_a_penalty_reaches_attention_and_weights() -> None:
    supernet, method = make()
    mix = method.relax()
    supernet(images(3), mix)
    found = method.occupancy(mix)["cell"]
    torch.testing.assert_close(found.sum(1), torch.ones(6, dtype=torch.float64))
    wanted = [next(method.parameters()), next(supernet.parameters())]
    gradients = torch.autograd.grad(found[:, 3].sum(), wanted)
    assert all(bool(g.any()) for g in gradients)


def test_attention_under_bfloat16_is_summed_exactly() -> None:
    supernet, method = make()
    supernet, method = supernet.float(), method.float()
    mix = whole_pass(method)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        supernet(images(3).float(), mix)
    row = method.selection.indicator()["cell"]
    assert row.dtype == torch.float64
    assert not torch.equal(row, row.bfloat16().double()), "short numbers would be seen"
    own = 1 - row.sum(1)
    assert bool(((own > 0) & (own < 1)).all())


def test_a_mix_keeps_no_unused_rows() -> None:
    supernet, method = make()
    looking, plain = whole_pass(method), method.relax()
    assert isinstance(looking, ItMix) and isinstance(plain, ItMix)
    with torch.no_grad():
        for mix in (looking, plain):
            supernet(images(2), mix)
    assert not looking.rows and not plain.rows


@pytest.mark.parametrize(("setting", "message"), [({"pool": 0}, "method.pool >= 1"), ({"close": -1.0}, "close")])
def test_bad_settings_are_refused(setting: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ItNasSettings(**setting)  # type: ignore[arg-type]


@pytest.mark.parametrize("paths", ["single", "pairwise"])
def test_a_step_of_single_paths_attends_to_one_random_choice(paths: str) -> None:
    _, method = make(paths=paths)
    plans = [method.planner.draw(step) for step in range(40)]
    assert plans == [method.planner.draw(step) for step in range(40)], "a resumed run draws the same"
    whole = set()
    for plan in plans:
        assert plan is not None
        full = [(site, i) for site, live in enumerate(plan) for i, row in enumerate(live or ()) if len(row) > 1]
        assert len(full) == (1 if paths == "single" else 0)
        whole |= set(full)
    if paths == "single":
        assert len(whole) > 10, "every site and choice has its turn"
    with method.planner.following(plans[0]):
        mix = method.relax()
    output = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    is_itself = mix.combine(0, 0, {1: output}) is output
    assert is_itself is (paths == "single"), "off the attended choice a candidate counts 1; in pairs the IT attends"


@pytest.mark.parametrize("space", ["proxyless", "nb201"])
def test_a_step_of_single_paths_learns_the_same_without_what_candidates_would_keep(space: str) -> None:
    found = {}
    for recompute in (True, False):
        supernet, method = make(space, paths="single", recompute=recompute)
        supernet.train()
        step = next(n for n in range(40) if _attended(method.planner.draw(n), at_least=4))
        kept: list[Tensor] = []
        keeping = torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: (kept.append(x), x)[1], lambda x: x)
        with keeping, method.planner.following(method.planner.draw(step)):
            loss = supernet(images(6), method.relax()).square().mean()
        size = sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in kept}.values())
        parameters = [*supernet.parameters(), *method.parameters()]
        found[recompute] = loss, torch.autograd.grad(loss, parameters, allow_unused=True), supernet.state_dict(), size
    (loss, gradients, state, size), (plain, expected, wanted, more) = found[True], found[False]
    torch.testing.assert_close(loss, plain)
    assert [g is None for g in gradients] == [g is None for g in expected]
    for a, b in zip(gradients, expected, strict=True):
        torch.testing.assert_close(a, b)
    for name in wanted:
        torch.testing.assert_close(state[name], wanted[name], msg=name)
    assert size < 0.85 * more


def _attended(plan: Plan | None, at_least: int) -> bool:
    assert plan is not None
    return any(len(row) >= at_least for live in plan if live is not None for row in live)


def test_single_paths_select_in_one_pass_per_choice_under_its_own_path() -> None:
    supernet, method = make(paths="single")
    x = images(6)
    assert method.selection.last_epoch_only
    with torch.no_grad():
        for noting, plain in method.selection.passes():
            supernet(x, plain)
            for part in x.split(4):
                supernet(part, noting)
    moments = method.moments["cell"]
    assert isinstance(moments, Moments)
    assert int(moments.count) == 6, "every image once, and calibration not at all"
    rows = {}
    with torch.no_grad():
        for choice, (_, plain) in enumerate(method.selection.passes()):
            kept: list[Tensor] = []
            assert isinstance(plain, ItMix)
            plain.rows.note = lambda site, at, row, kept=kept: kept.append(row)  # type: ignore[method-assign, misc]
            supernet(x, plain)
            rows[choice] = torch.stack(kept).mean((0, 1))[1:]
            assert len(kept) == 3, "all three cells, and no other choice"
    # The second call of `passes` cleared the sums: repeat the passes before comparing.
    with torch.no_grad():
        for noting, _ in method.selection.passes():
            supernet(x, noting)
    torch.testing.assert_close(method.selection.indicator()["cell"], torch.stack(list(rows.values())))
    assert all(m.standard_error is not None and m.standard_error > 0 for m in method.selection.margins().edges["cell"])
