"""What a step minimises: a module that maps (network, images, labels) to a loss.

An objective sees a network only as `features` and `head`, so the same one serves a supernet under a mix and a derived
network, and it may have its own modules (a decoder, a frozen teacher).

**Context auto-regression** (full-attention NAS, §III-C): a network learns to fill in hidden parts of an image. Several
smaller, possibly overlapping rectangles are hidden, up to a quarter of the image in total. The network's features of
what is left are decoded by a series of up-sampling layers, and the L1 distance to the true content is taken only over
the hidden pixels. No labels are needed, so every method in every space can learn from it.

The paper says only "several smaller, possibly overlapping, random masks [...] that cover up to 1/4 of the
image". Our choices: 2 to 8 rectangles; each of m has 1/(4m) of the image's area, so that their union is at most a
quarter; a rectangle may cross the border, where it is cut off, so that all pixels are hidden equally often;
hidden pixels are 0, the mean colour of normalised images.

**Attention transfer** (NOS, Eq 6, 8 and 9; Zagoruyko, Komodakis: Paying More Attention to Attention, ICLR 2017): a
student learns to attend where a frozen teacher attends. At each stage j the squares of a feature map are summed over
channels, flattened and normalised; student and teacher are compared position by position:

    x^j = vec(Σ_i |F^j(·,·,i)|²)            q^j = x^j / ‖x^j‖₂
    literal (Eq 6)     ½ Σ_j ‖q_S^j - q_T^j‖₂, mean over the batch
    mean-square        ½ Σ_j mean over batch and positions of (q_S^j - q_T^j)²

Deviation: the default is the mean square, as in the released code of attention transfer. With λ = 1e3 the literal norm
swamps the cross-entropy: its gradient is thousands of times larger.

`Guided` adds λ times this to any objective, so that every method in every space can be guided, in every loss it learns
from (Eq 8 and 9). The teacher runs once per batch, without gradients, for any number of stages.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.errors import UserError
from softcell.nn.exact import exact_product
from softcell.nn.norm import BatchNorm2d
from softcell.nn.stochastic import uniform_for_batch


class Features(Protocol):
    """A network in two halves."""

    def features(self, x: Tensor) -> list[Tensor]:
        """[n, c, h, w] to one feature map per stage."""

    def head(self, features: Tensor) -> Tensor:
        """The last feature map to logits [n, classes]."""


class Evaluated(NamedTuple):
    """The mean loss over the batch [], and logits [n, classes] where the objective makes any.

    Example:
        >>> import torch
        >>> from softcell.nn import Evaluated
        >>> evaluated = Evaluated(loss=torch.tensor(0.5), logits=None)  # an objective without classes
        >>> evaluated.loss
        tensor(0.5000)
    """

    loss: Tensor
    logits: Tensor | None


class Objective(nn.Module, ABC):
    """`supervised`: whether it learns from labels, so that accuracy is meaningful.

    Example:
        >>> import torch
        >>> from softcell.nn import Evaluated, Objective
        >>> class SmallFeatures(Objective):
        ...     supervised = False
        ...     def forward(self, network, images, labels):
        ...         return Evaluated(network.features(images)[-1].square().mean(), None)
        >>> class Doubles:
        ...     def features(self, x):
        ...         return [2 * x]
        >>> SmallFeatures()(Doubles(), torch.ones(1, 1, 2, 2), torch.tensor([0])).loss
        tensor(4.)
    """

    supervised: ClassVar[bool] = True

    @abstractmethod
    def forward(self, network: Features, images: Tensor, labels: Tensor) -> Evaluated:
        """images [n, c, h, w], labels [n]."""

    def gauges(self) -> dict[str, Tensor]:
        """By name of a metric its sum over an epoch's batches and their number [2], added to in place.

        The search zeroes them before an epoch, saves them within one, and records the means over all processes.
        """
        return {}


class CrossEntropy(Objective):
    """Classification, with optional label smoothing.

    Example:
        >>> import torch
        >>> from softcell.nn import CrossEntropy
        >>> class Untrained:
        ...     def features(self, x):
        ...         return [x]
        ...     def head(self, features):
        ...         return torch.zeros(len(features), 10)
        >>> loss, logits = CrossEntropy()(Untrained(), torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 3]))
        >>> round(loss.item(), 4)  # ln 10: ten equally likely classes
        2.3026
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.label_smoothing = label_smoothing

    def forward(self, network: Features, images: Tensor, labels: Tensor) -> Evaluated:
        logits = network.head(network.features(images)[-1])
        return Evaluated(F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing), logits)


