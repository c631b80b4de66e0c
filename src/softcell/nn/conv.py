"""Convolutions and pools: candidates and blocks of DARTS, in ReLU-Conv-BN order, and inverted bottlenecks.

`ConvBNReLU` has the order of NAS-Bench-101. Inverted bottlenecks, in the order convolution, norm, ReLU6, are those of
MobileNetV2 (Sandler et al., CVPR 2018), with squeeze-and-excitation on the expanded width as in MobileNetV3 (Howard et
al., ICCV 2019). `mbconv_e6_k5` expands six-fold and has a 5×5 kernel; `_se` adds squeeze-and-excitation. Pools have no
weights, so all outgoing edges of a node share one computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.kernels.backend import runs_triton
from softcell.kernels.window_mean import window_mean
from softcell.nn.candidates import Spec, candidate
from softcell.nn.norm import BatchNorm2d


class ReLUFirst(nn.Sequential):
    """A chain that starts with ReLU; a caller that already has max(x, 0) may pass it to save work."""

    def forward(self, x: Tensor, activated: Tensor | None = None) -> Tensor:
        """x, and max(x, 0) if known, both [n, c, h, w]."""
        first, *rest = self
        x = first(x) if activated is None else activated
        for part in rest:
            x = part(x)
        return x


class ReLUConvBN(ReLUFirst):
    """ReLU, k×k convolution without bias, batch-norm: [n, c_in, h, w] to [n, c_out, ⌈h/s⌉, ⌈w/s⌉].

    Example:
        >>> import torch
        >>> from softcell.nn import ReLUConvBN
        >>> ReLUConvBN(8, 16, kernel=3, stride=2)(torch.randn(4, 8, 7, 7)).shape
        torch.Size([4, 16, 4, 4])
    """

    def __init__(self, c_in: int, c_out: int, kernel: int, stride: int = 1, *, affine: bool = True) -> None:
        super().__init__(
            nn.ReLU(),
            nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, bias=False),
            BatchNorm2d(c_out, affine=affine),
        )


class ConvBNReLU(nn.Sequential):
    """k×k convolution, batch-norm, ReLU: the order of NAS-Bench-101."""

    def __init__(self, c_in: int, c_out: int, kernel: int, *, stride: int = 1, affine: bool) -> None:
        conv = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, bias=False)
        super().__init__(conv, BatchNorm2d(c_out, affine=affine), nn.ReLU())


class DilatedDepthwise(nn.Conv2d):
    """A depthwise k×k convolution with dilation 2 and "same" padding.

    Pixels of even and odd rows and columns never mix, so it is an ordinary convolution on four interleaved
    grids (on one of them with stride 2). Libraries are slow at the gradients of dilated depthwise convolutions; on
    the grids they are several times faster. Without gradients, and at odd sizes, it runs as an ordinary convolution.
    """

    def __init__(self, channels: int, kernel: int, stride: int) -> None:
        # Dilation 2: the padding is half of the dilated extent 2(k-1)+1.
        super().__init__(channels, channels, kernel, stride, kernel - 1, dilation=2, groups=channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n, c, height, width = x.shape
        if height % 2 or width % 2 or not torch.is_grad_enabled():
            return super().forward(x)
        half = self.kernel_size[0] // 2
        if self.stride[0] == 2:
            return F.conv2d(x[:, :, ::2, ::2], self.weight, padding=half, groups=c)
        # [n, c, h, w] to the four grids as a batch [4n, c, h/2, w/2], and back.
        rows, columns = height // 2, width // 2
        grids = x.permute(0, 2, 3, 1).reshape(n, rows, 2, columns, 2, c).permute(2, 4, 0, 1, 3, 5)
        y = F.conv2d(grids.reshape(4 * n, rows, columns, c).permute(0, 3, 1, 2), self.weight, padding=half, groups=c)
        y = y.permute(0, 2, 3, 1).reshape(2, 2, n, rows, columns, c).permute(2, 3, 0, 4, 1, 5)
        return y.reshape(n, height, width, c).permute(0, 3, 1, 2)


class DilatedConv(ReLUFirst):
    """ReLU, depthwise k×k with dilation 2, pointwise, batch-norm (`dil_conv`)."""

    def __init__(self, channels: int, kernel: int, stride: int, *, affine: bool) -> None:
        super().__init__(
            nn.ReLU(),
            DilatedDepthwise(channels, kernel, stride),
            nn.Conv2d(channels, channels, 1, bias=False),
            BatchNorm2d(channels, affine=affine),
        )


class SeparableConv(ReLUFirst):
    """ReLU, depthwise, pointwise, batch-norm, applied twice; only the first strides (`sep_conv`)."""

    def __init__(self, channels: int, kernel: int, stride: int, *, affine: bool) -> None:
        super().__init__(
            nn.ReLU(),
            nn.Conv2d(channels, channels, kernel, stride, kernel // 2, groups=channels, bias=False),
            nn.Conv2d(channels, channels, 1, bias=False),
            BatchNorm2d(channels, affine=affine),
            nn.ReLU(),
            nn.Conv2d(channels, channels, kernel, 1, kernel // 2, groups=channels, bias=False),
            nn.Conv2d(channels, channels, 1, bias=False),
            BatchNorm2d(channels, affine=affine),
        )


class FactorisedReduction(nn.Module):
    """ReLU, two 1×1 convolutions of stride 2 on grids shifted by one pixel, concatenated, batch-norm.

    An odd size is padded by one row or column of zeros, so that the output is ⌈h/2⌉ × ⌈w/2⌉ as for every other
    stride-2 operation (DARTS itself fails there).
    """

    def __init__(self, c_in: int, c_out: int, *, affine: bool = True) -> None:
        super().__init__()
        first = c_out // 2  # an odd width gives the second half one channel more
        self.even = nn.Conv2d(c_in, first, 1, stride=2, bias=False) if first else None
        self.odd = nn.Conv2d(c_in, c_out - first, 1, stride=2, bias=False)
        self.norm = BatchNorm2d(c_out, affine=affine)

    def forward(self, x: Tensor, activated: Tensor | None = None) -> Tensor:
        """x, and max(x, 0) if known, both [n, c_in, h, w]."""
        x = F.relu(x) if activated is None else activated
        height, width = x.shape[-2:]
        padded = F.pad(x, (0, width % 2, 0, height % 2)) if height % 2 or width % 2 else x
        # Only the odd grid needs the padding: of 2n - 1 rows the even one has n.
        halves = [self.odd(padded[:, :, 1:, 1:])]
        if self.even is not None:
            halves.insert(0, self.even(x))
        return self.norm(torch.cat(halves, dim=1))  # type: ignore[no-any-return]


def dense_gradient(x: Tensor) -> Tensor:
    """x [n, c, h, w], whose gradient on a GPU is dense and channels-last.

    Gradients of a mean over pixels and of parts of a concatenation are views with gaps or repeats. For those,
    batch-norm and pooling use their slow channels-first kernels, and pass the layout on to everything before them.
    """
    if not (x.is_cuda and x.requires_grad and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return x
    result: Tensor = _DenseGradient.apply(x)  # type: ignore[no-untyped-call]
    return result


class _DenseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.contiguous(memory_format=torch.channels_last)


def concatenated(maps: Sequence[Tensor], readers: int) -> list[Tensor]:
    """Maps of one shape [n, c, h, w], concatenated along channels and channels-last, once for each reader.

    All results are the same memory. Where autograd slices the gradient, which leaves gaps, this copies all slices in
    one pass: the gradient of each map is dense and channels-last.
    """
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in maps)):
        return [_joined(maps)] * readers
    result: tuple[Tensor, ...] = _Concatenated.apply(readers, *maps)  # type: ignore[no-untyped-call]
    return list(result)


class _Concatenated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, readers: int, *maps: Tensor) -> tuple[Tensor, ...]:
        ctx.count = len(maps)
        ctx.set_materialize_grads(False)
        out = _joined(maps)
        return tuple(out.view_as(out) for _ in range(readers))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        known = [gradient for gradient in gradients if gradient is not None]
        if not known:
            return (None,) * (1 + int(ctx.count))
        total: Tensor = sum(known[1:], start=known[0])
        if torch.is_grad_enabled():  # a copy in place could not be differentiated once more
            return None, *torch.chunk(total, ctx.count, dim=1)
        n, channels, height, width = total.shape
        rows = total.permute(0, 2, 3, 1).view(n, height, width, ctx.count, -1)
        parts = total.new_empty(ctx.count, n, height, width, channels // ctx.count)
        to, of = _as_words((parts, rows)) or (parts, rows)
        to.permute(1, 2, 3, 0, 4).copy_(of)
        return None, *(part.permute(0, 3, 1, 2) for part in parts.unbind())


def _joined(maps: Sequence[Tensor]) -> Tensor:
    """Maps [n, c, h, w] concatenated along channels, channels-last."""
    rows = [x.permute(0, 2, 3, 1) for x in maps]
    words = _as_words(rows)
    out = torch.cat(rows, dim=3) if words is None else torch.cat(words, dim=3).view(maps[0].dtype)
    return out.permute(0, 3, 1, 2)


def _as_words(tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """The same memory as 64-bit words, if all tensors allow that: copies with gaps handle one element at a time."""
    size, dtype = 8 // tensors[0].element_size(), tensors[0].dtype
    fits = size > 0 and all(
        x.dtype == dtype
        and x.stride(-1) == 1
        and not any(number % size for number in (x.shape[-1], x.storage_offset(), *x.stride()[:-1]))
        for x in tensors
    )
    return [x.view(torch.int64) for x in tensors] if fits else None


def quarters(x: Tensor) -> Tensor:
    """Adaptive average pooling of [n, c, h, w] to [n, c, 2, 2], middle rows and columns of odd sizes counted twice.

    The gradient of torch's own is not deterministic on CUDA.
    """
    height, width = x.shape[-2:]
    rows = [x[:, :, : (height + 1) // 2].mean(2), x[:, :, height // 2 :].mean(2)]
    halves = torch.stack(rows, dim=2)
    return torch.stack([halves[..., : (width + 1) // 2].mean(3), halves[..., width // 2 :].mean(3)], dim=3)


class AuxiliaryHead(nn.Module):
    """The auxiliary tower of DARTS's evaluation networks: a second classifier, for training only.

    ReLU, pooling to 2×2, 1×1 convolution to 128 channels, 2×2 convolution to 768, linear.

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


