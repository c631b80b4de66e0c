"""`softcell run`, from images to a trained network in one command, and `softcell demo`.

The demo asks whether a search finds better cells than chance, and answers in minutes, on a CPU, with a test.
Comparing a single found cell with a few random ones proves little. The demo searches with several
seeds, trains the found cells and random cells of the same space in the same way, and computes how likely these ranks
are by chance.

Its space is S4 of RobustDARTS: a separable convolution or pure noise on every edge of DARTS's cells. In the space of
DARTS nearly every cell solves digits, so there is nothing to find. The settings were chosen on validation images with
seeds from 100 on; docs/demo.md has the protocol and all results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from softcell.app import jobs, pipeline
from softcell.app.baseline import claim, draw_random, rank_sum
from softcell.app.cli import options as o
from softcell.app.cli import output
from softcell.app.cli.output import console, print_fields
from softcell.app.cli.search import run_seeds
from softcell.app.pipeline import Front, Plan, RunRequest, Summary, parse_time, verdict
from softcell.app.process import start_time
from softcell.app.progress import RunScreen, counting
from softcell.app.report.page import REPORT
from softcell.arch import Genotype
from softcell.engine.lock import LOCK
from softcell.engine.runfolder import MANIFEST, SEEDS, free_folder
from softcell.errors import UserError
from softcell.evaluate import TrainResult
from softcell.files import atomic_write_text
from softcell.recipes import train_recipe
from softcell.search.genotypes import read_genotype
from softcell.seeds import read_seeds, seed_folder
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
        Path | None, typer.Argument(metavar="RUN", help="With --resume, the folder of the run to resume.")
    ] = None,
    data: o.Data = None,
    max_params: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Maximum number of parameters, such as 1M. A list such as 50k,200k,1M gives one network per budget, "
            "from one search. Default: 2M, unless --max-flops is given.",
        ),
    ] = None,
    max_flops: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Maximum multiply-adds of the network per image, such as 200M; or a list, as above.",
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
    """Turn a folder of images into a trained and exported network within a given time and budget.

    Inspects the images, searches for a cell, and lets it compete with plain residual networks and random cells in short
    training runs. The winner gets at least 60% of the time. The verdict says whether the search was worth it.
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
        resumed = folder or out
        if resumed is None:
            raise UserError("--resume needs the folder of the run, as `softcell run --resume runs/run-photos-1`")
        if data is not None or request:
            raise UserError("a resumed run keeps its settings; leave out everything but --resume and the folder")
        plan = Plan.open(resumed)
    else:
        if folder is not None and data is not None:
            raise UserError(
                f"only --resume accepts a folder without an option, but got {str(folder)!r}; separate several budgets "
                "by commas without spaces: --max-params 50k,100k"
            )
        if folder is not None:
            raise UserError(f"pass the images as --data {folder}; a folder without an option is only for --resume")
        if data is None:
            raise UserError("--data must name the images: a folder of CLASS/IMAGE files, an .npz file or a dataset")
        new = out or free_folder("run", data)
        plan = Plan.create(new, RunRequest(data=data, **request))  # type: ignore[arg-type]
    plan.began = start_time()  # importing torch takes seconds of the given time too
    screen = console()
    try:
        outcome = pipeline.run(plan, RunScreen(screen, quiet))
    # Ctrl-C between two jobs, or while steps are timed; a job of the run turns it into the exit code of its result.
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
        screen.print(Text(f"{budget:<10}skipped: {why}"))
    screen.print(Text("Choosing among them by this accuracy means selecting on the test images."))
    for entry in front.entries:
        screen.print()
        screen.print(Text(f"{entry.budget}: {entry.summary.delivered.name}, because {entry.summary.why}", "bold"))
        for text in verdict(entry.summary)[1]:
            screen.print(Text(text))
    screen.print()
    models = ", ".join(str(plan.folder / entry.budget / "export") for entry in front.entries)
    print_fields(screen, time=f"{plan.used():.0f} s of {plan.request.time:.0f} s", models=models)
    print_fields(screen, drawing=str(plan.folder / "front.svg"), report=str(plan.folder / REPORT))
    trained = plan.folder / front.entries[0].budget / "train"
    print_fields(screen, load=f'softcell.api.Network.from_pretrained("{trained}")')


def _show_summary(screen: Console, summary: Summary, plan: Plan) -> None:
    """The competition, the delivered network, the verdict on the search, and the files."""
    screen.print()
    if summary.rounds:
        _show_competition(screen, summary)
    one = summary.delivered
    trained = f"{count_of(one.epochs, 'epoch')} in {one.seconds:.0f} s, on all training images"
    screen.print(Text(f"delivered: {one.name}, because {summary.why}", "bold"))
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
    print_fields(screen, report=str(plan.folder / REPORT))
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
        note = "" if results[0] is not None else "  skipped: not enough time"
        screen.print(Text(f"{entry.name:<12}{entry.parameters:>13,}{entry.multiply_adds:>15,}{shares}{note}"))
    screen.print()


DEMO_SEARCHES, DEMO_RANDOM = 3, 9
"""Seeds of the search, and random cells. All found cells above all random ones have p = 0.009."""
DEMO_SIZES = {"cells": 3, "channels": 8}
DEMO_SEARCH: dict[str, Any] = {
    "method": "darts",
    "space": "s4",
    "data": "digits",
    "scale": "small",
    "epochs": 6,
    "space_settings": DEMO_SIZES,
}
DEMO_TRAIN: dict[str, Any] = {
    "data": "digits",
    "recipe": "small",
    "epochs": 5,
    "auxiliary": 0.0,
    "space_settings": DEMO_SIZES,
}
DEMO_RECORD = "demo.json"