class ProxyNCA(nn.Module):
    """Proxy-NCA: pulls images to the proxy of their class and away from all others.

    Movshovitz-Attias et al.: No Fuss Distance Metric Learning using Proxies, ICCV 2017. With embeddings x and proxies
    p, all normalised to length 1, and squared distances d, Eq 6:

        L(x, y) = -log( exp(-d(x, p_y)) / Σ_{z ≠ y} exp(-d(x, p_z)) )

    The right class is not in the denominator, so the loss can be negative. One proxy [d] per class.
    """

    def __init__(self, num_classes: int, embedding: int) -> None:
        super().__init__()
        if num_classes < 2:
            raise UserError(f"Proxy-NCA needs at least 2 classes, but got {num_classes}")
        self.proxies = nn.Parameter(torch.randn(num_classes, embedding))

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Embeddings [n, d] and labels [n] to the mean loss []."""
        exact = torch.promote_types(embeddings.dtype, torch.float32)
        x, proxies = F.normalize(embeddings.to(exact), dim=1), F.normalize(self.proxies.to(exact), dim=1)
        near = 2.0 * exact_product(x, proxies.T) - 2.0  # -d(x, p) of vectors of length 1
        own = F.one_hot(labels, proxies.shape[0]).bool()
        others = near.masked_fill(own, -torch.inf)
        return (torch.logsumexp(others, 1) - near.masked_fill(~own, 0.0).sum(1)).mean()


MIN_MASKS, MAX_MASKS = 2, 8
COVERED = 4
"""Masks hide at most 1 / COVERED of an image."""
STRETCH = 2.0
"""The sides of a rectangle are at most this unequal."""
_NUMBERS = 3  # random numbers of a rectangle: its shape, its row, its column
MIN_WIDTH = 16


def rectangles(numbers: Tensor, height: int, width: int) -> Tensor:
    """Uniform numbers [n, 1 + 3 · most] to rectangles int64 [n, most, 4]: top, left, height, width; 0 high: none.

    The top of a rectangle is uniform over all rows at which it still reaches into the image. So each row is covered
    with probability high / (height + high - 1), those at the border too; likewise for columns.
    """
    most = (numbers.shape[1] - 1) // _NUMBERS
    pixels = height * width // COVERED
    if pixels < MIN_MASKS:
        least = COVERED * MIN_MASKS
        raise UserError(f"context auto-regression needs images of at least {least} pixels, got {height}x{width}")
    choices = min(most, pixels) - MIN_MASKS + 1
    count = MIN_MASKS + (numbers[:, :1] * choices).long().clamp(max=choices - 1)  # [n, 1]
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
    return covered(rectangles(uniform_for_batch(images, 1 + _NUMBERS * MAX_MASKS), height, width), height, width)


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
            narrower = max(MIN_WIDTH, channels // 2)
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
    """L1 on hidden values; returns no logits.

    stages: shapes (channels, height, width) of the network's feature maps, largest first. image: shape of an image.
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


Form = Literal["mean-square", "norm"]
Teacher = Callable[[Tensor], Sequence[Tensor]]
"""Images [n, c, h, w] to feature maps [n, c_j, h_j, w_j], one per stage or more."""


def attention_vector(features: Tensor) -> Tensor:
    """[n, c, h, w] to normalised attention [n, h·w], at least in float32."""
    features = features.to(torch.promote_types(features.dtype, torch.float32))
    x = features.square().sum(dim=1).flatten(1)
    length: Tensor = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    # A map of zeros has no direction: its attention is 0, not NaN.
    return x / length.clamp(min=1e-12)


