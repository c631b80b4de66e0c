"""What counts as a skip connection for collapse detection."""

import pytest

from softcell.arch import Cell, Pick, sample
from softcell.search._meters import SKIP, CollapseMeter, share
from softcell.search.recipe import Collapse
from softcell.spaces import build_space


def test_edges_that_only_choose_whether_to_be_there_do_not_count() -> None:
    table = build_space("s1", {}).layout().table("normal")
    picks = (Pick(0, 2, SKIP), Pick(1, 2, "dil_conv_5x5"), Pick(0, 3, "none"))
    assert share(Cell(picks, (2,)), SKIP, table) == 0.5

    layout = build_space("nb1shot1-1", {}).layout()
    messages: list[str] = []
    watch = CollapseMeter(Collapse(stop=True), layout, messages.append, 5)
    for seed in range(5):
        genotype = sample(layout, seed)
        assert any(pick.op == SKIP for pick in genotype.cells["cell"].picks), "links to parents"
        assert share(genotype.cells["cell"], SKIP, layout.table("cell")) == 0.0
        assert watch.check(seed, genotype) is None
    assert messages == []


@pytest.mark.parametrize(("epochs", "first"), [(1, 0), (2, 1), (3, 1), (8, 2), (50, 13)])
def test_the_first_epochs_are_not_judged(epochs: int, first: int) -> None:
    """Candidates without weights lead while convolutions are random: that is no collapse yet."""
    layout = build_space("nb201", {"candidates": ["skip_connect"]}).layout()
    genotype, messages, stops = sample(layout, 0), [], []
    watch = CollapseMeter(Collapse(stop=True, patience=1), layout, messages.append, epochs)
    for epoch in range(epochs):
        before = len(messages)
        stops.append(watch.check(epoch, genotype))
        assert (len(messages) > before) == (epoch == first), "messages once, and not before"
    assert [stop is not None for stop in stops] == [epoch >= first for epoch in range(epochs)]
    assert watch.kept is None, "there was no healthy one before"


def test_a_healthy_architecture_of_the_first_epochs_can_be_kept() -> None:
    layout = build_space("nb201", {"candidates": ["skip_connect", "nor_conv_1x1"]}).layout()
    kinds = {
        op: next(
            g for g in (sample(layout, seed) for seed in range(4000)) if {p.op for p in g.cells["cell"].picks} == {op}
        )
        for op in ("skip_connect", "nor_conv_1x1")
    }
    watch = CollapseMeter(Collapse(stop=True), layout, lambda text: None, 8)
    assert watch.check(0, kinds["nor_conv_1x1"]) is None
    assert watch.check(1, kinds["skip_connect"]) is None
    assert watch.check(2, kinds["skip_connect"]) is not None
    assert watch.kept == kinds["nor_conv_1x1"]
    patient = CollapseMeter(Collapse(stop=True, patience=2), layout, (messages := []).append, 8)
    assert patient.check(0, kinds["nor_conv_1x1"]) is None
    assert patient.check(2, kinds["skip_connect"]) is None
    assert messages == [
        "epoch 3: 100% of the cell's operations are skip connections (warning above 50%). The search may be "
        "collapsing: it ends after 2 such epochs in a row and keeps the architecture from before."
    ]
    assert patient.check(3, kinds["skip_connect"]) == (
        "collapse: 100% of the cell's operations are skip connections, more than 50% for 2 epochs"
    )
    assert patient.kept == kinds["nor_conv_1x1"]
    always = CollapseMeter(Collapse(stop=True, after=0.0), layout, lambda text: None, 8)
    assert always.check(0, kinds["skip_connect"]) is not None
