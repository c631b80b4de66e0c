"""Folders made by someone else: no command runs their code without consent, and commands that only read need none."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from softcell import api, trust
from softcell.app.cli.main import run
from softcell.trust import UntrustedError
from tests.helpers.cli_calls import CELL, TINY, TINY_TRAIN, Softcell, process
from tests.helpers.unsealed import unsealed


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert run(["train", CELL, *TINY_TRAIN, "--out", str(folder), "-q"]) == 0
    return folder


@pytest.fixture
def foreign(searched: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A search and a training run from elsewhere, which name a Python file that leaves a trace when it is run."""
    monkeypatch.setenv("SOFTCELL_STATE", str(tmp_path / "state"))
    monkeypatch.setattr(trust, "_agreed", set())
    monkeypatch.delitem(sys.modules, "softcell_plugin_evil", raising=False)
    folder = tmp_path / "foreign"
    for source, name in ((searched, "search"), (trained, "train")):
        shutil.copytree(source, folder / name)
        manifest = unsealed(json.loads((folder / name / "run.json").read_text()))
        manifest["recipe"]["plugins"] = [str(folder / "evil.py")]
        (folder / name / "run.json").write_text(json.dumps(manifest))
    resumable = json.loads((folder / "search" / "run.json").read_text())
    shutil.copytree(folder / "search", folder / "stopped")
    (folder / "stopped" / "run.json").write_text(json.dumps({**resumable, "status": "interrupted"}))
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")
    (folder / "recipe.yaml").write_text(yaml.safe_dump({"plugins": [str(folder / "evil.py")], "epochs": 1}))
    plan = {"methods": ["random"], "spaces": ["nb201"], "seeds": 1, "plugins": [str(folder / "evil.py")]}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(plan))
    return folder


RUNNING = (
    "latency foreign/train --samples 2",
    "export foreign/train --to python",
    "train foreign/search --epochs 1",
    "train --resume foreign/train",
    "train --config foreign/train --out new",
    "search --config foreign/search --out new",
    "search --config foreign/recipe.yaml --out new",
    "search --resume foreign/stopped",
    "search --guide foreign/train --epochs 1 --out new",
    "indicators foreign/search",
    "gradcam foreign/search",
    "sweep foreign/sweep.yaml --out new",
)
READING = (
    "info foreign/search",
    "info foreign/train",
    "show foreign/search",
    "report foreign/search --out report.html",
    "compare foreign/search foreign/train",
    "convert foreign/search --to nb201",
    "sweep foreign/sweep.yaml --dry-run --out new",
)


@pytest.mark.parametrize("command", RUNNING)
def test_code_of_a_foreign_folder_does_not_run_without_trust(command: str, call: Softcell, foreign: Path) -> None:
    answer = call(*command.split())
    assert answer.code == 2 and not (foreign / "ran").exists()
    assert str(foreign / "evil.py") in answer.error and "--trust" in answer.error
    assert answer.error.count("\n") == 1, "one line"
    assert not Path("new").exists() and not (foreign / "train" / "export").exists()


@pytest.mark.parametrize("command", READING)
def test_commands_that_read_need_no_trust(command: str, call: Softcell, foreign: Path) -> None:
    answer = call(*command.split())
    assert answer.code == 0, answer.error
    assert not (foreign / "ran").exists()


def test_info_shows_what_the_files_say_and_how_to_see_more(call: Softcell, foreign: Path) -> None:
    answer = call("info", foreign / "train")
    manifest = json.loads((foreign / "train" / "run.json").read_text())
    said = " ".join(answer.out.split())
    assert (
        f"{manifest['results']['parameters']:,} (as recorded by the run)" in said
        and "--trust" in said
        and "evil.py" in said
    )
    more = call("info", foreign / "train", "--trust")
    assert (foreign / "ran").exists() and "MB in float32" in more.out


