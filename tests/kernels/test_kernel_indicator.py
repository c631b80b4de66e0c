"""The indicator token's kernels against their twin in float64: on a GPU, or on a CPU by Triton's interpreter.

TRITON_INTERPRET=1 pytest tests/kernels/test_kernel_indicator.py
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch
from torch import Tensor

from softcell.kernels import indicator
from softcell.kernels.backend import triton_kernels
from softcell.kernels.indicator import Form, Laid, fits, indicate, indicate_reference
from softcell.methods.itnas import ItMix, ItNas, ItNasSettings
from softcell.methods.itnas.transformer import LiteEnsemble, LiteTransformer, by_position, order_of
from softcell.spaces import build_space
from tests.helpers.kernel_runs import DEVICE, INTERPRETED, MARKS

pytestmark = MARKS
Sizes = tuple[int, int, int, int, tuple[int, int], int, int, tuple[int, int]]
# edges, maps, tokens of zeros, images, (h, w), channels, inside, sides
CASES = [
    (3, 4, 1, 3, (8, 8), 16, 4, (4, 4)),
    (1, 7, 0, 2, (6, 10), 5, 1, (2, 5)),
    (2, 1, 2, 17, (4, 4), 64, 16, (4, 4)),
    (2, 3, 0, 2, (16, 16), 32, 8, (4, 4)),
]
# Tokens that are whole maps: without a norm the kernels need no positions, with one the plain form runs.
FLAT = [(3, 4, 1, 3, (8, 8), 16, 4, (8, 8)), (1, 5, 0, 2, (6, 10), 5, 1, (6, 10)), (2, 1, 2, 17, (4, 8), 8, 2, (4, 8))]
FLAT_LARGE = [(3, 4, 1, 64, (32, 32), 16, 4, (32, 32)), (3, 4, 1, 64, (8, 8), 64, 16, (8, 8))]
# As in NAS-Bench-201: all edges of a node at the paper's batch size, a map of bfloat16 as large as fits.
LARGE = [(3, 4, 1, 64, (8, 8), 64, 16, (4, 4)), (3, 4, 1, 64, (16, 16), 32, 8, (4, 4))]
LARGEST = (3, 4, 1, 64, (32, 32), 16, 4, (4, 4))


NAMED = ["output", "attention", "maps"]
LOGITS = ("shift", "itself", "zeros")
"""What is added to logits: gradients of these are sums over images in which most may cancel."""


def made(case: Sizes, *, decided: bool = False, token_norm: bool = True) -> tuple[Tensor, Laid, Form]:
    """Random numbers; decided: half of the inner values are far above 0 and half far below."""
    g, m, z, n, (h, w), c, inner, sides = case
    torch.manual_seed(0)
    d, size = sides[0] * sides[1] * c, h * w * c
    shapes = {
        **{"positions": (g, m, d), "asked": (g, d, 1), "shift": (g, 1, 1), "itself": (g, 1), "zeros": (g, z)},
        **{"own": (g, 1, size), "own_value": (g, 1, size), "value": (g, c, c), "attention_scale": (g, 1, 1, c)},
        **{"attention_shift": (g, 1, 1, c), "narrow": (g, c, inner), "narrow_bias": (g, 1, inner)},
        **{"widen": (g, inner, c), "widen_bias": (g, 1, c), "ffn_scale": (g, 1, 1, c), "ffn_shift": (g, 1, 1, c)},
    }
    drawn = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    drawn["asked"] *= 2 / d**0.5
    drawn["value"] *= c**-0.5
    if decided:
        drawn["narrow_bias"] += 12 * c**0.5 * torch.tensor([1.0, -1.0]).repeat(inner)[:inner]
    return (
        torch.randn(g * m, n, h, w, c, dtype=torch.float64),
        Laid(**drawn),
        Form(sides, 1e-5 if token_norm else None, 1e-5),
    )


def of_type(x: Tensor, laid: Laid, dtype: torch.dtype, device: str) -> tuple[Tensor, Laid]:
    """As a step has them: maps and what meets them in `dtype`, what makes the logits in float32 or wider."""
    exact = torch.promote_types(dtype, torch.float32)
    low = [part.to(device, exact if i < 5 else dtype).requires_grad_() for i, part in enumerate(laid)]
    return x.to(device, dtype).requires_grad_(), Laid(*low)


def outcome(
    x: Tensor, laid: Laid, form: Form, pulls: tuple[Tensor, Tensor], *, plain: bool, row: bool = True
) -> list[Tensor]:
    output, attention = (indicate_reference if plain else indicate)(x, laid, form)
    wanted = [x, *(part for part in laid if part.numel())]
    outputs, given = ([output, attention], list(pulls)) if row else ([output], [pulls[0]])
    gradients = torch.autograd.grad(
        outputs, wanted, [pull.to(y.device, y.dtype) for pull, y in zip(given, outputs, strict=True)]
    )
    return [output, attention, *gradients]


def logits_scale(x: Tensor, laid: Laid, form: Form, pulls: tuple[Tensor, Tensor], *, row: bool) -> float:
    """How large the gradients of logits are before those of the images cancel, as the root of their squares' sum."""
    total = 0.0
    for i in range(x.shape[1]):
        own = outcome(
            x[:, i : i + 1], laid, form, (pulls[0][:, i : i + 1], pulls[1][:, i : i + 1]), plain=True, row=row
        )
        named = dict(zip(NAMED + [n for n, p in zip(Laid._fields, laid, strict=True) if p.numel()], own, strict=True))
        total += sum(float(named[name].square().sum()) for name in LOGITS if name in named)
    return total**0.5


