"""How well scores of untrained networks rank the cells of NAS-Bench-201: Kendall's and Spearman's correlation.

    python -m studies.zero_cost --table nb201.csv.gz --data cifar10 --data-root ~/data --cells 200
    python -m studies.zero_cost --table nb201.csv.gz --data cifar10 --data-root ~/data --proxies snip params

Cells are sampled at random (seeds 0, 1, ...); networks have the benchmark's size. Nothing is chosen using the table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from softcell.arch import sample
from softcell.data import load
from softcell.data.batches import Batch, first_batch
from softcell.evaluate.nb201 import OPERATIONS, Nb201Table, kendall, load_table
from softcell.methods.proxies import PROXIES, Proxy, score_untrained
from softcell.search.samplers import score_architecture
from softcell.spaces import Space, build_space


def correlations(
    table: Nb201Table, space: Space, proxy: Proxy, batch: Batch, num_classes: int, cells: int, column: str
) -> tuple[float, float]:
    """Kendall's tau-b and Spearman's rho between a score and an accuracy of the table, over `cells` random cells.

    Every network has the weights of seed 0.
    """
    from scipy.stats import spearmanr

    drawn = [sample(space.layout(), seed) for seed in range(cells)]

    # A score of -inf ranks last.
    def score(network: nn.Module, images: Tensor, labels: Tensor) -> float:
        return max(score_untrained(network, proxy, images, labels), -1e300)

    scores = [score_architecture(space, one, score, batch.images, batch.labels, num_classes, 0) for one in drawn]
    accuracies = [table.lookup(genotype)[column] for genotype in drawn]
    return kendall(scores, accuracies), float(spearmanr(scores, accuracies).statistic)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", required=True, help="CSV file of NAS-Bench-201")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--data-root")
    parser.add_argument("--cells", type=int, default=200)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--column", default="cifar10_test")
    parser.add_argument("--proxies", nargs="+", default=PROXIES, choices=PROXIES, metavar="NAME", help="default: all")
    given = parser.parse_args(arguments)
    dataset = load(given.data, given.data_root, None)
    batch, space = first_batch(dataset, given.images), build_space("nb201", {"candidates": OPERATIONS})
    table = load_table(given.table)
    for proxy in given.proxies:
        began = time.perf_counter()
        tau, rho = correlations(table, space, proxy, batch, dataset.num_classes, given.cells, given.column)
        took = (time.perf_counter() - began) / given.cells
        print(
            f"{proxy}: Kendall {tau:.3f}, Spearman {rho:.3f} with {given.column} over {given.cells} cells, "
            f"{given.images} images, {took:.2f} s a network on {torch.get_num_threads()} threads",
            flush=True,
        )


if __name__ == "__main__":
    main()
