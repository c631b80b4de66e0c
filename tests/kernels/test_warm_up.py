"""What a warm-up compiles is what a step launches; compiled for sm_90 without a device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from softcell.arch import notation
from softcell.kernels import warm_up
from softcell.kernels.backend import has_triton
from softcell.kernels.warm_up import Compilation, Target, compilations, compile_all
from softcell.spaces import build_space, execution
from softcell.spaces.darts import DartsNetwork
from softcell.spaces.execution import fused_networks, is_modules_only
from tests.helpers.kernel_runs import INTERPRETED
from tests.reference.published_genotypes import DARTS_V2

pytestmark = pytest.mark.skipif(not has_triton() or INTERPRETED, reason="needs Triton's compiler")
HOPPER = Target("cuda", 90, 32)
BATCH = 2


class Driver:
    """Stands for that of a GPU: nothing is launched."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget  # type: ignore[import-not-found, unused-ignore]

        return GPUTarget(*HOPPER)


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from triton.runtime import driver  # type: ignore[import-not-found, unused-ignore]

    with patch.object(driver, "_active", Driver()):
        monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
        yield


def network(probability: float = 0.2) -> DartsNetwork:
    torch.manual_seed(0)
    found = build_space("darts", {"cells": 3, "channels": 5}).network(notation.parse(DARTS_V2), (3, 16, 16), 10)
    assert isinstance(found, DartsNetwork)
    found.use_drop_path(probability)
    found.drop_path.set_fraction(1.0)
    return found


def launched(net: DartsNetwork, *, training: bool) -> set[Compilation]:
    """What a pass launches, by Triton's own look at the tensors that it is given."""
    from triton import knobs  # type: ignore[import-not-found, unused-ignore]

    found = set()

    def hook(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        found.add(Compilation(fn.module, fn.name, warm_up._reduced(compile["specialization_data"])))
        return True

    images = torch.randn(BATCH, 3, 16, 16)
    with patch.object(knobs.runtime, "jit_cache_hook", hook), fused_networks():
        net.train(training)
        if training:
            net(images).sum().backward()
        else:
            with torch.no_grad():
                net(images)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels that are compiled already would be launched")
@pytest.mark.parametrize(("training", "probability"), [(True, 0.2), (True, 0.0), (False, 0.2)])
def test_a_warm_up_compiles_what_a_step_launches(training: bool, probability: float, no_device: None) -> None:
    net = network(probability).train(training)
    planned = compilations(net.schedules(BATCH, torch.float32, training=training))
    assert len(planned) == len(set(planned))
    assert set(planned) == launched(net, training=training)


def test_kernels_are_compiled_once_for_an_absent_device(
    no_device: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    schedules = network().eval().schedules(BATCH, torch.bfloat16, training=False)
    jobs = [job for job in compilations(schedules) if job.name == "_known_moments"]
    assert compile_all(jobs, HOPPER, processes=1) == len(jobs) > 0
    assert compile_all(jobs, HOPPER, processes=1) == 0
    compiled = sorted(tmp_path.glob("*/_known_moments.cubin"))
    assert len(compiled) == len(jobs)
    for schedule in schedules:  # a launch finds what was compiled
        for launch in schedule.launches:
            if launch.kernel.__name__ == "_known_moments":
                launch.kernel.run(*schedule.stand_ins(launch), grid=launch.grid, warmup=True, **launch.options)
    assert sorted(tmp_path.glob("*/_known_moments.cubin")) == compiled
