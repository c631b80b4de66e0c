"""Networks of fixed architecture: teachers of guided searches, and baselines of NOS's study of single operations.

ResNet-18 for CIFAR: He, Zhang, Ren, Sun, CVPR 2016. PyramidNet with bottlenecks: Han, Kim, Kim: Deep
Pyramidal Residual Networks, CVPR 2017; depth 110 and α = 84 is NOS's teacher (§4.2).

Each is a frozen dataclass of settings that builds a `Classifier`, a network in two halves: `features` returns one map
per resolution, `head` turns the last into logits. `Tapped` turns any module into a frozen teacher.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.errors import UserError, nearest
from softcell.nn.calibrate import Calibration
from softcell.nn.candidates import Spec, get_candidate
from softcell.nn.norm import BatchNorm2d
from softcell.nn.stochastic import DropPath
from softcell.settings import build, positive


class Classifier(nn.Module, ABC):
    """A network that can be trained like a derived one; it drops no paths and has no auxiliary tower."""

    def __init__(self) -> None:
        super().__init__()
        # Training moves the drop-path schedule of every network.
        self.drop_path = DropPath(0.0)

    @abstractmethod
    def features(self, x: Tensor, number: int | None = None) -> list[Tensor]:
        """[n, c, h, w] to one feature map per resolution stage; of the first `number` stages where it is given."""

    @abstractmethod
    def head(self, features: Tensor) -> Tensor:
        """The last feature map to logits [n, classes]."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x)[-1])

    def forward_with_auxiliary(self, x: Tensor) -> tuple[Tensor, None]:
        return self(x), None

    def use_drop_path(self, probability: float) -> None:
        if probability > 0:
            raise UserError(f"a teacher drops no paths: `drop_path = 0` must hold, but got {probability}")


class Architecture(ABC):
    """Settings of a classifier; `small` are those for a laptop."""

    name: ClassVar[str]
    about: ClassVar[str]
    small: ClassVar[Mapping[str, Any]] = {}

    @abstractmethod
    def build(self, in_channels: int, num_classes: int) -> Classifier: ...


class BasicBlock(nn.Module):
    """Two 3×3 convolutions with a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.norm1 = BatchNorm2d(c_out)
        self.second = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.norm2 = BatchNorm2d(c_out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or c_in != c_out:
            self.shortcut = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), BatchNorm2d(c_out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        return F.relu(y + self.shortcut(x))


@dataclass(frozen=True)
class ResNet18(Architecture):
    """Four stages of two basic blocks; `operation`: a calibrating candidate after each of stages 1 to 3 (Table 1)."""

    name: ClassVar[str] = "resnet18"
    about: ClassVar[str] = "ResNet-18 for CIFAR: 4 stages of 2 blocks from 64 channels, 11.17M parameters"
    small: ClassVar[dict[str, Any]] = {"width": 8}

    width: int = 64
    operation: str | None = None

    def __post_init__(self) -> None:
        positive("width", self.width)
        if self.operation is not None and not get_candidate(self.operation).calibrates:
            raise UserError(
                f"`operation` must be an attention or a dynamic convolution, but {self.operation!r} makes features"
            )

    def build(self, in_channels: int, num_classes: int) -> Classifier:
        return ResNet(self, in_channels, num_classes)


class ResNet(Classifier):
    def __init__(self, settings: ResNet18, in_channels: int, num_classes: int) -> None:
        super().__init__()
        widths = [settings.width * 2**stage for stage in range(4)]
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, widths[0], 3, 1, 1, bias=False), BatchNorm2d(widths[0]), nn.ReLU()
        )
        before = widths[0]
        self.stages = nn.ModuleList()
        self.calibrations = nn.ModuleList()
        for stage, width in enumerate(widths):
            stride = 1 if stage == 0 else 2
            self.stages.append(nn.Sequential(BasicBlock(before, width, stride), BasicBlock(width, width, 1)))
            before = width
            if settings.operation is not None and stage < 3:
                self.calibrations.append(get_candidate(settings.operation).build(Spec(width)))
        self.classifier = nn.Linear(widths[-1], num_classes)

    def features(self, x: Tensor, number: int | None = None) -> list[Tensor]:
        x, maps = self.stem(x), []
        for index, stage in enumerate(self.stages[:number]):
            x = stage(x)
            if index < len(self.calibrations):
                module = self.calibrations[index]
                assert isinstance(module, Calibration)
                x = x + module.applied(x, module(x))
            maps.append(x)
        return maps

    def head(self, features: Tensor) -> Tensor:
        return self.classifier(torch.mean(features, dim=(2, 3)))  # type: ignore[no-any-return]


class PyramidBottleneck(nn.Module):
    """Norm first, 1×1, 3×3, 1×1 (four times as wide), norm last; the shortcut pools and pads with zero channels."""

    def __init__(self, c_in: int, width: int, stride: int) -> None:
        super().__init__()
        c_out = 4 * width
        self.norm0 = BatchNorm2d(c_in)
        self.reduce = nn.Conv2d(c_in, width, 1, bias=False)
        self.norm1 = BatchNorm2d(width)
        self.middle = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = BatchNorm2d(width)
        self.expand = nn.Conv2d(width, c_out, 1, bias=False)
        self.norm3 = BatchNorm2d(c_out)
        self.pool: nn.Module = nn.Identity()
        if stride == 2:
            self.pool = nn.AvgPool2d(2, 2, ceil_mode=True, count_include_pad=False)  # as the 3×3, odd sizes round up
        self._added = c_out - c_in

    def forward(self, x: Tensor) -> Tensor:
        y = self.reduce(self.norm0(x))
        y = self.middle(F.relu(self.norm1(y)))
        y = self.norm3(self.expand(F.relu(self.norm2(y))))
        return y + F.pad(self.pool(x), (0, 0, 0, 0, 0, self._added))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class PyramidNet(Architecture):
    """Three stages of (depth - 2) / 9 bottlenecks each; the width grows by `alpha` in equal steps, rounded."""

    name: ClassVar[str] = "pyramidnet"
    about: ClassVar[str] = "PyramidNet-110 with bottlenecks, α = 84: NOS's teacher, 2.5M parameters"
    small: ClassVar[dict[str, Any]] = {"depth": 11, "alpha": 12}

    depth: int = 110
    alpha: int = 84

    def __post_init__(self) -> None:
        positive("alpha", self.alpha)
        if self.depth < 11 or (self.depth - 2) % 9:
            raise UserError(f"`depth = 9n + 2` must hold for some n >= 1 (three stages), but got depth={self.depth}")

    def widths(self) -> list[int]:
        """The width of every bottleneck: 16 + α·k / blocks, rounded."""
        blocks = (self.depth - 2) // 3
        return [round(16 + self.alpha * k / blocks) for k in range(1, blocks + 1)]

    def build(self, in_channels: int, num_classes: int) -> Classifier:
        return Pyramid(self, in_channels, num_classes)


class Pyramid(Classifier):
    def __init__(self, settings: PyramidNet, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(in_channels, 16, 3, 1, 1, bias=False), BatchNorm2d(16))
        widths, before = settings.widths(), 16
        per_stage = len(widths) // 3
        self.stages = nn.ModuleList()
        for stage in range(3):
            blocks = []
            for number, width in enumerate(widths[stage * per_stage : (stage + 1) * per_stage]):
                blocks.append(PyramidBottleneck(before, width, 2 if stage and number == 0 else 1))
                before = 4 * width
            self.stages.append(nn.Sequential(*blocks))
        self.norm = BatchNorm2d(before)
        self.classifier = nn.Linear(before, num_classes)

    def features(self, x: Tensor, number: int | None = None) -> list[Tensor]:
        x, maps = self.stem(x), []
        for stage in self.stages[:number]:
            x = stage(x)
            maps.append(x)
        return maps

    def head(self, features: Tensor) -> Tensor:
        return self.classifier(torch.mean(F.relu(self.norm(features)), dim=(2, 3)))  # type: ignore[no-any-return]


ARCHITECTURES: dict[str, type[Architecture]] = {kind.name: kind for kind in (PyramidNet, ResNet18)}


def get_architecture(name: str) -> type[Architecture]:
    if name not in ARCHITECTURES:
        raise UserError(f"no built-in classifier {name!r}; {nearest(name, ARCHITECTURES)}")
    return ARCHITECTURES[name]


def build_classifier(name: str, settings: Mapping[str, Any], in_channels: int, num_classes: int) -> Classifier:
    """The classifier `name`; settings that are not given keep the paper's values."""
    return build(get_architecture(name), settings, f"classifier {name}").build(in_channels, num_classes)


