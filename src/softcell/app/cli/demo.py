"""`softcell demo`: does a search find better cells than chance? Answered in minutes, on a CPU, with a test.

One found cell beside a few random ones shows little, whatever its accuracy. The demo searches with several seeds,
trains the found cells and random cells of the same space alike, and asks how likely such ranks are by chance.

The space is S4 of RobustDARTS: a separable convolution or pure noise on every edge of DARTS's cells. In the space of
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

from softcell.app import jobs
from softcell.app.baseline import claim, draw_random, rank_sum
from softcell.app.cli import options as o
from softcell.app.cli import results
from softcell.app.cli.console import console, percent, print_fields
from softcell.app.cli.search import run_seeds
from softcell.app.progress import counting
from softcell.arch import Genotype
from softcell.engine.runfolder import MANIFEST, SEEDS, free_folder
from softcell.errors import UserError
from softcell.evaluate import TrainResult
from softcell.files import atomic_write_text
from softcell.recipes import train_recipe
from softcell.search.genotypes import read_genotype
from softcell.seeds import read_seeds, seed_folder
from softcell.text import count_of

SEARCHES, RANDOM = 3, 9
"""Seeds of the search, and random cells. All found cells above all random ones have p = 0.009."""
SIZES = {"cells": 3, "channels": 8}
SEARCH: dict[str, Any] = {
    "method": "darts",
    "space": "s4",
    "data": "digits",
    "scale": "small",
    "epochs": 6,
    "space_settings": SIZES,
}
TRAIN: dict[str, Any] = {
    "data": "digits",
    "recipe": "small",
    "epochs": 5,
    "auxiliary": 0.0,
    "space_settings": SIZES,
}
RECORD = "demo.json"
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
    seed: Annotated[
        int, typer.Option(metavar="K", min=0, help="Random seed. Another one searches and draws other cells.")
    ] = 0,
    device: o.Device = None,
    threads: o.Threads = None,
    quiet: o.Quiet = False,
) -> int:
    """Search cells on handwritten digits and test whether they beat random cells, in under 3 minutes."""
    folder = out or free_folder("demo")
    screen = console()
    given = o.settings({"device": device, "threads": threads})
    again = ("demo", "--out", str(folder), *(("--seed", str(seed)) if seed else ()))

    screen.print("1. Search cells on 8x8 handwritten digits (UCI, part of the package)", style="bold")
    screen.print(
        f"Every edge is a separable convolution or noise (space s4); DARTS must avoid the noise, {SEARCHES} times"
    )
    search, first = folder / "search", SEARCHES * seed  # demos with different seeds share no search
    seeds = list(range(first, first + SEARCHES))
    if (search / SEEDS).is_file() and (known := read_seeds(search)) != seeds:
        raise UserError(
            f"a demo is resumed with its own seed, but {search} has seeds {known[0]} to {known[-1]} and "
            f"--seed {seed} means {first} to {seeds[-1]}; give another --out, or the --seed of the folder"
        )
    begun = any((seed_folder(search, one) / MANIFEST).is_file() for one in seeds)
    code = run_seeds(
        {**SEARCH, **given, "seed": first},
        None,
        search,
        SEARCHES,
        "all",
        at_once=None,
        resume=begun,
        overwrite=not begun,  # at most an empty folder with its list of seeds
        quiet=quiet,
        hint=False,
        again=again,
    )
    if code:
        return code

    found = {f"found-{one}": read_genotype(seed_folder(search, one)) for one in seeds}
    screen.print(f"\n2. Train the found cells and {RANDOM} random cells of the space alike, from scratch", style="bold")
    trained = _train_all(screen, found, {**TRAIN, **given, "seed": seed}, folder / "train", quiet)
    stopped = next((result.exit_code for result in trained.values() if result.exit_code), 0)
    if stopped:
        results.interrupted(screen, *again)
        return stopped
    _show(screen, folder, trained, list(found), seed)
    return 0


def _train_all(
    screen: Console, found: Mapping[str, Genotype], settings: Mapping[str, Any], place: Path, quiet: bool
) -> dict[str, TrainResult]:
    """Trains the found cells and as many random ones as the demo has, each in a folder of its name; stops at a signal.

    All have one recipe, one seed and the same batches: only the architecture differs. A cell without any path from
    input to output is trained like the others, whoever chose it.
    """
    example = next(iter(found.values()))
    _, recipe = train_recipe(example, settings)
    others = draw_random(example, recipe, RANDOM)
    networks = {**found, **{f"random-{number}": cell for number, cell in enumerate(others, 1)}}
    trained: dict[str, TrainResult] = {}
    with counting(screen, "training", quiet) as notify:
        for name, genotype in networks.items():
            notify(len(trained), len(networks), name)
            own = place / name
            trained[name] = jobs.train(genotype, recipe, own, resume=(own / MANIFEST).is_file())
            if trained[name].exit_code:
                break
    return trained


def _show(screen: Console, folder: Path, trained: Mapping[str, TrainResult], found: Sequence[str], seed: int) -> None:
    """All networks by accuracy, the two groups, the claim and the files; writes `demo.json`."""
    accuracies = {name: result.accuracy for name, result in trained.items() if result.accuracy is not None}
    assert len(accuracies) == len(trained)  # digits have a test split
    ours = [accuracies[name] for name in found]
    others = [accuracy for name, accuracy in accuracies.items() if name not in found]
    sentence = claim(ours, others)
    record = {
        "seed": seed,
        "search": SEARCH,
        "train": TRAIN,
        "accuracy": accuracies,
        "p": rank_sum(ours, others),
        "claim": sentence,
    }
    atomic_write_text(folder / RECORD, json.dumps(record, indent=2) + "\n")

    best = max(found, key=lambda name: accuracies[name])
    images = count_of(json.loads((trained[best].folder / MANIFEST).read_text("utf-8"))["results"]["count"], "image")
    screen.print()
    screen.print(Text(f"accuracy on the {trained[best].split} split ({images}), best first", "bold"))
    for name in sorted(accuracies, key=lambda name: -accuracies[name]):
        size = f"{trained[name].cost.parameters:>9,} parameters"
        screen.print(Text(f"{name:<14}{percent(accuracies[name]):>6}{size}", "bold" if name in found else ""))
    screen.print()
    screen.print(Text(sentence, "bold"))
    print_fields(screen, best_found=str(trained[best].folder / "genotype.svg"))
    print_fields(screen, report=str(trained[best].folder / "report.html"), record=str(folder / RECORD))