def relative_error(found: Tensor, true: Tensor, scale: float | None = None) -> float:
    away = (found.detach().double().cpu() - true.detach()).norm()
    return float(away / (true.detach().norm() if scale is None else scale))


PAIRS = [(case, torch.float32) for case in (*CASES, *FLAT)]
if not INTERPRETED:  # it has no bfloat16, and would take minutes for large maps
    PAIRS += [(case, torch.float32) for case in (*LARGE, FLAT_LARGE[1])]
    PAIRS += [(case, torch.bfloat16) for case in (*CASES, *FLAT, *LARGE, *FLAT_LARGE, LARGEST)]
RUNS = [(*pair, norm) for pair in PAIRS for norm in (True, False) if not (norm and pair[0] in (*FLAT, *FLAT_LARGE))]


@pytest.mark.parametrize(("case", "dtype", "token_norm"), RUNS, ids=str)
@pytest.mark.parametrize("row", [True, False])
def test_outputs_and_gradients_match_the_twin(case: Sizes, dtype: torch.dtype, token_norm: bool, row: bool) -> None:
    # In bfloat16 the sign of a value near the kink of a ReLU is a matter of rounding: there are none.
    x, laid, form = made(case, decided=dtype == torch.bfloat16, token_norm=token_norm)
    x, laid = (
        x.to(dtype).double(),
        Laid(*(p.float().double() if i < 5 else p.to(dtype).double() for i, p in enumerate(laid))),
    )
    y, a = indicate_reference(x, laid, form)
    pulls = (torch.randn_like(y), torch.randn_like(a))
    exact_x, exact = of_type(x, laid, torch.float64, "cpu")
    theirs = outcome(exact_x, exact, form, pulls, plain=True, row=row)
    low_x, low = of_type(x, laid, dtype, DEVICE)
    assert fits(low_x, form)
    mine = outcome(low_x, low, form, pulls, plain=False, row=row)
    names = NAMED + [name for name, part in zip(Laid._fields, laid, strict=True) if part.numel()]
    scale = logits_scale(exact_x, exact, form, pulls, row=row)
    rounded = outcome(low_x, low, form, pulls, plain=True, row=row)
    for name, found, plain, true in zip(names, mine, rounded, theirs, strict=True):
        against = scale if name in LOGITS else None
        error, usual = (relative_error(one, true, against) for one in (found, plain))
        assert error <= (1e-4 if dtype == torch.float32 else 2 * usual + 0.02), f"{name}: {error:.2e}, twin {usual:.2e}"
    again = outcome(low_x, low, form, pulls, plain=False, row=row)
    assert all(torch.equal(first, second) for first, second in zip(mine, again, strict=True))


