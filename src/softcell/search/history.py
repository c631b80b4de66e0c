"""The architecture of every epoch of a search: what is written of it, and how it is read again.

`architecture.jsonl` in a search's folder has a line per epoch: what the candidates weigh, and what is derived from it.
So what a search had that was stopped, or went wrong late, can still be drawn and trained: `RUN@EPOCH` names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from softcell.arch import Genotype
from softcell.arch.genotype import FORMAT, VERSION
from softcell.engine import RunFolder
from softcell.errors import UserError
from softcell.reading import MOST_BYTES_OF_LINES, parse_json, read_text
from softcell.search.recipe import resolve
from softcell.settings import flat

FILE = "architecture.jsonl"
LAST = "last"


WHERE = {"seed", "device", "threads", "engine", "deterministic", "plugins", "data_root"}
"""Settings that say where and how a run computed and from which numbers, not what it did."""
NO_MATTER = {"precision", "fused", "validate_every", "child_every"}
"""Further ones that say nothing of what a search finds: how fast it is, and what is measured beside it."""


def about_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What a genotype tells of its search: method, data, seed, and `settings` beside the method's own recipe."""
    told: dict[str, Any] = {key: recipe[key] for key in ("method", "data", "seed") if key in recipe}
    try:
        own = _beside(recipe)
    except UserError:
        own = {}  # of a plugin that is not loaded here
    return {**told, **({"settings": own} if own else {})}


def _beside(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What was set beside the method's recipe for the scale, by dotted names; of files and folders their last part."""
    names = {key: recipe[key] for key in ("method", "space", "data")}
    usual = resolve(names).scale
    base = flat(resolve({**names, "scale": recipe.get("scale", usual)}).to_dict())
    found = {key: value for key, value in flat(recipe).items() if key not in base or base[key] != value}
    if recipe.get("scale", usual) != usual:
        found["scale"] = recipe["scale"]
    left = {*names, *WHERE, *NO_MATTER}
    return {
        key: Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value
        for key, value in found.items()
        if key.partition(".")[0] not in left
    }


def line(epoch: int, genotype: Genotype, **more: Any) -> dict[str, Any]:
    """What is written of one epoch, counted from 0."""
    kept = genotype.to_dict()
    settings = {"settings": kept["settings"]} if kept["settings"] else {}
    return {"epoch": epoch, **more, "genotype": kept["cells"], **settings}


def was_read(row: Mapping[str, Any], recipe: Mapping[str, Any]) -> bool:
    """Whether the architecture of a line rests on that epoch, not on an earlier reading or on none at all.

    A method that derives from a pass over the validation split (IT-NAS) reads where that is made; lines of other epochs
    say `read: false`. Those of older runs do not, so their recipe has to tell.
    """
    if "read" in row or recipe.get("method") != "itnas":
        return bool(row.get("read", True))
    number, all_paths = int(row["epoch"]) + 1, recipe.get("method_settings", {}).get("paths", "all") == "all"
    return number == recipe.get("epochs") or (all_paths and number % int(recipe.get("validate_every", 1)) == 0)


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
    run = RunFolder.open(folder)
    run.verify(FILE, "genotype.json")
    manifest, rows = run.manifest, _rows(folder)
    if manifest["kind"] != "search":
        raise UserError(f"{folder}@{wanted} must name an epoch of a search, but {folder} is a {manifest['kind']} run")
    if not rows:
        raise UserError(f"{folder}: no epoch of this search is done yet; `softcell search --resume {folder}` goes on")
    number = max(rows) if wanted == LAST else int(wanted) if wanted.isdecimal() else None
    if number not in rows:
        raise UserError(
            f"{folder}@{wanted}: after @ stands an epoch of the search, or `{LAST}`; it has {_spans(sorted(rows))}"
        )
    recipe = manifest["recipe"]
    read = [epoch for epoch, row in rows.items() if was_read(row, recipe)]
    if wanted == LAST and read:
        number = max(read)
    if number not in read:
        known = f"it was read after epoch {_spans(sorted(read))}" if read else "none of its epochs was read yet"
        raise UserError(
            f"{folder}@{wanted}: this search derives from passes over the validation split, and made none in that "
            f"epoch; {known}"
        )
    row = best_so_far([row for epoch, row in sorted(rows.items()) if epoch <= number])
    if "settings" not in row and (folder / "genotype.json").is_file():
        row = {**row, "settings": dict(Genotype.load(folder).settings)}  # written before lines had them
    return genotype_of(row, str(recipe.get("space")), {**about_of(recipe), "epochs": number, "epoch": number})


def best_so_far(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The line whose architecture a search has after the last of `rows`.

    Of architectures that are trained one by one (random search) it is the best so far, the earlier one in a tie.
    """
    scored = [row for row in rows if isinstance(row.get("val_accuracy"), float)]
    return rows[-1] if "tables" in rows[-1] or not scored else max(scored, key=lambda row: row["val_accuracy"])


def epochs_in(folder: Path) -> list[int]:
    """The epochs, from 1 on, of which a run has the architecture."""
    return sorted(_rows(folder))


def _rows(folder: Path) -> dict[int, dict[str, Any]]:
    """Lines by their epoch, counted from 1."""
    file, found = folder / FILE, dict[int, dict[str, Any]]()
    try:
        text = read_text(file, most_bytes=MOST_BYTES_OF_LINES) if file.is_file() else ""
        for content in text.split("\n")[:-1]:  # what a killed run was about to write has no end of line
            row = parse_json(content, FILE)
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
