"""Fused NAS-Bench-201 and 1Shot1 networks whose norms are shared by two real processes, against one process.

TRITON_INTERPRET=1 pytest tests/distributed/test_affine_ranks.py also runs the kernels on a CPU.
"""

from typing import Any

import pytest
import torch

from softcell.engine.distributed import World
from softcell.spaces import execution
from softcell.spaces.execution import is_modules_only, modules_only
from tests.helpers.engine_launch import on_ranks, results, start_ranks
from tests.helpers.fused_ranks import SIZE, part_of
from tests.helpers.kernel_runs import MARKS
from tests.helpers.picked_cells import CELLS, RECTIFIED, inputs_of, outcome, picked, require_close, whole_of
from tests.helpers.picked_ranks import CHANNELS, IMAGE, SPACES, network_steps


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(2, "picked_ranks", "steps_on_rank", tmp_path_factory.mktemp("picked"))


@pytest.mark.parametrize("space", SPACES)
def test_fused_steps_of_two_ranks_equal_those_of_one_process(
    space: str, ranks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process fuses its cells too, since modules draw drop-path's factors in another order."""
    monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
    alone = World(0, 1, 0, torch.device("cpu"))
    expected = network_steps(slice(0, SIZE), alone, space)
    for rank in ranks:
        assert rank["cells"] == 3 * 2 * 3, "3 cells in 2 steps, with shared norms in both spaces and with local ones"
        for name, value in expected.items():
            torch.testing.assert_close(rank[space][name], value, rtol=1e-10, atol=1e-10, msg=name)
    with modules_only():
        other = network_steps(slice(0, SIZE), alone, space)
    (classifier,) = (name for name in expected if name.endswith("classifier.weight"))
    assert not torch.equal(other[classifier], expected[classifier]), "drop-path drops something"


def test_fused_cells_send_one_collective_per_norm_group(ranks: list[dict[str, Any]]) -> None:
    counts = ranks[0]["collectives"]
    assert counts["local"] == 2, "the gradients of two steps"
    assert 2 < counts["fused"] < counts["modules"]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("kernels")
    return results(start_ranks(2, "picked_ranks", "kernels_on_rank", folder), folder, timeout=500.0)


class TestKernels:
    pytestmark = MARKS

    @pytest.mark.parametrize("name", [*CELLS, *RECTIFIED])
    def test_kernels_of_two_ranks_equal_modules_of_one_process(self, kernels: list[dict[str, Any]], name: str) -> None:
        x, factors = inputs_of(name, CHANNELS, SIZE, IMAGE)
        cell = picked(name, CHANNELS, factors)
        found = whole_of(*(rank[name] for rank in kernels), cell)
        require_close(found, outcome(cell, x, factors, fused=False), 1e-4)

    def test_local_norms_are_those_of_a_process_with_this_part(self, kernels: list[dict[str, Any]]) -> None:
        name = next(iter(CELLS))
        x, factors = inputs_of(name, CHANNELS, SIZE, IMAGE)
        for number, rank in enumerate(kernels):
            expected = outcome(picked(name, CHANNELS, factors), x, factors, fused=False, part=part_of(number))
            require_close(rank["local"], expected, 1e-4)
