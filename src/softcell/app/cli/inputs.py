"""What an argument that names an architecture may be."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from softcell.errors import UserError

MOST_CHARACTERS = 2**26

if TYPE_CHECKING:
    from softcell.arch import Genotype
    from softcell.spaces import Shape


def from_stdin(text: str | None) -> str | None:
    """The argument itself, or what standard input holds where it is `-`."""
    if text != "-":
        return text
    try:
        content = sys.stdin.read(MOST_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        raise UserError(f"standard input must be text, but is not: {error}") from error
    if len(content) > MOST_CHARACTERS:
        raise UserError(f"an architecture has at most {MOST_CHARACTERS:,} characters, but standard input has more")
    if not content.strip():
        raise UserError("an architecture was expected on standard input, but it is empty")
    from softcell.arch import notation

    notation.parse(content)  # so that text which is no notation is not taken for a path
    return content


def genotype(text: str) -> Genotype:
    from softcell.search.genotypes import read_genotype

    content = from_stdin(text)
    assert content is not None
    return read_genotype(content)


def with_run(text: str, *, only_trusted: bool = False) -> tuple[Path | None, dict[str, Any] | None, Genotype]:
    """The architecture that an argument names and, where it is that of a run, its folder and manifest.

    The run's plugins are loaded first: its space may be one of theirs. only_trusted: those that are not trusted are
    left out instead of being refused.
    """
    from softcell.engine import RunFolder
    from softcell.registry import load_plugins, refused
    from softcell.search.genotypes import run_of

    folder = run_of(text)
    manifest = None if folder is None else RunFolder.open(folder).manifest
    if manifest is not None:
        named = manifest["recipe"].get("plugins", ())
        left_out = refused(named) if only_trusted else []
        load_plugins([path for path in named if path not in left_out], f"the run in {folder}")
    return folder, manifest, genotype(text)


def own_network(text: str, manifest: dict[str, Any] | None) -> tuple[dict[str, Any] | None, Shape | None, int | None]:
    """The network of a run: settings of its space, shape of its images, number of outputs; None what nobody knows.

    A training has one, finished or not; a search that which `softcell train` would make of it. Architectures without a
    run have none.
    """
    from softcell.api import train_recipe

    if manifest is None or manifest["kind"] not in ("train", "search"):
        return None, None, None
    data = manifest["results"].get("data")  # searches of older versions do not tell
    image = None if data is None else tuple(data["shape"])
    if manifest["kind"] == "train":
        outputs = None if data is None else data.get("outputs", len(data["classes"]))
        return manifest["recipe"]["space_settings"], image, outputs
    return train_recipe(text, {})[1].space_settings, image, None if data is None else data["num_classes"]
