"""Where an architecture may come from: a file in any notation, a run, an epoch of a search, or the notation itself."""

from __future__ import annotations

from pathlib import Path

from softcell.arch import Genotype, notation
from softcell.engine import RunFolder
from softcell.errors import UserError
from softcell.search.history import LAST, derived_in, epochs_in, named_epoch


def read_genotype(source: Genotype | str | Path) -> Genotype:
    """A genotype from itself, a file in any notation, a run folder, RUN@EPOCH, or the notation as text."""
    if isinstance(source, Genotype):
        return source
    text = str(source).strip()
    if is_notation(text):
        return notation.parse(text)
    if (named := named_epoch(source)) is not None:
        return derived_in(*named)
    path = Path(source)
    if path.is_dir():
        if not (path / "genotype.json").exists() and (path / "run.json").exists():
            raise UserError(_unfinished(path))
        return Genotype.load(path)
    if not path.exists():
        raise UserError(
            f"no genotype at {text[:80]!r}: give a file, a run folder, RUN@EPOCH, DARTS notation (Genotype(...)) or a "
            "NAS-Bench-201 string (|op~0|+...)"
        )
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text ({error})") from error
    if content.strip().startswith("{"):
        return Genotype.loads(content, str(path))
    try:
        return notation.parse(content)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def is_notation(text: str) -> bool:
    """Whether `text` is an architecture itself and not the name of a file."""
    return text.lstrip().startswith(("{", "|")) or "Genotype(" in text


def run_of(source: str | Path | None) -> Path | None:
    """The run folder that an argument names, directly, by one of its epochs or by its genotype file."""
    if source is None or is_notation(str(source)):
        return None
    named = named_epoch(source)
    path = Path(source) if named is None else named[0]
    folder = path if path.is_dir() else path.parent
    return folder if path.exists() and (folder / "run.json").is_file() else None


def _unfinished(path: Path) -> str:
    status = RunFolder.open(path).manifest["status"]
    told = f"{path}: this run has no genotype yet (status {status!r}); `softcell search --resume {path}` goes on"
    done = epochs_in(path)
    return f"{told}, and {path}@{LAST} is what it had after epoch {done[-1]}" if done else told
