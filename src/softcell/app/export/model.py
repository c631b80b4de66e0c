"""A trained network with the facts needed to use it: read from a run, export or ONNX file, applied to image files."""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from softcell.engine import RunFolder, resolve_device
from softcell.engine.runfolder import MANIFEST
from softcell.errors import UserError
from softcell.evaluate.predictions import Forward, ImagePrediction, classify, image_files
from softcell.settings import convert
from softcell.spaces import Inputs, Network, Shape
from softcell.spaces.pretrained import MODEL, read_description
from softcell.trust import trusting

PLAN = "plan.json"
"""The file that marks a folder of `softcell run`."""
FRONT = "front.json"
"""The file with the networks of all budgets, in a folder of `softcell run` with several."""
INPUT, ONNX = "pixels", "model.onnx"
"""Name of the input of ONNX graphs, and of the file of an export."""
BATCHES = (1, 2, 5)
"""Batch sizes at which an exported model is compared with the network."""
TOLERANCE = 1e-4
"""Maximum difference of outputs, relative to the largest one: other libraries sum in a different order."""


@dataclass(frozen=True)
class Model:
    """A network in eval mode on the CPU.

    `mean` and `std` are per channel in 0..1 units. `about` has human-readable facts about its training.
    A picture is scaled to `scaled_to`: all of it if `whole`, otherwise a central part of that aspect ratio. The network
    sees its centre. `output`: `logits` of the classes, or an `embedding` that was learned from them, compared by cosine
    similarity.

    Example:
        >>> import torch
        >>> from softcell.app.export import read_model
        >>> model = read_model("runs/train")
        >>> model.shape, model.output, len(model.classes), model.network.training
        ((1, 8, 8), 'logits', 10, False)
    """

    network: Network
    shape: Shape
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    about: Mapping[str, str]
    output: Literal["logits", "embedding"] = "logits"
    scaled_to: tuple[int, int] | None = None
    whole: bool = False

    def normalised(self) -> nn.Module:
        """The network behind the normalisation: pixels in 0..1 [n, c, h, w] to its output [n, d]."""
        return Normalised(self.network, self.mean, self.std).eval()


