"""Zero-cost proxies: scores of untrained networks, by which architectures are compared without training.

`score_untrained` scores a network, `score` anything that maps images to logits, such as a supernet under a mix. θ are
the weights, L is the mean cross-entropy of one batch, g = ∂L/∂θ, H the Hessian of L, f(x) the logits of an image.

naswot     log |det K|, K_ij = how many ReLUs treat images i and j the same (Mellor et al., ICML 2021,
           arXiv:2006.04647)
jacob_cov  −Σ_i log(v_i + k) + 1 / (v_i + k), k = 1e-5, v the eigenvalues of the correlations between the images'
           gradients ∂ Σ f / ∂x (the first version of the same paper)
synflow    Σ θ · ∂R/∂θ, R = Σ logits of the network of |θ| for an image of ones (Tanaka et al., NeurIPS 2020,
           arXiv:2006.05467)
grad_norm  Σ over layers of ‖g‖ (Abdelfattah et al., ICLR 2021, arXiv:2101.08134)
snip       Σ |θ · g| (Lee et al., ICLR 2019, arXiv:1810.02340)
grasp      −Σ θ · (H g) (Wang et al., ICLR 2020, arXiv:2002.07376)
fisher     Σ over channels of 1/(2N) Σ_n (Σ_positions a · ∂L_n/∂a)², a the outputs of convolutions and linear layers,
           L_n the loss of image n (Theis et al., arXiv:1801.05787; Turner et al., ICLR 2020, arXiv:1906.04113)
zico       Σ over layers of log Σ_θ E|g| / √Var|g| over two halves of the batch (Li et al., ICLR 2023,
           arXiv:2301.11300)
params     the number of parameters
flops      the multiply-adds of one image

Abdelfattah et al. compare networks by SNIP, GraSP, SynFlow and Fisher, which were made for pruning. The last two are
the baselines: a proxy that ranks no better than the size of a network says nothing beyond it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from softcell.spaces.costs import count_module
from softcell.spaces.execution import literal_modules, modules_only

Proxy = Literal[
    "naswot", "jacob_cov", "synflow", "grad_norm", "snip", "grasp", "fisher", "zico", "params", "flops"
]  # fmt: skip
PROXIES: tuple[Proxy, ...] = (
    "naswot", "jacob_cov", "synflow", "grad_norm", "snip", "grasp", "fisher", "zico", "params", "flops",
)  # fmt: skip
SIZES: tuple[Proxy, ...] = ("params", "flops")
"""The baselines; they depend on neither weights nor images."""
SUPERNET_PROXIES = tuple(name for name in PROXIES if name not in SIZES)
"""Those that also score a supernet under a mix, whose size does not depend on the mix."""
JACOBIAN_OFFSET = 1e-5
"""k of `jacob_cov`."""
NEGATIVE_TERMS = 0.01
"""The share of SynFlow's sum that may be negative; noise (S4) and sigmoids (NOS) make it at most 4e-5."""

Forward = Callable[[Tensor], Tensor]
"""Images [n, c, h, w] to logits [n, classes]."""


def score_untrained(network: nn.Module, proxy: Proxy, images: Tensor, labels: Tensor) -> float:
    """The score of an untrained network, larger is better; the network is of no use afterwards.

    images: [n, c, h, w], normalised as for training, of the network's device and dtype. labels: int64 [n]. SynFlow runs
    in float64: its products over all layers leave float32's range.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from softcell.methods.proxies import score_untrained
        >>> network = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
        >>> score_untrained(network, "params", torch.randn(4, 3, 2, 2), torch.arange(4))
        130.0
    """
    if proxy in SIZES:
        cost = count_module(network.to("meta"), (images.shape[1], images.shape[2], images.shape[3]))
        return float(cost.parameters if proxy == "params" else cost.multiply_adds)
    if proxy == "synflow":
        network, images = network.double(), images.double()
    return score(proxy, prepare(network, proxy), network, images, labels)


def prepare(module: nn.Module, proxy: Proxy) -> nn.Module:
    """Sets the mode in which a proxy runs a network or supernet, and for SynFlow replaces its weights θ by |θ|."""
    if proxy != "synflow":
        return module.train()
    for parameter in module.parameters():
        parameter.data.abs_()
    return module.eval()  # a batch of ones has no useful statistics


