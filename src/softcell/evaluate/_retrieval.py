"""Zero-shot retrieval: a network learns an embedding from some classes and is tested on others.

The first half of the classes is seen: all their images are for training. The second half is unseen: each of its images
is a query, for which the nearest other images are found. Recall@k is the share of queries with an image of their own
class among the k nearest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.data import Batch, Dataset, Images
from softcell.data.batches import Feeds
from softcell.data.images import gathered
from softcell.engine.distributed import World
from softcell.engine.optim import apply_gradients
from softcell.engine.reduce import gradients_of
from softcell.errors import UserError
from softcell.nn.objective import ProxyNCA

RANKS = (1, 2, 4, 8)
_BLOCK = 512  # queries whose distances to all others are held at once


def num_seen(dataset: Dataset) -> int:
    """The number of classes for training: the first half."""
    if dataset.num_classes < 4:
        raise UserError(
            f"zero-shot retrieval needs at least 4 classes, 2 for training and 2 for queries, but {dataset.name} has "
            f"{dataset.num_classes}"
        )
    return dataset.num_classes // 2


def zero_shot(dataset: Dataset) -> Dataset:
    """The same images divided by class: seen classes for training, unseen classes as the sealed test set.

    The test set of the classifier is divided in the same way: no image of an unseen class is used for training, and
    none of a seen class is a query.
    """
    seen = num_seen(dataset)
    images = [part for part in (dataset.train, dataset.test) if part is not None]

    def of(is_test: bool) -> Images:
        chosen = [torch.nonzero((part.labels.cpu() >= seen) == is_test).flatten() for part in images]
        return gathered(list(zip(images, chosen, strict=True)), is_test=is_test)

    known, asked = of(False), of(True)
    if len(known) < 2 or len(asked) < 2:
        raise UserError(
            f"zero-shot retrieval needs at least 2 images of the first {seen} classes and 2 of the others, but "
            f"{dataset.name} has {len(known)} and {len(asked)}"
        )
    source = (
        f"{dataset.source}; zero-shot: all {len(known)} images of the first {seen} classes for training, all "
        f"{len(asked)} of the other {dataset.num_classes - seen} for queries"
    )
    return replace(dataset, train=known, test=asked, source=source)


def retrieval_step(
    network: nn.Module,
    criterion: ProxyNCA,
    optimiser: torch.optim.Optimizer,
    images: Tensor,
    labels: Tensor,
    world: World,
    clip: float,
    also: Sequence[Tensor] = (),
) -> Tensor:
    """One step of network and proxies; returns the loss []. Nothing synchronises with the host.

    images [n, c, h, w]; labels int64 [n]. also: tensors that are averaged over the ranks together with the gradients.
    """
    loss: Tensor = criterion(network(images), labels)
    parameters = [*network.parameters(), *criterion.parameters()]
    found = gradients_of(loss, parameters, world, also=also)
    apply_gradients(optimiser, parameters, found.means, world, clip, averaged=True)
    return loss.detach()


@torch.no_grad()
def recall_at(embeddings: Tensor, labels: Tensor, ranks: Sequence[int] = RANKS) -> dict[int, float]:
    """Recall@k by cosine similarity, every image a query against all others; embeddings [n, d], labels [n].

    Exact: similarities in float64. Of several equally near images, the one with the lower number counts as nearer.
    """
    n = len(labels)
    if n < 2:
        raise UserError(f"retrieval needs at least 2 images, but got {n}")
    x = F.normalize(embeddings.double(), dim=1)
    never = max(n, *ranks)
    first = torch.full((n,), never, dtype=torch.int64, device=x.device)  # place of the nearest of the same class
    for start in range(0, n, _BLOCK):
        queries = torch.arange(start, min(n, start + _BLOCK), device=x.device)
        near = x[queries] @ x.T
        near[torch.arange(len(queries), device=x.device), queries] = -torch.inf  # never itself
        order = torch.argsort(near, dim=1, descending=True, stable=True)[:, : n - 1]
        right = labels[order] == labels[queries][:, None]
        # As uint8, because `argmax` does not support bool; of equal values it gives the first.
        first[queries] = torch.where(right.any(1), right.to(torch.uint8).argmax(1), never)
    return {k: float((first < k).double().mean()) for k in ranks}


@torch.no_grad()
def embed(network: nn.Module, batches: Iterable[Batch]) -> tuple[Tensor, Tensor]:
    """Embeddings [n, d] and labels [n] of all images, in eval mode."""
    network.eval()
    found = [(network(batch.images), batch.labels) for batch in batches if len(batch.labels)]
    return torch.cat([x for x, _ in found]), torch.cat([y for _, y in found])


def measure_retrieval(network: nn.Module, dataset: Dataset, feeds: Feeds) -> tuple[dict[int, float], int]:
    """Recall over all images of unseen classes of a `zero_shot` dataset, and their number."""
    assert dataset.test is not None
    embeddings, labels = embed(network, feeds.plain(dataset.test).epoch(0))
    return recall_at(embeddings, labels), len(labels)
