"""Fused NOS networks whose norms are shared by two real processes, against one process.

TRITON_INTERPRET=1 pytest tests/distributed/test_segmented_ranks.py also runs the kernels on a CPU.
"""

from typing import Any

import pytest
import torch

from softcell.engine.distributed import World
from softcell.spaces import execution
from softcell.spaces.execution import is_modules_only, modules_only
from tests.helpers.engine_launch import on_ranks, results, start_ranks
from tests.helpers.fused_ranks import SIZE
from tests.helpers.kernel_runs import MARKS
from tests.helpers.picked_cells import require_close, whole_of
from tests.helpers.segmented_cells import Segmented, factors_of, inputs_of, outcome, twins
from tests.helpers.segmented_ranks import CHANNELS, IMAGE, NAMES, network_steps


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(2, "segmented_ranks", "steps_on_rank", tmp_path_factory.mktemp("segmented"))


def test_fused_steps_of_two_ranks_equal_those_of_one_process(
    ranks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drop-path that process fuses its cells too, since modules draw the factors in another order."""
    twins(monkeypatch)
    monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
    alone = World(0, 1, 0, torch.device("cpu"))
    dropped = network_steps(slice(0, SIZE), alone, 0.3)
    with modules_only():
        plain = network_steps(slice(0, SIZE), alone, 0.0)
    assert not torch.equal(dropped["classifier.weight"], plain["classifier.weight"]), "drop-path drops something"
    for rank in ranks:
        assert rank["programs"] >= 3 * 2, "every cell in 2 steps"
        for kind, expected in (("shared", dropped), ("plain", plain)):
            for name, value in expected.items():
                torch.testing.assert_close(rank[kind][name], value, rtol=1e-9, atol=1e-9, msg=f"{kind} {name}")


def test_fused_cells_send_fewer_collectives_than_modules(ranks: list[dict[str, Any]]) -> None:
    counts = ranks[0]["collectives"]
    assert counts["local"] == 2, "the gradients of two steps"
    assert 2 < counts["fused"] < counts["modules"]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("kernels")
    return results(start_ranks(2, "segmented_ranks", "kernels_on_rank", folder), folder, timeout=500.0)


class TestKernels:
    pytestmark = MARKS

    @pytest.mark.parametrize("name", NAMES)
    def test_kernels_of_two_ranks_equal_modules_of_one_process(self, kernels: list[dict[str, Any]], name: str) -> None:
        cell = Segmented(name, CHANNELS).train()
        found = whole_of(*(rank[name] for rank in kernels), cell)
        exact = outcome(cell, inputs_of(cell, SIZE, IMAGE), factors_of(cell, SIZE), fused=False)
        require_close(found, exact, 1e-4)
