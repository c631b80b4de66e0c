"""Make src/softcell/data/assets/digits.npz from the copy of the UCI digits that scikit-learn ships.

    python scripts/make_digits.py

Needs scikit-learn, which softcell itself does not.
"""

from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

ASSET = Path(__file__).parent.parent / "src" / "softcell" / "data" / "assets" / "digits.npz"


def main() -> None:
    digits = load_digits()
    assert digits.images.shape == (1797, 8, 8) and digits.images.min() == 0 and digits.images.max() == 16
    # 16 grey levels of ink to the full range of a byte, the order of the images kept.
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    ASSET.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(ASSET, images=images, labels=digits.target.astype(np.uint8))
    print(f"wrote {len(images)} images to {ASSET}, {ASSET.stat().st_size} bytes")


if __name__ == "__main__":
    main()
