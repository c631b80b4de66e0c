"""Fused cells of derived networks whose norms are shared by two real processes, against one process.

TRITON_INTERPRET=1 pytest tests/distributed/test_derived_ranks.py also runs the kernels on a CPU.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from softcell.engine.distributed import World
from tests.helpers.derived_ranks import CHANNELS, FORMS, SIZE, cell_pass, groups_of, network_steps, part_of
from tests.helpers.engine_launch import on_ranks, results, start_ranks
from tests.helpers.kernel_runs import MARKS

TOLERANCE = 1e-10
OUTCOMES = ("output", "statistics", "gradient of parameters", "gradient of older", "gradient of newer")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("derived")
    return on_ranks(2, "derived_ranks", "twins_on_rank", folder)


def whole(first: list[Tensor], second: list[Tensor]) -> list[Tensor]:
    """Of two ranks' outcomes: maps one after the other, gradients of parameters summed, statistics of the first."""
    out, moments, parameters, *inputs = zip(first, second, strict=True)
    return [torch.cat(out), moments[0], sum(parameters), *map(torch.cat, inputs)]  # type: ignore[list-item]


def far(found: list[Tensor], expected: list[Tensor], tolerance: float) -> dict[str, float]:
    errors = {
        name: float((a.double() - b).norm() / (b.norm() + 1e-12))
        for name, a, b in zip(OUTCOMES, found, expected, strict=True)
    }
    return {name: error for name, error in errors.items() if not error <= tolerance}


@pytest.mark.parametrize("form", FORMS)
def test_the_twin_of_two_ranks_equals_that_of_one_process(ranks: list[dict[str, Any]], form: str) -> None:
    expected = cell_pass(form, slice(0, SIZE), plain=True, shared=False)
    assert not far(whole(ranks[0][form], ranks[1][form]), expected, TOLERANCE)
    assert torch.equal(ranks[0][form][1], ranks[1][form][1]), "both ranks have the same statistics"
    alone = cell_pass(form, part_of(0), plain=True, shared=False)
    assert far(ranks[0][form], alone, 0.01).keys() == set(OUTCOMES), "statistics of a part alone give something else"


def test_steps_of_a_fused_training_equal_those_of_modules_on_one_process(ranks: list[dict[str, Any]]) -> None:
    expected = network_steps(slice(0, 6), World(0, 1, 0, torch.device("cpu")), fused=False)
    for rank in ranks:
        assert rank["cells fused"] == 3 * 2 + 3, "3 cells in 2 steps with shared norms, and in one with local ones"
        for name, value in expected.items():
            torch.testing.assert_close(rank["network"][name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


def test_fused_cells_send_one_collective_per_norm_group(ranks: list[dict[str, Any]]) -> None:
    counts = ranks[0]["collectives"]
    assert counts["local"] == 1, "the gradients"
    assert 1 < counts["fused"] < counts["modules"] / 2
    assert len(ranks[0]["sizes"]) == 2 * sum(len(groups_of(form)[0]) for form in FORMS), "forward and backward"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("kernels")
    return results(start_ranks(2, "derived_ranks", "kernels_on_rank", folder), folder, timeout=500.0)


class TestKernels:
    pytestmark = MARKS

    @pytest.mark.parametrize("form", FORMS)
    def test_kernels_of_two_ranks_equal_the_twin_of_one_process(self, kernels: list[dict[str, Any]], form: str) -> None:
        expected = cell_pass(form, slice(0, SIZE), plain=True, shared=False)
        assert not far(whole(kernels[0][form], kernels[1][form]), expected, 1e-5)
        assert torch.equal(kernels[0][form][1], kernels[1][form][1]), "both ranks have the same statistics"

    @pytest.mark.parametrize("form", FORMS)
    def test_kernels_send_every_norm_once_and_those_of_a_group_together(
        self, kernels: list[dict[str, Any]], form: str
    ) -> None:
        forward, backward = groups_of(form)
        assert sum(forward) == sum(backward), "every norm once in each direction"
        # Forward a row of each rank: mean and squares of all channels, and the number of its rows. Backward two sums.
        rows = [2 * (2 * CHANNELS * norms + 1) for norms in forward]
        assert kernels[0][f"{form}: sizes"] == [*rows, *(2 * CHANNELS * norms for norms in backward)]

    def test_local_norms_are_those_of_a_process_with_this_part(self, kernels: list[dict[str, Any]]) -> None:
        for number, rank in enumerate(kernels):
            expected = cell_pass(next(iter(FORMS)), part_of(number), plain=True, shared=False)
            assert not far(rank["local"], expected, 1e-5)
