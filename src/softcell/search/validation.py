"""The accuracy of a supernet under one mix, in steps that are recorded where those of the search are.

A pass over the validation split is hundreds of forwards with the same mix. Recorded once, with buffers of its own for
the mix, it costs the host next to nothing in every later epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from softcell.arch import Mix
from softcell.data import Batches
from softcell.engine.capture import MAX_GRAPHS, CapturedStep, Engine, prepare_step
from softcell.engine.distributed import World
from softcell.engine.metrics import Measured, Meter
from softcell.spaces import Supernet


class Validation:
    """Measures a supernet on `held`; `surroundings` is entered around every forward."""

    def __init__(
        self,
        supernet: Supernet,
        held: Batches,
        engine: Engine,
        world: World,
        surroundings: Callable[[], AbstractContextManager[object]],
        notify: Callable[[str], None],
    ) -> None:
        self._supernet, self._held, self._world, self._surroundings = supernet, held, world, surroundings
        self._meter = Meter().to(world.device)
        self._mix: Mix | None = None
        self._kept: dict[Hashable, Mix] = {}
        self._run = prepare_step(self._look, engine, world, notify)

    @torch.no_grad()
    def __call__(self, mix: Mix) -> Measured:
        """Loss and accuracy over all images and all ranks, in evaluation mode, under `mix`."""
        self._supernet.eval()
        self._meter.reset()
        recorded = False
        self._mix, key = mix, mix.signature()
        if isinstance(self._run, CapturedStep) and key is not None:
            recorded = self._own(mix, key)
        size = self._held.batch_size
        for draft in self._held.drafts(0):
            if recorded and draft[0].shape[0] == size:
                self._run(*draft, key=key)
            elif draft[0].shape[0]:  # a rank's part of a short last batch may be empty
                self._look(*draft)
        self._mix = None
        self._supernet.train()
        return self._meter.read(self._world)

    def _own(self, mix: Mix, key: Hashable) -> bool:
        """Puts the mix into the buffers that its recording reads; no recording is begun for more than a few kinds."""
        if key not in self._kept:
            if len(self._kept) >= MAX_GRAPHS:
                return False
            self._kept[key] = mix.copy()  # for good: a recording goes on reading it
        self._kept[key].take(mix)
        self._mix = self._kept[key]
        return True

    def _look(self, *draft: Tensor) -> None:
        batch = self._held.finish(*draft)
        assert self._mix is not None
        with torch.no_grad(), self._surroundings():
            logits = self._supernet(batch.images, self._mix)
        self._meter.judge(logits, batch.labels)


ANEW = "val_accuracy_bn"
"""The accuracy once more, with batch-norm's statistics measured anew for the cell that is validated."""
DOUBTED = 3.0
"""How many times better in training a supernet must be for its accuracy on the validation split to be doubted."""


def doubt(trained: float | None, held: float | None, *, many: bool) -> str | None:
    """What to tell of an accuracy on held-out images that is far below the one in training; None where it is not.

    None: it was not measured. many: whether weights learn in other cells than the one that is validated (samples).

    Seen in NAS-Bench-201 with SNAS and EnTranNAS: 62% in training, and 10%, which is guessing, on other images.
    """
    if trained is None or held is None or trained <= DOUBTED * held:
        return None
    both = f"the supernet is right for {held:.1%} of its validation images, but for {trained:.1%} in training. "
    if many:
        return both + (
            "Its method trains many cells, and BatchNorm's running statistics, gathered over all of them, may not fit "
            "the one that is validated: the figure says little about the search, and what is derived does not depend "
            "on it. "
            "After the last epoch it is measured once more, with BatchNorm recalibrated; --keep best goes by that."
        )
    return both + (
        "Every step of its method trains all candidates, so either the supernet overfits, or BatchNorm's running "
        "statistics lag behind its weights (few steps, or a high learning rate). More images or a smaller "
        "--set weights.lr may help. Comparing seeds by this figure (--keep best) says little."
    )
