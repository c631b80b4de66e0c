"""Literal twins of the attentions of full-attention NAS: one pixel and one head at a time, over its neighbours."""

from __future__ import annotations

import torch
from torch import Tensor


def local_attention(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """x [n, c, h, w], matrices [c, c], embeddings [heads, d, extent]; gives [n, c, h, w]."""
    n, _c, height, width = x.shape
    heads, d, extent = rows.shape
    reach = extent // 2
    queries, keys, values = (torch.einsum("oc,nchw->nohw", matrix, x) for matrix in (wq, wk, wv))
    images = []
    for image in range(n):
        lines = []
        for i in range(height):
            pixels = []
            for j in range(width):
                near = [
                    (a, b)
                    for a in range(i - reach, i + reach + 1)
                    for b in range(j - reach, j + reach + 1)
                    if 0 <= a < height and 0 <= b < width
                ]
                k = torch.stack([keys[image, :, a, b] for a, b in near])  # [neighbours, c]
                v = torch.stack([values[image, :, a, b] for a, b in near])
                parts = []
                for head in range(heads):
                    own = slice(head * d, (head + 1) * d)
                    q = queries[image, own, i, j]
                    r = torch.stack([rows[head, :, a - i + reach] + columns[head, :, b - j + reach] for a, b in near])
                    weights = torch.softmax(k[:, own] @ q + r @ q, 0)
                    parts.append(weights @ v[:, own])
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
