"""Softcell: differentiable neural architecture search.

The functions most people need are in `softcell.api`. This file imports nothing, so that `softcell --help` is quick.
"""

__version__ = "0.1.0"