class Zero(nn.Module):
    """The `none` candidate as a module; networks never call it."""

    def __init__(self, stride: int) -> None:
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x[:, :, :: self.stride, :: self.stride])


@candidate("none", zero=True, shared=True)
def none(spec: Spec) -> nn.Module:
    return Zero(spec.stride)


@candidate("skip_connect", shared=lambda spec: spec.stride == 1)
def skip_connect(spec: Spec) -> nn.Module:
    if spec.stride == 1:
        return nn.Identity()
    return FactorisedReduction(spec.channels, spec.channels, affine=spec.affine)


@candidate("sep_conv_3x3")
def sep_conv_3x3(spec: Spec) -> nn.Module:
    return SeparableConv(spec.channels, 3, spec.stride, affine=spec.affine)


@candidate("sep_conv_5x5")
def sep_conv_5x5(spec: Spec) -> nn.Module:
    return SeparableConv(spec.channels, 5, spec.stride, affine=spec.affine)


@candidate("sep_conv_7x7")
def sep_conv_7x7(spec: Spec) -> nn.Module:
    return SeparableConv(spec.channels, 7, spec.stride, affine=spec.affine)


@candidate("dil_conv_3x3")
def dil_conv_3x3(spec: Spec) -> nn.Module:
    return DilatedConv(spec.channels, 3, spec.stride, affine=spec.affine)


