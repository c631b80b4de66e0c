"""`softcell bench`"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from softcell.app.cli import options as o
from softcell.app.cli.places import check_absent
from softcell.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from softcell.app.report.bench201 import Benched
    from softcell.arch import Genotype
    from softcell.evaluate.nb201 import Accuracies, Nb201Table
    from softcell.evaluate.ranking import Proxy

EPILOG = o.examples(
    "softcell bench nb201 --table nb201.csv.gz runs/darts-nb201-cifar10-1/genotype.json",
    "softcell bench nb201 --table nb201.csv.gz runs/darts-nb201-cifar10-1 runs/snas-nb201-cifar10-1 --svg figure2.svg",
    "softcell bench nb201 --table nb201.csv.gz --method darts --seeds 3 --data cifar10 --data-root ~/data",
    "softcell bench nb201 --table nb201.csv.gz --proxy naswot --proxy synflow --data cifar10 --data-root ~/data",
    "softcell bench nb201 --table new.csv.gz --convert NATS-tss-v1_0-3ffb9-simple",
)


FIRST = 24
"""Cells that names of rows get at least before they are folded."""


def bench(
    benchmark: Annotated[Literal["nb201"], typer.Argument(help="NAS-Bench-201 is the one with a table.")],
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="[WHAT]...", help="Architectures (file or notation), or folders of searches in nb201."),
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CSV of accuracies, gzipped or not; else $SOFTCELL_NB201."),
    ] = None,
    method: Annotated[str | None, typer.Option(help="Search with this method first, with --seeds seeds.")] = None,
    seeds: Annotated[int, typer.Option(metavar="K", help="With --method: how many seeds, from --seed on.")] = 3,
    data: o.Data = None,
    data_root: o.DataRoot = None,
    epochs: o.Epochs = None,
    seed: o.Seed = None,
    device: o.Device = None,
    scale: Annotated[str | None, typer.Option(help="With --method: the recipe, as in `softcell search`.")] = None,
    set_: o.Set = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="With --method: folder of the searches.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="With --method: go on with the searches in --out.")] = False,
    proxy: Annotated[
        list[str] | None,
        typer.Option(metavar="naswot|synflow", help="Rank operations by Zero-Cost-PT too; repeatable."),
    ] = None,
    column: Annotated[
        str, typer.Option(help="The accuracy of the trajectory; rankings use this dataset's valid and test.")
    ] = "cifar10_test",
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="The trajectory over epochs as a picture.")] = None,
    csv_: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="The trajectory as a table.")] = None,
    convert: Annotated[
        Path | None, typer.Option(metavar="FILES", help="Write --table from official NATS-Bench files.")
    ] = None,
    overwrite: o.OverwriteFile = False,
    plugin: o.Plugin = None,
    quiet: o.Quiet = False,
) -> int:
    """Look searches and architectures up in the table of NAS-Bench-201.

    Tells valid and test accuracy on three datasets beside the optimum and a random cell, the accuracy of each epoch's
    cell, and per edge how well the method's indicator ranks operations (Kendall's tau-b).
    """
    from softcell.app.cli.console import console
    from softcell.app.report.bench201 import bench_runs
    from softcell.evaluate.nb201 import COLUMNS, load_table

    screen = console()
    path = _table(table)
    if convert is not None:
        return _convert(screen, convert, path, overwrite)
    if column not in COLUMNS:
        raise UserError(f"--column must be one of {', '.join(COLUMNS)}, got {column!r}")
    # Whatever can be known to be wrong is told before hours of searching, and before anything is printed.
    found = load_table(path)
    names, folders = _sorted(what or [])
    architectures = _look_up(found, names)
    proxies = _proxies(proxy or ())
    if folders and method is not None:
        bench_runs(found, folders)
    for file in (svg, csv_):
        if file is not None:
            check_absent(file, overwrite)
    if method is not None:
        given = o.settings(
            set_,
            plugin,
            method=method,
            space="nb201",
            data=data,
            data_root=data_root,
            epochs=epochs,
            seed=seed,
            device=device,
            scale=scale,
        )
        folder, code = _search(screen, given, seeds, out, resume=resume, overwrite=overwrite, quiet=quiet)
        if code:
            return code
        folders.append(str(folder))
    if not names and not folders and not proxy:
        raise UserError("nothing to look up: give an architecture, a folder of searches, --method or --proxy")
    notes: list[str] = []
    runs = bench_runs(found, folders, notes.append) if folders else []
    ranked = [_proxy(found, name, column, data or "digits", data_root, seed or 0) for name in proxies]
    _show_architectures(screen, found, architectures)
    if folders:
        _report(screen, found, runs, notes, column, svg, csv_, overwrite)
    for label, genotype, taus in ranked:
        _look_up_found(screen, found, label, genotype)
        _taus(screen, taus)
    return 0


def _table(given: Path | None) -> Path:
    import os

    known = os.environ.get("SOFTCELL_NB201")
    if given is None and not known:
        raise UserError("--table must name the CSV file of NAS-Bench-201 (or set SOFTCELL_NB201 to it)")
    path = given or Path(str(known))
    own = path / "nb201_200epochs.csv.gz"
    return own if own.is_file() else path


def _convert(screen: Console, source: Path, path: Path, overwrite: bool) -> int:
    from softcell.app.cli.results import facts
    from softcell.evaluate.nb201 import COMPLETE, convert, load_table, write_table

    check_absent(path, overwrite)
    write_table(path, convert(source))
    found = load_table(path)
    facts(screen, table=f"{path}, {len(found):,} of {COMPLETE:,} architectures")
    return 0


def _sorted(what: Sequence[str]) -> tuple[list[str], list[str]]:
    """Architectures, and folders of searches."""
    folders = [item for item in what if Path(item).is_dir()]
    return [item for item in what if item not in folders], folders


def _search(
    screen: Console, given: dict[str, Any], seeds: int, out: Path | None, *, resume: bool, overwrite: bool, quiet: bool
) -> tuple[Path, int]:
    from softcell import api
    from softcell.app.cli.progress import Display
    from softcell.evaluate.nb201 import check_search
    from softcell.methods import METHODS, Method
    from softcell.spaces import build_space

    chosen, recipe, folder = api.seeds_recipe(given, seeds=seeds, out=out, resume=resume)
    kind = METHODS.get(recipe.method)
    layout = build_space(recipe.space, recipe.space_settings).layout()
    check_search(recipe.method, layout, kind.rule if issubclass(kind, Method) else None)
    heading = f"search {recipe.method}, space nb201, data {recipe.data}, seeds {chosen[0]} to {chosen[-1]}: {folder}"
    with Display(screen, heading, quiet) as display:
        result = api.search_seeds_with(
            recipe,
            folder,
            chosen,
            resume=resume,
            overwrite=overwrite,
            on_event=lambda one: display.beside(f"seed {one}", str(folder / f"seed-{one}")),
        )
    return folder, result.exit_code


def _look_up(table: Nb201Table, names: Sequence[str]) -> list[tuple[str, Accuracies]]:
    """The architectures in the benchmark's notation, with what the table says of them."""
    from softcell.app.cli import inputs
    from softcell.evaluate.nb201 import notation

    genotypes = [inputs.genotype(name) for name in names]
    return [(notation(genotype), table.lookup(genotype)) for genotype in genotypes]


