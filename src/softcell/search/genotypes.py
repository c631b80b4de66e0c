"""Architectures of runs: the record of every epoch, and all the ways to name an architecture.

`architecture.jsonl` in a search's folder has a line per epoch: the weights of the candidates, and what is derived from
them. So an architecture can still be drawn and trained if its search was interrupted or went wrong late: `RUN@EPOCH`
names it. `read_genotype` reads that, genotype files in any notation, run folders and the notation itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from softcell.arch import Genotype, notation
from softcell.arch.genotype import FORMAT, VERSION
from softcell.engine import RunFolder
from softcell.engine.runfolder import SEEDS
from softcell.errors import UserError
from softcell.files import MAX_BYTES_OF_LINES, parse_json, read_json, read_text
from softcell.search.recipe import resolve
from softcell.settings import flat

FILE = "architecture.jsonl"
LAST = "last"
WHERE = {"seed", "device", "threads", "engine", "deterministic", "plugins", "data_root"}
"""Settings that change where and how a run computes, not what it computes."""
NO_MATTER = {"precision", "fused", "validate_every", "child_every"}
"""Further settings that do not change what a search finds: speed, and additional measurements."""


def about_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The `about` of a genotype: method, data, seed, and `settings` that differ from the method's own recipe."""
    about: dict[str, Any] = {key: recipe[key] for key in ("method", "data", "seed") if key in recipe}
    try:
        own = _changed(recipe)
    except UserError:
        own = {}  # the method or space is of a plugin that is not loaded here
    return {**about, **({"settings": own} if own else {})}