def test_nothing_is_kept_if_no_gradient_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, sizes = triton_kernels("indicator"), []

    def forward(*given: Any) -> Any:
        found = plainly(*given)
        sizes.append([part.numel() for part in found[2:]])
        return found

    plainly = kernels.forward
    monkeypatch.setattr(kernels, "forward", forward)
    x, laid, form = made(CASES[0])
    x, laid = of_type(x, laid, torch.float32, DEVICE)
    with_gradients = indicate(x, laid, form)
    with torch.no_grad():
        without = indicate(x, laid, form)
    assert all(torch.equal(a, b) for a, b in zip(with_gradients, without, strict=True))
    assert not without[0].requires_grad
    assert all(sizes[0]) and sizes[1] == [0, 0, 0]


def test_second_derivatives_match_the_twin() -> None:
    x, laid, form = made((2, 2, 1, 2, (4, 4), 3, 2, (2, 2)))
    x, leaves = of_type(x, laid, torch.float32, DEVICE)
    both = torch.cat([leaves.itself, leaves.zeros], 1).detach().requires_grad_()
    wanted = (x, both, *(part for name, part in zip(Laid._fields, leaves, strict=True) if name not in LOGITS[1:]))
    found = []
    for function in (indicate, indicate_reference):
        # As an ensemble lays them: logits of the IT and of zeros are columns of one tensor, and do not lie together.
        itself, zeros = torch.split(both, [1, 1], 1)
        output, attention = function(x, leaves._replace(itself=itself, zeros=zeros), form)
        loss = output.square().sum() + attention.square().sum()
        first = torch.autograd.grad(loss, wanted, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(part.square().sum() for part in first), wanted)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(
            mine, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max() if theirs.numel() else 0)
        )


def test_maps_that_are_too_large_or_cut_unevenly_go_the_plain_way() -> None:
    form = Form((4, 4), 1e-5, 1e-5)
    assert not fits(torch.zeros(1, 1, 64, 64, 16, device=DEVICE), form)
    assert not fits(torch.zeros(1, 1, 9, 8, 16, device=DEVICE), form)
    assert not fits(torch.zeros(1, 1, 8, 8, 16, device=DEVICE, dtype=torch.float64), form)
    for side in (8, 16):
        assert not fits(torch.zeros(1, 1, 16, 16, 16, device=DEVICE), Form((side, side), 1e-5, 1e-5))
    whole = torch.zeros(1, 1, 8, 16, 16, device=DEVICE)
    assert not fits(whole, Form((8, 16), 1e-5, 1e-5)), "whole maps with a norm"
    assert fits(whole, Form((8, 16), None, 1e-5)) and not fits(whole, Form((8, 8), None, 1e-5))
    wide = torch.zeros(1, 1, 16, 8, 64, device=DEVICE, dtype=torch.bfloat16)  # two warps would not hold it
    assert not fits(wide, form)
    assert fits(wide[:, :, :8].contiguous(), form)


