"""Batches of augmented images in an order that is a pure function of (seed, epoch, indices)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from softcell.data.augment import Augment, augment, normalise
from softcell.data.dataset import Dataset
from softcell.data.hashing import absorb, permutation
from softcell.data.images import Files, Images, Resident, centre_view
from softcell.data.splits import check_readable
from softcell.errors import UserError
from softcell.kernels.backend import runs_triton, triton_kernels
from softcell.machine import usable_cores


@dataclass(frozen=True, slots=True)
class Batch:
    """images: float [n, C, H, W], normalised. labels: int64 [n]. index: int64 [n], numbers in the dataset.

    Example:
        >>> import torch
        >>> from softcell.data import Batch
        >>> batch = Batch(images=torch.zeros(4, 1, 8, 8), labels=torch.tensor([0, 1, 2, 3]), index=torch.arange(4))
        >>> batch.images.shape[0] == len(batch.labels)
        True
    """

    images: Tensor
    labels: Tensor
    index: Tensor


Draft = tuple[Tensor, ...]
"""What a batch is made from, on the device: (index [n], epoch []), preceded by (pixels, labels) if read from files."""


class SmallDataWarning(UserWarning):
    """There are fewer samples than one batch, so batches are smaller than requested."""


class _BatchReader(TorchDataset[Tensor | str]):
    """Read by worker processes: item k is the stored pixels of batch k, or the message of a UserError.

    A message instead of the exception, because a DataLoader would bury it under the worker's traceback.
    """

    def __init__(self, images: Files, slices: list[Tensor]) -> None:
        self.images = images
        self.slices = slices

    def __getitem__(self, number: int) -> Tensor | str:
        try:
            return self.images.read(self.slices[number])
        except UserError as error:
            return str(error)


def _unchanged(item: Any) -> Any:
    return item


class Batches:
    """One rank's share of the batches of an epoch.

    images: where the pixels come from. indices: int64 [m], the samples to use, numbered as in `images`.
    batch_size: of the *global* batch; each of `world` ranks gets its contiguous slice of every batch.
    augment: None for evaluation, which sees the plain centre view.
    drop_last: leave out a short last batch (training). With fewer samples than one batch, the batch shrinks
        to the largest multiple of `world` there is, with a warning: small data must still train.
        Without it (evaluation) the ranks together see every sample exactly once; their slices of the last
        batch may differ by one and may be empty, so that all ranks make equally many steps.
    workers: processes that decode `Files`; None for one per available core, at most 8; 0 to decode in this
        process. Resident images need none.

    Example:
        >>> import torch
        >>> from softcell.data import Batches, load
        >>> digits = load("digits")
        >>> batches = Batches(
        ...     digits.train, torch.arange(100), batch_size=32, seed=0, mean=digits.mean, std=digits.std,
        ...     augment=digits.augment, shuffle=True, device="cpu", drop_last=True,
        ... )
        >>> [tuple(batch.images.shape) for batch in batches.epoch(0)]
        [(32, 1, 8, 8), (32, 1, 8, 8), (32, 1, 8, 8)]
    """

    def __init__(
        self,
        images: Images,
        indices: Tensor,
        batch_size: int,
        *,
        seed: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        augment: Augment | None,
        shuffle: bool,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
        rank: int = 0,
        world: int = 1,
        drop_last: bool,
        workers: int | None = None,
    ) -> None:
        _check(batch_size, indices, len(images), rank, world)
        self.device = torch.device(device)
        self.images = images.to(self.device) if isinstance(images, Resident) else images
        self.indices = indices.cpu()
        self.batch_size = _shrunk(batch_size, len(indices), world) if drop_last else batch_size
        self.seed, self.shuffle, self.dtype = seed, shuffle, dtype
        self.rank, self.world = rank, world
        self.augment = augment
        # Made once: a copy from the host in every step would be slow and could not be captured.
        self._mean = torch.tensor(mean, device=self.device)
        self._std = torch.tensor(std, device=self.device)
        self._offset, self._scale = 255 * self._mean, 255 * self._std
        self._seed = torch.tensor(absorb(0, seed), device=self.device)
        self._workers = min(8, usable_cores()) if workers is None else workers
        whole, rest = divmod(len(indices), self.batch_size)
        self.num_batches = whole + (1 if rest and not drop_last else 0)

    def order(self, epoch: int) -> Tensor:
        """All samples in the order of this epoch, int64 [m] on the CPU, for all ranks together."""
        if not self.shuffle:
            return self.indices
        return self.indices[permutation(self.seed, epoch, len(self.indices), "order")]

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of one epoch from number `start` on, identical to those of a full pass."""
        return (self.finish(*draft) for draft in self.drafts(epoch, start))

    def drafts(self, epoch: int, start: int = 0) -> Iterator[Draft]:
        """The same batches before `finish`, which a captured step calls itself: nothing is launched here."""
        if not 0 <= start <= self.num_batches:
            raise UserError(
                f"0 <= start <= num_batches must hold, but got start={start}, "
                f"num_batches={self.num_batches}; was the checkpoint made with other data or batch size?"
            )
        order = self.order(epoch)
        slices = [self._slice(order, number) for number in range(start, self.num_batches)]
        number = torch.tensor(epoch, device=self.device)
        if isinstance(self.images, Files):
            return self._from_files(self.images, slices, number)
        return self._from_memory(slices, number)

    @property
    def sizes(self) -> set[int]:
        """The numbers of images in this rank's parts of batches; a short last batch has fewer, or none."""
        return {len(self._slice(self.indices, number)) for number in (0, self.num_batches - 1)}

    def blank(self, size: int) -> Tensor:
        """Black images [size, C, H, W] on the device, laid out as those of a batch."""
        return torch.zeros(size, *self.images.shape, dtype=self.dtype, device=self.device)

    @property
    def draft_size(self) -> int:
        """The number of tensors of a draft."""
        return 4 if isinstance(self.images, Files) else 2

    def _slice(self, order: Tensor, number: int) -> Tensor:
        """This rank's part of batch `number`, int64 [n]."""
        batch = order[number * self.batch_size : (number + 1) * self.batch_size]
        return batch[self.rank * len(batch) // self.world : (self.rank + 1) * len(batch) // self.world]

    def finish(self, *draft: Tensor, by_kernel: bool = False) -> Batch:
        """The batch of a draft: pixels and labels gathered where they are resident, augmented, normalised.

        by_kernel: by one Triton kernel, with the same result bit for bit, where it serves (`has_kernel`).
        """
        *given, index, epoch = draft
        if by_kernel and self.has_kernel and isinstance(self.images, Resident):
            labels = self.images.labels.index_select(0, index)  # a dry pass needs true labels
            return Batch(self._finish_by_kernel(self.images, index, epoch), labels, index)
        if isinstance(self.images, Files):
            stored, labels = given
        else:
            stored, labels = self.images.fetch_stored(index), self.images.labels.index_select(0, index)
        settings, shape = self.augment, self.images.shape
        if settings is not None and settings.from_stored:
            pixels = augment(
                stored, index, epoch, self.seed, settings, self._mean, self._std, self.dtype, size=shape[1:]
            )
        elif settings is not None:
            view = centre_view(stored, shape)
            pixels = augment(view, index, epoch, self.seed, settings, self._mean, self._std, self.dtype)
        else:
            pixels = normalise(centre_view(stored, shape), self._mean, self._std, self.dtype)
        return Batch(pixels, labels, index)

    @property
    def has_kernel(self) -> bool:
        """Whether the Triton kernel serves: resident images, cropped, flipped and cut out at most."""
        settings = self.augment
        if settings is None or settings.from_stored or settings.jitter or not isinstance(self.images, Resident):
            return False
        return self.dtype == torch.float32 and runs_triton(self._offset)

    def _finish_by_kernel(self, images: Resident, index: Tensor, epoch: Tensor) -> Tensor:
        """Augmented images [n, C, H, W]."""
        check_readable(images.is_test)
        given = (images.pixels, index, epoch, self._seed, self._offset, self._scale)
        made: Tensor = triton_kernels("batch").augment(*given, self.augment, images.shape)
        return made

    def _from_memory(self, slices: list[Tensor], epoch: Tensor) -> Iterator[Draft]:
        if not slices:
            return
        # One copy of the whole order per epoch, so that a step copies nothing from the host.
        joined = torch.cat(slices).to(self.device)
        for index in torch.split(joined, [len(part) for part in slices]):
            yield index, epoch

    def _from_files(self, images: Files, slices: list[Tensor], epoch: Tensor) -> Iterator[Draft]:
        check_readable(images.is_test)
        on_cuda = self.device.type == "cuda"
        loader = DataLoader(
            _BatchReader(images, slices),
            batch_size=None,
            sampler=range(len(slices)),
            num_workers=min(self._workers, len(slices)),
            collate_fn=_unchanged,
            pin_memory=on_cuda,
            # Its own generator: a DataLoader draws a seed for its workers, and from the global generator that
            # would change every later random number of the run.
            generator=torch.Generator(),
        )
        for index, item in zip(slices, loader, strict=True):
            # For every batch, since the seal may come after the loader's start and its workers do not see it.
            check_readable(images.is_test)
            if isinstance(item, str):
                raise UserError(item)
            labels = images.labels.index_select(0, index)
            if on_cuda:
                index, labels = index.pin_memory(), labels.pin_memory()
            pixels, labels, index = (part.to(self.device, non_blocking=on_cuda) for part in (item, labels, index))
            yield pixels, labels, index, epoch


def _check(batch_size: int, indices: Tensor, num_images: int, rank: int, world: int) -> None:
    if not 0 <= rank < world:
        raise UserError(f"0 <= rank < world must hold, but got rank={rank}, world={world}")
    if batch_size < 1 or batch_size % world:
        raise UserError(
            f"batch_size must be a positive multiple of the number of ranks, but got "
            f"batch_size={batch_size}, world={world}; it is the size of the global batch"
        )
    if indices.dtype != torch.int64 or indices.dim() != 1 or len(indices) == 0:
        raise UserError(
            f"indices must be int64 [m] with m >= 1, but got {indices.dtype} {list(indices.shape)}; "
            "take them from split()"
        )
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= num_images:
        raise UserError(
            f"indices must be in 0..{num_images - 1}, but got {low}..{high}; was the split made for other data?"
        )


def _shrunk(batch_size: int, num_samples: int, world: int) -> int:
    """`batch_size`, or the largest multiple of `world` that `num_samples` allow if they are fewer."""
    if num_samples >= batch_size:
        return batch_size
    size = num_samples // world * world
    if size == 0:
        raise UserError(
            f"training needs at least one sample per rank, but got {num_samples} samples for world={world}; "
            "use fewer ranks or more data"
        )
    warnings.warn(
        f"batch_size={batch_size} is larger than the {num_samples} samples available: using {size}",
        SmallDataWarning,
        stacklevel=3,
    )
    return size


_PIXELS_AT_ONCE = 256 * 32 * 32


@dataclass(frozen=True, slots=True)
class Feeds:
    """Makes the `Batches` of one run: the settings that all of its loaders share."""

    dataset: Dataset
    batch_size: int
    seed: int
    device: torch.device
    dtype: torch.dtype
    rank: int = 0
    world: int = 1

    def training(self, indices: Tensor, augment: Augment, *, stream: int = 0) -> Batches:
        """Shuffled, augmented batches of training images; `stream` keeps the orders of two loaders apart."""
        # Room for 16 streams, so that no loader has the order of one of another seed.
        return self._batches(self.dataset.train, indices, self.seed * 16 + stream, augment, training=True)

    def plain(self, images: Images, indices: Tensor | None = None) -> Batches:
        """Every image once, in order, without augmentation."""
        chosen = torch.arange(len(images)) if indices is None else indices
        return self._batches(images, chosen, self.seed, None, training=False)

    def _plain_size(self, images: Images) -> int:
        """Images per batch without training: on a GPU enough to fill it, since no activations are kept."""
        if self.device.type != "cuda":
            return self.batch_size
        fitting = _PIXELS_AT_ONCE // (images.shape[1] * images.shape[2])
        return max(self.batch_size, fitting // self.world * self.world)

    def _batches(
        self, images: Images, indices: Tensor, seed: int, augment: Augment | None, *, training: bool
    ) -> Batches:
        return Batches(
            images,
            indices,
            self.batch_size if training else self._plain_size(images),
            seed=seed,
            mean=self.dataset.mean,
            std=self.dataset.std,
            augment=augment,
            shuffle=training,
            device=self.device,
            dtype=self.dtype,
            rank=self.rank,
            world=self.world,
            drop_last=training,
        )


def first_batch(dataset: Dataset, number: int) -> Batch:
    """The first training images [n, c, h, w], normalised, with their labels [n]."""
    feeds = Feeds(dataset, number, 0, torch.device("cpu"), torch.float32)
    return next(iter(feeds.plain(dataset.train, torch.arange(number)).epoch(0)))
