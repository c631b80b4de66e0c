"""Running things: devices, processes, checkpoints, the loop. Knows nothing of architecture search."""

from softcell.engine.distributed import World
from softcell.engine.loop import Outcome, run
from softcell.engine.manifest import new_manifest
from softcell.engine.metrics import DivergedError, Failure, LossWatch
from softcell.engine.runfolder import RunFolder
from softcell.engine.session import resolve_device, seed_everything, set_deterministic, set_tf32, set_threads
from softcell.engine.task import Task
from softcell.engine.timing import Stopwatch, Timing

__all__ = [
    "DivergedError",
    "Failure",
    "LossWatch",
    "Outcome",
    "RunFolder",
    "Stopwatch",
    "Task",
    "Timing",
    "World",
    "new_manifest",
    "resolve_device",
    "run",
    "seed_everything",
    "set_deterministic",
    "set_tf32",
    "set_threads",
]
