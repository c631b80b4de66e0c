"""A folder of images in any order, without classes: for objectives that need no labels."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from softcell.data.augment import Augment
from softcell.data.dataset import Dataset, statistics
from softcell.data.decode import SUFFIXES, read_header
from softcell.data.folder import Scan, choose_size, images_of, is_split
from softcell.errors import UserError

MEMORY_LIMIT = 4 * 1024**3


def load_unlabelled(root: Path, image_size: int | None, memory_limit: int = MEMORY_LIMIT) -> Dataset:
    """All images below `root`, however deep; where it has a train/ with classes, those below that alone.

    Sizes and colours are chosen as for a folder with classes. There is one class, and no test set.
    """
    top = root / "train" if is_split(root) else root
    names = []
    for folder, inner, files in os.walk(top):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        names += [
            str((Path(folder) / name).relative_to(top))
            for name in sorted(files)
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES
        ]
    if len(names) < 2:
        raise UserError(
            f"a folder to learn from must hold at least 2 images ({', '.join(sorted(SUFFIXES))}), but {root} holds "
            f"{len(names)}"
        )
    part = Scan(top, ("image",), tuple(names), np.zeros(len(names), np.int64))
    headers = [read_header(top / name) for name in names]
    channels = 1 if all(header.grey for header in headers) else 3
    if image_size is None:
        size, note = choose_size([(header.height, header.width) for header in headers])
    else:
        size, note = (image_size, image_size), f"scaled and centre-cropped to {image_size}x{image_size}"
    resident = len(names) * channels * size[0] * size[1] <= memory_limit
    images = images_of(part, channels, size, size, is_test=False, resident=resident)
    mean, std = statistics(images)
    return Dataset(
        root.name,
        part.classes,
        images,
        None,
        mean,
        std,
        Augment(crop_padding=min(size) // 8, flip=True),
        f"{len(names)} images below {root.name}, without labels; {note}",
    )
