"""A folder with which the candidates of a space are measured on another device: ONNX files, a list of them, a script.

The script (`softcell.evaluate.measure_onnx`) needs numpy and onnxruntime. Its result is a table for `softcell search
--latency-table`. Candidates are exported as in the final network, each once for every size that it can have there, as
are some whole networks, which show how well the table predicts. A graph that only copies its input stands for what a
call of onnxruntime costs in itself.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from softcell.app.export.graph import INPUT, OPSET, check_packages, module_to_program, program_to_onnx
from softcell.arch import Genotype, sample
from softcell.errors import UserError
from softcell.evaluate import measure_onnx
from softcell.evaluate.latency import OnStep, candidate_places, picks_of
from softcell.nn.candidates import get_candidate
from softcell.spaces import Shape, Space

PACK = "pack.json"
SCRIPT = "measure.py"
TABLE = "latency.json"
"""What the script writes beside them."""
FORMAT, VERSION = "softcell-latency-pack", 1


def check_pack_folder(folder: Path, overwrite: bool) -> None:
    """Raises before the work if a pack cannot be written there, or a package for ONNX is missing."""
    check_packages()
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--pack must name a folder, but {folder} is a file")
    if folder.is_dir() and any(folder.iterdir()):
        if not (folder / PACK).is_file():
            raise UserError(f"--pack must name a new or empty folder, but {folder} has other files; give another name")
        if not overwrite:
            raise UserError(f"{folder} already has a pack; give another name, or --overwrite to replace it")
    there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise UserError(f"{folder} cannot be written because {there} is not a writable folder; choose another path")


def write_pack(
    space: Space,
    shape: Shape,
    num_classes: int,
    folder: Path,
    *,
    genotypes: Sequence[Genotype] = (),
    networks: int = 5,
    batch: int = 1,
    about: Mapping[str, Any] | None = None,
    on_step: OnStep | None = None,
) -> dict[str, Any]:
    """Writes the pack of a space to `folder`, all of it or nothing, and returns the content of `pack.json`.

    genotypes: architectures whose networks are measured, beside `networks` random ones.
    """
    layout, places = space.layout(), list(candidate_places(space, shape, num_classes))
    needed = list(dict.fromkeys((op, spec, size) for _, op, spec, size in places))
    chosen = [*genotypes, *(sample(layout, seed) for seed in range(networks))]
    total = len(needed) + len(chosen)
    stage = folder.absolute().with_name(f".{folder.name}.tmp")
    shutil.rmtree(stage, ignore_errors=True)  # left by a command that was killed
    files: dict[str, list[int]] = {}
    written = hashlib.sha256()

    def add(name: str, content: bytes, size: Sequence[int]) -> None:
        (stage / name).write_bytes(content)
        files[name] = [batch, *size]
        written.update(hashlib.sha256(content).digest())

    try:
        stage.mkdir(parents=True)
        names, baselines = {}, {}
        for number, (op, spec, size) in enumerate(needed):
            described = "x".join(map(str, size))
            _step(on_step, number, total, f"{op} at {described}, stride {spec.stride}")
            copy = f"copy-{described}.onnx"
            if copy not in files:
                add(copy, _copying(size), size)
            name = f"candidate-{number:03}-{op}-{described}-stride-{spec.stride}.onnx"
            with torch.random.fork_rng(devices=[]):
                module = get_candidate(op).build(spec).eval()
            add(name, _onnx(module, size), size)
            names[op, spec, size], baselines[name] = name, copy
        listed = []
        for number, genotype in enumerate(chosen):
            _step(on_step, len(needed) + number, total, f"whole network {number + 1} of {len(chosen)}")
            name = f"network-{number:03}.onnx"
            with torch.random.fork_rng(devices=[]):
                network = space.network(genotype, shape, num_classes).eval()
            add(name, _onnx(network, shape), shape)
            listed.append({"file": name, "picks": picks_of(genotype, layout)})
        _step(on_step, total, total, "")
        pack = {
            "format": FORMAT,
            "version": VERSION,
            "digest": written.hexdigest()[:32],
            "about": {"unit": "ms", "batch": batch, **(about or {})},
            "files": files,
            "baselines": baselines,
            "places": [(table, op, names[op, spec, size]) for table, op, spec, size in places],
            "networks": listed,
        }
        (stage / PACK).write_text(json.dumps(pack, indent=1) + "\n", encoding="utf-8")
        (stage / SCRIPT).write_text(inspect.getsource(measure_onnx), encoding="utf-8")
        if folder.is_dir():
            shutil.rmtree(folder)  # empty, or a pack that may be replaced
        os.replace(stage, folder)
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror or error}); choose another path") from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return pack


def _onnx(module: torch.nn.Module, size: Sequence[int]) -> bytes:
    channels, height, width = size
    proto = program_to_onnx(module_to_program(module, (channels, height, width)), "output")
    content: bytes = proto.SerializeToString()
    return content


def _copying(size: Sequence[int]) -> bytes:
    """A graph whose output is its input."""
    from onnx import TensorProto, helper

    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", *size]) for name in (INPUT, "output")]
    graph = helper.make_graph([helper.make_node("Identity", [INPUT], ["output"])], "copy", ends[:1], ends[1:])
    opset = [helper.make_opsetid("", OPSET)]
    content: bytes = helper.make_model(graph, opset_imports=opset, ir_version=10).SerializeToString()
    return content


def _step(on_step: OnStep | None, number: int, total: int, what: str) -> None:
    if on_step is not None:
        on_step(number, total, what)
