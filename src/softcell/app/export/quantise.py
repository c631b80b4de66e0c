"""An ONNX graph in 8-bit integers: static post-training quantisation by onnxruntime.

Weights are int8 with a scale per output channel, activations uint8 with a scale per tensor, whose range is the smallest
and largest value on some training images. uint8 activations with int8 weights are what the fast instructions of x86
take; Arm runs them as fast as any. Sums and averages stay in float: in 8 bits they lose accuracy, and onnxruntime takes
longer for them. Every quantised tensor is written as a pair of QuantizeLinear and DequantizeLinear, which any runtime
can read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softcell.app.export.graph import INPUT, check_onnx, metadata_of, onnx_session, set_metadata, write_onnx
from softcell.app.export.model import Model
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

CALIBRATION = 256
"""Training images whose activations give the ranges."""
MOST_MEASURED = 2000
"""Images on which both networks are compared, if there are more. Nothing is chosen by the result."""
BATCH = 32
QUANTISED = ("Conv", "Gemm", "MatMul", "Relu", "MaxPool", "Concat")
"""Operators that compute in 8 bits."""
SAMPLES = 51


@dataclass(frozen=True, slots=True)
class CalibrationData:
    """Images of the data that a network was trained on: some to calibrate with, others to measure on.

    `measured` are indices of `others`, images that the network has not learned from. They are of the `split` "holdout",
    the training images that its training held out, or, where it held out none, "test"; None without either.
    """

    train: Images
    calibration: Tensor
    others: Images | None
    measured: Tensor
    split: str


@dataclass(frozen=True, slots=True)
class Quantised:
    """An int8 graph beside its float one, measured on the same images.

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
    """Raises for a network that has no accuracy to compare."""
    if model.output != "logits":
        raise UserError(
            "only classifiers are exported to onnx-int8, where accuracy shows what was lost, but this network was "
            "trained for retrieval; export it with --to onnx"
        )


def calibration_data(
    source: Path, model: Model, *, data: str | None, data_root: str | None, calibration: int
) -> CalibrationData:
    """The images of the training in `source`, or those named by `data` and `data_root`, in its own splits."""
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
            "give the training run instead, or --data"
        )
    _check_same(model, dataset, known, source)
    calibrated = _some(parts["train"], calibration)
    if "holdout" in parts:  # leaves the test images to the one measurement of the training
        return CalibrationData(
            dataset.train, calibrated, dataset.train, _some(parts["holdout"], MOST_MEASURED), "holdout"
        )
    among = torch.arange(0 if dataset.test is None else len(dataset.test))
    return CalibrationData(dataset.train, calibrated, dataset.test, _some(among, MOST_MEASURED), "test")


def _check_same(model: Model, dataset: Dataset, known: dict[str, Any], source: Path) -> None:
    if (dataset.shape, dataset.classes) != (model.shape, model.classes):
        raise UserError(
            f"onnx-int8 needs the images that {source} was trained on, {list(model.shape)} of {len(model.classes)} "
            f"classes, but {dataset.name} has {list(dataset.shape)} and {len(dataset.classes)} classes or other names; "
            "give the right --data"
        )
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
