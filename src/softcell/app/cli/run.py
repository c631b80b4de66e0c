"""`softcell run` and `demo`: from images to a trained network in one command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from softcell.app import pipeline
from softcell.app.cli import options as o
from softcell.app.cli import results
from softcell.app.cli.console import console, percent, print_fields
from softcell.app.cli.search import run_search
from softcell.app.cli.train import run_train
from softcell.app.pipeline import Plan, Row, RunRequest, Summary, parse_time, verdict
from softcell.app.process import start_time
from softcell.app.progress import RunScreen
from softcell.engine.runfolder import free_folder
from softcell.errors import UserError
from softcell.text import count_of

RANDOM = 3
EPOCHS = 8  # of every training; a slow machine must stay under three minutes
commands = typer.Typer()


@commands.command("demo", epilog=o.examples("softcell demo", "softcell demo --out my-first-search --seed 1"))
def demo(
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the demo; an interrupted one is resumed. Default: runs/demo-N with the next free N.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="K", min=0, help="Random seed.")] = 0,
    device: o.Device = None,
    threads: o.Threads = None,
    quiet: o.Quiet = False,
) -> int:
    """Search a cell on handwritten digits and train it beside 3 random cells, in under 3 minutes."""
    folder = out or free_folder("demo")
    screen = console()
    given = o.settings({"seed": seed, "device": device, "threads": threads})
    again = ("demo", "--out", str(folder), *(("--seed", str(seed)) if seed else ()))
    search, train = folder / "search", folder / "train"
    begun, trained = ((part / "run.json").is_file() for part in (search, train))
    screen.print("1. Search a cell on 8x8 handwritten digits (UCI, part of the package)", style="bold")
    code = run_search(given, None, search, resume=begun, overwrite=False, quiet=quiet, hint=False, again=again)
    if code:
        return code
    screen.print(f"\n2. Train its network, and those of {RANDOM} random cells, with the same recipe", style="bold")
    return run_train(
        None if trained else str(search),
        {**given, "epochs": EPOCHS},
        None,
        train,
        random=RANDOM,
        resume=trained,
        overwrite=False,
        quiet=quiet,
        again=again,
    )


@commands.command(
    "run",
    epilog=o.examples(
        "softcell run --data photos/",
        "softcell run --data photos/ --max-params 1M --max-flops 200M --time 30m",
        "softcell run --data digits --time 3m",
        "softcell run --resume runs/run-photos-1",
    ),
)
def run(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="With --resume, the folder of the run to resume.")
    ] = None,
    data: o.Data = None,
    max_params: Annotated[
        str | None, typer.Option(metavar="N", help="Most parameters of the network, such as 1M; never exceeded.")
    ] = None,
    max_flops: Annotated[
        str | None, typer.Option(metavar="N", help="Most multiply-adds of the network per image, such as 200M.")
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(metavar="T", help="Total time, such as 30m, 90s or 1h30m. Default: 30m."),
    ] = None,
    random: Annotated[
        int | None, typer.Option(metavar="N", help="Random architectures to compare with, 2 or more. Default: 3.")
    ] = None,
    space: Annotated[str | None, typer.Option(help="Search space. Default: chosen for data and device.")] = None,
    method: Annotated[str | None, typer.Option(help="Search method. Default: chosen for data and device.")] = None,
    image_size: o.ImageSize = None,
    data_root: o.DataRoot = None,
    seed: o.Seed = None,
    device: o.Device = None,
    threads: o.Threads = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the run. Default: runs/run-DATA-N with the next free N."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted run.")] = False,
    trust: o.Trust = False,
    quiet: o.Quiet = False,
) -> int:
    """Go from a folder of images to a trained and exported network, in a given time and budget.

    Inspects the images, chooses space, method and sizes, searches, trains the result beside random architectures and a
    plain network, and reports whether the search was worth it.
    """
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
    request = {key: value for key, value in given.items() if value is not None}
    if resume:
        place = folder or out
        if place is None:
            raise UserError("--resume needs the folder of the run, as `softcell run --resume runs/run-photos-1`")
        if data is not None or request:
            raise UserError("a resumed run keeps its settings; leave out everything but --resume and the folder")
        plan = Plan.open(place)
    else:
        if folder is not None:
            raise UserError(f"give the images as --data {folder}; a folder alone is for --resume")
        if data is None:
            raise UserError("--data must name the images: a folder of CLASS/IMAGE files, an .npz file or a dataset")
        new = out or free_folder("run", data)
        plan = Plan.create(new, RunRequest(data=data, **request))  # type: ignore[arg-type]
    plan.began = start_time()  # importing torch takes seconds of the given time too
    screen = console()
    try:
        outcome = pipeline.run(plan, RunScreen(screen, quiet))
    except KeyboardInterrupt:
        results.interrupted(screen, "run", "--resume", str(plan.folder))
        return 130
    if outcome.summary is None:
        results.interrupted(screen, "run", "--resume", str(plan.folder))
        return outcome.exit_code
    _show_summary(screen, outcome.summary, plan)
    return 0


def _show_summary(screen: Console, summary: Summary, plan: Plan) -> None:
    """The table, the verdict and the files."""
    images, epochs = count_of(summary.count, "test image"), count_of(summary.found.epochs, "epoch")
    screen.print()
    screen.print(Text(f"on {images}, all trained for {epochs}", "bold"))
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
    print_fields(screen, time=f"{plan.used():.0f} s of {plan.request.time:.0f} s", model=str(plan.folder / "export"))
    print_fields(screen, report=str(plan.folder / "report.html"))
    print_fields(screen, load=f'softcell.api.Network.from_pretrained("{plan.folder / "train"}")')
