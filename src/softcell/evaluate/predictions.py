"""Predictions of a trained network for test images and image files, and the image regions they are based on.

`predictions.safetensors`, kept in the run folder for the report, holds for all N test images: `labels` and `predicted`
int32 [N], `confidence` float32 [N] (probability of the predicted class) and `truth` float32 [N] (probability of the
right one); and for the k worst mistakes: `worst` int32 [k] (numbers of the images), `images` uint8 [k, c, h, w] and, if
the last cell's output has more than one position, `heat` float32 [k, h', w'] (Grad-CAM of the predicted class).

`classify` reads image files batch by batch and prepares them like test images, so that a folder may hold any number of
them. A file that cannot be read is part of the result, with the reason, and does not stop the others.

`grad_cam` (Selvaraju et al., 2017) shows which parts of the feature map read by the classifier support a class.
`candidate_cams` computes Grad-CAM of the feature maps of every candidate of one choice of a supernet (IT-NAS, Figure
4). In calibrating cells (NOS), attentions and dynamic kernels have no feature map; the map that they add to their node
is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor

from softcell.arch import Live, Mix, Table, WeightMix
from softcell.data import Batch
from softcell.data.batches import Feeds
from softcell.data.images import SUFFIXES, DecodeError, Images, centre_view, decode
from softcell.engine.distributed import World, sum_
from softcell.engine.metrics import Measured, Meter, sum_dtype
from softcell.errors import UserError
from softcell.files import atomic_write_bytes
from softcell.spaces import Inputs, Network, Shape, Supernet
from softcell.spaces.block import calibrates, watching

PREDICTIONS = "predictions.safetensors"
NUM_WORST = 24
LARGEST_SIDE = 128  # of a stored image: enough to be recognised, small enough to be mailed
BATCH_SIZE = 32  # image files that are decoded and classified together
Forward = Callable[[Tensor], Tensor]
"""Pixels float32 [n, c, h, w] in 0..1, on the CPU, to logits [n, classes]."""


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

    forward: images [n, c, h, w] to logits [n, classes]. Every image 0..`num_images` - 1 must be in exactly one rank's
    batches.
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


@dataclass(frozen=True, slots=True)
class ImagePrediction:
    """The most likely classes of an image file, in descending order; an unreadable file has an `error` instead.

    Example:
        >>> from pathlib import Path
        >>> from softcell.evaluate import ImagePrediction
        >>> found = ImagePrediction(Path("tom.jpg"), ("cat", "dog"), (0.9, 0.1))
        >>> found.classes[0], found.error
        ('cat', None)
    """

    file: Path
    classes: tuple[str, ...] = ()
    probabilities: tuple[float, ...] = ()
    error: str | None = None


def image_files(paths: Iterable[str | Path]) -> list[Path]:
    """The files among `paths`, with any name, and all image files below the folders among them, sorted by name.

    Example:
        >>> from pathlib import Path
        >>> from softcell.evaluate import image_files
        >>> Path("photos/cats").mkdir(parents=True)
        >>> for name in ("cats/tom.jpg", "rex.PNG", "notes.txt"):
        ...     Path("photos", name).touch()
        >>> [file.as_posix() for file in image_files(["photos", "photos/notes.txt"])]
        ['photos/rex.PNG', 'photos/cats/tom.jpg', 'photos/notes.txt']
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            found.append(path)
            continue
        below = len(found)
        for folder, inner, names in os.walk(path):
            inner[:] = sorted(name for name in inner if not name.startswith("."))
            images = (name for name in sorted(names) if os.path.splitext(name)[1].lower() in SUFFIXES)
            found += [Path(folder, name) for name in images if not name.startswith(".")]
        if len(found) == below:
            raise UserError(
                f"a folder must hold images ({', '.join(sorted(SUFFIXES))}), but there are none in {path} or below it"
            )
    return found


