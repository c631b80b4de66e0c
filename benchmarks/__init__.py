"""Timings of search steps, compared within one run. `python -m benchmarks --help` lists them."""
