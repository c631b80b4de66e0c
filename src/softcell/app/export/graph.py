"""A network as a graph that torch, or ONNX through it, can run without its Python code; the batch stays free."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim, ExportedProgram

from softcell.app.export.by_image import grouped_by_image, has_kernels_per_image, scan
from softcell.app.export.model import BATCHES, Model, check_equal, sample_pixels
from softcell.engine.files import atomic_write_bytes
from softcell.errors import UserError

INPUT = "pixels"
OPSET = 20


def to_program(model: Model) -> ExportedProgram:
    """pixels in 0..1 [batch, c, h, w] to `model.output` [batch, d], for any batch."""
    # Two images: torch takes a batch of one for a constant.
    example = sample_pixels(model.shape, 2)
    with torch.no_grad(), _quiet():
        return torch.export.export(model.normalised(), (example,), dynamic_shapes=({0: Dim("batch", min=1)},))


def write_program(model: Model, file: Path) -> None:
    """Writes what `torch.export.save` gives, by way of memory: on a full disk torch itself aborts the process."""
    buffer = io.BytesIO()
    with _quiet():
        torch.export.save(to_program(model), buffer)
    atomic_write_bytes(file, buffer.getvalue())


def check_program(file: Path, model: Model) -> float:
    """Loads the file and compares; gives the largest relative difference.

    Loading unpickles: this is for files that were just written.
    """
    with _quiet():
        found = torch.export.load(io.BytesIO(file.read_bytes())).module()
    with torch.no_grad():
        return max(
            check_equal(file.name, model.normalised()(pixels), found(pixels))
            for pixels in (sample_pixels(model.shape, batch) for batch in BATCHES)
        )


def write_onnx(model: Model, file: Path) -> None:
    """Writes an ONNX file with the weights inside; class names, mean, std and facts are in its metadata."""
    with torch.no_grad(), _quiet():
        program = to_program(model)
        if has_kernels_per_image(program):
            program = program.run_decompositions({torch.ops.aten.conv2d.default: grouped_by_image})
        made = torch.onnx.export(
            program,
            input_names=[INPUT],
            output_names=[model.output],
            opset_version=OPSET,
            custom_translation_table={torch.ops.softcell.conv_by_image.default: scan},
            dynamo=True,
            verbose=False,
        )
    assert made is not None
    learnt = "classes" if model.output == "logits" else "seen_classes"
    known: dict[str, object] = {learnt: model.classes, "mean": model.mean, "std": model.std, "shape": model.shape}
    known |= {"scaled_to": model.scaled_to or model.shape[1:], "whole": model.whole}
    made.model.metadata_props.update({key: json.dumps(value) for key, value in known.items()})
    made.model.metadata_props.update(model.about)
    atomic_write_bytes(file, made.model_proto.SerializeToString())


def check_onnx(file: Path, model: Model) -> float:
    """Runs the file with onnxruntime on one CPU thread and compares; gives the largest relative difference."""
    runtime = _need("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 1
    session = runtime.InferenceSession(file.read_bytes(), options, providers=["CPUExecutionProvider"])
    worst = 0.0
    with torch.no_grad():
        for batch in BATCHES:
            pixels = sample_pixels(model.shape, batch)
            found = torch.from_numpy(session.run([model.output], {INPUT: pixels.numpy()})[0])
            worst = max(worst, check_equal(file.name, model.normalised()(pixels), found))
    return worst


def check_packages() -> None:
    """Raises where a package that ONNX is written or checked with is not installed."""
    for package in ("onnxscript", "onnxruntime"):
        _need(package)


def _need(package: str) -> Any:
    try:
        with _quiet():
            return __import__(package)
    except ImportError as error:
        raise UserError(
            f"ONNX needs the package {package}, which is not installed: pip install 'softcell[onnx]'"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps back what exporters say about packages that are not needed and about themselves."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.onnx._internal.exporter", "onnxscript")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