def classify(
    forward: Forward,
    files: Sequence[Path],
    shape: Shape,
    inputs: Inputs,
    *,
    top: int = 3,
    batch_size: int = BATCH_SIZE,
) -> Iterator[ImagePrediction]:
    """The `top` most likely classes of every file, in the order of `files`.

    shape: (c, h, w) of the images that the network sees.

    Example:
        >>> from pathlib import Path
        >>> import torch
        >>> from PIL import Image
        >>> from softcell.evaluate import classify
        >>> from softcell.spaces import Inputs
        >>> Image.new("L", (20, 10), 255).save("white.png")
        >>> by_brightness = lambda pixels: torch.stack((pixels, 1 - pixels), 1).mean((2, 3, 4)) * 10
        >>> inputs = Inputs(("bright", "dark"), mean=(0.0,), std=(1.0,))
        >>> for found in classify(by_brightness, [Path("white.png"), Path("lost.png")], (1, 8, 8), inputs, top=1):
        ...     print(found.file, found.classes, found.error)
        white.png ('bright',) None
        lost.png () lost.png cannot be read as an image: No such file or directory
    """
    if top < 1:
        raise UserError(f"`top >= 1` must hold, but got top={top}")
    if shape[0] not in (1, 3):
        raise UserError(
            f"image files have 1 or 3 channels, but this network was trained on images of {shape[0]} channels; call it "
            "on arrays instead: softcell.api.Network.from_pretrained"
        )
    # Threads, because decoders release the interpreter lock.
    with ThreadPoolExecutor() as pool:
        for start in range(0, len(files), batch_size):
            chunk = files[start : start + batch_size]
            read = list(pool.map(lambda file: _read_image(file, shape, inputs), chunk))
            pixels = [found for found in read if isinstance(found, Tensor)]
            answers = iter(_answers(forward, torch.stack(pixels), inputs.classes, top) if pixels else ())
            for file, found in zip(chunk, read, strict=True):
                if isinstance(found, str):
                    yield ImagePrediction(file, error=found)
                else:
                    yield ImagePrediction(file, *next(answers))


def _read_image(file: Path, shape: Shape, inputs: Inputs) -> Tensor | str:
    """The image as uint8 [c, h, w], prepared as in training; a sentence on why it cannot be read."""
    try:
        stored = decode(file, shape[0], inputs.scaled_to or shape[1:], whole=inputs.whole)
    except DecodeError as error:
        cause = error.__cause__
        return f"{file} cannot be read as an image: {getattr(cause, 'strerror', None) or cause}"
    except UserError as error:
        return str(error)
    return centre_view(torch.from_numpy(stored.copy())[None], shape)[0]


@torch.no_grad()
def _answers(
    forward: Forward, pixels: Tensor, classes: Sequence[str], top: int
) -> Iterator[tuple[tuple[str, ...], tuple[float, ...]]]:
    logits = forward(pixels.float() / 255).cpu()
    if logits.shape != (len(pixels), len(classes)):
        raise UserError(
            f"a network must return one output per class, but this one has outputs of shape {list(logits.shape)} for "
            f"{len(pixels)} images and {len(classes)} classes"
        )
    best = logits.double().softmax(1).topk(min(top, len(classes)), dim=1)
    for numbers, chances in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        yield tuple(classes[number] for number in numbers), tuple(chances)


def grad_cam(network: Network, images: Tensor, classes: Tensor) -> Tensor | None:
    """The evidence for a class at each position of the last cell's output, [n, h, w] in 0..1.

    images: [n, c, h', w'], normalised. classes: int64 [n], the class to be explained for each image.
    None if the last cell's output has a single position. A map without positive evidence is all 0.
    """
    assert not network.training, "batch-norm must not mix the images of a batch"
    with torch.enable_grad():
        last = network.features(images)[-1].detach()
        if last.dim() != 4 or last.shape[2] * last.shape[3] < 2:
            return None
        last.requires_grad_()
        scores = network.head(last).gather(1, classes[:, None]).sum()  # images do not mix: one backward pass for all
        (gradient,) = torch.autograd.grad(scores, last)
    return _heat(gradient, last.detach())


