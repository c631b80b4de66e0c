"""Validation of a supernet against a literal loop in evaluation mode."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from softcell.arch import WeightMix
from softcell.data import load
from softcell.data.batches import Feeds
from softcell.engine.metrics import measure
from softcell.engine.session import computing_in
from softcell.search.supernet import Validation, overfit_warning
from softcell.spaces import Supernet, build_space
from tests.helpers.search_toys import ALONE, TINY

COUNT, SIZE = 70, 16  # the last batch is a short one


@pytest.fixture(scope="module")
def digits() -> Feeds:
    return Feeds(load("digits"), SIZE, 0, torch.device("cpu"), torch.float32)


def supernet_and_mix() -> tuple[Supernet, WeightMix]:
    """Running statistics that are far from those of a batch, and drop-path that would act in training."""
    torch.manual_seed(0)
    supernet = build_space("nb201", TINY["nb201"]).supernet((1, 8, 8), 10)
    for module in supernet.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            module.running_mean.uniform_(-1, 1)
            module.running_var.uniform_(0.2, 3)
    supernet.use_drop_path(0.5)
    supernet.drop_path.set_fraction(1.0)
    tables = {t.name: torch.randn(t.shape).softmax(1) for t in supernet.layout.tables}
    return supernet.train(), WeightMix(supernet.layout, tables)


def literally(answers: list[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """Mean loss and accuracy, image by image: −ln of the share that softmax gives the right class."""
    loss = right = count = 0.0
    for logits, labels in answers:
        for row, label in zip(logits.double().tolist(), labels.tolist(), strict=True):
            top = max(row)
            loss -= row[label] - top - math.log(sum(math.exp(x - top) for x in row))
            right += row.index(top) == label
            count += 1
    return loss / count, right / count


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_loss_and_accuracy_match_a_literal_loop_in_evaluation_mode(digits: Feeds, precision: str) -> None:
    """With bfloat16 the logits are short, their loss is not."""
    supernet, mix = supernet_and_mix()
    held = digits.plain(digits.dataset.train, torch.arange(COUNT))
    in_step = lambda: computing_in(precision, ALONE.device)  # noqa: E731
    before = {name: value.clone() for name, value in supernet.state_dict().items()}
    found = Validation(supernet, held, "eager", ALONE, in_step, pytest.fail)(mix)
    assert supernet.training, "the search continues in training mode"
    assert all(torch.equal(value, before[name]) for name, value in supernet.state_dict().items())

    supernet.eval()
    answers = []
    with torch.no_grad():
        for batch in held.epoch(0):
            with in_step():
                answers.append((supernet(batch.images, mix), batch.labels))
    assert {logits.dtype for logits, _ in answers} == {getattr(torch, precision)}
    loss, accuracy = literally(answers)
    assert found.count == COUNT and found.accuracy == accuracy
    assert found.loss == pytest.approx(loss, rel=1e-6)


def test_answers_of_a_network_in_bfloat16_are_judged_in_float32(digits: Feeds) -> None:
    """Outside autocast, where the loss would be rounded to eight bits."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).bfloat16()
    held = digits.plain(digits.dataset.train, torch.arange(COUNT))
    forward = lambda images: network(images.bfloat16())  # noqa: E731
    found = measure(forward, held.epoch(0), ALONE)
    with torch.no_grad():
        loss, accuracy = literally([(forward(batch.images), batch.labels) for batch in held.epoch(0)])
    assert found.accuracy == accuracy
    assert found.loss == pytest.approx(loss, rel=1e-6)


def test_float64_stays_float64() -> None:
    supernet, mix = supernet_and_mix()
    feeds = Feeds(load("digits"), SIZE, 0, torch.device("cpu"), torch.float64)
    held = feeds.plain(feeds.dataset.train, torch.arange(COUNT))
    supernet.double()
    (table,) = supernet.layout.tables
    mix = WeightMix(supernet.layout, {table.name: mix.weights(0).double()})
    found = Validation(supernet, held, "eager", ALONE, nullcontext, pytest.fail)(mix)
    supernet.eval()
    with torch.no_grad():
        loss, _ = literally([(supernet(batch.images, mix), batch.labels) for batch in held.epoch(0)])
    assert found.loss == pytest.approx(loss, rel=1e-13)


@pytest.mark.parametrize(("trained", "held", "warned"), [(0.62, 0.1, True), (0.3, 0.1, False), (0.9, 0.84, False)])
def test_only_an_accuracy_far_below_training_is_warned_about(trained: float, held: float, warned: bool) -> None:
    text = overfit_warning(trained, held, is_recalibrated=True)
    assert (text is not None) == warned
    for recalibrated in (True, False):
        messages = overfit_warning(trained, held, is_recalibrated=recalibrated)
        assert messages is None or ("recalibrated" in messages) == ("many cells" in messages) == recalibrated
    assert text is None or (f"{held:.1%}" in text and f"{trained:.1%}" in text)
