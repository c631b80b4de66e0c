"""A cell as a layered drawing, in plain data: boxes, labels and routes, flowing from left to right.

Ranks alternate: nodes lie in even ranks (longest path from the inputs), operation labels in odd ones. A link that
passes a rank holds a place of its own in it, and between ranks it stays in the gap. So no label or box can overlap
another, and no route runs through a label or box that is not its own.
"""

from __future__ import annotations

from softcell.app.report.drawing import Drawing, Kind
from softcell.app.report.family import family
from softcell.app.report.layout import Layout, Sketch
from softcell.arch import Cell
from softcell.errors import UserError

MANY_NODES = 64  # beyond this, gaps in the numbering are no longer drawn as empty nodes


def input_nodes(cell: Cell) -> tuple[int, ...]:
    """The nodes below the first target, less those the output lists: these have only lost their inputs."""
    targets = [pick.target for pick in cell.picks if pick.source != pick.target]
    sources = {pick.source for pick in cell.picks}
    first = min(targets, default=min(cell.output, default=0))
    below = set(range(min(first, MANY_NODES))) | {source for source in sources if source < first}
    return tuple(sorted(below - set(cell.output) or below))


def input_label(inputs: tuple[int, ...], number: int) -> str:
    """`c_{k-2}` and `c_{k-1}` where there are two inputs, as in DARTS cells."""
    if len(inputs) == 2:
        return ("c_{k-2}", "c_{k-1}")[inputs.index(number)]
    return "in" if len(inputs) == 1 else f"in {number}"


def output_label(inputs: tuple[int, ...]) -> str:
    return "c_{k}" if len(inputs) == 2 else "out"


def node_numbers(cell: Cell, inputs: tuple[int, ...]) -> tuple[int, ...]:
    """All nodes of a cell; a gap in the numbering is a node that lost all its edges."""
    named = {n for pick in cell.picks for n in (pick.source, pick.target)} | set(cell.output) | set(inputs)
    last = max(named, default=-1)
    return tuple(range(last + 1)) if last < MANY_NODES else tuple(sorted(named))


def layered(cell: Cell, inputs: tuple[int, ...]) -> Drawing:
    """Lays out a cell whose nodes `inputs` come from outside."""
    for pick in cell.picks:
        if not 0 <= pick.source <= pick.target:
            raise UserError(f"an edge must have 0 <= source <= target to be drawn, got {pick}")
    absent = tuple(pick for pick in cell.picks if family(pick.op) == "none")
    sketch = _sketch(cell, inputs)
    ranks, chains = _ranks(sketch)
    return Layout(sketch, ranks, chains).drawing(absent)


def _sketch(cell: Cell, inputs: tuple[int, ...]) -> Sketch:
    sketch = Sketch()
    picks = [pick for pick in cell.picks if family(pick.op) != "none"]
    fed = {pick.target for pick in picks if pick.source < pick.target}
    calibrated = {pick.target for pick in picks if pick.source == pick.target}
    alone = cell.output[0] if len(cell.output) == 1 and cell.output[0] not in inputs else None
    for number in node_numbers(cell, inputs):
        kind: Kind = "input" if number in inputs else "inner" if number in fed else "empty"
        label = input_label(inputs, number) if kind == "input" else str(number)
        if number in calibrated:
            # A pick from a node to itself works on the sum of its inputs, which gets a box of its own.
            first = label if kind == "input" else f"{number}′"
            first += " empty" if kind == "empty" else ""
            sketch.entry[number] = sketch.vertex(number, first, "surrogate" if kind == "inner" else kind)
            label, kind = str(number), "inner"
        if number == alone and kind == "inner":
            label, kind = output_label(inputs), "output"
        label += f"{' out' * (number == alone)} empty" if kind == "empty" else ""
        sketch.exit[number] = sketch.vertex(number, label, kind)
        sketch.entry.setdefault(number, sketch.exit[number])
    for pick in sorted(picks, key=lambda pick: (pick.target, pick.source)):
        start = sketch.entry if pick.source == pick.target else sketch.exit
        end = sketch.exit if pick.source == pick.target else sketch.entry
        sketch.links.append((start[pick.source], end[pick.target], pick.op))
    if alone is None and cell.output:
        concat = sketch.vertex(None, output_label(inputs), "output")
        sketch.links += [(sketch.exit[number], concat, None) for number in cell.output]
    return sketch


def _layers(sketch: Sketch) -> list[int]:
    """Longest path from the inputs; a node without inputs stands just before the first that reads it."""
    layer = [0 if kind == "input" else 1 for kind in sketch.kinds]
    for start, end, _ in sorted(sketch.links, key=lambda link: link[1]):
        layer[end] = max(layer[end], layer[start] + 1)  # vertices are numbered along the flow
    for vertex, kind in enumerate(sketch.kinds):
        if kind == "empty":
            layer[vertex] = min((layer[end] for start, end, _ in sketch.links if start == vertex), default=2) - 1
    reads = {start for start, _, _ in sketch.links}
    for vertex, kind in enumerate(sketch.kinds):
        if kind == "output" and vertex not in reads:
            layer[vertex] = max(layer)  # nothing stands behind the output
    used = sorted(set(layer))
    return [used.index(value) for value in layer]


def _ranks(sketch: Sketch) -> tuple[list[list[int]], list[list[int]]]:
    """Items per rank, and for every link the items it runs through; the label is item `len(vertices) + link`."""
    layer = _layers(sketch)
    ranks: list[list[int]] = [[] for _ in range(2 * max(layer, default=0) + 1)]
    for vertex, value in enumerate(layer):
        ranks[2 * value].append(vertex)
    vertices, total = len(layer), len(layer) + len(sketch.links)
    spans = [(2 * layer[start] + 1, 2 * layer[end]) for start, end, _ in sketch.links]
    crowd = [0] * len(ranks)
    chosen: dict[int, int] = {}
    # Short links have no choice where their label goes; long ones then take the emptiest rank.
    for link in sorted(range(len(spans)), key=lambda i: (spans[i][1] - spans[i][0], i)):
        if sketch.links[link][2] is not None:
            low, high = spans[link]
            chosen[link] = min(range(low, high, 2), key=lambda rank: (crowd[rank], rank))
            crowd[chosen[link]] += 1
    chains = []
    for link, (start, end, _) in enumerate(sketch.links):
        chain = [start]
        for rank in range(*spans[link]):
            item = vertices + link if chosen.get(link) == rank else total
            total += item == total
            ranks[rank].append(item)
            chain.append(item)
        chains.append([*chain, end])
    return ranks, chains
