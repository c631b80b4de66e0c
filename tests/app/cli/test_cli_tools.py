from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from rich.console import Console

import softcell
from softcell.app.cli.main import COMMANDS, load_command, run
from softcell.app.progress import Display, epoch_line
from softcell.engine.task import EpochEnded, Finished, Note, Started, Stepped
from tests.helpers.cli_calls import CELL, Softcell, process
from tests.reference.published_genotypes import DARTS_V2


def test_every_notation_survives_a_round_trip(call: Softcell) -> None:
    for text, name in ((CELL, "nb201"), (DARTS_V2, "darts")):
        as_json = call("convert", text).out
        back = call("convert", as_json, "--to", name).out.strip()
        assert call("convert", back).out == as_json
    assert call("convert", call("convert", CELL).out).out.strip() == CELL


def test_convert_reads_standard_input_and_writes_a_file(
    call: Softcell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(CELL + "\n"))
    assert call("convert", "-", "--out", "deep/cell.json").code == 0
    assert call("convert", "deep/cell.json").out.strip() == CELL
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "empty" in call("convert", "-").error


def test_convert_reads_a_line_of_python_as_papers_publish_it(call: Softcell, tmp_path: Path) -> None:
    (tmp_path / "genotypes.txt").write_text(f"DARTS_V2 = {DARTS_V2}\n")
    assert json.loads(call("convert", "genotypes.txt").out)["space"] == "darts"


def test_a_name_selects_one_of_several_genotypes_in_a_file(call: Softcell, tmp_path: Path) -> None:
    other = DARTS_V2.replace("max_pool_3x3", "avg_pool_3x3")
    (tmp_path / "genotypes.py").write_text(f"MINE = {other}\nDARTS_V2 = {DARTS_V2}\n")
    answer = call("convert", "genotypes.py")
    assert answer.code == 2
    assert "2 genotypes in one text (MINE, DARTS_V2)" in answer.error
    assert "FILE@NAME" in answer.error
    assert call("convert", "genotypes.py@MINE").out == call("convert", other).out
    assert call("convert", "genotypes.py@DARTS_V2").out == call("convert", DARTS_V2).out
    answer = call("convert", "genotypes.py@YOURS")
    assert answer.code == 2
    assert "there are: MINE, DARTS_V2" in answer.error


def test_show_draws_in_the_terminal_and_as_svg(call: Softcell, searched: Path, tmp_path: Path) -> None:
    answer = call("show", searched, "--svg", "cell.svg", "--title", "mine")
    assert answer.code == 0
    assert "conv" in answer.out or "pool" in answer.out or "skip" in answer.out or "none" in answer.out
    assert "mine" in (tmp_path / "cell.svg").read_text()
    ET.parse(tmp_path / "cell.svg")


def test_commands_accept_the_architecture_of_an_epoch(call: Softcell, searched: Path) -> None:
    found = json.loads(call("convert", f"{searched}@last", "--to", "json").out)
    assert found["cells"] == json.loads((searched / "genotype.json").read_text())["cells"]
    assert call("show", f"{searched}@1").code == call("info", f"{searched}@1").code == 0
    assert "epochs=1, epochs 1" not in call("info", searched).out  # the number of epochs is printed once
    assert "epoch 1\n" in call("info", f"{searched}@1").out and "epochs 1," not in call("info", f"{searched}@1").out
    answer = call("show", f"{searched}@99")
    assert answer.code == 2
    assert "must name an epoch of the search" in answer.error


def test_info_counts_the_published_darts_network(call: Softcell) -> None:
    answer = call("info", DARTS_V2, "--cells", "20", "--channels", "36")
    assert "3,349,342" in answer.out
    assert "13.40 MB" in answer.out


def test_info_shows_notes_of_any_form_that_a_genotype_has(call: Softcell, tmp_path: Path) -> None:
    assert call("convert", CELL, "--out", "cell.json").code == 0
    stored = json.loads((tmp_path / "cell.json").read_text())
    (tmp_path / "cell.json").write_text(json.dumps({**stored, "about": {"settings": "mine", "epochs": 3}}))
    shown = call("info", "cell.json")
    assert shown.code == 0 and "settings mine" in shown.out and "epochs 3" in shown.out


