"""Search methods: one paper, one file or folder."""

from softcell.methods.base import METHODS, Method, Regime, Sampler, UntrainedSampler, register_method
from softcell.methods.parts import Observer, Pass, PathPlanner, Planner, Selection

__all__ = [
    "METHODS",
    "Method",
    "Observer",
    "Pass",
    "PathPlanner",
    "Planner",
    "Regime",
    "Sampler",
    "Selection",
    "UntrainedSampler",
    "register_method",
]
