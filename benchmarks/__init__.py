"""Timings of search steps, as ratios in one run. `python -m benchmarks --help` lists them."""
