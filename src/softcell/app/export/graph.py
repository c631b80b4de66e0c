"""A network as a graph that torch or ONNX runs without its Python code, in float or int8; the batch size stays free.

Convolutions with a kernel per image need more than a translation in ONNX. In torch such a convolution has one group per
image and channel, a number that depends on the batch. ONNX needs a constant number of groups, but accepts the kernel as
an input: a `Scan` runs over the images and convolves each with its own kernel. (Products and sums over the taps need a
graph of hundreds of nodes and twice the time to run, products of matrices over windows seven times that.)

In 8-bit integers a graph is quantised by onnxruntime after the training. Weights are int8 with a scale per output
channel, activations uint8 with a scale per tensor, whose range is the smallest and largest value on some training
images. uint8 activations with int8 weights are what the fast x86 instructions accept; on Arm they are as fast as any
other. Sums and averages stay in float: in 8 bits they lose accuracy, and onnxruntime takes longer for them. Every
quantised tensor is written as a pair of QuantizeLinear and DequantizeLinear, which any runtime can read.
"""

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from softcell.app.export.model import BATCHES, INPUT, Model, check_equal, onnx_session, quiet_exporters, sample_pixels
from softcell.data import Dataset, load
from softcell.data.dataset import content_of
from softcell.data.images import Images
from softcell.engine import RunFolder
from softcell.engine.runfolder import MANIFEST
from softcell.errors import UserError
from softcell.evaluate.measure_onnx import call_of, measure_calls, open_session
from softcell.evaluate.recipe import TrainRecipe
from softcell.evaluate.train import parts_of
from softcell.files import atomic_write_bytes, atomic_write_text
from softcell.settings import build
from softcell.spaces import Shape

OPSET = 20
"""Version of the operators; `scan` takes its own from the module of the same version."""
CALIBRATION = 256
"""Number of training images used to calibrate activation ranges."""
MAX_MEASURED = 2000
"""Maximum number of images on which both networks are compared. Nothing is selected by the result."""
BATCH = 32
QUANTISED = ("Conv", "Gemm", "MatMul", "Relu", "MaxPool", "Concat")
"""Operators that compute in 8 bits."""
SAMPLES = 51


def _to_program(model: Model) -> ExportedProgram:
    """pixels in 0..1 [batch, c, h, w] to `model.output` [batch, d], for any batch."""
    return module_to_program(model.normalised(), model.shape)


def module_to_program(module: nn.Module, shape: Shape) -> ExportedProgram:
    """A module in eval mode on images of `shape` (c, h, w), for any batch."""
    # Two images: torch treats a batch of one as a constant.
    example = sample_pixels(shape, 2)
    with torch.no_grad(), quiet_exporters():
        return torch.export.export(module, (example,), dynamic_shapes=({0: Dim("batch", min=1)},))


def write_program(model: Model, file: Path) -> None:
    """Writes the program through memory, since `torch.export.save` aborts the process on a full disk."""
    buffer = io.BytesIO()
    with quiet_exporters():
        torch.export.save(_to_program(model), buffer)
    atomic_write_bytes(file, buffer.getvalue())


def check_program(file: Path, model: Model) -> float:
    """Loads the file and returns the largest relative difference from the network.

    Loading unpickles, so this is only for files that were just written.
    """
    with quiet_exporters():
        found = torch.export.load(io.BytesIO(file.read_bytes())).module()
    with torch.no_grad():
        return max(
            check_equal(file.name, model.normalised()(pixels), found(pixels))
            for pixels in (sample_pixels(model.shape, batch) for batch in BATCHES)
        )


def write_onnx(model: Model, file: Path) -> None:
    """Writes an ONNX file with the weights; class names, mean, std and facts are in its metadata."""
    proto = program_to_onnx(_to_program(model), model.output)
    set_metadata(proto, metadata_of(model))
    atomic_write_bytes(file, proto.SerializeToString())


def program_to_onnx(program: ExportedProgram, output: str) -> Any:
    """The `onnx.ModelProto` of a program, without the exporter's notes on each node.

    Those are a tenth of a small file, and they have paths of this machine.
    """
    with torch.no_grad(), quiet_exporters():
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

    x [1, n·g·i, h, w]; weight [n·g·o, i, kh, kw]; returns [1, n·g·o, h', w'] for g groups per image.
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


