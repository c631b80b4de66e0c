"""Full-attention NAS using context auto-regression (Zhou, Wang, Huo, Wang).

    Tables I, II  stage-wise space of self-attention blocks        -> the space `fullattention`, `nn.attention`
    Eq 1          softmax over the candidate blocks of a layer      -> `relax`
    Eq 2-3        bilevel, first order                              -> bilevel steps (`softcell.search.steps`)
    §III-B        the most probable block of each layer             -> the space's rule, `StrongestEach`
    §III-C        context auto-regression: masks, decoder, L1       -> `softcell.nn.objective`, for any method and space
    §III-D        search by it, then fine-tuning on the target task -> `pretrain` (`softcell.search.run`)

Space, objective and phases are separate parts. The search itself is DARTS's relaxation with different settings: logits
start at zero, "an equal amount of attention over all possible operations".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from softcell.methods.base import Regime, SoftmaxMethod, register_method
from softcell.settings import not_negative


@dataclass(frozen=True)
class FullAttentionSettings:
    """`init_scale`: deviation of the normal distribution that logits start from; without phase 1 the paper's ablation
    has random ones (1e-3)."""

    init_scale: float = 0.0

    def __post_init__(self) -> None:
        not_negative("init_scale", self.init_scale)


@register_method
class FullAttention(SoftmaxMethod):
    """Softmax over the blocks of each layer, first by context auto-regression, then on the target task."""

    name: ClassVar[str] = "fullattention"
    about: ClassVar[str] = (
        "full-attention NAS: softmax per layer, bilevel, in two phases: context auto-regression, then the target task"
    )
    regime: ClassVar[Regime] = "bilevel"
    home: ClassVar[str] = "fullattention"
    Settings: ClassVar[type] = FullAttentionSettings
    recipes: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {
            "epochs": 50,
            "weights": {"lr_min": 0.0},
            "architecture": {"lr": 1e-4},
            "pretrain": {"epochs": 20, "architecture_lr": 3e-4},
        },
        "small": {
            "epochs": 4,
            "batch_size": 32,  # many steps: means over neighbours vary little, which running statistics learn slowly
            "weights": {"lr": 0.1, "lr_min": 0.0},
            "architecture": {"lr": 0.02},
            "pretrain": {"epochs": 1, "architecture_lr": 0.04},
        },
    }
