"""The Lite-Transformer written out: every token, every row of the attention, values token by token.

Slow and literal; `softcell.methods.itnas.transformer` computes the indicator token's row alone and the value map once.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from softcell.methods.itnas.transformer import LiteTransformer


def encoder(module: LiteTransformer, outputs: Mapping[int, Tensor | None]) -> tuple[Tensor, Tensor]:
    """All tokens' outputs [n, m + 1, c, h, w] and the whole attention matrix [n, m + 1, m + 1]; the IT is first."""
    c, h, w = module.shape
    n = next(x.shape[0] for x in outputs.values() if x is not None)
    maps = [module.indicator.expand(n, c, h, w)]
    maps += [module.indicator.new_zeros(n, c, h, w) if x is None else x for x in outputs.values()]
    places = [module.positions[0], *(module.positions[k + 1] for k in outputs)]
    summaries = []
    for x, place in zip(maps, places, strict=True):
        small = x if module.pool is None else F.adaptive_avg_pool2d(x, module.pool)
        token = small.flatten(1) + place
        if module.norm is not None:  # the paper's encoder is post-norm: it has none here
            token = F.layer_norm(token, place.shape, module.norm.weight, module.norm.bias)
        summaries.append(token)
    tokens = torch.stack(summaries, dim=1)  # [n, m + 1, d]
    q, k = tokens @ module.query.weight.T, tokens @ module.key.weight.T
    attention = torch.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, dim=-1)  # Eq 3
    values = torch.stack([F.conv2d(x, module.value.weight) for x in maps], dim=1)
    mixed = torch.einsum("nij,njchw->nichw", attention, values)
    return torch.stack([_rest(module, maps[i], mixed[:, i]) for i in range(len(maps))], dim=1), attention


def _rest(module: LiteTransformer, x: Tensor, mixed: Tensor) -> Tensor:
    """Residual, norm over the whole token, pointwise feed-forward network, residual, norm."""
    c = module.shape[0]
    first, _, second = module.ffn

    def norm(token: Tensor, which: torch.nn.GroupNorm) -> Tensor:
        centred = token - token.mean(dim=(1, 2, 3), keepdim=True)
        scaled = centred / (centred.pow(2).mean(dim=(1, 2, 3), keepdim=True) + which.eps).sqrt()
        return scaled * which.weight.view(1, c, 1, 1) + which.bias.view(1, c, 1, 1)

    y = norm(x + mixed, module.after_attention)
    inner = torch.relu(F.conv2d(y, first.weight, first.bias))
    return norm(y + F.conv2d(inner, second.weight, second.bias), module.after_ffn)
