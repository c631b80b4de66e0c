"""A trained network with the facts for its use: how inputs are prepared and what outputs mean."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from softcell.engine import RunFolder
from softcell.engine.runfolder import MANIFEST
from softcell.errors import UserError
from softcell.settings import convert
from softcell.spaces import Network, Shape
from softcell.spaces.pretrained import MODEL, read_description

PLAN = "plan.json"
"""The file that marks a folder of `softcell run`."""
FRONT = "front.json"
"""The file with the networks of all budgets, in a folder of `softcell run` with several."""
BATCHES = (1, 2, 5)
"""Batch sizes at which an exported model is compared with the network."""
TOLERANCE = 1e-4
"""Largest difference of outputs, relative to the largest of them: other libraries sum in another order."""


@dataclass(frozen=True)
class Model:
    """A network in eval mode on the CPU.

    `mean` and `std` are per channel in 0..1 units. `about` has facts about its training, for people to read.
    A picture is scaled to `scaled_to`, all of it if `whole` and else a central part of that aspect; its centre is seen.
    `output`: `logits` of the classes, or an `embedding` that was learnt from them, compared by cosine similarity.

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
    place = trained_folder(folder)
    description = read_description(place)
    facts = plain_facts(description, place)
    output: Literal["logits", "embedding"] = "embedding" if description.get("task") == "retrieve" else "logits"
    return Model(Network.from_pretrained(place), output=output, **facts)


def plain_facts(description: Mapping[str, Any], place: Path) -> dict[str, Any]:
    """The description of a model as plain numbers and texts of the right types; anything else is a `UserError`.

    These values are written into Python and ONNX files, and a folder may come from anybody.
    """
    data, where = convert(dict, description["data"], f"{place}: data"), f"{place}: data"
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
    about = convert(dict, description.get("about", {}), f"{place}: about")
    for key, value in about.items():
        convert(str, value, f"{place}: about.{key}")
    for text in (*classes, *about, *about.values()):
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"{place}: names and facts must be valid Unicode, got {text[:80]!r}") from None
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
    """The folder with the weights: `folder`, or the training inside a folder of `softcell run`.

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
            f"only a finished training can be used, but the one in {inner} has the status {status!r}; "
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
    if not difference <= TOLERANCE:
        raise RuntimeError(
            f"{name} differs from the network by {difference:.1e} of the largest output at batch size "
            f"{len(expected)}; at most {TOLERANCE:g} is rounding"
        )
    return difference
