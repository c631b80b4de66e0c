# mypy: ignore-errors
"""Triton kernels for what surrounds the network in a step: augmented batches and metrics, one launch each.

Their twins, with equal results bit for bit, are `softcell.data.augment` with `softcell.data.hashing`, and `Meter` and
`LossWatch` in `softcell.engine.metrics`. Each of those launches dozens of kernels on a few hundred numbers.
"""

import torch
import triton
import triton.language as tl

GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND = tl.constexpr(0x94D049BB133111EB)
CROP_Y, CROP_X, FLIPPED, CUTOUT_Y, CUTOUT_X = (tl.constexpr(stream) for stream in range(5))
"""The streams of `softcell.data.augment`."""
PIXELS = 256
"""Pixels of an image for one program."""
ROWS = 4096
"""Logits that the program which counts answers reads at once."""


@triton.jit
def _absorbed(state, value):
    """The state of a hash after taking in a value; both uint64."""
    word = state + GOLDEN + value
    word = (word ^ (word >> 30)) * FIRST
    word = (word ^ (word >> 27)) * SECOND
    return word ^ (word >> 31)


@triton.jit
def _drawn(state, stream, bound):
    """An integer uniform in 0..bound - 1 from one stream of a sample."""
    word = _absorbed(state, stream)
    return (((word >> 33) * bound) >> 31).to(tl.int32)


