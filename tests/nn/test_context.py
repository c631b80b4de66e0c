"""Context auto-regression: laws of the masks, the loss by hand-computed values, and requirements on a decoder."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from softcell.errors import UserError
from softcell.nn.objective import (
    MAX_MASKS,
    ContextAutoRegression,
    Decoder,
    covered,
    draw_masks,
    missing_l1,
    rectangles,
)

SIDES = st.integers(3, 40)
NUMBERS = 1 + 3 * MAX_MASKS


@settings(max_examples=150, deadline=None)
@given(height=SIDES, width=SIDES, seed=st.integers(0, 10**6), extreme=st.sampled_from([None, 0.0, 1.0 - 2**-24]))
def test_masks_keep_their_laws_at_any_size(height: int, width: int, seed: int, extreme: float | None) -> None:
    """2 to 8 rectangles that reach into the image; at least a pixel and at most a quarter is hidden, as a loop says."""
    numbers = torch.rand(16, NUMBERS, generator=torch.Generator().manual_seed(seed))
    if extreme is not None:
        numbers[::2] = extreme
    boxes = rectangles(numbers, height, width)
    hidden = covered(boxes, height, width)
    for image in range(16):
        used = [box for box in boxes[image].tolist() if box[2]]
        assert 2 <= len(used) <= MAX_MASKS
        twin = torch.zeros(height, width, dtype=torch.bool)
        for top, left, high, wide in used:
            assert top >= 0 and left >= 0 and top + high <= height and left + wide <= width and wide >= 1
            twin[top : top + high, left : left + wide] = True
        assert torch.equal(hidden[image, 0], twin)
        assert 1 <= int(twin.sum()) <= height * width // 4


@pytest.mark.parametrize(("height", "width"), [(8, 8), (9, 14)])
@pytest.mark.parametrize("shape", [0.0, 0.5, 0.99])
def test_every_pixel_is_hidden_by_equally_many_places_of_a_rectangle(height: int, width: int, shape: float) -> None:
    """Brute force: all places of a rectangle that reach into the image cover each pixel high · wide times."""
    side = 64  # enough equally spaced numbers to meet every place; each place is then counted once
    grid = (torch.arange(side * side) % side, torch.arange(side * side) // side)
    numbers = torch.zeros(side * side, NUMBERS)
    numbers[:, 1], numbers[:, 2], numbers[:, 3] = shape, (grid[0] + 0.5) / side, (grid[1] + 0.5) / side
    boxes = rectangles(numbers, height, width)[:, :1]
    high, wide = (int(boxes[:, 0, i].max()) for i in (2, 3))
    assert high * wide <= height * width // 8, "of two masks each may have an eighth"
    places = torch.unique(boxes[:, 0], dim=0)
    # A place that is cut off at the border differs from every other; so none is lost by taking each once.
    assert len(places) == (height + high - 1) * (width + wide - 1)
    times = covered(places[:, None], height, width).sum((0, 1))
    assert torch.equal(times, torch.full((height, width), high * wide))


@pytest.mark.parametrize(("height", "width"), [(32, 32), (12, 20)])
def test_masks_hide_all_pixels_equally_often(height: int, width: int) -> None:
    """Frequencies over many draws differ by chance alone: chi-square against the mean, as the closed form is flat."""
    draws = 20_000
    numbers = torch.rand(draws, NUMBERS, generator=torch.Generator().manual_seed(0))
    often = covered(rectangles(numbers, height, width), height, width).double().mean(0)[0]
    expected = often.mean()
    deviation = float((expected * (1 - expected) / draws).sqrt())
    assert float((often - expected).abs().max()) < 5 * deviation
    assert often.max() / often.min() < 1.2


def test_masks_differ_in_number_overlap_and_come_close_to_a_quarter() -> None:
    numbers = torch.rand(4000, NUMBERS, generator=torch.Generator().manual_seed(0))
    boxes = rectangles(numbers, 32, 32)
    counts = (boxes[:, :, 2] > 0).sum(1)
    assert set(counts.tolist()) == set(range(2, MAX_MASKS + 1))
    assert all(abs(int((counts == m).sum()) - 4000 / 7) < 5 * (4000 / 7) ** 0.5 for m in range(2, MAX_MASKS + 1))
    hidden = covered(boxes, 32, 32).flatten(1).sum(1)
    areas = (boxes[:, :, 2] * boxes[:, :, 3]).sum(1)
    assert (hidden < areas).any()  # some overlap
    assert 0.95 * 256 < hidden.max() <= 256
    assert 0.14 < float(hidden.float().mean()) / 1024 < 0.17


def test_masks_are_new_at_every_call_and_repeat_with_the_seed() -> None:
    images = torch.zeros(4, 3, 16, 16)
    torch.manual_seed(0)
    first, second = draw_masks(images), draw_masks(images)
    torch.manual_seed(0)
    assert torch.equal(draw_masks(images), first) and not torch.equal(first, second)


def test_images_too_small_to_hide_anything_are_refused() -> None:
    with pytest.raises(UserError, match="at least 8 pixels"):
        draw_masks(torch.zeros(1, 3, 2, 3))


def test_the_loss_is_the_mean_over_hidden_values_only() -> None:
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


def test_masks_are_drawn_without_waiting_for_the_device() -> None:
    """Tensors of the meta device have no numbers: whatever asked for one would fail."""
    boxes = rectangles(torch.empty(4, NUMBERS, device="meta"), 32, 32)
    hidden = covered(boxes, 32, 32)
    assert (hidden.shape, hidden.dtype, hidden.device.type) == ((4, 1, 32, 32), torch.bool, "meta")
    assert (
        missing_l1(torch.empty(4, 3, 32, 32, device="meta"), torch.empty(4, 3, 32, 32, device="meta"), hidden).shape
        == ()
    )
