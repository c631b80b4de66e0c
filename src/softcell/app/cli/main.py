"""`softcell`: the commands by name, imported one at a time, and every failure as one line and an exit code."""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import softcell
from softcell.app.process import enter, explain_failure, notice_when_slow, record_error
from softcell.errors import LostRankError, UserError
from softcell.machine import num_processes
from softcell.trust import asking

USAGE = 2
INTERRUPTED = 130  # what shells report after Ctrl-C

COMMANDS = {
    "demo": (
        "run",
        "Search for cells on handwritten digits and test whether they beat random cells, in under 3 minutes.",
    ),
    "run": ("run", "Turn a folder of images into a trained and exported network within a given time and budget."),
    "search": ("search", "Search for an architecture. Without arguments: DARTS cells on handwritten digits."),
    "train": ("train", "Train the network of an architecture from scratch and test it once, at the end."),
    "teacher": ("train", "Train a network of fixed architecture to guide searches (`softcell search --guide DIR`)."),
    "derive": ("supernet", "Derive one architecture per budget from one search, and draw accuracy against cost."),
    "export": ("export", "Export a trained network and check the result against the original."),
    "predict": ("export", "Classify images with a trained network: class names and probabilities."),
    "latency": (
        "latency",
        "Measure the latency of candidates and networks, on this machine or on another device, in milliseconds.",
    ),
    "report": ("report", "Write one self-contained HTML page about one or more runs."),
    "watch": ("report", "Serve a live report of running searches and training runs, on this machine only."),
    "compare": ("report", "Compare runs over seeds: n, mean, std, and which differences are significant."),
    "sweep": ("report", "Run methods x spaces x seeds from a short file; finished runs are never repeated."),
    "reproduce": (
        "reproduce",
        "Print the plan that reproduces a paper's tables, run it, and show our numbers next to the published ones.",
    ),
    "indicators": ("supernet", "Compare how indicators rate the candidates of a trained supernet, edge by edge."),
    "gradcam": ("supernet", "Draw Grad-CAM heat maps of every candidate of one edge or layer."),
    "bench": ("bench", "Look up searches and architectures in the NAS-Bench-201 table."),
    "show": ("architectures", "Draw an architecture in the terminal or as SVG."),
    "info": ("architectures", "Count the parameters, multiply-adds and size of a network, or describe a space."),
    "study": (
        "reproduce",
        "NOS's preliminary study: what each self-calibration operation adds to a ResNet-18 (Table 1).",
    ),
    "convert": (
        "architectures",
        "Convert an architecture between softcell JSON, DARTS notation and NAS-Bench-201 strings.",
    ),
    "random": (
        "architectures",
        "Sample architectures uniformly from a space; the same seed always gives the same one.",
    ),
    "list": ("architectures", "List the available methods, spaces, datasets, recipes and candidate operations."),
}
"""Module and one-line help of each command; the list of commands is printed without importing them."""

# What is wrong with the command line itself. Typer brings its own copy of click or uses an installed one, depending on
# its version, and exports only this subclass of the common base.
_UsageError: Any = typer.BadParameter.__bases__[0].__bases__[0]


COMPLETE = "_SOFTCELL_COMPLETE"
"""The variable by which a shell asks for completions (click's convention)."""


class LazyGroup(TyperGroup):
    """Imports the module of a command when that command is run; for its help, without the core and torch."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {name: TyperCommand(name=name, help=about) for name, (_, about) in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[Any, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        assert name is not None
        # A shell that completes options needs only their names, at once: `resilient_parsing`.
        if not ({"-h", "--help"} & set(rest) or ctx.resilient_parsing):
            return name, load_command(name), rest
        with without_core():
            command = load_command(name)
        _hide_types_of_flags(command.get_params(ctx))
        # `--help` may be the value of another option: such a command runs, with the core.
        command.callback = lambda **given: load_command(name).callback(**given)
        return name, command, rest

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)
        _hide_types_of_flags(params)
        return params


def _hide_types_of_flags(params: list[Any]) -> None:
    """Newer versions of Typer print `<bool>` next to options that take no value."""
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""


def load_command(name: str) -> Any:
    """The command itself, ready to parse its arguments."""
    module = importlib.import_module(f"softcell.app.cli.{COMMANDS[name][0]}")
    command: Any = typer.main.get_group(module.commands).commands[name]
    # Typer would keep the line breaks of the docstring.
    command.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in command.help.split("\n\n"))
    return command


_LIGHT = {f"softcell.{name}" for name in ("app", "errors", "files", "registry", "settings", "text", "trust")}
"""Modules that do not import torch: the real ones serve for help as well."""


class _Empty(ModuleType):
    """A module without contents; each of its names is another one."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []  # it may have submodules

    def __getattr__(self, name: str) -> Any:
        # Python and `inspect` probe for special names, and must not find them here.
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(f"{self.__name__}.{name}")


class _EmptyCore(MetaPathFinder, Loader):
    """Finds an empty module for torch and for each module of softcell that may import it."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        is_light = fullname in _LIGHT or fullname.startswith("softcell.app.cli")
        is_heavy = fullname.partition(".")[0] in ("softcell", "torch") and not is_light
        return ModuleSpec(fullname, self) if is_heavy else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run."""