def test_trust_is_remembered_until_the_content_changes(
    call: Softcell, foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = call("export", foreign / "train", "--to", "safetensors", "--trust", "-q")
    assert first.code == 0 and (foreign / "ran").exists() and f"trusted {foreign / 'evil.py'}" in first.error
    monkeypatch.setattr(trust, "_agreed", set())
    monkeypatch.delitem(sys.modules, "softcell_plugin_evil")
    (foreign / "ran").unlink()
    assert call("export", foreign / "train", "--to", "safetensors", "--overwrite", "-q").code == 0
    assert (foreign / "ran").exists()
    monkeypatch.delitem(sys.modules, "softcell_plugin_evil")
    (foreign / "ran").unlink()
    (foreign / "evil.py").write_text((foreign / "evil.py").read_text() + "# and more\n")
    changed = call("export", foreign / "train", "--to", "safetensors", "--overwrite", "-q")
    assert changed.code == 2 and "has changed" in changed.error and not (foreign / "ran").exists()


@pytest.mark.exhaustive
def test_a_run_made_here_is_resumed_without_asking(
    call: Softcell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOFTCELL_STATE", str(tmp_path / "state"))
    Path("mine_here.py").write_text("")
    assert call("search", *TINY, "--epochs", "1", "--plugin", "mine_here.py", "--out", "run", "-q").code == 0
    done = process("train", "run", *TINY_TRAIN, "--out", "trained", "-q", cwd=tmp_path)
    assert done.wait() == 0, done.communicate()[1]


def test_a_copy_replaces_a_plugin_on_another_machine(call: Softcell, foreign: Path) -> None:
    for name, kind in (("stopped", "search"), ("train", "train")):
        seeds = foreign / f"{kind}-seeds"
        shutil.copytree(foreign / name, seeds / "seed-0")
        rows = [{"seed": json.loads((foreign / name / "run.json").read_text())["seed"]}]
        (seeds / "seeds.json").write_text(json.dumps({"kind": kind, "seeds": rows}))
    for name in ("train", "stopped", "train-seeds/seed-0", "search-seeds/seed-0"):
        text = (foreign / name / "run.json").read_text()
        (foreign / name / "run.json").write_text(text.replace(str(foreign / "evil.py"), "/another/machine/evil.py"))
    assert call("info", foreign / "train").code == 0
    answer = call("export", foreign / "train", "--to", "safetensors", "-q")
    assert answer.code == 2 and "--plugin evil.py" in answer.error
    for command in (
        ("export", foreign / "train", "--to", "safetensors", "-q"),
        ("search", "--resume", foreign / "stopped", "-q"),
        ("train", "--resume", foreign / "train", "-q"),
        ("search", "--resume", foreign / "search-seeds", "-q"),
        ("train", "--resume", foreign / "train-seeds", "-q"),
    ):
        sys.modules.pop("softcell_plugin_evil", None)
        answer = call(*command, "--plugin", foreign / "evil.py")
        assert answer.code == 0, answer.error
    assert "MB in float32" in call("info", foreign / "train", "--plugin", foreign / "evil.py").out


@pytest.mark.parametrize("answer", [True, False])
def test_in_a_terminal_the_user_is_asked(
    answer: bool, call: Softcell, foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def confirm(text: str, err: bool) -> bool:
        asked.append(text)
        return answer

    for stream in (sys.stdin, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("softcell.app.cli.main.typer.confirm", confirm)
    done = call("export", foreign / "train", "--to", "safetensors", "-q")
    assert (done.code == 0) is answer and (foreign / "ran").exists() is answer
    assert len(asked) == 1 and str(foreign / "evil.py") in asked[0]


def test_python_calls_agree_by_an_argument(foreign: Path, tmp_path: Path) -> None:
    for rejected in (
        lambda: api.load_network(foreign / "train"),
        lambda: api.Network.from_pretrained(foreign / "train"),
        lambda: api.export(foreign / "train", "safetensors", tmp_path / "out"),
        lambda: api.search(config=foreign / "search", out=tmp_path / "new"),
        lambda: api.train(foreign / "search", out=tmp_path / "new"),
        lambda: api.compare_indicators(foreign / "search"),
    ):
        with pytest.raises(UntrustedError):
            rejected()
    assert not (foreign / "ran").exists()
    api.load_network(foreign / "train", trust=True)
    assert (foreign / "ran").exists()


@pytest.mark.exhaustive
def test_a_trusted_sweep_passes_its_trust_to_its_jobs(
    call: Softcell, foreign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where its jobs cannot see the store, as on a cluster."""
    seen: list[dict[str, str]] = []
    real = subprocess.Popen

    def popen(*given: object, **named: object) -> object:
        seen.append(dict(named["env"]))  # type: ignore[call-overload]
        named["env"] = {**named["env"], "SOFTCELL_STATE": str(foreign / "another")}  # type: ignore[dict-item]
        return real(*given, **named)  # type: ignore[call-overload]

    plan = yaml.safe_load((foreign / "sweep.yaml").read_text())
    plan["search"] = {"epochs": 1, "batch_size": 256, "space": {"channels": 2}, "method": {"samples": 1}}
    (foreign / "sweep.yaml").write_text(yaml.safe_dump(plan))
    monkeypatch.setattr("softcell.app.sweep.local.subprocess.Popen", popen)
    source = str(Path(api.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", source)
    answer = call("sweep", foreign / "sweep.yaml", "--out", "swept", "--retries", "0", "--trust")
    assert answer.code == 0, answer.out + answer.error
    assert trust.read(foreign / "evil.py").digest in seen[0]["SOFTCELL_TRUSTED"]


@pytest.mark.exhaustive
def test_ranks_of_torchrun_share_trust(foreign: Path, tmp_path: Path) -> None:
    source = str(Path(api.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "softcell"]
    command = ["search", "--config", str(foreign / "recipe.yaml"), *TINY, "--device", "cpu", "--out", "new", "-q"]
    done = subprocess.run([*start, *command, "--trust"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (foreign / "ran").exists() and done.stderr.count("trusted ") in (1, 2)
    assert (tmp_path / "new" / "run.json").exists() and not (tmp_path / "new" / ".lock").exists(), "rank 0 released it"


class _Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.mark), "w")


def program(file: Path, mark: Path) -> None:
    """An archive such as `torch.export.save` writes, whose constants unpickle to an act."""
    import torch

    buffer = io.BytesIO()
    torch.export.save(torch.export.export(torch.nn.Conv2d(1, 2, 3), (torch.zeros(2, 1, 8, 8),)), buffer)
    with zipfile.ZipFile(buffer) as before, zipfile.ZipFile(file, "w") as after:
        for name in before.namelist():
            data = before.read(name)
            if name.endswith((".pt", ".pkl")) or "sample_inputs" in name:
                data = pickle.dumps(_Evil(mark))
            after.writestr(name, data)


@pytest.mark.parametrize("by", ["recipe", "run"])
def test_a_file_cannot_trust_itself(by: str, call: Softcell, foreign: Path) -> None:
    program(foreign / "teacher.pt2", foreign / "ran")
    guide = {"teacher": str(foreign / "teacher.pt2"), "trust": True}
    if by == "recipe":
        (foreign / "recipe.yaml").write_text(yaml.safe_dump({"guide": guide, "epochs": 1}))
        answer = call("search", *TINY, "--config", foreign / "recipe.yaml", "--out", "new")
    else:
        manifest = json.loads((foreign / "stopped" / "run.json").read_text())
        recipe = {**manifest["recipe"], "plugins": [], "epochs": 9}
        recipe["guide"] = {**recipe["guide"], **guide}
        (foreign / "stopped" / "run.json").write_text(json.dumps({**manifest, "recipe": recipe}))
        answer = call("search", "--resume", foreign / "stopped")
    assert answer.code == 2 and "--trust" in answer.error and "teacher.pt2" in answer.error, answer.error
    assert not (foreign / "ran").exists()


@pytest.mark.parametrize("agreed", [("--trust",), ("--set", "guide.trust=true")])
def test_the_command_line_can_trust_a_program(agreed: tuple[str, ...], call: Softcell, foreign: Path) -> None:
    program(foreign / "teacher.pt2", foreign / "ran")
    answer = call("search", *TINY, "--guide", foreign / "teacher.pt2", *agreed, "--out", "new")
    assert answer.code == 2 and "cannot be read as an exported program" in answer.error
    assert (foreign / "ran").exists(), "reading such a file does run code: the test would see it"


def test_a_sweep_file_cannot_pass_commands_to_a_cluster(call: Softcell, foreign: Path) -> None:
    plan = {"methods": ["random"], "spaces": ["nb201"], "seeds": 1}
    for cluster in ({"slurm_setup": ["rm -r x"]}, {"slurm_partition": "gpu\nrm -r x"}, {"slurm_python": "sh"}):
        (foreign / "sweep.yaml").write_text(yaml.safe_dump({**plan, "cluster": cluster}))
        answer = call("sweep", foreign / "sweep.yaml", "--on", "slurm", "--out", "swept")
        assert answer.code == 2 and "command line" in answer.error and not Path("swept").exists()
