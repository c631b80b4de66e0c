"""Fused operations, each with a plain-PyTorch twin of the same signature."""
