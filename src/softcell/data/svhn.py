"""Street View House Numbers, cropped digits (Netzer et al., 2011), from their two MATLAB files."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from softcell.data.augment import Augment
from softcell.data.dataset import Dataset, from_arrays
from softcell.data.pickles import check_labels
from softcell.errors import UserError

_SITE = "http://ufldl.stanford.edu/housenumbers"


def _read(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Pixels uint8 [N, 3, 32, 32] and labels int64 [N] in 0..9."""
    from scipy.io import loadmat  # slow to import, and only needed here

    if not path.is_file():
        raise UserError(
            f"svhn must be train_32x32.mat and test_32x32.mat, but {path} is missing; fetch it from {_SITE}"
        )
    try:
        content = loadmat(path, variable_names=["X", "y"])
        pixels, labels = np.asarray(content["X"]), np.asarray(content["y"])
    except Exception as error:
        # The reader raises whatever the damaged bytes lead to.
        raise UserError(
            f"an svhn file must be a whole MATLAB 5 file with X and y, but {path} is not "
            f"({type(error).__name__}: {error}); fetch it again from {_SITE}"
        ) from error
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3):
        raise UserError(f"X must be uint8 [32, 32, 3, N], but in {path} it is {pixels.dtype} {list(pixels.shape)}")
    if labels.dtype.kind not in "iu" or labels.size != pixels.shape[3]:
        raise UserError(
            f"y must have one number per image ({pixels.shape[3]}), but in {path} it is {labels.dtype} "
            f"{list(labels.shape)}"
        )
    numbers = labels.reshape(-1).astype(np.int64)
    check_labels(numbers, 1, 10, path)
    return pixels.transpose(3, 2, 0, 1), numbers % 10  # the digit 0 is labelled 10


def load_svhn(root: Path) -> Dataset:
    """`root` is the folder with the two files, or one with a subfolder svhn that has them."""
    folder = root if (root / "train_32x32.mat").is_file() else root / "svhn"
    return from_arrays(
        "svhn",
        tuple(str(digit) for digit in range(10)),
        _read(folder / "train_32x32.mat"),
        _read(folder / "test_32x32.mat"),
        Augment(crop_padding=4),  # Deviation: RobustDARTS also mirrors, but a mirrored digit is not that digit
        f"SVHN cropped digits, Netzer et al. 2011, {_SITE} (for non-commercial use)",
    )
