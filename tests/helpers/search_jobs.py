"""What runs inside the processes of `search_forks.py`: searches and training runs in a folder, started or resumed."""

import gc
import importlib
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from softcell.arch import Genotype, sample
from softcell.engine.distributed import same_everywhere
from softcell.engine.task import Event, Note, Stepped
from softcell.errors import LostRankError
from softcell.evaluate import count_genotype, stored_training, train
from softcell.evaluate import resolve as resolve_training
from softcell.evaluate.task import TrainTask
from softcell.kernels.derived import derived_cell_reference
from softcell.methods import METHODS
from softcell.registry import load_plugin
from softcell.search import resolve, search, stored_recipe
from softcell.search.samplers import IndependentTask
from softcell.search.task import SearchTask
from softcell.spaces import _derived_plan, build_space, execution
from softcell.spaces import cell as cells
from softcell.spaces._derived_plan import DerivedPass
from softcell.spaces._fused_cell import FusedCell
from tests.helpers.engine_launch import run_as_rank

Settings = dict[str, Any]


def warm_up() -> None:
    """Has torch import what it imports late, once for all children. No backward: autograd does not survive a fork."""
    torch.set_num_threads(1)
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.zeros(1)
    for optimiser in (torch.optim.SGD([weight], foreach=True), torch.optim.Adam([weight], foreach=True)):
        optimiser.step()
        optimiser.load_state_dict(optimiser.state_dict())
    space = build_space("nb201", {"cells_per_stage": 1, "channels": 1})
    genotype = sample(space.layout(), 0)
    count_genotype(space, genotype, (1, 4, 4), 2)
    for name in METHODS:
        METHODS.get(name)
    torch.save({"weight": weight}, io.BytesIO())
    for late in ("numpy.ctypeslib", "numpy.ma", "encodings.cp437"):  # tensors to arrays, reading .npz
        importlib.import_module(late)
    gc.collect()
    gc.freeze()  # a collection in a child would copy the pages of all that was imported


def run_search(
    out: str, settings: Settings, options: Settings | None = None, where: str | None = None
) -> dict[str, Any]:
    """Starts the search of `settings` in `out`, or resumes the one in `where`. Ends with its exit code."""
    listen = _Listener(options or {})
    there = Path(where or out)
    if (there / "run.json").exists():
        result = search(stored_recipe(there, {}), out, resume=True, on_event=listen)
    else:
        result = search(resolve(settings), out, on_event=listen)
    if result.exit_code:
        raise SystemExit(result.exit_code)
    return {"notes": listen.notes, "metrics": result.metrics, "operations": listen.operations()}


def run_train(
    out: str, settings: Settings, options: Settings | None = None, where: str | None = None
) -> dict[str, Any]:
    """As `run_search`; `settings["genotype"]` is the seed of a random architecture of `settings["in"]`."""
    listen = _Listener(options or {})
    there = Path(where or out)
    if (there / "run.json").exists():
        genotype, recipe = stored_training(there, {})
        result = train(genotype, recipe, out, resume=True, on_event=listen)
    else:
        given = dict(settings)
        genotype = _genotype(given.pop("in"), given["space_settings"], given.pop("genotype"))
        result = train(genotype, resolve_training(genotype, given), out, on_event=listen)
    if result.exit_code:
        raise SystemExit(result.exit_code)
    return {"notes": listen.notes, "metrics": result.metrics, "operations": listen.operations()}


def run_checked(kind: str, out: str, settings: Settings, options: Settings, where: str) -> dict[str, Any]:
    """A run on several ranks that looks after each step whether all of them still hold the same.

    where: the folder of rank 0, which decides whether the run is resumed. out: the folder this rank is given.
    strike_at_check: [signal, number]: this rank strikes itself before its step `number`, counted from 1.
    fuse: cells are fused on the CPU too, by the kernels' plain twins, and blocks of a chain are grouped. Counted in
    "fused".
    """
    checks = fused = 0
    if options.get("fuse"):
        original = FusedCell.__call__

        def counted(cell: FusedCell, *arguments: Any) -> Any:
            nonlocal fused
            fused += 1
            return original(cell, *arguments)

        run_derived = DerivedPass.run

        def counted_derived(*arguments: Any, **options: Any) -> Any:
            nonlocal fused
            fused += 1
            return run_derived(*arguments, **options)

        FusedCell.__call__ = counted  # type: ignore[method-assign]
        DerivedPass.run = counted_derived  # type: ignore[method-assign]
        _derived_plan.derived_cell = derived_cell_reference
        run_blocks, run_summed = cells.run_blocks, cells.run_summed

        def counted_blocks(*arguments: Any) -> Any:
            nonlocal fused
            found = run_blocks(*arguments)
            fused += len(found)
            return found

        def counted_sum(*arguments: Any) -> Any:
            nonlocal fused
            found = run_summed(*arguments)
            fused += found is not None
            return found

        cells.run_blocks, cells.run_summed = counted_blocks, counted_sum
        execution.grouping_blocks_pays = lambda x: True
        execution.kernels_serve = lambda x: x.numel() > 0 and not execution.is_modules_only()

    def checked(step: Any, state: Any) -> Any:
        def call(task: Any, batch: Any) -> None:
            nonlocal checks
            if options.get("strike_at_check") and options["strike_at_check"][1] == checks + 1:
                os.kill(os.getpid(), options["strike_at_check"][0])
            step(task, batch)
            tensors = _tensors(state(task))
            assert same_everywhere(tensors, task.world), f"the ranks differ after step {checks}"
            checks += 1

        return call

    SearchTask.step = checked(SearchTask.step, _search_state)  # type: ignore[method-assign]
    for task in (TrainTask, IndependentTask):
        task.step = checked(task.step, lambda task: task.state_dict() | {"_local": None})  # type: ignore[attr-defined]
    value = (run_search if kind == "search" else run_train)(out, settings, options, where)
    return {**value, "checks": checks, "fused": fused}