def _show_architectures(screen: Console, table: Nb201Table, found: Sequence[tuple[str, Accuracies]]) -> None:
    from softcell.app.report.bench201 import accuracy_rows

    if not found:
        return
    rows: list[tuple[str, str, dict[str, str]]] = []
    for notation, accuracies in found:
        label = "architecture" if len(found) == 1 else f"architecture {len(rows) + 1}"
        screen.print(f"{label}: {notation}", markup=False)
        rows.append((label, "", {column: f"{value:.2f}" for column, value in accuracies.items()}))
    _accuracies(screen, [*rows, *accuracy_rows(table, [])])


def _accuracies(screen: Console, rows: Sequence[tuple[str, str, dict[str, str]]]) -> None:
    from softcell.evaluate.nb201 import COLUMNS

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
    from softcell.app.cli.console import write
    from softcell.app.cli.results import facts
    from softcell.app.report import bench201
    from softcell.app.report.compare import plain_csv

    for note in (*notes, *bench201.trajectory_notes(runs)):
        facts(screen, note=note)
    _accuracies(screen, bench201.accuracy_rows(table, runs))
    _trajectory(screen, runs, column)
    dataset = column.rsplit("_", 1)[0]
    rows = bench201.tau_rows(table, runs, (f"{dataset}_valid", f"{dataset}_test"))
    if rows:
        _taus(screen, rows)
    if svg is not None:
        write(svg, bench201.trajectory_svg(runs, column), overwrite)
        facts(screen, written=str(svg))
    if csv_ is not None:
        lines = bench201.trajectory_rows(runs, column)
        header = list(dict.fromkeys(key for line in lines for key in line))
        write(csv_, plain_csv(header, [[line.get(key) for key in header] for line in lines]), overwrite)
        facts(screen, written=str(csv_))


