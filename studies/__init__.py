"""Longer experiments whose records lie in `results/`; each runs by one command and goes on where it stopped."""
