"""Longer experiments with records in `results/`; each is one command, which resumes where it stopped."""
