"""Genotypes for the terminal: every node is a rail, every operation a line from rail to rail.

    c_{k-2}
    │  c_{k-1}
    ├──│──╮                    ■ sep_conv_3x3
    │  ├─▶2                    ■ sep_conv_3x3
    ├──│──│──╮                 ■ sep_conv_3x3
    │  ├──│─▶3                 ■ sep_conv_3x3
          ╰──┴──────────▶ c_{k} = concat(2, 3)

A node's number is where its last input arrives; its rail ends with its last reader. Several operations on one edge
share its line, and more lines where they need them. Cells with more rails than fit become a list per node, and plain
chains run from left to right.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from softcell.app.report.cells_graph import input_label, input_nodes, node_numbers, output_label
from softcell.app.report.theme import Family, clean, columns, family, shorten, wrap
from softcell.arch import Cell, Genotype, Pick

STYLES: dict[Family, str] = {
    "conv": "bright_blue",
    "dilated": "dark_orange",
    "dynamic": "medium_purple1",
    "pool": "green",
    "skip": "cyan",
    "attention": "magenta",
    "other": "yellow",
    "none": "bright_black",
}
MARKS: dict[Family, str] = {
    "conv": "■",
    "dilated": "□",
    "dynamic": "▣",
    "pool": "▼",
    "skip": "→",
    "attention": "◆",
    "other": "○",
    "none": "×",
}
PLAIN = str.maketrans("│─├┤╰╮┴┬▶◀↻■□▣▼→◆○×…·", "|-++`.++><@*%&v>#o!~.")
PITCHES = (5, 4, 3)  # distance of two rails, the widest that fits
NAMES = 18  # columns kept for names before rails move closer


def to_text(genotype: Genotype, width: int | None = None, colour: bool = True) -> CellsText:
    """A rich renderable of all cells; `width` caps the terminal's, and ASCII is used where the terminal has no Unicode.

    Example:
        >>> from rich.console import Console
        >>> from softcell.app.report import to_text
        >>> from softcell.arch import notation
        >>> console = Console(width=80, record=True, file=open("cell.txt", "w"))
        >>> console.print(to_text(notation.parse("|nor_conv_3x3~0|+|none~0|skip_connect~1|"), colour=False))
        >>> "nor_conv_3x3" in console.export_text()
        True
    """
    return CellsText(genotype, width, colour)


@dataclass(frozen=True)
class CellsText:
    """Draws itself for the console it is printed on."""

    genotype: Genotype
    width: int | None = None
    colour: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(self.width or options.max_width, options.max_width)
        for line in self.lines(width, options.ascii_only):
            line.no_wrap, line.overflow = True, "crop"
            yield line

    def lines(self, width: int, ascii_only: bool = False) -> Iterator[Text]:
        """The drawing, line by line, none of them wider than `width`."""
        for i, (name, cell) in enumerate(self.genotype.cells.items()):
            if i:
                yield Text()
            head = Text(clean(name), "bold")
            for line in (head, *draw(cell, width)):
                yield self._fit(line, width, ascii_only)

    def _fit(self, line: Text, width: int, ascii_only: bool) -> Text:
        if ascii_only:
            plain = line.plain.translate(PLAIN).encode("ascii", "replace").decode()
            line = Text(plain, line.style, spans=line.spans)
        line.rstrip()
        line.truncate(width, overflow="crop")
        return line if self.colour else Text(line.plain)


def draw(cell: Cell, width: int) -> list[Text]:
    """One cell as lines of text, in the form that suits it."""
    inputs = input_nodes(cell)
    picks = [pick for pick in cell.picks if family(pick.op) != "none"]
    absent = [pick for pick in cell.picks if family(pick.op) == "none"]
    if _is_chain(cell, picks, inputs):
        lines = _chain(picks, inputs, width)
    else:
        nodes = node_numbers(cell, inputs)
        labels = {n: input_label(inputs, n) if n in inputs else str(n) for n in nodes}
        longest = max((columns(clean(pick.op)) for pick in picks), default=0)
        room = width - min(longest, NAMES) - 8
        fitting = [pitch for pitch in PITCHES if pitch * len(nodes) <= room]
        if fitting:
            lines = _Rails(cell, picks, inputs, labels, fitting[0], width).lines()
        else:
            lines = _listed(cell, picks, labels, width)
    if absent:
        names = "/".join(sorted({clean(pick.op) for pick in absent}))
        parts = [f"{pick.source}→{pick.target}" for pick in absent]
        parts[0] = f"{names}: {parts[0]}"
        lines += [Text(f"  {line}", "bright_black") for line in wrap(parts, max(width - 2, 1))]
    return lines


def output_text(cell: Cell, inputs: tuple[int, ...]) -> str:
    nodes = ", ".join(str(number) for number in cell.output)
    return f"{output_label(inputs)} = " + (nodes if len(cell.output) == 1 else f"concat({nodes})")


class _Rails:
    """The rail diagram: `grid` cells hold a character and its style."""

    def __init__(
        self,
        cell: Cell,
        picks: list[Pick],
        inputs: tuple[int, ...],
        labels: Mapping[int, str],
        pitch: int,
        width: int,
    ) -> None:
        self.cell, self.inputs, self.labels, self.pitch, self.width = cell, inputs, labels, pitch, width
        self.column = {number: 1 + pitch * i for i, number in enumerate(labels)}
        self.names = 1 + pitch * len(labels) + 2
        self.picks = {n: sorted((p for p in picks if p.target == n), key=lambda p: p.source) for n in labels}
        self.live: list[int] = []  # rails that run at this row
        self.readers = {
            n: _lines_from(n, picks) + (n in cell.output)  # how many lines still leave the rail
            for n in labels
        }

    def lines(self) -> list[Text]:
        lines: list[Text] = []
        for number in self.labels:
            if number in self.inputs:
                lines.append(self._birth(number, self.labels[number], "bold"))
            elif not any(pick.source != number for pick in self.picks[number]):
                row = self._birth(number, self.labels[number], "bright_black")
                lines.append(self._named(row, Text("empty: no inputs", "bright_black italic")))
            arriving = [pick for pick in self.picks[number] if pick.source != number]
            edges = [list(edge) for _, edge in groupby(arriving, key=lambda pick: pick.source)]
            for i, edge in enumerate(edges):
                first, *more = self._names(edge)
                last = i == len(edges) - 1
                lines.append(self._named(self._edge(edge[0], first=i == 0, last=last), first))
                if last:
                    self._start(number)
                for name in more:
                    rails = self._row()
                    if not last:
                        rails[self.column[number]] = ("│", "bright_black")
                    lines.append(self._named(_join(rails), name))
            for pick in self.picks[number]:
                if pick.source == number:
                    lines.append(self._own(pick))
        if self.cell.output:
            lines.append(self._output())
        return lines

    def _row(self) -> list[tuple[str, str]]:
        row = [(" ", "")] * (self.names - 1)
        for number in self.live:
            row[self.column[number]] = ("│", "bright_black")
        return row

    def _start(self, number: int) -> None:
        if self.readers[number]:
            self.live.append(number)

    def _read(self, number: int) -> bool:
        """Counts a line that leaves the rail; True where it was the last."""
        self.readers[number] -= 1
        if self.readers[number] == 0 and number in self.live:
            self.live.remove(number)
            return True
        return False

    def _birth(self, number: int, label: str, style: str) -> Text:
        row = Text()
        for character, paint in self._row()[: self.column[number]]:
            row.append(character, paint)
        row.append(label, style)
        self._start(number)
        return row

    def _edge(self, pick: Pick, first: bool, last: bool) -> Text:
        paint = STYLES[family(pick.op)]
        start, end = self.column[pick.source], self.column[pick.target]
        row = self._row()
        ends = self._read(pick.source)
        for x in range(start + 1, end):
            if row[x][0] == " ":
                row[x] = ("─", paint)
        row[start] = ("╰" if ends else "├", paint)
        if last:
            row[end - 1] = ("▶", paint)
            label = self.labels[pick.target]
            for i, character in enumerate(label):
                if end + i < len(row):
                    row[end + i] = (character, "bold")
        else:
            row[end] = ("╮" if first else "┤", paint)
        return _join(row)

    def _own(self, pick: Pick) -> Text:
        """An operation of a node on itself."""
        row = self._row()
        row[self.column[pick.target]] = ("↻", STYLES[family(pick.op)])
        self._read(pick.source)
        return self._named(_join(row), self._name(pick))

    def _name(self, pick: Pick) -> Text:
        kind = family(pick.op)
        room = max(self.width - self.names - 2, 1)
        return Text(f"{MARKS[kind]} {shorten(pick.op, room)}", STYLES[kind])

    def _names(self, edge: list[Pick]) -> list[Text]:
        """The operations of one edge, in as few lines as they fit."""
        room = max(self.width - self.names, 1)
        lines = [self._name(edge[0])]
        for name in map(self._name, edge[1:]):
            if columns(lines[-1].plain) + 2 + columns(name.plain) > room:
                lines.append(name)
            else:
                lines[-1].append("  ").append_text(name)
        return lines

    def _named(self, row: Text, name: Text) -> Text:
        row.rstrip()
        gap = self.names - columns(row.plain)
        # A dotted leader connects a short line with its name.
        row.append(" " + "·" * (gap - 2) + " " if gap > 4 else " " * gap, "bright_black dim")
        return row.append_text(name)

    def _output(self) -> Text:
        row = self._row()
        ends = sorted({self.column[number] for number in self.cell.output})
        for x in range(ends[0], len(row)):
            if row[x][0] == " " or x in ends:
                row[x] = ("─", "")
        for x in ends:
            row[x] = ("╰" if x == ends[0] else "┴", "")
        line = _join(row[: ends[-1] + 1])
        room = max(self.width - columns(line.plain) - 3, 1)
        return line.append("─▶ ").append(shorten(output_text(self.cell, self.inputs), room), "bold")


def _lines_from(node: int, picks: list[Pick]) -> int:
    """Lines that leave a node: one per edge, and one per operation of the node on itself."""
    others = {pick.target for pick in picks if pick.source == node != pick.target}
    return len(others) + sum(pick.source == node == pick.target for pick in picks)


def _join(row: list[tuple[str, str]]) -> Text:
    return Text.assemble(*row)


def _is_chain(cell: Cell, picks: list[Pick], inputs: tuple[int, ...]) -> bool:
    """Whether every node but the input reads just the one before it."""
    steps = [(pick.source, pick.target) for pick in picks]
    return (
        len(inputs) == 1
        and len(picks) == len(cell.picks) > 1
        and steps == [(inputs[0] + i, inputs[0] + i + 1) for i in range(len(steps))]
        and cell.output == (steps[-1][1],)
    )


def _chain(picks: list[Pick], inputs: tuple[int, ...], width: int) -> list[Text]:
    """`in ── a ─▶ 1 ── b ─▶ 2`, in rows with aligned columns."""
    number_width = max(len(str(picks[-1].target)), 3)
    name_width = max(columns(clean(pick.op)) for pick in picks)
    name_width = max(min(name_width, width - 2 * number_width - 11), 1)
    step = number_width + name_width + 10
    per_row = max((width - number_width - 1) // step, 1)
    rows = -(-len(picks) // per_row)
    per_row = -(-len(picks) // rows)  # the same number of rows, filled evenly
    lines = []
    for start in range(0, len(picks), per_row):
        line = Text(" ")
        for pick in picks[start : start + per_row]:
            kind = family(pick.op)
            label = "in" if pick.source in inputs else str(pick.source)
            name = shorten(pick.op, name_width)
            line.append(label.rjust(number_width), "bold")
            line.append(" ── ", "bright_black")
            line.append(f"{MARKS[kind]} {name}", STYLES[kind])
            line.append(" " + "─" * (name_width - columns(name)) + "─▶ ", "bright_black")
        lines.append(line)
    lines[-1].append("out".rjust(number_width), "bold")
    return lines


def _listed(cell: Cell, picks: list[Pick], labels: Mapping[int, str], width: int) -> list[Text]:
    """One small fork per node, for cells with more rails than the terminal has room for."""
    size = max(len(label) for label in labels.values())
    inputs = input_nodes(cell)
    lines = []
    for number, label in labels.items():
        if number in inputs:
            continue
        arriving = sorted((pick for pick in picks if pick.target == number), key=lambda pick: pick.source)
        if not arriving:
            lines.append(Text(f" {label.rjust(size)}  empty: no inputs", "bright_black"))
        for i, pick in enumerate(arriving):
            kind = family(pick.op)
            fork = "──" if len(arriving) == 1 else "┬─" if i == 0 else "╰─" if i == len(arriving) - 1 else "├─"
            line = Text(f" {(label if i == 0 else '').rjust(size)} ", "bold")
            line.append(("◀─" if i == 0 else "  ") + fork, "bright_black")
            source = "↻" if pick.source == number else labels[pick.source]
            line.append(f" {source.rjust(size)} ", "bold")
            room = max(width - columns(line.plain) - 2, 1)
            lines.append(line.append(f"{MARKS[kind]} {shorten(pick.op, room)}", STYLES[kind]))
    lines += [Text(f" {part}", "bold") for part in wrap(output_text(cell, inputs).split(", "), max(width - 1, 1))]
    return lines
