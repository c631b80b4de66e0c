"""Create src/softcell/data/assets/digits.npz from the copy of the UCI digits that ships with scikit-learn.

    python scripts/make_digits.py

Requires scikit-learn, which Softcell itself does not need.
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

ASSET = Path(__file__).parent.parent / "src" / "softcell" / "data" / "assets" / "digits.npz"


def main() -> None:
    digits = load_digits()
    assert digits.images.shape == (1797, 8, 8) and digits.images.min() == 0 and digits.images.max() == 16
    # Scale 16 grey levels to the full range of a byte; keep the order of the images.
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    ASSET.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(ASSET, images=images, labels=digits.target.astype(np.uint8))
    print(f"wrote {len(images)} images to {ASSET}, {ASSET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
