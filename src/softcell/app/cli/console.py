"""Where results are printed; silent on all processes but the first."""

from __future__ import annotations

import shlex
from pathlib import Path

from rich.console import Console

from softcell.app.cli.places import check_absent
from softcell.errors import UserError


def console() -> Console:
    """Standard output as it is now; no highlighting, so that numbers look alike everywhere."""
    from softcell.api import is_main

    return Console(highlight=False, soft_wrap=True, quiet=not is_main())


def percent(share: float) -> str:
    return "100%" if share == 1.0 else f"{share * 100:.1f}%"


def command(*words: str | Path) -> str:
    """A command line to copy."""
    return shlex.join(("softcell", *(str(word) for word in words)))


def write(path: Path, text: str, overwrite: bool) -> None:
    """Writes a file that the user asked for; one that exists is kept unless told otherwise."""
    check_absent(path, overwrite)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}); choose another place") from error
