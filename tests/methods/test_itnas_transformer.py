"""The Lite-Transformer against its literal twin, closed forms and torch's own pooling."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from softcell.methods.itnas.transformer import LiteTransformer, normalised
from softcell.nn.conv import adaptive_windows
from tests.reference.reference_itnas import encoder

SHAPES = [(3, 8, 8), (4, 5, 7), (5, 2, 2), (1, 1, 1)]


def make(
    shape: tuple[int, int, int] = (3, 8, 8), tokens: int = 4, seed: int = 0, **settings: object
) -> LiteTransformer:
    """In float64, every parameter random: fresh ones hide a forgotten scale or shift."""
    torch.manual_seed(seed)
    module = LiteTransformer(shape, tokens, **settings).double()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return module


def maps(shape: tuple[int, int, int], tokens: int = 4, n: int = 2, zero: int | None = 1) -> dict[int, Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(n, *shape, dtype=torch.float64, generator=generator) for _ in range(tokens)]
    return {k: None if k == zero else x for k, x in enumerate(made)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pool", [4, 2, None])
@pytest.mark.parametrize("token_norm", [True, False])
def test_the_indicators_row_and_output_match_the_whole_transformer(
    shape: tuple[int, int, int], pool: int | None, token_norm: bool
) -> None:
    module, outputs = make(shape, pool=pool, width=8, token_norm=token_norm), maps(shape)
    output, attention = module(outputs)
    every, matrix = encoder(module, outputs)
    torch.testing.assert_close(output, every[:, 0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(attention, matrix[:, 0], rtol=1e-10, atol=1e-12)
    if shape != (1, 1, 1):  # a LayerNorm over one value makes all tokens alike
        assert float(attention.detach().std()) > 1e-2, "the row must have something to compare"


@pytest.mark.parametrize("token_norm", [True, False])
def test_gradients_match_the_whole_transformer(token_norm: bool) -> None:
    module, outputs = make((3, 4, 6), width=8, token_norm=token_norm), maps((3, 4, 6))
    inputs = [x.requires_grad_() for x in outputs.values() if x is not None]
    wanted = [*inputs, *module.parameters()]
    weight = torch.randn(2, 3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    mine = torch.autograd.grad((module(outputs)[0] * weight).sum(), wanted)
    literal = torch.autograd.grad((encoder(module, outputs)[0][:, 0] * weight).sum(), wanted)
    for a, b in zip(mine, literal, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
        assert bool(a.any())


def test_without_a_norm_on_tokens_logits_grow_with_the_maps() -> None:
    """Post-norm: logits are linear in the summaries, so maps twice as large have logits twice as far apart."""
    x = {k: torch.randn(2, 3, 8, 8, dtype=torch.float64) for k in range(4)}
    doubled = {k: 2 * map_ for k, map_ in x.items()}

    def logits(module: LiteTransformer, given: dict[int, Tensor]) -> Tensor:
        rows = module.attend(given)[:, 1:].log()
        return rows - rows.mean(1, keepdim=True)

    for token_norm in (True, False):
        module = make(token_norm=token_norm)
        assert any(name.startswith("norm") for name, _ in module.named_parameters()) is token_norm
        with torch.no_grad():
            module.positions[1:].zero_()
        expected = logits(module, x) if token_norm else 2 * logits(module, x)
        torch.testing.assert_close(logits(module, doubled), expected, rtol=1e-4, atol=1e-4)


def test_without_values_and_feed_forward_an_edge_is_two_norms_of_what_is_attended_to() -> None:
    """LN(LN(X_0 + Σ a X)) with scales and shifts; nothing else is learned but what makes attention and the norms."""
    torch.manual_seed(0)
    module = LiteTransformer((3, 8, 8), 4, learned_values=False, feed_forward=False).double()
    outputs = maps((3, 8, 8))
    output, attention = module(outputs)
    x = torch.stack([module.indicator.expand(2, 3, 8, 8)] + [o for o in outputs.values() if o is not None])
    weights = attention[:, [0, *(k + 1 for k, o in outputs.items() if o is not None)]]
    total = module.indicator + torch.einsum("nk,knchw->nchw", weights, x)
    torch.testing.assert_close(output, module.after_ffn(module.after_attention(total)))
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    assert frozen == {"value.weight", "ffn.0.weight", "ffn.0.bias", "ffn.2.weight", "ffn.2.bias"}


def test_absent_candidates_are_ignored() -> None:
    module, outputs = make(), maps((3, 8, 8))
    some = {k: outputs[k] for k in (0, 3)}
    output, attention = module(some)
    every, matrix = encoder(module, some)
    torch.testing.assert_close(output, every[:, 0])
    assert attention.shape == (2, 5)
    torch.testing.assert_close(attention[:, [0, 1, 4]], matrix[:, 0])
    assert not attention[:, [2, 3]].any()


def test_zeros_are_a_token_with_nothing_but_its_position() -> None:
    module, outputs = make(), maps((3, 8, 8))
    written = {k: torch.zeros(2, 3, 8, 8, dtype=torch.float64) if x is None else x for k, x in outputs.items()}
    for a, b in zip(module(outputs), module(written), strict=True):
        torch.testing.assert_close(a, b)


def test_maps_of_another_form_are_tokens_too() -> None:
    """Attentions over places, over channels and kernels of each sample, as the NOS space has them."""
    module = make((3, 8, 8), values=False)
    forms = [(2, 3, 8, 8), (2, 1, 8, 8), (2, 3, 1, 1), (2, 3, 3, 3)]
    outputs = {k: torch.randn(form, dtype=torch.float64) for k, form in enumerate(forms)}
    attention = module.attend(outputs)
    wide = {k: F.adaptive_avg_pool2d(x, 4).expand(2, 3, 4, 4) for k, x in outputs.items()}
    torch.testing.assert_close(attention, module.attend(wide))


@pytest.mark.parametrize(("size", "wanted"), [(8, 4), (7, 4), (3, 4), (1, 4), (9, 2)])
def test_pooling_by_products_is_adaptive_average_pooling(size: int, wanted: int) -> None:
    x = torch.randn(2, 3, size, 5, dtype=torch.float64)
    a, b = (adaptive_windows(n, wanted, x.device, x.dtype) for n in (size, 5))
    torch.testing.assert_close(a @ x @ b.T, F.adaptive_avg_pool2d(x, wanted))


def test_attention_is_exact_for_short_maps() -> None:
    """Attention of bfloat16 maps under autocast is that of the same numbers in float32, to float32's last places."""
    torch.manual_seed(0)
    module = LiteTransformer((4, 8, 8), 3)
    short = {k: torch.randn(2, 4, 8, 8).bfloat16() for k in range(3)}
    with torch.autocast("cpu", torch.bfloat16):
        output, attention = module(short)
    assert attention.dtype == torch.float32
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(attention, module.attend({k: x.float() for k, x in short.items()}), rtol=1e-6, atol=1e-7)


def test_every_gradient_agrees_with_finite_differences() -> None:
    module, outputs = make((2, 3, 3), tokens=2, width=3), maps((2, 3, 3), tokens=2, n=1, zero=None)
    inputs = tuple(x.requires_grad_() for x in outputs.values() if x is not None)
    assert torch.autograd.gradcheck(lambda a, b: module({0: a, 1: b}), inputs)


@pytest.mark.parametrize("written_out", [True, False])
def test_norms_of_channels_last_tokens_are_group_norms(written_out: bool) -> None:
    norm, x = torch.nn.GroupNorm(1, 3).double(), torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
    tokens = x.permute(0, 2, 3, 1).reshape(2, 20, 3)
    mine = normalised(tokens, norm, written_out=written_out).view(2, 4, 5, 3).permute(0, 3, 1, 2)
    weight = torch.randn_like(mine)
    torch.testing.assert_close(mine, norm(x))
    wanted = [x, norm.weight, norm.bias]
    for a, b in zip(
        torch.autograd.grad((mine * weight).sum(), wanted),
        torch.autograd.grad((norm(x) * weight).sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
