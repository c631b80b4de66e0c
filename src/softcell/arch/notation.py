"""The notations that other tools use: DARTS `Genotype(...)` and NAS-Bench-201 strings, both ways.

Text is parsed, never evaluated.
"""

from __future__ import annotations

import ast
import re
from typing import TypeVar

from softcell.arch.choice import Pick
from softcell.arch.genotype import MAX_NODES, Cell, Genotype
from softcell.errors import UserError

DARTS_INPUTS = 2  # a DARTS cell has two input nodes, and its notation lists two edges per inner node
MAX_CHARACTERS = 200_000  # of a notation: Python's parser needs about a thousand times its length in memory

__all__ = ["from_darts", "from_nb201", "parse", "to_darts", "to_nb201"]

T = TypeVar("T")


def parse(text: str, name: str | None = None) -> Genotype:
    """Reads any of the notations: our JSON, DARTS, NAS-Bench-201.

    name: of several `name = Genotype(...)` in a text, the one to read.

    Example:
        >>> from softcell.arch import notation
        >>> genotype = notation.parse("|nor_conv_3x3~0|+|none~0|skip_connect~1|")
        >>> genotype.space, [str(pick) for pick in genotype.cells["cell"].picks]
        ('nb201', ['nor_conv_3x3(0->1)', 'none(0->2)', 'skip_connect(1->2)'])
    """
    text = text.strip()
    if "Genotype(" in text and not text.startswith(("{", "|")):
        return from_darts(text, name)
    if name is not None:
        raise UserError(f"only DARTS notation (name = Genotype(...)) has names to choose from, got {text[:60]!r}")
    if text.startswith("{"):
        return Genotype.loads(text)
    if text.startswith("|"):
        return from_nb201(text)
    raise UserError(
        "an architecture must be softcell JSON ({...}), DARTS notation (Genotype(...)) or a NAS-Bench-201 string "
        f"(|op~0|+...), got {text[:60]!r}"
    )


def from_darts(text: str, name: str | None = None) -> Genotype:
    """`Genotype(normal=[('sep_conv_3x3', 0), ...], normal_concat=range(2, 6), reduce=[...], reduce_concat=...)`.

    A cell lists two edges per inner node or, as the authors of SNAS write theirs (`edge_all`), one edge per pair of
    nodes with `none` among the operations. Of a file that assigns several genotypes, `name` chooses one.

    Example:
        >>> from softcell.arch import notation
        >>> cell = "[('sep_conv_3x3', 0), ('skip_connect', 1)]"
        >>> text = f"Genotype(normal={cell}, normal_concat=[2], reduce={cell}, reduce_concat=[2])"
        >>> [str(pick) for pick in notation.from_darts(text).cells["normal"].picks]
        ['sep_conv_3x3(0->2)', 'skip_connect(1->2)']
    """
    call = _chosen(_darts_calls(text), name)
    if call.args:
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
    """DARTS notation; only for cells of two inputs per inner node, which is all that the notation can express.

    Example:
        >>> from softcell.arch import notation, sample
        >>> from softcell.spaces import build_space
        >>> genotype = sample(build_space("darts").layout(), seed=0)
        >>> notation.from_darts(notation.to_darts(genotype)).cells == genotype.cells
        True
    """
    if set(genotype.cells) != {"normal", "reduce"}:
        raise UserError(
            f"DARTS notation has a normal and a reduce cell, this genotype has {sorted(genotype.cells)}; write "
            "softcell JSON instead"
        )
    parts = []
    for name in ("normal", "reduce"):
        cell = genotype.cells[name]
        last = max((*cell.targets, *cell.output))
        edges = []
        for target in range(DARTS_INPUTS, last + 1):
            incoming = [pick for pick in cell.incoming(target) if pick.op != "none"]
            # A node with fewer inputs is written with `none`, as the authors of SNAS do, where the genotype has it.
            incoming += [pick for pick in cell.incoming(target) if pick.op == "none"][: max(0, 2 - len(incoming))]
            if len(incoming) != 2:
                raise UserError(
                    f"DARTS notation has exactly 2 edges per inner node, but node {target} of the {name} cell has "
                    f"{len(incoming)}; keep softcell JSON for this architecture"
                )
            edges += [(pick.op, pick.source) for pick in incoming]
        output = list(cell.output)
        consecutive = output == list(range(output[0], output[-1] + 1))
        concat = f"range({output[0]}, {output[-1] + 1})" if consecutive else repr(output)
        parts.append(f"{name}={edges!r}, {name}_concat={concat}")
    return f"Genotype({', '.join(parts)})"