@dataclass(frozen=True, slots=True)
class CalibrationData:
    """Images of the data that a network was trained on: some for calibration, others for measuring.

    `measured` are indices of `others`, images that the network has not learned from. They are of the `split` "holdout",
    the training images held out of its training, or "test" if there are none; None without either.
    """

    train: Images
    calibration: Tensor
    others: Images | None
    measured: Tensor
    split: str


@dataclass(frozen=True, slots=True)
class Quantised:
    """An int8 graph compared with its float one, measured on the same images.

    `split`: "holdout" for training images that the training held out, "test" where it held out none. `accuracy` and
    `agreement` are shares: of right classes, and of images with the same class from both graphs; None without images.
    `difference` is the largest difference of logits relative to the largest one. `bytes` are the sizes of the files;
    `milliseconds` are medians for one image on one CPU thread of this machine.

    Example:
        >>> from softcell.app.export import Quantised
        >>> made = Quantised("holdout", 135, 256, (0.96, 0.95), 0.99, 0.03, (800_000, 300_000), (0.5, 0.4))
        >>> made.to_dict()["accuracy"]
        {'float': 0.96, 'int8': 0.95}
    """

    split: str
    images: int
    calibration_images: int
    accuracy: tuple[float, float] | None
    agreement: float | None
    difference: float | None
    bytes: tuple[int, int]
    milliseconds: tuple[float, float]

    def to_dict(self) -> dict[str, Any]:
        """The content of `model-int8.json`."""

        def both(pair: tuple[float, float] | None) -> dict[str, float] | None:
            return None if pair is None else {"float": pair[0], "int8": pair[1]}

        return {
            "quantisation": "static QDQ: uint8 activations per tensor (min-max), int8 weights per channel",
            "calibration_images": self.calibration_images,
            "split": self.split,
            "images": self.images,
            "accuracy": both(self.accuracy),
            "agreement": self.agreement,
            "largest_difference": self.difference,
            "bytes": both(self.bytes),
            "milliseconds_per_image": both(self.milliseconds),
            "milliseconds_measured_with": "onnxruntime, batch 1, 1 CPU thread",
        }


def check_quantisable(model: Model) -> None:
    """Raises if the network has no accuracy to compare."""
    if model.output != "logits":
        raise UserError(
            "only classifiers are exported to onnx-int8, where accuracy shows what was lost, but this network was "
            "trained for retrieval; export it with --to onnx"
        )


def calibration_data(
    source: Path, model: Model, *, data: str | None, data_root: str | None, calibration: int
) -> CalibrationData:
    """The images of the training run in `source`, or those named by `data` and `data_root`, in its own splits."""
    if calibration < 1:
        raise UserError(f"`calibration >= 1` must hold, the number of training images, but got {calibration}")
    if (source / MANIFEST).is_file():
        manifest = RunFolder.open(source).manifest
        recipe, known = build(TrainRecipe, manifest["recipe"], f"{source}: recipe"), manifest["results"]["data"]
        named = (data or recipe.data, data_root or recipe.data_root, recipe.image_size)
        dataset = load(*named, scaled_to=recipe.scaled_to)
        parts = parts_of(dataset, recipe)
    elif data is not None:
        _, height, width = model.shape
        dataset, known = load(data, data_root), {}
        if dataset.shape != model.shape and height == width:
            dataset = load(data, data_root, height)
        parts = {"train": torch.arange(len(dataset.train))}
    else:
        raise UserError(
            f"onnx-int8 is calibrated on training images, but {source} is an export and does not say where they are; "
            "pass the training run instead, or --data"
        )
    _check_same(model, dataset, known, source)
    calibrated = _some(parts["train"], calibration)
    if "holdout" in parts:  # leaves the test images to the training run, which reads them once
        return CalibrationData(
            dataset.train, calibrated, dataset.train, _some(parts["holdout"], MAX_MEASURED), "holdout"
        )
    among = torch.arange(0 if dataset.test is None else len(dataset.test))
    return CalibrationData(dataset.train, calibrated, dataset.test, _some(among, MAX_MEASURED), "test")


