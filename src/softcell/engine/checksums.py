"""SHA-256 checksums of the files of a finished run: recorded in its `run.json`, verified wherever a file is read.

A flipped bit in trained weights, or another architecture in `genotype.json`, would otherwise pass for the run's result.
Checkpoints are not listed, since they carry a checksum of their own. Runs of earlier versions have no checksums and
are read as they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from softcell.errors import UserError

_NAMES = ("genotype.json",)
_SUFFIXES = (".jsonl", ".safetensors")
_BLOCK = 1 << 20
DIGEST = "digest"


def checksum(file: Path) -> str:
    """The SHA-256 of a file's content, in hex."""
    total = hashlib.sha256()
    with open(file, "rb") as stream:
        while block := stream.read(_BLOCK):
            total.update(block)
    return total.hexdigest()


def checksums_of(folder: Path) -> dict[str, str]:
    """The checksums of the results in a run's folder, by file name."""
    results = (file for file in folder.iterdir() if file.name in _NAMES or file.suffix in _SUFFIXES)
    return {file.name: checksum(file) for file in sorted(results) if file.is_file()}


def mismatch(folder: Path, known: Mapping[str, Any], name: str) -> str | None:
    """A sentence where `name` in `folder` is not the file whose checksum is in `known`; None where nothing is wrong.

    A file without a checksum, or one that is gone, is left to whoever reads it.
    """
    wanted, file = known.get(name), folder / name
    if wanted is None or not file.is_file() or checksum(file) == wanted:
        return None
    copied = (
        "to use your own version of it, copy it out of the run folder and give that file"
        if name in _NAMES
        else "restore it from a backup, or repeat the run"
    )
    return f"{file} is not what the run wrote: its SHA-256 differs from the one in run.json; {copied}."


def digest_of(manifest: Mapping[str, Any]) -> str:
    """The SHA-256 of a manifest's content apart from `digest`, however its JSON is laid out."""
    content = {key: value for key, value in manifest.items() if key != DIGEST}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def check_digest(manifest: Mapping[str, Any], file: Path) -> None:
    """Raises `UserError` where a manifest was changed after it was written; those of running jobs have no digest."""
    if DIGEST in manifest and manifest[DIGEST] != digest_of(manifest):
        raise UserError(
            f"{file} was changed or damaged after the run had finished: it does not match its own digest. Restore it "
            f'from a backup; if you changed it on purpose, remove its "{DIGEST}" line.'
        )