def _search_state(task: SearchTask) -> list[Any]:
    step_state = task.step_state
    optimisers = [step_state.weight_optimiser.state_dict(), step_state.architecture_optimiser.state_dict()]
    return [task.supernet.state_dict(), task.method.state_dict(), *optimisers]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [x for item in value.values() for x in _tensors(item)]
    return [x for item in value for x in _tensors(item)] if isinstance(value, list | tuple) else []


def run_on_rank(module: str, function: str, folder: str) -> None:
    """One of the processes of `engine_launch.on_ranks`."""
    run_as_rank(module, function, Path(folder))


def error_of(kind: str, out: str, settings: Settings) -> dict[str, Any]:
    """The error that a run ends with."""
    try:
        (run_search if kind == "search" else run_train)(out, settings)
    except Exception as error:
        return {"type": type(error).__name__, "text": str(error)}
    return {"type": None, "text": ""}


def error_with_plugin(out: str, settings: Settings, plugin: str, kind: str) -> dict[str, Any]:
    """The error that a run with a user's own method or space ends with."""
    load_plugin(plugin)
    return error_of(kind, out, settings)


class _Listener:
    """Keeps notes; strikes the process itself with a signal where `options` says so.

    strike: [signal, epoch, step]. die_before: which of the process's file operations is replaced by SIGKILL.
    """

    def __init__(self, options: Settings) -> None:
        self.notes: list[str] = []
        self._strike = options.get("strike")
        number = options.get("die_before")
        self.operations = (lambda: 0) if number is None else _die_before(number)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Note):
            self.notes.append(event.text)
        if self._strike and isinstance(event, Stepped) and [event.epoch, event.step] == self._strike[1:]:
            os.kill(os.getpid(), self._strike[0])


def _die_before(number: int) -> Callable[[], int]:
    """Counts fsync, replace and mkdir from 0 and dies instead of number `number`; gives the count so far."""
    done = 0

    def counted(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal done
            if done == number:
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1
            return function(*arguments, **options)

        return call

    os.fsync, os.replace, os.mkdir = counted(os.fsync), counted(os.replace), counted(os.mkdir)
    return lambda: done


def _genotype(space: str, sizes: dict[str, Any], seed: int) -> Genotype:
    return sample(build_space(space, sizes).layout(), seed)


if __name__ == "__main__":  # a job in a process that is not forked, for what does not survive a fork
    globals()[sys.argv[1]](*json.loads(sys.argv[2]))


def run_watched(what: str, victim: int, patience: float) -> str:
    """Ranks that meet at barriers, with short heartbeats; `what` happens to the rank `victim` between two of them.

    "starved" is "stopped" on a machine where every pause of a watching thread is long. "ending" is "killed" with a
    process that has closed its connections and still ends.
    """
    from softcell.engine import heartbeat
    from softcell.engine.distributed import barrier
    from softcell.engine.session import join_processes

    heartbeat.INTERVAL, heartbeat.PATIENCE, heartbeat.GRACE = 0.1, patience, 1.0
    if what == "starved":
        wait = threading.Event.wait
        threading.Event.wait = lambda event, timeout=None: wait(event, timeout and 4 * timeout)  # type: ignore[method-assign]
    if what == "ending":
        is_alive, ended = heartbeat._is_alive, list[float]()

        def is_alive_for_a_moment(process: int) -> bool:
            if is_alive(process):
                return True
            ended.append(time.monotonic())
            return time.monotonic() < ended[0] + 0.2

        heartbeat._is_alive = is_alive_for_a_moment
    try:
        with join_processes("cpu", False) as world:
            barrier(world)
            if world.rank == victim and what == "fails":
                raise ValueError("the disk\nis full.")
            if world.rank == victim and what == "waits":
                time.sleep(1.25 * patience)
            if world.rank == victim and what in ("killed", "ending"):
                os.kill(os.getpid(), signal.SIGKILL)
            if world.rank == victim and what in ("stopped", "starved"):
                os.kill(os.getpid(), signal.SIGSTOP)
            barrier(world)
            if world.rank != victim and what == "leaves":
                time.sleep(1.0)  # the other rank has left and ended
    except LostRankError as error:
        print(f"error: {error}", "reported" if error.is_reported else "first", flush=True)
        raise SystemExit(heartbeat.EXIT_CODE) from error
    return "finished"