def transfer_loss(students: Sequence[Tensor], teachers: Sequence[Tensor], form: Form) -> Tensor:
    """Eq 6 from attention vectors [n, h_j·w_j] of paired stages."""
    total = students[0].new_zeros(())
    for mine, theirs in zip(students, teachers, strict=True):
        if form == "norm":
            # Eq 6 as printed.
            total = total + torch.linalg.vector_norm(mine - theirs, dim=1).mean()
        else:
            # Deviation: the mean square; the reason is at the top of this file.
            total = total + (mine - theirs).square().mean()
    return 0.5 * total


def pair_stages(student: Sequence[tuple[int, int]], teacher: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """For every stage of the student the last map of the teacher with the same height and width."""
    pairs = []
    for size in student:
        found = [number for number, other in enumerate(teacher) if other == size]
        if not found:
            mine, theirs = (", ".join(f"{h}x{w}" for h, w in sizes) for sizes in (student, teacher))
            raise UserError(
                f"guidance compares maps of the same size, but the teacher has none of {size[0]}x{size[1]}: stages of "
                f"the searched network are {mine}, maps of the teacher {theirs}; use a teacher that halves its maps at "
                "the same stages, or other images"
            )
        pairs.append(found[-1])
    return tuple(pairs)


class Guided(Objective):
    """Another objective plus `weight` (λ) times attention transfer from a frozen teacher.

    `pairs`: the number of the teacher's map for each stage of the student (`pair_stages`). The teacher is not a
    submodule: it is not saved, moved or trained with this module.
    """

    sums: Tensor

    def __init__(
        self, objective: Objective, teacher: Teacher, pairs: Sequence[int], weight: float, form: Form = "mean-square"
    ) -> None:
        super().__init__()
        self.objective = objective
        self.weight, self.form, self.pairs = weight, form, tuple(pairs)
        self._teacher = [teacher]  # in a list, so that it is not a submodule
        self._seen: list[tuple[Tensor, int, list[Tensor]]] = []
        # Sum of L_AT over batches, and their number; zeroed by the search before an epoch.
        self.register_buffer("sums", torch.zeros(2, dtype=torch.float64), persistent=False)

    def forward(self, network: Features, images: Tensor, labels: Tensor) -> Evaluated:
        task, guide = self.parts(network, images, labels)
        with torch.no_grad():
            self.sums += torch.stack((guide.double(), torch.ones_like(guide, dtype=torch.float64)))
        return Evaluated(task.loss + self.weight * guide, task.logits)

    def gauges(self) -> dict[str, Tensor]:
        return {"guide_loss": self.sums}

    def parts(self, network: Features, images: Tensor, labels: Tensor) -> tuple[Evaluated, Tensor]:
        """The result of the other objective, and L_AT [] without its weight."""
        recorded = _Recorded(network)
        task: Evaluated = self.objective(recorded, images, labels)
        students = [attention_vector(stage) for stage in recorded.of(images)]
        return task, transfer_loss(students, self._teach(images), self.form)

    def _teach(self, images: Tensor) -> list[Tensor]:
        """The teacher's attention for a batch; a batch that was just seen (second order) is not run again.

        A batch is recognised as the same unchanged tensor: a captured step has its own tensors.
        """
        for known, version, vectors in self._seen:
            if known is images and version == images._version:
                return vectors
        with torch.no_grad():
            maps = self._teacher[0](images)
            vectors = [attention_vector(maps[number]) for number in self.pairs]
        # Two batches: a second-order step alternates between one for training and one for validation.
        self._seen = [*self._seen[-1:], (images, images._version, vectors)]
        return vectors


class _Recorded:
    """A network that keeps its last features, so that objective and guidance share one pass."""

    def __init__(self, network: Features) -> None:
        self._network = network
        self._last: tuple[Tensor, list[Tensor]] | None = None

    def features(self, x: Tensor) -> list[Tensor]:
        maps = self._network.features(x)
        self._last = x, maps
        return maps

    def head(self, features: Tensor) -> Tensor:
        return self._network.head(features)

    def of(self, x: Tensor) -> list[Tensor]:
        """The features of x; those of the last pass where it was over x itself."""
        if self._last is not None and self._last[0] is x:
            return self._last[1]
        return self._network.features(x)
