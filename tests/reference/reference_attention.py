"""Literal twins of the attentions of full-attention NAS: one pixel, one head, one neighbour at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def local_attention(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """x [n, c, h, w], matrices [c, c], embeddings [heads, d, extent]; gives [n, c, h, w]."""
    n, _c, height, width = x.shape
    heads, d, extent = rows.shape
    reach = extent // 2
    images = []
    for image in range(n):
        lines = []
        for i in range(height):
            pixels = []
            for j in range(width):
                parts = []
                for head in range(heads):
                    own = slice(head * d, (head + 1) * d)
                    q = wq[own] @ x[image, :, i, j]
                    logits, values = [], []
                    for a in range(i - reach, i + reach + 1):
                        for b in range(j - reach, j + reach + 1):
                            if 0 <= a < height and 0 <= b < width:
                                k = wk[own] @ x[image, :, a, b]
                                r = rows[head, :, a - i + reach] + columns[head, :, b - j + reach]
                                logits.append(q @ k + q @ r)
                                values.append(wv[own] @ x[image, :, a, b])
                    weights = torch.softmax(torch.stack(logits), 0)
                    parts.append(sum(w * v for w, v in zip(weights, values, strict=True)))
                pixels.append(wo @ torch.cat(parts))
            lines.append(torch.stack(pixels, 1))
        images.append(torch.stack(lines, 1))
    return torch.stack(images)


def non_local_attention(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor) -> Tensor:
    """x [n, c, h, w], matrices [c, c]; gives [n, c, h, w]."""
    n, _, height, width = x.shape
    places = [(i, j) for i in range(height) for j in range(width)]
    result = torch.zeros_like(x)
    for image in range(n):
        for i, j in places:
            q = wq @ x[image, :, i, j]
            logits = torch.stack([q @ (wk @ x[image, :, a, b]) for a, b in places])
            weights = torch.exp(logits) / torch.exp(logits).sum()
            y = sum(w * (wv @ x[image, :, a, b]) for w, (a, b) in zip(weights, places, strict=True))
            result[image, :, i, j] = wo @ y
    return result
