"""The auxiliary tower of DARTS evaluation networks: a second classifier at 2/3 of the depth, for training only."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from softcell.nn.norm import BatchNorm2d


def quarters(x: Tensor) -> Tensor:
    """Adaptive average pooling of [n, c, h, w] to [n, c, 2, 2], middle rows and columns of odd sizes counted twice.

    torch's own has no repeatable gradient on CUDA.
    """
    height, width = x.shape[-2:]
    rows = [x[:, :, : (height + 1) // 2].mean(2), x[:, :, height // 2 :].mean(2)]
    halves = torch.stack(rows, dim=2)
    return torch.stack([halves[..., : (width + 1) // 2].mean(3), halves[..., width // 2 :].mean(3)], dim=3)


class AuxiliaryHead(nn.Module):
    """ReLU, pooling to 2×2, 1×1 convolution to 128, 2×2 convolution to 768, linear.

    On the sizes of the paper (8×8 on CIFAR, 7×7 on ImageNet) pooling is DARTS's 5×5 window; any other size is pooled
    adaptively to 2×2, so that small images train too. As in DARTS's code, the ImageNet tower has no norm after the
    second convolution.
    """

    def __init__(self, channels: int, num_classes: int, stem: Literal["cifar", "imagenet"]) -> None:
        super().__init__()
        size, stride = (8, 3) if stem == "cifar" else (7, 2)
        self._paper_size = size
        self.window = nn.AvgPool2d(5, stride, 0, count_include_pad=False)
        self.features = nn.Sequential(
            nn.Conv2d(channels, 128, 1, bias=False),
            BatchNorm2d(128),
            nn.ReLU(),
            nn.Conv2d(128, 768, 2, bias=False),
            BatchNorm2d(768) if stem == "cifar" else nn.Identity(),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(768, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.relu()
        is_paper_size = x.shape[-2:] == (self._paper_size, self._paper_size)
        x = self.features(self.window(x) if is_paper_size else quarters(x))
        return self.classifier(x.flatten(1))  # type: ignore[no-any-return]
