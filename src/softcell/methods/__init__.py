"""Search methods: one paper, one file or folder."""

from softcell.methods.base import (
    METHODS,
    Masks,
    Method,
    Regime,
    Sampler,
    SoftmaxMethod,
    UntrainedSampler,
    logits_like,
    register_method,
)
from softcell.methods.parts import Observer, Pass, PathPlanner, Planner, Selection

__all__ = [
    "METHODS",
    "Masks",
    "Method",
    "Observer",
    "Pass",
    "PathPlanner",
    "Planner",
    "Regime",
    "Sampler",
    "Selection",
    "SoftmaxMethod",
    "UntrainedSampler",
    "logits_like",
    "register_method",
]
