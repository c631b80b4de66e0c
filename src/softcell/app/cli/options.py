"""Options and arguments that several commands share, each declared once, and what they mean."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from softcell import registry
from softcell.arch import Genotype, notation
from softcell.data import datasets
from softcell.engine import RunFolder
from softcell.engine.runfolder import SEEDS
from softcell.errors import UserError
from softcell.recipes import from_options, train_recipe, trust_named
from softcell.search.genotypes import read_genotype, run_of
from softcell.settings import assignments
from softcell.spaces import SPACES, Shape
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
BatchSize = Annotated[int | None, typer.Option(metavar="N", help="Images per step, across all processes.")]
Seed = Annotated[int | None, typer.Option(metavar="K", help="Random seed. Default: 0.")]
Seeds = Annotated[
    int | None,
    typer.Option(metavar="K", help="Run with K seeds, counting up from --seed; on a GPU all at the same time."),
]
AtOnce = Annotated[
    int | None,
    typer.Option(metavar="N", help="With --seeds: how many runs share the device. Default: all on a GPU, else one."),
]
AtOnceTraining = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="With --seeds or --random: how many runs share the device. Default: all on a GPU, else one; with --time, "
        "one.",
    ),
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
    typer.Option(help="How steps run: graph captures them as CUDA graphs, auto captures if possible."),
]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Bit-for-bit reproducible on a GPU too (on a CPU it always is).")
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
    """The settings of a recipe that were given on the command line; an option that was not given is not a setting.

    options: a command's parameters (its `locals()`); `SHARED`, `set_` and `plugin` are read from it.
    own: settings that only this command has.
    """
    named = {**{key: options.get(key) for key in SHARED}, **own}
    # A flag that was not given is False.
    named = {key: value for key, value in named.items() if value is not None and value is not False}
    if options.get("plugin"):
        # Absolute, so that the run can be resumed and repeated from any folder.
        named["plugins"] = [str(path.resolve()) for path in options["plugin"]]
    data = named.get("data")
    is_own = data is not None and data not in datasets() and not Path(data).is_absolute() and Path(data).exists()
    if is_own and "data_root" not in named:
        named["data_root"] = str(Path.cwd())  # for the same reason
    given = from_options({**named, "set": options.get("set_")})  # last: `--set` overrides the other options
    trust_named(given)
    return given


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options of `search` and `train` that say where and how a run is started, and are not part of its recipe.

    at_once: how many of several runs share the device. track: the tools to log to.
    """

    out: Path | None
    config: Path | None = None
    resume: bool = False
    overwrite: bool = False
    at_once: int | None = None
    quiet: bool = False
    track: Sequence[str] = ()

    @property
    def resumes_seeds(self) -> bool:
        """Whether the folder to resume has several seeds; it is then resumed as such, without --seeds."""
        return self.resume and self.out is not None and (self.out / SEEDS).is_file()

    @property
    def sharing(self) -> tuple[str, ...]:
        """`--at-once N` as words of the command that resumes, if it was given."""
        return () if self.at_once is None else ("--at-once", str(self.at_once))

    def check_at_once(self) -> None:
        if self.at_once is not None and self.at_once < 1:
            raise UserError(
                f"--at-once must be at least 1, but is {self.at_once}; leave it out to use the device's default"
            )


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


MAX_CHARACTERS = 2**26
"""Maximum length of an architecture on standard input."""


def from_stdin(text: str | None) -> str | None:
    """The argument itself, or the content of standard input if it is `-`."""
    if text != "-":
        return text
    try:
        # Reading one character more than allowed shows whether there is more.
        content = sys.stdin.read(MAX_CHARACTERS + 1)
    except UnicodeDecodeError as error:
        raise UserError(f"standard input must be text, but is not: {error}") from error
    if len(content) > MAX_CHARACTERS:
        raise UserError(f"an architecture has at most {MAX_CHARACTERS:,} characters, but standard input has more")
    if not content.strip():
        raise UserError("expected an architecture on standard input, but it is empty")
    notation.parse(content)  # so that other text is not mistaken for a path
    return content


def named_genotype(text: str) -> Genotype:
    content = from_stdin(text)
    assert content is not None
    return read_genotype(content)


def with_run(text: str, *, only_trusted: bool = False) -> tuple[Path | None, dict[str, Any] | None, Genotype]:
    """The architecture that an argument names and, if it belongs to a run, its folder and manifest.

    For commands that accept a space too: the error suggests one if its name was mistyped. The run's plugins are loaded
    first: they may define its space. only_trusted: skip plugins that are not trusted instead of raising.
    """
    folder = run_of(text)
    manifest = None if folder is None else RunFolder.open(folder).manifest
    if manifest is not None:
        named = manifest["recipe"].get("plugins", ())
        skipped = registry.refused(named) if only_trusted else []
        registry.load_plugins([path for path in named if path not in skipped], f"the run in {folder}")
    try:
        return folder, manifest, named_genotype(text)
    except UserError as error:
        close = difflib.get_close_matches(text, list(SPACES), n=1)
        if folder is not None or not close:
            raise
        raise UserError(f"{error}; did you mean the space {close[0]!r}?") from error


def own_network(text: str, manifest: dict[str, Any] | None) -> tuple[dict[str, Any] | None, Shape | None, int | None]:
    """The network of a run: settings of its space, shape of its images, number of outputs; None for what is unknown.

    A training run has one, finished or not; a search has the one that `softcell train` would build. An architecture
    without a run has none.
    """
    if manifest is None or manifest["kind"] not in ("train", "search"):
        return None, None, None
    data = manifest["results"].get("data")  # searches of older versions lack it
    image = None if data is None else tuple(data["shape"])
    if manifest["kind"] == "train":
        outputs = None if data is None else data.get("outputs", len(data["classes"]))
        return manifest["recipe"]["space_settings"], image, outputs
    return train_recipe(text, {})[1].space_settings, image, None if data is None else data["num_classes"]


def parse_shape(text: str) -> Shape:
    """`3x32x32` as channels, height and width."""
    found = re.fullmatch(r"([1-9]\d*)[x×]([1-9]\d*)[x×]([1-9]\d*)", text)
    if found is None:
        raise UserError(f"--input must be CHANNELSxHEIGHTxWIDTH, such as 3x32x32, got {text!r}")
    return int(found[1]), int(found[2]), int(found[3])
