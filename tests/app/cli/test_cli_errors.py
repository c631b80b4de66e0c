"""Bad input gives a one-line error that states what is allowed, exit code 2 and no traceback."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import softcell.files
from softcell.app.cli import main
from softcell.app.cli.main import run
from softcell.data.batches import SmallDataWarning
from softcell.evaluate import resolve as resolve_training
from softcell.evaluate.teacher import resolve_teacher
from softcell.search import resolve
from softcell.search.genotypes import read_genotype
from softcell.settings import assignments
from tests.helpers.cli_calls import CELL, TINY, Softcell
from tests.helpers.report_runs import make_search

WRONG: list[tuple[str, str]] = [
    ("search darts --classes 3", "pretrain.classes=3 (--classes) needs a first phase"),
    (
        "search fullattention --classes 11 --device cpu",
        "`2 <= classes <= 10` must hold, the number of classes of digits",
    ),
    ("serch", "Did you mean 'search', 'bench'? See `softcell --help`"),
    ("list spacs", "Invalid value for 'kind': 'spacs' is not one of"),
    ("info nb21", "no genotype at 'nb21'"),
    ("info nb21", "did you mean the space 'nb201'?"),
    ("latency nb21", "did you mean the space 'nb201'?"),
    ("search --epoch", "No such option"),
    ("search dats", "did you mean 'darts'"),
    ("search snas-of-tomorrow", "no method"),
    ("search --space drts", "did you mean 'darts'"),
    ("search --data cifr10", "did you mean 'cifar10'"),
    ("search --data no/such/folder", "existing path"),
    ("search --data cifar10", "cifar-10-batches"),
    ("search --set weights.l=0.1", "did you mean 'lr'"),
    ("search --set weigths.lr=0.1", "no setting 'weigths.lr'; did you mean 'weights.lr'?"),
    ("search --set lr=0.1", "no setting 'lr'; did you mean 'weights.lr' or 'architecture.lr' or 'select.lr'?"),
    ("search --set cells=5", "did you mean 'space.cells'?"),
    ("search snas --set first_temperature=2", "did you mean 'method.first_temperature'?"),
    ("train cell.json --set weights.lr=0.1", "no setting 'weights.lr'; did you mean 'lr'?"),
    ("teacher resnet18 --set weights.lr=0.1", "no setting 'weights.lr'; did you mean 'lr'?"),
    ("train cell.json --set nodes=3", "no setting 'nodes'; did you mean 'space.nodes'?"),
    ("teacher resnet18 --set width=8", "no setting 'width'; did you mean 'classifier.width'?"),
    ("search --set epochs", "key=value"),
    ("search --set epochs=many", "whole number"),
    ("search --set weights.lr=fast", "a number"),
    ("search --epochs many", "'many'"),
    ("search --epochs -3", "`epochs >= 1` must hold, but got epochs=-3"),
    ("search --epochs 0", "epochs=0"),
    ("search --set space.cells=1", "`cells >= 3` must hold"),
    ("search --set space.candidates=[none,sep_conv_9x9]", "--plugin"),
    ("search fullattention --set space.channels=24", "`channels` must be a multiple of 16"),
    ("search fullattention --set pretrain.data=no/such/folder", "existing path"),
    ("search --device tpu", "the device must be"),
    ("search --config missing.yaml", "missing.yaml (no such file)"),
    ("search --config broken.json", "not valid JSON"),
    ("search --config broken.yaml", "cannot be read as YAML"),
    ("search --config key.yaml", "no setting 'lr'"),
    ("search --plugin missing.py", "must name a Python file"),
    ("search --plugin raises.py", "RuntimeError: on purpose"),
    ("search --out broken.json --space nb201", "is a file"),
    ("search --out full --space nb201", "--resume"),
    ("search --out full --space nb201 --overwrite", "is not a run"),
    ("search --out /proc/nowhere/run --space nb201", "another --out"),
    ("search --keep best", "--keep best requires --seeds K"),
    ("search --at-once 2", "--at-once 2 requires --seeds K"),
    ("search --resume", "needs the folder"),
    ("search --resume --out empty", "run.json"),
    ("search --resume missing/run", "run.json"),
    ("search --resume missing", "but 'missing' is not a folder"),
    ("run --data digits --max-params 50k 100k", "separate several budgets by commas without spaces"),
    ("train", "needs a genotype"),
    ("train missing.json", "missing.json"),
    ("train empty", "genotype.json"),
    ("train broken.json", "not valid JSON"),
    ("train newer.json", "version 9 is newer"),
    ("train operation.json", "my_conv"),
    ("train space.json", "no space 'nowhere'"),
    ("train other.json", "'normal'"),
    ("train cell.json --recipe cifr", "did you mean 'cifar'"),
    ("train cell.json --cells 4", "no setting 'cells'"),
    ("train cell.json --random -1", "-1"),
    ("search --set split.weights=0.9 --set split.validation=0.5", "`weights=0.9, validation=0.5` asks for 1,886;"),
    ("train cell.json --set space.candidates=[none,skip_connect] --random 1", "leave out --random"),
    ("train --resume", "needs the folder"),
    ("show binary.json", "cannot be read"),
    ("info missing.json", "missing.json"),
    ("info cell.json --input 3x32", "3x32x32"),
    ("info nb201 --set epochs=3", "settings of the space"),
    ("info nb201 --input 3x32x32", "--input applies to the network of an architecture"),
    ("convert cell.json --to darts", "normal and a reduce cell, this genotype has ['cell']; write softcell JSON"),
    ("convert cell.json --to yaml", "json"),
    ("convert cell.json --out cell.json", "--overwrite"),
    ("random --space nb201 --count 0", "--count"),
    ("random --space nb201 --to darts", "normal and a reduce cell"),
    ("list things", "methods"),
]


@pytest.fixture
def files(tmp_path: Path) -> None:
    """The bad (and one good) files that `WRONG` names."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("precious")
    (tmp_path / "broken.json").write_text('{"format": ')
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    (tmp_path / "key.yaml").write_text("lr: 3\n")
    (tmp_path / "raises.py").write_text('raise RuntimeError("on purpose")\n')
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    run(["convert", CELL, "--out", str(tmp_path / "cell.json")])
    good = json.loads((tmp_path / "cell.json").read_text())
    edges = [[s, t, "my_conv"] for s, t, _ in good["cells"]["cell"]["edges"]]
    changes = {
        "newer": {"version": 9},
        "operation": {"cells": {"cell": {**good["cells"]["cell"], "edges": edges}}},
        "space": {"space": "nowhere"},
        "other": {"space": "darts"},
    }
    for name, change in changes.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({**good, **change}))


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("line", "expected"), WRONG, ids=[line for line, _ in WRONG])
def test_bad_input_gets_one_line_and_exit_code_2(line: str, expected: str, call: Softcell, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    answer = call(*line.split())
    assert answer.code == 2
    assert answer.error.startswith("error: ")
    assert answer.error.count("\n") == 1
    assert expected in answer.error
    assert "Traceback" not in answer.error
    assert sorted(tmp_path.rglob("*")) == before  # nothing is left behind


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Genotype(normal=[('sep_conv_3x3', 0", "not a valid Genotype"),
        ("Genotype(normal=[])", "needs exactly"),
        ("Genotype(normal=__import__('os'), normal_concat=[2], reduce=[], reduce_concat=[2])", "must list"),
        ("|nor_conv_3x3~0|+|none~0|none~1|+|none~0|none~1|", "node 3 must have 3 edges, got 2"),
        ("{", "not valid JSON"),
    ],
)
def test_a_wrong_notation_says_what_is_wrong_in_it(text: str, expected: str, call: Softcell) -> None:
    answer = call("show", text)
    assert (answer.code, expected in answer.error) == (2, True)


def test_a_recipe_from_a_run_of_another_command_is_rejected(call: Softcell, tmp_path: Path) -> None:
    make_search(tmp_path / "searched")
    answer = call("train", "--config", "searched")
    assert answer.code == 2
    assert "--config of `softcell train` must be one of its own runs, but searched was created by" in answer.error


def test_cuda_without_a_device_names_the_fix(call: Softcell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    answer = call("search", *TINY, "--device", "cuda")
    assert (answer.code, "'cpu' or 'auto'" in answer.error) == (2, True)


def test_a_full_disk_is_reported_in_one_line(call: Softcell, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(softcell.files.os, "fsync", full)
    answer = call("search", *TINY, "--epochs", "1", "--out", "run")
    assert answer.code == 2
    assert "No space left on device" in answer.error


def test_our_own_bugs_keep_their_traceback(call: Softcell, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("softcell.app.report.to_text", broken)
    with pytest.raises(ZeroDivisionError):
        call("show", CELL)


def test_errors_of_other_ranks_name_the_rank(call: Softcell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert call("show", "nothing").error.startswith("error: rank 3: ")


def test_own_warnings_are_one_line_and_those_of_others_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    passed: list[object] = []
    ours = softcell.files.__file__
    main._show_warning(lambda *given: passed.append(given[0]), "too few images", SmallDataWarning, ours, 3)
    assert capsys.readouterr().err == "warning: too few images\n" and not passed
    main._show_warning(lambda *given: passed.append(given[0]), "of torch", UserWarning, "/elsewhere/torch/nn.py", 3)
    assert passed == ["of torch"] and not capsys.readouterr().err


@pytest.mark.parametrize("command", ["search", "train", "teacher"])
def test_the_example_setting_in_the_help_exists(command: str, call: Softcell) -> None:
    words = " ".join(call(command, "--help").out.replace("│", " ").split())
    (example,) = re.findall(r"Any other setting, such as (\S+=\S+);", words)
    readers: dict[str, Callable[..., object]] = {
        "search": resolve,
        "train": partial(resolve_training, read_genotype(CELL)),
        "teacher": partial(resolve_teacher, "resnet18"),
    }
    readers[command](assignments([example]))
