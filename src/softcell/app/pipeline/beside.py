"""The user's own model beside the delivered network: both are measured on the same test images (`--beside`).

The model is an ONNX file or an exported program (.pt2). It takes float32 pixels in 0..1, [n, c, h, w], and returns one
score per class, in the order of the sorted class names; normalisation is part of the model. It takes no part in the
competition: it was probably trained on the images that are held out there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from softcell.app.export.model import onnx_session
from softcell.data.images import Images
from softcell.errors import UserError
from softcell.spaces.teacher import read_program

FORMATS = (".onnx", ".pt2")
BATCH = 64


@dataclass(frozen=True)
class OwnModel:
    """`forward` maps pixels in 0..1, [n, *shape], to scores [n, classes]."""

    file: Path
    forward: Callable[[Tensor], Tensor]
    shape: tuple[int, int, int]

    @torch.no_grad()
    def accuracy(self, images: Images) -> float:
        """The share of `images` whose class has the highest score."""
        correct = 0
        for first in range(0, len(images), BATCH):
            indices = torch.arange(first, min(first + BATCH, len(images)))
            scores = self.scores(images.fetch(indices))
            correct += int((scores.argmax(1) == images.labels[indices]).sum())
        return correct / len(images)

    def scores(self, pixels: Tensor) -> Tensor:
        """Scores [n, classes] of `pixels` uint8 [n, c, h, w]; grey images are repeated for a model of colours."""
        images = (pixels.float() / 255).expand(-1, max(self.shape[0], pixels.shape[1]), -1, -1).contiguous()
        try:
            scores = self.forward(images)
        except Exception as error:  # a foreign model may fail in any way
            reason = " ".join(str(error).split())
            raise UserError(
                f"--beside {self.file} must accept float32 pixels in 0..1 of shape {list(images.shape)}, but failed: "
                f"{reason[:200]}; export it for any batch size"
            ) from error
        if not isinstance(scores, Tensor) or scores.dim() != 2 or scores.shape[0] != len(pixels):
            raise UserError(f"--beside {self.file} must return one row of scores per image, [n, classes]")
        return scores

    @torch.no_grad()
    def check(self, channels: int, side: int | None, num_classes: int) -> float:
        """Raises unless the model fits the images and classes; returns the seconds that it takes for one image.

        side: of the images in pixels; None if they can be resized.
        """
        height, width = self.shape[1:]
        if height != width or side not in (None, height):
            rule = "square images" if side is None else f"the run's images of {side}x{side} pixels"
            raise UserError(f"--beside {self.file} must take {rule}, but takes {height}x{width}")
        if self.shape[0] != channels and channels != 1:
            raise UserError(
                f"--beside {self.file} takes images of {self.shape[0]} channels, but those of the run have {channels}"
            )
        pixels = torch.zeros(BATCH, channels, *self.shape[1:], dtype=torch.uint8)
        self.scores(pixels[:2])
        began = time.perf_counter()
        found = self.scores(pixels).shape[1]
        if found != num_classes:
            raise UserError(f"--beside {self.file} has scores for {found} classes, but the images have {num_classes}")
        return (time.perf_counter() - began) / BATCH


def read_own(path: str | Path) -> OwnModel:
    """The model in a file. An exported program may run code while it is read, so it must be trusted (`--trust`)."""
    file = Path(path).expanduser()
    if file.suffix.lower() not in FORMATS or not file.is_file():
        raise UserError(f"--beside must name an existing file that ends in {' or '.join(FORMATS)}, but got {path}")
    if file.suffix.lower() == ".onnx":
        session = onnx_session(file)
        given, wanted = session.get_inputs()[0], session.get_outputs()[0].name

        def forward(images: Tensor) -> Tensor:
            return torch.from_numpy(session.run([wanted], {given.name: images.numpy()})[0])

        return OwnModel(file, forward, _shape(file, given.shape))
    program, _ = read_program(file, "--beside")
    inputs = [node for node in program.graph.nodes if node.op == "placeholder"]
    own = next((node for node in inputs if node.name in program.graph_signature.user_inputs), None)
    if own is None:
        raise UserError(f"--beside {file} must take images, but has no input")
    return OwnModel(file, program.module(), _shape(file, list(own.meta["val"].shape)))


def _shape(file: Path, sides: list[Any]) -> tuple[int, int, int]:
    """(c, h, w) of a model's input [n, c, h, w]; only n may be of any size."""
    fixed = [side for side in sides[1:] if isinstance(side, int)]
    if len(sides) != 4 or len(fixed) != 3:
        raise UserError(
            f"--beside {file} must take images [n, channels, height, width] of one size, but its input is {sides}"
        )
    channels, height, width = fixed
    return channels, height, width