class Normalised(nn.Module):
    """(pixels - mean) / std per channel, then the network."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1), persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.network((pixels - self.mean) / self.std)  # type: ignore[no-any-return]


def read_model(folder: str | Path) -> Model:
    """The model of a finished training run, of the folder of `softcell run`, or of an exported folder.

    Example:
        >>> from softcell.app.export import read_model
        >>> model = read_model("runs/train")
        >>> model.classes[:3]
        ('0', '1', '2')
    """
    source = trained_folder(folder)
    description = read_description(source)
    facts = plain_facts(description, source)
    output: Literal["logits", "embedding"] = "embedding" if description.get("task") == "retrieve" else "logits"
    return Model(Network.from_pretrained(source), output=output, **facts)


def plain_facts(description: Mapping[str, Any], source: Path) -> dict[str, Any]:
    """The description of a model as plain numbers and texts of the right types; anything else is a `UserError`.

    These values are written into Python and ONNX files, and a folder may come from anyone.
    """
    data, where = convert(dict, description["data"], f"{source}: data"), f"{source}: data"
    missing = [key for key in ("shape", "classes", "mean", "std") if key not in data]
    if missing:
        raise UserError(f"{where} must have `{missing[0]}`, but does not; export or train the model again")
    shape = convert(tuple[int, ...], data["shape"], f"{where}.shape")
    if len(shape) != 3 or min(shape) < 1:
        raise UserError(f"{where}.shape must be channels, height and width, got {data['shape']!r}")
    mean, std = (convert(tuple[float, ...], data[key], f"{where}.{key}") for key in ("mean", "std"))
    if not len(mean) == len(std) == shape[0] or min(std) <= 0:
        raise UserError(f"{where}.mean and {where}.std must have a number for each of {shape[0]} channels, std above 0")
    scaled_to = convert(tuple[int, ...], data.get("scaled_to", shape[1:]), f"{where}.scaled_to")
    if len(scaled_to) != 2 or scaled_to[0] < shape[1] or scaled_to[1] < shape[2]:
        raise UserError(f"{where}.scaled_to must be a height and a width not below {shape[1:]}, got {scaled_to}")
    classes = convert(tuple[str, ...], data["classes"], f"{where}.classes")
    about = convert(dict, description.get("about", {}), f"{source}: about")
    for key, value in about.items():
        convert(str, value, f"{source}: about.{key}")
    for text in (*classes, *about, *about.values()):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"{source}: names and facts must be valid Unicode, got {text[:80]!r}") from None
    whole = convert(bool, data.get("whole", False), f"{where}.whole")
    return {
        "shape": shape,
        "classes": classes,
        "mean": mean,
        "std": std,
        "about": about,
        "scaled_to": scaled_to,
        "whole": whole,
    }


def trained_folder(folder: str | Path) -> Path:
    """The folder with the weights: `folder`, or the training run inside a folder of `softcell run`.

    Without weights, a `UserError` explains how to get them.

    Example:
        >>> from softcell.app.export import trained_folder
        >>> str(trained_folder("runs/train"))
        'runs/train'
    """
    path = Path(folder)
    if (path / MODEL).is_file():
        return path
    parts = (path / PLAN, path / "train" / MANIFEST)
    is_whole = not (path / MANIFEST).is_file() and any(part.is_file() for part in parts)
    if (path / FRONT).is_file() and (path / PLAN).is_file():
        parts_of_front = sorted(str(file.parent) for file in path.glob(f"*/{PLAN}"))
        raise UserError(
            f"{path} has one network per budget; name the folder of one of them: {', '.join(parts_of_front)}"
        )
    inner = path / "train" if is_whole else path
    if is_whole and not (inner / MANIFEST).is_file():
        raise UserError(
            f"only a trained network can be used, but the run in {path} has not started its training yet; "
            f"{_quoted('softcell', 'run', '--resume', path)} resumes it"
        )
    manifest = RunFolder.open(inner).manifest
    kind, status = manifest["kind"], manifest["status"]
    if kind == "search":
        raise UserError(
            f"only a trained network can be used, but {path} is a search; train it first: "
            f"{_quoted('softcell', 'train', path)}"
        )
    if kind == "train" and status != "finished":
        command = "run" if is_whole else "train"
        raise UserError(
            f"only a finished training run can be used, but the one in {inner} has the status {status!r}; "
            f"{_quoted('softcell', command, '--resume', path)} resumes it"
        )
    return inner


def _quoted(*words: str | Path) -> str:
    """A command line to copy."""
    return f"`{shlex.join(map(str, words))}`"


def sample_pixels(shape: Shape, batch: int) -> Tensor:
    """Pixels in 0..1 [batch, *shape], always the same."""
    return torch.rand(batch, *shape, generator=torch.Generator().manual_seed(batch))


def check_equal(name: str, expected: Tensor, found: Tensor) -> float:
    """The largest difference relative to the largest output; raises if it is more than rounding."""
    if expected.shape != found.shape:
        raise RuntimeError(
            f"{name} has an output of shape {tuple(found.shape)}, but the network one of {tuple(expected.shape)}"
        )
    scale = max(float(expected.abs().max()), 1e-6)
    difference = float((expected - found).abs().max()) / scale
    # In this form NaN is rejected too.
    if not difference <= TOLERANCE:
        raise RuntimeError(
            f"{name} differs from the network by {difference:.1e} of the largest output at batch size "
            f"{len(expected)}; at most {TOLERANCE:g} is rounding"
        )
    return difference


def onnx_session(file: Path, *, threads: int = 0) -> Any:
    """An onnxruntime session for a file, on the CPU; threads: 0 for all cores."""
    runtime = need_package("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # only errors
    try:
        # Read here, so that an unreadable file is an OSError with the system's own reason.
        return runtime.InferenceSession(file.read_bytes(), options, providers=["CPUExecutionProvider"])
    except OSError as error:
        raise UserError(f"{file} must be an ONNX file, but cannot be read: {error.strerror or error}") from error
    except Exception as error:  # onnxruntime has a class for each of a dozen reasons, without a common base
        raise UserError(f"{file} must be an ONNX file, but onnxruntime cannot load it: {str(error)[:200]}") from error


def check_packages() -> None:
    """Raises if a package for writing or checking ONNX is not installed."""
    for package in ("onnxscript", "onnxruntime"):
        need_package(package)


def need_package(package: str) -> Any:
    try:
        with quiet_exporters():
            return __import__(package)
    except ImportError as error:
        raise UserError(
            f"ONNX needs the package {package}, which is not installed: pip install 'softcell[onnx]'"
        ) from error


@contextlib.contextmanager
def quiet_exporters() -> Iterator[None]:
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


@dataclass(frozen=True, slots=True)
class ImageClassifier:
    """A trained model that is ready to classify image files.

    Example:
        >>> from softcell.app.export import read_classifier
        >>> classifier = read_classifier("runs/train")
        >>> classifier.shape, classifier.inputs.classes[:3]
        ((1, 8, 8), ('0', '1', '2'))
    """

    forward: Forward
    shape: Shape
    inputs: Inputs

    def classify(self, files: Sequence[Path], top: int = 3) -> Iterator[ImagePrediction]:
        """The `top` most likely classes of every file, read and classified in small batches."""
        return classify(self.forward, files, self.shape, self.inputs, top=top)


def predict(
    run: str | Path,
    images: str | Path | Sequence[str | Path],
    *,
    top: int = 3,
    device: str = "auto",
    trust: bool = False,
) -> list[ImagePrediction]:
    """The `top` most likely classes of image files; a folder means all images below it.

    run: a finished training run, a folder of `softcell run`, an exported folder, or an ONNX file of `softcell export`.
    trust: run plugins that the folder names.

    Example:
        >>> from PIL import Image
        >>> from softcell.app.export import predict
        >>> Image.new("L", (8, 8), 200).save("grey.png")
        >>> (found,) = predict("runs/train", "grey.png", top=2)
        >>> found.file.name, len(found.classes), found.probabilities[0] >= found.probabilities[1]
        ('grey.png', 2, True)
    """
    given = list(images) if isinstance(images, Iterable) and not isinstance(images, str) else [images]
    strange = next((one for one in given if not isinstance(one, str | Path)), None)
    if strange is not None:
        raise UserError(
            f"images must be files or folders, but got {type(strange).__name__}; for arrays and tensors use "
            "softcell.api.Network.from_pretrained(RUN)"
        )
    files = image_files(given)
    with trusting(trust):
        classifier = read_classifier(run, device)
    return list(classifier.classify(files, top))


def read_classifier(run: str | Path, device: str = "auto") -> ImageClassifier:
    """The model of a training run, of a folder of `softcell run`, of an exported folder or of an ONNX file.

    An exported folder that has only `model.onnx` is read through it. ONNX files run on the CPU.

    Example:
        >>> import torch
        >>> from softcell.app.export import read_classifier
        >>> read_classifier("runs/train").forward(torch.rand(5, 1, 8, 8)).shape
        torch.Size([5, 10])
    """
    path = Path(run)
    if path.suffix.lower() == ".onnx":
        return _from_onnx(path)
    if (path / ONNX).is_file() and not any((path / name).is_file() for name in (MODEL, MANIFEST)):
        return _from_onnx(path / ONNX)
    model = read_model(path)
    if model.output != "logits":
        raise _no_classes(path)
    target = resolve_device(device)
    network = model.normalised().to(target)
    return ImageClassifier(lambda pixels: network(pixels.to(target)), model.shape, inputs_of(model))


def inputs_of(model: Model) -> Inputs:
    return Inputs(model.classes, model.mean, model.std, model.scaled_to, model.whole)


def _from_onnx(file: Path) -> ImageClassifier:
    session = onnx_session(file)
    known = session.get_modelmeta().custom_metadata_map
    if "seen_classes" in known:
        raise _no_classes(file)
    data = {key: _parsed(file, key, known[key]) for key in ("shape", "classes", "mean", "std") if key in known}
    data |= {key: _parsed(file, key, known[key]) for key in ("scaled_to", "whole") if key in known}
    facts = plain_facts({"data": data}, file)
    output = session.get_outputs()[0].name

    def forward(pixels: Tensor) -> Tensor:
        return torch.from_numpy(session.run([output], {INPUT: pixels.numpy()})[0])

    inputs = Inputs(*(facts[key] for key in ("classes", "mean", "std", "scaled_to", "whole")))
    return ImageClassifier(forward, facts["shape"], inputs)


def _parsed(file: Path, key: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{file}: `{key}` in the metadata must be JSON, got {text[:80]!r}; export again") from error


def _no_classes(source: Path) -> UserError:
    return UserError(
        f"only a classifier has classes to predict, but {source} was trained for retrieval and returns embeddings; "
        "`softcell export --to python` writes a predict.py that sorts images by their similarity"
    )
