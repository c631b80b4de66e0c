"""Batches and metrics by Triton's kernels equal those by torch, bit for bit.

TRITON_INTERPRET=1 pytest tests/kernels/test_kernel_batch.py
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from softcell.data import Augment, Batches, Resident
from softcell.engine.metrics import LossWatch, Meter, Tally
from softcell.kernels.backend import twins_only
from tests.helpers.kernel_runs import DEVICE, MARKS, replayed

CHANGES = {
    "crop and flip": Augment(crop_padding=4, flip=True),
    "flip": Augment(flip=True),
    "crop": Augment(crop_padding=2),
    "cutout": Augment(crop_padding=4, flip=True, cutout=16),
    "small cutout": Augment(cutout=3),
    "nothing": Augment(),
}
SHAPES = {
    "32 × 32": ((3, 32, 32), None),
    "odd": ((1, 9, 13), None),
    "the centre": ((3, 12, 11), (8, 10)),
}
"""Stored shapes, and the part that is seen."""


def batches(changes: Augment | None, shape: str = "odd", dtype: torch.dtype = torch.float32, **more: Any) -> Batches:
    stored, view = SHAPES[shape]
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (40, *stored), dtype=torch.uint8, generator=generator)
    given: dict[str, Any] = {
        "seed": 2**40 + 3,
        "mean": (0.49, 0.48, 0.45)[: stored[0]],
        "std": (0.247, 0.243, 0.261)[: stored[0]],
        "augment": changes,
        "shuffle": True,
        "device": DEVICE,
        "dtype": dtype,
        "drop_last": True,
    }
    return Batches(Resident(pixels, torch.arange(40) % 7, view=view), torch.arange(40), 12, **{**given, **more})


@pytest.mark.parametrize("mark", [pytest.param(None, marks=MARKS)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", CHANGES)
def test_batches_are_the_same_bit_for_bit(kind: str, shape: str, mark: None) -> None:
    own = batches(CHANGES[kind], shape)
    assert own.has_kernel
    for epoch in (0, 7):
        for draft in own.drafts(epoch):
            found, expected = own.finish(*draft, by_kernel=True), own.finish(*draft)
            assert torch.equal(found.images, expected.images) and torch.equal(found.labels, expected.labels)
            assert found.images.dtype == torch.float32 and found.images.stride() == expected.images.stride()
            assert torch.equal(found.index, expected.index)


@pytest.mark.parametrize("mark", [pytest.param(None, marks=MARKS)])
def test_an_empty_part_of_a_batch_stays_empty(mark: None) -> None:
    own = batches(Augment(crop_padding=1))
    index, epoch = torch.empty(0, dtype=torch.int64, device=DEVICE), torch.tensor(0, device=DEVICE)
    found = own.finish(index, epoch, by_kernel=True)
    assert found.images.shape == (0, 1, 9, 13) and found.labels.shape == (0,)


@pytest.mark.parametrize("changes", [None, Augment(jitter=0.4), Augment(resized_crop=True), Augment(window=True)])
def test_other_batches_are_made_by_torch(changes: Augment | None) -> None:
    own = batches(changes)
    assert not own.has_kernel
    draft = next(iter(own.drafts(0)))
    assert torch.equal(own.finish(*draft, by_kernel=True).images, own.finish(*draft).images)


def test_float64_and_machines_without_triton_use_torch() -> None:
    assert not batches(Augment(flip=True), dtype=torch.float64).has_kernel
    with twins_only():
        assert not batches(Augment(flip=True)).has_kernel


def steps(classes: int, dtype: torch.dtype, rows: int = 21) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """loss, another loss, logits and labels of a few steps; with ties, infinities and undefined numbers."""
    generator = torch.Generator().manual_seed(classes)
    found = []
    for number, losses in enumerate([(1.5, 0.25), (0.1, 0.2), (1.0, math.nan), (math.inf, 1.0), (math.nan, -math.inf)]):
        logits = torch.randint(-2, 3, (rows, classes), generator=generator).to(dtype)
        if number == 2:
            logits[3], logits[5, 0] = math.nan, math.nan
            logits[6, classes - 1], logits[7, 0], logits[8] = math.nan, math.inf, -math.inf
        labels = torch.randint(0, classes, (rows,), generator=generator)
        labels[:9] = 0
        loss, other = torch.tensor(losses).unbind()
        found.append(tuple(x.to(DEVICE) for x in (loss.clone(), other.clone(), logits, labels)))
    return found  # type: ignore[return-value]


def values(tally: Tally) -> list[Tensor]:
    return [tally._meter.sums, tally._number, tally._watch.step, tally._watch.value]


@pytest.mark.parametrize("mark", [pytest.param(None, marks=MARKS)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("classes", "rows"), [(2, 21), (10, 64), (10, 500), (1000, 21)])
@pytest.mark.parametrize("two", [True, False])
def test_metrics_are_the_same(classes: int, rows: int, dtype: torch.dtype, two: bool, mark: None) -> None:
    mine, theirs = (Tally(torch.device(DEVICE)) for _ in range(2))
    for loss, other, logits, labels in steps(classes, dtype, rows):
        others = (other,) if two else ()
        mine.update(loss, logits, labels, *others, by_kernel=True)
        theirs.update(loss, logits, labels, *others)
        for a, b in zip(values(mine), values(theirs), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert theirs.failed() is not None


def test_without_triton_metrics_are_counted_by_torch() -> None:
    mine, theirs = (Tally(torch.device(DEVICE)) for _ in range(2))
    with twins_only():
        for loss, other, logits, labels in steps(10, torch.float32)[:2]:
            mine.update(loss, logits, labels, other, by_kernel=True)
            theirs.update(loss, logits, labels, other)
    assert all(torch.equal(a, b) for a, b in zip(values(mine), values(theirs), strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_both_kernels_are_captured_and_replayed() -> None:
    own, tally = batches(CHANGES["cutout"], "32 × 32"), Tally(torch.device(DEVICE))
    loss, other, logits, labels = steps(10, torch.bfloat16)[0]
    draft = next(iter(own.drafts(3)))

    def step() -> list[Tensor]:
        tally.update(loss, logits, labels, other, by_kernel=True)
        batch = own.finish(*draft, by_kernel=True)
        return [batch.images, batch.labels]

    images, of = replayed(step)
    expected = own.finish(*draft)
    assert torch.equal(images, expected.images) and torch.equal(of, expected.labels)
    meter, watch = Meter(torch.device(DEVICE)), LossWatch().to(DEVICE)
    for number in range(2):  # one before the capture, one replayed
        meter.update(loss, logits, labels)
        watch.update(loss, number)
    assert torch.equal(meter.sums, values(tally)[0]) and tally.step == 2 and tally.failed() is None
