"""Small folders of images that can be told apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

MODES = ("RGB", "L", "RGBA", "P", "LA", "1")


def paint(path: Path, label: int, number: int, side: int = 20, mode: str = "RGB") -> None:
    """A noisy image whose brightness depends on its class."""
    pixels = np.random.default_rng((label, number)).integers(0, 60, (side, side + number % 3, 3)).astype(np.uint8)
    pixels[:, :, label % 3] += np.uint8(60 + 50 * label)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).convert(mode).save(path)


def folder(root: Path, count: int = 12, labels: int = 2, side: int = 20) -> Path:
    """`root`/class-0/0.png ..."""
    for label in range(labels):
        for number in range(count):
            paint(root / f"class-{label}" / f"{number}.png", label, number, side)
    return root
