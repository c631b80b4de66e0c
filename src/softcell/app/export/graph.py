"""A network as a graph that torch, or ONNX through it, runs without its Python code; the batch size stays free.

Convolutions with a kernel per image need more than a translation in ONNX. In torch such a convolution has one group per
image and channel, a number that depends on the batch. ONNX needs a constant number of groups, but accepts the kernel as
an input: a `Scan` runs over the images and convolves each with its own kernel. (Products and sums over the taps need a
graph of hundreds of nodes and twice the time to run, products of matrices over windows seven times that.)

A *pack* is a folder with which the candidates of a space are measured on another device: ONNX files, a list of them, a
script (`softcell.evaluate.measure_onnx`) that needs numpy and onnxruntime. Its result is a table for `softcell search
--latency-table`. Candidates are exported as in the final network, each once for every size that it can have there, as
are some whole networks, which show how well the table predicts. A graph that only copies its input measures the
overhead of a call of onnxruntime.
"""

import contextlib
import hashlib
import inspect
import io
import json
import logging
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from softcell.app.export.model import BATCHES, Model, check_equal, sample_pixels
from softcell.arch import Genotype, sample
from softcell.errors import UserError
from softcell.evaluate import measure_onnx
from softcell.evaluate.latency import OnStep, candidate_places, picks_of
from softcell.files import atomic_write_bytes
from softcell.nn.candidates import get_candidate
from softcell.spaces import Shape, Space

INPUT = "pixels"
OPSET = 20


def _to_program(model: Model) -> ExportedProgram:
    """pixels in 0..1 [batch, c, h, w] to `model.output` [batch, d], for any batch."""
    return module_to_program(model.normalised(), model.shape)


def module_to_program(module: nn.Module, shape: Shape) -> ExportedProgram:
    """A module in eval mode on images of `shape` (c, h, w), for any batch."""
    # Two images: torch treats a batch of one as a constant.
    example = sample_pixels(shape, 2)
    with torch.no_grad(), _quiet():
        return torch.export.export(module, (example,), dynamic_shapes=({0: Dim("batch", min=1)},))


def write_program(model: Model, file: Path) -> None:
    """Writes the program through memory, since `torch.export.save` aborts the process on a full disk."""
    buffer = io.BytesIO()
    with _quiet():
        torch.export.save(_to_program(model), buffer)
    atomic_write_bytes(file, buffer.getvalue())


def check_program(file: Path, model: Model) -> float:
    """Loads the file and returns the largest relative difference from the network.

    Loading unpickles, so this is only for files that were just written.
    """
    with _quiet():
        found = torch.export.load(io.BytesIO(file.read_bytes())).module()
    with torch.no_grad():
        return max(
            check_equal(file.name, model.normalised()(pixels), found(pixels))
            for pixels in (sample_pixels(model.shape, batch) for batch in BATCHES)
        )


def write_onnx(model: Model, file: Path) -> None:
    """Writes an ONNX file with the weights; class names, mean, std and facts are in its metadata."""
    proto = _program_to_onnx(_to_program(model), model.output)
    set_metadata(proto, metadata_of(model))
    atomic_write_bytes(file, proto.SerializeToString())


def _program_to_onnx(program: ExportedProgram, output: str) -> Any:
    """The `onnx.ModelProto` of a program, without the exporter's notes on each node.

    Those are a tenth of a small file, and they have paths of this machine.
    """
    with torch.no_grad(), _quiet():
        if _has_kernels_per_image(program):
            program = program.run_decompositions({torch.ops.aten.conv2d.default: grouped_by_image})
        made = torch.onnx.export(
            program,
            input_names=[INPUT],
            output_names=[output],
            opset_version=OPSET,
            custom_translation_table={torch.ops.softcell.conv_by_image.default: scan},
            dynamo=True,
            verbose=False,
        )
    assert made is not None
    proto = made.model_proto
    graph = proto.graph
    for part in (*graph.node, *graph.value_info, *graph.input, *graph.output, *graph.initializer):
        del part.metadata_props[:]
    del graph.metadata_props[:]
    return proto


def metadata_of(model: Model) -> dict[str, str]:
    """Class names and the preparation of images as JSON, and the facts about the training."""
    learnt = "classes" if model.output == "logits" else "seen_classes"
    known: dict[str, object] = {learnt: model.classes, "mean": model.mean, "std": model.std, "shape": model.shape}
    known |= {"scaled_to": model.scaled_to or model.shape[1:], "whole": model.whole}
    return {**{key: json.dumps(value) for key, value in known.items()}, **model.about}


