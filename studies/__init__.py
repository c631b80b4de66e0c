"""Longer experiments whose records lie in `results/`; each runs by one command, which resumes where it stopped."""
