"""`softcell`: collects the commands, and turns what goes wrong into one line and an exit code."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from softcell import __version__
from softcell.app.cli import (
    bench,
    compare,
    convert,
    demo,
    export,
    gradcam,
    indicators,
    info,
    latency,
    list_,
    process,
    random_,
    report,
    run_,
    search,
    show,
    study,
    sweep,
    teacher,
    train,
    watch,
)
from softcell.app.cli.failures import explain
from softcell.app.cli.patience import patience
from softcell.errors import UserError
from softcell.trust import asking

USAGE = 2
INTERRUPTED = 130  # what shells report for an end by Ctrl-C

# What is wrong with the command line itself. Typer brings its own copy of click or uses an installed one, depending on
# its version, and exports only this subclass of the common base.
_UsageError: Any = typer.BadParameter.__bases__[0].__bases__[0]

app = typer.Typer(
    name="softcell",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Begin with [bold]softcell demo[/bold]; `softcell COMMAND --help` has examples for every command.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"softcell {__version__}")
        raise typer.Exit


@app.callback()
def softcell(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Differentiable neural architecture search: search, train, report, compare, draw, count, convert."""


app.command(name="demo", epilog=demo.EPILOG)(demo.demo)
app.command(name="run", epilog=run_.EPILOG)(run_.run)
app.command(name="search", epilog=search.EPILOG)(search.search)
app.command(name="train", epilog=train.EPILOG)(train.train)
app.command(name="teacher", epilog=teacher.EPILOG)(teacher.teacher)
app.command(name="export", epilog=export.EPILOG)(export.export)
app.command(name="latency", epilog=latency.EPILOG)(latency.latency)
app.command(name="report", epilog=report.EPILOG)(report.report)
app.command(name="watch", epilog=watch.EPILOG)(watch.watch)
app.command(name="compare", epilog=compare.EPILOG)(compare.compare)
app.command(name="sweep", epilog=sweep.EPILOG)(sweep.sweep)
app.command(name="indicators", epilog=indicators.EPILOG)(indicators.indicators)
app.command(name="gradcam", epilog=gradcam.EPILOG)(gradcam.gradcam)
app.command(name="bench", epilog=bench.EPILOG)(bench.bench)
app.command(name="show", epilog=show.EPILOG)(show.show)
app.command(name="info", epilog=info.EPILOG)(info.info)
app.command(name="study", epilog=study.EPILOG)(study.study)
app.command(name="convert", epilog=convert.EPILOG)(convert.convert)
app.command(name="random", epilog=random_.EPILOG)(random_.random)
app.command(name="list", epilog=list_.EPILOG)(list_.list_)


class _StoppedError(Exception):
    """Ctrl-C inside a command. Typer would turn KeyboardInterrupt into a bare exit code."""


def _stoppable(command: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(command)
    def run_it(*given: Any, **named: Any) -> Any:
        try:
            return command(*given, **named)
        except KeyboardInterrupt as error:
            raise _StoppedError from error

    return run_it


for _registered in app.registered_commands:
    assert _registered.callback is not None
    _registered.callback = _stoppable(_registered.callback)


def main(arguments: list[str] | None = None) -> None:
    """The entry point: exits with 0, with 2 for bad input, with 128 + n after signal n; bugs keep a traceback."""
    process.enter()
    shown = warnings.showwarning
    warnings.showwarning = lambda *given, **named: _warn(shown, *given, **named)
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def _warn(
    shown: Callable[..., None], message: Warning | str, category: type[Warning], filename: str, *rest: Any, **named: Any
) -> None:
    """A warning of ours on one line; those of other packages as they come."""
    if category is UserWarning and Path(filename).is_relative_to(Path(__file__).parents[1]):
        print(f"warning: {message}", file=sys.stderr)
    else:
        shown(message, category, filename, *rest, **named)


def run(arguments: list[str]) -> int:
    """Runs one command and gives its exit code."""
    try:
        with patience(f"softcell {_command(arguments)}".strip()), asking(_ask_user(), _notify):
            code = app(arguments, prog_name="softcell", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except UserError as error:
        return _print_error(str(error))
    except _UsageError as error:
        text = str(error.format_message())
        return _print_error(f"{text.rstrip('.')}; see `softcell {_command(arguments)}--help`") if text else USAGE
    except (KeyboardInterrupt, _StoppedError, typer.Abort):
        print("stopped; nothing half-written was left, and the same command starts again", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone; Python would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # The machine's side: a full disk, a folder without permission.
        place = f"{error.filename}: " if error.filename else ""
        return _print_error(f"{place}{error.strerror or error}")
    except (MemoryError, RuntimeError) as error:
        said = explain(error)
        if said is None:
            raise
        return _print_error(said)


def _ask_user() -> Callable[[str], bool] | None:
    """Puts a question to the user in a terminal; None where nobody would answer, as under torchrun."""
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    return (
        (lambda text: typer.confirm(text, err=True)) if alone and sys.stdin.isatty() and sys.stderr.isatty() else None
    )


def _notify(text: str) -> None:
    print(text, file=sys.stderr)


def _print_error(text: str) -> int:
    """Shows an error on one line; under torchrun it says on which rank it happened."""
    rank = os.environ.get("RANK")
    where = f"rank {rank}: " if rank not in (None, "0") else ""
    print(f"error: {where}{' '.join(text.split())}", file=sys.stderr)
    return USAGE


def _command(arguments: list[str]) -> str:
    known = [command.name for command in app.registered_commands]
    return f"{arguments[0]} " if arguments and arguments[0] in known else ""
