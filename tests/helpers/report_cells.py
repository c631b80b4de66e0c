"""Cells for the tests of drawings: known, random and arbitrary ones."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from softcell.arch import Cell, Pick

NB201 = "|nor_conv_3x3~0|+|none~0|avg_pool_3x3~1|+|skip_connect~0|nor_conv_1x1~1|nor_conv_3x3~2|"
OPS = (
    "none",
    "max_pool_3x3",
    "skip_connect",
    "sep_conv_5x5",
    "dil_conv_3x3",
    "channel_attention",
    "noise",
    "an_operation_whose_name_is_longer_than_any_label_may_be",
)


def random_cell(seed: int) -> Cell:
    """Any in-degree, several and equal operations per edge, operations on a node itself, nodes without inputs."""
    rng = random.Random(seed)
    inputs, inner = rng.choice([1, 2, 2, 3]), rng.randint(1, 7)
    nodes = range(inputs, inputs + inner)
    picks = [
        Pick(source, target, rng.choice(OPS))
        for target in nodes
        if rng.random() < 0.9
        for source in rng.sample(range(target), rng.randint(0, min(target, 4)))
        for _ in range(rng.choice([1, 1, 1, 2, 3]))
    ]
    picks += [Pick(node, node, rng.choice(OPS)) for node in nodes if rng.random() < 0.1]
    output = tuple(nodes) if rng.random() < 0.7 else (nodes[-1],)
    return Cell(tuple(picks), output)


def chain(layers: int, op: str = "mbconv_e6_k5") -> Cell:
    return Cell(tuple(Pick(i, i + 1, op) for i in range(layers)), (layers,))


names = st.text(max_size=60) | st.sampled_from(OPS)


@st.composite
def cells(draw: st.DrawFn) -> Cell:
    edges = draw(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), names), max_size=14))
    picks = tuple(Pick(min(a, b), max(a, b), op) for a, b, op in edges)
    return Cell(picks, tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=5))))
