"""NAS-Bench-101's file, on made records: framing, graphs, means, and what is refused."""

from __future__ import annotations

import base64
import itertools
import json
import struct
from pathlib import Path

import pytest

from softcell.arch import Cell, Genotype, sample
from softcell.errors import UserError
from softcell.evaluate.nb101 import NAMES, graph_of, read_accuracies, spec_of
from softcell.spaces import build_space
from softcell.spaces.oneshot1_count import counts


def field(number: int, raw: bytes | float) -> bytes:
    if isinstance(raw, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", raw)
    return bytes([number << 3 | 2, len(raw)]) + raw


def record(matrix: list[list[int]], operations: list[str], valid: float, test: float, epochs: int = 108) -> bytes:
    """As the official file has it: two evaluations, of which the last counts, and a number of parameters."""
    halfway = b"".join(field(i, 0.1) for i in range(1, 6))
    done = b"".join(field(i, value) for i, value in ((1, 108.0), (2, 1e3), (3, 1.0), (4, valid), (5, test)))
    message = field(1, halfway) + field(1, done + field(6, b"path")) + bytes([2 << 3, 0xAC, 0x02]) + field(3, 5.0)
    bits = "".join(str(bit) for row in matrix for bit in row)
    metrics = base64.b64encode(message).decode()
    data = json.dumps(["hash", epochs, bits, ",".join(operations), metrics]).encode()
    return struct.pack("<Q", len(data)) + b"sums" + data + b"sums"


def test_a_genotype_is_found_by_its_graph_with_the_mean_of_its_trainings(tmp_path: Path) -> None:
    space = build_space("nb1shot1-3")
    first, second = sample(space.layout(), 0), sample(space.layout(), 1)
    assert graph_of(*spec_of(first)) != graph_of(*spec_of(second))
    file = tmp_path / "bench.tfrecord"
    file.write_bytes(
        record(*spec_of(first), 0.9, 0.8)
        + record(*spec_of(second), 0.5, 0.4)
        + record(*spec_of(first), 0.8, 0.7)
        + record(*spec_of(first), 0.1, 0.1, epochs=4)
    )
    found = read_accuracies(file)
    assert len(found) == 2
    own = found[graph_of(*spec_of(first))]
    assert (own.validation, own.test, own.trainings) == (pytest.approx(85.0), pytest.approx(75.0), 2)


def test_graphs_are_as_many_as_counted_up_to_isomorphism() -> None:
    space = build_space("nb1shot1-1")
    (table,) = space.layout().tables
    some = itertools.islice(space.layout().rule.enumerate(table), 0, None, 97)  # type: ignore[attr-defined]
    graphs = {graph_of(*spec_of(Genotype(space.name, {"cell": Cell(picks, table.output)}))) for picks in some}
    assert 100 < len(graphs) <= counts((1, 2, 2, 2, 2)).isomorphic


def test_swapped_blocks_and_loose_ends_make_no_other_network() -> None:
    a, b = NAMES["conv_1x1"], NAMES["conv_3x3"]
    side_by_side = [[0, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 0]]
    assert graph_of(side_by_side, ["input", a, b, "output"]) == graph_of(side_by_side, ["input", b, a, "output"])
    loose = [[0, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    alone = [[0, 1, 0], [0, 0, 1], [0, 0, 0]]
    assert graph_of(loose, ["input", a, b, "output"]) == graph_of(alone, ["input", a, "output"])
    in_line = [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]]
    assert graph_of(in_line, ["input", a, b, "output"]) != graph_of(in_line, ["input", b, a, "output"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no network trained"),
        (b"short", "not a TFRecord"),
        (struct.pack("<Q", 1 << 40) + b"sums", "not a TFRecord"),
        (struct.pack("<Q", 2) + b"sums{}sums", "record 0 is none"),
        (record([[0, 1], [0, 0]], ["input", "output"], 7.0, 0.5), "record 0 is none"),
        (record([[0, 1], [0, 0]], ["input", "output"], 0.7, 0.5, epochs=4), "no network trained"),
    ],
)
def test_other_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_accuracies(tmp_path / "file")
    with pytest.raises(UserError, match="cannot be read"):
        read_accuracies(tmp_path / "absent")


def test_other_spaces_have_no_graph() -> None:
    with pytest.raises(UserError, match="nb1shot1-1 to -3"):
        spec_of(sample(build_space("nb201").layout(), 0))
