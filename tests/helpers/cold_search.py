"""Run as a script with an empty cache of Triton's: a small search, and what compiled its kernels, as a line of JSON."""

import json
import sys
from pathlib import Path
from typing import Any

from triton import knobs  # type: ignore[import-not-found, unused-ignore]

from softcell.engine.task import Note
from softcell.search import dry_pass, resolve, search


def main(given: dict[str, Any], folder: Path) -> None:
    compiled: list[str] = []
    found: list[str] = []
    notes: list[str] = []
    before: list[int] = []

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        (found if cache_hit else compiled).append(src.name)

    warm_up = dry_pass.warm_up_by_run

    def noting(run: Any, notify: Any) -> int:
        before.append(warm_up(run, notify))
        return before[-1]

    dry_pass.warm_up_by_run = noting
    knobs.compilation.listener = listen
    result = search(resolve(given), folder, on_event=lambda e: notes.append(e.text) if isinstance(e, Note) else None)
    rows = [{key: value for key, value in row.items() if key != "seconds"} for row in result.metrics]
    print(json.dumps({"compiled": compiled, "found": len(found), "ahead": before, "notes": notes, "metrics": rows}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
