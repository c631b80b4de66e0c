"""`softcell latency`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from softcell.cli import options as o
from softcell.errors import UserError

if TYPE_CHECKING:
    import torch

    from softcell.evaluate.latency import LatencyTable
    from softcell.spaces import Network, Shape, Space

EPILOG = o.examples(
    "softcell latency nb201 --out nb201-ms.yaml",
    "softcell search --space nb201 --latency-table nb201-ms.yaml --max-latency 3 --data cifar10",
    "softcell latency runs/train-darts-digits-1 --batch 1 --threads 1",
    "softcell latency darts --recipe imagenet --device cuda --out darts-ms.yaml",
)
INPUTS: dict[str, Shape] = {"small": (1, 8, 8), "cifar": (3, 32, 32), "imagenet": (3, 224, 224)}


def latency(
    what: Annotated[
        str,
        typer.Argument(metavar="SPACE|GENOTYPE|RUN", help="A space (all its candidates), an architecture or a run."),
    ],
    recipe: Annotated[
        str, typer.Option(help="Sizes of the networks: those of the training recipe small, cifar or imagenet.")
    ] = "cifar",
    cells: Annotated[int | None, typer.Option(metavar="N", help="Depth of the network; else the recipe's.")] = None,
    channels: Annotated[int | None, typer.Option(metavar="N", help="Width at the start; else the recipe's.")] = None,
    input_: Annotated[str | None, typer.Option("--input", metavar="CxHxW", help="Size of an image: 3x32x32.")] = None,
    classes: Annotated[int | None, typer.Option(metavar="N", min=1, help="Number of classes: 10.")] = None,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Images per call.")] = 1,
    networks: Annotated[
        int, typer.Option(metavar="N", min=0, help="Whole random networks to check the table of a space with.")
    ] = 5,
    samples: Annotated[int, typer.Option(metavar="N", min=2, help="Samples per measurement.")] = 15,
    device: o.Device = None,
    threads: o.Threads = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the table (YAML), for `search --latency-table`.")
    ] = None,
    set_: o.Set = None,
    overwrite: o.OverwriteFile = False,
    plugin: o.Plugin = None,
    quiet: o.Quiet = False,
) -> None:
    """Measure how long candidates and networks take on this machine, in milliseconds.

    Of a space all candidates and some whole networks are measured, into a table that `softcell search` accepts as
    a budget; of an architecture or a training run, its network.
    """
    import torch

    from softcell.cli.console import console
    from softcell.cli.info import shape
    from softcell.engine import resolve_device
    from softcell.engine.device import set_threads
    from softcell.settings import assignments, merge
    from softcell.spaces import SPACES

    if recipe not in INPUTS:
        raise UserError(f"--recipe must be one of {', '.join(INPUTS)}, got {recipe!r}")
    o.load_plugins(plugin)
    given = assignments(set_ or ())
    unknown = sorted(set(given) - {"space"})
    if unknown:
        raise UserError(f"--set takes settings of the space here, as space.nodes=3, but got {unknown[0]!r}")
    place = resolve_device(device or "auto")
    before = torch.get_num_threads()
    about = {"unit": "ms", "batch": batch, "device": _device(place), "threads": set_threads(threads or 0)}
    size = {key: value for key, value in (("cells", cells), ("channels", channels)) if value is not None}
    settings = merge(size, given.get("space", {}))
    image = INPUTS[recipe] if input_ is None else shape(input_)
    try:
        if what in SPACES:
            if out is not None and out.exists() and not overwrite:  # before minutes are spent on it
                raise UserError(f"{out} exists already; give another name, or --overwrite to replace it")
            space = _space(what, recipe, settings)
            about |= {"space": what, "input": list(image), **_numbers(space)}
            table = _measure(console(), space, image, classes or 10, place, batch, networks, samples, quiet)
            show_table(console(), table, about, out, overwrite)
        else:
            if out is not None:
                raise UserError("--out writes the table of a space; for one network the times are printed")
            show_network(console(), what, recipe, settings, image, classes or 10, place, batch, samples, quiet)
    finally:
        torch.set_num_threads(before)


def _measure(
    screen: Console,
    space: Space,
    image: Shape,
    classes: int,
    device: torch.device,
    batch: int,
    networks: int,
    samples: int,
    quiet: bool,
) -> LatencyTable:
    from softcell.cli.progress import counting
    from softcell.evaluate.latency import measure_space

    with counting(screen, "measuring", quiet) as step:
        return measure_space(
            space, image, classes, device, batch=batch, networks=networks, samples=samples, on_step=step
        )


def show_table(screen: Console, table: LatencyTable, about: dict[str, Any], out: Path | None, overwrite: bool) -> None:
    import statistics

    import yaml

    from softcell.cli.console import command, write
    from softcell.cli.results import facts

    facts(screen, measured_on=f"{about['device']}, {about['threads']} threads, batch {about['batch']}")
    names = list(table.candidates)
    screen.print(f"{'milliseconds':<22}" + "".join(f"{name:>12}" for name in names), style="bold")
    for op in dict.fromkeys(op for row in table.candidates.values() for op in row):
        times = [table.candidates[name].get(op) for name in names]
        screen.print(f"{op:<22}" + "".join(f"{'':>12}" if t is None else f"{t:>12.4g}" for t in times))
    facts(screen, fixed=f"{table.fixed:.4g} ms around the candidates of a network")
    if table.error is not None:
        range_ = [found.median for _, found in table.networks]
        facts(
            screen,
            check=f"{len(range_)} random networks of {min(range_):.3g} to {max(range_):.3g} ms are predicted within "
            f"{table.error:.1%} on average",
        )
    if out is not None:
        header = (
            "# Written by `softcell latency`. Milliseconds: table: {candidate: time}; `fixed` is all that is around.\n"
        )
        write(out, header + yaml.safe_dump(table.to_dict(about), sort_keys=False), overwrite)
        facts(screen, written=str(out))
        middle = statistics.median(found.median for _, found in table.networks) if table.networks else None
        limit = "MS" if middle is None else f"{middle:.3g}"  # half of the random networks are slower
        search = command("search", "--space", str(about["space"]), "--latency-table", out)
        facts(screen, next=f"{search} --max-latency {limit}")


def show_network(
    screen: Console,
    what: str,
    recipe: str,
    settings: dict[str, Any],
    image: Shape,
    classes: int,
    device: torch.device,
    batch: int,
    samples: int,
    quiet: bool,
) -> None:
    import torch

    from softcell.cli.progress import working
    from softcell.cli.results import facts
    from softcell.evaluate.latency import measure_module

    network = _network(what, recipe, settings, image, classes).to(device)
    x = torch.rand(batch, *network.shape, device=device)
    with working(screen, "measuring", quiet):
        found = measure_module(network, x, samples=samples)
    facts(
        screen,
        network=f"space {network.genotype.space}, input {'x'.join(map(str, network.shape))}, batch {batch}",
        device=f"{_device(device)}, {torch.get_num_threads()} threads",
        latency=str(found),
        throughput=f"{batch / found.median * 1e3:,.0f} images per second",
    )


def _network(what: str, recipe: str, settings: dict[str, Any], image: Shape, classes: int) -> Network:
    from softcell.cli import inputs
    from softcell.evaluate.fixed import settled
    from softcell.export import trained_folder
    from softcell.sources import run_of
    from softcell.spaces import Network

    if run_of(what) is not None and not settings:
        try:
            return Network.from_pretrained(trained_folder(what))
        except UserError:
            pass  # a search: its architecture at the recipe's size
    found = inputs.genotype(what)
    return settled(found, _space(found.space, recipe, settings), settings).network(found, image, classes)


def _space(name: str, recipe: str, settings: dict[str, Any]) -> Space:
    from softcell.settings import merge
    from softcell.spaces import SPACES, build_space

    return build_space(name, merge(SPACES.get(name).evaluation.get(recipe, {}), settings))


def _numbers(space: Space) -> dict[str, int]:
    from softcell.settings import to_dict

    return {key: value for key, value in to_dict(space).items() if type(value) is int}


def _device(device: torch.device) -> str:
    import platform

    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.processor() or platform.machine()})"
