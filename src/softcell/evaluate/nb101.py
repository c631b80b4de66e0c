"""Accuracies of NAS-Bench-101 for architectures of NAS-Bench-1Shot1, read from its official file.

Ying et al.: NAS-Bench-101, ICML 2019. `nasbench_only108.tfrecord` holds one record per trained network: JSON of
[hash, epochs, adjacency matrix as a string of 0 and 1, operations, metrics], the metrics a base64-coded message of
Protocol Buffers. Both framings are simple enough to be read here, without TensorFlow. The layout is that of the
published interface; the file itself was not at hand, so this is tested on made records alone.

A network is found by its graph: isomorphic ones are the same network.
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from softcell.arch import Genotype
from softcell.errors import UserError

EPOCHS = 108
NAMES = {"conv_1x1": "conv1x1-bn-relu", "conv_3x3": "conv3x3-bn-relu", "max_pool_3x3": "maxpool3x3"}
_VALIDATION, _TEST = 4, 5  # fields of an evaluation
MOST = 1 << 20  # bytes of a record; a longer one is none
Graph = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Mean over a network's trainings after the last epoch, in percent."""

    validation: float
    test: float
    trainings: int


def spec_of(genotype: Genotype) -> tuple[list[list[int]], list[str]]:
    """Adjacency matrix and operations in NAS-Bench-101's terms: input, blocks, output; loose ends stay in."""
    if not genotype.space.startswith("nb1shot1"):
        raise UserError(f"NAS-Bench-101 holds spaces nb1shot1-1 to -3, but this genotype is of {genotype.space!r}")
    cell = genotype.cells["cell"]
    output = cell.output[0]
    blocks = output // 2
    place = {0: 0, output: blocks + 1, **{2 * b: b for b in range(1, blocks + 1)}}
    matrix = [[0] * (blocks + 2) for _ in range(blocks + 2)]
    operations = ["input", *[""] * blocks, "output"]
    for pick in cell.picks:
        if pick.target % 2 == 0:
            operations[pick.target // 2] = NAMES[pick.op]
        else:  # a block's sum, or the output
            matrix[place[pick.source]][place[min(pick.target + 1, output)]] = 1
    return matrix, operations


def graph_of(matrix: list[list[int]], operations: list[str]) -> Graph:
    """What isomorphic networks have in common, loose ends removed: labels refined by parents and children."""
    size = len(matrix)
    forward, backward = {0}, {size - 1}
    for node in range(1, size):
        forward |= {node} if any(matrix[p][node] for p in forward) else set()
    for node in range(size - 2, -1, -1):
        backward |= {node} if any(matrix[node][c] for c in backward) else set()
    nodes = sorted(forward & backward)
    labels = {node: operations[node] for node in nodes}
    for _ in nodes:
        labels = {
            node: _digest(
                labels[node],
                sorted(labels[p] for p in nodes if matrix[p][node]),
                sorted(labels[c] for c in nodes if matrix[node][c]),
            )
            for node in nodes
        }
    return tuple(sorted(labels.values()))


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def read_accuracies(path: str | Path) -> dict[Graph, Accuracy]:
    """By graph, of all networks trained for 108 epochs."""
    found: dict[Graph, list[tuple[float, float]]] = {}
    for number, record in enumerate(_records(Path(path))):
        try:
            _, epochs, bits, operations, metrics = json.loads(record)
            if epochs != EPOCHS:
                continue
            names = operations.split(",")
            size = len(names)
            matrix = [[int(bits[row * size + column]) for column in range(size)] for row in range(size)]
            last = _fields(_fields(base64.b64decode(metrics))[1][-1])
            pair = (_float(last[_VALIDATION][-1]), _float(last[_TEST][-1]))
        except (ValueError, KeyError, IndexError, AttributeError, TypeError, struct.error) as error:
            raise UserError(
                f"{path}: record {number} is none of NAS-Bench-101 ({type(error).__name__}: {error})"
            ) from error
        found.setdefault(graph_of(matrix, names), []).append(pair)
    if not found:
        raise UserError(f"{path}: no network trained for {EPOCHS} epochs; give nasbench_only108.tfrecord")
    return {
        graph: Accuracy(100 * fmean(v for v, _ in pairs), 100 * fmean(t for _, t in pairs), len(pairs))
        for graph, pairs in found.items()
    }


def _records(file: Path) -> Iterator[bytes]:
    """TFRecord: length (8 bytes, little-endian), its check sum (4), the record, its check sum (4); sums not checked."""
    try:
        stream = file.open("rb")
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read ({error.strerror or error}); give nasbench_only108.tfrecord"
        ) from error
    with stream:
        while head := stream.read(12):
            length = struct.unpack("<Q", head[:8])[0] if len(head) == 12 else 0
            data = stream.read(min(length, MOST) + 4)
            if len(head) != 12 or length > MOST or len(data) != length + 4:
                raise UserError(f"{file}: not a TFRecord file, or cut off; give nasbench_only108.tfrecord")
            yield data[:-4]


def _fields(message: bytes) -> dict[int, list[bytes]]:
    """The fields of a Protocol Buffers message by number, each with the raw bytes of its values."""
    found: dict[int, list[bytes]] = {}
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind, start = tag & 7, at
        if kind == 0:
            _, at = _varint(message, at)
        elif kind == 2:
            length, start = _varint(message, at)
            at = start + length
        else:
            at += {1: 8, 5: 4}[kind]
        if at > len(message):
            raise ValueError("a field reaches beyond its message")
        found.setdefault(tag >> 3, []).append(message[start:at])
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _float(raw: bytes) -> float:
    value: float = struct.unpack("<f", raw)[0]
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"an accuracy must lie in 0 to 1, got {value}")
    return value