class _Watched(Mix):
    """A mix that keeps the outputs of one choice at one site, and their combination."""

    def __init__(self, mix: Mix, site: int, choice: int) -> None:
        self._mix, self._place = mix, (site, choice)
        self.outputs: dict[int, Tensor] = {}
        self.combined: Tensor | None = None

    def live(self, site: int) -> Live | None:
        # Plain weights exist for all candidates, picked or not.
        watched = site == self._place[0] and isinstance(self._mix, WeightMix)
        return None if watched else self._mix.live(site)

    def meet(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> None:
        self._mix.meet(site, choice, self._kept(site, choice, outputs))

    def combine(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> Tensor | None:
        result = self._mix.combine(site, choice, self._kept(site, choice, outputs))
        if (site, choice) == self._place:
            self.combined = result
        return result

    def compete(self, site: int, outputs: Mapping[int, Mapping[int, Tensor | None]]) -> Tensor | None:
        if isinstance(self._mix, WeightMix):
            return super().compete(site, outputs)
        return self._mix.compete(site, {choice: self._kept(site, choice, own) for choice, own in outputs.items()})

    def _kept(self, site: int, choice: int, outputs: Mapping[int, Tensor | None]) -> Mapping[int, Tensor | None]:
        if (site, choice) != self._place:
            return outputs
        for k, x in outputs.items():
            if x is not None and k not in self.outputs:
                # Identity and shared pools give the same tensor to other edges: only the use by this edge counts.
                self.outputs[k] = x.view_as(x)
        return {k: None if x is None else self.outputs[k] for k, x in outputs.items()}


def candidate_cams(
    supernet: Supernet, mix: Mix, site: int, choice: int, images: Tensor, classes: Tensor
) -> dict[int, Tensor]:
    """The evidence for a class at each position of each candidate's output, at one site and choice, [n, h, w] in 0..1.

    images: [n, c, h', w'], normalised. classes: int64 [n]. Candidates that output zeros are skipped. Under plain
    weights, all candidates have the gradient of their weighted sum, up to their own weight, which a map in 0..1 does
    not show; so a candidate of weight 0 has a map too.
    """
    assert not supernet.training, "batch-norm must not mix the images of a batch"
    table = supernet.layout.table(supernet.layout.sites[site])
    if calibrates(table):
        return _calibrating_cams(supernet, mix, table, site, choice, images, classes)
    watched = _Watched(mix, site, choice)
    with torch.enable_grad():
        scores = supernet(images.clone().requires_grad_(), watched).gather(1, classes[:, None]).sum()
        maps = watched.outputs
        if isinstance(mix, WeightMix) and watched.combined is not None:
            gradients = list(torch.autograd.grad(scores, [watched.combined], allow_unused=True)) * len(maps)
        else:
            gradients = list(torch.autograd.grad(scores, list(maps.values()), allow_unused=True))
    return {
        k: _heat(torch.zeros_like(x) if gradient is None else gradient, x.detach())
        for (k, x), gradient in zip(maps.items(), gradients, strict=True)
    }


def _calibrating_cams(
    supernet: Supernet, mix: Mix, table: Table, site: int, choice: int, images: Tensor, classes: Tensor
) -> dict[int, Tensor]:
    """`candidate_cams` where features, attentions and kernels arrive at a node (NOS, Eq 2-5).

    The map of a candidate is what it adds to its node: o(x) of a feature, base ⊙ A of an attention and base ⊛ D of a
    kernel, where base is the sum of the node's features, in both tiers. Its gradient is that of the sum it is added to:
    of base for a feature, which the node's calibrations read too, and of the node's value for the others. The weight,
    one positive number for all of an image, is left out: a map in 0..1 does not show it. Methods that make weights out
    of maps are explained with the weights as they are.
    """
    with torch.enable_grad(), watching(table, site, choice) as watch:
        scores = supernet(images.clone().requires_grad_(), mix).gather(1, classes[:, None]).sum()
        if watch.features is None or watch.value is None:
            return {}  # no feature arrives at the node
        to_features, to_value = torch.autograd.grad(
            scores, [watch.features, watch.value], allow_unused=True, materialize_grads=True
        )
    with torch.no_grad():
        return {k: _heat(to_features if is_feature else to_value, x) for k, (x, is_feature) in watch.added().items()}


def _heat(gradient: Tensor, maps: Tensor) -> Tensor:
    """Grad-CAM [n, h, w] in 0..1 from maps [n, c, h, w] and the gradient of a class's score."""
    importance = gradient.mean(dim=(2, 3), keepdim=True)  # eq. 1: alpha [n, channels, 1, 1]
    heat = torch.relu((importance * maps).sum(dim=1))  # eq. 2
    return heat / heat.amax(dim=(1, 2), keepdim=True).clamp_min(torch.finfo(heat.dtype).tiny)