@candidate("dil_conv_5x5")
def dil_conv_5x5(spec: Spec) -> nn.Module:
    return DilatedConv(spec.channels, 5, spec.stride, affine=spec.affine)


@candidate("conv_7x1_1x7")
def conv_7x1_1x7(spec: Spec) -> nn.Module:
    """A factorised 7×7 convolution, 1×7 then 7×1 (AmoebaNet)."""
    c, s = spec.channels, spec.stride
    return ReLUFirst(
        nn.ReLU(),
        nn.Conv2d(c, c, (1, 7), (1, s), (0, 3), bias=False),
        nn.Conv2d(c, c, (7, 1), (s, 1), (3, 0), bias=False),
        BatchNorm2d(c, affine=spec.affine),
    )


@candidate("nor_conv_1x1")
def nor_conv_1x1(spec: Spec) -> nn.Module:
    return ReLUConvBN(spec.channels, spec.channels, 1, spec.stride, affine=spec.affine)


@candidate("nor_conv_3x3")
def nor_conv_3x3(spec: Spec) -> nn.Module:
    return ReLUConvBN(spec.channels, spec.channels, 3, spec.stride, affine=spec.affine)


KERNELS = (3, 5, 7)
EXPANSIONS = (3, 6)
SQUEEZE = 4


