"""One job in several processes that hold the same weights and read different parts of each batch.

Gradients are averaged by `softcell.engine.reduce`, during the backward pass.
"""

import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from softcell.errors import UserError
from softcell.machine import num_processes

T = TypeVar("T")
# Bounds the extra memory of a collective; a whole supernet still needs only one or two.
BUCKET_BYTES = 64 * 2**20
# Rank 0 may evaluate or write a large checkpoint while the others wait for it.
_TIMEOUT = timedelta(minutes=30)
_SOON = timedelta(seconds=30)  # for torchrun's own store, which runs before the processes do
_FOLDER = "softcell/folder"
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class World:
    """This process among all processes of the run; `local_rank` counts within one machine.

    Example:
        >>> import torch
        >>> from softcell.engine import World
        >>> world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
        >>> world.is_main
        True
    """

    rank: int
    size: int
    local_rank: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that writes files and prints."""
        return self.rank == 0


def start(device: torch.device | str) -> World:
    """Join the processes that `torchrun` started; without `torchrun` the world is only this process.

    Each process takes the CUDA device of its local rank. A world of one has no process group at all.
    """
    device = torch.device(device)
    if num_processes() == 1:
        return World(0, 1, 0, device)
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise UserError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} asks for several processes, but {', '.join(missing)} is not set. "
            f"Start with `torchrun --nproc-per-node=N ...`, or unset WORLD_SIZE."
        )
    if device.type == "mps":
        raise UserError("an Apple GPU runs one process, but WORLD_SIZE asks for several; use --device cpu")
    rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    # Import it before there is a group: its default arguments keep the group that exists at import, and torch's
    # optimisers import it. Such a group outlives `stop`, and its threads sometimes abort a process at exit.
    importlib.import_module("torch.distributed.nn.functional")
    # torchrun's store outlives a restart of the processes, with the addresses of those that have ended.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    hosts = rank == 0 and not has_agent_store()
    store = prefixed(f"attempt-{attempt}", connect(_TIMEOUT, is_host=hosts))
    if device.type == "cuda":
        if device.index is not None:
            raise UserError(
                f"each of {size} processes uses the CUDA device of its local rank, but got device={device}; use "
                f"'cuda', and choose devices by CUDA_VISIBLE_DEVICES"
            )
        if local_rank >= torch.cuda.device_count():
            raise UserError(
                f"each process needs its own CUDA device, but local rank {local_rank} finds only "
                f"{torch.cuda.device_count()}; lower --nproc-per-node"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, timeout=_TIMEOUT, device_id=device)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    return World(rank, size, local_rank, device)


def has_agent_store() -> bool:
    """Whether torchrun itself hosts the store; otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect(timeout: timedelta, is_host: bool = False) -> Any:
    """A separate connection to the store of the launch."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=is_host,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=is_host,
    )


def prefixed(prefix: str, store: Any) -> Any:
    """The part of a store whose keys begin with `prefix`."""
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def remember_folder(folder: Path) -> None:
    """Note under torchrun that this launch created the run in `folder`; the first one is the launch's own run."""
    if has_agent_store():
        connect(_SOON).compare_set(_FOLDER, "", str(folder.resolve()))


def restarted_folder() -> Path | None:
    """The run that an earlier attempt of this launch created, if torchrun has restarted its processes.

    The processes are started with the same command again, but must continue what the first ones began.
    """
    if not has_agent_store() or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) == 0:
        return None
    store = connect(_SOON)
    return Path(store.get(_FOLDER).decode()) if store.check([_FOLDER]) else None


def is_main_process() -> bool:
    """Whether this process writes files and prints; known before it has joined the others."""
    return int(os.environ.get("RANK", "0")) == 0


def current() -> World:
    """The world that `start` joined before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    on_cuda = dist.get_backend() == "nccl"
    return World(rank, size, local_rank, torch.device("cuda", local_rank) if on_cuda else torch.device("cpu"))


def stop() -> None:
    """Leave the process group, if there is one."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@torch.no_grad()