def score(proxy: Proxy, forward: Forward, module: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The score of what `forward` computes with the weights of `module`, which went through `prepare`.

    images: [n, c, h, w]. labels: int64 [n].
    """
    assert proxy not in SIZES, "sizes are counted by `score_untrained`"
    if proxy == "naswot":
        return naswot(forward, images)
    with modules_only(), torch.enable_grad():  # fused kernels have no second derivatives and call no hooks
        if proxy == "jacob_cov":
            return jacob_cov(forward, images)
        if proxy == "synflow":
            return float(synflow(forward, module, images))
        if proxy == "fisher":
            return float(fisher(forward, module, images, labels))
        of_gradients = {"grad_norm": grad_norm, "snip": snip, "grasp": grasp, "zico": zico}[proxy]
        return float(of_gradients(forward, module, images, labels))


class _ReluCodes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sums over all executed ReLUs, for each pair of images, whether both are active or both inactive: K [n, n]."""

    def __init__(self, images: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernel = torch.zeros(images, images, dtype=torch.float64)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        # ReLU6 is dispatched as hardtanh.
        if func in (torch.ops.aten.relu.default, torch.ops.aten.hardtanh.default):
            code = (output > 0).flatten(1)
            code = code.to(torch.float32 if code.shape[1] < 2**22 else torch.float64)  # where every count is exact
            with torch.autocast(output.device.type, enabled=False):
                active, both = code.sum(1), code @ code.T
            # The ReLUs in which a and b are both inactive: all without a's and b's active ones, plus the common ones.
            inactive = code.shape[1] - active[:, None] - active[None, :] + both
            self.kernel += (both + inactive).double().cpu()
        return output


@torch.no_grad()
def naswot(forward: Forward, images: Tensor) -> float:
    """log |det K| over a batch of images [n, c, h, w]; -inf if no ReLU distinguishes two images.

    As in the released code, every module counts its own ReLUs, even if others read the same map. log |det K| grows with
    the number of ReLUs; counted once per map, cells of one and of six convolutions could have almost the same score.
    """
    codes = _ReluCodes(images.shape[0])
    with literal_modules(), codes:
        forward(images)
    return float(torch.linalg.slogdet(codes.kernel).logabsdet)


def jacob_cov(forward: Forward, images: Tensor) -> float:
    """−Σ_i log(v_i + k) + 1 / (v_i + k) for images [n, c, h, w]; -inf if the logits ignore one of them.

    v: the eigenvalues of the correlations [n, n] between the rows of the Jacobian, ∂ Σ f / ∂x of each image.
    Uncorrelated rows have v = 1; where some images have almost the same row, eigenvalues near 0 lower the score.

    The score is -inf, too, if Σ f does not depend on the images: the sum of a batch after BatchNorm is a constant, so
    the Jacobian of a network whose last cell only adds such maps consists of rounding errors. Their rows are
    uncorrelated, which would be the best score of all.
    """
    x = images.detach().clone().requires_grad_()
    logits = forward(x)
    (jacobian,) = _gradients(logits.sum(), [x], reused=True)
    # Weighted by 1 and -1 in turn, the sum of a batch after BatchNorm does depend on the images.
    signs = 1.0 - 2.0 * (torch.arange(len(logits), device=logits.device) % 2)
    (reference,) = _gradients((logits.sum(1) * signs).sum(), [x])
    if jacobian.norm() <= torch.finfo(x.dtype).eps ** 0.5 * reference.norm():
        return -float("inf")
    # One copy to the host; 1 / (v + k) needs the eigenvalues near 0 to be exact.
    correlations = torch.corrcoef(jacobian.flatten(1).cpu().double())
    if not correlations.isfinite().all():
        return -float("inf")
    v = torch.linalg.eigvalsh(correlations) + JACOBIAN_OFFSET
    return -float((v.log() + 1 / v).sum())


def synflow(forward: Forward, module: nn.Module, images: Tensor) -> Tensor:
    """Σ θ · ∂R/∂θ []; of the images [n, c, h, w] only the shape matters. The parameters must be |θ|.

    No term is negative in networks of sums, products, pools and ReLUs, for which the score was derived. It is NaN if
    negative terms add up to more than `NEGATIVE_TERMS` of the positive ones: the softmax of attention is then saturated
    by products of many layers, and its gradients are rounding errors.
    """
    ones = torch.ones_like(images[:1])
    learned = [p for p in module.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(forward(ones).sum(), learned, allow_unused=True)
    terms = [p.detach() * g for p, g in zip(learned, gradients, strict=True) if g is not None]
    positive, negative = (torch.stack([(sign * term).relu().sum() for term in terms]).sum() for sign in (1, -1))
    return torch.where(negative > NEGATIVE_TERMS * positive, torch.nan, positive - negative)


def grad_norm(forward: Forward, module: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Σ over layers of ‖g‖ []."""
    gradients = _gradients(_loss(forward, images, labels), _weights(module))
    return torch.stack([g.norm() for g in gradients]).sum()


def snip(forward: Forward, module: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Σ |θ · g| []: to first order, by how much the loss changes if one weight after the other is removed."""
    weights = _weights(module)
    gradients = _gradients(_loss(forward, images, labels), weights)
    return torch.stack([(w.detach() * g).abs().sum() for w, g in zip(weights, gradients, strict=True)]).sum()


def grasp(forward: Forward, module: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """−Σ θ · (H g) []: to first order, half the increase of ‖g‖² if all weights shrink at the same rate."""
    weights = _weights(module)
    with sdpa_kernel(SDPBackend.MATH):  # the only attention of PyTorch that has second derivatives
        gradients = _gradients(_loss(forward, images, labels), weights, differentiable=True)
        # The gradient of g̅ · g for constant g̅ = g is H g.
        product = torch.stack([(g.detach() * g).sum() for g in gradients]).sum()
        curved = _gradients(product, weights)
    return -torch.stack([(w.detach() * h).sum() for w, h in zip(weights, curved, strict=True)]).sum()


def fisher(forward: Forward, module: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Σ over channels of 1/(2N) Σ_n (Σ_positions a · ∂L_n/∂a)² []: the cost of removing one channel after the other.

    Maps are the outputs [n, channels, positions] of all convolutions and linear layers, each time one is called.
    """
    maps: list[tuple[Tensor, int]] = []  # with the dimension of channels

    def note(layer: nn.Module, given: tuple[Any, ...], y: Tensor) -> Tensor:
        maps.append((y, 1 if isinstance(layer, nn.Conv2d) else y.ndim - 1))
        return y.clone()  # so that an operation in place does not change the noted map

    hooks = [m.register_forward_hook(note) for m in module.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    try:
        # The gradient of the sum over images, whose n-th row is that of image n.
        x = images.detach().clone().requires_grad_()  # so that maps of frozen layers have a gradient, too
        loss = F.cross_entropy(forward(x), labels, reduction="sum")
    finally:
        for hook in hooks:
            hook.remove()
    gradients = _gradients(loss, [y for y, _ in maps])
    terms = []
    for (y, channel), g in zip(maps, gradients, strict=True):
        sums = (y.detach() * g).movedim(channel, 1).flatten(2).sum(2) if y.ndim > 2 else y.detach() * g
        terms.append(sums.square().sum() / (2 * len(images)))
    return torch.stack(terms).sum()


def zico(forward: Forward, module: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Σ over layers of log Σ_θ E|g| / √Var|g| [], mean and variance over two halves of the batch.

    Weights whose |g| is the same in both halves have no ratio and are left out, and so are layers without any other.
    """
    weights = _weights(module)
    halves = [
        _gradients(_loss(forward, *half), weights)
        for half in zip(images.tensor_split(2), labels.tensor_split(2), strict=True)
    ]
    terms = []
    for pair in zip(*halves, strict=True):
        g = torch.stack(pair).abs()
        mean, deviation = g.mean(0), g.std(0, correction=0)
        total = torch.where(deviation > 0, mean / deviation, 0.0).sum()
        terms.append(torch.where(total > 0, total.log(), 0.0))
    return torch.stack(terms).sum()


def _weights(module: nn.Module) -> list[nn.Parameter]:
    """The weights of layers; biases and the scales of norms, which have one dimension, are not connections."""
    return [p for p in module.parameters() if p.requires_grad and p.ndim > 1]


def _loss(forward: Forward, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(forward(images), labels)


def _gradients(
    y: Tensor, of: Sequence[Tensor], *, differentiable: bool = False, reused: bool = False
) -> tuple[Tensor, ...]:
    """∂y/∂x of every x in `of`, zero where y does not depend on x.

    reused: more gradients of what y is computed from will follow.
    """
    return torch.autograd.grad(
        y, of, retain_graph=reused or None, create_graph=differentiable, allow_unused=True, materialize_grads=True
    )
