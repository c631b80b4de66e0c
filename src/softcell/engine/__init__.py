"""Running things: devices, processes, checkpoints, the loop. Knows nothing of architecture search."""

from softcell.engine.device import resolve_device, set_deterministic, set_tf32, set_threads
from softcell.engine.distributed import World
from softcell.engine.loop import Outcome, run
from softcell.engine.rng import seed_everything
from softcell.engine.runfolder import RunFolder, new_manifest
from softcell.engine.task import Task
from softcell.engine.timing import Stopwatch, Timing
from softcell.engine.watch import DivergedError, Failure, LossWatch

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
