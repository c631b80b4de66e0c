"""How many architectures the spaces of NAS-Bench-1Shot1 hold, by three rules.

    raw            operations of all blocks times parents of all nodes
    connected      those of them without loose ends: every block leads to the output
    isomorphic     different graphs: loose ends removed, and blocks that only swapped their places counted once

Published are 6,240, 29,160 and 363,648, without the rule. `python -m softcell.spaces.oneshot1_count` prints them all.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import comb, prod

SPACES = {1: ((1, 2, 2, 2, 2), 6240), 2: ((1, 1, 2, 2, 3), 29160), 3: ((1, 1, 1, 2, 2, 2), 363648)}
"""Parents of blocks 1, 2, … and of the output; the published count."""
OPERATIONS = 3


@dataclass(frozen=True, slots=True)
class Counts:
    raw: int
    connected: int
    isomorphic: int


def raw_count(parents: tuple[int, ...]) -> int:
    """In closed form; node i (from 1) has i nodes before it."""
    operations: int = OPERATIONS ** (len(parents) - 1)
    return operations * prod(comb(i + 1, n) for i, n in enumerate(parents))


def counts(parents: tuple[int, ...]) -> Counts:
    """By going through all of them."""
    raw = connected = 0
    labels: dict[object, int] = {}
    graphs: set[tuple[int, ...]] = set()
    output = len(parents)
    for edges in itertools.product(*(itertools.combinations(range(i + 1), n) for i, n in enumerate(parents))):
        kept = _leading(edges, output)
        whole = len(kept) == output - 1
        for ops in itertools.product(range(OPERATIONS), repeat=output - 1):
            raw += 1
            connected += whole
            graphs.add(_canonical(edges, ops, kept, labels))
    return Counts(raw, connected, len(graphs))


def _leading(edges: tuple[tuple[int, ...], ...], output: int) -> tuple[int, ...]:
    """The blocks from which the output is reached; edges[i] are the parents of node i + 1."""
    reached = {output}
    for node in range(output, 0, -1):
        if node in reached:
            reached |= set(edges[node - 1])
    return tuple(node for node in range(1, output) if node in reached)


def _canonical(
    edges: tuple[tuple[int, ...], ...], ops: tuple[int, ...], kept: tuple[int, ...], labels: dict[object, int]
) -> tuple[int, ...]:
    """What isomorphic graphs have in common: labels of nodes, refined by those of parents and children until stable.

    Weisfeiler and Leman's refinement, as NAS-Bench-101 tells its graphs apart; a test checks it by permutations.
    """
    output = len(edges)
    nodes = (0, *kept, output)
    parents = {node: [p for p in edges[node - 1] if p in nodes] if node else [] for node in nodes}
    children: dict[int, list[int]] = {node: [] for node in nodes}
    for node in nodes:
        for parent in parents[node]:
            children[parent].append(node)
    names: dict[int, int] = {0: -1, output: -2, **{block: ops[block - 1] for block in kept}}
    for _ in nodes:
        new = {}
        for node in nodes:
            key = (
                names[node],
                tuple(sorted(names[p] for p in parents[node])),
                tuple(sorted(names[c] for c in children[node])),
            )
            new[node] = labels.setdefault(key, len(labels) + OPERATIONS)
        names = new
    return tuple(sorted(names.values()))


if __name__ == "__main__":
    for number, (own, published) in SPACES.items():
        found = counts(own)
        print(
            f"space {number}: raw {found.raw:,}, without loose ends {found.connected:,}, up to isomorphism "
            f"{found.isomorphic:,}; published {published:,}"
        )
