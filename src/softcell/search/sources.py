"""Where an architecture may come from: a file in any notation, a run, an epoch of a search, or the notation itself."""

from __future__ import annotations

from pathlib import Path

from softcell.arch import Genotype, notation
from softcell.engine import RunFolder
from softcell.engine.seeds import SEEDS
from softcell.errors import UserError
from softcell.reading import read_json, read_text
from softcell.search.history import LAST, derived_in, epochs_in, named_epoch


def read_genotype(source: Genotype | str | Path) -> Genotype:
    """A genotype from itself, a file in any notation, FILE@NAME, a run folder, RUN@EPOCH, or the notation as text."""
    if isinstance(source, Genotype):
        return source
    text = str(source).strip()
    if is_notation(text):
        return notation.parse(text)
    if (named := named_epoch(source)) is not None:
        return derived_in(run_in(named[0], searched=True), named[1])
    path, name = named_in_file(source) or (Path(source), None)
    if path.is_dir():
        path = path if (path / "genotype.json").exists() else run_in(path)
        if not (path / "genotype.json").exists() and (path / "run.json").exists():
            raise UserError(_why_none(path))
        return _in_folder(path)
    if not path.exists():
        raise UserError(
            f"no genotype at {text[:80]!r}: give a file, FILE@NAME, a run folder, RUN@EPOCH, DARTS notation "
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
    """The `genotype.json` of a folder; that of a finished run, or of the best of several seeds, must be unchanged."""
    if (path / "run.json").is_file():
        RunFolder.open(path).verify("genotype.json")
    genotype = Genotype.load(path)
    if not (path / "run.json").is_file() and (path / SEEDS).is_file() and (run_in(path) / "run.json").is_file():
        best = run_in(path)
        if _in_folder(best) != genotype:
            raise UserError(
                f"{path / 'genotype.json'} must be that of the best seed, {best}, but differs from it; to use your own "
                "version of it, copy it out of the folder and give that file"
            )
    return genotype


def named_in_file(source: str | Path) -> tuple[Path, str] | None:
    """File and name where `source` is FILE@NAME: one of several genotypes that a file assigns. None for all else."""
    path, at, name = str(source).strip().rpartition("@")
    if not at or not name or Path(source).exists() or not Path(path).is_file():
        return None
    return Path(path), name


def is_notation(text: str) -> bool:
    """Whether `text` is an architecture itself and not the name of a file."""
    return text.lstrip().startswith(("{", "|")) or "Genotype(" in text


def run_of(source: str | Path | None) -> Path | None:
    """The run folder that an argument names, directly, by one of its epochs or by its genotype file."""
    if source is None or is_notation(str(source)):
        return None
    named = named_epoch(source)
    path = Path(source) if named is None else named[0]
    folder = run_in(path, searched=named is not None) if path.is_dir() else path.parent
    return folder if path.exists() and (folder / "run.json").is_file() else None


def run_in(folder: Path, *, searched: bool = False) -> Path:
    """The run that a folder of several stands for, itself where it is one.

    Of `softcell run` it is the training, or the search where that is asked for or all there is; of several seeds the
    best one.
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
                f"{folder} has trainings of several seeds, and none is preferred: that would be choosing by the test "
                "set; name one of the folders in it"
            ) from error
        raise UserError(
            f"{folder} has searches of several seeds, of which none is the best yet; go on with `softcell search "
            f"--resume {folder}`, or name one of the folders in it"
        ) from error


def _why_none(path: Path) -> str:
    manifest = RunFolder.open(path).manifest
    kind, status = manifest["kind"], manifest["status"]
    if kind != "search":
        return f"{path} is a {kind} run, which has no architecture that was searched; give the folder of a search"
    if status == "finished":
        return f"{path}: the genotype.json of this search is gone; {path}@{LAST} is what it had in the end"
    told = f"{path}: this run has no genotype yet (status {status!r}); `softcell search --resume {path}` goes on"
    done = epochs_in(path)
    return f"{told}, and {path}@{LAST} is what it had after epoch {done[-1]}" if done else told