@pytest.mark.parametrize("again", [False, True], ids=["plain", "with create_graph"])
@pytest.mark.parametrize("zeros", [(), (0,), (1, 3)])
@pytest.mark.parametrize(("token_norm", "pool"), [(True, 4), (False, 4), (False, None)])
def test_an_ensemble_on_the_kernels_matches_separate_runs(
    zeros: tuple[int, ...], again: bool, token_norm: bool, pool: int | None
) -> None:
    torch.manual_seed(0)
    modules = [LiteTransformer((4, 8, 8), 5, width=8, token_norm=token_norm, pool=pool).to(DEVICE) for _ in range(3)]
    with torch.no_grad():
        for parameter in (p for module in modules for p in module.parameters()):
            parameter.add_(0.3 * torch.randn_like(parameter))
    maps = [[torch.randn(2, 4, 8, 8, device=DEVICE).requires_grad_() for _ in range(5 - len(zeros))] for _ in modules]
    outputs = []
    for own in maps:
        rest = iter(own)
        outputs.append({k: None if k in zeros else next(rest) for k in range(5)})
    wanted = [x for own in maps for x in own] + [p for module in modules for p in module.parameters()]
    pulls = [(torch.randn(2, 4, 8, 8, device=DEVICE), torch.randn(2, 6, device=DEVICE)) for _ in modules]
    order = order_of(outputs[0])
    ensemble = LiteEnsemble([modules], order, 5 - len(zeros))
    (laid,) = ensemble.lay(torch.float32)
    together, rows = ensemble(laid, [x for own in maps for x in own])
    as_one = zip(together.unbind(), (by_position(row, order, 5) for row in rows.unbind()), strict=True)
    found = []
    for answers in (list(as_one), [module(own) for module, own in zip(modules, outputs, strict=True)]):
        loss = sum((y * a).sum() + (row * b).sum() for (y, row), (a, b) in zip(answers, pulls, strict=True))
        found.append([*(y for y, _ in answers), *torch.autograd.grad(loss, wanted, create_graph=again)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4 * float(theirs.detach().abs().max()) + 1e-6)


def ensemble_of(sizes: tuple[int, ...], **settings: Any) -> tuple[LiteEnsemble, list[LiteTransformer]]:
    """Groups of these sizes on maps of [4, 8, 8], with one token of zeros of five."""
    torch.manual_seed(0)
    modules = [LiteTransformer((4, 8, 8), 5, width=8, **settings).to(DEVICE) for _ in range(sum(sizes))]
    with torch.no_grad():
        for parameter in (p for module in modules for p in module.parameters()):
            parameter.add_(0.3 * torch.randn_like(parameter))
    rest = iter(modules)
    return LiteEnsemble([[next(rest) for _ in range(size)] for size in sizes], (0, 2, 3, 4, 5, 1), 4), modules


@pytest.mark.parametrize("again", [False, True], ids=["plain", "with create_graph"])
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(("token_norm", "pool"), [(True, 4), (False, 4), (False, None)])
def test_gradients_in_one_piece_are_those_of_separate_fields(
    again: bool, recomputes: bool, token_norm: bool, pool: int | None
) -> None:
    sizes = (2, 1, 1)
    ensemble, modules = ensemble_of(sizes, token_norm=token_norm, pool=pool)
    maps = [[torch.randn(2, 4, 8, 8, device=DEVICE).requires_grad_() for _ in range(4 * size)] for size in sizes]
    wanted = [x for own in maps for x in own] + [p for module in modules for p in module.parameters()]
    assert ensemble.runs_whole(maps[0], torch.float32)
    found = []
    for whole in (True, False):
        laid = ensemble.lay_whole(torch.float32) if whole else [(own, None) for own in ensemble.lay(torch.float32)]
        assert all((own is not None) is whole for _, own in laid)
        answers = [  # the last group does not run
            ensemble(own, maps[i], one, recomputes and one is not None) for i, (own, one) in enumerate(laid[:2])
        ]
        loss = sum(y.square().sum() + (row**3).sum() for y, row in answers)
        first = torch.autograd.grad(loss, wanted, create_graph=again, materialize_grads=True)
        bend = sum(part.square().sum() for part in first) if again else None
        more = () if bend is None else torch.autograd.grad(bend, wanted, materialize_grads=True)
        found.append([*(part for answer in answers for part in answer), *first, *more])
    for mine, theirs in zip(*found, strict=True):
        scale = (1e-3 if again else 1e-5) * float(theirs.detach().abs().max())  # second derivatives cancel
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=scale + 1e-6)


