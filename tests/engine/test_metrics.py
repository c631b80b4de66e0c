"""Accuracies against explicit sorting; the first non-finite loss is kept."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from softcell.engine import checkpoint
from softcell.engine.distributed import World
from softcell.engine.metrics import DivergedError, Failure, LossWatch, Meter, Tally, in_top

ALONE = World(0, 1, 0, torch.device("cpu"))


def by_sorting(logits: torch.Tensor, labels: torch.Tensor) -> list[bool]:
    """Classes by falling logit, the earlier first in a tie: is the true one among the first five?"""
    return [
        label in sorted(range(len(row)), key=lambda i: (-row[i], i))[:5]
        for row, label in zip(logits.tolist(), labels.tolist(), strict=True)
    ]


def test_top_5_equals_sorting_ties_included() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 4, (200, 9), generator=generator).float()
    labels = torch.randint(0, 9, (200,), generator=generator)
    expected = by_sorting(logits, labels)
    assert 20 < sum(expected) < 180
    assert in_top(logits, labels).tolist() == expected
    right = logits.argmax(1) == labels
    assert not bool((right & ~in_top(logits, labels)).any()), "a correct answer is among the top five"


def test_equal_and_undefined_logits_do_not_count_as_answers() -> None:
    labels = torch.arange(10)
    assert in_top(torch.zeros(10, 10), labels).sum() == 5
    assert not in_top(torch.full((10, 10), torch.nan), labels).any()


def test_a_meter_counts_top_5_with_more_than_five_classes() -> None:
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


@given(losses=st.lists(st.floats(width=32) | st.sampled_from([1.0, math.nan, math.inf, -math.inf]), max_size=8))
def test_the_first_non_finite_loss_is_recorded(losses: list[float]) -> None:
    watch = LossWatch()
    for step, loss in enumerate(losses):
        watch.update(torch.tensor(loss), step)
    bad = [(step, loss) for step, loss in enumerate(losses) if not math.isfinite(loss)]
    failure = watch.failed()
    if not bad:
        assert failure is None
    else:
        assert failure is not None
        assert failure.step == bad[0][0]
        assert repr(failure.value) == repr(bad[0][1])


def test_a_step_may_be_a_tensor_and_a_loss_of_another_dtype() -> None:
    watch = LossWatch()
    step = torch.tensor(0)
    for loss in (1e300, float("-inf")):
        watch.update(torch.tensor(loss, dtype=torch.float64, requires_grad=True), step)
        step += 1
    failure = watch.failed()
    # 1e300 is finite in its own dtype, though not in that of the buffer.
    assert failure is not None
    assert (failure.step, failure.value) == (1, float("-inf"))


def test_buffers_stay_in_place_and_out_of_the_state() -> None:
    watch = LossWatch()
    before = watch.step.data_ptr(), watch.value.data_ptr()
    watch.update(torch.tensor(float("nan")), 3)
    assert (watch.step.data_ptr(), watch.value.data_ptr()) == before
    assert watch.state_dict() == {}


def test_a_divergence_names_a_checkpoint_only_if_there_is_one_and_does_not_advise_to_resume(tmp_path: Path) -> None:
    failure = Failure(5, math.nan)
    without = str(DivergedError(0, failure, tmp_path))
    assert "checkpoint" not in without
    assert "--resume would lead to the same loss." in without
    for way in ("--set weights.lr=", "--set lr=", "another --out", "--overwrite"):
        assert way in without
    checkpoint.save(tmp_path, {"epoch": 1})
    assert str(DivergedError(1, failure, tmp_path)).endswith(f"{tmp_path} keeps its last good checkpoint.")
