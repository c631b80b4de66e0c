"""Notices within a minute that another process of a run has died, hangs or is unreachable, and says which one.

A collective waits for all ranks. If one is gone, gloo usually raises at once, but NCCL, a machine without power and a
process that is stopped leave the others waiting for the timeout of the process group, half an hour. Every rank
therefore counts in a store that all can read, and watches the counts of the others.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from softcell.engine import distributed
from softcell.engine.distributed import World
from softcell.errors import LostRankError, one_line

INTERVAL = 2.0
"""Seconds between two beats of a rank."""
PATIENCE = 30.0
"""A rank without a beat for this many seconds is lost. Beats come from a thread, so long steps do not delay them."""
GRACE = 5.0
"""Seconds that the main thread has to end by itself, before the process is ended."""
EXIT_CODE = 2
UNREACHABLE = "cannot be reached"

# Gloo has no exception type of its own: its collectives raise a plain RuntimeError, so their words are the only sign.
_SIGNS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "NCCL", "ProcessGroup")


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because another process is gone."""
    text = str(error)
    is_sign = isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS)
    return isinstance(error, dist.DistError) or is_sign


class _Gone(NamedTuple):
    """rank: None for the agent of torchrun. is_certain: another rank cannot be the cause."""

    rank: int | None
    what: str
    is_certain: bool = True


