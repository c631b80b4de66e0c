"""`softcell latency`: times of candidates and networks, here or on another device, as a table for searches."""

from __future__ import annotations

import json
import platform
import statistics
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import yaml
from rich.console import Console

from softcell.app.cli import options as o
from softcell.app.cli.output import check_output_path, command, console, output_path, print_fields, write
from softcell.app.export.write import TABLE, check_pack_folder, write_pack
from softcell.app.progress import counting, working
from softcell.arch import Genotype
from softcell.engine import resolve_device
from softcell.engine.session import set_threads
from softcell.errors import UserError
from softcell.evaluate.latency import SAMPLES, LatencyTable, measure_module, measure_space
from softcell.settings import merge, to_dict
from softcell.spaces import SPACES, Network, Shape, Space, build_space
from softcell.spaces.base import evaluation_space, fit_space
from softcell.text import count_of

CIFAR = "cifar"
CLASSES = 10
NETWORKS = 5
INPUTS: dict[str, Shape] = {"small": (1, 8, 8), "cifar": (3, 32, 32), "imagenet": (3, 224, 224)}
commands = typer.Typer()


@commands.command(
    "latency",
    epilog=o.examples(
        "softcell latency nb201 --out nb201-ms.yaml",
        "softcell search --space nb201 --latency-table nb201-ms.yaml --max-latency 3 --data cifar10",
        "softcell latency runs/train-darts-digits-1 --batch 1 --threads 1",
        "softcell latency darts --recipe imagenet --device cuda --out darts-ms.yaml",
        "softcell latency nb201 --pack for-my-phone",
    ),
)
def latency(
    what: Annotated[
        str,
        typer.Argument(metavar="SPACE|GENOTYPE|RUN", help="A space (all its candidates), an architecture or a run."),
    ],
    recipe: Annotated[
        str | None,
        typer.Option(help="Sizes of the training recipe small, cifar or imagenet. Default: the run's own, or cifar."),
    ] = None,
    cells: o.Cells = None,
    channels: o.Channels = None,
    input_: Annotated[
        str | None,
        typer.Option("--input", metavar="CxHxW", help="Size of an image. Default: the run's or the recipe's."),
    ] = None,
    classes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of classes. Default: the run's, or 10.")
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", min=1, help="Images per call.")] = 1,
    networks: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Random networks to check the table of a space with. Default: 5."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(metavar="N", min=2, help="Samples per measurement. Default: 15.")
    ] = None,
    device: o.Device = None,
    threads: o.Threads = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the table for `search --latency-table`: YAML, or .json."),
    ] = None,
    pack: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write ONNX files and a script that measures them on another device."),
    ] = None,
    set_: o.SetSpace = None,
    overwrite: o.OverwriteFile = False,
    plugin: o.Plugin = None,
    trust: o.Trust = False,
    quiet: o.Quiet = False,
) -> None:
    """Measure the latency of candidates and networks, on this machine or on another device, in milliseconds.

    For a space, all candidates and some whole networks are measured, and the table can be used as a budget by `softcell
    search`. For an architecture or a run, its network is measured: a training run at its own size, finished or not, a
    search at the size that `softcell train` would use, and anything else as a CIFAR network unless options say
    otherwise.

    --pack measures nothing here: it writes all candidates and some networks as ONNX files. Copy the folder to the
    device and run its measure.py, which needs only numpy and onnxruntime. Its latency.json is a table for `softcell
    search`.
    """
    if recipe is not None and recipe not in INPUTS:
        raise UserError(f"--recipe must be one of {', '.join(INPUTS)}, got {recipe!r}")
    o.load_plugins(plugin)
    given = o.space_settings(set_)
    image = None if input_ is None else o.parse_shape(input_)
    if pack is not None:
        here = {"--out": out, "--device": device, "--threads": threads, "--samples": samples}
        for option, value in here.items():
            if value is not None:
                raise UserError(
                    f"{option} applies to measurements on this machine, but --pack is for another device; leave it out"
                )
        check_pack_folder(pack, overwrite)
    target = resolve_device(device or "auto")
    # Restored at the end, for programs that call the command within their own process.
    before = torch.get_num_threads()
    about = {"unit": "ms", "batch": batch, "device": _device(target), "threads": set_threads(threads or 0)}
    sizes = {key: value for key, value in (("cells", cells), ("channels", channels)) if value is not None}
    settings = merge(sizes, given)
    samples = samples or SAMPLES
    try:
        if pack is not None:
            genotypes: list[Genotype] = []
            if what in SPACES:
                base = SPACES.get(what).evaluation.get(recipe or CIFAR, {})
                space, size = build_space(what, merge(base, settings)), image or INPUTS[recipe or CIFAR]
                outputs = classes or CLASSES
            else:
                space, network = _network(what, recipe, settings, image, classes)
                size, outputs, genotypes = network.shape, network.num_classes, [network.genotype]
            about = {"space": space.name, "input": list(size), **_numbers(space)}
            with counting(console(), "exporting", quiet) as step:
                content = write_pack(
                    space,
                    size,
                    outputs,
                    pack,
                    genotypes=genotypes,
                    networks=NETWORKS if networks is None else networks,
                    batch=batch,
                    about=about,
                    on_step=step,
                )
            _show_pack(console(), pack, content, (*_search_options(space, size, recipe), *_plugins(plugin)))
        elif what in SPACES:
            created = None if out is None else check_output_path(out, overwrite)  # before minutes are spent on it
            base = SPACES.get(what).evaluation.get(recipe or CIFAR, {})
            space, size = build_space(what, merge(base, settings)), image or INPUTS[recipe or CIFAR]
            about |= {"space": what, "input": list(size), **_numbers(space)}
            with counting(console(), "measuring", quiet) as step:
                table = measure_space(
                    space,
                    size,
                    classes or CLASSES,
                    target,
                    batch=batch,
                    networks=NETWORKS if networks is None else networks,
                    samples=samples,
                    on_step=step,
                )
            _show_table(console(), table, about)
            if out is not None:
                search_options = (*_search_options(space, size, recipe), *_plugins(plugin))
                _write_table(console(), table, about, out, created, overwrite, search_options)
        else:
            for option, value in (("--out", out), ("--networks", networks)):
                if value is not None:
                    raise UserError(f"{option} applies to the table of a space; the times of one network are printed")
            space, network = _network(what, recipe, settings, image, classes)
            _show_network(console(), space, network.to(target), batch, samples, quiet)
    finally:
        torch.set_num_threads(before)


