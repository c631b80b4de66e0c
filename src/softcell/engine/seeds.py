"""One recipe with several seeds in one folder: a complete run per seed (`seed-0`, `seed-1`, …) and `seeds.json`.

Resuming continues unfinished runs and repeats nothing. The caller decides what a run does and what its results are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from softcell.engine.interleave import Running, interleave
from softcell.engine.lock import locked
from softcell.engine.runfolder import entries
from softcell.engine.session import Interrupt, exit_code
from softcell.errors import UserError
from softcell.files import atomic_write_text, read_json

SEEDS = "seeds.json"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ran(Generic[T]):
    """Results and errors by seed; `exit_code`: 1 after an error, the signal's code after an interruption, else 0."""

    results: dict[int, T]
    errors: dict[int, Exception]
    exit_code: int


def seed_folder(folder: Path, seed: int) -> Path:
    """The folder of the run of a seed."""
    return folder / f"seed-{seed}"


@contextmanager
def seeds_folder(out: str | Path, seeds: Sequence[int], kind: str, *, resume: bool, overwrite: bool) -> Iterator[Path]:
    """The locked folder of several runs of one `kind` (`search`, `train`): a new one, or the one to resume."""
    if not seeds or len(set(seeds)) != len(seeds):
        raise UserError(f"seeds must be different and at least one, but got {list(seeds)}")
    folder = Path(out)
    with locked(folder):
        if resume:
            before = read_seeds(folder, kind)
            if before != list(seeds):
                raise UserError(
                    f"a {kind} must be resumed with its own seeds, but {folder} has {before} and got {list(seeds)}"
                )
        elif entries(folder) and not overwrite:
            raise UserError(f"a new {kind} needs an empty folder, but {folder} is not; use --resume, or another --out")
        elif entries(folder):
            read_seeds(folder, kind)  # raises unless it is such a folder
        folder.mkdir(parents=True, exist_ok=True)
        yield folder


def run_seeds(
    start: Callable[[int], Running[T]],
    seeds: Sequence[int],
    done: Mapping[int, T],
    device: torch.device,
    at_once: int | None,
) -> Ran[T]:
    """Run `start(seed)` for all seeds that are not `done`; at_once: None for all on a GPU and one elsewhere."""
    left = [seed for seed in seeds if seed not in done]
    together = at_once or (len(seeds) if device.type == "cuda" else 1)
    with Interrupt() as interrupt:
        found = interleave([lambda seed=seed: start(seed) for seed in left], device, together)  # type: ignore[misc]
        stopped = interrupt.signal
    errors = {seed: value for seed, value in zip(left, found, strict=True) if isinstance(value, Exception)}
    if not done and len(errors) == len(seeds) and all(isinstance(error, UserError) for error in errors.values()):
        raise next(iter(errors.values()))  # the recipe is wrong, not a seed
    fresh = {seed: value for seed, value in zip(left, found, strict=True) if not isinstance(value, Exception)}
    results = {seed: {**done, **fresh}[seed] for seed in seeds if seed in done or seed in fresh}
    return Ran(results, errors, exit_code(stopped) if stopped else int(bool(errors)))


def read_seeds(folder: Path, kind: str = "search") -> list[int]:
    """The seeds of several runs of one kind."""
    try:
        found = read_json(folder / SEEDS)
        known, seeds = found.get("kind", "search"), [int(one["seed"]) for one in found["seeds"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{folder} is not a {kind} with several seeds: {SEEDS} is missing or damaged ({error})"
        ) from error
    if known != kind:
        raise UserError(
            f"{folder} holds several runs of `softcell {known}`: resume it with `softcell {known} --resume`"
        )
    return seeds


def write_seeds(folder: Path, kind: str, rows: Sequence[Mapping[str, Any]], best: int | None, **more: Any) -> None:
    """Write `seeds.json`: a row for each seed, the best seed (or None), and results over all seeds."""
    content = {"format": "softcell-seeds", "version": 1, "kind": kind, "best": best, **more, "seeds": list(rows)}
    atomic_write_text(folder / SEEDS, json.dumps(content, indent=2) + "\n")
