"""Batches for one run: the settings that all of its loaders share, said once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from softcell.data.augment import Augment
from softcell.data.batches import Batches
from softcell.data.dataset import Dataset
from softcell.data.images import Images

_PIXELS_AT_ONCE = 256 * 32 * 32


@dataclass(frozen=True, slots=True)
class Feeds:
    """Makes `Batches` of a dataset on one device for one rank."""

    dataset: Dataset
    batch_size: int
    seed: int
    device: torch.device
    dtype: torch.dtype
    rank: int = 0
    world: int = 1

    def training(self, indices: Tensor, augment: Augment, *, stream: int = 0) -> Batches:
        """Shuffled, augmented batches of training images; `stream` keeps the orders of two loaders apart."""
        return self._batches(self.dataset.train, indices, self.seed * 16 + stream, augment, training=True)

    def plain(self, images: Images, indices: Tensor | None = None) -> Batches:
        """Every image once, in order, as it is."""
        chosen = torch.arange(len(images)) if indices is None else indices
        return self._batches(images, chosen, self.seed, None, training=False)

    def _plain_size(self, images: Images) -> int:
        """How many images are looked at together: on a GPU enough to fill it, as no gradient keeps anything."""
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


def first_images(dataset: Dataset, number: int) -> Tensor:
    """The first training images [n, c, h, w], normalised."""
    feeds = Feeds(dataset, number, 0, torch.device("cpu"), torch.float32)
    return next(iter(feeds.plain(dataset.train, torch.arange(number)).epoch(0))).images
