"""Which images are used for what: seeded splits of the training images, and the seal on the test set.

Splits are disjoint, stratified, and the same on every machine and under every torch version.

    with test_set_sealed():
        search(...)          # any read of test pixels raises AssertionError

The seal holds for the whole process and all its threads, including loader threads. Only runs that take turns in one
process (`softcell.engine.interleave`) have one each (`exchange_seal`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from softcell.data.hashing import permutation
from softcell.errors import UserError

if TYPE_CHECKING:  # images check the seal before they are read
    from softcell.data.images import Images

Counts = NDArray[np.int64]
_ROUNDING = 1e-6  # fractions such as 0.1 + 0.2 + 0.7 miss 1 by about 1e-16


def fingerprint(indices: Tensor) -> str:
    """The first 16 hex digits of the SHA-256 of `indices` int64 [n] in their order.

    Example:
        >>> import torch
        >>> from softcell.data import fingerprint
        >>> fingerprint(torch.tensor([0, 1, 2])) == fingerprint(torch.tensor([2, 1, 0]))  # the order counts
        False
    """
    words = indices.detach().cpu().numpy().astype("<i8")
    return hashlib.sha256(words.tobytes()).hexdigest()[:16]


def _part_sizes(fractions: Mapping[str, float | int], total: int) -> Counts:
    """Sizes of the parts plus, last, of the unused rest: int64 [parts + 1], summing to `total`."""
    if not fractions:
        raise UserError("a split needs at least one part, but got none; pass for example {'train': 0.5, 'valid': 0.5}")
    shares, listed = [], ", ".join(f"{name}={value}" for name, value in fractions.items())
    for name, value in fractions.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise UserError(
                f"a part must be a fraction in (0, 1] or a count >= 1, but {name!r} is {value!r}; leave out empty parts"
            )
        if isinstance(value, float) and value > 1:
            raise UserError(
                f"a part given as a float is a fraction in (0, 1], but {name!r} is {value!r}; pass a count as an int"
            )
        shares.append(value if isinstance(value, int) else value * total)
    rest = total - sum(shares)
    if rest < -_ROUNDING * total:
        raise UserError(
            f"the parts must not exceed the {total:,} available images, but `{listed}` asks for "
            f"{math.ceil(sum(shares)):,}; make a part smaller"
        )
    shares.append(rest if rest > _ROUNDING * total else 0)
    exact = np.array(shares, np.float64)
    # Largest remainder: whole sizes that sum to the total, each less than one away from its share.
    sizes = np.floor(exact + _ROUNDING).astype(np.int64)
    missing = total - int(sizes.sum())
    sizes[np.argsort(-(exact - sizes), kind="stable")[:missing]] += 1
    for name, size in zip(fractions, sizes, strict=False):
        if size == 0:
            raise UserError(
                f"every part of a split must get an image, but {name!r} would get none of {total} with "
                f"`{listed}`; add images, or make its share of `split` larger"
            )
    return sizes


def _allocate(class_sizes: Counts, part_sizes: Counts) -> Counts:
    """How many of each class go to each part, int64 [classes, parts]: rows and columns sum to the arguments.

    Part by part, the class boundaries are cut proportionally and rounded as running sums, so that every
    number is less than one away from proportional and the sums are exact.
    """
    table = np.zeros((len(class_sizes), len(part_sizes)), np.int64)
    left = class_sizes.copy()
    for part, size in enumerate(part_sizes):
        pool = max(int(left.sum()), 1)
        ends = (np.cumsum(left) * size + pool // 2) // pool
        table[:, part] = np.diff(ends, prepend=0)
        left -= table[:, part]
    return table


def _spread(table: Counts) -> None:
    """Change `table` [classes, parts + 1] in place so that rare classes reach every part where they can.

    Each repair is a 2 x 2 exchange, which leaves all row and column sums as they are. The last column is the
    unused rest: it may become empty, and need not be filled.
    """
    num_parts = table.shape[1] - 1
    for part in range(num_parts):
        for needy in np.flatnonzero((table[:, part] == 0) & (table.sum(1) >= num_parts)):
            spare = table[needy].copy()
            spare[:num_parts] -= 1
            giver = int(np.argmax(spare))
            taker = int(np.argmax(table[:, part]))
            if spare[giver] < 1 or table[taker, part] < 2:
                continue  # the part is smaller than the number of classes
            table[needy, part] += 1
            table[needy, giver] -= 1
            table[taker, part] -= 1
            table[taker, giver] += 1


def split(images: Images | Tensor, fractions: Mapping[str, float | int], seed: int) -> dict[str, Tensor]:
    """Disjoint parts of `images` (or of labels int64 [N]), each a sorted int64 [n] of indices on the CPU.

    fractions: part -> share of all images if a float, number of images if an int (1.0 is all, 1 is one).
        The parts cover everything when the shares sum to one; otherwise the rest is left out.
    Classes are spread proportionally, and a class with at least as many images as there are parts is in
    every part, unless that part has fewer images than there are classes.

    Example:
        >>> import torch
        >>> from softcell.data import split
        >>> labels = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
        >>> halves = split(labels, {"weights": 0.5, "validation": 0.5}, seed=0)
        >>> {name: sorted(labels[indices].tolist()) for name, indices in halves.items()}
        {'weights': [0, 0, 1, 1], 'validation': [0, 0, 1, 1]}
    """
    labels = (images if isinstance(images, Tensor) else images.labels).cpu().numpy()
    sizes = _part_sizes(fractions, len(labels))
    # Shuffle first, then sort by label stably: the images of each class come in a random order.
    shuffled = permutation(seed, 0, len(labels), "split").numpy()
    grouped = shuffled[np.argsort(labels[shuffled], kind="stable")]
    class_sizes = np.unique(labels, return_counts=True)[1].astype(np.int64)
    table = _allocate(class_sizes, sizes)
    _spread(table)
    part_of = np.repeat(np.tile(np.arange(len(sizes)), len(class_sizes)), table.ravel())
    return {name: torch.from_numpy(np.sort(grouped[part_of == part])) for part, name in enumerate(fractions)}


_lock = Lock()
_depth = 0


@contextmanager
def test_set_sealed() -> Iterator[None]:
    """While this is active, reading images flagged as test raises AssertionError; it may be nested.

    Example:
        >>> import torch
        >>> from softcell.data import load, test_set_sealed
        >>> digits = load("digits")
        >>> with test_set_sealed():
        ...     digits.test.fetch(torch.tensor([0]))
        Traceback (most recent call last):
        AssertionError: the test set is sealed: ...
    """
    global _depth
    with _lock:
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1


# pytest collects everything called test_*, and this name is imported into test files.
test_set_sealed.__test__ = False  # type: ignore[attr-defined]


def exchange_seal(depth: int | None) -> int:
    """Return the nesting depth of the seal and install `depth`: for runs that take turns. None leaves it unchanged."""
    global _depth
    with _lock:
        before, _depth = _depth, _depth if depth is None else depth
    return before


def check_readable(is_test: bool) -> None:
    """Raise AssertionError if these images are test images and the seal is on."""
    # Raised, not asserted: `python -O` must not open the seal.
    if is_test and _depth:
        raise AssertionError(
            "the test set is sealed: no images flagged is_test may be read inside test_set_sealed(), "
            "but one was about to be read; use a split of the training images instead"
        )