@triton.jit(
    do_not_specialize=["stored_rows", "stored_columns", "height", "width"],
    do_not_specialize_on_alignment=["index_ptr"],  # a part of the order of an epoch
)
def _augment(
    pixels_ptr, index_ptr, epoch_ptr, seed_ptr, offset_ptr, scale_ptr, out_ptr, stored_rows, stored_columns, height,
    width, C: tl.constexpr, PADDING: tl.constexpr, FLIP: tl.constexpr, CUTOUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of pixels of one image: cropped, mirrored, normalised, cut out."""
    sample = tl.program_id(0)
    index = tl.load(index_ptr + sample)
    state = _absorbed(tl.load(seed_ptr).to(tl.uint64), tl.load(epoch_ptr).to(tl.uint64))
    state = _absorbed(state, index.to(tl.uint64))
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = at < height * width
    y, x = at // width, at % width
    row, column = y, x
    if FLIP:
        column += _drawn(state, FLIPPED, 2) * (width - 1 - 2 * column)
    if PADDING:
        row += _drawn(state, CROP_Y, 2 * PADDING + 1) - PADDING
        column += _drawn(state, CROP_X, 2 * PADDING + 1) - PADDING
    inside = ok & (row >= 0) & (row < height) & (column >= 0) & (column < width)
    # The view is the centre of what is stored.
    row += (stored_rows - height) // 2
    column += (stored_columns - width) // 2
    hole = at < 0
    if CUTOUT:
        top = _drawn(state, CUTOUT_Y, height.to(tl.uint64)) - CUTOUT // 2
        left = _drawn(state, CUTOUT_X, width.to(tl.uint64)) - CUTOUT // 2
        hole = (y >= top) & (y < top + CUTOUT) & (x >= left) & (x < left + CUTOUT)
    size = (stored_rows * stored_columns).to(tl.int64)
    source = pixels_ptr + index * C * size + row * stored_columns + column
    to = out_ptr + sample.to(tl.int64) * C * height * width + at
    for c in tl.static_range(C):
        value = tl.load(source + c * size, mask=inside, other=0).to(tl.float32)
        # A quotient like torch's, rounded to nearest; nothing here can become a fused multiply-add.
        value = tl.div_rn(value - tl.load(offset_ptr + c), tl.load(scale_ptr + c) + tl.zeros((BLOCK,), tl.float32))
        tl.store(to + c * height * width, tl.where(hole, 0.0, value), mask=ok)


def augment(pixels, index, epoch, seed, offset, scale, settings, shape):
    """Images float32 [n, *shape] of the samples `index` int64 [n].

    pixels uint8 [N, C, H', W'], epoch and seed int64 [] (the seed's hash), offset and scale float32 [C]: 255 times mean
    and deviation. settings: an `Augment` with crops, flips and cutout only.
    """
    n, (c, height, width) = len(index), shape
    out = torch.empty(n, c, height, width, dtype=torch.float32, device=pixels.device)
    if n:
        _augment[(n, triton.cdiv(height * width, PIXELS))](
            pixels, index, epoch, seed, offset, scale, out, *pixels.shape[2:], height, width, C=c,
            PADDING=settings.crop_padding, FLIP=settings.flip, CUTOUT=settings.cutout, BLOCK=PIXELS,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["rows"])
def _count(
    loss_ptr, other_ptr, logits_ptr, labels_ptr, sums_ptr, number_ptr, first_step_ptr, first_value_ptr, rows,
    CLASSES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOP: tl.constexpr, OTHER: tl.constexpr,
):  # fmt: skip
    """Metrics of a step, by one program."""
    k = tl.arange(0, WIDTH)
    best = tl.zeros((BLOCK,), dtype=tl.int32)
    ranked = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, rows, BLOCK):
        n = start + tl.arange(0, BLOCK)
        ok = n < rows
        label = tl.load(labels_ptr + n, mask=ok, other=0).to(tl.int32)
        given = tl.load(logits_ptr + n.to(tl.int64) * CLASSES + label, mask=ok, other=0.0).to(tl.float32)
        own, earlier = given[:, None], k[None, :] < label[:, None]
        at = n.to(tl.int64)[:, None] * CLASSES + k[None, :]
        logits = tl.load(logits_ptr + at, mask=ok[:, None] & (k < CLASSES)[None, :], other=float("-inf")).to(tl.float32)
        place = tl.sum(((logits > own) | ((logits == own) & earlier)).to(tl.int32), 1)
        # `argmax` returns the first NaN if there is one. Comparisons with NaN are false.
        undefined = tl.sum(((logits != logits) & (earlier | (own == own))).to(tl.int32), 1)
        best += (ok & (place == 0) & (undefined == 0)).to(tl.int32)
        if TOP:
            ranked += (ok & (place < TOP) & (given == given)).to(tl.int32)
    step, loss = tl.load(number_ptr), tl.load(loss_ptr)
    bad, value = (tl.abs(loss) < float("inf")) == 0, loss
    if OTHER:
        other = tl.load(other_ptr)
        other_bad = (tl.abs(other) < float("inf")) == 0
        bad, value = bad | other_bad, tl.where(other_bad, other, loss)
    is_first = bad & (tl.load(first_step_ptr) < 0)
    tl.store(first_step_ptr, step, mask=is_first)
    tl.store(first_value_ptr, value, mask=is_first)
    tl.store(number_ptr, step + 1)
    tl.store(sums_ptr, tl.load(sums_ptr) + loss.to(tl.float64) * rows)
    tl.store(sums_ptr + 1, tl.load(sums_ptr + 1) + tl.sum(best, 0))
    tl.store(sums_ptr + 2, tl.load(sums_ptr + 2) + rows)
    if TOP:
        tl.store(sums_ptr + 3, tl.load(sums_ptr + 3) + tl.sum(ranked, 0))
        tl.store(sums_ptr + 4, tl.load(sums_ptr + 4) + rows)


def count(loss, other, logits, labels, sums, number, first_step, first_value, top):
    """Adds a step to `sums` float64 [5], advances `number` int64 [], and watches both losses, `other` (or None) first.

    loss and other [], logits [n, classes], labels int64 [n]; first_step int64 [] and first_value float32 []. top: the
    answers that count, 0 to not count them.
    """
    rows, classes = logits.shape
    width = triton.next_power_of_2(classes)
    _count[(1,)](
        loss, loss if other is None else other, logits, labels, sums, number, first_step, first_value, rows,
        CLASSES=classes, WIDTH=width, BLOCK=max(1, ROWS // width), TOP=top, OTHER=other is not None,
    )  # fmt: skip
