"""How well scores of untrained networks rank the cells of NAS-Bench-201: Kendall's and Spearman's correlation.

    python -m studies.zero_cost --table nb201.csv.gz --data cifar10 --data-root ~/data --cells 200
    python -m studies.zero_cost --table nb201.csv.gz --data cifar10 --data-root ~/data --proxies snip params

Cells are sampled at random (seeds 0, 1, ...); networks have the benchmark's size and the weights of --seed. The error
of a correlation is its standard deviation over 1,000 bootstrap samples of the cells. Nothing is chosen using the table.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from softcell.arch import sample
from softcell.data import load
from softcell.data.batches import Batch, first_batch
from softcell.evaluate.nb201 import OPERATIONS, Nb201Table, kendall, load_table
from softcell.methods.proxies import PROXIES, Proxy, score_untrained
from softcell.search.samplers import score_architecture
from softcell.spaces import Space, build_space

RESAMPLED = 1000


class Correlation(NamedTuple):
    """A rank correlation and its standard error over bootstrap samples of the cells."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ± {self.error:.3f}"


def scored(
    table: Nb201Table,
    space: Space,
    proxy: Proxy,
    batch: Batch,
    num_classes: int,
    cells: int,
    column: str,
    seed: int = 0,
) -> tuple[list[float], list[float]]:
    """The scores of `cells` random cells, whose networks have the weights of `seed`, and their accuracies."""
    drawn = [sample(space.layout(), seed) for seed in range(cells)]

    # A score of -inf ranks last.
    def score(network: nn.Module, images: Tensor, labels: Tensor) -> float:
        return max(score_untrained(network, proxy, images, labels), -1e300)

    scores = [score_architecture(space, one, score, batch.images, batch.labels, num_classes, seed) for one in drawn]
    accuracies = [table.lookup(genotype)[column] for genotype in drawn]
    return scores, accuracies


def spearman(scores: Sequence[float], accuracies: Sequence[float]) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(scores, accuracies).statistic)


def with_error(
    correlation: Callable[[Sequence[float], Sequence[float]], float],
    scores: Sequence[float],
    accuracies: Sequence[float],
) -> Correlation:
    """A correlation of all cells, and its standard deviation over samples of the cells with replacement."""
    rng = random.Random(0)
    found = []
    for _ in range(RESAMPLED):
        kept = rng.choices(range(len(scores)), k=len(scores))
        found.append(correlation([scores[i] for i in kept], [accuracies[i] for i in kept]))
    return Correlation(correlation(scores, accuracies), statistics.stdev(found))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", required=True, help="CSV file of NAS-Bench-201")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-root")
    parser.add_argument("--cells", type=int, default=200)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--column", default="cifar10_test")
    parser.add_argument("--seed", type=int, default=0, help="of the networks' weights")
    parser.add_argument("--proxies", nargs="+", default=PROXIES, choices=PROXIES, metavar="NAME", help="default: all")
    given = parser.parse_args(arguments)
    dataset = load(given.data, given.data_root, None)
    batch, space = first_batch(dataset, given.images), build_space("nb201", {"candidates": OPERATIONS})
    table = load_table(given.table)
    for proxy in given.proxies:
        began = time.perf_counter()
        found = scored(table, space, proxy, batch, dataset.num_classes, given.cells, given.column, given.seed)
        took = (time.perf_counter() - began) / given.cells
        tau, rho = with_error(kendall, *found), with_error(spearman, *found)
        print(
            f"{proxy}: Kendall {tau}, Spearman {rho} with {given.column} over {given.cells} cells, "
            f"weights of seed {given.seed}, {given.images} images, {took:.2f} s a network on "
            f"{torch.get_num_threads()} threads",
            flush=True,
        )


if __name__ == "__main__":
    main()