def set_metadata(proto: Any, facts: dict[str, str]) -> None:
    """Replaces the metadata of an `onnx.ModelProto`."""
    del proto.metadata_props[:]
    for key, value in facts.items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value


def check_onnx(file: Path, model: Model) -> float:
    """Runs the file with onnxruntime on one CPU thread and returns the largest relative difference."""
    session = onnx_session(file, threads=1)
    worst = 0.0
    with torch.no_grad():
        for batch in BATCHES:
            pixels = sample_pixels(model.shape, batch)
            found = torch.from_numpy(session.run([model.output], {INPUT: pixels.numpy()})[0])
            worst = max(worst, check_equal(file.name, model.normalised()(pixels), found))
    return worst


def onnx_session(file: Path, *, threads: int = 0) -> Any:
    """An onnxruntime session for a file, on the CPU; threads: 0 for all cores."""
    runtime = _need("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # only errors
    try:
        return runtime.InferenceSession(file.read_bytes(), options, providers=["CPUExecutionProvider"])
    except OSError as error:
        raise UserError(f"{file} must be an ONNX file, but cannot be read: {error.strerror or error}") from error
    except Exception as error:  # onnxruntime has a class for each of a dozen reasons, without a common base
        raise UserError(f"{file} must be an ONNX file, but onnxruntime cannot load it: {str(error)[:200]}") from error


def check_packages() -> None:
    """Raises if a package for writing or checking ONNX is not installed."""
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
    """Silences messages of the exporters about themselves and about optional packages."""
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


# The schema of this operation is read from its annotations, which not every torch reads as text: so no
# `from __future__ import annotations` in this file.
@torch.library.custom_op("softcell::conv_by_image", mutates_args=())
def conv_by_image(
    x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    """x [n, groups·i, h, w] with weight [n, groups·o, i, kh, kw] to [n, groups·o, h', w']: becomes the `Scan`."""
    pairs = zip(x, weight, strict=True)
    return torch.cat([F.conv2d(one[None], own, None, stride, padding, dilation, groups) for one, own in pairs])


@conv_by_image.register_fake
def _(x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int) -> Tensor:
    first = F.conv2d(x[:1], weight[0], None, stride, padding, dilation, groups)
    return x.new_empty(x.shape[0], *first.shape[1:])


def _has_kernels_per_image(program: ExportedProgram) -> bool:
    """Whether the number of groups of some convolution, its last argument, is computed."""
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
    """A convolution whose number of groups is a multiple of the batch, image by image; others are left alone.

    x [1, n·g·i, h, w]; weight [n·g·o, i, kh, kw]; gives [1, n·g·o, h', w'] for g groups per image.
    """
    if isinstance(groups, int):
        return NotImplemented  # type: ignore[no-any-return]
    per_image, batch = groups.node.expr.as_coeff_Mul()
    if not (per_image.is_Integer and batch.is_Symbol):
        raise UserError(
            f"in ONNX the groups of a convolution must be constant, or a constant number per image, but got {groups}; "
            "export with --to torch-export"
        )
    count, (outputs, inner, *_) = int(per_image), weight.shape
    own = x.reshape(-1, count * inner, *x.shape[-2:])
    kernels = weight.reshape(-1, count * (outputs // groups), *weight.shape[1:])
    y: Tensor = torch.ops.softcell.conv_by_image(own, kernels, list(stride), list(padding), list(dilation), count)
    y = y.reshape(1, -1, *y.shape[-2:])
    return y if bias is None else y + bias[:, None, None]


def scan(x: Any, weight: Any, stride: list[int], padding: list[int], dilation: list[int], groups: int) -> Any:
    """`conv_by_image` in ONNX; called while a graph is written."""
    from onnx import TensorProto, helper
    from onnxscript import opset20

    convolved = helper.make_node(
        "Conv",
        ["batch", "kernel"],
        ["made"],
        group=groups,
        strides=list(stride),
        pads=[*padding, *padding],
        dilations=list(dilation),
    )
    unsqueeze, squeeze = (
        helper.make_node(*names)
        for names in (("Unsqueeze", ["one", "axis"], ["batch"]), ("Squeeze", ["made", "axis"], ["found"]))
    )
    inputs, outputs = (
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names]
        for names in (("one", "kernel"), ("found",))
    )
    axis = helper.make_tensor("axis", TensorProto.INT64, [1], [0])
    body = helper.make_graph([unsqueeze, convolved, squeeze], "one_image", inputs, outputs, [axis])
    return opset20.Scan(x, weight, body=body, num_scan_inputs=2)


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
    proto = _program_to_onnx(module_to_program(module, (channels, height, width)), "output")
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
