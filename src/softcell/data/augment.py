"""Augmentation of a whole batch on its own device, from hashed random numbers instead of a generator.

Order as in DARTS: crop, flip, (jitter,) normalise, cutout. The crop pads the raw image with black; cutout
zeroes the normalised image, that is, paints the mean colour.

Deviation: a random resized crop is bilinear without antialiasing, on the stored image, and is not made while
decoding; of ImageNet the part of a photograph outside its central square is never seen. In return the crop of a sample
is a function of (seed, epoch, sample) alone and runs batched on the device.
Deviation: jitter applies brightness, contrast and saturation in this order (not shuffled) and leaves hue
unchanged.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from softcell.data.hashing import hash_words, to_integer, to_uniform
from softcell.errors import UserError

# Streams of the hash, one per random number of a sample.
CROP_Y, CROP_X, FLIP, CUTOUT_Y, CUTOUT_X, BRIGHTNESS, CONTRAST, SATURATION = range(8)
AREA = 8
NUM_TRIES = 10  # tries for a resized crop that is inside the image
RATIO = AREA + NUM_TRIES
_NUM_STREAMS = AREA
_NUM_STREAMS_RESIZED = RATIO + NUM_TRIES

AREA_RANGE = (0.08, 1.0)
RATIO_RANGE = (3 / 4, 4 / 3)
_LUMINANCE = (0.299, 0.587, 0.114)  # ITU-R BT.601


@dataclass(frozen=True, slots=True)
class Augment:
    """The random changes to training images.

    crop_padding: pad by this many black pixels on each side, then crop back to the size.
    flip: mirror left and right with probability one half.
    cutout: side of the square set to zero, 0 for none; its centre is uniform, the square clipped at borders.
    resized_crop: crop 8% to 100% of the area with aspect 3/4 to 4/3 and resize, as in ImageNet training.
    window: take a window of the seen size out of images that are stored larger, anywhere in them.
    jitter: brightness, contrast and saturation are each scaled by a factor from 1 - jitter to 1 + jitter.

    Example:
        >>> from softcell.data import Augment
        >>> Augment(crop_padding=4, flip=True, cutout=16)
        Augment(crop_padding=4, flip=True, cutout=16, resized_crop=False, window=False, jitter=0.0)
    """

    crop_padding: int = 0
    flip: bool = False
    cutout: int = 0
    resized_crop: bool = False
    window: bool = False
    jitter: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("crop_padding", self.crop_padding), ("cutout", self.cutout)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise UserError(f"{name} must be a whole number of pixels >= 0, but got {value!r}; 0 turns it off")
        if not 0.0 <= self.jitter <= 1.0:
            raise UserError(f"0 <= jitter <= 1 must hold, but got jitter={self.jitter!r}; 0 turns it off")
        if self.resized_crop and (self.crop_padding or self.window):
            raise UserError(
                "resized_crop excludes crop_padding and window, but got resized_crop=True, "
                f"crop_padding={self.crop_padding} and window={self.window}; keep one of them"
            )

    @property
    def from_stored(self) -> bool:
        """Whether crops are drawn from the whole stored image, not only from its centre."""
        return self.resized_crop or self.window


def _per_channel(values: Sequence[float] | Tensor, num_channels: int, like: Tensor) -> Tensor:
    """`values` as [1, C, 1, 1] in the dtype and on the device of `like`."""
    if len(values) != num_channels:
        raise UserError(
            f"mean and std must have one value per channel, but got {len(values)} values for "
            f"{num_channels} channels; take them from the dataset"
        )
    if not isinstance(values, Tensor):
        # Filled on the device: torch.tensor(values) would copy from the host, which graph capture refuses.
        values = torch.cat([torch.full((1,), v, dtype=like.dtype, device=like.device) for v in values])
    return values.to(device=like.device, dtype=like.dtype).view(1, -1, 1, 1)


def normalise(
    images: Tensor, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor, dtype: torch.dtype
) -> Tensor:
    """(images / 255 - mean) / std in `dtype`, [n, C, H, W], for `images` [n, C, H, W] in 0..255.

    mean, std: [C], in 0..1 units; the result is computed in at least float32 and then rounded to `dtype`.

    Example:
        >>> import torch
        >>> from softcell.data import normalise
        >>> images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 1, 1, 3)
        >>> normalise(images, mean=(0.2,), std=(0.4,), dtype=torch.float32)
        tensor([[[[-0.5000,  0.0000,  2.0000]]]])
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    values = images.to(exact)
    num_channels = images.shape[1]
    offset = _per_channel(mean, num_channels, values) * 255
    scale = _per_channel(std, num_channels, values) * 255
    return ((values - offset) / scale).to(dtype)


