"""`softcell latency`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from softcell.app.cli import options as o
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
CIFAR = "cifar"
CLASSES = 10
NETWORKS = 5
INPUTS: dict[str, Shape] = {"small": (1, 8, 8), "cifar": (3, 32, 32), "imagenet": (3, 224, 224)}


def latency(
    what: Annotated[
        str,
        typer.Argument(metavar="SPACE|GENOTYPE|RUN", help="A space (all its candidates), an architecture or a run."),
    ],
    recipe: Annotated[
        str | None,
        typer.Option(help="Sizes as in the training recipe small, cifar or imagenet; else a run's own, or cifar."),
    ] = None,
    cells: Annotated[int | None, typer.Option(metavar="N", help="Depth of the network; else the recipe's.")] = None,
    channels: Annotated[int | None, typer.Option(metavar="N", help="Width at the start; else the recipe's.")] = None,
    input_: Annotated[
        str | None,
        typer.Option("--input", metavar="CxHxW", help="Size of an image; else the run's or the recipe's."),
    ] = None,
    classes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of classes; else the run's, or 10.")
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Images per call.")] = 1,
    networks: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Whole random networks to check the table of a space with; 5."),
    ] = None,
    samples: Annotated[int, typer.Option(metavar="N", min=2, help="Samples per measurement.")] = 15,
    device: o.Device = None,
    threads: o.Threads = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the table (YAML), for `search --latency-table`.")
    ] = None,
    set_: o.SetSpace = None,
    overwrite: o.OverwriteFile = False,
    plugin: o.Plugin = None,
    trust: o.Trust = False,
    quiet: o.Quiet = False,
) -> None:
    """Measure how long candidates and networks take on this machine, in milliseconds.

    Of a space all candidates and some whole networks are measured, into a table that `softcell search` accepts as
    a budget; of an architecture or a run, its network. A training, finished or not, is measured at its own size, a
    search as what would be trained, anything else as a CIFAR network unless told otherwise.
    """
    import torch

    from softcell.app.cli.console import console
    from softcell.app.cli.info import shape
    from softcell.app.cli.places import free_place
    from softcell.engine import resolve_device
    from softcell.engine.session import set_threads
    from softcell.settings import assignments, merge
    from softcell.spaces import SPACES

    if recipe is not None and recipe not in INPUTS:
        raise UserError(f"--recipe must be one of {', '.join(INPUTS)}, got {recipe!r}")
    o.load_plugins(plugin)
    given = assignments(set_ or ())
    unknown = sorted(set(given) - {"space"})
    if unknown:
        raise UserError(f"--set takes settings of the space here, as space.nodes=3, but got {unknown[0]!r}")
    image = None if input_ is None else shape(input_)
    place = resolve_device(device or "auto")
    before = torch.get_num_threads()
    about = {"unit": "ms", "batch": batch, "device": _device(place), "threads": set_threads(threads or 0)}
    sizes = {key: value for key, value in (("cells", cells), ("channels", channels)) if value is not None}
    settings = merge(sizes, given.get("space", {}))
    try:
        if what in SPACES:
            made = None if out is None else free_place(out, overwrite)  # before minutes are spent on it
            space, size = _space(what, recipe or CIFAR, settings), image or INPUTS[recipe or CIFAR]
            about |= {"space": what, "input": list(size), **_numbers(space)}
            count = NETWORKS if networks is None else networks
            table = _measure(console(), space, size, classes or CLASSES, place, batch, count, samples, quiet)
            show_table(console(), table, about)
            if out is not None:
                plugins = (word for path in plugin or () for word in ("--plugin", str(path)))
                searched_with = (*_searched_with(space, size, recipe), *plugins)
                write_table(console(), table, about, out, made, overwrite, searched_with)
        else:
            for option, value in (("--out", out), ("--networks", networks)):
                if value is not None:
                    raise UserError(f"{option} is about the table of a space; of one network the times are printed")
            space, network = _network(what, recipe, settings, image, classes)
            show_network(console(), space, network.to(place), batch, samples, quiet)
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
    from softcell.app.cli.progress import counting
    from softcell.evaluate.latency import measure_space

    with counting(screen, "measuring", quiet) as step:
        return measure_space(
            space, image, classes, device, batch=batch, networks=networks, samples=samples, on_step=step
        )


def show_table(screen: Console, table: LatencyTable, about: dict[str, Any]) -> None:
    from softcell.app.cli.results import facts

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


def write_table(
    screen: Console,
    table: LatencyTable,
    about: dict[str, Any],
    out: Path,
    made: Path | None,
    overwrite: bool,
    searched_with: tuple[str, ...],
) -> None:
    """Writes the file and says what to do with it; `searched_with` are the options of a search that it is right for."""
    import statistics

    import yaml

    from softcell.app.cli.console import command, write
    from softcell.app.cli.places import placed
    from softcell.app.cli.results import facts

    header = "# Written by `softcell latency`. Milliseconds: table: {candidate: time}; `fixed` is all that is around.\n"
    write(out, header + yaml.safe_dump(table.to_dict(about), sort_keys=False), overwrite)
    facts(screen, written=placed(out, made))
    middle = statistics.median(found.median for _, found in table.networks) if table.networks else None
    limit = "MS" if middle is None else f"{middle:.3g}"  # half of the random networks are slower
    facts(screen, next=command("search", *searched_with, "--latency-table", out, "--max-latency", limit))


def _searched_with(space: Space, image: Shape, recipe: str | None) -> tuple[str, ...]:
    """The options of a search whose networks are those that were measured: its space, data of this shape, sizes."""
    import json

    from softcell.settings import to_dict
    from softcell.spaces.registry import evaluation_space

    _, height, width = image
    if image == INPUTS["small"]:
        data: tuple[str, ...] = ("digits",)
    elif recipe == "imagenet" and image == INPUTS[recipe]:
        data = ("imagenet",)
    else:
        data = ("IMAGES-WITH-CLASSES", *(("--image-size", str(height)) if height == width else ()))
    usual = to_dict(evaluation_space(space.name, data[0]))
    sizes, words = space.sizes(), []
    for key, value in to_dict(space).items():
        if value != usual[key]:
            text = f"{key}={value if isinstance(value, str) else json.dumps(value)}"
            # Sizes are those of the network that is trained in the end; all else is the search's own as well.
            words += ["--set", f"resource.network.{text}", *(() if key in sizes else ("--set", f"space.{text}"))]
    return "--space", space.name, "--data", *data, *words


def show_network(screen: Console, space: Space, network: Network, batch: int, samples: int, quiet: bool) -> None:
    import torch

    from softcell.app.cli.progress import working
    from softcell.app.cli.results import facts
    from softcell.evaluate.latency import measure_module

    device = next(network.parameters()).device
    x = torch.rand(batch, *network.shape, device=device)
    with working(screen, "measuring", quiet):
        found = measure_module(network, x, samples=samples)
    sizes = ", ".join(f"{key} {value}" for key, value in _numbers(space).items() if key not in space.search_only)
    facts(
        screen,
        network=f"space {network.genotype.space}, {sizes}, input {'x'.join(map(str, network.shape))}, "
        f"{network.num_classes} outputs, batch {batch}",
        device=f"{_device(device)}, {torch.get_num_threads()} threads",
        latency=str(found),
        throughput=f"{batch / found.median * 1e3:,.0f} images per second",
    )


def _network(
    what: str, recipe: str | None, settings: dict[str, Any], image: Shape | None, classes: int | None
) -> tuple[Space, Network]:
    """The network that an argument names, with random weights, which take the same time.

    A run has a network of its own; options change what they name of it. An architecture without a run has none: it is
    one of the recipe's size.
    """
    from softcell.app.cli import inputs
    from softcell.evaluate.recipe import fit_space
    from softcell.settings import merge
    from softcell.spaces import SPACES, build_space

    _, manifest, found = inputs.with_run(what)
    kind = SPACES.get(found.space)
    base: dict[str, Any] = dict(kind.evaluation.get(recipe or CIFAR, {}))
    own, own_image, own_classes = inputs.own_network(what, manifest)
    if own is not None and recipe is None:
        base, image = own, image or own_image
    elif own is not None:
        base = merge({key: value for key, value in own.items() if key not in kind.sizes()}, base)
    classes = classes or own_classes
    space = fit_space(found, build_space(found.space, merge(base, settings)), settings)
    return space, space.network(found, image or INPUTS[recipe or CIFAR], classes or CLASSES)


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