@commands.command("demo", epilog=o.examples("softcell demo", "softcell demo --out my-first-search --seed 1"))
def demo(
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the demo; an interrupted one is resumed. Default: runs/demo-N with the next free N.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(metavar="K", min=0, help="Random seed; other seeds find and sample other cells.")
    ] = 0,
    device: o.Device = None,
    threads: o.Threads = None,
    quiet: o.Quiet = False,
) -> int:
    """Search for cells on handwritten digits and test whether they beat random cells, in under 3 minutes."""
    folder = out or free_folder("demo")
    screen = console()
    given = o.settings({"device": device, "threads": threads})
    again = ["demo", "--out", str(folder), *(["--seed", str(seed)] if seed else [])]
    again += [word for name, value in given.items() for word in (f"--{name}", str(value))]

    search, first = folder / "search", DEMO_SEARCHES * seed  # demos with different seeds share no search
    if not (search / SEEDS).is_file():
        _check_empty(folder, but=search.name)
        _check_empty(search, but=LOCK)  # all that a demo interrupted at its very start left behind
    seeds = list(range(first, first + DEMO_SEARCHES))
    if (search / SEEDS).is_file() and (known := read_seeds(search)) != seeds:
        raise UserError(
            f"a demo is resumed with its own seed, but {search} has seeds {known[0]} to {known[-1]} and "
            f"--seed {seed} means {first} to {seeds[-1]}; choose another --out, or the --seed of the folder"
        )
    screen.print("1. Search for cells on 8x8 handwritten digits (UCI, included in the package)", style="bold")
    screen.print(
        f"Every edge is a separable convolution or noise (space s4); DARTS must avoid the noise, {DEMO_SEARCHES} times"
    )
    begun = any(jobs.has_run(seed_folder(search, one)) for one in seeds)
    code = run_seeds(
        {**DEMO_SEARCH, **given, "seed": first},
        # There is at most an empty folder with its list of seeds to overwrite.
        o.RunOptions(out=search, resume=begun, overwrite=not begun, quiet=quiet),
        DEMO_SEARCHES,
        hint=False,
        again=again,
    )
    if code:
        return code

    found = {f"found-{one}": read_genotype(seed_folder(search, one)) for one in seeds}
    screen.print(
        f"\n2. Train the found cells and {DEMO_RANDOM} random cells of the space with the same recipe, from scratch",
        style="bold",
    )
    trained = _train_all(screen, found, {**DEMO_TRAIN, **given, "seed": seed}, folder / "train", quiet)
    stopped = next((result.exit_code for result in trained.values() if result.exit_code), 0)
    if stopped:
        output.interrupted(screen, *again)
        return stopped
    _show_demo(screen, folder, trained, list(found), seed)
    return 0


def _check_empty(folder: Path, but: str) -> None:
    """Fails if a folder holds anything `but` one entry."""
    if folder.is_dir() and any(entry.name != but for entry in folder.iterdir()):
        raise UserError(
            f"a demo needs a new folder or one of an earlier demo, but {folder} holds other files; choose another --out"
        )


def _train_all(
    screen: Console, found: Mapping[str, Genotype], settings: Mapping[str, Any], folder: Path, quiet: bool
) -> dict[str, TrainResult]:
    """Trains the found cells and the demo's random ones, each in a folder named after it; stops at a signal.

    All share one recipe, one seed and the same batches: only the architecture differs. A cell without any path from
    input to output is trained like the others, whether found or random.
    """
    example = next(iter(found.values()))
    _, recipe = train_recipe(example, settings)
    others = draw_random(example, recipe, DEMO_RANDOM)
    networks = {**found, **{f"random-{number}": cell for number, cell in enumerate(others, 1)}}
    trained: dict[str, TrainResult] = {}
    with counting(screen, "training", quiet) as notify:
        for name, genotype in networks.items():
            notify(len(trained), len(networks), name)
            own = folder / name
            trained[name] = jobs.train(genotype, recipe, own, resume=jobs.has_run(own))
            if trained[name].exit_code:
                break
    return trained


def _show_demo(
    screen: Console, folder: Path, trained: Mapping[str, TrainResult], found: Sequence[str], seed: int
) -> None:
    """All networks by accuracy, the two groups, the claim and the files; writes `demo.json`."""
    accuracies = {name: result.accuracy for name, result in trained.items() if result.accuracy is not None}
    assert len(accuracies) == len(trained)  # digits have a test split
    ours = [accuracies[name] for name in found]
    others = [accuracy for name, accuracy in accuracies.items() if name not in found]
    sentence = claim(ours, others)
    record = {
        "seed": seed,
        "search": DEMO_SEARCH,
        "train": DEMO_TRAIN,
        "accuracy": accuracies,
        "p": rank_sum(ours, others),
        "claim": sentence,
    }
    atomic_write_text(folder / DEMO_RECORD, json.dumps(record, indent=2) + "\n")

    best = max(found, key=lambda name: accuracies[name])
    images = count_of(json.loads((trained[best].folder / MANIFEST).read_text("utf-8"))["results"]["count"], "image")
    screen.print()
    screen.print(Text(f"accuracy on the {trained[best].split} split ({images}), best first", "bold"))
    for name in sorted(accuracies, key=lambda name: -accuracies[name]):
        size = f"{trained[name].cost.parameters:>9,} parameters"
        screen.print(Text(f"{name:<14}{percent(accuracies[name]):>6}{size}", "bold" if name in found else ""))
    screen.print()
    screen.print(Text(sentence, "bold"))
    print_fields(screen, drawing=str(trained[best].folder / jobs.CELLS))
    print_fields(screen, report=str(trained[best].folder / REPORT), record=str(folder / DEMO_RECORD))
