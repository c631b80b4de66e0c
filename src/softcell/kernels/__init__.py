"""Fused operations, each beside a plain-PyTorch twin of the same signature."""