def test_info_counts_a_space(call: Softcell) -> None:
    answer = call("info", "nb201")
    assert "15,625" in answer.out
    assert "125" in call("info", "nb201", "--set", "space.nodes=3").out  # 5 candidates on 3 edges
    assert "nor_conv_3x3" in answer.out


def test_random_architectures_repeat_and_differ(call: Softcell, tmp_path: Path) -> None:
    both = call("random", "--space", "nb201", "--to", "nb201", "--count", "2", "--seed", "4").out.splitlines()
    second = call("random", "--space", "nb201", "--to", "nb201", "--seed", "5").out.strip()
    assert both[1] == second != both[0]
    assert call("random", "--space", "nb201", "--count", "2", "--out", "cells").code == 0
    assert sorted(file.name for file in (tmp_path / "cells").iterdir()) == ["nb201-0.json", "nb201-1.json"]
    lines = call("random", "--space", "nb201", "--count", "2").out.splitlines()
    assert [json.loads(line)["about"]["seed"] for line in lines] == [0, 1]


def test_list_shows_everything_available(call: Softcell) -> None:
    out = call("list").out
    assert all(f"  {name}" in out for name in ("darts", "random", "nb201", "digits", "cifar10", "train imagenet"))
    assert "nb201" not in call("list", "methods").out