class Heartbeat:
    """Beats for this rank and watches the others until `stop`.

    A rank that loses another one ends: the main thread by `explain`, if its collective raises; otherwise a thread ends
    the process with exit code 2. Only one rank prints the message.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        token = distributed.broadcast_object(uuid.uuid4().hex, world)  # the store may outlive this group
        self._store = distributed.prefixed(f"softcell/{token}", distributed.connect(timedelta(seconds=PATIENCE)))
        self._members = distributed.gather_objects((socket.gethostname(), os.getpid(), _process_table()), world)
        self._others = [rank for rank in range(world.size) if rank != world.rank]
        self._beats = [0] * world.size
        self._left: dict[int, str] = {}  # what the ranks that have left gave as their error; "" for none
        self._lost: set[int] = set()
        self._exchanges = 0
        self._is_store_gone = False
        self._stopped = threading.Event()
        self._store.set(f"beat/{world.rank}", "0")
        distributed.barrier(world)  # from here on every rank has a beat to read
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._exchange, self._watch)]
        for thread in self._threads:
            thread.start()

    def stop(self, error: BaseException | None = None) -> None:
        """Leave: the others do not expect beats from here on. With an error, they are informed of it."""
        self._stopped.set()
        with suppress(dist.DistError, RuntimeError):  # the store is gone, and so are the others
            self._store.set(f"left/{self._world.rank}", "" if error is None else one_line(error, 500))
            # Rank 0 may host the store, which must outlive the others' last look at it.
            expected = [f"left/{rank}" for rank in self._others if rank not in self._lost]
            until = time.monotonic() + GRACE
            while self._world.is_main and expected and time.monotonic() < until and not self._store.check(expected):
                time.sleep(0.02)
        for thread in self._threads:
            thread.join(timeout=1.0)

    def explain(self, error: BaseException) -> LostRankError | None:
        """What to raise instead of `error`, which the main thread caught; None if no other rank caused it."""
        if not is_lost_connection(error):
            return None
        began = time.monotonic()
        while time.monotonic() < began + PATIENCE + GRACE:
            for rank in self._others:
                self._read_left(rank)
            found = self._gone()
            # A process that is killed closes its connections first, the store's too, and has ended a moment later.
            if found is not None and (found.is_certain or time.monotonic() > began + GRACE / 2):
                return self._report(found.rank, found.what)
            time.sleep(0.05)
        return self._report(None, f"another process of this run {UNREACHABLE}")

    def _exchange(self) -> None:
        """Write this rank's beat and read those of the others, until it stops or the store is gone."""
        try:
            while not self._stopped.wait(INTERVAL):
                self._store.set(f"beat/{self._world.rank}", str(self._exchanges + 1))
                beats = self._store.multi_get([f"beat/{rank}" for rank in range(self._world.size)])
                for rank in self._others:
                    self._read_left(rank)
                self._beats = [int(value) for value in beats]
                self._exchanges += 1
        except (dist.DistError, RuntimeError):
            self._is_store_gone = True

    def _read_left(self, rank: int) -> None:
        key = f"left/{rank}"
        try:
            if rank not in self._left and self._store.check([key]):
                self._left[rank] = self._store.get(key).decode()
        except (dist.DistError, RuntimeError):
            self._is_store_gone = True

    def _watch(self) -> None:
        """End this process if a rank is gone and the main thread, which may wait for it forever, does not end."""
        silent, seen = [0.0] * self._world.size, list(self._beats)
        unheard, heard = 0.0, self._exchanges
        before = time.monotonic()
        while not self._stopped.wait(INTERVAL):
            now = time.monotonic()
            # After a long pause this process was suspended or starved, and so perhaps were the others. A pause counts
            # a little: on a machine where all pauses are long, a lost rank must still be noticed.
            passed, before = min(now - before, 3 * INTERVAL), now
            beats, exchanges = self._beats, self._exchanges
            unheard, heard = 0.0 if exchanges != heard else unheard + passed, exchanges
            for rank in self._others:
                # Without a new exchange the counts are old, and say nothing about the other ranks.
                silent[rank] = 0.0 if beats[rank] != seen[rank] else silent[rank] + (0.0 if unheard else passed)
            seen = beats
            found = self._gone(silent, unheard)
            if found is not None and not self._stopped.wait(GRACE):
                found = self._gone(silent, unheard) or found
                lost = self._report(found.rank, found.what)
                if not lost.is_reported:
                    prefix = "" if self._world.is_main else f"rank {self._world.rank}: "
                    print(f"error: {prefix}{lost}", file=sys.stderr, flush=True)
                # `sys.exit` would end this thread only, and the main thread may wait in a collective forever.
                os._exit(EXIT_CODE)

    def _gone(self, silent: list[float] | None = None, unheard: float = 0.0) -> _Gone | None:
        """A rank that is gone, or the agent of torchrun; None while all seem to live."""
        silence = f"has not responded for {PATIENCE:.0f} s; it hangs, or its machine or network is down"
        self._is_store_gone |= unheard >= PATIENCE
        for rank in self._others:
            _, process, table = self._members[rank]
            is_visible = table is not None and table == self._members[self._world.rank][2]
            is_dead = is_visible and not _is_alive(process)
            is_silent = silent is not None and silent[rank] >= PATIENCE
            if (is_dead or is_silent) and not self._is_store_gone:
                self._read_left(rank)  # it may have left since the last exchange
            if self._left.get(rank):
                return _Gone(rank, f"failed: {self._left[rank].rstrip('.')}")
            if rank not in self._left and is_dead:
                return _Gone(rank, "was killed or crashed")
            if rank not in self._left and is_silent:
                return _Gone(rank, silence)
        # Rank 0 may host the store, so once it has left, a missing store is no fault.
        if self._is_store_gone and 0 not in self._left:
            what = silence if unheard >= PATIENCE else UNREACHABLE
            if distributed.has_agent_store():
                return _Gone(None, f"torchrun on {os.environ['MASTER_ADDR']} {what}")
            return _Gone(0, what, is_certain=unheard >= PATIENCE)
        return None

    def _report(self, rank: int | None, what: str) -> LostRankError:
        """The error to end with. The first rank that asks is the one that prints it."""
        text, first, mine = what, None, str(self._world.rank)
        if rank is not None:
            self._lost.add(rank)
            host, process, _ = self._members[rank]
            text = f"rank {rank} of {self._world.size} (process {process} on {host}) {what}"
        if not self._is_store_gone:
            with suppress(dist.DistError, RuntimeError):
                first = self._store.compare_set("report", "", mine).decode()
        return LostRankError(f"{text}. {_way_out()}", is_reported=first not in (None, mine))


def _way_out() -> str:
    """What to do after a rank was lost: torchrun may already be about to do it."""
    count, most = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    if count < most:
        return f"torchrun restarts all processes from the last checkpoint (restart {count + 1} of {most})."
    return "Start all processes again with the same command and --resume to continue from the last checkpoint."


def _process_table() -> str | None:
    """Names the table of processes that this process sees: its own machine's, or its container's. None if unknown."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{machine} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def _is_alive(process: int) -> bool:
    """Whether a process in the same table runs; one that has ended and waits for its parent does not."""
    try:
        # The state follows the name in parentheses, which may itself contain spaces and parentheses.
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    except (OSError, IndexError):
        return True
    return state not in ("Z", "X")
