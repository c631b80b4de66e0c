"""The predictions of a trained network for every test image, kept in the run folder for the report.

`predictions.safetensors` holds, for all N test images: `labels` and `predicted` int32 [N], `confidence` float32 [N]
(probability of the predicted class) and `truth` float32 [N] (probability of the right one); and for the k worst
mistakes: `worst` int32 [k] (numbers of the images), `images` uint8 [k, c, h, w] and, if the last cell's output has more
than one position, `heat` float32 [k, h', w'] (Grad-CAM of the predicted class).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor

from softcell.data import Batch
from softcell.data.batches import Feeds
from softcell.data.images import Images
from softcell.engine.distributed import World, sum_
from softcell.engine.metrics import Measured, Meter, sum_dtype
from softcell.errors import UserError
from softcell.evaluate.gradcam import grad_cam
from softcell.files import atomic_write_bytes
from softcell.spaces import Network

PREDICTIONS = "predictions.safetensors"
NUM_WORST = 24
LARGEST_SIDE = 128  # of a stored image: enough to be recognised, small enough to be mailed


@dataclass(frozen=True, slots=True)
class Predictions:
    """labels, predicted: int32 [N]. confidence, truth: float32 [N]; see the top of this file."""

    labels: Tensor
    predicted: Tensor
    confidence: Tensor
    truth: Tensor

    def worst(self, count: int) -> Tensor:
        """Numbers of the wrong images with the most confidence in a wrong class; the earlier first in a tie."""
        wrong = torch.nonzero(self.predicted != self.labels).flatten()
        order = torch.argsort(self.confidence[wrong] - self.truth[wrong], descending=True, stable=True)
        return wrong[order[:count]]


@torch.no_grad()
def predict(
    forward: Callable[[Tensor], Tensor], batches: Iterable[Batch], num_images: int, world: World
) -> tuple[Measured, Predictions]:
    """Loss and accuracy of `forward` over all ranks, as from `measure`, and every single prediction.

    Every image 0..`num_images` - 1 must be in exactly one rank's batches.
    """
    meter = Meter(world.device)
    dtype = sum_dtype(world.device)
    table = torch.zeros(num_images, 4, dtype=dtype, device=world.device)
    for batch in batches:
        if batch.labels.shape[0]:  # a rank's share of a short last batch may be empty
            logits = forward(batch.images)
            meter.judge(logits, batch.labels)
            chances = logits.to(dtype).softmax(dim=1)
            confidence, predicted = chances.max(dim=1)
            truth = chances.gather(1, batch.labels[:, None]).squeeze(1)
            table[batch.index] = torch.stack((batch.labels.to(dtype), predicted.to(dtype), confidence, truth), dim=1)
    sum_(table, world)  # the other ranks have 0 for images of this rank
    labels, predicted, confidence, truth = table.cpu().unbind(dim=1)
    return meter.read(world), Predictions(labels.int(), predicted.int(), confidence.float(), truth.float())


def write_predictions(
    folder: Path,
    predictions: Predictions,
    network: Network,
    images: Images,
    feeds: Feeds,
    notify: Callable[[str], None],
) -> None:
    """Writes `predictions.safetensors`; `feeds` must be those of a single process."""
    content = {
        "labels": predictions.labels,
        "predicted": predictions.predicted,
        "confidence": predictions.confidence,
        "truth": predictions.truth,
    }
    worst = predictions.worst(NUM_WORST)
    if len(worst):
        content |= {"worst": worst.int(), "images": _small(images.fetch(worst).cpu())}
        (batch,) = _whole(feeds, images, worst)
        try:
            heat = grad_cam(network, batch.images, predictions.predicted[worst].long().to(batch.images.device))
        except RuntimeError as error:  # a custom network may not be differentiable, which must not fail the training
            heat = None
            notify(f"no Grad-CAM in the report: this network has no gradient of its last cell ({error})")
        if heat is not None and bool(torch.isfinite(heat).all()):
            content["heat"] = heat.float().cpu()
    data = safetensors.torch.save({name: tensor.contiguous() for name, tensor in content.items()})
    atomic_write_bytes(folder / PREDICTIONS, data)


def read_predictions(folder: Path) -> dict[str, Tensor] | None:
    """The tensors of the file; None if there is none. Raises `UserError` for a damaged file."""
    path = folder / PREDICTIONS
    if path.exists() and not path.is_file():
        raise UserError(f"{path} must be a regular file, but is not")
    try:
        found = safetensors.torch.load(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path} must be a readable safetensors file, but is not: {error}") from error
    _check(found, path)
    return found


def _check(found: dict[str, Tensor], path: Path) -> None:
    count = found["labels"].shape if "labels" in found else None
    sound = count is not None and len(count) == 1
    sound = sound and all(not found[name].is_complex() for name in found)
    sound = sound and all(name in found and found[name].shape == count for name in ("predicted", "confidence", "truth"))
    if sound and "worst" in found:
        k, pictures, heat = found["worst"].shape, found.get("images"), found.get("heat")
        sound = len(k) == 1 and pictures is not None and pictures.dim() == 4 and pictures.shape[:1] == k
        sound = sound and pictures is not None and pictures.dtype == torch.uint8 and pictures.shape[1] in (1, 3)
        sound = sound and (heat is None or (heat.dim() == 3 and heat.shape[:1] == k))
        sound = sound and bool(((found["worst"] >= 0) & (found["worst"] < len(found["labels"]))).all())
    if not sound:
        raise UserError(f"{path} does not have the tensors of a run's predictions; train again to get them")


def _whole(feeds: Feeds, images: Images, indices: Tensor) -> list[Batch]:
    """The images, preprocessed as for the network, in one batch."""
    return list(replace(feeds, batch_size=len(indices)).plain(images, indices).epoch(0))


def _small(pixels: Tensor) -> Tensor:
    """uint8 [k, c, h, w] with no side above `LARGEST_SIDE`."""
    largest = max(pixels.shape[2:])
    if largest <= LARGEST_SIDE:
        return pixels
    size = [max(1, round(side * LARGEST_SIDE / largest)) for side in pixels.shape[2:]]
    return F.interpolate(pixels.float(), size=size, mode="area").round().to(torch.uint8)
