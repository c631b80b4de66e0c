"""One thread per test process, since tensors are small; the longest files first; equal initial state for every test."""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.process_groups import ProcessGroups

# Tests keep their list of trusted files out of the user's home.
os.environ["SOFTCELL_STATE"] = tempfile.mkdtemp(prefix="softcell-state-")
atexit.register(shutil.rmtree, os.environ["SOFTCELL_STATE"], ignore_errors=True)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, and for child processes too

# Child processes would compile the whole package each time: a second for each of some hundred.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Tests kill processes, never the machine, so nothing has to reach the disk: a run calls this some 40 times.
os.fsync = lambda descriptor: None

# A shell starts background jobs with Ctrl-C ignored, and every child inherits that: tests that send one would wait
# forever.
if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = (
    "docs/test_tutorials.py",
    "app/pipeline/test_pipeline_run.py",
    "app/export/test_export_spaces.py",
    "distributed/test_two_ranks.py",
    "search/test_perturb.py",
    "methods/test_method_conformance.py",
    "spaces/test_space_conformance.py",
    "search/test_kill.py",
    "engine/test_loop_kill.py",
    "search/test_hypergradient.py",
    "spaces/test_calibrations_together.py",
    "app/export/test_quantise.py",
)
"""Files that take longest, from the longest on."""


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # pytest-xdist would start with the files that have the most tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: one that starts last would run while the other processes have nothing left."""
    here = Path(__file__).parent
    ranks = {here / name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


def pytest_collection_finish() -> None:
    """Modules and collected tests live to the end: garbage collections need not look at their million objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture(autouse=True)
def same_start() -> Iterator[None]:
    """Every test starts with one thread and the same random numbers, whatever the tests before it have set or drawn."""
    import torch  # not at the top: the process that distributes tests over others needs no torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def process_groups() -> Iterator[ProcessGroups]:
    groups = ProcessGroups()
    yield groups
    groups.end()


@pytest.fixture(autouse=True)
def own_registrations() -> Iterator[None]:
    """Plugins, methods and spaces of a test are forgotten after it, so that no test depends on those before it."""
    from softcell.methods import METHODS
    from softcell.spaces import SPACES

    known = {registry: {name: registry.get(name) for name in registry} for registry in (METHODS, SPACES)}
    modules = {*sys.modules}
    yield
    for registry, classes in known.items():
        registry._known = classes
    for name in {*sys.modules} - modules:
        if name.startswith("softcell_plugin_"):
            del sys.modules[name]
