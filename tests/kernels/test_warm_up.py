"""What a warm-up compiles is what a step launches; compiled for sm_90 without a device."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from softcell.arch import notation, sample
from softcell.kernels import local, warm_up
from softcell.kernels.backend import cell_settings, has_triton, triton_kernels
from softcell.kernels.warm_up import (
    Compilation,
    compilations,
    compile_all,
    dry_launches,
    warm_up_by_run,
    workers_ready,
)
from softcell.spaces import build_space
from softcell.spaces.darts import DartsNetwork
from softcell.spaces.execution import fused_networks
from softcell.spaces.training import rehearse
from tests.helpers.kernel_runs import INTERPRETED
from tests.helpers.no_device import HOPPER, all_kernels, take_for_gpu
from tests.reference.published_genotypes import DARTS_V2

pytestmark = pytest.mark.skipif(not has_triton() or INTERPRETED, reason="needs Triton's compiler")
BATCH = 2


@pytest.fixture
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    take_for_gpu(monkeypatch)


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels that are compiled already would be launched")
@pytest.mark.parametrize("space", ["nb201", "nb1shot1-1", "nb1shot1-1, library", "nos"])
@pytest.mark.parametrize("probability", [0.2, 0.0])
def test_a_pass_of_a_copy_shows_what_a_step_launches(probability: float, space: str, no_device: None) -> None:
    """Of networks without schedules, or with kernels that are in none."""
    torch.manual_seed(0)
    space, _, by_library = space.partition(", ")
    if space == "nb201":
        cells = build_space(space, {"cells_per_stage": 1, "channels": 4})
        text = "|nor_conv_1x1~0|+|avg_pool_3x3~0|nor_conv_3x3~1|+|skip_connect~0|none~1|nor_conv_3x3~2|"
        network = cells.network(notation.parse(text), (3, 16, 16), 10)
    else:
        cells = build_space(space, {"cells" if space == "nos" else "cells_per_stack": 3, "channels": 4})
        network = cells.network(sample(cells.layout(), 0), (3, 16, 16), 10)
    assert network.needs_dry_pass
    network.use_drop_path(probability)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    found: list[Compilation] = []
    settings = {"library_channels": 1} if by_library else {}
    with dry_launches(found.append), fused_networks(), cell_settings(**settings):
        rehearse(network, BATCH, 5, "float32", torch.device("cpu"))
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert network.training and all(p.grad is None for p in network.parameters())
    wanted: set[Compilation] = set()
    # Maps on a GPU are channels-last.
    images, held = (torch.randn(n, 3, 16, 16).contiguous(memory_format=torch.channels_last) for n in (BATCH, 5))
    with dry_launches(wanted.add), fused_networks(), cell_settings(**settings):
        network(images).sum().backward()
        with torch.no_grad():
            network.eval()(held)
    assert set(found) == wanted
    some = {
        "nb201": {"_combine", "_combine_finish_by_channel", "_convolve"},
        "nb1shot1-1": {"_combine", "_combine_finish_by_channel", "_convolve", "_pool"},
        "nos": {"_stages", "_gather_lines", "_known_moments", "_apply"},
    }
    if by_library:
        some[space] = some[space] - {"_convolve"} | {"_store"}
    assert some[space] <= {job.name for job in wanted}
    if space == "nos":
        schedules = network.schedules(BATCH, torch.float32, training=True)
        schedules += network.schedules(5, torch.float32, training=False)
        assert set(compilations(schedules)) < wanted


def test_programs_that_add_gradients_fit_into_shared_memory(no_device: None) -> None:
    """In float32; a launch that needs more than the 227 KB of an H100 would fail."""
    net = build_space("darts", {"cells": 4, "channels": 12}).network(notation.parse(DARTS_V2), (3, 32, 32), 10)
    assert isinstance(net, DartsNetwork)
    names = triton_kernels("derived_gradient")._lower_tiles.arg_names
    found = []
    for job in compilations(net.train().schedules(96, torch.float32, training=True)):
        if job.name != "_lower_tiles":
            continue
        given = json.loads(job.specialization)
        constants = dict(zip((names[at[0]] for at in given["constant_keys"]), given["constant_vals"], strict=True))
        if constants["ADDS"]:
            found.append((constants["C"], warm_up.compile_one(job, HOPPER).metadata.shared))
    assert {channels for channels, _ in found} == {12, 24, 48}
    assert all(size <= 227 * 1024 for _, size in found), found


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


def jobs_named(name: str) -> list[Compilation]:
    found = compilations(network().eval().schedules(BATCH, torch.bfloat16, training=False))
    return [job for job in found if job.name == name]


def test_a_dry_run_launches_nothing_and_compiles_what_is_missing(
    no_device: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    schedules = network().eval().schedules(BATCH, torch.bfloat16, training=False)
    wanted = [(s, one) for s in schedules for one in s.launches if one.kernel.__name__ == "_known_moments"]

    def run() -> None:
        for schedule, launch in wanted:  # as a step does it: `kernel[grid](…)`, with addresses in place of tensors
            assert launch.kernel[launch.grid](*schedule.stand_ins(launch), **launch.options) is None

    notes: list[str] = []
    missing = warm_up_by_run(run, notes.append)
    assert missing == len(jobs_named("_known_moments")) > 0
    assert notes[0].startswith(f"compiling {missing} kernel")
    assert notes[1].startswith(f"compiled {missing} kernel")
    assert len(list(tmp_path.glob("*/_known_moments.cubin"))) == missing
    assert warm_up_by_run(run, notes.append) == 0
    assert len(notes) == 2, "nothing to say where nothing is missing"


def test_constants_that_are_tuples_are_the_same_for_workers_and_launches(
    no_device: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Kernels of several local attentions have the sizes of each as a constant."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    packed, embeddings, kinds = torch.randn(2, 1, 4, 4, 12), torch.randn(2 * 4 * (3 + 3)), ((3, 4), (3, 2))
    assert warm_up_by_run(lambda: local.attend_together(packed, embeddings, kinds)) == 1
    compiled = sorted(tmp_path.glob("*/_forward.cubin"))
    assert len(compiled) == 1
    for kernel in all_kernels():  # as in another process
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    own = triton_kernels("local")
    about, grid, settings = own._sizes(packed, kinds, own.WARPS, own._values(4, kinds))
    tensors = (packed, embeddings, torch.empty(2, 1, 4, 4, 4), torch.empty(2, 64))
    own._forward.run(*tensors, *about, grid=grid, warmup=True, **settings)
    assert sorted(tmp_path.glob("*/_forward.cubin")) == compiled


def test_kernels_that_are_compiled_already_are_not_launched_in_a_dry_run(
    no_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Compiled:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"a dry run looked for `{name}` of a compiled kernel")

    (schedule, launch), *_ = (
        (s, one) for s in network().eval().schedules(BATCH, torch.bfloat16, training=False) for one in s.launches
    )
    found: list[Compilation] = []

    def run() -> None:
        launch.kernel[launch.grid](*schedule.stand_ins(launch), **launch.options)

    with dry_launches(found.append):
        run()
        run()
        compiled = launch.kernel.device_caches[0][0]
        (key,) = [key for key, kernel in compiled.items() if type(kernel) is object]
    assert len(found) == 1
    assert key not in compiled, "nothing stays behind"
    monkeypatch.setitem(compiled, key, Compiled())
    with dry_launches(found.append):
        run()
    assert len(found) == 1
    assert isinstance(compiled[key], Compiled)


def test_one_kernel_that_cannot_be_compiled_does_not_stop_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_device: None, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    job = jobs_named("_known_moments")[0]
    broken = job._replace(specialization=job.specialization.replace('"signature": {', '"signature": {"more": "i32", '))
    assert compile_all([broken, job], HOPPER, processes=1) == 2
    assert "_known_moments was not compiled ahead" in capfd.readouterr().err
    assert compile_all([broken, job], HOPPER, processes=1) == 1, "the broken one is tried again"


def test_warm_ups_that_share_a_cache_take_turns(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    path = tmp_path / "lock"
    with warm_up._alone(path), path.open("w") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with warm_up._alone(path):  # which does not wait for itself
        pass


def test_without_file_locks_a_warm_up_does_not_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)  # as on Windows
    with warm_up._alone(tmp_path / "lock"), warm_up._alone(tmp_path / "lock"):
        pass


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[subprocess.Popen[bytes]]:
    """The workers that have been started, on a machine with two cores and an empty cache."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(warm_up, "usable_cores", lambda: 2)
    found: list[subprocess.Popen[bytes]] = []
    start = warm_up.Compiler._start

    def noted(self: warm_up.Compiler, folder: Path) -> subprocess.Popen[bytes]:
        found.append(start(self, folder))
        return found[-1]

    monkeypatch.setattr(warm_up.Compiler, "_start", noted)
    return found