def average_(tensors: Iterable[Tensor], world: World) -> None:
    """Replace each tensor, in place, by its mean over the ranks.

    Args:
        tensors: floating-point tensors of any shapes; the same shapes in the same order on every rank.
    """
    if world.size == 1:
        return
    for bucket in _buckets(tensors):
        if not bucket[0].is_floating_point():
            raise TypeError(f"only floating-point tensors have a mean, but got {bucket[0].dtype}")
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat)
        flat.div_(world.size)
        _unflatten_into(bucket, flat)


@torch.no_grad()
def sum_(tensor: Tensor, world: World) -> Tensor:
    """Replace `tensor` (any shape) by its sum over the ranks, in place, and return it."""
    if world.size > 1:
        dense = tensor.contiguous()  # collectives need dense memory, which a view may lack
        dist.all_reduce(dense)
        if dense is not tensor:
            tensor.copy_(dense)
    return tensor


@torch.no_grad()
def broadcast_module(module: nn.Module, world: World) -> None:
    """Give every rank the parameters and buffers, non-persistent ones too, that rank 0 has."""
    if world.size == 1:
        return
    for bucket in _buckets([*module.parameters(), *module.buffers()]):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        # As bytes, so that every backend can send every dtype.
        dist.broadcast(flat.view(torch.uint8), src=0)
        _unflatten_into(bucket, flat)


@torch.no_grad()
def same_everywhere(tensors: Iterable[Tensor], world: World) -> bool:
    """Whether the tensors (any shapes and dtypes) are equal bit by bit on all ranks; the same result on each rank."""
    if world.size == 1:
        return True
    mine = list(tensors)
    # Shapes first: a broadcast between tensors of different sizes would fail or hang.
    forms = gather_objects([(tuple(tensor.shape), str(tensor.dtype)) for tensor in mine], world)
    if any(form != forms[0] for form in forms):
        return False
    different = torch.zeros((), dtype=torch.int64, device=world.device)
    for bucket in _buckets(mine):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket]).to(world.device).view(torch.uint8)
        first = flat.clone()
        dist.broadcast(first, src=0)
        different += (first != flat).any()
    dist.all_reduce(different)
    return int(different) == 0


def broadcast_object(value: T, world: World) -> T:
    """Return rank 0's `value` on every rank; the other ranks' argument is ignored."""
    if world.size == 1:
        return value
    box: list[Any] = [value if world.is_main else None]
    dist.broadcast_object_list(box, src=0, device=world.device)
    received: T = box[0]
    return value if world.is_main else received


def gather_objects(value: T, world: World) -> list[T]:
    """Return every rank's `value`, in the order of the ranks, on every rank."""
    if world.size == 1:
        return [value]
    box: list[Any] = [None] * world.size
    dist.all_gather_object(box, value)
    return box


def on_main(function: Callable[[], T], world: World) -> T:
    """Call `function` only on rank 0 and return its result, or raise its error, on every rank.

    Without the error the other ranks would wait forever.
    """
    if world.size == 1:
        return function()
    answer: tuple[Any, Exception | None] = (None, None)
    if world.is_main:
        try:
            answer = (function(), None)
        except Exception as error:
            answer = (None, error)
    result, failure = broadcast_object(answer, world)
    if failure is not None:
        raise failure
    value: T = result
    return value


def barrier(world: World) -> None:
    """Wait until every rank has reached this call."""
    if world.size > 1:
        dist.barrier()


def agree(flags: Sequence[int], world: World) -> list[int]:
    """The largest value of each flag over the ranks, so that all ranks decide the same and none is left waiting."""
    if world.size == 1:
        return list(flags)
    shared = torch.tensor(flags, dtype=torch.int64, device=world.device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return [int(value) for value in shared.tolist()]


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Group non-empty tensors by dtype and device, in order, in lists of about `BUCKET_BYTES`."""
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > 0:
            groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for group in groups.values():
        bucket: list[Tensor] = []
        size = 0
        for tensor in group:
            bucket.append(tensor)
            size += tensor.numel() * tensor.element_size()
            if size >= BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket


def _unflatten_into(bucket: list[Tensor], flat: Tensor) -> None:
    """Copy `flat` [sum of sizes] back into the tensors it was made from."""
    parts = torch.split(flat, [tensor.numel() for tensor in bucket])
    for tensor, part in zip(bucket, parts, strict=True):
        tensor.copy_(part.view(tensor.shape))
