"""What a run is asked for, and whether that can be had: checked before any image is read or any folder made."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from softcell.data import datasets
from softcell.data.images import check_memory
from softcell.errors import UserError
from softcell.search import resolve
from softcell.search.resource import quantity
from softcell.settings import MOST_RANDOM, at_most, is_seed, not_negative

LEAST_BATCH = 4
_FLOAT = 4  # bytes of a number that a network computes with
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def parse_time(text: str) -> float:
    """`30m`, `1h30m` or `90s` as seconds."""
    found = re.fullmatch(r"\s*(?:([0-9.]+)h)?\s*(?:([0-9.]+)m)?\s*(?:([0-9.]+)s)?\s*", text)
    try:
        seconds = (
            sum(float(part) * _UNITS[unit] for part, unit in zip(found.groups(), "hms", strict=True) if part)
            if found
            else 0.0
        )
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise UserError(f"--time must be a duration such as 30m, 90s or 1h30m, got {text!r}")
    return seconds


@dataclass(frozen=True)
class Wishes:
    """What was asked for; None leaves the choice to the run."""

    data: str
    time: float = 1800.0
    max_params: str | None = None
    max_flops: str | None = None
    random: int = 3
    seed: int = 0
    device: str = "auto"
    threads: int = 0
    data_root: str | None = None
    space: str | None = None
    method: str | None = None
    image_size: int | None = None

    def __post_init__(self) -> None:
        if not self.time > 0:
            raise UserError(f"`time > 0` must hold, but got {self.time}")
        at_most("random", self.random, MOST_RANDOM)
        if self.random < 2:
            raise UserError(f"`random >= 2` must hold (one architecture has no spread), but got random={self.random}")
        is_seed("seed", self.seed)
        not_negative("threads", self.threads)
        self.limits()

    def limits(self) -> dict[str, float]:
        """`parameters` and `multiply_adds` that must not be exceeded."""
        given = {"parameters": ("--max-params", self.max_params), "multiply_adds": ("--max-flops", self.max_flops)}
        return {kind: quantity(name, value) for kind, (name, value) in given.items() if value is not None}

    def place(self) -> Path:
        """Where the images lie, if they are a folder."""
        return (Path(self.data_root or ".") / self.data).expanduser()

    def is_folder(self) -> bool:
        """Whether the data are a folder of images, and no dataset that is known by name."""
        return self.data not in datasets() and self.place().is_dir()

    def check(self) -> None:
        """Raises what a new run would meet with only later: unknown names, and sizes that images cannot have.

        Not of a run that goes on: what it was asked for has been found good, perhaps on another machine.
        """
        named = {"method": self.method, "space": self.space, "image_size": self.image_size}
        resolve({"scale": "small", **{key: value for key, value in named.items() if value is not None}})
        if self.image_size is None:
            return
        if self.data in datasets() or self.place().is_file():
            raise UserError(
                f"--image-size is for folders of images, but --data {self.data} is none, and its images keep their "
                "size; leave it out"
            )
        check_memory(LEAST_BATCH, (3, self.image_size, self.image_size), _FLOAT)