@contextmanager
def without_core() -> Iterator[None]:
    """Inside this context, modules of commands are imported with empty modules for the core, enough for their help.

    The core imports torch, which takes seconds, and help needs only the signatures of commands. Documentation tools do
    the same (`autodoc_mock_imports` of Sphinx). All modules that were imported here are forgotten at the end.
    """
    if "torch" in sys.modules:
        yield
        return
    before, finder = set(sys.modules), _EmptyCore()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name not in before and name.startswith(("softcell.", "torch"))]:
            del sys.modules[name]
            # A submodule is also an attribute of its package, where `from softcell import ...` would find it.
            parent, _, child = name.rpartition(".")
            if parent in sys.modules:
                vars(sys.modules[parent]).pop(child, None)


app = typer.Typer(
    name="softcell",
    cls=LazyGroup,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with [bold]softcell demo[/bold]. `softcell COMMAND --help` shows examples of each command.",
)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"softcell {softcell.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Differentiable neural architecture search: search, train, report, compare, draw, count, convert."""


def main(arguments: list[str] | None = None) -> None:
    """The entry point: exits with 0, with 2 for bad input, with 128 + n after signal n; bugs keep a traceback."""
    if COMPLETE in os.environ:  # set by the shell's completion script: prints proposals and exits
        typer.main.get_command(app).main(args=[], prog_name="softcell")
    enter()
    show = warnings.showwarning
    warnings.showwarning = lambda *given, **named: _show_warning(show, *given, **named)
    # At its end the interpreter searches all objects for cycles, torch's included, which takes most of a second.
    atexit.register(gc.freeze)
    try:
        code = run(sys.argv[1:] if arguments is None else arguments)
    except Exception as error:
        record_error(" ".join(f"{type(error).__name__}: {error}".split()))
        raise
    sys.exit(code)


def _show_warning(
    show: Callable[..., None], message: Warning | str, category: type[Warning], filename: str, *rest: Any, **named: Any
) -> None:
    """Softcell's own warnings on one line; those of other packages unchanged."""
    if issubclass(category, UserWarning) and Path(filename).is_relative_to(Path(softcell.__file__).parent):
        print(f"warning: {message}", file=sys.stderr)
    else:
        show(message, category, filename, *rest, **named)


def run(arguments: list[str]) -> int:
    """Runs one command and returns its exit code."""
    command = arguments[0] if arguments and arguments[0] in COMMANDS else None
    name = "softcell" if command is None else f"softcell {command}"
    try:
        with notice_when_slow(name), asking(_question(), lambda text: print(text, file=sys.stderr)):
            # Called in these two steps, a command gets Ctrl-C as it is; `app()` would turn it into a bare exit code.
            group = typer.main.get_command(app)
            with group.make_context("softcell", arguments) as context:
                code = group.invoke(context)
        # Inside this `try`, so that a closed pipe is noticed here and not at exit.
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except typer.Exit as ended:  # --help and --version
        return ended.exit_code
    # Before `UserError`, its base class; `BrokenPipeError` comes before `OSError` for the same reason.
    except LostRankError as error:
        return USAGE if error.is_reported else _fail(str(error))
    except UserError as error:
        return _fail(str(error))
    except _UsageError as error:
        text = _usage_text(error)
        return _fail(f"{text}{' See' if text.endswith('?') else '; see'} `{name} --help`") if text else USAGE
    except (KeyboardInterrupt, typer.Abort):
        print("Interrupted. No partial files were left; run the same command to resume.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has exited; Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # Problems with the machine: a full disk, a folder without write permission.
        where = f"{error.filename}: " if error.filename else ""
        return _fail(f"{where}{error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        reason = explain_failure(error)
        if reason is None:
            raise
        return _fail(reason)


def _usage_text(error: Any) -> str:
    """What is wrong with the command line, with the value. Newer versions of Typer check values through pydantic."""
    # Pydantic puts `Value error` before Typer's own messages, and its messages leave out the value.
    text = str(error.format_message()).replace("Value error, ", "").rstrip(".")
    rejected: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    if rejected and rejected[0]["type"] != "value_error":
        text = text.replace("Input should be", "must be").partition(", unable to parse")[0]
        text = f"{text}, got {str(rejected[0]['input'])!r}"
    return text


def _question() -> Callable[[str], bool] | None:
    """Asks the user in a terminal; None where no user can answer, as under torchrun."""
    alone = num_processes() == 1
    is_terminal = sys.stdin.isatty() and sys.stderr.isatty()
    return (lambda text: typer.confirm(text, err=True)) if alone and is_terminal else None


def _fail(text: str) -> int:
    """Prints an error on one line, with the rank under torchrun."""
    rank = os.environ.get("RANK")
    where = f"rank {rank}: " if rank not in (None, "0") else ""
    text = f"{where}{' '.join(text.split())}"
    record_error(text)
    print(f"error: {text}", file=sys.stderr)
    return USAGE
