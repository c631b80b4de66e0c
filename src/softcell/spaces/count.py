"""What a network costs: parameters, multiply-adds and bytes, counted on the real module without running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from softcell.arch import Genotype
from softcell.nn.attention import Attention, shifts_only
from softcell.settings import merge
from softcell.spaces.base import Shape, Space
from softcell.spaces.registry import SPACES, build_space


@dataclass(frozen=True, slots=True)
class Cost:
    """`parameters` are learnable numbers; `multiply_adds` those of convolutions and matrix products for one image.

    Example:
        >>> from torch import nn
        >>> from softcell.evaluate import count_module
        >>> count_module(nn.Conv2d(3, 8, 3, bias=False), (3, 10, 10))  # 8 * 3 * 3 * 3 weights at 8 * 8 positions
        Cost(parameters=216, multiply_adds=13824)
    """

    parameters: int
    multiply_adds: int

    @property
    def megabytes(self) -> float:
        """Size of the weights in float32."""
        return self.parameters * 4 / 1e6


@contextmanager
def products_of(module: nn.Module) -> Iterator[Callable[[], int]]:
    """Counts the multiply-adds of what `module` computes within the context; the function given tells them.

    Those of convolutions and matrix products are torch's count; attention over shifted maps tells its own.
    """
    apart: list[int] = []

    def note(layer: nn.Module, given: tuple[Any, ...], y: Tensor) -> None:
        assert isinstance(layer, Attention)
        apart.append(y.shape[0] * layer.uncounted(y.shape[-2], y.shape[-1]))

    hooks = [part.register_forward_hook(note) for part in module.modules() if isinstance(part, Attention)]
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), shifts_only(), counter:
            # Two operations, one multiplication and one addition, are one multiply-add.
            yield lambda: counter.get_total_flops() // 2 + sum(apart)
    finally:
        for hook in hooks:
            hook.remove()


def count_module(network: nn.Module, shape: Shape) -> Cost:
    """Costs of any module that maps one image [1, c, h, w] to logits; the module is not changed.

    Example:
        >>> from torch import nn
        >>> from softcell.evaluate import count_module
        >>> count_module(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), (1, 8, 8))
        Cost(parameters=650, multiply_adds=640)
    """
    was_training = network.training
    network.eval()
    parameter = next(network.parameters())
    image = torch.zeros(1, *shape, device=parameter.device, dtype=parameter.dtype)
    with products_of(network) as products:
        network(image)
    network.train(was_training)
    return Cost(sum(p.numel() for p in network.parameters()), products())


def count_genotype(space: Space, genotype: Genotype, shape: Shape, num_classes: int) -> Cost:
    """Costs of the evaluation network of a genotype, without the auxiliary tower; no memory is spent on weights.

    Example:
        >>> from softcell.arch import notation
        >>> from softcell.evaluate import count_genotype
        >>> from softcell.spaces import build_space
        >>> cell = notation.parse("|nor_conv_3x3~0|+|none~0|none~1|+|none~0|skip_connect~1|none~2|")
        >>> count_genotype(build_space("nb201"), cell, shape=(3, 32, 32), num_classes=10).parameters
        316346
    """
    with torch.device("meta"):
        network = space.network(genotype, shape, num_classes)
    return count_module(network, shape)


def evaluation_scale(data: str) -> str:
    """The name of the training recipe, and of the sizes in `Space.evaluation`, that suit a dataset."""
    if data == "digits":
        return "small"
    return "imagenet" if data in ("imagenet", "cub200", "cub200-boxes") else "cifar"


def evaluation_space(name: str, data: str, settings: Mapping[str, Any] | None = None) -> Space:
    """The space at the size its networks are trained at for good on `data`, with single settings laid over it."""
    return build_space(name, merge(evaluation_sizes(SPACES.get(name), data), settings or {}))


def trained_space(
    name: str, data: str, searched: Mapping[str, Any], settings: Mapping[str, Any] | None = None
) -> Space:
    """`evaluation_space` with what a search's space says beside sizes: nodes, candidates, form of the network.

    searched: settings of the search's space; data: a dataset, or the name of a training recipe.
    """
    kind = SPACES.get(name)
    left = kind.sizes() | kind.search_only
    kept = {key: value for key, value in searched.items() if key not in left}
    return build_space(name, merge(kept, evaluation_sizes(kind, data), settings or {}))


def evaluation_sizes(space: type[Space], data: str, recipe: str | None = None) -> Mapping[str, Any]:
    """Those of `Space.evaluation` for a dataset: under its own name, else those of the recipe that suits it.

    recipe: one that was asked for goes before both.
    """
    own: Mapping[str, Any] = space.evaluation.get(evaluation_scale(data), {})
    return space.evaluation.get(data, own) if recipe is None else space.evaluation.get(recipe, {})