class SqueezeExcite(nn.Module):
    """x ⊙ sigmoid(W2 relu(W1 mean_hw(x))): [n, c, h, w] to the same shape, through c / 4 channels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        hidden = max(1, channels // SQUEEZE)
        self.squeeze, self.excite = nn.Conv2d(channels, hidden, 1), nn.Conv2d(hidden, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.mean(x, dim=(2, 3), keepdim=True)
        return x * torch.sigmoid(self.excite(F.relu(self.squeeze(y))))


def conv_norm(c_in: int, c_out: int, kernel: int, stride: int = 1, *, groups: int = 1, affine: bool) -> nn.Sequential:
    """k×k convolution, norm, ReLU6: [n, c_in, h, w] to [n, c_out, ⌈h/s⌉, ⌈w/s⌉]."""
    conv = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, BatchNorm2d(c_out, affine=affine), nn.ReLU6())


class MBConv(nn.Module):
    """Expand (1×1), filter each channel (k×k), project (1×1); plus the input where width and resolution stay.

    [n, c_in, h, w] to [n, c_out, ⌈h/s⌉, ⌈w/s⌉]
    """

    def __init__(
        self, c_in: int, c_out: int, kernel: int, stride: int, expansion: int, *, se: bool = False, affine: bool = True
    ) -> None:
        super().__init__()
        wide = c_in * expansion
        self.expand = conv_norm(c_in, wide, 1, affine=affine) if expansion > 1 else None
        self.filter = conv_norm(wide, wide, kernel, stride, groups=wide, affine=affine)
        self.squeeze = SqueezeExcite(wide) if se else None
        self.project = nn.Sequential(nn.Conv2d(wide, c_out, 1, bias=False), BatchNorm2d(c_out, affine=affine))
        self.has_shortcut = stride == 1 and c_in == c_out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x if self.expand is None else self.expand(x)
        y = self.filter(y)
        if self.squeeze is not None:
            y = self.squeeze(y)
        y = self.project(y)
        return x + y if self.has_shortcut else y


def name_of(expansion: int, kernel: int, *, se: bool) -> str:
    return f"mbconv_e{expansion}_k{kernel}" + ("_se" if se else "")


def _register(expansion: int, kernel: int, se: bool) -> None:
    @candidate(name_of(expansion, kernel, se=se), widens=True)
    def build(spec: Spec) -> nn.Module:
        return MBConv(spec.c_in, spec.channels, kernel, spec.stride, expansion, se=se, affine=spec.affine)


for _expansion in EXPANSIONS:
    for _kernel in KERNELS:
        for _se in (False, True):
            _register(_expansion, _kernel, _se)


class AveragePool(nn.AvgPool2d):
    """`nn.AvgPool2d` with a correct gradient on every device.

    On CUDA, torch's own is wrong for channels-last inputs with padding (pytorch issue 188344, seen in 2.11), so the
    input is made channels-first there. Windows that neither overlap nor are padded have a kernel of their own
    (`kernels.window_mean`).
    """

    def forward(self, input: Tensor) -> Tensor:
        if self._is_apart(input):
            return window_mean(input, _side(self.stride))
        return super().forward(input.contiguous() if input.is_cuda and self.padding != 0 else input)

    def _is_apart(self, x: Tensor) -> bool:
        """Whether the windows of x [n, c, h, w] neither overlap nor leave out a border, and a kernel serves them."""
        side = _side(self.stride)
        if self.padding != 0 or _side(self.kernel_size) != side or side == 0 or self.divisor_override is not None:
            return False
        if not self.ceil_mode and any(length % side for length in x.shape[-2:]):
            return False
        is_map = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
        return is_map and not torch.compiler.is_compiling() and runs_triton(x)


def _side(size: int | tuple[int, int]) -> int:
    """Of a square window; 0 for others."""
    if isinstance(size, int):
        return size
    return size[0] if len(set(size)) == 1 else 0


_WINDOWS: dict[tuple[int, int, torch.device, torch.dtype], Tensor] = {}


def adaptive_windows(size: int, wanted: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A [wanted, size] with which A @ x @ B.T is adaptive average pooling of x [..., size, size'].

    Row i averages positions ⌊i·size/wanted⌋ to ⌈(i+1)·size/wanted⌉. By products, since torch's own adaptive pooling has
    no deterministic gradient on CUDA. Kept, since copying it each step would stall a GPU.
    """
    key = (size, wanted, device, dtype)
    if key not in _WINDOWS:
        matrix = torch.zeros(wanted, size, dtype=dtype)
        for i in range(wanted):
            first, last = i * size // wanted, -(-(i + 1) * size // wanted)
            matrix[i, first:last] = 1.0 / (last - first)
        _WINDOWS[key] = matrix.to(device)
    return _WINDOWS[key]


def _shares(spec: Spec) -> bool:
    # Batch-norm without scale and shift gives every edge the same result; with them each edge has its own weights.
    return not (spec.pool_norm and spec.affine)


def _with_norm(pool: nn.Module, spec: Spec) -> nn.Module:
    return nn.Sequential(pool, BatchNorm2d(spec.channels, affine=spec.affine)) if spec.pool_norm else pool


@candidate("max_pool_3x3", shared=_shares)
def max_pool_3x3(spec: Spec) -> nn.Module:
    return _with_norm(nn.MaxPool2d(3, spec.stride, 1), spec)


@candidate("avg_pool_3x3", shared=_shares)
def avg_pool_3x3(spec: Spec) -> nn.Module:
    return _with_norm(AveragePool(3, spec.stride, 1, count_include_pad=False), spec)