def _plugins(plugin: list[Path] | None) -> list[str]:
    return [word for path in plugin or () for word in ("--plugin", str(path))]


def _show_pack(screen: Console, folder: Path, content: dict[str, Any], search_options: tuple[str, ...]) -> None:
    size = sum(file.stat().st_size for file in folder.iterdir())
    candidates, networks = len(content["baselines"]), len(content["networks"])
    print_fields(
        screen,
        written=f"{folder}: {count_of(candidates, 'candidate')} and {count_of(networks, 'whole network')}, "
        f"{size / 1e6:.1f} MB",
        device="pip install onnxruntime numpy; python measure.py   (in the copied folder; see --help)",
        then=f"copy its {TABLE} back to {folder} and choose MS, the limit in milliseconds",
        next=command("search", *search_options, "--latency-table", folder / TABLE, "--max-latency", "MS"),
    )


def _show_table(screen: Console, table: LatencyTable, about: dict[str, Any]) -> None:
    threads = count_of(about["threads"], "thread")
    print_fields(screen, measured_on=f"{about['device']}, {threads}, batch {about['batch']}")
    names = list(table.candidates)
    screen.print(f"{'milliseconds':<22}" + "".join(f"{name:>12}" for name in names), style="bold")
    for op in dict.fromkeys(op for row in table.candidates.values() for op in row):
        times = [table.candidates[name].get(op) for name in names]
        screen.print(f"{op:<22}" + "".join(f"{'':>12}" if t is None else f"{t:>12.4g}" for t in times))
    print_fields(screen, fixed=f"{table.fixed:.4g} ms for the rest of a network")
    if table.error is not None:
        times_ = [found.median for _, found in table.networks]
        print_fields(
            screen,
            check=f"mean prediction error {table.error:.1%} on {count_of(len(times_), 'random network')} of "
            f"{min(times_):.3g} to {max(times_):.3g} ms",
        )


