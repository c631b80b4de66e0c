"""NOS: Neural Operator Search (anonymous submission; "heterogeneous residual block", "attention guided search").

    Eq 2-5    heterogeneous residual block, two tiers                    -> the space `nos` (`softcell.spaces.block`)
    Eq 6      attention transfer from a teacher, for any method          -> `Guided` (`softcell.nn.objective`)
    Eq 7      softmax over all heterogeneous candidates of a connection  -> `relax`
    Eq 8-9    bilevel: L_train + λ L_AT for Θ, L_val + λ L_AT for A       -> bilevel steps (`softcell.search.steps`)
    §3.3      two strongest with a feature, strongest second tier        -> the space's rule, `FeaturePairs`
    A.1       attentions and dynamic convolution                         -> `softcell.nn.calibrate`

Space, search and guidance are separate parts. The search itself is DARTS's relaxation ("we adopt the DARTS method",
§3.3) with different settings; the other two are new.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from softcell.methods.base import Regime, SoftmaxMethod, register_method
from softcell.settings import not_negative


@dataclass(frozen=True)
class NosSettings:
    """`init_scale`: deviation of the normal distribution that A starts from; the paper only says "normal"."""

    init_scale: float = 1e-3

    def __post_init__(self) -> None:
        not_negative("init_scale", self.init_scale)


@register_method
class Nos(SoftmaxMethod):
    """Softmax over features, attentions and kernels of each connection; made to be guided by a teacher."""

    name: ClassVar[str] = "nos"
    about: ClassVar[str] = (
        "NOS: softmax over heterogeneous candidates, bilevel; add --guide TEACHER for attention guidance"
    )
    regime: ClassVar[Regime] = "bilevel"
    home: ClassVar[str] = "nos"
    Settings: ClassVar[type] = NosSettings
    recipes: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {"epochs": 25, "weights": {"lr_min": 0.0}, "architecture": {"lr": 6e-4}},
        "small": {
            "epochs": 6,
            "batch_size": 96,
            "weights": {"lr": 0.1, "lr_min": 0.0},
            "architecture": {"lr": 0.04},
        },
    }