class Tapped(nn.Module):
    """Any module as a teacher: the outputs of the named submodules, in that order.

    Without names the module itself must return feature maps: by a method `features`, or as its output.
    """

    def __init__(self, module: nn.Module, layers: Sequence[str] = ()) -> None:
        super().__init__()
        self.module, self.layers = module, tuple(layers)
        known = dict(module.named_modules())
        unknown = [name for name in self.layers if name not in known]
        if unknown:
            raise UserError(f"the teacher has no layer {unknown[0]!r}; it has {', '.join(list(known)[1:13])}, ...")
        self.requires_grad_(False)
        self.eval()

    def train(self, mode: bool = True) -> Tapped:
        """A teacher stays in eval mode."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: Tensor, number: int | None = None) -> list[Tensor]:
        """The first `number` maps, else all; built-in networks stop there, others run to their end."""
        maps = self._outputs(images) if self.layers else self._maps(images, number)
        if isinstance(maps, Tensor):
            maps = [maps]
        if not isinstance(maps, list | tuple) or not all(isinstance(m, Tensor) and m.dim() == 4 for m in maps):
            raise UserError(
                "a teacher must return feature maps [n, c, h, w]: by a method `features`, as its output, or from named "
                "layers (guide.layers)"
            )
        return list(maps[:number])

    def _maps(self, images: Tensor, number: int | None) -> object:
        if isinstance(self.module, Classifier):
            return self.module.features(images, number)
        features = getattr(self.module, "features", None)
        return features(images) if callable(features) and not isinstance(features, nn.Module) else self.module(images)

    def _outputs(self, images: Tensor) -> list[object]:
        """The outputs of the named layers; hooks are on the module during this pass only."""
        caught: dict[str, object] = {}

        def catching(name: str) -> Callable[..., None]:
            return lambda module, given, output: caught.__setitem__(name, output)

        handles = [self.module.get_submodule(name).register_forward_hook(catching(name)) for name in self.layers]
        try:
            self.module(images)
        finally:
            for handle in handles:
                handle.remove()
        return [caught.get(name) for name in self.layers]