def test_version_matches_the_package(call: Softcell) -> None:
    assert call("--version").out.strip() == f"softcell {softcell.__version__}"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_examples_fits_80_columns_and_documents_every_option(
    command: str, call: Softcell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    answer = call(command, "--help")
    assert answer.code == 0
    assert f"softcell {command}" in answer.out.partition("Examples:")[2]
    assert max(len(line) for line in answer.out.splitlines()) <= 80
    assert "<bool>" not in answer.out, "flags take no value"
    assert "…" not in answer.out.replace("small|paper|…", ""), "a word is cut off because its column is too narrow"


def test_usage_marks_optional_and_repeated_arguments_once(call: Softcell) -> None:
    """Typer adds the brackets and dots; a name of an argument that has them too would show both."""
    usage = {name: call(name, "--help").out.partition("Usage:")[2].partition("\n")[0].strip() for name in COMMANDS}
    assert usage["watch"].startswith("softcell watch [OPTIONS]")
    assert not [text for text in usage.values() if re.search(r"\[\[|\]\]|\.\.\.[\]}]", text)]


def test_paragraphs_of_help_have_no_line_breaks_of_the_source() -> None:
    paragraphs = {name: load_command(name).help.split("\n\n") for name in COMMANDS}
    assert len(paragraphs["run"]) == 2, "several commands have more than one"
    assert not [name for name, found in paragraphs.items() if any("\n" in one for one in found)]


@pytest.mark.parametrize("argument", ["--help", "--version", "nothing"])
def test_the_list_of_commands_imports_no_command_and_no_torch(argument: str) -> None:
    imported = "print(sorted(m for m in sys.modules if m == 'torch' or m.startswith('softcell.app.cli.')))"
    code = f"import sys; from softcell.app.cli.main import run; run(['{argument}']); {imported}"
    source = str(Path(softcell.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": source})
    assert done.stdout.splitlines()[-1] == "['softcell.app.cli.main']", done.stderr


def test_help_of_every_command_is_complete_without_torch(call: Softcell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    expected = "".join(call(name, "--help").out for name in COMMANDS)  # with torch, which this process has imported
    # No empty module is left behind, neither as a module nor as an attribute of the package.
    code = """if True:
        import sys, softcell
        from softcell.app.cli.main import COMMANDS, run
        for name in COMMANDS:
            assert run([name, "--help"]) == 0
        assert "torch" not in sys.modules
        assert "softcell.api" not in sys.modules and not hasattr(softcell, "api")
    """
    source = {"PYTHONPATH": str(Path(softcell.__file__).parents[1]), "COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=source)
    assert (done.stdout, done.stderr) == (expected, "")


def test_help_as_the_value_of_an_option_runs_the_command(call: Softcell, tmp_path: Path) -> None:
    file = tmp_path / "cell.svg"
    assert (
        call(
            "show", "|none~0|+|none~0|none~1|+|skip_connect~0|none~1|none~2|", "--svg", str(file), "--title", "--help"
        ).code
        == 0
    )
    assert "--help" in file.read_text()


def test_the_list_of_commands_shows_the_first_sentence_of_each_command(call: Softcell) -> None:
    shown = " ".join(call("--help").out.replace("│", " ").split())
    for name, (_, about) in COMMANDS.items():
        assert load_command(name).help.partition("\n")[0] == about
        assert f"{name} {about}" in shown


def test_a_closed_pipe_is_not_an_error(tmp_path: Path) -> None:
    running = process("random", "--space", "nb201", "--to", "nb201", "--count", "200000", cwd=tmp_path)
    assert running.stdout is not None and running.stderr is not None
    running.stdout.readline()
    running.stdout.close()
    assert running.stderr.read() == ""
    running.wait(timeout=60)


METRICS = {"epoch": 1, "train_loss": 0.5, "train_accuracy": 0.25, "val_accuracy": 1.0, "val_split": "holdout"}


def test_an_epochs_line_is_complete_and_fits_a_terminal() -> None:
    line = epoch_line({**METRICS, "epoch": 98, "entropy": 1.234}, 600, 7325.0)
    assert line == "epoch  99/600  loss 0.500  train 25.0%  holdout  100%  entropy 1.234  2:02:05 left"
    assert len(epoch_line({**METRICS, "val_split": "validation", "entropy": 1.5}, 50, 65.0)) <= 80
    assert "none" in epoch_line({**METRICS, "train_loss": None}, 2, None)


def _shown(terminal: bool, quiet: bool = False) -> str:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=80, highlight=False)
    with Display(console, "a run", quiet) as display:
        display(Started(0, 0, 2))
        display(Stepped(0, 1, 4, 0.125, 9.0))
        display(Note("mind the gap"))
        display(EpochEnded(1, METRICS))
        display(Finished(2, "collapse"))
    return stream.getvalue()


def test_a_terminal_sees_a_bar_and_a_log_sees_lines() -> None:
    live, plain = _shown(terminal=True), _shown(terminal=False)
    assert "step 1/4" in live
    assert "0:09 left" in live
    assert plain.splitlines()[:2] == ["a run", "note: mind the gap"]
    assert "\x1b" not in plain
    assert "stopped after 2 epochs: collapse" in plain


def test_quiet_keeps_warnings() -> None:
    assert _shown(terminal=True, quiet=True).count("\n") == _shown(terminal=False, quiet=True).count("\n") == 2
    assert "mind the gap" in _shown(terminal=False, quiet=True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [("softcell se", ["search"]), ("softcell search --max-", ["--max-params", "--max-flops", "--max-latency"])],
)
def test_a_shell_completes_commands_and_options_without_importing_torch(words: str, expected: list[str]) -> None:
    code = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); "
    code += "from softcell.app.cli.main import main; main([])"
    asked = {"_SOFTCELL_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    environment = {"PYTHONPATH": str(Path(softcell.__file__).parents[1]), **asked}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout.split()) == (0, [*expected, "False"]), done.stderr


def test_the_completion_script_of_a_shell_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # the shell is then named here
    with pytest.raises(SystemExit) as ended:
        run(["--show-completion", "bash"])
    assert ended.value.code == 0 and "_SOFTCELL_COMPLETE=complete_bash" in capsys.readouterr().out


def test_random_accepts_a_space_as_info_does(call: Softcell) -> None:
    as_argument, as_option = (
        call("random", "nb201", "--to", "nb201"),
        call("random", "--space", "nb201", "--to", "nb201"),
    )
    assert (as_argument.code, as_argument.out) == (0, as_option.out)
    answer = call("random", "nb201", "--space", "darts")
    assert (answer.code, "leave out one of them" in answer.error) == (2, True)
