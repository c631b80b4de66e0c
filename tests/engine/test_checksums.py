"""The files of a finished run are verified when they are read: a changed file is never accepted as its result."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from softcell.api import Network, export, read_genotype, search, train
from softcell.app.cli.main import run
from softcell.app.report.page import LivePage
from softcell.app.report.runs import read_run
from softcell.arch import Genotype, sample
from softcell.engine import RunFolder, new_manifest
from softcell.engine.runfolder import checksum
from softcell.errors import UserError
from softcell.spaces import build_space
from tests.helpers.unsealed import unseal

CELL = "|nor_conv_3x3~0|+|none~0|skip_connect~1|+|nor_conv_1x1~0|none~1|avg_pool_3x3~2|"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished search and a finished training; not to be changed."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    place = tmp_path_factory.mktemp("finished")
    tiny = {"batch_size": 256, "space_settings": {"channels": 2}, "epochs": 1}
    search("darts", space="nb201", out=place / "search", **tiny)
    train(CELL, data="digits", out=place / "train", **tiny)
    yield place
    torch.set_num_threads(before)


@pytest.fixture
def copied(runs: Path, tmp_path: Path) -> Path:
    shutil.copytree(runs, tmp_path / "runs")
    return tmp_path / "runs"


def flip(file: Path, at: int = -5) -> None:
    """Changes one bit."""
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def test_a_finished_run_lists_the_checksums_of_its_files(runs: Path) -> None:
    listed = json.loads((runs / "train" / "run.json").read_text())["checksums"]
    assert set(listed) == {"genotype.json", "metrics.jsonl", "model.safetensors", "predictions.safetensors"}
    assert all(checksum(runs / "train" / name) == value for name, value in listed.items())
    listed = json.loads((runs / "search" / "run.json").read_text())["checksums"]
    assert set(listed) == {"genotype.json", "metrics.jsonl", "architecture.jsonl"}


def test_checksum_matches_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    assert checksum(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize("at", [-1, -1000, 900])
def test_one_flipped_bit_in_weights_is_never_exported(copied: Path, tmp_path: Path, at: int) -> None:
    flip(copied / "train" / "model.safetensors", at)
    for kind in ("safetensors", "python"):
        with pytest.raises(
            UserError, match=r"model\.safetensors was changed after the run had finished: its SHA-256 differs"
        ):
            export(copied / "train", kind, tmp_path / "out")
    with pytest.raises(UserError, match="SHA-256 differs"):
        Network.from_pretrained(copied / "train")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["export", "train", "latency", "info", "show", "report", "compare", "resume"])
def test_a_changed_genotype_is_never_taken_for_the_result(
    copied: Path, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copied)
    other = sample(build_space("nb201", {}).layout(), 77)
    for folder in ("search", "train"):
        other.save(copied / folder / "genotype.json")
    words = {
        "export": ["export", "train", "--to", "python"],
        "train": ["train", "search", "--epochs", "1"],
        "latency": ["latency", "search"],
        "info": ["info", "search/genotype.json"],
        "show": ["show", "search"],
        "report": ["report", "search"],
        "compare": ["compare", "search", "train"],
        "resume": ["search", "--resume", "search"],
    }[command]
    assert run(words) == 2
    said = capsys.readouterr().err
    assert "genotype.json was changed after the run had finished" in said and "copy it out of the run folder" in said
    assert said.count("\n") == 1


def test_a_genotype_that_was_changed_on_purpose_is_used_as_a_file(copied: Path, tmp_path: Path) -> None:
    other = sample(build_space("nb201", {}).layout(), 77)
    other.save(copied / "search" / "genotype.json")
    shutil.copy(copied / "search" / "genotype.json", tmp_path / "mine.json")
    assert read_genotype(tmp_path / "mine.json") == other


def test_changed_metrics_are_an_error_of_commands_and_a_problem_on_the_live_page(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = copied / "search" / "metrics.jsonl"
    row = json.loads(file.read_text())
    file.write_text(json.dumps({**row, "val_accuracy": 1.0}) + "\n")
    for words in (["report", str(copied)], ["compare", str(copied)], ["search", "--resume", str(copied / "search")]):
        assert run(words) == 2
        assert "metrics.jsonl was changed after the run had finished" in capsys.readouterr().err
    shown = read_run(copied / "search")
    assert shown.metrics == [] and "metrics.jsonl was changed after the run had finished" in shown.problems[0]
    assert b"metrics.jsonl was changed after the run had finished" in LivePage([copied]).get()[0]


def test_lines_of_epochs_are_verified_too(copied: Path) -> None:
    file = copied / "search" / "architecture.jsonl"
    file.write_text(file.read_text().replace("nor_conv_3x3", "nor_conv_1x1"))
    with pytest.raises(UserError, match=r"architecture\.jsonl was changed after the run had finished"):
        read_genotype(f"{copied / 'search'}@1")


def test_a_changed_manifest_of_a_finished_run_is_refused_until_its_digest_is_removed(copied: Path) -> None:
    file = copied / "train" / "run.json"
    manifest = json.loads(file.read_text())
    manifest["results"]["accuracy"] = 0.999
    file.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"does not match its own digest.*remove its \"digest\" line"):
        RunFolder.open(copied / "train")
    del manifest["digest"]
    file.write_text(json.dumps(manifest))
    assert RunFolder.open(copied / "train").manifest["results"]["accuracy"] == 0.999


def test_a_run_without_checksums_is_read_as_before(copied: Path, tmp_path: Path) -> None:
    unseal(copied / "train")
    flip(copied / "train" / "model.safetensors")
    assert export(copied / "train", "safetensors", tmp_path / "out").files


def test_exported_weights_are_those_that_were_exported(runs: Path, tmp_path: Path) -> None:
    export(runs / "train", "safetensors", tmp_path)
    before = Network.from_pretrained(tmp_path).state_dict()
    flip(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"is not what was exported with model\.json"):
        Network.from_pretrained(tmp_path)
    flip(tmp_path / "model.safetensors")
    assert all(torch.equal(before[k], v) for k, v in Network.from_pretrained(tmp_path).state_dict().items())


def test_the_copy_of_the_best_seed_must_equal_the_best_seed(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "search", tmp_path / "seed-0")
    (tmp_path / "seeds.json").write_text(json.dumps({"best": 0, "seeds": [{"seed": 0}]}))
    shutil.copy(runs / "search" / "genotype.json", tmp_path)
    assert read_genotype(tmp_path) == Genotype.load(runs / "search")
    sample(build_space("nb201", {}).layout(), 77).save(tmp_path / "genotype.json")
    with pytest.raises(UserError, match="must equal the genotype of the best seed"):
        read_genotype(tmp_path)


def test_a_run_that_continues_has_no_checksums(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, new_manifest("search", {"by_epoch": {2: 1, 10: 3}}, 0))
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    folder.finish("finished")
    assert set(RunFolder.open(tmp_path).manifest["checksums"]) == {"metrics.jsonl"}
    folder.update(status="running")
    assert RunFolder.open(tmp_path).manifest["checksums"] == {}
    assert "digest" not in json.loads((tmp_path / "run.json").read_text())