def from_nb201(text: str) -> Genotype:
    """`|nor_conv_3x3~0|+|nor_conv_3x3~0|avg_pool_3x3~1|+|...|`: for each node its edges by source.

    Example:
        >>> from softcell.arch import notation
        >>> [str(pick) for pick in notation.from_nb201("|nor_conv_3x3~0|").cells["cell"].picks]
        ['nor_conv_3x3(0->1)']
    """
    picks = []
    last = text.count("+") + 1
    if last > MAX_NODES:
        raise UserError(f"NAS-Bench-201 string: a node must have a number up to {MAX_NODES}, got {last}")
    for target, node in enumerate(text.strip().split("+"), start=1):
        if not (node.startswith("|") and node.endswith("|") and len(node) > 2):
            raise UserError(f"NAS-Bench-201 string: each node must be |op~source|...|, got {node!r}")
        edges = node[1:-1].split("|")
        if len(edges) != target:
            raise UserError(f"NAS-Bench-201 string: node {target} must have {target} edges, got {len(edges)}")
        for source, edge in enumerate(edges):
            # At most nine digits: `int` raises an error of its own for thousands of them.
            found = re.fullmatch(r"(\w+)~(\d{1,9})", edge, re.ASCII)
            if found is None or int(found[2]) != source:
                raise UserError(
                    f"NAS-Bench-201 string: edge {source} of node {target} must be op~{source}, got {edge!r}"
                )
            picks.append(Pick(source, target, found[1]))
    return Genotype("nb201", {"cell": Cell(tuple(picks), (last,))})


def to_nb201(genotype: Genotype) -> str:
    """The NAS-Bench-201 string; every edge of the complete graph must carry exactly one operation.

    Example:
        >>> from softcell.arch import notation
        >>> notation.to_nb201(notation.from_nb201("|nor_conv_3x3~0|+|none~0|skip_connect~1|"))
        '|nor_conv_3x3~0|+|none~0|skip_connect~1|'
    """
    if set(genotype.cells) != {"cell"}:
        raise UserError(
            f"a NAS-Bench-201 string has one cell named 'cell', got {sorted(genotype.cells)}; write softcell JSON "
            "instead"
        )
    cell = genotype.cells["cell"]
    nodes = []
    for target in range(1, max((*cell.targets, *cell.output)) + 1):
        incoming = {pick.source: pick.op for pick in cell.incoming(target)}
        if len(cell.incoming(target)) != target or set(incoming) != set(range(target)):
            raise UserError(
                f"a NAS-Bench-201 string has one operation for each of the {target} edges into node {target}, got "
                f"{', '.join(map(str, cell.incoming(target))) or 'none'}; keep softcell JSON for this architecture"
            )
        nodes.append("|" + "|".join(f"{incoming[source]}~{source}" for source in range(target)) + "|")
    return "+".join(nodes)


