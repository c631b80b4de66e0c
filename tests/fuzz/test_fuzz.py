"""Damaged runs, checkpoints, genotypes, recipes, datasets and options: no traceback, no hang, no wrong result."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import softcell
from softcell.arch import notation, sample
from softcell.spaces import SPACES, build_space
from tests.helpers.fuzz_cases import SHORT, WHOLE
from tests.helpers.fuzz_damage import TOKENS, damage
from tests.helpers.fuzz_workshop import CELL, Workshop, difference, fault

READING: dict[str, list[tuple[str, ...]]] = {
    "search": [
        ("info", "search"),
        ("show", "search"),
        ("show", "search@1"),
        ("convert", "search", "--to", "json"),
        ("compare", "search"),
        ("report", "search"),
        ("search", "--resume", "search", "-q"),
        ("train", "search", "--epochs", "1", "--out", "new", "-q"),
        ("watch", "search"),
        ("indicators", "search", "--by", "alpha"),
    ],
    "train": [
        ("info", "train"),
        ("compare", "train"),
        ("report", "train"),
        ("export", "train", "--to", "safetensors"),
        ("train", "--resume", "train", "-q"),
        ("watch", "train"),
    ],
    "half": [("train", "--resume", "half", "-q"), ("info", "half"), ("report", "half"), ("watch", "half")],
}
"""By run the commands that read it."""


def faults_of_runs(workshop: Workshop, numbers: range) -> list[str]:
    """Damages a file of a run for each number, runs a command on it, and gives what went wrong."""
    found = []
    for number in numbers:
        draw = random.Random(number)
        folder = draw.choice(list(READING))
        words = draw.choice(READING[folder])
        expected = workshop.expected(words)
        assert expected.code == 0, (words, expected)
        workshop.fresh()
        names = [file for file in sorted((workshop.place / folder).iterdir()) if _counts(file)]
        file = draw.choice(names)
        file.write_bytes(damage(file.read_bytes(), number))
        seen = workshop.run(words)
        wrong = fault(seen)
        # What a running job has not finished has no checksum yet: its lines and manifest are shown as they are.
        if wrong is None and (folder != "half" or words[0] == "train"):
            wrong = difference(seen, expected, file.name)
        if wrong is not None:
            found.append(f"case {number}: {' '.join(words)} with damaged {folder}/{file.name}: {wrong}")
    return found


def _counts(file: Path) -> bool:
    """Whether the content of a file is read, and not only its name."""
    return file.suffix in (".json", ".jsonl", ".bin", ".safetensors")


def test_damaged_runs_are_rejected_or_make_no_difference(workshop: Workshop) -> None:
    assert faults_of_runs(workshop, range(SHORT)) == []


@pytest.mark.exhaustive
def test_damaged_runs_are_rejected_or_make_no_difference_in_1400_cases(workshop: Workshop) -> None:
    assert faults_of_runs(workshop, range(10_000, 10_000 + WHOLE["runs"])) == []


def faults_of_files(workshop: Workshop, numbers: range) -> list[str]:
    """Damaged genotypes, recipes, sweeps and datasets, which have no checksum: no traceback, no hang."""
    found = []
    for number in numbers:
        draw = random.Random(number)
        workshop.fresh()
        words = _damaged_file(workshop.place, draw, number)
        wrong = fault(workshop.run(words))
        if wrong is not None:
            found.append(f"case {number}: {' '.join(words)}: {wrong}")
    return found


def _damaged_file(place: Path, draw: random.Random, number: int) -> list[str]:
    kind = draw.choice(("genotype", "genotype", "notation", "recipe", "sweep", "npz", "images", "latency"))
    if kind == "genotype":
        space = draw.choice([name for name in SPACES if not name.startswith("test")])
        genotype = sample(build_space(space, {}).layout(), number)
        (place / "cell.json").write_bytes(damage(genotype.dumps().encode(), number))
        return draw.choice((["info", "cell.json"], ["show", "cell.json"], ["convert", "cell.json"]))
    if kind == "notation":
        darts = notation.to_darts(sample(build_space("darts", {}).layout(), number))
        text = damage(draw.choice((CELL, darts)).encode(), number)
        (place / "cell.txt").write_bytes(text)
        return draw.choice((["info", "cell.txt"], ["show", "cell.txt"], ["convert", "cell.txt"]))
    if kind == "recipe":
        recipe = json.loads((place / "search" / "run.json").read_text())["recipe"]
        recipe["epochs"] = 1
        suffix = draw.choice(("json", "yaml"))
        (place / f"recipe.{suffix}").write_bytes(damage(json.dumps(recipe, indent=1).encode(), number))
        return ["search", "--config", f"recipe.{suffix}", "--epochs", "1", "--out", "new", "-q"]
    if kind == "sweep":
        text = "methods: [darts, random]\nspaces: [nb201]\nseeds: 2\nrandom: 1\nsearch: {epochs: 1, cutout: 2}\n"
        (place / "sweep.yaml").write_bytes(damage(text.encode(), number))
        return ["sweep", "sweep.yaml", "--dry-run", "--out", "new"]
    if kind == "npz":
        (place / "data.npz").write_bytes(damage((place / "data.npz").read_bytes(), number))
        return ["search", "random", "--space", "nb201", "--data", "data.npz", "--epochs", "1", "--scale", "small",
                "--set", "method.samples=1", "--out", "new", "-q"]  # fmt: skip
    if kind == "images":
        for label in "ab":
            (place / "images" / label).mkdir(parents=True)
            for index in range(3):
                file = place / "images" / label / f"{index}.{draw.choice(('png', 'jpg', 'bmp', 'gif'))}"
                pixels = np.random.default_rng(index).integers(0, 256, (9, 9, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(file)
                if draw.random() < 0.3:
                    file.write_bytes(damage(file.read_bytes(), number + index))
        return ["search", "random", "--space", "nb201", "--data", "images", "--epochs", "1", "--scale", "small",
                "--set", "method.samples=1", "--out", "new", "-q"]  # fmt: skip
    table = "about: {unit: ms}\nfixed: 1.0\nnor_conv_3x3: 3\nnor_conv_1x1: 1\navg_pool_3x3: 1\nskip_connect: 0.1\n"
    (place / "times.yaml").write_bytes(damage(table.encode(), number))
    return ["search", "random", "--space", "nb201", "--epochs", "1", "--latency-table", "times.yaml", "--max-latency",
            "9", "--set", "method.samples=1", "--set", "space.channels=2", "--out", "new", "-q"]  # fmt: skip


def test_damaged_files_are_rejected(workshop: Workshop) -> None:
    assert faults_of_files(workshop, range(SHORT)) == []


@pytest.mark.exhaustive
def test_damaged_files_are_rejected_in_400_cases(workshop: Workshop) -> None:
    assert faults_of_files(workshop, range(20_000, 20_000 + WHOLE["files"])) == []


SETTINGS = (
    "epochs", "batch_size", "seed", "regime", "split", "cutout", "drop_path", "method_settings", "space_settings",
    "weights.lr", "weights.schedule", "architecture.lr", "unrolled.epsilon", "collapse.patience", "resource.network",
    "resource.max_params", "resource.kinds", "evolution.generations", "guide.teacher", "objective", "pretrain.data",
    "validate_every", "device", "precision", "engine", "fused", "threads", "plugins", "space.nodes", "space.channels",
    "space.candidates", "method.temperature", "data", "image_size", "scale", "", ".", "space", "method",
)  # fmt: skip
MORE = ["", "a", "..", "/dev/zero", "/etc/passwd", "\x00", "é"]
ODD = st.sampled_from([token.decode() for token in TOKENS] + MORE)
VALUES = ODD | st.text(max_size=8) | st.integers(-3, 10**20).map(str) | st.floats().map(str)


def check_values(workshop: Workshop, key: str, value: str, command: str) -> None:
    workshop.fresh()
    last = "batch_size=0" if key == "epochs" else "epochs=0"  # rejected in the end, so that no search runs
    words = {
        "set": ["search", "--set", f"{key}={value}", "--set", last, "--out", "new", "-q"],
        "info": ["info", "nb201", "--set", f"{key}={value}"],
        "genotype": ["info", value],
        "show": ["show", value],
        "input": ["info", CELL, "--input", value],
        "random": ["random", "--seed", value],
        "data": ["search", "--data", value, "--epochs", "0", "--out", "new", "-q"],
        "compare": ["compare", value],
    }[command]
    wrong = fault(workshop.run(words))
    assert wrong is None, f"{words}: {wrong}"


COMMANDS = st.sampled_from(["set", "set", "set", "info", "genotype", "show", "input", "random", "data", "compare"])
QUIET = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=SHORT, **QUIET)
@given(key=st.sampled_from(SETTINGS), value=VALUES, command=COMMANDS)
def test_any_value_is_accepted_or_rejected_with_a_message(
    workshop: Workshop, key: str, value: str, command: str
) -> None:
    check_values(workshop, key, value, command)


@pytest.mark.exhaustive
@settings(max_examples=WHOLE["values"], **QUIET)
@given(key=st.sampled_from(SETTINGS), value=VALUES, command=COMMANDS)
def test_any_value_is_accepted_or_rejected_with_a_message_in_200_cases(
    workshop: Workshop, key: str, value: str, command: str
) -> None:
    check_values(workshop, key, value, command)


@pytest.mark.exhaustive
def test_processes_also_end_with_one_line(workshop: Workshop) -> None:
    """The same from outside, where a traceback of the interpreter or of a library would be seen."""
    source = str(Path(softcell.__file__).parents[1])
    for number, words in enumerate((["info", "search"], ["export", "train", "--to", "python"], ["report", "train"])):
        workshop.fresh()
        file = workshop.place / words[1] / ("genotype.json", "model.safetensors", "predictions.safetensors")[number]
        content = bytearray(file.read_bytes() if file.exists() else b"x")
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
        done = subprocess.run(
            [sys.executable, "-m", "softcell", *words],
            cwd=workshop.place,
            env={"PYTHONPATH": source, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(workshop.place)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 2, done
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
