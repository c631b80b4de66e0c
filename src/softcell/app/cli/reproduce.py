"""`softcell reproduce` and `study`: the papers' tables, their plans, costs, runs and results, and NOS's Table 1."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from softcell.app.cli import options as o
from softcell.app.cli.output import command, console, print_fields
from softcell.app.jobs import JobTime
from softcell.app.reproduce.papers import PAPERS, PROTOCOL, PaperTable, Row
from softcell.app.reproduce.plan import Job, Plan, chosen_rows, make_plan
from softcell.app.reproduce.record import make_record, table_cells, unfinished, write_record
from softcell.app.reproduce.run import (
    epochs_done,
    is_finished,
    kind_of,
    measured_times,
    num_epochs,
    run_plan,
    untrainable,
)
from softcell.errors import UserError
from softcell.evaluate import TrainRecipe
from softcell.evaluate.teacher import count_classifier
from softcell.machine import num_processes
from softcell.search import SearchRecipe
from softcell.text import clock, count_of

FAILED = 1
NOT_MEASURED = "not measured"
WIDE, LOG_WIDTH = 140, 240  # terminal width that fits a table; width in a file or pipe
commands = typer.Typer()


@commands.command(
    "reproduce",
    epilog=o.examples(
        "softcell reproduce",
        "softcell reproduce snas --table 2",
        "softcell reproduce snas --table 2 --small --run",
        "softcell reproduce snas --table 2 --data-root ~/data --measure",
        "softcell reproduce snas --table 2 --data-root ~/data --run --minutes 25 --at-once 4",
        "softcell reproduce snas --table 2 --data-root ~/data --run --row random --row DARTS_V2",
    ),
)
def reproduce(
    paper: Annotated[
        str | None,
        typer.Argument(help="snas, entrannas, nos, itnas or fullattention. Default: list papers and tables."),
    ] = None,
    table: Annotated[
        str | None, typer.Option(metavar="N", help="One table of the paper, such as 2 or VII. Default: all tables.")
    ] = None,
    small: Annotated[
        bool, typer.Option("--small", help="A rehearsal: all steps on handwritten digits, a few minutes on a CPU.")
    ] = False,
    run: Annotated[
        bool, typer.Option("--run", help="Run the plan, or the rest of it. Without this option nothing is run.")
    ] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the plan's cost on this device, a few seconds per kind of run.")
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(metavar="M", min=0, help="Stop after this time; the same command continues later."),
    ] = None,
    at_once: Annotated[int, typer.Option(metavar="N", min=1, help="Number of concurrent runs on the device.")] = 1,
    row: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Run only rows whose name contains NAME; repeatable. Default: all rows."),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(metavar="K", help="Number of searches per row, 2 or more. Default: set by the table.")
    ] = None,
    data_root: o.DataRoot = None,
    device: o.Device = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of all runs. Default: runs/reproduce-PAPER (with --small: -small)."),
    ] = None,
    records: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the tables' records. Default: the folder of the runs.")
    ] = None,
    quiet: o.Quiet = False,
) -> int:
    """Print the plan that reproduces a paper's tables, run it, and show our numbers next to the published ones.

    The plan is fixed: searches at the paper's settings, then one short training recipe for all networks of a table:
    those found, random cells of the same space, published cells. Printing it runs nothing. Every run has its
    own folder, so a plan can be stopped at any time and continued later, on another machine too if the folder is
    copied.
    """
    screen = console()
    if paper is None:
        _list_papers(screen)
        return 0
    if num_processes() > 1:
        raise UserError(
            "the runs of a plan share one process, but torchrun started several; run `softcell reproduce` without it"
        )
    if data_root is not None:
        # Not a setting of the recipes, so that runs that were started here can be resumed where data are elsewhere.
        os.environ["SOFTCELL_DATA"] = str(Path(data_root).expanduser().resolve())
    for name, given in (("--minutes", minutes is not None), ("--row", bool(row)), ("--at-once", at_once > 1)):
        if given and not run:
            raise UserError(f"{name} applies to running the plan; add --run, or leave it out")
    plan = make_plan(paper, table, small=small, out=out, seeds=seeds, device=device or "auto")
    rows = chosen_rows(plan, row or ())
    if not run:
        _print_plan(screen, plan, measure)
        return 0
    if not plan.jobs:
        raise UserError(f"{plan.paper.name}, table {plan.tables[0].number}: {plan.tables[0].missing}")
    screen.print(f"{_runs(plan.jobs)} in {plan.folder}; {_finished(plan)} finished", markup=False)
    ended = run_plan(
        plan,
        rows=rows,
        minutes=minutes,
        at_once=at_once,
        notify=lambda text: None if quiet else screen.print(text, markup=False),
    )
    # In a call from Python `sys.argv` belongs to another program.
    again = command(*sys.argv[1:]) if sys.argv[1:2] == ["reproduce"] else command("reproduce", paper, "--run")
    for one in plan.tables:
        if not one.missing:
            _print_table(screen, plan, one, records or plan.folder)
    if ended.exit_code:
        screen.print(f"\nInterrupted; everything so far is saved. Resume with:\n  {again}", markup=False)
        return ended.exit_code
    if ended.errors:
        screen.print(f"\n{count_of(len(ended.errors), 'run')} failed; retry with:\n  {again}", markup=False)
        return FAILED
    if ended.out_of_time:
        screen.print(f"\nTime is up (--minutes {minutes:g}); continue with:\n  {again}", markup=False)
    return 0


def _list_papers(screen: Console) -> None:
    for paper in PAPERS.values():
        screen.print(Text(f"{paper.key:<14}", "bold") + Text(paper.name))
        for one in paper.tables:
            note = " (not run by this command)" if one.missing else ""
            screen.print(f"  --table {one.number:<11}{one.title}{note}", markup=False)
    screen.print("\nprint a plan with `softcell reproduce PAPER`; add --run to run it", markup=False)


def _print_plan(screen: Console, plan: Plan, measure: bool) -> None:
    """What would run, how, how much is already done, and the cost on this device."""
    screen.print(Text("Protocol", "bold"))
    for rule in PROTOCOL:
        screen.print(f"  - {rule}", markup=False)
    if plan.small:
        screen.print(
            "This is a rehearsal: all steps on digits, with small networks, one epoch per run and fewer seeds.",
            style="yellow",
        )
    screen.print()
    times = measured_times(plan, plan.jobs, measure, lambda text: screen.print(text, markup=False))
    for one in plan.tables:
        screen.print(Text(f"{plan.paper.name}, Table {one.number}: {one.title}", "bold"))
        if one.missing:
            screen.print(f"  {one.missing}\n", markup=False)
            continue
        every = [job for row in one.rows for job in plan.jobs_of(one, row)]
        for job in dict.fromkeys(job.network for job in every if job.kind == "teacher"):
            teacher = plan.teacher()
            recipe = plan.recipe(teacher)
            assert isinstance(recipe, TrainRecipe)
            screen.print(f"  teacher   {job}: {_training_words(recipe)}", markup=False)
        for name in dict.fromkeys(job.network for job in every if job.kind == "search"):
            own = [job for job in every if job.kind == "search" and job.network == name]
            searched = plan.recipe(own[0])
            assert isinstance(searched, SearchRecipe)
            cost = _cost_each(plan, own[0], times)
            screen.print(f"  search    {name}: {_search_words(searched)}, {_seeds(own)}, {cost}", markup=False)
        for name in one.trainings:
            first = plan.stand_in(next(job for job in every if job.folder.parts[:2] == ("train", name)))
            how = plan.recipe(first)
            assert isinstance(how, TrainRecipe)
            cost = _cost_each(plan, first, times)
            screen.print(f"  training  {name}: {_training_words(how)}, {cost}", markup=False)
        for row in one.rows:
            screen.print(f"  row       {row.name}: {_row_words(plan, one, row)}", markup=False)
        for note in one.notes:
            screen.print(f"  note      {note}", markup=False)
        unique = list({job.folder: job for job in every}.values())
        screen.print(f"in total  {_runs(unique)}; cost on this device: {_cost(plan, unique, times)}\n", markup=False)
    folder, done = plan.folder, _finished(plan)
    if plan.jobs:
        print_fields(screen, runs=f"{_runs(plan.jobs)} in {folder}, {done} finished")
        cost = _cost(plan, plan.jobs, times)
        length = "" if cost == NOT_MEASURED else " left, if run one after another on this device"
        print_fields(screen, cost=cost + length)
        more = "" if measure else "--measure measures the cost, "
        screen.print(f"Nothing was run: {more}--run runs the plan.", markup=False)


def _search_words(recipe: SearchRecipe) -> str:
    length = count_of(recipe.epochs, "epoch")
    if "samples" in recipe.method_settings:
        length = f"{recipe.method_settings['samples']} architectures of {length}"
    if recipe.pretrain.epochs:
        length = f"{recipe.pretrain.epochs} + {length}"
    more = [f"regime {recipe.regime}"] if recipe.method == "darts" else []
    more += [f"penalty {recipe.resource.preset}"] if recipe.resource.preset not in (None, "none") else []
    more += ["selected by perturbation (not in the cost)"] if recipe.select.is_on else []
    more += ["guided"] if recipe.guide.teacher else []
    what = f"method {recipe.method}, space {recipe.space}, data {recipe.data}, scale {recipe.scale}"
    return ", ".join([what, length, f"batch {recipe.batch_size}", *more])


def _training_words(recipe: TrainRecipe) -> str:
    sizes = {k: v for k, v in recipe.space_settings.items() if k in ("cells", "channels", "layers") and v}
    words = [
        f"data {recipe.data}, recipe {recipe.recipe}, {count_of(recipe.epochs, 'epoch')}, batch {recipe.batch_size}",
        f"learning rate {recipe.lr:g} ({recipe.schedule}), weight decay {recipe.weight_decay:g}",
        f"drop-path {recipe.drop_path:g}, cutout {recipe.cutout}, auxiliary {recipe.auxiliary:g}",
        *(f"{value} {key}" for key, value in sizes.items()),
    ]
    return ", ".join(words)


def _row_words(plan: Plan, table: PaperTable, row: Row) -> str:
    networks = next(iter(plan.trainings(table, row).values()), {})
    kind = "published cell" if row.cell else "classifier" if row.classifier is not None else "network found"
    if row.random:
        limit = f" of at most {table.limit:,} parameters" if table.limit and not plan.small else ""
        kind = f"random network of space {row.random}{limit}"
    if not networks:
        return f"{count_of(len(plan.searches(table, row)), 'search run')}, no training"
    most = max(len(jobs) for jobs in networks.values())
    again = f", the first with {most} training seeds" if most > 1 and len(networks) > 1 else ""
    again = f", {most} training seeds" if most > 1 and len(networks) == 1 else again
    number = len(networks)
    return f"{number} {kind.replace('network', 'networks', 1) if number > 1 else kind}{again}"


def _seeds(jobs: list[Job]) -> str:
    found = sorted({job.seed for job in jobs})
    return f"seeds {found[0]} to {found[-1]}" if len(found) > 1 else f"seed {found[0]}"


def _runs(jobs: Iterable[Job]) -> str:
    kinds = [job.kind for job in jobs]
    words = {"teacher": "teacher", "search": "search run", "train": "training", "classifier": "classifier"}
    return ", ".join(count_of(kinds.count(kind), word) for kind, word in words.items() if kind in kinds)


def _finished(plan: Plan) -> int:
    return sum(is_finished(plan.folder_of(job)) for job in plan.jobs)


def _cost_each(plan: Plan, job: Job, times: Mapping[str, JobTime]) -> str:
    """The remaining time of one of several runs of a kind."""
    cost = _cost(plan, [job], times)
    return "cost not measured" if cost == NOT_MEASURED else f"{cost} each"


def _cost(plan: Plan, jobs: list[Job], times: Mapping[str, JobTime]) -> str:
    """The remaining time of these runs; how many of them are of an unknown kind."""
    left = [job for job in jobs if not is_finished(plan.folder_of(job)) and not untrainable(plan, job)]
    known = [job for job in left if kind_of(job) in times]
    if left and not known:
        return NOT_MEASURED
    seconds = 0.0
    for job in known:
        epochs = num_epochs(plan.recipe(plan.stand_in(job)))
        seconds += times[kind_of(job)].total(max(0, epochs - len(epochs_done(plan.folder_of(job)))))
    unknown = len(left) - len(known)
    return clock(seconds) + (f" and {count_of(unknown, 'run')} not measured" if unknown else "")


def _print_table(screen: Console, plan: Plan, table: PaperTable, records: Path) -> None:
    """Writes the record of a table and shows it."""
    record = make_record(plan, table, ["softcell", *sys.argv[1:]])
    file = records / f"table-{table.number}.json"
    write_record(file, record)
    headings, lines = table_cells(table, record)
    screen.print(f"\n{plan.paper.name}, Table {table.number}: {table.title}; ours as mean ± std (n)", style="bold")
    if plan.small:
        about = "A rehearsal on digits, despite the headings: these numbers say nothing about the paper."
        screen.print(about, style="yellow")
    if screen.is_terminal and screen.width < WIDE:
        for line in lines:  # a table would be cut
            screen.print(Text(line[0], "bold"))
            for heading, value in zip(headings[1:], line[1:], strict=True):
                if value != "–":
                    screen.print(f"  {heading}: {value}", markup=False)
    else:
        shown = Table(box=SIMPLE_HEAD, pad_edge=False)
        for number, heading in enumerate(headings):
            shown.add_column(heading, justify="right" if number else "left")
        for line in lines:
            shown.add_row(*map(Text, line))
        wide = screen if screen.is_terminal else Console(width=LOG_WIDTH, highlight=False)
        wide.print(shown)
    screen.print(record["verdict"], markup=False)
    for text in unfinished(record):
        screen.print(text, markup=False)
    screen.print(f"record: {file}", markup=False)


class _CalibrationRow(NamedTuple):
    """A row of NOS's Table 1: multiply-adds and parameters in millions (increments), errors on CIFAR-10, CIFAR-100."""

    operation: str | None
    multiply_adds: float
    parameters: float
    errors: tuple[float, float]


