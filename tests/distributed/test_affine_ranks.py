"""Fused NAS-Bench-201 networks whose norms are shared by two real processes, against one process."""

from typing import Any

import pytest
import torch

from softcell.engine.distributed import World
from softcell.spaces import execution
from softcell.spaces.execution import is_modules_only, modules_only
from tests.helpers.engine_launch import on_ranks
from tests.helpers.picked_ranks import SIZE, network_steps


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(2, "picked_ranks", "steps_on_rank", tmp_path_factory.mktemp("picked"))


def test_fused_steps_of_two_ranks_equal_those_of_one_process(
    ranks: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process fuses its cells too, since modules draw drop-path's factors in another order."""
    monkeypatch.setattr(execution, "kernels_serve", lambda x: not is_modules_only())
    alone = World(0, 1, 0, torch.device("cpu"))
    expected = network_steps(slice(0, SIZE), alone)
    for rank in ranks:
        assert rank["cells"] == 3 * 2 * 2, "3 cells in 2 steps, with shared norms and with local ones"
        for name, value in expected.items():
            torch.testing.assert_close(rank["shared"][name], value, rtol=1e-10, atol=1e-10, msg=name)
    with modules_only():
        other = network_steps(slice(0, SIZE), alone)
    assert not torch.equal(other["skeleton.classifier.weight"], expected["skeleton.classifier.weight"]), (
        "drop-path drops something"
    )


def test_fused_cells_send_one_collective_per_norm_group(ranks: list[dict[str, Any]]) -> None:
    counts = ranks[0]["collectives"]
    assert counts["local"] == 2, "the gradients of two steps"
    assert 2 < counts["fused"] < counts["modules"]
