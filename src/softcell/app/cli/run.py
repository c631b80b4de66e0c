"""`softcell run`: from images to a trained network in one command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from softcell.app import pipeline
from softcell.app.cli import options as o
from softcell.app.cli import output
from softcell.app.cli.output import console, print_fields
from softcell.app.pipeline import Front, Plan, RunRequest, Summary, parse_time, verdict
from softcell.app.process import start_time
from softcell.app.progress import RunScreen
from softcell.engine.runfolder import free_folder
from softcell.errors import UserError
from softcell.text import count_of, percent

commands = typer.Typer()


@commands.command(
    "run",
    epilog=o.examples(
        "softcell run --data photos/",
        "softcell run --data photos/ --max-params 1M --max-flops 200M --time 30m",
        "softcell run --data photos/ --max-params 50k,200k,1M --time 1h",
        "softcell run --data digits --time 3m",
        "softcell run --data photos/ --beside my-model.onnx",
        "softcell run --resume runs/run-photos-1",
    ),
)
def run(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="With --resume, the folder of the run to resume.")
    ] = None,
    data: o.Data = None,
    max_params: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Most parameters of the network, such as 1M; several such as 50k,200k,1M give one network each, from "
            "one search. Default: 2M, without --max-flops.",
        ),
    ] = None,
    max_flops: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]", help="Most multiply-adds of the network per image, such as 200M; several as above."
        ),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(metavar="T", help="Total time, such as 30m, 90s or 1h30m. Default: 30m."),
    ] = None,
    random: Annotated[
        int | None, typer.Option(metavar="N", help="Random architectures in the competition, 2 or more. Default: 3.")
    ] = None,
    space: Annotated[str | None, typer.Option(help="Search space. Default: chosen for data and device.")] = None,
    method: Annotated[str | None, typer.Option(help="Search method. Default: chosen for data and device.")] = None,
    image_size: o.ImageSize = None,
    beside: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Your own model (.onnx, or .pt2 with --trust), measured on the same test images: pixels in 0..1 to "
            "one score per class.",
        ),
    ] = None,
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

    Inspects the images, searches a cell, and lets it compete with plain residual networks and random cells in short
    trainings. The winner gets at least 60% of the time. The verdict says whether the search was worth it.
    """
    given = {
        "max_params": max_params,
        "max_flops": max_flops,
        "time": None if time is None else parse_time(time),
        "random": random,
        "space": space,
        "method": method,
        "image_size": image_size,
        "beside": None if beside is None else str(beside.resolve()),
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
        output.interrupted(screen, "run", "--resume", str(plan.folder))
        return 130
    if outcome.summary is None:
        output.interrupted(screen, "run", "--resume", str(plan.folder))
        return outcome.exit_code
    if outcome.front is not None:
        _show_front(screen, outcome.front, plan)
    else:
        _show_summary(screen, outcome.summary, plan)
    return 0


def _show_front(screen: Console, front: Front, plan: Plan) -> None:
    """One line per budget, the verdicts, and the files."""
    count = front.entries[0].summary.count
    screen.print()
    screen.print(Text(f"one network per budget, on {count_of(count, 'test image')}", "bold"))
    costs = f"{'parameters':>12}{'multiply-adds':>15}{'latency':>11}{'epochs':>8}"
    screen.print(Text(f"{'budget':<10}{'network':<10}{costs}{'accuracy':>10}"))
    for entry in front.entries:
        one = entry.summary.delivered
        costs = f"{one.parameters:>12,}{one.multiply_adds:>15,}{f'{one.latency:.2f} ms':>11}{one.epochs:>8,}"
        screen.print(Text(f"{entry.budget:<10}{one.name:<10}{costs}{percent(one.accuracy):>10}"))
    for budget, why in front.left_out.items():
        screen.print(Text(f"{budget:<10}left out: {why}"))
    screen.print(Text("To choose among them by this accuracy is to choose by the test images."))
    for entry in front.entries:
        screen.print()
        screen.print(Text(f"{entry.budget}: {entry.summary.delivered.name}, since {entry.summary.why}", "bold"))
        for text in verdict(entry.summary)[1]:
            screen.print(Text(text))
    screen.print()
    models = ", ".join(str(plan.folder / entry.budget / "export") for entry in front.entries)
    print_fields(screen, time=f"{plan.used():.0f} s of {plan.request.time:.0f} s", models=models)
    print_fields(screen, drawing=str(plan.folder / "front.svg"), report=str(plan.folder / "report.html"))
    place = plan.folder / front.entries[0].budget / "train"
    print_fields(screen, load=f'softcell.api.Network.from_pretrained("{place}")')


def _show_summary(screen: Console, summary: Summary, plan: Plan) -> None:
    """The competition, the delivered network, the verdict on the search, and the files."""
    screen.print()
    if summary.rounds:
        _show_competition(screen, summary)
    one = summary.delivered
    trained = f"{count_of(one.epochs, 'epoch')} in {one.seconds:.0f} s, on all training images"
    screen.print(Text(f"delivered: {one.name}, since {summary.why}", "bold"))
    print_fields(screen, accuracy=f"{percent(one.accuracy)} on {count_of(summary.count, 'test image')}, read once")
    print_fields(screen, trained=trained)
    print_fields(
        screen, costs=f"{one.parameters:,} parameters, {one.multiply_adds:,} multiply-adds, {one.latency:.2f} ms"
    )
    screen.print()
    for text in verdict(summary)[1]:
        screen.print(Text(text))
    screen.print()
    print_fields(screen, time=f"{plan.used():.0f} s of {plan.request.time:.0f} s", model=str(plan.folder / "export"))
    print_fields(screen, report=str(plan.folder / "report.html"))
    print_fields(screen, load=f'softcell.api.Network.from_pretrained("{plan.folder / "train"}")')


def _show_competition(screen: Console, summary: Summary) -> None:
    """Accuracies on held-out images, one column per round; a network without one was dropped before."""
    rounds = range(1, len(summary.rounds) + 1)
    images = count_of(summary.held_out, "held-out training image")
    screen.print(Text(f"competition on {images}", "bold"))
    screen.print(
        Text(f"{'':<12}{'parameters':>13}{'multiply-adds':>15}" + "".join(f"{f'round {i}':>10}" for i in rounds))
    )
    for entry in summary.entries:
        results = [own.of(entry.name) for own in summary.rounds]
        shares = "".join(f"{'' if result is None else percent(result.accuracy):>10}" for result in results)
        note = "" if results[0] is not None else "  left out, for lack of time"
        screen.print(Text(f"{entry.name:<12}{entry.parameters:>13,}{entry.multiply_adds:>15,}{shares}{note}"))
    screen.print()