WIDTH, CLASSES = 64, 10
"""Of the networks that Table 1 counts."""
NOS_TABLE_1 = (
    _CalibrationRow(None, 555.42, 11.17, (4.95, 23.61)),
    _CalibrationRow("dynamic_conv_3x3", 3.85, 0.03, (4.63, 22.63)),
    _CalibrationRow("dynamic_conv_5x5", 7.62, 0.04, (4.78, 23.45)),
    _CalibrationRow("dil_dynamic_conv_3x3", 3.85, 0.03, (4.97, 24.00)),
    _CalibrationRow("dil_dynamic_conv_5x5", 7.62, 0.04, (4.92, 23.75)),
    _CalibrationRow("spatial_attention", 1.08, 0.01, (4.79, 23.51)),
    _CalibrationRow("channel_attention", 0.40, 0.15, (4.83, 23.20)),
)


@commands.command(
    "study",
    epilog=o.examples(
        "softcell study",
        "softcell study --classes 100",
        "softcell teacher resnet18 --set classifier.operation=spatial_attention --data cifar10   # trains one row",
    ),
)
def study(
    classes: Annotated[int, typer.Option(metavar="N", min=1, help="Number of classes.")] = CLASSES,
    width: Annotated[int, typer.Option(metavar="N", min=1, help="Channels of the first stage.")] = WIDTH,
) -> None:
    """NOS's preliminary study: what each self-calibration operation adds to a ResNet-18 (Table 1).

    One operation follows each of the stages 1 to 3. The command counts parameters, and multiply-adds of convolutions
    and matrix products for one 32x32 image. The paper's counts (64 channels, 10 classes) and errors are printed next to
    them if the network is the same; the paper does not say how it counted. `softcell teacher resnet18 --set
    classifier.operation=...` trains a row.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("\nnetwork", no_wrap=True)
    is_papers = (width, classes) == (WIDTH, CLASSES)
    columns = slice(None) if is_papers else slice(0, 3, 2)  # all columns, or our own
    for title in ("ours\nmult-adds", "paper\nmult-adds", "ours\nparams", "paper\nparams", "paper\nerrors*")[columns]:
        table.add_column(title, justify="right", no_wrap=True)
    shape = (3, 32, 32)
    base = count_classifier("resnet18", {"width": width}, shape, classes)
    for row in NOS_TABLE_1:
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
        table.add_row("resnet18" if row.operation is None else f"+ {row.operation}", *numbers[columns])
    screen = console()
    screen.print(table)
    note = "* in percent, on CIFAR-10 and CIFAR-100; our own errors: not measured"
    if not is_papers:
        note = f"The paper counts networks of width {WIDTH} with {CLASSES} classes; run `softcell study` to compare."
    screen.print(note, style="dim")
