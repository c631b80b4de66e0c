"""Accuracies counted on the device, against sorting by hand."""

from __future__ import annotations

import torch

from softcell.engine.distributed import World
from softcell.engine.metrics import Meter, Tally, in_top

ALONE = World(0, 1, 0, torch.device("cpu"))


def by_sorting(logits: torch.Tensor, labels: torch.Tensor) -> list[bool]:
    """Classes by falling logit, the earlier first in a tie: is the true one among the first five?"""
    return [
        label in sorted(range(len(row)), key=lambda i: (-row[i], i))[:5]
        for row, label in zip(logits.tolist(), labels.tolist(), strict=True)
    ]


def test_top_5_is_what_sorting_gives_ties_included() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 4, (200, 9), generator=generator).float()
    labels = torch.randint(0, 9, (200,), generator=generator)
    expected = by_sorting(logits, labels)
    assert 20 < sum(expected) < 180
    assert in_top(logits, labels).tolist() == expected
    right = logits.argmax(1) == labels
    assert not bool((right & ~in_top(logits, labels)).any()), "what is right is among the top five"


def test_equal_and_undefined_logits_are_no_answers() -> None:
    labels = torch.arange(10)
    assert in_top(torch.zeros(10, 10), labels).sum() == 5
    assert not in_top(torch.full((10, 10), torch.nan), labels).any()


def test_a_meter_counts_top_5_where_there_are_more_classes() -> None:
    generator = torch.Generator().manual_seed(1)
    meter, expected = Meter(), []
    for size in (7, 3):
        logits, labels = torch.randn(size, 12, generator=generator), torch.randint(0, 12, (size,), generator=generator)
        meter.judge(logits, labels)
        expected += by_sorting(logits, labels)
    found = meter.read(ALONE)
    assert found.top5 == sum(expected) / 10 and found.count == 10
    assert found.named("val", "_bn") == {"val_accuracy_bn": found.accuracy, "val_top5_bn": found.top5}
    few = Meter()
    few.judge(torch.randn(4, 5, generator=generator), torch.zeros(4, dtype=torch.int64))
    assert few.read(ALONE).top5 is None
    assert list(few.read(ALONE).named("val")) == ["val_accuracy"]


def test_sums_of_a_checkpoint_from_before_top_5_are_read() -> None:
    tally = Tally(torch.device("cpu"))
    tally.load(3, {"meter": torch.tensor([6.0, 2.0, 4.0], dtype=torch.float64)})
    found = tally.read(ALONE)
    assert (found.loss, found.accuracy, found.count, found.top5) == (1.5, 0.5, 4, None)
    tally.load(3, {"meter": torch.tensor([6.0, 2.0, 4.0, 3.0, 4.0], dtype=torch.float64)})
    assert tally.read(ALONE).top5 == 0.75