def _darts_calls(text: str) -> dict[str, ast.Call]:
    """The `Genotype(...)` calls of a text by the names they are assigned to, or by their lines where they have none."""
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"DARTS notation: at most {MAX_CHARACTERS:,} characters are read, but it has {len(text):,}")
    try:
        statements = ast.parse(text.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        # Not Python as a whole, such as a line of a log: one call up to the end of the text.
        source = text[max(0, text.find("Genotype(")) :].strip()
        try:
            statements = ast.parse(source).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise UserError(f"DARTS notation: not a valid Genotype(...) expression ({error})") from error
    found: dict[str, ast.Call] = {}
    for statement in statements:
        value = getattr(statement, "value", None)
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "Genotype":
            targets = statement.targets if isinstance(statement, ast.Assign) else []
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            found[names[0] if names else f"line {statement.lineno}"] = value
    if not found:
        raise UserError("DARTS notation: no Genotype(...) at the start of a line")
    return found


def _chosen(calls: dict[str, ast.Call], name: str | None) -> ast.Call:
    listed = ", ".join(calls)
    if name is not None:
        if name not in calls:
            raise UserError(f"DARTS notation: no genotype is named {name!r}; there are: {listed}")
        return calls[name]
    if len(calls) > 1:
        raise UserError(
            f"DARTS notation: {len(calls)} genotypes in one text ({listed}); choose one with FILE@NAME, such as "
            f"genotypes.py@{next(iter(calls)).replace(' ', '-')}"
        )
    return next(iter(calls.values()))


def _darts_cell(name: str, edges: ast.expr, concat: ast.expr) -> Cell:
    where = f"DARTS notation: {name}"
    try:
        listed = ast.literal_eval(edges)
        output = _range(concat)
        pairs = [(_strict(str, op), _strict(int, source)) for op, source in listed]
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError, OverflowError) as error:
        raise UserError(f"{where} must list (operation, source) pairs, with a concat of node numbers") from error
    # Both readings are possible for 14 edges: 7 nodes of two edges each, or all edges between 4 nodes. The last node
    # feeds nothing and so must be in the concat, which tells them apart.
    targets = _all_edges(pairs, output) or _two_edges(where, pairs)
    picks = []
    for (op, source), target in zip(pairs, targets, strict=True):
        if not 0 <= source < target:
            raise UserError(f"{where}: an edge into node {target} must start at 0..{target - 1}, got {source}")
        picks.append(Pick(source, target, op))
    last = targets[-1]
    if max(last, len(output)) > MAX_NODES:  # as in JSON, in which the genotype is saved
        raise UserError(
            f"{where}: a cell must have nodes up to number {MAX_NODES} and as many outputs, got node {last} and "
            f"{len(output)} outputs"
        )
    if not output or not all(0 <= node <= last for node in output):
        raise UserError(f"{where}_concat must name nodes 0..{last}, got {output}")
    used = {*output, *(pick.source for pick in picks if pick.op != "none")}
    unused = sorted(set(targets) - used)
    if unused:
        raise UserError(
            f"{where}: every inner node must feed another one or be in {name}_concat, but node {unused[0]} does "
            f"neither ({len(pairs)} edges read as two for each of {len(pairs) // 2} nodes, concat {output})"
        )
    ordered = sorted(picks, key=lambda pick: (pick.target, pick.source))
    return Cell(tuple(ordered), tuple(output))


def _two_edges(where: str, pairs: list[tuple[str, int]]) -> list[int]:
    """The target of every edge where each inner node lists two."""
    if not pairs or len(pairs) % 2:
        raise UserError(
            f"{where} must list two edges per inner node, or one for every pair of nodes (`none` where there is no "
            f"edge), got {len(pairs)} edges"
        )
    return [DARTS_INPUTS + i // 2 for i in range(len(pairs))]


def _all_edges(pairs: list[tuple[str, int]], output: list[int]) -> list[int] | None:
    """The target of every edge where each inner node lists one from every node before it; None where that is not so."""
    targets: list[int] = []
    target = DARTS_INPUTS
    while len(targets) < len(pairs):
        targets += [target] * target
        target += 1
    # With a single inner node both readings are the same.
    if len(targets) != len(pairs) or target - DARTS_INPUTS < 2 or max(output, default=0) >= target:
        return None
    sources: dict[int, set[int]] = {}
    for (_, source), node in zip(pairs, targets, strict=True):
        sources.setdefault(node, set()).add(source)
    return targets if all(found == set(range(node)) for node, found in sources.items()) else None


def _range(node: ast.expr) -> list[int]:
    """`range(2, 6)`, `list(range(2, 6))`, `[2, 3, 4, 5]`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id == "range":
            found = range(*(_strict(int, ast.literal_eval(argument)) for argument in node.args))
            # Cut before it is a list: a mistyped range must not fill the memory.
            return list(found[:MAX_NODES])
        if node.func.id == "list" and len(node.args) == 1:
            return _range(node.args[0])
    return [_strict(int, item) for item in ast.literal_eval(node)]


def _strict(kind: type[T], value: object) -> T:
    """`value` itself if it is of just this kind: 0.5 is not a node, and 7 is not an operation."""
    if type(value) is not kind:
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value