def test_workers_that_run_already_compile_for_the_first_warm_up(
    started: list[subprocess.Popen[bytes]], tmp_path: Path, no_device: None
) -> None:
    jobs = jobs_named("_known_moments")
    with workers_ready():
        early = list(started)
        assert len(early) == 2 and all(worker.poll() is None for worker in early)
        with workers_ready():
            pass
        assert started == early, "a second search on the device starts no others"
        assert compile_all(jobs, HOPPER) == len(jobs) > 0
        assert started == early and all(worker.poll() == 0 for worker in early)
    assert len(list(tmp_path.glob("*/_known_moments.cubin"))) == len(jobs)
    with workers_ready():
        assert started == early, "something has been compiled: few kernels can be missing"
    assert compile_all(jobs, HOPPER) == 0


def test_workers_that_nobody_needs_end_with_the_context(
    started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, no_device: None
) -> None:
    with workers_ready(wanted=False):
        assert not started
    with pytest.raises(RuntimeError, match="no data"), workers_ready():
        raise RuntimeError("no data")
    assert len(started) == 2 and all(worker.poll() is not None for worker in started)
    monkeypatch.setenv(warm_up.SWITCH, "0")
    with workers_ready():
        assert len(started) == 2


@pytest.mark.parametrize("fault", ["second worker", "cache"])
def test_workers_that_cannot_be_started_early_do_not_end_the_search(
    fault: str, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_device: None
) -> None:
    if fault == "cache":
        (tmp_path / "file").touch()
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file"))
    else:
        start = warm_up.Compiler._start

        def only_one(self: warm_up.Compiler, folder: Path) -> subprocess.Popen[bytes]:
            if started:
                raise BlockingIOError("no more processes")
            return start(self, folder)

        monkeypatch.setattr(warm_up.Compiler, "_start", only_one)
    with workers_ready():
        assert len(started) == (fault != "cache")
    assert warm_up._early is None and all(worker.poll() is not None for worker in started)


def test_warm_ups_can_be_disabled(monkeypatch: pytest.MonkeyPatch, no_device: None) -> None:
    monkeypatch.setenv(warm_up.SWITCH, "0")
    monkeypatch.setattr(warm_up, "compile_all", lambda *given, **named: pytest.fail("kernels were compiled"))
    assert warm_up.warm_up(network().eval().schedules(BATCH, torch.bfloat16, training=False)) == 0


CUDA_FUNCTIONS = (
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuFuncSetAttribute",
    "cuGetErrorString",
    "cuPointerGetAttribute",
)


@pytest.mark.skipif(
    shutil.which("gcc") is None or not Path(sysconfig.get_path("include"), "Python.h").is_file(),
    reason="needs a C compiler and the headers of Python",
)
def test_workers_build_one_launcher_for_each_list_of_types(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, no_device: None
) -> None:
    (tmp_path / "cuda.c").write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in CUDA_FUNCTIONS))
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "cuda.c"], check=True)
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    jobs = jobs_named("_known_moments")
    assert len(jobs) > 1
    compile_all(jobs, HOPPER, processes=2)
    assert len(list(tmp_path.glob("cache/*/__triton_launcher*.so"))) == 1
