"""The lines a run has written so far: kept in its checkpoint, and from there as `.jsonl` files."""

import json
import math
import os
import re
from pathlib import Path
from typing import Any

from softcell.engine.files import atomic_write_text
from softcell.errors import UserError

METRICS = "metrics"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


class History:
    """Lines of JSON by file name (without `.jsonl`).

    Kept as text, so that what the checkpoint holds and what the files say cannot differ.
    """

    def __init__(self, lines: dict[str, list[str]] | None = None) -> None:
        self.lines = {name: list(texts) for name, texts in (lines or {METRICS: []}).items()}

    def append(self, name: str, value: Any) -> list[str]:
        """Add `value` as a line of `<name>.jsonl`; return the places of non-finite numbers, now null."""
        if not _NAME.fullmatch(name):
            raise ValueError(f"a record's name must be usable as a file name, but got {name!r}")
        lost: list[str] = []
        text = json.dumps(_finite(value, "", lost), allow_nan=False, ensure_ascii=False)
        self.lines.setdefault(name, []).append(text)
        return lost

    def rows(self, name: str = METRICS) -> list[Any]:
        """Return the lines of `name`, parsed."""
        return [json.loads(text) for text in self.lines.get(name, [])]

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Make the `.jsonl` files in `folder` say exactly this."""
        for name, texts in self.lines.items():
            if not isinstance(name, str) or not _NAME.fullmatch(name):  # of a checkpoint, which may come from anybody
                raise UserError(f"a record of a checkpoint must be named like a file, got {name!r}; start a new run")
            atomic_write_text(Path(folder) / f"{name}.jsonl", "".join(f"{text}\n" for text in texts))


def _finite(value: Any, where: str, lost: list[str]) -> Any:
    """Copy `value` with null for NaN and infinities, which JSON has no word for, noting where they were."""
    if isinstance(value, float) and not math.isfinite(value):
        lost.append(f"{where} is {value}")
        return None
    if isinstance(value, dict):
        return {key: _finite(item, f"{where}.{key}" if where else str(key), lost) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item, f"{where}[{index}]", lost) for index, item in enumerate(value)]
    return value
