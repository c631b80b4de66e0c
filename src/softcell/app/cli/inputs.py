"""Arguments that name an architecture, a run or a shape."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from softcell.arch import Genotype, notation
from softcell.engine import RunFolder
from softcell.errors import UserError
from softcell.recipes import train_recipe
from softcell.registry import load_plugins, refused
from softcell.search.genotypes import read_genotype, run_of
from softcell.spaces import Shape

MOST_CHARACTERS = 2**26


def from_stdin(text: str | None) -> str | None:
    """The argument itself, or the content of standard input if it is `-`."""
    if text != "-":
        return text
    try:
        content = sys.stdin.read(MOST_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        raise UserError(f"standard input must be text, but is not: {error}") from error
    if len(content) > MOST_CHARACTERS:
        raise UserError(f"an architecture has at most {MOST_CHARACTERS:,} characters, but standard input has more")
    if not content.strip():
        raise UserError("expected an architecture on standard input, but it is empty")
    notation.parse(content)  # so that other text is not mistaken for a path
    return content


def genotype(text: str) -> Genotype:
    content = from_stdin(text)
    assert content is not None
    return read_genotype(content)


def with_run(text: str, *, only_trusted: bool = False) -> tuple[Path | None, dict[str, Any] | None, Genotype]:
    """The architecture that an argument names and, if it belongs to a run, its folder and manifest.

    The run's plugins are loaded first: they may define its space. only_trusted: skip plugins that are not trusted
    instead of raising.
    """
    folder = run_of(text)
    manifest = None if folder is None else RunFolder.open(folder).manifest
    if manifest is not None:
        named = manifest["recipe"].get("plugins", ())
        skipped = refused(named) if only_trusted else []
        load_plugins([path for path in named if path not in skipped], f"the run in {folder}")
    return folder, manifest, genotype(text)


def own_network(text: str, manifest: dict[str, Any] | None) -> tuple[dict[str, Any] | None, Shape | None, int | None]:
    """The network of a run: settings of its space, shape of its images, number of outputs; None for what is unknown.

    A training has one, finished or not; a search has the one that `softcell train` would build. An architecture without
    a run has none.
    """
    if manifest is None or manifest["kind"] not in ("train", "search"):
        return None, None, None
    data = manifest["results"].get("data")  # searches of older versions lack it
    image = None if data is None else tuple(data["shape"])
    if manifest["kind"] == "train":
        outputs = None if data is None else data.get("outputs", len(data["classes"]))
        return manifest["recipe"]["space_settings"], image, outputs
    return train_recipe(text, {})[1].space_settings, image, None if data is None else data["num_classes"]


def shape(text: str) -> Shape:
    """`3x32x32` as channels, height and width."""
    found = re.fullmatch(r"([1-9]\d*)[x×]([1-9]\d*)[x×]([1-9]\d*)", text)
    if found is None:
        raise UserError(f"--input must be CHANNELSxHEIGHTxWIDTH, such as 3x32x32, got {text!r}")
    return int(found[1]), int(found[2]), int(found[3])
