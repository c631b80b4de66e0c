"""Plans of tiny sweeps, and run folders that look like those of their jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from softcell.engine import RunFolder, new_manifest

TINY = {"data": "digits", "epochs": 1, "batch_size": 256, "threads": 1, "space": {"channels": 2, "cells_per_stage": 1}}


def plan(tmp_path: Path, **settings: Any) -> Path:
    file = tmp_path / "plan.yaml"
    file.write_text(json.dumps({"methods": ["darts"], "spaces": ["nb201"], "seeds": 1, "search": TINY, **settings}))
    return file


def pretend(folder: Path, status: Any = "finished", recipe: dict[str, Any] | None = None) -> None:
    """A run folder with a status."""
    RunFolder.create(folder, new_manifest("search", recipe or {}, 0), overwrite=True).update(status=status)
