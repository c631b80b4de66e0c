"""`softcell show`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from softcell.app.cli import options as o

EPILOG = o.examples(
    "softcell show runs/darts-darts-digits-1",
    "softcell show cell.json --svg cell.svg",
    "softcell show '|nor_conv_3x3~0|+|none~0|skip_connect~1|+|none~0|none~1|skip_connect~2|'",
)


def show(
    genotype: o.Architecture,
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the drawing as SVG.")] = None,
    title: Annotated[str | None, typer.Option(help="Title of the SVG drawing.")] = None,
    overwrite: o.OverwriteFile = False,
) -> None:
    """Draw an architecture in the terminal, and as SVG."""
    from softcell.app.cli import inputs
    from softcell.app.cli.console import console, write
    from softcell.app.report import to_svg, to_text

    found = inputs.genotype(genotype)
    screen = console()
    screen.print(to_text(found))
    if svg is not None:
        write(svg, to_svg(found, title), overwrite)
        screen.print(f"\ndrawing: {svg}", markup=False)
