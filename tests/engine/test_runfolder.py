"""Run folders: create, update, overwrite, read old ones."""

import json
from pathlib import Path
from typing import Any

import pytest

import softcell
from softcell.engine import checkpoint
from softcell.engine import manifest as manifests
from softcell.engine.manifest import VERSION, new_manifest
from softcell.engine.runfolder import MANIFEST, RunFolder
from softcell.errors import UserError
from softcell.files import FILE_LIST, atomic_write_text, listed_files

RECIPE = {"method": "x", "weights": {"learning_rate": 0.025}}


def stored(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    return found


def test_a_manifest_records_where_a_run_comes_from(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a" / "run", new_manifest("search", RECIPE, 7))
    manifest = RunFolder.open(folder.path).manifest
    assert manifest == folder.manifest == stored(folder.path)
    assert (manifest["format"], manifest["version"]) == ("softcell-run", VERSION)
    assert (manifest["kind"], manifest["seed"], manifest["status"]) == ("search", 7, "running")
    assert manifest["recipe"] == RECIPE
    assert manifest["results"] == {}
    assert set(manifest["versions"]) == {"python", "torch", "numpy", "softcell"}
    assert manifest["versions"]["softcell"] == softcell.__version__, "the version of the running code, installed or not"
    assert set(manifest["hardware"]) == {"cpu", "cores", "memory", "gpus"}
    assert manifest["created"].endswith("+00:00")
    assert manifest["finished"] is None
    assert manifest["threads"] >= 1
    assert isinstance(manifest["command"], list)


def test_a_folder_that_holds_anything_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    manifest = new_manifest("train", {}, 0)
    with pytest.raises(UserError, match=r"--resume.*--out"):
        RunFolder.create(tmp_path, manifest)
    with pytest.raises(UserError, match="not a run"):
        RunFolder.create(tmp_path, manifest, overwrite=True)
    with pytest.raises(UserError, match="is a file"):
        RunFolder.create(tmp_path / "notes.txt", manifest)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_overwriting_clears_the_old_run_and_spares_other_files(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, new_manifest("search", {}, 0)).finish("finished", accuracy=0.5)
    for name in ("checkpoint.bin", "metrics.jsonl", "genotype.json", "of-a-plugin.jsonl"):
        atomic_write_text(tmp_path / name, "old")
    (tmp_path / ".x.tmp").write_text("half")
    mine = ("notes.txt", "results.json", "figure.svg", "weights.safetensors", "page.html", "log.jsonl", "data.bin")
    for name in mine:
        (tmp_path / name).write_text("mine")
    (tmp_path / "more").mkdir()
    with pytest.warns(
        UserWarning, match=r"do not belong to the run and are kept: data.bin, figure.svg, log.jsonl.*results.json"
    ):
        RunFolder.create(tmp_path, new_manifest("train", {}, 1), overwrite=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([*mine, "more", MANIFEST, FILE_LIST])
    assert all((tmp_path / name).read_text() == "mine" for name in mine)
    assert stored(tmp_path)["kind"] == "train"
    assert stored(tmp_path)["results"] == {}
    assert listed_files(tmp_path) == {FILE_LIST, MANIFEST}


def test_a_run_of_an_earlier_version_loses_only_files_with_known_names(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, new_manifest("search", {}, 0))
    (tmp_path / FILE_LIST).unlink()
    ours = ("checkpoint.bin", "metrics.jsonl", "genotype.json", "architecture-normal.svg", "report.html")
    for name in (*ours, "thesis.json", "figure.svg", "other.bin"):
        (tmp_path / name).write_text("x")
    with pytest.warns(UserWarning, match=r"do not belong to the run and are kept: figure.svg, other.bin, thesis.json"):
        RunFolder.create(tmp_path, new_manifest("search", {}, 0), overwrite=True)
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {"thesis.json", "figure.svg", "other.bin", MANIFEST, FILE_LIST}


@pytest.mark.parametrize("text", ["{}", '{"name": "of another program"}', "not JSON", "[" * 100_000])
def test_a_folder_with_some_run_json_of_others_is_not_overwritten(text: str, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(text)
    (tmp_path / "metrics.jsonl").write_text("mine")
    with pytest.raises(UserError, match="that Softcell created"):
        RunFolder.create(tmp_path, new_manifest("search", {}, 0), overwrite=True)
    assert (tmp_path / MANIFEST).read_text() == text and (tmp_path / "metrics.jsonl").read_text() == "mine"


def test_a_run_with_a_damaged_manifest_can_be_overwritten(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, new_manifest("search", {}, 0))
    (tmp_path / MANIFEST).write_text("{")
    RunFolder.create(tmp_path, new_manifest("search", {}, 1), overwrite=True)
    assert stored(tmp_path)["seed"] == 1


def test_overwriting_deletes_the_previous_checkpoint_too(tmp_path: Path) -> None:
    """It got its name by a rename, so it is not in the list of written files."""
    RunFolder.create(tmp_path, new_manifest("search", {}, 0))
    for epoch in range(2):
        checkpoint.save(tmp_path, {"epoch": epoch})
    assert (tmp_path / checkpoint.PREVIOUS).exists()
    RunFolder.create(tmp_path, new_manifest("search", {}, 1), overwrite=True)
    assert not checkpoint.exists(tmp_path)


def test_a_list_that_names_other_kinds_of_files_or_paths_deletes_none_of_them(tmp_path: Path) -> None:
    run = tmp_path / "run"
    RunFolder.create(run, new_manifest("search", {}, 0))
    (tmp_path / "outside.json").write_text("mine")
    (run / "thesis.docx").write_text("mine")
    with open(run / FILE_LIST, "a", encoding="utf-8") as listed:
        listed.write(f"thesis.docx\n../outside.json\n{tmp_path}/outside.json\n")
    with pytest.warns(UserWarning, match="do not belong to the run and are kept: thesis.docx"):
        RunFolder.create(run, new_manifest("search", {}, 0), overwrite=True)
    assert (tmp_path / "outside.json").exists() and (run / "thesis.docx").exists()


def test_a_file_list_of_another_program_is_ignored(tmp_path: Path) -> None:
    (tmp_path / FILE_LIST).write_text("bread\nbutter\n")
    with pytest.raises(UserError, match="empty folder"):
        RunFolder.create(tmp_path, new_manifest("search", {}, 0))
    assert (tmp_path / FILE_LIST).read_text() == "bread\nbutter\n"


def test_a_part_of_a_run_that_is_a_link_is_not_overwritten(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "mine", new_manifest("train", {}, 0))
    atomic_write_text(tmp_path / "mine" / "metrics.jsonl", "mine")
    RunFolder.create(tmp_path / "foreign", new_manifest("train", {}, 0))
    (tmp_path / "foreign" / "random-1").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match="is a link to"):
        RunFolder.create(tmp_path / "foreign" / "random-1", new_manifest("train", {}, 0), overwrite=True)
    assert (tmp_path / "mine" / "metrics.jsonl").read_text() == "mine"
    (tmp_path / "link").symlink_to(tmp_path / "mine")  # as users do who keep runs on another disk
    RunFolder.create(tmp_path / "link", new_manifest("train", {}, 0), overwrite=True)


def test_updates_reach_the_disk_and_keep_the_rest(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, new_manifest("search", RECIPE, 7))
    folder.update(threads=3)
    folder.finish("finished", accuracy=0.9)
    folder.update(results={**folder.manifest["results"], "cost": 2})
    found = stored(tmp_path)
    assert (found["threads"], found["status"], found["results"]) == (
        3,
        "finished",
        {"accuracy": 0.9, "cost": 2},
    )
    assert found["finished"] is not None
    assert found["recipe"] == RECIPE
    with pytest.raises(UserError, match="staus"):
        folder.update(staus="failed")
    with pytest.raises(UserError, match="status must be one of"):
        folder.update(status="done")
    assert stored(tmp_path) == found


def test_a_manifest_handed_out_is_a_copy(tmp_path: Path) -> None:
    given = new_manifest("search", {"a": {"b": 1}}, 7)
    folder = RunFolder.create(tmp_path, given)
    given["recipe"]["a"]["b"] = folder.manifest["recipe"]["a"]["b"] = 2
    assert folder.manifest["recipe"] == {"a": {"b": 1}}


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has none"):
        RunFolder.open(tmp_path)
    for text in ("{", "[]", '{"format": "other"}', '{"format": "softcell-run", "version": "1"}'):
        (tmp_path / MANIFEST).write_text(text)
        with pytest.raises(UserError):
            RunFolder.open(tmp_path)


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps({"format": "softcell-run", "version": VERSION + 1}))
    with pytest.raises(UserError, match="newer Softcell"):
        RunFolder.open(tmp_path)


def test_version_0_is_refused(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps({**new_manifest("search", {}, 0), "version": 0}))
    with pytest.raises(UserError, match="whole number above 0"):
        RunFolder.open(tmp_path)


def test_a_run_with_an_engine_of_earlier_versions_is_read(tmp_path: Path) -> None:
    old = new_manifest("search", {"method": "darts", "engine": "compile"}, 4)
    kept = json.dumps(old)
    (tmp_path / MANIFEST).write_text(kept)
    folder = RunFolder.open(tmp_path)
    assert folder.manifest == {**old, "recipe": {"method": "darts", "engine": "auto"}}
    assert old["recipe"]["engine"] == "compile", "migrate changes a copy"
    assert (tmp_path / MANIFEST).read_text() == kept
    folder.update(threads=1)
    assert stored(tmp_path)["recipe"]["engine"] == "auto"


def test_provenance_never_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert manifests.commit(tmp_path) is None
    assert manifests.commit(tmp_path / "none") is None
    monkeypatch.setenv("PATH", "")
    assert manifests.commit() is None
    json.dumps(manifests.collect())
