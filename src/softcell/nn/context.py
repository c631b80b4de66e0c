"""Context auto-regression: a network learns to fill in hidden parts of an image (full-attention NAS, §III-C).

Several smaller, possibly overlapping rectangles of an image are hidden, up to a quarter of it in all. The network's
features of what is left are decoded by a series of up-sampling layers, and the L1 distance to the true content is taken
over the hidden pixels alone. No labels are needed, and the network is seen as `features` only, so that every method in
every space can learn from it.

The paper says only "several smaller, possibly overlapping, random masks [...] that cover up to 1/4 of the
image". Settled here: 2 to 8 rectangles; each of m has 1/(4m) of the image's area, so that their union is a quarter less
what overlaps; a rectangle may lie across the border, where it is cut off, so that all pixels are hidden equally often;
hidden pixels are 0, the mean colour of normalised images.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.errors import UserError
from softcell.nn.norm import BatchNorm2d
from softcell.nn.objective import Evaluated, Features, Objective
from softcell.nn.stochastic import uniform_for_batch

LEAST_MASKS, MOST_MASKS = 2, 8
COVERED = 4
"""At most one part in so many of an image is hidden."""
STRETCH = 2.0
"""The sides of a rectangle are at most this unequal."""
_NUMBERS = 3  # random numbers of a rectangle: its shape, its row, its column
LEAST_WIDTH = 16


def rectangles(numbers: Tensor, height: int, width: int) -> Tensor:
    """Uniform numbers [n, 1 + 3 · most] to rectangles int64 [n, most, 4]: top, left, height, width; 0 high: none.

    The top of a rectangle is uniform over all rows at which it still reaches into the image. So each row is covered
    with probability high / (height + high - 1), those at the border too; columns alike.
    """
    most = (numbers.shape[1] - 1) // _NUMBERS
    pixels = height * width // COVERED
    if pixels < LEAST_MASKS:
        least = COVERED * LEAST_MASKS
        raise UserError(f"context auto-regression needs images of at least {least} pixels, got {height}x{width}")
    choices = min(most, pixels) - LEAST_MASKS + 1
    count = LEAST_MASKS + (numbers[:, :1] * choices).long().clamp(max=choices - 1)  # [n, 1]
    shape, y, x = numbers[:, 1:].unflatten(1, (most, _NUMBERS)).unbind(2)  # type: ignore[no-untyped-call]
    area = pixels // count  # whole pixels, so that m rectangles never cover more than the quarter
    stretch = torch.exp((2.0 * shape - 1.0) * math.log(STRETCH))
    high = torch.minimum(torch.sqrt(area * stretch).round().long().clamp(min=1, max=height), area)
    wide = (area // high).clamp(min=1, max=width)
    top, bottom = _placed(y, high, height)
    left, right = _placed(x, wide, width)
    used = torch.arange(most, device=numbers.device)[None] < count
    return torch.stack([top, left, (bottom - top) * used, (right - left) * used], 2)


def _placed(number: Tensor, length: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Begin and end, within 0..side, of intervals of a length that reach into it by at least one pixel."""
    places = side + length - 1
    begin = torch.minimum((number * places).long(), places - 1) - (length - 1)
    return begin.clamp(min=0), (begin + length).clamp(max=side)


def covered(boxes: Tensor, height: int, width: int) -> Tensor:
    """Rectangles [n, m, 4] to the pixels that at least one of them covers: bool [n, 1, height, width]."""
    top, left, high, wide = (part[..., None] for part in boxes.unbind(2))
    rows, columns = torch.arange(height, device=boxes.device), torch.arange(width, device=boxes.device)
    down, across = (rows >= top) & (rows < top + high), (columns >= left) & (columns < left + wide)
    return (down[..., None] & across[:, :, None]).any(1, keepdim=True)


def draw_masks(images: Tensor) -> Tensor:
    """Random hidden pixels of a batch [n, c, h, w], redrawn at every call: bool [n, 1, h, w]."""
    height, width = images.shape[-2:]
    return covered(rectangles(uniform_for_batch(images, 1 + _NUMBERS * MOST_MASKS), height, width), height, width)


def missing_l1(predicted: Tensor, images: Tensor, hidden: Tensor) -> Tensor:
    """The mean over hidden values of |predicted - images|; maps [n, c, h, w], hidden bool [n, 1, h, w]."""
    exact = torch.promote_types(predicted.dtype, torch.float32)
    apart = (predicted.to(exact) - images.to(exact)).abs() * hidden
    return apart.sum() / (hidden.sum() * images.shape[1])


class Decoder(nn.Module):
    """The last feature map to an image, through a series of up-sampling layers: by 2, 3×3 convolution, norm, ReLU.

    sizes: heights and widths of the feature maps, the image's own first; a step between two that is more than twofold
    is divided up.
    """

    def __init__(self, channels: int, image_channels: int, sizes: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        self.sizes = _steps(sizes)
        layers: list[nn.Module] = []
        for _ in self.sizes:
            narrower = max(LEAST_WIDTH, channels // 2)
            layers.append(
                nn.Sequential(nn.Conv2d(channels, narrower, 3, padding=1, bias=False), BatchNorm2d(narrower), nn.ReLU())
            )
            channels = narrower
        self.layers = nn.ModuleList(layers)
        self.last = nn.Conv2d(channels, image_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        for layer, size in zip(self.layers, self.sizes, strict=True):
            x = layer(F.interpolate(x, size=size, mode="nearest"))
        return self.last(x)  # type: ignore[no-any-return]


def _steps(sizes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The sizes from the smallest map to the image, none more than about twice the one before."""
    ordered = [size for i, size in enumerate(sizes) if i == 0 or size != sizes[i - 1]][::-1]
    found: list[tuple[int, int]] = []
    for (h, w), (height, width) in itertools.pairwise(ordered):
        number = max(1, round(math.log2(max(height / h, width / w))))
        for step in range(number - 1, -1, -1):
            found.append((-(-height // 2**step), -(-width // 2**step)))
    return found


class ContextAutoRegression(Objective):
    """L1 on what is hidden; gives no logits.

    stages: shapes (channels, height, width) of the network's feature maps, the largest first. image: that of an image.
    """

    supervised: ClassVar[bool] = False

    def __init__(self, stages: Sequence[tuple[int, int, int]], image: tuple[int, int, int]) -> None:
        super().__init__()
        sizes = [image[1:], *(stage[1:] for stage in stages)]
        self.decoder = Decoder(stages[-1][0], image[0], sizes)

    def forward(self, network: Features, images: Tensor, labels: Tensor) -> Evaluated:
        hidden = draw_masks(images)
        return Evaluated(missing_l1(self.rebuild(network, images, hidden), images, hidden), None)

    def rebuild(self, network: Features, images: Tensor, hidden: Tensor) -> Tensor:
        """The image predicted from what is not hidden: [n, c, h, w]."""
        seen = images.masked_fill(hidden, 0.0)
        return self.decoder(network.features(seen)[-1])  # type: ignore[no-any-return]
