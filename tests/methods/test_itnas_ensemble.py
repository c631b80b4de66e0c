"""Lite-Transformers that run together match separate ones."""

import pytest
import torch
from torch import Tensor

from softcell.methods.itnas.transformer import LiteEnsemble, LiteTransformer, by_position, order_of

Outputs = dict[int, Tensor | None]


def make(
    shape: tuple[int, int, int], count: int, pool: int | None, *, token_norm: bool = True
) -> list[LiteTransformer]:
    """In float64, every parameter random: fresh ones hide a forgotten scale or shift."""
    torch.manual_seed(0)
    modules = [LiteTransformer(shape, 5, pool=pool, width=8, token_norm=token_norm).double() for _ in range(count)]
    with torch.no_grad():
        for module in modules:
            for parameter in module.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return modules


def given(shape: tuple[int, int, int], count: int, zeros: tuple[int, ...], left_out: tuple[int, ...]) -> list[Outputs]:
    made = [
        {k: None if k in zeros else torch.randn(2, *shape, dtype=torch.float64) for k in range(5) if k not in left_out}
        for _ in range(count)
    ]
    for outputs in made:
        for x in outputs.values():
            if x is not None:
                x.requires_grad_()
    return made


def together(modules: list[LiteTransformer], outputs: list[Outputs], sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    order, rest = order_of(outputs[0]), iter(modules)
    groups = [[next(rest) for _ in range(size)] for size in sizes]
    ensemble = LiteEnsemble(groups, order, sum(x is not None for x in outputs[0].values()))
    found: list[tuple[Tensor, Tensor]] = []
    for group, laid in zip(groups, ensemble.lay(torch.float64), strict=True):
        own = outputs[len(found) : len(found) + len(group)]
        output, attention = ensemble(laid, [x for one in own for x in one.values() if x is not None])
        found += zip(output.unbind(), (by_position(row, order, 5) for row in attention.unbind()), strict=True)
    return found


@pytest.mark.parametrize("shape", [(4, 8, 8), (3, 5, 7), (1, 1, 1)])
@pytest.mark.parametrize("pool", [4, None])
@pytest.mark.parametrize(("zeros", "left_out"), [((), ()), ((0,), ()), ((1, 3), (0,)), ((), (2, 4))])
@pytest.mark.parametrize("token_norm", [True, False])
def test_outputs_attention_and_gradients_match_separate_transformers(
    shape: tuple[int, int, int], pool: int | None, zeros: tuple[int, ...], left_out: tuple[int, ...], token_norm: bool
) -> None:
    modules = make(shape, 6, pool, token_norm=token_norm)
    outputs = given(shape, 6, zeros, left_out)
    wanted = [x for one in outputs for x in one.values() if x is not None]
    wanted += [parameter for module in modules for parameter in module.parameters()]
    weights = [torch.randn(2, *shape, dtype=torch.float64) for _ in modules]
    rows = [torch.randn(2, 6, dtype=torch.float64) for _ in modules]

    def outcome(found: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        parts = zip(found, weights, rows, strict=True)
        loss = sum((y * w).sum() + (a * r).sum() for (y, a), w, r in parts)
        assert isinstance(loss, Tensor)
        return [*(x for one in found for x in one), *torch.autograd.grad(loss, wanted)]

    alone = [(y, a) for y, a in (module(one) for module, one in zip(modules, outputs, strict=True))]
    for a, b in zip(outcome(together(modules, outputs, [3, 2, 1])), outcome(alone), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_group_that_does_not_run_leaves_its_weights_alone() -> None:
    modules, outputs = make((2, 4, 4), 2, 2), given((2, 4, 4), 2, (), ())
    ensemble = LiteEnsemble([modules[:1], modules[1:]], order_of(outputs[0]), 5)
    first, _ = ensemble.lay(torch.float64)
    output, _ = ensemble(first, [x for x in outputs[0].values() if x is not None])
    output.square().sum().backward()
    assert all(bool(p.grad.any()) for p in modules[0].parameters() if p.grad is not None)
    assert not any(bool(p.grad.any()) for p in modules[1].parameters() if p.grad is not None)


def test_maps_in_low_precision_are_weighed_in_high_precision() -> None:
    modules = [module.float() for module in make((4, 8, 8), 2, 4)]
    outputs = given((4, 8, 8), 2, (), ())
    low = [{k: None if x is None else x.detach().bfloat16() for k, x in one.items()} for one in outputs]
    ensemble = LiteEnsemble([modules], order_of(low[0]), 5)
    with torch.no_grad():
        output, attention = ensemble(
            ensemble.lay(torch.bfloat16)[0], [x for one in low for x in one.values() if x is not None]
        )
        alone = [module(one) for module, one in zip(modules, low, strict=True)]
    assert output.dtype == torch.bfloat16 and attention.dtype == torch.float32
    for i, (y, a) in enumerate(alone):
        torch.testing.assert_close(attention[i], a, rtol=1e-5, atol=1e-6)
        assert float((output[i].float() - y.float()).norm() / y.float().norm()) < 0.02


def test_gradients_of_weights_keep_their_precision_under_autocast() -> None:
    """A step makes its backward pass within autocast, which would round the factors of products."""
    modules = [module.float() for module in make((4, 8, 8), 2, 4)]
    ensemble = LiteEnsemble([modules], [0, 2, 3, 4, 5, 1], 4)
    found = []
    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled, cache_enabled=False):
            (laid,) = ensemble.lay(torch.float32)
            loss = laid.itself.square().sum() + laid.asked.square().sum() + laid.own_value.square().sum()
            wanted = [module.get_parameter(name) for module in modules for name in ("query.weight", "value.weight")]
            found.append([laid.asked, *torch.autograd.grad(loss, wanted)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
