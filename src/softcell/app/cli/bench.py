"""`softcell bench`: searches and architectures looked up in the table of NAS-Bench-201."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from softcell.app import jobs
from softcell.app.cli import options as o
from softcell.app.cli.output import check_absent, console, print_fields, write
from softcell.app.progress import Display
from softcell.app.report import bench201
from softcell.app.report.bench201 import Benched, accuracy_rows, bench_runs
from softcell.app.report.compare import plain_csv
from softcell.arch import Genotype, derive
from softcell.data import load
from softcell.data.batches import first_batch
from softcell.errors import UserError, nearest
from softcell.evaluate import nb201
from softcell.evaluate.nb201 import (
    COLUMNS,
    COMPLETE,
    EDGES,
    OPERATIONS,
    RANKINGS,
    Accuracies,
    Nb201Table,
    check_search,
    load_table,
    mean_tau,
    notation,
    taus,
    write_table,
    zero_cost,
)
from softcell.methods import METHODS, Method
from softcell.methods.proxies import SUPERNET_PROXIES, Proxy
from softcell.recipes import search_seeds_recipe
from softcell.seeds import seed_folder
from softcell.spaces import build_space

FIRST = 24
"""Minimum width of the first column of a table; longer names are folded."""
commands = typer.Typer()


@commands.command(
    "bench",
    epilog=o.examples(
        "softcell bench nb201 --table nb201.csv.gz runs/darts-nb201-cifar10-1/genotype.json",
        "softcell bench nb201 --table nb201.csv.gz runs/darts-nb201-cifar10-1 runs/snas-nb201-cifar10-1 "
        "--svg figure2.svg",
        "softcell bench nb201 --table nb201.csv.gz --method darts --seeds 3 --data cifar10 --data-root ~/data",
        "softcell bench nb201 --table nb201.csv.gz --proxy naswot --proxy synflow --data cifar10 --data-root ~/data",
        "softcell bench nb201 --table new.csv.gz --convert NATS-tss-v1_0-3ffb9-simple",
    ),
)
def bench(
    benchmark: Annotated[Literal["nb201"], typer.Argument(help="The only benchmark with a table is NAS-Bench-201.")],
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="WHAT", help="Architectures (file or notation), or folders of searches in nb201."),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CSV of accuracies, gzipped or not. Default: $SOFTCELL_NB201."),
    ] = None,
    method: Annotated[str | None, typer.Option(help="First run searches with this method and --seeds seeds.")] = None,
    seeds: Annotated[
        int, typer.Option(metavar="K", help="With --method: number of seeds, counting up from --seed.")
    ] = 3,
    data: o.Data = None,
    data_root: o.DataRoot = None,
    epochs: o.Epochs = None,
    seed: o.Seed = None,
    device: o.Device = None,
    scale: Annotated[str | None, typer.Option(help="With --method: the recipe, as in `softcell search`.")] = None,
    set_: o.Set = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="With --method: folder of the searches.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="With --method: resume the searches in --out.")] = False,
    proxy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Also rank operations by Zero-Cost-PT: naswot, jacob_cov, synflow, grad_norm, snip, grasp, fisher or "
            "zico; repeatable.",
        ),
    ] = None,
    column: Annotated[
        str, typer.Option(help="Accuracy of the trajectory; rankings use the valid and test columns of its dataset.")
    ] = "cifar10_test",
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the trajectory over epochs as SVG.")] = None,
    csv_: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the trajectory as CSV.")] = None,
    convert: Annotated[
        Path | None, typer.Option(metavar="FILES", help="Write --table from official NATS-Bench files.")
    ] = None,
    overwrite: o.OverwriteFile = False,
    plugin: o.Plugin = None,
    quiet: o.Quiet = False,
) -> int:
    """Look up searches and architectures in the NAS-Bench-201 table.

    Shows valid and test accuracy on three datasets next to the optimum and a random cell, the accuracy of the cell
    derived in each epoch, and how well the method's indicator ranks the operations of each edge (Kendall's tau-b).
    """
    screen = console()
    path = _table_path(table)
    if convert is not None:
        check_absent(path, overwrite)
        write_table(path, nb201.convert(convert))
        print_fields(screen, table=f"{path}, {len(load_table(path)):,} of {COMPLETE:,} architectures")
        return 0
    if column not in COLUMNS:
        raise UserError(f"--column must be one of {', '.join(COLUMNS)}, got {column!r}")
    # Raises for bad input before hours of searching, and before anything is printed.
    found = load_table(path)
    folders = [item for item in what or () if Path(item).is_dir()]
    genotypes = [o.named_genotype(item) for item in what or () if item not in folders]
    architectures = [(notation(genotype), found.lookup(genotype)) for genotype in genotypes]
    proxies = _proxies(proxy or ())
    if folders and method is not None:
        bench_runs(found, folders)
    for file in (svg, csv_):
        if file is not None:
            check_absent(file, overwrite)
    if method is not None:
        given = o.settings(locals(), method=method, space="nb201", scale=scale)
        folder, code = _search(screen, given, seeds, out, resume=resume, overwrite=overwrite, quiet=quiet)
        if code:
            return code
        folders.append(str(folder))
    if not genotypes and not folders and not proxy:
        raise UserError("nothing to look up: pass an architecture, a folder of searches, --method or --proxy")
    notes: list[str] = []
    runs = bench_runs(found, folders, notes.append) if folders else []
    ranked = [_proxy(found, name, column, data or "digits", data_root, seed or 0) for name in proxies]
    if architectures:
        _show_architectures(screen, found, architectures)
    if folders:
        _report(screen, found, runs, notes, column, svg, csv_, overwrite)
    for label, genotype, rows in ranked:
        values = {column: f"{value:.2f}" for column, value in found.lookup(genotype).items()}
        _accuracies(screen, [(label, "", values), *accuracy_rows(found, [])])
        _taus(screen, rows)
    return 0


def _table_path(given: Path | None) -> Path:
    known = os.environ.get("SOFTCELL_NB201")
    if given is None and not known:
        raise UserError("--table must name the CSV file of NAS-Bench-201 (or set SOFTCELL_NB201 to it)")
    path = given or Path(str(known))
    # A folder may be named instead of the file in it.
    own = path / "nb201_200epochs.csv.gz"
    return own if own.is_file() else path


def _search(
    screen: Console, given: dict[str, Any], seeds: int, out: Path | None, *, resume: bool, overwrite: bool, quiet: bool
) -> tuple[Path, int]:
    chosen, recipe, folder = search_seeds_recipe(given, seeds=seeds, out=out, resume=resume)
    kind = METHODS.get(recipe.method)
    layout = build_space(recipe.space, recipe.space_settings).layout()
    # Before hours of searching for cells that the table does not have.
    check_search(recipe.method, layout, kind.rule if issubclass(kind, Method) else None)
    with Display(screen, "", quiet) as display:
        result = jobs.search_seeds(
            recipe,
            folder,
            chosen,
            resume=resume,
            overwrite=overwrite,
            on_event=lambda one: display.beside(f"seed {one}", str(seed_folder(folder, one))),
        )
    return folder, result.exit_code


def _show_architectures(screen: Console, table: Nb201Table, found: Sequence[tuple[str, Accuracies]]) -> None:
    rows: list[tuple[str, str, dict[str, str]]] = []
    for text, accuracies in found:
        label = "architecture" if len(found) == 1 else f"architecture {len(rows) + 1}"
        screen.print(f"{label}: {text}", markup=False)
        rows.append((label, "", {column: f"{value:.2f}" for column, value in accuracies.items()}))
    _accuracies(screen, [*rows, *accuracy_rows(table, [])])


def _accuracies(screen: Console, rows: Sequence[tuple[str, str, dict[str, str]]]) -> None:
    heads = [f"{name} (n={n})" if n else name for name, n, _ in rows]
    body = [[column.replace("_", " "), *(values[column] for _, _, values in rows)] for column in COLUMNS]
    _print(screen, "accuracy in NAS-Bench-201 after 200 epochs, %", ["", *heads], body)


def _report(
    screen: Console,
    table: Nb201Table,
    runs: Sequence[Benched],
    notes: Sequence[str],
    column: str,
    svg: Path | None,
    csv_: Path | None,
    overwrite: bool,
) -> None:
    for note in (*notes, *bench201.trajectory_notes(runs)):
        print_fields(screen, note=note)
    _accuracies(screen, accuracy_rows(table, runs))
    lines = bench201.trajectory_rows(runs, column)
    _trajectory(screen, lines, list(bench201.groups(runs)), column)
    dataset = column.rsplit("_", 1)[0]
    rows = bench201.tau_rows(table, runs, (f"{dataset}_valid", f"{dataset}_test"))
    if rows:
        _taus(screen, rows)
    if svg is not None:
        write(svg, bench201.trajectory_svg(runs, column), overwrite)
        print_fields(screen, written=str(svg))
    if csv_ is not None:
        header = list(dict.fromkeys(key for line in lines for key in line))
        write(csv_, plain_csv(header, [[line.get(key) for key in header] for line in lines]), overwrite)
        print_fields(screen, written=str(csv_))


def _trajectory(screen: Console, lines: Sequence[dict[str, float]], names: Sequence[str], column: str) -> None:
    if len(lines) > 10:  # ten of them, evenly spaced
        lines = [lines[round(i * (len(lines) - 1) / 9)] for i in range(10)]
    body = [[f"{line['epoch']:.0f}", *(f"{line[n]:.2f}" if n in line else "–" for n in names)] for line in lines]
    title = f"{column.replace('_', ' ')} of the cell derived after each epoch, mean over seeds, %"
    _print(screen, title, ["epoch", *names], body)


_RANKED = {
    "best": "the best accuracy of all cells with the operation",
    "derived": "the accuracy of the derived cell with the operation",
}


def _taus(screen: Console, rows: Sequence[tuple[str, str, str, list[float]]]) -> None:
    def text(value: float) -> str:
        return "–" if math.isnan(value) else f"{value:+.2f}"

    for ranking, meaning in _RANKED.items():
        body = [
            [f"{name}, {column.replace('_', ' ')}", *map(text, values), text(mean_tau(values))]
            for name, column, ranked, values in rows
            if ranked == ranking
        ]
        title = f"Kendall's tau-b per edge: indicator against {meaning} (– if all values are equal)"
        _print(screen, title, ["", *(f"{s}→{t}" for s, t in EDGES), "mean"], body)


def _proxies(names: Sequence[str]) -> list[Proxy]:
    for name in names:
        if name not in SUPERNET_PROXIES:
            raise UserError(f"no proxy {name!r} for --proxy; {nearest(name, SUPERNET_PROXIES)}")
    return [proxy for name in names for proxy in SUPERNET_PROXIES if proxy == name]


def _proxy(
    table: Nb201Table, name: Proxy, column: str, data: str, data_root: str | None, seed: int
) -> tuple[str, Genotype, list[tuple[str, str, str, list[float]]]]:
    """Zero-Cost-PT on an untrained supernet of the benchmark's size: its name, the cell it finds and its taus."""
    dataset = load(data, data_root, None)
    space = build_space("nb201", {"candidates": OPERATIONS})
    batch = first_batch(dataset, 32)
    found = zero_cost(space, name, batch.images, batch.labels, dataset.num_classes, seed)
    genotype = derive(space.layout(), found)
    rows: list[tuple[str, str, str, list[float]]] = []
    for split in ("valid", "test"):
        where = f"{column.rsplit('_', 1)[0]}_{split}"
        values = taus(table, found["cell"].tolist(), genotype, where)
        rows += [(name, where, ranking, values[ranking]) for ranking in RANKINGS]
    return f"Zero-Cost-PT, {name}", genotype, rows


