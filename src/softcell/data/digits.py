"""The handwritten digits that come with the package; see assets/DIGITS.md."""

from pathlib import Path

import numpy as np

from softcell.data.augment import Augment
from softcell.data.dataset import Dataset, from_arrays
from softcell.errors import UserError

ASSET = Path(__file__).parent / "assets" / "digits.npz"
NUM_TRAIN = 1_347


def load_digits() -> Dataset:
    """1,347 training and 450 test images, 8 x 8 grey; the order is kept, as it tends to separate writers."""
    if not ASSET.is_file():
        raise UserError(f"the package must contain its digits, but {ASSET} is missing; install softcell again")
    with np.load(ASSET, allow_pickle=False) as content:
        pixels, labels = content["images"][:, None], content["labels"].astype(np.int64)
    return from_arrays(
        "digits",
        tuple(str(digit) for digit in range(10)),
        (pixels[:NUM_TRAIN], labels[:NUM_TRAIN]),
        (pixels[NUM_TRAIN:], labels[NUM_TRAIN:]),
        Augment(crop_padding=1),  # a mirrored digit is not a digit
        "UCI Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, CC BY 4.0, doi:10.24432/C50P49",
    )
