"""Augmentation against a per-image numpy twin that draws from its own copy of the hash."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from softcell.data import Augment, augment, normalise
from softcell.errors import UserError

WORD = (1 << 64) - 1
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


def word(seed: int, epoch: int, index: int, stream: int) -> int:
    state = 0
    for value in (seed, epoch, index, stream):
        z = (state + 0x9E3779B97F4A7C15 + value) & WORD
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
        state = z ^ (z >> 31)
    return state


def integer(bits: int, bound: int) -> int:
    return ((bits >> 33) * bound) >> 31


def uniform(bits: int) -> float:
    return (bits >> 40) / (1 << 24)


def bilinear(image: np.ndarray, y: float, x: float) -> np.ndarray:
    """The value of `image` [C, H, W] at pixel coordinates, borders repeated."""
    height, width = image.shape[1:]
    y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
    top, left = int(y), int(x)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    fy, fx = y - top, x - left
    upper = image[:, top, left] * (1 - fx) + image[:, top, right] * fx
    lower = image[:, bottom, left] * (1 - fx) + image[:, bottom, right] * fx
    return upper * (1 - fy) + lower * fy


def twin_resized(image: np.ndarray, draws: list[int], size: tuple[int, int]) -> np.ndarray:
    channels, height, width = image.shape
    for attempt in range(10):
        area = (0.08 + 0.92 * uniform(draws[8 + attempt])) * height * width
        ratio = math.exp(math.log(3 / 4) + math.log(16 / 9) * uniform(draws[18 + attempt]))
        h, w = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 1 <= h <= height and 1 <= w <= width:
            top, left = integer(draws[0], height - h + 1), integer(draws[1], width - w + 1)
            break
    else:
        h, w = min(height, round(width * 4 / 3)), min(width, round(height * 4 / 3))
        top, left = (height - h) // 2, (width - w) // 2
    out = np.zeros((channels, *size))
    for row in range(size[0]):
        for column in range(size[1]):
            y = top + (row + 0.5) * h / size[0] - 0.5
            x = left + (column + 0.5) * w / size[1] - 0.5
            out[:, row, column] = bilinear(image, y, x)
    return out


def twin(image: np.ndarray, index: int, epoch: int, seed: int, how: Augment, size=None) -> np.ndarray:
    """One augmented image, step by step."""
    draws = [word(seed, epoch, index, stream) for stream in range(28)]
    image = image.astype(np.float64)
    height, width = image.shape[1:]
    if how.resized_crop:
        height, width = size or (height, width)
        image = twin_resized(image, draws, (height, width))
    elif how.crop_padding or how.window:
        p = how.crop_padding
        padded = np.zeros((image.shape[0], height + 2 * p, width + 2 * p))
        padded[:, p : p + height, p : p + width] = image
        height, width = size or (height, width)
        y, x = (integer(draws[i], padded.shape[1 + i] - side + 1) for i, side in enumerate((height, width)))
        image = padded[:, y : y + height, x : x + width]
    if how.flip and integer(draws[2], 2):
        image = image[:, :, ::-1]
    if how.jitter:
        factors = [1 - how.jitter + 2 * how.jitter * uniform(draws[stream]) for stream in (5, 6, 7)]
        luminance = np.array([0.299, 0.587, 0.114])[:, None, None] if len(image) == 3 else 1.0
        image = np.clip(image * factors[0], 0, 255)
        level = (image * luminance).sum(0).mean()
        image = np.clip(level + (image - level) * factors[1], 0, 255)
        if len(image) == 3:
            grey = (image * luminance).sum(0)
            image = np.clip(grey + (image - grey) * factors[2], 0, 255)
    channels = len(image)
    image = (image / 255 - np.array(MEAN[:channels])[:, None, None]) / np.array(STD[:channels])[:, None, None]
    if how.cutout:
        y, x = integer(draws[3], height), integer(draws[4], width)
        for row in range(height):
            for column in range(width):
                inside_y = y - how.cutout // 2 <= row < y - how.cutout // 2 + how.cutout
                inside_x = x - how.cutout // 2 <= column < x - how.cutout // 2 + how.cutout
                if inside_y and inside_x:
                    image[:, row, column] = 0
    return image


def pictures(num: int, shape: tuple[int, int, int], seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (num, *shape), dtype=np.uint8))


ALL = [
    Augment(),
    Augment(crop_padding=4, flip=True),
    Augment(crop_padding=1),
    Augment(flip=True),
    Augment(cutout=4),
    Augment(cutout=5),
    Augment(cutout=99),
    Augment(jitter=0.4),
    Augment(resized_crop=True),
    Augment(resized_crop=True, flip=True),
    Augment(crop_padding=3, flip=True, cutout=3, jitter=0.7),
    Augment(resized_crop=True, flip=True, cutout=3, jitter=0.2),
]


@pytest.mark.parametrize("how", ALL, ids=repr)
@pytest.mark.parametrize("shape", [(3, 9, 12), (1, 8, 8)])
def test_augment_equals_the_slow_twin(how, shape):
    images, index = pictures(12, shape), torch.arange(12) * 37 + 5
    channels = shape[0]
    found = augment(images, index, 3, 11, how, MEAN[:channels], STD[:channels], torch.float32)
    assert found.shape == images.shape and found.dtype == torch.float32
    for row in range(12):
        expected = twin(images[row].numpy(), int(index[row]), 3, 11, how)
        # The twin works in float64: a bilinear position is off by 1e-6 pixels, worth 1e-3 at worst.
        np.testing.assert_allclose(found[row].numpy(), expected, atol=2e-3 if how.resized_crop else 2e-5)


def test_resized_crop_from_a_larger_store_equals_the_twin():
    images, how = pictures(6, (3, 16, 16)), Augment(resized_crop=True, flip=True)
    found = augment(images, torch.arange(6), 1, 2, how, MEAN, STD, torch.float32, size=(14, 14))
    assert found.shape == (6, 3, 14, 14)
    for row in range(6):
        expected = twin(images[row].numpy(), row, 1, 2, how, size=(14, 14))
        np.testing.assert_allclose(found[row].numpy(), expected, atol=2e-3)


@pytest.mark.parametrize("how", [Augment(window=True), Augment(window=True, flip=True, crop_padding=2, cutout=3)])
def test_a_window_of_a_larger_store_equals_the_twin(how):
    images = pictures(12, (3, 9, 11))
    found = augment(images, torch.arange(12), 1, 2, how, MEAN, STD, torch.float32, size=(6, 7))
    assert found.shape == (12, 3, 6, 7)
    for row in range(12):
        expected = twin(images[row].numpy(), row, 1, 2, how, size=(6, 7))
        np.testing.assert_allclose(found[row].numpy(), expected, atol=2e-5)


def test_a_resized_crop_that_fits_nowhere_takes_the_centre():
    images, how = pictures(4, (3, 4, 40)), Augment(resized_crop=True)  # an aspect of 10
    found = augment(images, torch.arange(4), 0, 0, how, MEAN, STD)
    for row in range(4):
        np.testing.assert_allclose(found[row].numpy(), twin(images[row].numpy(), row, 0, 0, how), atol=2e-3)


@pytest.mark.parametrize("how", ALL, ids=repr)
@given(order=st.permutations(range(10)), cut=st.integers(0, 10))
@settings(max_examples=5, deadline=None)
def test_a_sample_does_not_depend_on_batch_or_order(how, order, cut):
    images, index = pictures(10, (3, 8, 8)), torch.arange(100, 110)
    whole = augment(images, index, 2, 7, how, MEAN, STD)
    order = torch.tensor(order)
    for part in (order[:cut], order[cut:]):
        found = augment(images[part], index[part], 2, 7, how, MEAN, STD)
        assert torch.equal(found, whole[part])


@pytest.mark.parametrize("how", ALL, ids=repr)
def test_nothing_is_read_back_from_the_device_and_the_epoch_may_be_a_tensor(how):
    """A meta tensor has no values, so that any read by the host raises."""
    images, index = pictures(5, (3, 8, 8)), torch.arange(5)
    as_tensor = augment(images, index, torch.tensor(4), torch.tensor(9), how, MEAN, STD)
    assert torch.equal(as_tensor, augment(images, index, 4, 9, how, MEAN, STD))
    on_meta = [t.to("meta") for t in (images, index, torch.tensor(4), torch.tensor(9))]
    assert augment(*on_meta, how, MEAN, STD).shape == images.shape


def test_epochs_and_seeds_and_samples_differ_but_repeat():
    how, image = Augment(crop_padding=4, flip=True), pictures(1, (3, 16, 16)).expand(200, -1, -1, -1)

    def run(epoch, seed):
        return augment(image, torch.arange(200), epoch, seed, how, MEAN, STD)

    base = run(0, 0)
    assert torch.equal(base, run(0, 0))
    for other in (run(1, 0), run(0, 1)):
        same = (base == other).flatten(1).all(1).float().mean().item()
        assert same < 0.1  # 1 of 162 in expectation
    assert len({tuple(row.flatten().tolist()) for row in base}) > 90  # of 162 different results


def test_half_are_flipped_and_all_crops_occur_equally_often():
    num, padding = 20_000, 1
    ramp = torch.arange(1, 17, dtype=torch.uint8).view(1, 1, 4, 4).expand(num, 1, 4, 4)
    found = augment(ramp, torch.arange(num), 0, 0, Augment(padding, True), (0.0,), (1 / 255,))
    _, counts = torch.unique(found.flatten(1), dim=0, return_counts=True)
    assert len(counts) == 18
    assert ((counts - num / 18).abs() < 5 * (num / 18) ** 0.5).all()


def test_cutout_is_a_clipped_square_of_zeros_with_uniform_centre():
    num, length, side = 4_000, 4, 8
    white = torch.full((num, 1, side, side), 255, dtype=torch.uint8)
    found = augment(white, torch.arange(num), 0, 0, Augment(cutout=length), (0.5,), (0.5,))[:, 0]
    holes = found == 0
    assert torch.equal(found[~holes], torch.ones_like(found[~holes]))
    heights, widths = holes.any(2).sum(1), holes.any(1).sum(1)
    assert torch.equal(holes.flatten(1).sum(1), heights * widths)  # a rectangle, no more and no less
    # Centres 0, 1 and 7 lose 2, 1 and 1 of the 4 rows.
    assert torch.bincount(heights).nonzero().flatten().tolist() == [2, 3, 4]
    assert abs(heights.float().mean().item() - (2 + 3 + 3 + 5 * 4) / 8) < 0.05


def test_padding_is_black_before_normalisation():
    white = torch.full((50, 1, 4, 4), 255, dtype=torch.uint8)
    found = augment(white, torch.arange(50), 0, 0, Augment(crop_padding=2), (0.5,), (0.5,))
    assert torch.unique(found).tolist() == [-1.0, 1.0]


def test_normalise_is_the_formula_in_every_dtype():
    images = pictures(4, (3, 5, 5))
    expected = (images.double() / 255 - torch.tensor(MEAN).double().view(3, 1, 1)) / torch.tensor(STD).double().view(
        3, 1, 1
    )
    torch.testing.assert_close(normalise(images, MEAN, STD, torch.float64), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(normalise(images, MEAN, STD, torch.float32), expected.float())
    rounded = normalise(images, torch.tensor(MEAN), torch.tensor(STD), torch.bfloat16)
    assert torch.equal(rounded, normalise(images, MEAN, STD, torch.float32).bfloat16())


@pytest.mark.parametrize("how", ALL, ids=repr)
def test_an_empty_batch_stays_empty(how):
    empty = torch.empty((0, 3, 8, 8), dtype=torch.uint8)
    assert augment(empty, torch.arange(0), 0, 0, how, MEAN, STD).shape == (0, 3, 8, 8)


@pytest.mark.parametrize(
    "wrong", [{"crop_padding": -1}, {"crop_padding": 1.5}, {"cutout": -2}, {"cutout": True}, {"jitter": 1.1}]
)
def test_wrong_settings_are_named(wrong):
    with pytest.raises(UserError, match=next(iter(wrong))):
        Augment(**wrong)


def test_contradictions_are_named():
    for other in ({"crop_padding": 4}, {"window": True}):
        with pytest.raises(UserError, match="resized_crop excludes"):
            Augment(resized_crop=True, **other)
    with pytest.raises(UserError, match="only resized_crop and window"):
        augment(pictures(1, (3, 8, 8)), torch.arange(1), 0, 0, Augment(flip=True), MEAN, STD, size=(4, 4))
    with pytest.raises(UserError, match="one value per channel"):
        normalise(pictures(1, (3, 8, 8)), (0.5,), (0.5,), torch.float32)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("how", ALL, ids=repr)
def test_a_captured_graph_replays_with_another_epoch(how):
    images, index = pictures(16, (3, 8, 8)).cuda(), torch.arange(16).cuda()
    epoch = torch.zeros((), dtype=torch.int64, device="cuda")
    augment(images, index, epoch, 5, how, MEAN, STD)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = augment(images, index, epoch, 5, how, MEAN, STD)
    for number in (1, 7):
        epoch.fill_(number)
        graph.replay()
        assert torch.equal(out, augment(images, index, number, 5, how, MEAN, STD))
        on_cpu = augment(images.cpu(), index.cpu(), number, 5, how, MEAN, STD)
        torch.testing.assert_close(out.cpu(), on_cpu, atol=2e-3 if how.resized_crop else 1e-4, rtol=0)
