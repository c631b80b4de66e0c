"""Context auto-regression: laws of the masks, the loss by hand, and what a decoder must do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from softcell.errors import UserError
from softcell.nn.context import (
    MOST_MASKS,
    ContextAutoRegression,
    Decoder,
    covered,
    draw_masks,
    missing_l1,
    rectangles,
)

SIDES = st.integers(2, 40)


@settings(max_examples=150, deadline=None)
@given(height=SIDES, width=SIDES, seed=st.integers(0, 10**6), extreme=st.sampled_from([None, 0.0, 1.0 - 2**-24]))
def test_masks_keep_their_laws_at_any_size(height: int, width: int, seed: int, extreme: float | None) -> None:
    """1 to 8 rectangles inside the image; at least a pixel and at most a quarter is hidden, as a loop says."""
    numbers = torch.rand(16, 1 + 4 * MOST_MASKS, generator=torch.Generator().manual_seed(seed))
    if extreme is not None:
        numbers[::2] = extreme
    boxes = rectangles(numbers, height, width)
    hidden = covered(boxes, height, width)
    for image in range(16):
        used = [box for box in boxes[image].tolist() if box[2]]
        assert 1 <= len(used) <= MOST_MASKS
        twin = torch.zeros(height, width, dtype=torch.bool)
        for top, left, high, wide in used:
            assert top >= 0 and left >= 0 and top + high <= height and left + wide <= width and wide >= 1
            twin[top : top + high, left : left + wide] = True
        assert torch.equal(hidden[image, 0], twin)
        assert 1 <= int(twin.sum()) <= height * width // 4


def test_masks_differ_in_number_overlap_and_come_close_to_a_quarter() -> None:
    numbers = torch.rand(4000, 1 + 4 * MOST_MASKS, generator=torch.Generator().manual_seed(0))
    boxes = rectangles(numbers, 32, 32)
    counts = (boxes[:, :, 2] > 0).sum(1)
    assert set(counts.tolist()) == set(range(1, MOST_MASKS + 1))
    hidden = covered(boxes, 32, 32).flatten(1).sum(1)
    areas = (boxes[:, :, 2] * boxes[:, :, 3]).sum(1)
    assert (hidden < areas).any()  # some overlap
    assert hidden.max() > 0.95 * 256
    centre = covered(boxes, 32, 32).float().mean(0)[0]
    assert centre[8:24, 8:24].min() > 0.05  # no place is spared


def test_masks_are_drawn_anew_and_repeat_with_the_seed() -> None:
    images = torch.zeros(4, 3, 16, 16)
    torch.manual_seed(0)
    first, second = draw_masks(images), draw_masks(images)
    torch.manual_seed(0)
    assert torch.equal(draw_masks(images), first) and not torch.equal(first, second)


def test_images_too_small_to_hide_anything_are_refused() -> None:
    with pytest.raises(UserError, match="at least 4 pixels"):
        draw_masks(torch.zeros(1, 3, 1, 3))


def test_the_loss_is_the_mean_over_hidden_values_alone() -> None:
    images, predicted = torch.zeros(1, 2, 2, 2), torch.tensor([[[[1.0, 5.0], [9.0, 9.0]], [[3.0, -7.0], [9.0, 9.0]]]])
    hidden = torch.tensor([[[[True, True], [False, False]]]])
    assert missing_l1(predicted, images, hidden) == (1 + 5 + 3 + 7) / 4


class Recorder:
    """A network whose feature map is what it was shown, pooled."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def features(self, x: Tensor) -> list[Tensor]:
        self.seen.append(x)
        return [x, torch.nn.functional.avg_pool2d(x, 4)]

    def head(self, features: Tensor) -> Tensor:
        raise AssertionError("no logits are wanted")


def test_the_network_never_sees_what_is_hidden_and_labels_play_no_part() -> None:
    torch.manual_seed(0)
    objective = ContextAutoRegression([(3, 16, 16), (3, 4, 4)], (3, 16, 16)).double()
    images = torch.rand(4, 3, 16, 16, dtype=torch.float64) + 1.0
    losses = []
    for labels in (torch.zeros(4, dtype=torch.int64), torch.arange(4)):
        network = Recorder()
        torch.manual_seed(1)
        result = objective(network, images, labels)
        losses.append(result.loss)
        torch.manual_seed(1)
        hidden = draw_masks(images)
        assert torch.equal(network.seen[0] == 0, hidden.expand_as(images))
        assert result.logits is None
        twin = (objective.decoder(network.features(network.seen[0])[-1]) - images).abs()
        torch.testing.assert_close(result.loss, twin[hidden.expand_as(twin)].mean(), rtol=1e-6, atol=0)
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("sizes", "steps"),
    [
        ([(32, 32), (32, 32), (16, 16), (8, 8)], [(16, 16), (32, 32)]),
        ([(9, 7), (9, 7), (5, 4), (3, 2)], [(5, 4), (9, 7)]),
        ([(224, 224), (56, 56), (28, 28)], [(56, 56), (112, 112), (224, 224)]),
        ([(8, 8), (8, 8)], []),
    ],
)
def test_a_decoder_goes_back_through_the_resolutions(
    sizes: list[tuple[int, int]], steps: list[tuple[int, int]]
) -> None:
    decoder = Decoder(8, 3, sizes)
    assert decoder.sizes == steps
    assert decoder(torch.randn(2, 8, *sizes[-1])).shape == (2, 3, *sizes[0])
