"""Exceptions whose messages are shown to the user."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input: the message names the rule, the value and the way out. The command line shows it and exits with 2.

    Example:
        >>> from softcell.api import UserError, build_space
        >>> try:
        ...     build_space("dart")
        ... except UserError as error:
        ...     print(error)
        no space 'dart'; did you mean 'darts'? ...
    """


class LostRankError(UserError):
    """Another process of the run is gone. is_reported: another rank prints the message, so this one need not."""

    def __init__(self, text: str, *, is_reported: bool = False) -> None:
        super().__init__(text)
        self.is_reported = is_reported


def one_line(error: BaseException, most: int = 200) -> str:
    """The first `most` characters of an error on one line; its class if it says nothing."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def nearest(name: object, known: Iterable[str]) -> str:
    """A hint for a mistyped name: the closest known one, then all of them. Names from files may be of any type."""
    names = sorted(known)
    close = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(names) or 'none'}"
