"""`softcell run`"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from softcell.app.cli import options as o
from softcell.app.cli import process
from softcell.errors import UserError

if TYPE_CHECKING:
    from softcell.app.pipeline.summary import Row, Summary
    from softcell.engine.task import OnEvent

EPILOG = o.examples(
    "softcell run --data photos/",
    "softcell run --data photos/ --max-params 1M --max-flops 200M --time 30m",
    "softcell run --data digits --time 3m",
    "softcell run --resume runs/run-photos-1",
)


def run(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="With --resume, the folder of the run to go on with.")
    ] = None,
    data: o.Data = None,
    max_params: Annotated[
        str | None, typer.Option(metavar="N", help="Most parameters of the network, as 1M; it will not have more.")
    ] = None,
    max_flops: Annotated[
        str | None, typer.Option(metavar="N", help="Most multiply-adds of the network for one image, as 200M.")
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(metavar="T", help="How long it may take in all, as 30m, 90s or 1h30m; 30m unless given."),
    ] = None,
    random: Annotated[
        int | None, typer.Option(metavar="N", help="Random architectures to compare with, 2 or more; 3 unless given.")
    ] = None,
    space: Annotated[str | None, typer.Option(help="Search space; else chosen for data and device.")] = None,
    method: Annotated[str | None, typer.Option(help="Search method; else chosen for data and device.")] = None,
    image_size: o.ImageSize = None,
    data_root: o.DataRoot = None,
    seed: o.Seed = None,
    device: o.Device = None,
    threads: o.Threads = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the run; else runs/run-DATA-N with the next free N.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped.")] = False,
    trust: o.Trust = False,
    quiet: o.Quiet = False,
) -> int:
    """From a folder of images to a trained and exported network, in a stated time and budget.

    Looks at the images, chooses space, method and sizes, searches, trains what was found beside random architectures
    and a plain network, and says whether the search was worth it.
    """
    began = process.began()  # before torch is imported: that takes seconds of the stated time too
    from softcell.api import free_folder
    from softcell.app.cli import results
    from softcell.app.cli.console import console
    from softcell.app.pipeline import Plan, Wishes, parse_time
    from softcell.app.pipeline import run as go

    given = {
        "max_params": max_params,
        "max_flops": max_flops,
        "time": None if time is None else parse_time(time),
        "random": random,
        "space": space,
        "method": method,
        "image_size": image_size,
        "data_root": data_root,
        "seed": seed,
        "device": device,
        "threads": threads,
    }
    wanted = {key: value for key, value in given.items() if value is not None}
    if resume:
        place = folder or out
        if place is None:
            raise UserError("--resume needs the folder of the run, as `softcell run --resume runs/run-photos-1`")
        if data is not None or wanted:
            raise UserError(
                "a resumed run keeps what it was asked for; leave out everything but --resume and its folder"
            )
        plan = Plan.open(place)
    else:
        if folder is not None:
            raise UserError(f"give images as --data {folder}; a folder alone is for --resume")
        if data is None:
            raise UserError("--data must name the images: a folder of class/image files, an .npz file or a dataset")
        plan = Plan.create(out or free_folder("run", data), Wishes(data=data, **wanted))  # type: ignore[arg-type]
    plan.began = began
    screen = console()
    try:
        outcome = go(plan, _Screen(screen, quiet))
    except KeyboardInterrupt:
        results.interrupted(screen, "run", "--resume", str(plan.folder))
        return 130
    if outcome.summary is None:
        results.interrupted(screen, "run", "--resume", str(plan.folder))
        return outcome.exit_code
    show_summary(screen, outcome.summary, plan)
    return 0


class _Screen:
    """Shows a run in a terminal, or as lines."""

    def __init__(self, console: Console, quiet: bool) -> None:
        self._console, self._quiet = console, quiet

    def say(self, *lines: str) -> None:
        if not self._quiet:
            for line in lines:
                self._console.print(Text(line))

    @contextmanager
    def working(self, what: str) -> Iterator[Callable[[int, int, str], None]]:
        from softcell.app.cli.progress import counting

        with counting(self._console, what, self._quiet) as step:
            yield step

    @contextmanager
    def job(self, heading: str) -> Iterator[OnEvent]:
        from softcell.app.cli.progress import Display

        with Display(self._console, heading, self._quiet) as display:
            yield display


def show_summary(screen: Console, summary: Summary, plan: object) -> None:
    """The table, what it means, and where everything is."""
    from softcell.app.cli.console import percent
    from softcell.app.cli.results import facts
    from softcell.app.pipeline import Plan
    from softcell.app.pipeline.inspect import counted
    from softcell.app.pipeline.summary import verdict

    assert isinstance(plan, Plan)
    screen.print()
    screen.print(
        Text(f"on {summary.count:,} test images, all trained for {counted(summary.found.epochs, 'epoch')}", "bold")
    )
    screen.print(Text(f"{'':<22}{'accuracy':>9}{'parameters':>13}{'multiply-adds':>15}{'latency':>11}"))

    def line(name: str, row: Row) -> None:
        costs = f"{row.parameters:>13,}{row.multiply_adds:>15,}{row.latency:>8.2f} ms"
        screen.print(Text(f"{name:<22}{percent(row.accuracy):>9}{costs}"))

    line("found by search", summary.found)
    line("plain residual", summary.plain)
    for number, row in enumerate(summary.random, 1):
        line(f"random {number}", row)
    screen.print(Text(f"{'random, mean ± std':<22}{summary.mean * 100:>5.1f} ± {summary.std * 100:.1f}%"))
    screen.print()
    for text in verdict(summary)[1]:
        screen.print(Text(text))
    screen.print()
    facts(screen, time=f"{plan.used():.0f} s of {plan.wishes.time:.0f} s", model=str(plan.folder / "export"))
    facts(screen, report=str(plan.folder / "report.html"))
    facts(screen, load=f'softcell.api.Network.from_pretrained("{plan.folder / "train"}")')