def _check_same(model: Model, dataset: Dataset, known: dict[str, Any], source: Path) -> None:
    if (dataset.shape, dataset.classes) != (model.shape, model.classes):
        raise UserError(
            f"onnx-int8 needs the images that {source} was trained on, {list(model.shape)} of {len(model.classes)} "
            f"classes, but {dataset.name} has {list(dataset.shape)} and {len(dataset.classes)} classes or other names; "
            "pass the right --data"
        )
    # File times change when a dataset is copied, but its content does not.
    before = {key: value for key, value in known.get("fingerprint", {}).items() if not key.endswith("times")}
    if before and any(content_of(dataset).get(key) != value for key, value in before.items()):
        raise UserError(
            f"onnx-int8 needs the images that {source} was trained on, but those of {dataset.name} have changed since: "
            "test images may have been trained on"
        )


def _some(indices: Tensor, count: int) -> Tensor:
    """At most `count` of the indices, always the same ones, in random order."""
    order = torch.randperm(len(indices), generator=torch.Generator().manual_seed(0))
    return indices[order[:count]]


def write_int8(model: Model, data: CalibrationData, file: Path, record: Path) -> Quantised:
    """Writes the int8 graph and what was measured about it, in its metadata and as JSON in `record`."""
    import onnx

    plain = file.with_name("float.onnx")
    write_onnx(model, plain)
    check_onnx(plain, model)
    quantised_file = file.with_name("int8.onnx")
    _quantise(plain, quantised_file, data)
    proto = onnx.load(quantised_file)
    set_metadata(proto, metadata_of(model))
    atomic_write_bytes(file, proto.SerializeToString())
    # Size and speed are those of this file, which is written again with the results in its metadata.
    found = _compare(model, data, plain, file)
    described = json.dumps(found.to_dict(), indent=2) + "\n"
    set_metadata(proto, {**metadata_of(model), "int8": json.dumps(found.to_dict())})
    atomic_write_bytes(file, proto.SerializeToString())
    atomic_write_text(record, described)
    return found


def _quantise(plain: Path, out: Path, data: CalibrationData) -> None:
    from onnxruntime import quantization as q
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(q.CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._batches = _pixels(data.train, data.calibration)

        def get_next(self) -> dict[str, Any] | None:
            pixels = next(self._batches, None)
            return None if pixels is None else {INPUT: pixels.numpy()}

    inferred = out.with_name("inferred.onnx")
    with _quiet_logging():
        quant_pre_process(plain, inferred, skip_symbolic_shape=True)
        q.quantize_static(
            inferred,
            out,
            Reader(),
            quant_format=q.QuantFormat.QDQ,
            op_types_to_quantize=list(QUANTISED),
            per_channel=True,
            activation_type=q.QuantType.QUInt8,
            weight_type=q.QuantType.QInt8,
        )


def _pixels(images: Images, indices: Tensor) -> Iterator[Tensor]:
    """Batches of pixels in 0..1 [n, c, h, w], as a network is tested on them."""
    for chunk in torch.split(indices, BATCH):
        yield images.fetch(chunk).cpu().float() / 255


def _compare(model: Model, data: CalibrationData, plain: Path, int8: Path) -> Quantised:
    accuracy = agreement = difference = None
    if data.others is not None:
        logits = []
        for file in (plain, int8):
            session = onnx_session(file)
            batches = _pixels(data.others, data.measured)
            logits.append(torch.cat([torch.from_numpy(session.run(None, {INPUT: x.numpy()})[0]) for x in batches]))
        labels = data.others.labels.cpu()[data.measured]
        right = [float((found.argmax(1) == labels).double().mean()) for found in logits]
        accuracy = (right[0], right[1])
        agreement = float((logits[0].argmax(1) == logits[1].argmax(1)).double().mean())
        difference = float((logits[0] - logits[1]).abs().max() / logits[0].abs().max().clamp_min(1e-6))
    calls = [call_of(open_session(file), [1, *model.shape]) for file in (plain, int8)]
    times = [found[len(found) // 2] for found in measure_calls(calls, SAMPLES)]
    sizes = [file.stat().st_size for file in (plain, int8)]
    return Quantised(
        data.split,
        len(data.measured),
        len(data.calibration),
        accuracy,
        agreement,
        difference,
        (sizes[0], sizes[1]),
        (times[0], times[1]),
    )


@contextmanager
def _quiet_logging() -> Iterator[None]:
    """The quantiser logs advice to the root logger."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
