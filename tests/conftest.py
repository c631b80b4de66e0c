"""One thread per test process: tensors here are small, and processes that spin for each other are slow."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, and for child processes too