@pytest.mark.parametrize("token_norm", [True, False])
def test_maps_that_are_combined_again_give_the_same_bits_and_are_kept_alone(token_norm: bool) -> None:
    pool = 4 if token_norm else None
    ensemble, modules = ensemble_of((2,), token_norm=token_norm, pool=pool)
    maps = [torch.randn(2, 4, 8, 8, device=DEVICE).requires_grad_() for _ in range(8)]
    found = []
    for again in (False, True):
        ((laid, whole),) = ensemble.lay_whole(torch.float32)
        assert whole is not None
        known, extra = {x.data_ptr() for x in (*maps, *laid, whole)}, list[int]()

        def pack(
            x: Tensor, known: Collection[int] = frozenset(known), extra: list[int] = extra
        ) -> Tensor:  # bound now: the loop replaces both
            extra += [x.numel()] if x.data_ptr() not in known else []
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            output, attention = ensemble(laid, maps, whole, again)
        assert (sum(extra) == attention.numel()) is again, "the attention alone is kept"
        loss = output.square().sum() + (attention**3).sum()
        wanted = [*maps, *(p for module in modules for p in module.parameters())]
        found.append([output, attention, *torch.autograd.grad(loss, wanted)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    "own",
    [{}, {"recompute": False}, {"shared": True, "feed_forward": False}, {"tokens": "flat", "token_norm": False}],
    ids=str,
)
def test_a_supernet_on_the_kernels_has_the_gradients_of_separate_transformers(
    own: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    supernet = build_space("nb201", {"cells_per_stage": 1, "channels": 4}).supernet((1, 8, 8), 3).to(DEVICE)
    method = ItNas.for_supernet(ItNasSettings(pool=2, width=8, **own), supernet).to(DEVICE)
    images = torch.randn(3, 1, 8, 8, device=DEVICE)
    wanted = [p for p in (*supernet.parameters(), *method.parameters()) if p.requires_grad]
    found = []
    for plain in (False, True):
        if plain:
            monkeypatch.setattr(LiteEnsemble, "serves", lambda ensemble, maps: False)
        mix = method.relax()
        logits = supernet.eval()(images, mix)
        assert isinstance(mix, ItMix) and len(mix._whole) == (0 if plain else len(method.ensembles))
        assert plain or all(whole is not None for groups in mix._whole.values() for whole in groups)
        loss = logits.square().sum() + sum(mix.rows.mean(t.name).square().sum() for t in method.layout.tables)
        assert isinstance(loss, Tensor)
        found.append([logits.detach(), *torch.autograd.grad(loss, wanted, materialize_grads=True)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()) + 1e-6)


def test_maps_learn_from_kernels_where_lite_transformers_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight steps of a bilevel search relax without gradients."""
    torch.manual_seed(0)
    supernet = build_space("nb201", {"cells_per_stage": 1, "channels": 4}).supernet((1, 8, 8), 3).to(DEVICE)
    method = ItNas.for_supernet(ItNasSettings(pool=2, width=8), supernet).to(DEVICE)
    images, found = torch.randn(3, 1, 8, 8, device=DEVICE), []
    wanted = [*supernet.parameters(), *method.parameters()]
    for plain in (False, True):
        if plain:
            monkeypatch.setattr(LiteEnsemble, "serves", lambda ensemble, maps: False)
        with torch.no_grad():
            mix = method.relax()
        loss = supernet.eval()(images, mix).square().sum()
        found.append(torch.autograd.grad(loss, wanted, allow_unused=True))
    own = len(list(supernet.parameters()))
    assert all(gradient is None for gradients in found for gradient in gradients[own:])
    for mine, theirs in zip(found[0][:own], found[1][:own], strict=True):
        assert theirs is not None
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4 * float(theirs.abs().max()) + 1e-6)


def test_only_maps_that_fit_after_stacking_get_gradients_in_one_piece() -> None:
    """The kernels that combine maps again have no plain form to fall back to."""
    ensemble, _ = ensemble_of((1,))
    maps = [torch.zeros(1, 4, 8, 8, device=DEVICE, dtype=torch.bfloat16)]
    assert ensemble.runs_whole(maps, torch.float32)
    assert not ensemble.runs_whole(maps, torch.float64)


def test_weights_in_low_precision_are_those_of_separate_conversions() -> None:
    ensemble, _ = ensemble_of((2, 1))
    for (mine, whole), theirs in zip(ensemble.lay_whole(torch.bfloat16), ensemble.lay(torch.bfloat16), strict=True):
        assert whole is not None and whole.dtype == torch.float32 and whole.requires_grad
        assert not any(part.requires_grad for part in mine)
        assert all(part.is_contiguous() for part in (*mine, *theirs)), "kernels would copy them for every group"
        for a, b in zip(mine, theirs, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize(
    ("shape", "dtype", "needed"),
    [
        ((32, 32, 16), torch.bfloat16, 98_304),
        ((16, 16, 32), torch.float32, 163_840),
        ((16, 32, 16), torch.float32, 196_608),
        ((4, 4, 256), torch.bfloat16, 143_360),
    ],
)
def test_maps_use_the_plain_form_if_shared_memory_is_too_small(
    shape: tuple[int, ...], dtype: torch.dtype, needed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """needed: bytes of shared memory of the largest kernel, as Triton 3.6 compiles it for sm_86."""
    x, form = torch.zeros(1, 1, *shape, dtype=dtype, device=DEVICE), Form((4, 4), 1e-5, 1e-5)
    assert fits(x, form), "an H200 has 232,448"
    monkeypatch.setattr(indicator, "shared_memory", lambda device: needed - 1)
    assert not fits(x, form)
