"""The classes of image files by the model of a run, of an export, or of an ONNX file that Softcell wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softcell.app.export.graph import INPUT, onnx_session
from softcell.app.export.model import Model, plain_facts, read_model
from softcell.engine import resolve_device
from softcell.engine.runfolder import MANIFEST
from softcell.errors import UserError
from softcell.evaluate.predictions import Forward, ImagePrediction, classify, image_files
from softcell.spaces import Inputs, Shape
from softcell.spaces.pretrained import MODEL
from softcell.trust import trusting

ONNX = "model.onnx"


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
    """The `top` most likely classes of image files; a folder stands for all images below it.

    run: a finished training, a folder of `softcell run`, an exported folder, or an ONNX file of `softcell export`.
    trust: run plugins that the folder names.

    Example:
        >>> from PIL import Image
        >>> from softcell.app.export import predict
        >>> Image.new("L", (8, 8), 200).save("grey.png")
        >>> (found,) = predict("runs/train", "grey.png", top=2)
        >>> found.file.name, len(found.classes), found.probabilities[0] >= found.probabilities[1]
        ('grey.png', 2, True)
    """
    given = [images] if isinstance(images, str | Path) else list(images)
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
    """The model of a training, of a folder of `softcell run`, of an exported folder or of an ONNX file.

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


def _no_classes(place: Path) -> UserError:
    return UserError(
        f"only a classifier has classes to predict, but {place} was trained for retrieval and gives embeddings; "
        "`softcell export --to python` writes a predict.py that sorts images by their similarity"
    )