def _crop_and_flip(images: Tensor, words: Tensor, padding: int, flip: bool, size: tuple[int, int]) -> Tensor:
    """A random window [n, C, *size] of `images` uint8 [n, C, H', W'] with `padding` black pixels around; half mirrored.

    words: hashes int64 [n, streams].

    One gather: exact, in uint8, and on a CPU several times faster than sampling a float grid.
    """
    (num, channels), (height, width) = images.shape[:2], size
    rows = torch.arange(height, device=images.device).expand(num, height)
    columns = torch.arange(width, device=images.device).expand(num, width)
    if flip:
        mirrored = to_integer(words[:, FLIP], 2)[:, None]
        columns = columns + mirrored * (width - 1 - 2 * columns)
    if padding:
        images = F.pad(images, (padding, padding, padding, padding))
    if tuple(images.shape[2:]) != size:
        rows = rows + to_integer(words[:, CROP_Y], images.shape[2] - height + 1)[:, None]
        columns = columns + to_integer(words[:, CROP_X], images.shape[3] - width + 1)[:, None]
    source = rows[:, :, None] * images.shape[3] + columns[:, None, :]
    source = source.view(num, 1, height * width).expand(num, channels, height * width)
    return images.flatten(2).gather(2, source).view(num, channels, height, width)


