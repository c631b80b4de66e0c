"""Search methods: one paper, one file."""

from softcell.methods.base import Method, Regime, Sampler, fitted
from softcell.methods.registry import METHODS, register_method

__all__ = ["METHODS", "Method", "Regime", "Sampler", "fitted", "register_method"]
