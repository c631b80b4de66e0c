"""The first non-finite loss is kept, whatever comes after."""

import math
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from softcell.engine import checkpoint
from softcell.engine.metrics import DivergedError, Failure, LossWatch


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


def test_advice_names_a_checkpoint_only_where_there_is_one_and_sends_nobody_to_resume(tmp_path: Path) -> None:
    failure = Failure(5, math.nan)
    without = str(DivergedError(0, failure, tmp_path))
    assert "checkpoint" not in without
    assert "--resume would lead to the same loss." in without
    for way in ("--set weights.lr=", "--set lr=", "another --out", "--overwrite"):
        assert way in without
    checkpoint.save(tmp_path, {"epoch": 1})
    assert str(DivergedError(1, failure, tmp_path)).endswith(f"{tmp_path} keeps its last good checkpoint.")
