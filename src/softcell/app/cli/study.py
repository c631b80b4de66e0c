"""`softcell study`"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import typer

from softcell.app.cli import options as o

EPILOG = o.examples(
    "softcell study",
    "softcell study --classes 100",
    "softcell teacher resnet18 --set classifier.operation=spatial_attention --data cifar10   # trains one of the rows",
)


class Row(NamedTuple):
    """What Table 1 prints: multiply-adds and parameters in millions (increments), errors on CIFAR-10 and CIFAR-100."""

    operation: str | None
    multiply_adds: float
    parameters: float
    errors: tuple[float, float]


WIDTH, CLASSES = 64, 10
"""Of the networks that Table 1 counts."""
PAPER = (
    Row(None, 555.42, 11.17, (4.95, 23.61)),
    Row("dynamic_conv_3x3", 3.85, 0.03, (4.63, 22.63)),
    Row("dynamic_conv_5x5", 7.62, 0.04, (4.78, 23.45)),
    Row("dil_dynamic_conv_3x3", 3.85, 0.03, (4.97, 24.00)),
    Row("dil_dynamic_conv_5x5", 7.62, 0.04, (4.92, 23.75)),
    Row("spatial_attention", 1.08, 0.01, (4.79, 23.51)),
    Row("channel_attention", 0.40, 0.15, (4.83, 23.20)),
)


def study(
    classes: Annotated[int, typer.Option(metavar="N", min=1, help="Number of classes.")] = CLASSES,
    width: Annotated[int, typer.Option(metavar="N", min=1, help="Channels of the first stage.")] = WIDTH,
) -> None:
    """NOS's preliminary study: what each self-calibration operation adds to a ResNet-18 (Table 1).

    One operation stands after each of the stages 1 to 3. Parameters and multiply-adds of convolutions and matrix
    products for one 32x32 image are counted here; the paper's (64 channels, 10 classes) are printed beside them where
    the network is the same, with its errors. How the paper counted is not said. `softcell teacher resnet18 --set
    classifier.operation=...` trains a row.
    """
    from rich.table import Table

    from softcell.app.cli.console import console
    from softcell.evaluate.teacher import count_classifier

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("\nnetwork", no_wrap=True)
    comparable = (width, classes) == (WIDTH, CLASSES)
    titles = ("ours\nmult-adds", "paper\nmult-adds", "ours\nparams", "paper\nparams", "paper\nerrors*")
    for title in _kept(titles, comparable):
        table.add_column(title, justify="right", no_wrap=True)
    shape = (3, 32, 32)
    base = count_classifier("resnet18", {"width": width}, shape, classes)
    for row in PAPER:
        cost = count_classifier("resnet18", {"width": width, "operation": row.operation}, shape, classes)
        sign = "" if row.operation is None else "+"
        adds, parameters = cost.multiply_adds, cost.parameters
        if row.operation is not None:
            adds, parameters = adds - base.multiply_adds, parameters - base.parameters
        numbers = (
            f"{sign}{adds / 1e6:.3f}M",
            f"{sign}{row.multiply_adds:.2f}M",
            f"{sign}{parameters / 1e6:.4f}M",
            f"{sign}{row.parameters:.2f}M",
            f"{row.errors[0]:.2f}/{row.errors[1]:.2f}",
        )
        table.add_row("resnet18" if row.operation is None else f"+ {row.operation}", *_kept(numbers, comparable))
    screen = console()
    screen.print(table)
    note = "* in percent, on CIFAR-10 and CIFAR-100; errors of our own: not measured"
    if not comparable:
        note = f"the paper counts networks of width {WIDTH} with {CLASSES} classes: `softcell study` alone compares"
    screen.print(note, style="dim")


def _kept(row: tuple[str, ...], comparable: bool) -> tuple[str, ...]:
    """All columns, or our own alone."""
    return row if comparable else (row[0], row[2])
