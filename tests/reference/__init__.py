"""Slow literal twins of the papers' equations, used as oracles only."""
