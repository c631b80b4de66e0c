"""`softcell latency --pack`: candidates as ONNX, measured by a standalone script, as a latency table for a search."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from softcell.app.cli.main import run as softcell
from softcell.arch import Genotype, sample
from softcell.evaluate import measure_onnx
from softcell.evaluate.measure_onnx import call_of, latency_table, main, measure_calls, open_session
from softcell.registry import load_plugin
from softcell.spaces import build_space

CHAIN = Path(__file__).parents[3] / "examples" / "my_space.py"
SIZES = ("--set", "space.layers=3", "--set", "space.channels=4")
OPS = ("--set", 'space.candidates=["skip_connect", "nor_conv_3x3"]')
SPACE = ("--plugin", str(CHAIN), *SIZES, *OPS)


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("device") / "pack"
    asked = ["latency", "chain", *SPACE, "--input", "1x8x8", "--batch", "2", "--networks", "1", "--pack", str(folder)]
    assert softcell([*asked, "--quiet"]) == 0
    return folder


def measure(pack: Path, place: Path, *options: str) -> list[str]:
    """Runs the script as on a device that has neither torch nor Softcell, and returns its lines."""
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text('import sys\nsys.modules["torch"] = sys.modules["softcell"] = None\n')
    words = [sys.executable, str(pack / "measure.py"), "--repeats", "3", *options]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(place)})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_script_measures_every_file_and_resumes(pack: Path, tmp_path: Path) -> None:
    known = json.loads((pack / "pack.json").read_text())
    names = ["copy-4x8x8.onnx", *(f"candidate-00{k}-{op}" for k, op in enumerate(("skip_connect", "nor_conv_3x3")))]
    assert [name.split("-4x8x8-stride")[0] for name in known["files"]] == [*names, "network-000.onnx"]
    first = measure(pack, tmp_path, "--threads", "1", "--device", "a phone")
    assert [line.split()[-1] for line in first[:4]] == list(known["files"])
    table = json.loads((pack / "latency.json").read_text())
    assert set(table) == {"about", "fixed", "chain"} and set(table["chain"]) == {"skip_connect", "nor_conv_3x3"}
    assert table["about"]["device"] == "a phone" and table["about"]["input"] == [1, 8, 8]
    assert table["about"]["batch"] == 2 and known["files"]["network-000.onnx"] == [2, 1, 8, 8]
    times = json.loads((pack / "times.json").read_text())
    assert all(0 < time < 1000 for time in times["times"].values())
    del times["times"]["network-000.onnx"]
    (pack / "times.json").write_text(json.dumps(times))
    again = measure(pack, tmp_path)
    assert [line.split()[-1] for line in again if " ms  " in line] == ["network-000.onnx"]
    kept = json.loads((pack / "times.json").read_text())
    assert measure_onnx._earlier_times(pack / "times.json", kept["setting"]) == kept["times"]
    assert measure_onnx._earlier_times(pack / "times.json", {**kept["setting"], "threads": 2}) == {}


def test_the_table_of_a_device_steers_a_search(pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that are known: a convolution takes 2 ms more than copying, a skip nothing, all else 1 ms."""
    known = json.loads((pack / "pack.json").read_text())
    (place := tmp_path / "pack").mkdir()
    (place / "pack.json").write_text(json.dumps(known))
    picks = [op for _, op in known["networks"][0]["picks"]]
    taken = {name: 0.5 + 2.0 * ("nor_conv" in name) for name in known["files"]}
    taken["network-000.onnx"] = 1.0 + 2.0 * picks.count("nor_conv_3x3")
    monkeypatch.setattr(measure_onnx, "_earlier_times", lambda file, setting: taken)
    assert main(["--pack", str(place)]) == 0
    table = json.loads((place / "latency.json").read_text())
    assert table["chain"] == {"skip_connect": 0.0, "nor_conv_3x3": 2.0} and table["fixed"] == 1.0
    assert table["about"]["mean_deviation"] == 0.0
    monkeypatch.chdir(tmp_path)
    short = ("--epochs", "1", "--batch-size", "256", "--threads", "1", "--quiet", "--out", "run", "--overwrite")
    search = ["search", "random", "--space", "chain", *SPACE, "--set", "method.samples=1", *short]
    for limit in (1.0, 3.0):  # no convolution, and at most one of three layers
        assert softcell([*search, "--latency-table", str(place / "latency.json"), "--max-latency", str(limit)]) == 0
        results = json.loads(Path("run/run.json").read_text())["results"]
        found = [pick.op for pick in Genotype.load("run").cells["chain"].picks]
        assert results["derived_latency"] == 1.0 + 2.0 * found.count("nor_conv_3x3") <= limit
        assert results["budget_met"] is True


