"""Search methods: one paper, one file."""

from softcell.methods.base import Method, Regime, Sampler, UntrainedSampler, fitted
from softcell.methods.registry import METHODS, register_method

__all__ = ["METHODS", "Method", "Regime", "Sampler", "UntrainedSampler", "fitted", "register_method"]
