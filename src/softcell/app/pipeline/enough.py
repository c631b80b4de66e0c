"""The fewest images that a run can do with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from softcell.data.dataset import TEST_FRACTION
from softcell.errors import UserError

if TYPE_CHECKING:  # it says how many images are needed, too
    from softcell.app.pipeline.inspect import Inspection

LEAST_TRAINING = 6
"""Of which a tenth is an image: so many are held back to be measured on, by searches and by trainings."""


def num_tested(images: int, classes: int) -> int:
    """How many of `images` are held out where there is no test set, as `softcell.data.dataset` does."""
    return max(round(TEST_FRACTION * images), classes)


def least_images(classes: int) -> int:
    """How many images must be there in all, where there is no test set."""
    images = LEAST_TRAINING
    while images - num_tested(images, classes) < LEAST_TRAINING:
        images += 1
    return images


def check_enough(inspection: Inspection) -> None:
    """Raises UserError, which says how many images to add, where a split would get none."""
    images, classes = inspection.num_train, len(inspection.train)
    least, which = (LEAST_TRAINING, "training images") if inspection.test else (least_images(classes), "images")
    if images >= least:
        return
    why = "" if inspection.test else f"{num_tested(images, classes)} of them would be for testing, and "
    raise UserError(
        f"a run with {classes} classes needs at least {least} {which}, but {inspection.source} has {images} "
        f"({why}a tenth of the training images is held back to be measured on): add {least - images} or more; to learn "
        "something, dozens of each class"
    )
