"""`softcell convert`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from softcell.app.cli import options as o

if TYPE_CHECKING:
    from softcell.arch import Genotype

EPILOG = o.examples(
    "softcell convert runs/darts-darts-digits-1 --to darts",
    "softcell convert genotypes.txt --to json --out cell.json",
    "softcell convert genotypes.py@SNAS_mild --out cell.json",
    "softcell convert '|nor_conv_3x3~0|+|none~0|skip_connect~1|+|none~0|none~1|skip_connect~2|'",
)


def convert(
    genotype: o.Architecture,
    to: Annotated[
        o.Notation | None,
        typer.Option(help="Notation to write; json for the others, and the notation of its space for json."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write here instead of standard output.")] = None,
    overwrite: o.OverwriteFile = False,
) -> None:
    """Convert an architecture between softcell JSON, DARTS notation and NAS-Bench-201 strings."""
    from softcell.app.cli import inputs
    from softcell.app.cli.console import write

    content = inputs.from_stdin(genotype)
    assert content is not None
    found = inputs.genotype(content)
    text = render(found, to or _other(content, found))
    if out is None:
        typer.echo(text, nl=not text.endswith("\n"))
    else:
        write(out, text if text.endswith("\n") else text + "\n", overwrite)
        typer.echo(f"written: {out}")


def render(genotype: Genotype, to: o.Notation) -> str:
    """An architecture as text."""
    from softcell.arch import notation

    match to:
        case "json":
            return genotype.dumps()
        case "darts":
            return notation.to_darts(genotype)
        case "nb201":
            return notation.to_nb201(genotype)


def _other(content: str, genotype: Genotype) -> o.Notation:
    """The notation that is not the input's."""
    from softcell.reading import read_text
    from softcell.search.genotypes import is_notation, named_in_file

    if is_notation(content):
        is_json = content.lstrip().startswith("{")
    else:
        path, _ = named_in_file(content) or (Path(content), None)
        is_json = not path.is_file() or read_text(path).lstrip().startswith("{")
    return ("nb201" if set(genotype.cells) == {"cell"} else "darts") if is_json else "json"