def _print(screen: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table; columns that do not fit the width follow below, with the first column repeated."""
    # The settings of a group are listed one per line, which leaves room for other groups.
    heads = [name.replace(", ", ",\n").replace(") (", ")\n(") if "=" in name else name for name in header]
    screen.print(Text(title, "bold underline"))
    for block in _blocks(heads, rows, screen.width):
        shown = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
        for i in block:
            shown.add_column(Text(heads[i]), justify="right" if i else "left", no_wrap=i > 0, overflow="fold")
        for row in rows:
            shown.add_row(*(Text(row[i]) for i in block))
        screen.print(shown, soft_wrap=False)
        screen.print()


def _blocks(heads: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """The numbers of the columns that fit side by side, the first one in each block."""
    columns = [(head, *(row[i] for row in rows)) for i, head in enumerate(heads)]
    wide = [max(cell_len(line) for text in column for line in text.split("\n")) + 2 for column in columns]
    room = width - min(wide[0], FIRST)  # the first column folds
    blocks: list[list[int]] = [[0]]
    for i in range(1, len(heads)):
        if len(blocks[-1]) > 1 and sum(wide[k] for k in blocks[-1][1:]) + wide[i] > room + 2:  # no gap after the last
            blocks.append([0])
        blocks[-1].append(i)
    return blocks
