# mypy: ignore-errors
"""Triton kernels of `sgd`."""

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Values of a parameter for one program."""
PARTS = 256
"""Programs that sum squares; a program of the step adds up all of their sums."""
READ = 1024
"""Values whose squares are summed at a time."""


@triton.jit(do_not_specialize=["size"])
def _squares(g_ptr, sums_ptr, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Partial sums [PARTS] of the squares of a vector [size]."""
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, size, PARTS * BLOCK):
        i = start + tl.arange(0, BLOCK)
        g = tl.load(g_ptr + i, mask=i < size, other=0.0)
        total += g * g
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _step(
    g_ptr, sums_ptr, lr_ptr, blocks_ptr, clip, momentum, decay, PARTS: tl.constexpr, CLIPS: tl.constexpr,
    NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The step of a block of one parameter."""
    own = blocks_ptr + tl.program_id(0) * 4
    p_at = tl.load(own).to(tl.pointer_type(tl.float32))
    m_at = tl.load(own + 1).to(tl.pointer_type(tl.float32))
    start, size = tl.load(own + 2), tl.load(own + 3)
    i = tl.arange(0, BLOCK)
    ok = i < size
    g = tl.load(g_ptr + start + i, mask=ok, other=0.0)
    p = tl.load(p_at + i, mask=ok, other=0.0)
    m = tl.load(m_at + i, mask=ok, other=0.0)
    if CLIPS:
        norm = tl.sqrt(tl.sum(tl.load(sums_ptr + tl.arange(0, PARTS)), 0))
        scale = clip / (norm + 1e-6)
        g *= tl.where(scale > 1.0, 1.0, scale)  # NaN stays, as in torch
    g += decay * p
    m = momentum * m + g
    tl.store(m_at + i, m, mask=ok)
    if NESTEROV:
        m = g + momentum * m
    tl.store(p_at + i, p - tl.load(lr_ptr) * m, mask=ok)


def sgd_step(vector, blocks, lr, clip, momentum, weight_decay, nesterov):
    """vector: all gradients [size]; blocks int64 [n, 4]: rows of `softcell.kernels.sgd`."""
    sums = torch.empty(PARTS, dtype=torch.float32, device=vector.device)
    if clip > 0:
        _squares[(PARTS,)](vector, sums, vector.numel(), PARTS=PARTS, BLOCK=READ, num_warps=8)
    _step[(len(blocks),)](
        vector, sums, lr, blocks, float(clip), float(momentum), float(weight_decay), PARTS=PARTS, CLIPS=clip > 0,
        NESTEROV=bool(nesterov), BLOCK=BLOCK,
    )  # fmt: skip
