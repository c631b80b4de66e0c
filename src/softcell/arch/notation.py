"""The notations every other tool of the field speaks: DARTS `Genotype(...)` and NAS-Bench-201 strings, both ways.

Text is parsed, never evaluated.
"""

from __future__ import annotations

import ast
import re
from typing import TypeVar

from softcell.arch.choice import Pick
from softcell.arch.genotype import Cell, Genotype
from softcell.errors import UserError

DARTS_INPUTS = 2  # a DARTS cell has two input nodes, and its notation lists two edges per inner node
MOST_NODES = 1000  # a longer range is a slip of the keyboard, and must not fill the memory

T = TypeVar("T")


def parse(text: str) -> Genotype:
    """Reads any of the notations: our JSON, DARTS, NAS-Bench-201."""
    text = text.strip()
    if text.startswith("{"):
        return Genotype.loads(text)
    if text.startswith("|"):
        return from_nb201(text)
    if "Genotype(" in text:
        return from_darts(text)
    raise UserError(
        "an architecture must be softcell JSON ({...}), DARTS notation (Genotype(...)) or a NAS-Bench-201 string "
        f"(|op~0|+...), got {text[:60]!r}"
    )


def from_darts(text: str) -> Genotype:
    """`Genotype(normal=[('sep_conv_3x3', 0), ...], normal_concat=range(2, 6), reduce=[...], reduce_concat=...)`."""
    start = text.find("Genotype(")
    source = text[start:].strip() if start >= 0 else text
    try:
        call = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise UserError(f"DARTS notation: not a valid Genotype(...) expression ({error})") from error
    if not isinstance(call, ast.Call) or call.args:
        raise UserError(
            "DARTS notation: must be Genotype(normal=..., normal_concat=..., reduce=..., reduce_concat=...)"
        )
    fields = {keyword.arg: keyword.value for keyword in call.keywords}
    required = {"normal", "normal_concat", "reduce", "reduce_concat"}
    if set(fields) != required:
        raise UserError(f"DARTS notation: needs exactly {sorted(required)}, got {sorted(map(str, fields))}")
    cells = {name: _darts_cell(name, fields[name], fields[f"{name}_concat"]) for name in ("normal", "reduce")}
    return Genotype("darts", cells)


def to_darts(genotype: Genotype) -> str:
    """DARTS notation; only for cells of two inputs per inner node, which is all the notation can say."""
    if set(genotype.cells) != {"normal", "reduce"}:
        raise UserError(f"DARTS notation has a normal and a reduce cell, this genotype has {sorted(genotype.cells)}")
    parts = []
    for name in ("normal", "reduce"):
        cell = genotype.cells[name]
        last = max((*cell.targets, *cell.output))
        edges = []
        for target in range(DARTS_INPUTS, last + 1):
            incoming = cell.incoming(target)
            if len(incoming) != 2:
                raise UserError(
                    f"DARTS notation says exactly 2 edges per inner node, but node {target} of the {name} cell has "
                    f"{len(incoming)}; keep softcell JSON for this architecture"
                )
            edges += [(pick.op, pick.source) for pick in incoming]
        output = list(cell.output)
        consecutive = output == list(range(output[0], output[-1] + 1))
        concat = f"range({output[0]}, {output[-1] + 1})" if consecutive else repr(output)
        parts.append(f"{name}={edges!r}, {name}_concat={concat}")
    return f"Genotype({', '.join(parts)})"


def from_nb201(text: str) -> Genotype:
    """`|nor_conv_3x3~0|+|nor_conv_3x3~0|avg_pool_3x3~1|+|...|`: for each node its edges by source."""
    picks = []
    for target, node in enumerate(text.strip().split("+"), start=1):
        if not (node.startswith("|") and node.endswith("|") and len(node) > 2):
            raise UserError(f"NAS-Bench-201 string: each node must be |op~source|...|, got {node!r}")
        edges = node[1:-1].split("|")
        if len(edges) != target:
            raise UserError(f"NAS-Bench-201 string: node {target} must have {target} edges, got {len(edges)}")
        for source, edge in enumerate(edges):
            found = re.fullmatch(r"(\w+)~(\d+)", edge)
            if found is None or int(found[2]) != source:
                raise UserError(
                    f"NAS-Bench-201 string: edge {source} of node {target} must be op~{source}, got {edge!r}"
                )
            picks.append(Pick(source, target, found[1]))
    return Genotype("nb201", {"cell": Cell(tuple(picks), (len(text.split("+")),))})


def to_nb201(genotype: Genotype) -> str:
    """The NAS-Bench-201 string; every edge of the complete graph must carry exactly one operation."""
    if set(genotype.cells) != {"cell"}:
        raise UserError(f"a NAS-Bench-201 string has one cell named 'cell', got {sorted(genotype.cells)}")
    cell = genotype.cells["cell"]
    nodes = []
    for target in range(1, max((*cell.targets, *cell.output)) + 1):
        incoming = {pick.source: pick.op for pick in cell.incoming(target)}
        if len(cell.incoming(target)) != target or set(incoming) != set(range(target)):
            raise UserError(
                f"a NAS-Bench-201 string says one operation for each of the {target} edges into node {target}, got "
                f"{', '.join(map(str, cell.incoming(target))) or 'none'}; keep softcell JSON for this architecture"
            )
        nodes.append("|" + "|".join(f"{incoming[source]}~{source}" for source in range(target)) + "|")
    return "+".join(nodes)


def _darts_cell(name: str, edges: ast.expr, concat: ast.expr) -> Cell:
    where = f"DARTS notation: {name}"
    try:
        listed = ast.literal_eval(edges)
        output = _range(concat)
        pairs = [(_strict(str, op), _strict(int, source)) for op, source in listed]
    except (ValueError, TypeError) as error:
        raise UserError(f"{where} must list (operation, source) pairs, with a concat of node numbers") from error
    if not pairs or len(pairs) % 2:
        raise UserError(f"{where} must list two edges per inner node, got {len(pairs)} edges")
    picks = []
    for i, (op, source) in enumerate(pairs):
        target = DARTS_INPUTS + i // 2
        if not 0 <= source < target:
            raise UserError(f"{where}: an edge into node {target} must start at 0..{target - 1}, got {source}")
        picks.append(Pick(source, target, op))
    last = DARTS_INPUTS + len(pairs) // 2 - 1
    if not output or not all(0 <= node <= last for node in output):
        raise UserError(f"{where}_concat must name nodes 0..{last}, got {output}")
    ordered = sorted(picks, key=lambda pick: (pick.target, pick.source))
    return Cell(tuple(ordered), tuple(output))


def _range(node: ast.expr) -> list[int]:
    """`range(2, 6)`, `list(range(2, 6))`, `[2, 3, 4, 5]`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id == "range":
            found = range(*(_strict(int, ast.literal_eval(argument)) for argument in node.args))
            return list(found[:MOST_NODES])
        if node.func.id == "list" and len(node.args) == 1:
            return _range(node.args[0])
    return [_strict(int, item) for item in ast.literal_eval(node)]


def _strict(kind: type[T], value: object) -> T:
    """`value` itself if it is of just this kind: 0.5 is no node, and 7 is no operation."""
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