def test_the_script_imports_only_what_a_device_has(pack: Path) -> None:
    tree = ast.parse((pack / "measure.py").read_text())
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in found} - set(sys.stdlib_module_names) == {"numpy", "onnxruntime"}


def test_a_packed_network_is_the_spaces_own(pack: Path) -> None:
    """The weights are random, but operators and parameters are those of the network."""
    load_plugin(CHAIN)
    space = build_space("chain", {"layers": 3, "channels": 4, "candidates": ["skip_connect", "nor_conv_3x3"]})
    genotype = sample(space.layout(), 0)
    known = json.loads((pack / "pack.json").read_text())
    assert [op for _, op in known["networks"][0]["picks"]] == [pick.op for pick in genotype.cells["chain"].picks]
    graph = onnx.load(pack / "network-000.onnx").graph
    convs = sum(pick.op == "nor_conv_3x3" for pick in genotype.cells["chain"].picks)
    assert sum(node.op_type == "Conv" for node in graph.node) == 1 + convs  # the stem's too
    output = open_session(pack / "network-000.onnx").run(None, {"pixels": np.zeros((3, 1, 8, 8), np.float32)})[0]
    assert torch.from_numpy(output).shape == (3, 10)


def test_times_fit_the_networks_by_a_fixed_time_or_a_common_factor() -> None:
    places = [("cell", "conv", "a"), ("cell", "conv", "b"), ("cell", "pool", "c")]
    times = {"a": 1.0, "b": 3.0, "c": 4.0}
    conv, pool = ("cell", "conv"), ("cell", "pool")
    table, fixed, pairs = latency_table(places, times, [([conv], 7.0), ([conv, pool, ("cell", "none")], 12.0)])
    assert table == {"cell": {"conv": 2.0, "pool": 4.0}}
    assert fixed == 5.5 and pairs == [(7.5, 7.0), (11.5, 12.0)]
    table, fixed, pairs = latency_table(
        places, times, [([conv], 1.0), ([conv, pool], 3.0)]
    )  # half of what they take alone
    assert table == {"cell": {"conv": 1.0, "pool": 2.0}} and fixed == 0.0 and pairs == [(1.0, 1.0), (3.0, 3.0)]
    assert latency_table(places, times, [])[1:] == (0.0, [])


def test_calls_take_turns_after_a_warm_up(pack: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_onnx, "WARM_UP", 0.0)
    monkeypatch.setattr(measure_onnx, "SAMPLE", 0.0)
    log: list[str] = []
    samples = measure_calls([lambda: log.append("a"), lambda: log.append("b")], repeats=3)
    assert log == ["a", "a", "b", "b", "a", "b", "a", "b", "a", "b"]
    assert [len(found) for found in samples] == [3, 3] and samples[0] == sorted(samples[0])
    call = call_of(open_session(pack / "copy-4x8x8.onnx"), [2, 4, 8, 8])
    assert call()[0].shape == (2, 4, 8, 8)


def test_wrong_requests_are_refused(
    pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    for options, reason in (
        (("--pack", "new", "--out", "a.yaml"), "--out applies to measurements on this machine"),
        (("--pack", "new", "--threads", "1"), "--threads applies to measurements on this machine"),
        (("--pack", str(pack)), "already has a pack"),
        (("--pack", "full"), "has other files"),
        (("--pack", "full", "--overwrite"), "has other files"),
        (("--pack", "file"), "is a file"),
        (("--pack", "file/deep"), "cannot be written"),
    ):
        assert softcell(["latency", "nb201", *options]) == 2
        assert reason in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["file", "full"]
    for words, reason in (
        (["--pack", "full"], "pack.json must be in full"),
        (["--pack", str(pack), "--provider", "Abacus"], "--provider must be one of"),
        (["--pack", str(pack), "--repeats", "0"], "--repeats must be 1 or more"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2 and reason in capsys.readouterr().err


def test_an_interrupted_pack_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        assert [path.name for path in tmp_path.iterdir()] == [".pack.tmp"]
        raise KeyboardInterrupt

    monkeypatch.setattr("softcell.app.export.write.module_to_program", stop)
    assert softcell(["latency", "chain", *SPACE, "--pack", str(tmp_path / "pack"), "--quiet"]) == 130
    assert not list(tmp_path.iterdir())
