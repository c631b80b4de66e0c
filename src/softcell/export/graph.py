"""A network as a graph that torch, or ONNX through it, can run without its Python code; the batch stays free."""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import Dim, ExportedProgram

from softcell.errors import UserError
from softcell.export.model import BATCHES, Model, check_equal, sample_pixels

INPUT = "pixels"
OPSET = 20


def to_program(model: Model) -> ExportedProgram:
    """pixels in 0..1 [batch, c, h, w] to `model.output` [batch, d], for any batch."""
    # Two images: torch takes a batch of one for a constant.
    example = sample_pixels(model.shape, 2)
    with torch.no_grad(), _quiet():
        return torch.export.export(model.normalised(), (example,), dynamic_shapes=({0: Dim("batch", min=1)},))


def check_program(file: Path, model: Model) -> float:
    """Loads the file and compares; gives the largest relative difference."""
    with _quiet():
        found = torch.export.load(file).module()
    with torch.no_grad():
        return max(
            check_equal(file.name, model.normalised()(pixels), found(pixels))
            for pixels in (sample_pixels(model.shape, batch) for batch in BATCHES)
        )


def write_onnx(model: Model, file: Path) -> None:
    """Writes an ONNX file with the weights inside; class names, mean, std and facts are in its metadata."""
    _need("onnxscript")
    with torch.no_grad(), _quiet():
        program = to_program(model)
        if _has_kernels_per_image(program):
            program = program.run_decompositions({torch.ops.aten.conv2d.default: grouped_by_image})
        made = torch.onnx.export(
            program, input_names=[INPUT], output_names=[model.output], opset_version=OPSET, dynamo=True, verbose=False
        )
    assert made is not None
    learnt = "classes" if model.output == "logits" else "seen_classes"
    known: dict[str, object] = {learnt: model.classes, "mean": model.mean, "std": model.std, "shape": model.shape}
    known |= {"scaled_to": model.scaled_to or model.shape[1:], "whole": model.whole}
    made.model.metadata_props.update({key: json.dumps(value) for key, value in known.items()})
    made.model.metadata_props.update(model.about)
    made.save(file, external_data=False)


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


def _has_kernels_per_image(program: ExportedProgram) -> bool:
    """Whether some convolution's number of groups, its last argument, is computed; most networks have none."""
    return any(
        node.target is torch.ops.aten.conv2d.default and not isinstance(node.args[-1], int | list)
        for node in program.graph.nodes
        if len(node.args) == 7
    )


def grouped_by_image(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = (1, 1),
    padding: Any = (0, 0),
    dilation: Any = (1, 1),
    groups: Any = 1,
) -> Tensor:
    """A convolution whose number of groups depends on the batch, as a sum over its taps.

    A kernel per image is computed as a convolution with one group per image (and channel). ONNX wants the number of
    groups as a constant, so such a convolution, and no other, is written as products and sums. Products of matrices
    over windows would be a smaller graph, but onnxruntime takes 7 times as long for it.

    x [n, groups·i, h, w]; weight [groups·o, i, kh, kw]; gives [n, groups·o, h', w'].
    """
    if isinstance(groups, int):
        return NotImplemented  # type: ignore[no-any-return]
    height, width = x.shape[-2:]
    _, inner, rows, columns = weight.shape
    outer = weight.shape[0] // groups
    x = F.pad(x, (padding[1], padding[1], padding[0], padding[0])).unflatten(1, (groups, inner))  # type: ignore[no-untyped-call]
    taps = weight.reshape(groups, outer, inner, 1, 1, rows * columns)
    high = (height + 2 * padding[0] - dilation[0] * (rows - 1) - 1) // stride[0] + 1
    wide = (width + 2 * padding[1] - dilation[1] * (columns - 1) - 1) // stride[1] + 1
    total: Tensor | None = None
    for row in range(rows):
        for column in range(columns):
            top, left = row * dilation[0], column * dilation[1]
            seen = x[
                ...,
                top : top + (high - 1) * stride[0] + 1 : stride[0],
                left : left + (wide - 1) * stride[1] + 1 : stride[1],
            ]  # [n, groups, i, h', w']
            tap = taps[..., row * columns + column]  # [groups, o, i, 1, 1]
            # A channel by itself (i = 1) needs no sum over i.
            term = seen * tap[:, :, 0] if inner == 1 else (seen.unsqueeze(2) * tap).sum(3)
            total = term if total is None else total + term
    assert total is not None
    y = total.flatten(1, 2)
    return y if bias is None else y + bias[:, None, None]


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
