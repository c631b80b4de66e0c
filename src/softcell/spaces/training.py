"""Fused cells in training from scratch: kernels compiled ahead, and warnings.

Training runs and searches that train architectures one by one share these functions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from softcell.engine.distributed import World
from softcell.engine.session import computing_in, forked_rng
from softcell.kernels.shared import Norms, norms_of, without_exchange
from softcell.kernels.warm_up import failure_reported, is_enabled, warm_up, warm_up_by_run
from softcell.spaces.base import Network
from softcell.spaces.execution import NO_TRITON, can_fuse, fused_networks, is_modules_only


def warn_if_unfused(network: nn.Module, precision: str, world: World, notify: Callable[[str], None]) -> None:
    """Warns where cells could be fused on this GPU and only Triton is missing, or where only some cells are fused."""
    if precision == "float64" or world.device.type != "cuda":
        return
    cells = network.has_fused_cells() if isinstance(network, Network) else []
    if not any(cells):
        return
    if not can_fuse():
        notify(NO_TRITON)
    elif not all(cells):
        notify(f"{cells.count(False)} of {len(cells)} cells have no fused form and run module by module")


def compile_network(
    network: nn.Module,
    batch: int,
    held: int | None,
    precision: str,
    norms: Norms,
    world: World,
    notify: Callable[[str], None],
) -> None:
    """Compile the kernels of fused cells in parallel, before the first step would compile them one by one.

    batch, held: the numbers of images of a training step and of a validation pass, on all ranks together; None: no
    validation.
    """
    if not isinstance(network, Network) or precision == "float64" or world.device.type != "cuda":
        return
    if is_modules_only() or not can_fuse():
        return
    device, batch, held = world.device, batch // world.size, None if held is None else -(-held // world.size)
    if network.needs_dry_pass:
        if is_enabled():
            with failure_reported(notify), fused_networks(), norms_of(norms), forked_rng(device), without_exchange():
                warm_up_by_run(lambda: rehearse(network, batch, held, precision, device), notify)
            torch.cuda.empty_cache()  # steps run on another stream, which cannot use what is cached here
        return
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    with norms_of(norms):
        schedules = network.schedules(batch, dtype, training=True)
    if held is not None:  # accuracy is measured in full precision
        schedules += network.schedules(held, torch.float32, training=False)
    warm_up(schedules, notify)


def rehearse(network: Network, batch: int, held: int | None, precision: str, device: torch.device) -> None:
    """A training pass and, unless `held` is None, a validation pass, of a copy of `network` on images of zeros.

    batch, held: the numbers of images. Within `softcell.kernels.warm_up.dry_launches` values are those of uninitialised
    memory, so nothing is learned from them.
    """
    own = copy.deepcopy(network)

    def images(count: int) -> Tensor:
        return torch.zeros(count, *network.shape, device=device).contiguous(memory_format=torch.channels_last)

    with computing_in(precision, device):
        logits, _ = own.train().forward_with_auxiliary(images(batch))
    logits.float().sum().backward()  # type: ignore[no-untyped-call]
    if held is not None:  # accuracy is measured in full precision
        with torch.no_grad():
            own.eval()(images(held))
