"""Options that several commands share, said once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

Data = Annotated[
    str | None,
    typer.Option(help="Dataset: a name from `softcell list datasets`, a folder of class/image files, or an .npz file."),
]
DataRoot = Annotated[
    str | None,
    typer.Option(metavar="DIR", help="Where named datasets are looked for; else $SOFTCELL_DATA, else ./data."),
]
ImageSize = Annotated[
    int | None, typer.Option(metavar="PIXELS", help="Scale images to this square (image folders and imagenet).")
]
Epochs = Annotated[int | None, typer.Option(metavar="N", help="Number of epochs; else the recipe's.")]
BatchSize = Annotated[int | None, typer.Option(metavar="N", help="Images per step over all processes.")]
Seed = Annotated[int | None, typer.Option(metavar="K", help="Seed of everything random; 0 unless given.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or cuda:N; auto takes CUDA where there is one.")]
Precision = Annotated[
    Literal["auto", "float32", "bfloat16", "float64"] | None,
    typer.Option(help="Numbers networks compute in; auto times float32 and bfloat16 on a GPU, once."),
]
Engine = Annotated[
    Literal["auto", "eager", "graph"] | None,
    typer.Option(help="How steps run: graph records them on CUDA, auto does where it can."),
]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Repeatable bit by bit on a GPU too (on a CPU it always is).")
]
Threads = Annotated[int | None, typer.Option(metavar="N", help="CPU threads per operation; else torch's choice.")]
Config = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Settings from YAML or JSON, or an earlier run (its run.json or folder)."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other setting, as weights.lr=0.1; may be repeated."),
]
SetTraining = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any other setting, as lr=0.1; may be repeated."),
]
SetSpace = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Settings of the space, as space.cells=5; may be repeated."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the earlier run in --out.")]
OverwriteFile = Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")]
Plugin = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Python file with your own spaces, methods or candidates; may be repeated."),
]
Tensorboard = Annotated[
    bool, typer.Option("--tensorboard", help="Also log to the run's folder for TensorBoard (extra tensorboard).")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress; only warnings and the result.")]
Architecture = Annotated[
    str,
    typer.Argument(
        metavar="GENOTYPE",
        help="A genotype file, FILE@NAME, a run folder, RUN@EPOCH, DARTS notation, a NAS-Bench-201 string, or - for "
        "standard input.",
    ),
]
Notation = Literal["json", "darts", "nb201"]


def _agree(given: bool) -> bool:
    from softcell.trust import allow

    if given:
        allow()
    return given


Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        callback=_agree,
        help="Run the code that a run, recipe or sweep brings along (plugins, .pt2 programs); asked once per content.",
    ),
]


def settings(set_: list[str] | None, plugin: list[Path] | None, **options: Any) -> dict[str, Any]:
    """What was given on the command line as settings of a recipe; an option that was left out is no setting."""
    from softcell.api import layered, trust_named
    from softcell.settings import assignments

    named = {key: value for key, value in options.items() if value is not None and value is not False}
    if plugin:
        # Absolute, so that the run can be resumed and repeated from any folder.
        named["plugins"] = [str(path.resolve()) for path in plugin]
    if "data_root" not in named and _lies_here(named.get("data")):
        named["data_root"] = str(Path.cwd())  # likewise
    given = layered(named, assignments(set_ or ()))
    trust_named(given)
    return given


def _lies_here(data: str | None) -> bool:
    """Whether this is a folder or file of the user's, named from where the command is typed."""
    from softcell.data import datasets

    return data is not None and data not in datasets() and not Path(data).is_absolute() and Path(data).exists()


def load_plugins(plugin: list[Path] | None) -> None:
    from softcell import registry

    for path in plugin or ():
        registry.load_plugin(path)


def examples(*lines: str) -> str:
    """An epilog; each line stands for itself in the help."""
    return "\n\n".join(("Examples:", *(f"  {line}" for line in lines)))