def _resized_box(words: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(top, left, h, w) of a random resized crop, int64 [n] each, from hash `words` [n, streams].

    Area and log-aspect are uniform; the first of `NUM_TRIES` draws that fits into the image is taken, and
    the whole image (cut to the aspect range) if none does.
    """
    area_low, area_high = AREA_RANGE
    log_low, log_high = math.log(RATIO_RANGE[0]), math.log(RATIO_RANGE[1])
    area = area_low + (area_high - area_low) * to_uniform(words[:, AREA:RATIO])
    ratio = torch.exp(log_low + (log_high - log_low) * to_uniform(words[:, RATIO : RATIO + NUM_TRIES]))
    area = area * (height * width)
    heights, widths = torch.sqrt(area / ratio).round().long(), torch.sqrt(area * ratio).round().long()
    fits = (heights >= 1) & (heights <= height) & (widths >= 1) & (widths <= width)
    # As uint8, because `argmax` does not support bool; of equal values it gives the first.
    first = fits.to(torch.uint8).argmax(dim=1, keepdim=True)
    any_fits = fits.any(dim=1)
    # The whole image where its aspect is allowed, else the largest central box of an allowed aspect.
    full_height = min(height, round(width / RATIO_RANGE[0]))
    full_width = min(width, round(height * RATIO_RANGE[1]))
    box_height = torch.where(any_fits, heights.gather(1, first)[:, 0], full_height)
    box_width = torch.where(any_fits, widths.gather(1, first)[:, 0], full_width)
    top = to_integer(words[:, CROP_Y], height - box_height + 1)
    left = to_integer(words[:, CROP_X], width - box_width + 1)
    top = torch.where(any_fits, top, (height - full_height) // 2)
    left = torch.where(any_fits, left, (width - full_width) // 2)
    return top, left, box_height, box_width


def _pixel_centres(num: int, device: torch.device) -> Tensor:
    """Centres of `num` pixels across -1..1, float32 [num]."""
    return (2 * torch.arange(num, device=device) + 1) / num - 1


def _resized_crop_and_flip(images: Tensor, words: Tensor, size: tuple[int, int], flip: bool) -> Tensor:
    """Random resized crop of `images` uint8 [n, C, H', W'] to float32 [n, C, *size] in 0..255.

    words: hashes int64 [n, streams].
    """
    num, _, height, width = images.shape
    top, left, box_height, box_width = _resized_box(words, height, width)
    scale_x, scale_y = box_width / width, box_height / height
    centre_x, centre_y = (2 * left + box_width) / width - 1, (2 * top + box_height) / height - 1
    if flip:
        scale_x = scale_x * (1 - 2 * to_integer(words[:, FLIP], 2))
    # The grid is made here, as F.affine_grid is a matrix product: TF32 would blur it, and it refuses n = 0.
    xs = centre_x[:, None] + scale_x[:, None] * _pixel_centres(size[1], images.device)
    ys = centre_y[:, None] + scale_y[:, None] * _pixel_centres(size[0], images.device)
    grid = torch.stack([xs[:, None, :].expand(num, *size), ys[:, :, None].expand(num, *size)], dim=3)
    return F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)


def _jitter(images: Tensor, words: Tensor, strength: float) -> Tensor:
    """Brightness, contrast and (for colour) saturation of `images` float [n, C, H, W] in 0..255.

    words: hashes int64 [n, streams].
    """

    def factor(stream: int) -> Tensor:
        return (1 - strength + 2 * strength * to_uniform(words[:, stream])).view(-1, 1, 1, 1)

    def grey(colours: Tensor) -> Tensor:
        if colours.shape[1] != 3:
            return colours
        red, green, blue = _LUMINANCE
        return red * colours[:, 0:1] + green * colours[:, 1:2] + blue * colours[:, 2:3]

    images = (images * factor(BRIGHTNESS)).clamp(0, 255)
    level = grey(images).mean(dim=(1, 2, 3), keepdim=True)
    images = (level + (images - level) * factor(CONTRAST)).clamp(0, 255)
    if images.shape[1] != 3:
        return images
    level = grey(images)
    return (level + (images - level) * factor(SATURATION)).clamp(0, 255)


def _cutout(images: Tensor, words: Tensor, length: int) -> Tensor:
    """Zero a `length` x `length` square of each of `images` [n, C, H, W]; words: hashes int64 [n, streams]."""
    _, _, height, width = images.shape

    def covered(stream: int, extent: int) -> Tensor:
        start = to_integer(words[:, stream], extent)[:, None] - length // 2
        position = torch.arange(extent, device=images.device)
        return (position >= start) & (position < start + length)

    hole = covered(CUTOUT_Y, height)[:, None, :, None] & covered(CUTOUT_X, width)[:, None, None, :]
    return images.masked_fill(hole, 0)


def augment(
    images: Tensor,
    index: Tensor,
    epoch: int | Tensor,
    seed: int | Tensor,
    settings: Augment,
    mean: Sequence[float] | Tensor,
    std: Sequence[float] | Tensor,
    dtype: torch.dtype = torch.float32,
    size: tuple[int, int] | None = None,
) -> Tensor:
    """Augmented and normalised images, `dtype` [n, C, H, W], for uint8 `images` [n, C, H', W'].

    index: int64 [n], the samples' numbers in their dataset: a sample's result depends only on its pixels,
        its number, `seed` and `epoch` (ints, or 0-d integer tensors), never on the rest of the batch.
    mean, std: [C], in 0..1 units.
    size: output (H, W) of a resized crop or a window, (H', W') when None; other settings never change the size.

    Nothing synchronises with the device. For CUDA-graph capture, pass `epoch` as a 0-d tensor on the device.

    Example:
        >>> import torch
        >>> from softcell.data import Augment, augment
        >>> images = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
        >>> settings = Augment(crop_padding=2, flip=True)
        >>> both = augment(images, torch.tensor([7, 9]), 0, 1, settings, mean=(0.5,) * 3, std=(0.25,) * 3)
        >>> alone = augment(images[1:], torch.tensor([9]), 0, 1, settings, mean=(0.5,) * 3, std=(0.25,) * 3)
        >>> torch.equal(both[1:], alone)  # an image does not depend on the rest of its batch
        True
    """
    if size is not None and size != tuple(images.shape[2:]) and not settings.from_stored:
        raise UserError(
            f"only resized_crop and window change the size, but got images of {tuple(images.shape[2:])} and "
            f"size={size}; set one of them or fetch the images at that size"
        )
    target = size or (images.shape[2], images.shape[3])
    if settings == Augment():
        return normalise(images, mean, std, dtype)
    words = hash_words(seed, epoch, index, _NUM_STREAMS_RESIZED if settings.resized_crop else _NUM_STREAMS)
    if settings.resized_crop:
        images = _resized_crop_and_flip(images, words, target, settings.flip)
    elif settings.crop_padding or settings.flip or settings.window:
        images = _crop_and_flip(images, words, settings.crop_padding, settings.flip, target)
    if settings.jitter:
        images = _jitter(images.float(), words, settings.jitter)
    result = normalise(images, mean, std, dtype)
    return _cutout(result, words, settings.cutout) if settings.cutout else result
