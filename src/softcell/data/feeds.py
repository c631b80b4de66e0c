"""Batches for one run: the settings that all of its loaders share, said once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from softcell.data.augment import Augment
from softcell.data.batches import Batches
from softcell.data.dataset import Dataset
from softcell.data.images import Images


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

    def _batches(
        self, images: Images, indices: Tensor, seed: int, augment: Augment | None, *, training: bool
    ) -> Batches:
        return Batches(
            images,
            indices,
            self.batch_size,
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