def _changed(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that differ from the method's recipe for the scale, by dotted names; of a path its last part."""
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
    """The record of one epoch, counted from 0."""
    kept = genotype.to_dict()
    settings = {"settings": kept["settings"]} if kept["settings"] else {}
    return {"epoch": epoch, **more, "genotype": kept["cells"], **settings}


def was_read(row: Mapping[str, Any], recipe: Mapping[str, Any]) -> bool:
    """Whether the architecture of a line was derived in that epoch, not in an earlier one or never.

    A method that derives from a pass over the validation split (IT-NAS) makes that pass in some epochs; lines of the
    others say `read: false`. Lines of older runs do not, so it follows from their recipe.
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
    """Folder and epoch where `source` is RUN@EPOCH; None for everything else, including a path with such a name."""
    match = re.fullmatch(r"(.+)@(\w+)", str(source).strip(), flags=re.DOTALL)
    if match is None or Path(source).exists() or not Path(match[1]).is_dir():
        return None
    return Path(match[1]), match[2]


def _derived_in(folder: Path, wanted: str) -> Genotype:
    """The architecture that a search derived after an epoch: a number from 1 on, or `last` for the last finished one.

    Budgets, and evolution at the end of the search, have no effect on it.
    """
    run = RunFolder.open(folder)
    run.verify(FILE, "genotype.json")
    manifest, rows = run.manifest, _rows(folder)
    if manifest["kind"] != "search":
        raise UserError(f"{folder}@{wanted} must name an epoch of a search, but {folder} is a {manifest['kind']} run")
    if not rows:
        raise UserError(
            f"{folder}: no epoch of this search is finished yet; resume it with `softcell search --resume {folder}`"
        )
    number = max(rows) if wanted == LAST else int(wanted) if wanted.isdecimal() else None
    if number not in rows:
        raise UserError(
            f"{folder}@{wanted} must name an epoch of the search, or `{LAST}`; it has {_spans(sorted(rows))}"
        )
    recipe = manifest["recipe"]
    read = [epoch for epoch, row in rows.items() if was_read(row, recipe)]
    if wanted == LAST and read:
        number = max(read)
    if number not in read:
        known = f"it did after epoch {_spans(sorted(read))}" if read else "no epoch has made one yet"
        raise UserError(
            f"{folder}@{wanted}: this search derives from passes over the validation split and ran none in that "
            f"epoch; {known}"
        )
    row = best_so_far([row for epoch, row in sorted(rows.items()) if epoch <= number])
    if "settings" not in row and (folder / "genotype.json").is_file():
        row = {**row, "settings": dict(Genotype.load(folder).settings)}  # older lines have none
    return genotype_of(row, str(recipe.get("space")), {**about_of(recipe), "epochs": number, "epoch": number})


def best_so_far(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The line with the architecture that a search has after the last of `rows`.

    Where architectures are trained one by one (random search), that is the best so far; the earlier one in a tie.
    """
    scored = [row for row in rows if isinstance(row.get("val_accuracy"), float)]
    return rows[-1] if "tables" in rows[-1] or not scored else max(scored, key=lambda row: row["val_accuracy"])


def epochs_in(folder: Path) -> list[int]:
    """The epochs, from 1 on, whose architecture a run has recorded."""
    return sorted(_rows(folder))


def _rows(folder: Path) -> dict[int, dict[str, Any]]:
    """Lines by their epoch, counted from 1."""
    file, found = folder / FILE, dict[int, dict[str, Any]]()
    try:
        text = read_text(file, most_bytes=MAX_BYTES_OF_LINES) if file.is_file() else ""
        for content in text.split("\n")[:-1]:  # a line that a killed run did not finish has no end
            row = parse_json(content, FILE)
            found[int(row["epoch"]) + 1] = row
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{file} cannot be read ({error!r}); every line must be a JSON object with `epoch`") from error
    return found


def _spans(numbers: list[int]) -> str:
    """`1 to 5`, or `10, 20, 30` where numbers are missing in between."""
    if numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1:
        return f"{numbers[0]} to {numbers[-1]}"
    shown = [str(n) for n in numbers]
    return ", ".join(shown if len(shown) < 10 else [*shown[:4], "...", *shown[-4:]])


def read_genotype(source: Genotype | str | Path) -> Genotype:
    """A genotype from itself, a file in any notation, FILE@NAME, a run folder, RUN@EPOCH, or the notation as text.

    Example:
        >>> from softcell.api import read_genotype
        >>> read_genotype("runs/search").space  # a run, RUN@EPOCH, a genotype file or any notation
        'nb201'
    """
    if isinstance(source, Genotype):
        return source
    text = str(source).strip()
    if is_notation(text):
        return notation.parse(text)
    if (named := named_epoch(source)) is not None:
        return _derived_in(run_in(named[0], searched=True), named[1])
    path, name = named_in_file(source) or (Path(source), None)
    if path.is_dir():
        path = path if (path / "genotype.json").exists() else run_in(path)
        if not (path / "genotype.json").exists() and (path / "run.json").exists():
            raise UserError(_why_none(path))
        return _in_folder(path)
    if not path.exists():
        raise UserError(
            f"no genotype at {text[:80]!r}: pass a file, FILE@NAME, a run folder, RUN@EPOCH, DARTS notation "
            "(Genotype(...)) or a NAS-Bench-201 string (|op~0|+...)"
        )
    if path.name == "genotype.json" and (path.parent / "run.json").is_file():
        RunFolder.open(path.parent).verify(path.name)
    content = read_text(path)
    if content.strip().startswith("{") and name is None:
        return Genotype.loads(content, str(path))
    try:
        return notation.parse(content, name)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _in_folder(path: Path) -> Genotype:
    """The `genotype.json` of a folder; it must be unchanged if the run is finished or is the best seed."""
    if (path / "run.json").is_file():
        RunFolder.open(path).verify("genotype.json")
    genotype = Genotype.load(path)
    if not (path / "run.json").is_file() and (path / SEEDS).is_file() and (run_in(path) / "run.json").is_file():
        best = run_in(path)
        if _in_folder(best) != genotype:
            raise UserError(
                f"{path / 'genotype.json'} must equal the genotype of the best seed, {best}, but differs; to use your "
                "own version, copy it out of the folder and pass that file"
            )
    return genotype


def named_in_file(source: str | Path) -> tuple[Path, str] | None:
    """File and name where `source` is FILE@NAME, one of several genotypes in a file; None for everything else."""
    path, at, name = str(source).strip().rpartition("@")
    if not at or not name or Path(source).exists() or not Path(path).is_file():
        return None
    return Path(path), name


def is_notation(text: str) -> bool:
    """Whether `text` is an architecture itself, not the name of a file."""
    return text.lstrip().startswith(("{", "|")) or "Genotype(" in text


def run_of(source: str | Path | None) -> Path | None:
    """The run folder that an argument names: itself, one of its epochs, or its genotype file; else None."""
    if source is None or is_notation(str(source)):
        return None
    named = named_epoch(source)
    path = Path(source) if named is None else named[0]
    folder = run_in(path, searched=named is not None) if path.is_dir() else path.parent
    return folder if path.exists() and (folder / "run.json").is_file() else None


def run_in(folder: Path, *, searched: bool = False) -> Path:
    """The run that a folder refers to: itself, if it is one.

    For a folder of `softcell run` that is its training, or its search if `searched` or if there is no training; for a
    folder of several seeds the best seed.
    """
    if (folder / "run.json").is_file():
        return folder
    if (folder / SEEDS).is_file():
        return folder / f"seed-{_best(folder)}"
    parts = ("search",) if searched else ("train", "search")
    return next((folder / part for part in parts if (folder / part / "run.json").is_file()), folder)


def _best(folder: Path) -> int:
    try:
        return int(read_json(folder / SEEDS)["best"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        if (folder / SEEDS).is_file() and '"kind": "train"' in (folder / SEEDS).read_text("utf-8", "replace"):
            raise UserError(
                f"{folder} has training runs with several seeds and no best one, since the test set would have to "
                "choose it; name one of the folders in it"
            ) from error
        raise UserError(
            f"{folder} has searches with several seeds and no best one yet; resume it with `softcell search --resume "
            f"{folder}`, or name one of the folders in it"
        ) from error


def _why_none(path: Path) -> str:
    manifest = RunFolder.open(path).manifest
    kind, status = manifest["kind"], manifest["status"]
    if kind != "search":
        return f"{path} is a {kind} run, which has no genotype; name the folder of a search"
    if status == "finished":
        return f"{path}: the genotype.json of this search is missing; use {path}@{LAST}"
    text = f"{path}: this run has no genotype yet (status {status!r}); resume it with `softcell search --resume {path}`"
    done = epochs_in(path)
    return f"{text}, or use {path}@{LAST}, its architecture after epoch {done[-1]}" if done else text
