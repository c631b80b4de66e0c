"""DARTS: Differentiable Architecture Search (Liu, Simonyan, Yang; ICLR 2019, arXiv:1806.09055).

    Eq 2   o(x) = Σ_k softmax(α)_k · o_k(x)              -> `relax`
    Eq 3-4 min_α L_val(w*(α), α), w* = argmin_w L_train   -> bilevel steps (`softcell.search.steps`)
    Eq 7-8 second order by a finite difference            -> regime `unrolled` (`softcell.search.steps`)
    §2.4   two strongest inputs per node, none excluded   -> the DARTS space's rule, `TopInputs(2)`

The weights of a node are normalised per edge, so edges compete only at derivation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from softcell.methods.base import Regime, SoftmaxMethod, register_method


@dataclass(frozen=True)
class DartsSettings:
    """`init_scale`: deviation of the normal distribution that logits start from (1e-3 in the released code)."""

    init_scale: float = 1e-3


@register_method
class Darts(SoftmaxMethod):
    """Softmax over the candidates of each edge; architecture and weights learn from different halves of the data."""

    name: ClassVar[str] = "darts"
    about: ClassVar[str] = "DARTS: softmax relaxation, bilevel (first order; second order with --set regime=unrolled)"
    regime: ClassVar[Regime] = "bilevel"
    Settings: ClassVar[type] = DartsSettings
    recipes: ClassVar[dict[str, dict[str, Any]]] = {
        "paper": {},
        "small": {"epochs": 8, "batch_size": 96, "weights": {"lr": 0.1}, "architecture": {"lr": 0.04}},
    }
