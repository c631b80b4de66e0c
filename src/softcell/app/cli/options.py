"""Options that several commands share, each declared once, and the settings that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from softcell import registry
from softcell.data import datasets
from softcell.errors import UserError
from softcell.recipes import from_options, trust_named
from softcell.settings import assignments, layered
from softcell.trust import allow

Data = Annotated[
    str | None,
    typer.Option(help="Dataset: a name from `softcell list datasets`, a folder of CLASS/IMAGE files, or an .npz file."),
]
DataRoot = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Folder that holds named datasets. Default: $SOFTCELL_DATA, else ./data."),
]
ImageSize = Annotated[
    int | None, typer.Option(metavar="PIXELS", help="Resize images to this square size (image folders and imagenet).")
]
Epochs = Annotated[int | None, typer.Option(metavar="N", help="Number of epochs. Default: set by the recipe.")]
BatchSize = Annotated[int | None, typer.Option(metavar="N", help="Images per step, over all processes.")]
Seed = Annotated[int | None, typer.Option(metavar="K", help="Random seed. Default: 0.")]
Seeds = Annotated[
    int | None,
    typer.Option(metavar="K", help="Run with K seeds, counting up from --seed; on a GPU all at the same time."),
]
AtOnce = Annotated[
    int | None,
    typer.Option(metavar="N", help="With --seeds: how many runs share the device. Default: all on a GPU, else one."),
]
Cells = Annotated[int | None, typer.Option(metavar="N", help="Depth of the network. Default: set by the recipe.")]
Channels = Annotated[
    int | None, typer.Option(metavar="N", help="Initial width of the network. Default: set by the recipe.")
]
Device = Annotated[
    str | None, typer.Option(help="auto, cpu, cuda, cuda:N or mps (Apple, untested); auto uses CUDA if available.")
]
Precision = Annotated[
    Literal["auto", "float32", "bfloat16", "float64"] | None,
    typer.Option(help="Compute precision; auto picks the faster of float32 and bfloat16, timed once on a GPU."),
]
Engine = Annotated[
    Literal["auto", "eager", "graph"] | None,
    typer.Option(help="How steps run: graph records them as CUDA graphs, auto does so where possible."),
]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Bit-for-bit repeatable on a GPU too (on a CPU it always is).")
]
Threads = Annotated[int | None, typer.Option(metavar="N", help="CPU threads per operation. Default: set by PyTorch.")]
Config = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Settings from a YAML or JSON file, or from an earlier run (folder or run.json)."
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other setting, such as weights.lr=0.1; repeatable."),
]
SetTraining = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other setting, such as lr=0.1; repeatable."),
]
SetSpace = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Settings of the space, such as space.cells=5; repeatable."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume the run in --out; it keeps its recipe.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing run in --out.")]
OverwriteFile = Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")]
Plugin = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Python file with your own spaces, methods or candidates; repeatable."),
]
Tensorboard = Annotated[
    bool, typer.Option("--tensorboard", help="Also write TensorBoard logs to the run folder (extra `tensorboard`).")
]
Mlflow = Annotated[
    bool,
    typer.Option("--mlflow", help="Also log to MLflow, to $MLFLOW_TRACKING_URI or its default (extra `mlflow`)."),
]
Wandb = Annotated[
    bool,
    typer.Option("--wandb", help="Also log to Weights & Biases; $WANDB_MODE=offline needs no server (extra `wandb`)."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress, only warnings and the result.")]
Architecture = Annotated[
    str,
    typer.Argument(
        metavar="GENOTYPE",
        help="A genotype file, FILE@NAME, a run folder, RUN@EPOCH, DARTS notation, a NAS-Bench-201 string, or - for "
        "standard input.",
    ),
]
Notation = Literal["json", "darts", "nb201"]


def _trust(given: bool) -> bool:
    if given:
        allow()
    return given


Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        callback=_trust,
        help="Run code that comes with a run, recipe or sweep (plugins, .pt2 programs); remembered per file content.",
    ),
]

SHARED = (
    *("data", "data_root", "image_size", "epochs", "batch_size", "seed"),
    *("device", "deterministic", "threads", "precision", "engine"),
)
"""Options of `search`, `train` and `teacher` that have the name of the recipe's setting."""


def settings(options: Mapping[str, Any], **own: Any) -> dict[str, Any]:
    """The settings of a recipe that were given on the command line; an option that was left out is no setting.

    options: a command's parameters (its `locals()`); `SHARED`, `set_` and `plugin` are read from it.
    own: settings that only this command has.
    """
    named = {**{key: options.get(key) for key in SHARED}, **own}
    named = {key: value for key, value in named.items() if value is not None and value is not False}
    if options.get("plugin"):
        # Absolute, so that the run can be resumed and repeated from any folder.
        named["plugins"] = [str(path.resolve()) for path in options["plugin"]]
    data = named.get("data")
    is_own = data is not None and data not in datasets() and not Path(data).is_absolute() and Path(data).exists()
    if is_own and "data_root" not in named:
        named["data_root"] = str(Path.cwd())  # for the same reason
    given = layered(from_options(named), assignments(options.get("set_") or ()))
    trust_named(given)
    return given


def trackers(options: Mapping[str, Any]) -> list[str]:
    """The tools that a command's parameters (its `locals()`) ask to log to."""
    return [name for name in ("tensorboard", "mlflow", "wandb") if options.get(name)]


def space_settings(set_: list[str] | None) -> dict[str, Any]:
    """Settings of a space from `--set space.KEY=VALUE`; anything else is an error."""
    given = assignments(set_ or ())
    unknown = sorted(set(given) - {"space"})
    if unknown:
        raise UserError(f"--set accepts only settings of the space here, such as space.nodes=3, but got {unknown[0]!r}")
    space = given.get("space", {})
    if not isinstance(space, dict):
        raise UserError(f"--set space.KEY=VALUE sets one value of the space, but got space={space!r}")
    return space


def load_plugins(plugin: list[Path] | None) -> None:
    for path in plugin or ():
        registry.load_plugin(path)


def examples(*lines: str) -> str:
    """The examples below a command's help, one per line."""
    return "\n\n".join(("Examples:", *(f"  {line}" for line in lines)))
