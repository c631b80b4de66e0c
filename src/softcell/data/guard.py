"""A seal on the test set: within it any read of test images fails.

    with test_set_sealed():
        search(...)          # any read of test pixels raises AssertionError

The seal holds for the whole process and all its threads, loader threads too. Only runs that take turns in one process
(`softcell.engine.interleave`) have one each (`exchange_seal`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

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


# pytest collects whatever is called test_*, and this name is imported into test files.
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
            "but a read was tried; use a split of the training images instead"
        )
