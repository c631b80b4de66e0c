"""The architecture of every epoch of a search: what is written of it, and how it is read again.

`architecture.jsonl` in a search's folder has a line per epoch: what the candidates weigh, and what is derived from it.
So what a search had that was stopped, or went wrong late, can still be drawn and trained: `RUN@EPOCH` names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from softcell.arch import Genotype
from softcell.arch.genotype import FORMAT, VERSION
from softcell.engine import RunFolder
from softcell.errors import UserError

FILE = "architecture.jsonl"
LAST = "last"


def line(epoch: int, genotype: Genotype, **more: Any) -> dict[str, Any]:
    """What is written of one epoch, counted from 0."""
    kept = genotype.to_dict()
    settings = {"settings": kept["settings"]} if kept["settings"] else {}
    return {"epoch": epoch, **more, "genotype": kept["cells"], **settings}


def genotype_of(row: Mapping[str, Any], space: str, about: Mapping[str, Any] | None = None) -> Genotype:
    """The architecture of one line."""
    cells = {"space": space, "cells": row.get("genotype"), "settings": row.get("settings", {}), "about": about or {}}
    return Genotype.from_dict({"format": FORMAT, "version": VERSION, **cells}, FILE)


def named_epoch(source: str | Path) -> tuple[Path, str] | None:
    """Folder and epoch where `source` is RUN@EPOCH; None for everything else, a path with such a name among it."""
    match = re.fullmatch(r"(.+)@(\w+)", str(source).strip(), flags=re.DOTALL)
    if match is None or Path(source).exists() or not Path(match[1]).is_dir():
        return None
    return Path(match[1]), match[2]


def derived_in(folder: Path, wanted: str) -> Genotype:
    """What a search had derived after one of its epochs, by its number from 1 on, or after the `last` that is done.

    As derived then: a budget, or evolution at the end of the search, has no part in it.
    """
    manifest, rows = RunFolder.open(folder).manifest, _rows(folder)
    if not rows:
        raise UserError(f"{folder} has no architecture of any epoch (no lines in {FILE}); give the folder of a search")
    number = max(rows) if wanted == LAST else int(wanted) if wanted.isdecimal() else None
    if number not in rows:
        raise UserError(
            f"{folder}@{wanted}: after @ stands an epoch of the search, or `{LAST}`; it has {_spans(sorted(rows))}"
        )
    row, recipe = rows[number], manifest["recipe"]
    if "settings" not in row and (folder / "genotype.json").is_file():
        row = {**row, "settings": dict(Genotype.load(folder).settings)}  # written before lines had them
    about = {key: recipe[key] for key in ("method", "data", "seed") if key in recipe}
    return genotype_of(row, str(recipe.get("space")), {**about, "epochs": number})


def epochs_in(folder: Path) -> list[int]:
    """The epochs, from 1 on, of which a run has the architecture."""
    return sorted(_rows(folder))


def _rows(folder: Path) -> dict[int, dict[str, Any]]:
    """Lines by their epoch, counted from 1."""
    file, found = folder / FILE, dict[int, dict[str, Any]]()
    try:
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        for content in text.splitlines():
            row = json.loads(content)
            found[int(row["epoch"]) + 1] = row
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(
            f"{file}: cannot be read ({error!r}); it must have one JSON object with `epoch` a line"
        ) from error
    return found


def _spans(numbers: list[int]) -> str:
    """`1 to 5`, or `10, 20, 30` where they do not follow each other."""
    if numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1:
        return f"{numbers[0]} to {numbers[-1]}"
    shown = [str(n) for n in numbers]
    return ", ".join(shown if len(shown) < 10 else [*shown[:4], "...", *shown[-4:]])
