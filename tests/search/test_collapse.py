"""What counts as a skip connection when a search is watched for its collapse."""

from softcell.arch import Cell, Pick, sample
from softcell.search.collapse import SKIP, CollapseWatch, share
from softcell.search.recipe import Collapse
from softcell.spaces import build_space


def test_edges_that_only_choose_whether_to_be_there_do_not_count() -> None:
    table = build_space("s1", {}).layout().table("normal")
    picks = (Pick(0, 2, SKIP), Pick(1, 2, "dil_conv_5x5"), Pick(0, 3, "none"))
    assert share(Cell(picks, (2,)), SKIP, table) == 0.5

    layout = build_space("nb1shot1-1", {}).layout()
    told: list[str] = []
    watch = CollapseWatch(Collapse(stop=True), layout, told.append)
    for seed in range(5):
        genotype = sample(layout, seed)
        assert any(pick.op == SKIP for pick in genotype.cells["cell"].picks), "links to parents"
        assert share(genotype.cells["cell"], SKIP, layout.table("cell")) == 0.0
        assert watch.look(seed, genotype) is None
    assert told == []
