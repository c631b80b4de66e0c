"""The methods by name."""

from __future__ import annotations

from softcell.methods.base import Method, Sampler
from softcell.registry import Registry

METHODS: Registry[Method | Sampler] = Registry("method", "softcell.methods")
register_method = METHODS.add
