"""One thread per test process: tensors here are small, and processes that spin for each other are slow."""

import atexit
import os
import shutil
import signal
import tempfile
import threading

# What tests trust is not remembered in the home of whoever runs them.
os.environ["SOFTCELL_STATE"] = tempfile.mkdtemp(prefix="softcell-state-")
atexit.register(shutil.rmtree, os.environ["SOFTCELL_STATE"], ignore_errors=True)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, and for child processes too

# A shell starts what it runs in the background with Ctrl-C ignored, and every child inherits that: tests that send
# one would wait for ever.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
