"""A random part of the classes of a dataset: 100 of ImageNet's 1,000, as searches of several papers take."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from softcell.data.dataset import Dataset
from softcell.data.folder import Scan
from softcell.data.images import Images, gathered
from softcell.errors import UserError


@dataclass(frozen=True, slots=True)
class SomeClasses:
    """`number` classes, drawn at random by `seed`; every seed draws its own."""

    number: int
    seed: int = 0

    def draw(self, classes: Sequence[str], where: str) -> list[int]:
        """Which of the classes are taken, in their own order."""
        if not 2 <= self.number <= len(classes):
            raise UserError(
                f"`2 <= classes <= {len(classes)}` must hold, the number of classes of {where}, but got "
                f"classes={self.number}; leave it out for all of them"
            )
        generator = torch.Generator().manual_seed(self.seed)
        return sorted(torch.randperm(len(classes), generator=generator)[: self.number].tolist())

    def about(self, total: int) -> str:
        return f"{self.number} of {total} classes, drawn with seed {self.seed}"


def with_some_classes(dataset: Dataset, some: SomeClasses) -> Dataset:
    """The images of some classes, numbered from 0 in their own order; mean and std stay those of all."""
    taken = some.draw(dataset.classes, dataset.name)
    return replace(
        dataset,
        classes=tuple(dataset.classes[number] for number in taken),
        train=_among(dataset.train, taken),
        test=None if dataset.test is None else _among(dataset.test, taken),
        source=f"{dataset.source}; {some.about(len(dataset.classes))}",
    )


def scan_some_classes(part: Scan, taken: Sequence[int]) -> Scan:
    """The same for files that have not been decoded yet."""
    kept = part.take(np.flatnonzero(np.isin(part.labels, taken)))
    numbers = _renumbered(torch.from_numpy(kept.labels), taken)
    return replace(kept, classes=tuple(part.classes[number] for number in taken), labels=numbers.numpy())


def _among(images: Images, taken: Sequence[int]) -> Images:
    labels = images.labels.cpu()
    found = gathered([(images, torch.isin(labels, torch.tensor(taken)).nonzero().squeeze(1))], is_test=images.is_test)
    found.labels = _renumbered(found.labels, taken)
    return found


def _renumbered(labels: Tensor, taken: Sequence[int]) -> Tensor:
    """Labels int64 [n], all of them among the sorted `taken`, to their places in it."""
    return torch.searchsorted(torch.tensor(taken), labels)