def _trajectory(screen: Console, runs: Sequence[Benched], column: str) -> None:
    from softcell.app.report.bench201 import groups, trajectory_rows

    lines, names = trajectory_rows(runs, column), list(groups(runs))
    if len(lines) > 10:  # every tenth part of the way
        lines = [lines[round(i * (len(lines) - 1) / 9)] for i in range(10)]
    body = [[f"{line['epoch']:.0f}", *(f"{line[n]:.2f}" if n in line else "–" for n in names)] for line in lines]
    title = f"{column.replace('_', ' ')} of the cell that each epoch derives, mean over seeds, %"
    _print(screen, title, ["epoch", *names], body)


def _taus(screen: Console, rows: Sequence[tuple[str, str, str, list[float]]]) -> None:
    import math

    from softcell.evaluate.nb201 import EDGES
    from softcell.evaluate.ranking import mean_tau

    def text(value: float) -> str:
        return "–" if math.isnan(value) else f"{value:+.2f}"

    for ranking, meaning in _RANKED.items():
        body = [
            [f"{name}, {column.replace('_', ' ')}", *map(text, values), text(mean_tau(values))]
            for name, column, ranked, values in rows
            if ranked == ranking
        ]
        title = f"Kendall's tau-b per edge: indicator against {meaning} (– where nothing is told apart)"
        _print(screen, title, ["", *(f"{s}→{t}" for s, t in EDGES), "mean"], body)


_RANKED = {
    "best": "the best accuracy of all cells with the operation",
    "derived": "the accuracy of the derived cell with the operation",
}


def _proxies(names: Sequence[str]) -> list[Proxy]:
    from softcell.evaluate.ranking import PROXIES

    for name in names:
        if name not in PROXIES:
            raise UserError(f"--proxy must be one of {', '.join(PROXIES)}, got {name!r}")
    return [proxy for name in names for proxy in PROXIES if proxy == name]


def _proxy(
    table: Nb201Table, name: Proxy, column: str, data: str, data_root: str | None, seed: int
) -> tuple[str, Genotype, list[tuple[str, str, str, list[float]]]]:
    """Zero-Cost-PT on an untrained supernet of the benchmark's size: its name, the cell it finds and its taus."""
    from softcell.arch import derive
    from softcell.data import load
    from softcell.data.batches import first_images
    from softcell.evaluate.nb201 import OPERATIONS
    from softcell.evaluate.ranking import RANKINGS, taus, zero_cost
    from softcell.spaces import build_space

    dataset = load(data, data_root, None)
    images = first_images(dataset, 32)
    space = build_space("nb201", {"candidates": OPERATIONS})
    found = zero_cost(space, name, images, dataset.num_classes, seed)
    genotype = derive(space.layout(), found)
    rows: list[tuple[str, str, str, list[float]]] = []
    for split in ("valid", "test"):
        where = f"{column.rsplit('_', 1)[0]}_{split}"
        values = taus(table, found["cell"].tolist(), genotype, where)
        rows += [(name, where, ranking, values[ranking]) for ranking in RANKINGS]
    return f"Zero-Cost-PT, {name}", genotype, rows


def _look_up_found(screen: Console, table: Nb201Table, name: str, genotype: Genotype) -> None:
    from softcell.app.report.bench201 import accuracy_rows

    found = {column: f"{value:.2f}" for column, value in table.lookup(genotype).items()}
    _accuracies(screen, [(name, "", found), *accuracy_rows(table, [])])


def _print(screen: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table; columns that the screen is too narrow for follow below, beside the first one again."""
    from rich.table import Table
    from rich.text import Text

    # A group's settings stand below each other, which leaves room for other groups.
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
    """The numbers of the columns that stand side by side, the first one in each block."""
    from rich.cells import cell_len

    columns = [(head, *(row[i] for row in rows)) for i, head in enumerate(heads)]
    wide = [max(cell_len(line) for text in column for line in text.split("\n")) + 2 for column in columns]
    room = width - min(wide[0], FIRST)  # the first column folds
    blocks: list[list[int]] = [[0]]
    for i in range(1, len(heads)):
        if len(blocks[-1]) > 1 and sum(wide[k] for k in blocks[-1][1:]) + wide[i] > room + 2:  # no gap after the last
            blocks.append([0])
        blocks[-1].append(i)
    return blocks
