"""Find a dataset by name or path."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from softcell.data._small_datasets import load_cifar, load_digits, load_imagenet16, load_svhn
from softcell.data.arrays import load_npz
from softcell.data.dataset import Dataset, SomeClasses, check_fixed_size, with_some_classes
from softcell.data.folder import CUB_BOXES, CUB_NAMES, MEMORY_LIMIT, load_cub, load_folder, load_imagenet
from softcell.errors import UserError, nearest

_ROOT_VARIABLE = "SOFTCELL_DATA"

_DESCRIPTIONS = {
    "digits": "1,797 handwritten digits, 8x8 grey, 10 classes; comes with the package",
    "cifar10": "60,000 photographs, 32x32 colour, 10 classes; needs the official archive",
    "cifar100": "60,000 photographs, 32x32 colour, 100 classes; needs the official archive",
    "svhn": "99,289 house-number digits, 32x32 colour, 10 classes; needs train_32x32.mat and test_32x32.mat",
    "imagenet": "1.3 million photographs, 224x224 colour, 1000 classes; needs ILSVRC 2012",
    "cub200": "11,788 photographs of birds, 448x448 colour, 200 classes; needs CUB-200-2011",
    "cub200-boxes": "the same, every image cropped to the square around its official bounding box",
    "imagenet16-120": "157,700 photographs, 16x16 colour, 120 classes; needs the ImageNet16 batches",
}


def datasets() -> dict[str, str]:
    """Known dataset names with one line on each.

    Example:
        >>> from softcell.data import datasets
        >>> "cifar10" in datasets()
        True
    """
    return dict(_DESCRIPTIONS)


def _root(root: str | Path | None) -> Path:
    """The folder of named datasets: the argument, else $SOFTCELL_DATA, else ./data."""
    return Path(root or os.environ.get(_ROOT_VARIABLE) or "data").expanduser()


_kept: list[dict[tuple[str, ...], Dataset]] = []


@contextmanager
def loaded_once() -> Iterator[None]:
    """Within this context a dataset is loaded and decoded once, then reused."""
    # A nested context shares what the outermost one has loaded.
    _kept.append(_kept[-1] if _kept else {})
    try:
        yield
    finally:
        _kept.pop()


def load(
    name_or_path: str | Path,
    root: str | Path | None = None,
    image_size: int | None = None,
    memory_limit: int = MEMORY_LIMIT,
    scaled_to: int | None = None,
    some: SomeClasses | None = None,
) -> Dataset:
    """Load a dataset by its name in `datasets()`, or from a path to an image folder or an .npz file.

    root: the folder of a named dataset or the one above it; $SOFTCELL_DATA or ./data when None. A relative
        path is taken from `root` when that is given.
    image_size: side of the square that images are scaled to (image folders, imagenet and cub200 only).
    scaled_to: side that photographs of cub200 are scaled to before a square of `image_size` is taken out of them.
    memory_limit: bytes of pixels up to which image folders are held in memory; beyond, files are decoded
        each time they are read.
    some: draw this many classes at random; None for all.
    A known name is preferred to a path: a folder called digits is ./digits.

    Example:
        >>> from softcell.data import load
        >>> digits = load("digits")
        >>> digits.name, digits.classes[:3]
        ('digits', ('0', '1', '2'))
    """
    if not _kept:
        return _load(name_or_path, root, image_size, memory_limit, scaled_to, some)
    asked = (name_or_path, root, image_size, memory_limit, scaled_to, some)
    key = (*map(str, asked), os.environ.get(_ROOT_VARIABLE, ""))
    if key not in _kept[-1]:
        _kept[-1][key] = _load(*asked)
    return _kept[-1][key]


def _load(
    name_or_path: str | Path,
    root: str | Path | None,
    image_size: int | None,
    memory_limit: int,
    scaled_to: int | None,
    some: SomeClasses | None,
) -> Dataset:
    if some is not None and str(name_or_path) != "imagenet":  # which decodes only the files it needs
        return with_some_classes(_load(name_or_path, root, image_size, memory_limit, scaled_to, None), some)
    if image_size is not None and image_size < 1:
        raise UserError(f"image_size must be at least 1 pixel, but got {image_size}")
    name = str(name_or_path)
    if scaled_to is not None and name not in CUB_NAMES:
        raise UserError(f"scaled_to applies to cub200 only, but got {scaled_to} for {name}; leave it out")
    if name == "imagenet":
        return load_imagenet(_root(root), image_size, memory_limit, some)
    if name in CUB_NAMES:
        return load_cub(_root(root), image_size, memory_limit, boxed=name == CUB_BOXES, scaled_to=scaled_to)
    if name in _DESCRIPTIONS:
        found = _load_fixed(name, root)
    else:
        path = (Path(root) / name if root is not None else Path(name)).expanduser()
        if path.is_dir():
            return load_folder(path.resolve(), image_size, memory_limit)
        if not path.is_file():
            raise UserError(
                f"a dataset is a known name or an existing path, but got {str(path)!r}; {nearest(name, _DESCRIPTIONS)}"
            )
        if path.suffix.lower() != ".npz":
            raise UserError(
                f"a dataset is a folder of class/image files or an .npz file (numpy.savez), but {path} is neither"
            )
        found = load_npz(path)
    check_fixed_size(name, image_size, found.shape[1:])
    return found


def _load_fixed(name: str, root: str | Path | None) -> Dataset:
    if name == "digits":
        return load_digits()
    if name == "svhn":
        return load_svhn(_root(root))
    if name == "imagenet16-120":
        return load_imagenet16(_root(root))
    return load_cifar(name, _root(root))