def _write_table(
    screen: Console,
    table: LatencyTable,
    about: dict[str, Any],
    out: Path,
    created: Path | None,
    overwrite: bool,
    search_options: tuple[str, ...],
) -> None:
    """Writes the file and prints a search that uses it; `search_options` select the measured networks."""
    header = (
        "# Written by `softcell latency`. Milliseconds: table: {candidate: time}; `fixed` is the rest of a network.\n"
    )
    content = table.to_dict(about)
    as_json = out.suffix == ".json"  # the reader uses the same rule
    text = json.dumps(content, indent=2) + "\n" if as_json else header + yaml.safe_dump(content, sort_keys=False)
    write(out, text, overwrite)
    print_fields(screen, written=output_path(out, created))
    middle = statistics.median(found.median for _, found in table.networks) if table.networks else None
    limit = "MS" if middle is None else f"{middle:.3g}"  # half of the random networks are slower
    print_fields(screen, next=command("search", *search_options, "--latency-table", out, "--max-latency", limit))


def _search_options(space: Space, image: Shape, recipe: str | None) -> tuple[str, ...]:
    """The options of a search whose networks match the measured ones: space, data of this shape, sizes."""
    _, height, width = image
    if image == INPUTS["small"]:
        data: tuple[str, ...] = ("digits",)
    elif recipe == "imagenet" and image == INPUTS[recipe]:
        data = ("imagenet",)
    else:
        data = ("IMAGES-WITH-CLASSES", *(("--image-size", str(height)) if height == width else ()))
    # Options are needed only for what training on these data would not choose by itself.
    usual = to_dict(evaluation_space(space.name, data[0]))
    sizes, words = space.sizes(), []
    for key, value in to_dict(space).items():
        if value != usual[key]:
            text = f"{key}={value if isinstance(value, str) else json.dumps(value)}"
            # Sizes belong to the network that is trained in the end; everything else to the search as well.
            words += ["--set", f"resource.network.{text}", *(() if key in sizes else ("--set", f"space.{text}"))]
    return "--space", space.name, "--data", *data, *words


def _show_network(screen: Console, space: Space, network: Network, batch: int, samples: int, quiet: bool) -> None:
    device = next(network.parameters()).device
    x = torch.rand(batch, *network.shape, device=device)
    with working(screen, "measuring", quiet):
        found = measure_module(network, x, samples=samples)
    sizes = ", ".join(f"{key} {value}" for key, value in _numbers(space).items() if key not in space.search_only)
    print_fields(
        screen,
        network=f"space {network.genotype.space}, {sizes}, input {'x'.join(map(str, network.shape))}, "
        f"{count_of(network.num_classes, 'output')}, batch {batch}",
        device=f"{_device(device)}, {count_of(torch.get_num_threads(), 'thread')}",
        latency=str(found),
        throughput=f"{batch / found.median * 1e3:,.0f} images per second",
    )


def _network(
    what: str, recipe: str | None, settings: dict[str, Any], image: Shape | None, classes: int | None
) -> tuple[Space, Network]:
    """The network that an argument names, with random weights, which take the same time.

    A run has its own network, and options change only what they name. An architecture without a run has the size
    of the recipe.
    """
    _, manifest, found = o.with_run(what)
    kind = SPACES.get(found.space)
    base: dict[str, Any] = dict(kind.evaluation.get(recipe or CIFAR, {}))
    own, own_image, own_classes = o.own_network(what, manifest)
    if own is not None and recipe is None:
        base, image = own, image or own_image
    elif own is not None:
        base = merge({key: value for key, value in own.items() if key not in kind.sizes()}, base)
    classes = classes or own_classes
    space = fit_space(found, build_space(found.space, merge(base, settings)), settings)
    return space, space.network(found, image or INPUTS[recipe or CIFAR], classes or CLASSES)


def _numbers(space: Space) -> dict[str, int]:
    # Not `isinstance`: a bool is an int too.
    return {key: value for key, value in to_dict(space).items() if type(value) is int}


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu ({platform.processor() or platform.machine()})"
