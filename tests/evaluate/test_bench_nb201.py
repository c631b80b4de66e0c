"""The NAS-Bench-201 table: reading, look-up, ranking, converting; with synthetic and, if available, real data."""

from __future__ import annotations

import bz2
import itertools
import math
import pickle
import statistics
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from softcell.arch import Cell, Genotype, Pick, Positive, Rule, StrongestEach, TopInputs, WeightMix
from softcell.arch.notation import from_nb201
from softcell.errors import UserError
from softcell.evaluate.nb201 import (
    COLUMNS,
    EDGES,
    OPERATIONS,
    Nb201Table,
    check_search,
    convert,
    kendall,
    load_table,
    mean_tau,
    notation,
    taus,
    write_table,
    zero_cost,
)
from softcell.methods.proxies import SUPERNET_PROXIES, Proxy, prepare, score
from softcell.spaces import build_space
from tests.helpers.bench_tables import WORTH, accuracy, made_rows, real_table, text_of, write_made

ARCH = text_of(("nor_conv_3x3", "skip_connect", "none", "avg_pool_3x3", "nor_conv_1x1", "skip_connect"))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Nb201Table:
    return load_table(write_made(tmp_path_factory.mktemp("nb201") / "made.csv.gz"))


@pytest.fixture(scope="module")
def real() -> Nb201Table:
    file = real_table()
    if file is None:
        pytest.skip("no table of NAS-Bench-201: set SOFTCELL_NB201 to nb201_200epochs.csv.gz or its folder")
    return load_table(file)


def test_an_architecture_is_found_by_its_operations(table: Nb201Table) -> None:
    ops = ("nor_conv_3x3", "skip_connect", "none", "avg_pool_3x3", "nor_conv_1x1", "skip_connect")
    assert table.is_complete
    assert table.lookup(from_nb201(ARCH)) == {column: accuracy(ops, i) for i, column in enumerate(COLUMNS)}
    without_none = [pick for pick in from_nb201(ARCH).cells["cell"].picks if pick.op != "none"]
    assert table.lookup(Genotype("nb201", {"cell": Cell(tuple(without_none), (3,))})) == table.lookup(from_nb201(ARCH))


def test_optimum_and_chance_match_the_whole_table(table: Nb201Table) -> None:
    values = [row["cifar100_test"] for row in made_rows().values()]
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
    assert table.optimum()["cifar100_test"] == max(values)
    assert table.chance()["cifar100_test"] == pytest.approx((mean, deviation))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_best_of_random_cells_matches_all_draws(count: int) -> None:
    by, other = COLUMNS.index("cifar10_valid"), COLUMNS.index("cifar100_test")
    values = np.zeros((5, len(COLUMNS)))
    values[:, by] = [80.0, 90.0, 70.0, 90.0, 60.0]  # two equal ones are the best
    values[:, other] = [50.0, 30.0, 70.0, 34.0, 10.0]
    small = Nb201Table("made", {(str(i),): i for i in range(5)}, values)
    found = []
    for drawn in itertools.product(range(5), repeat=count):
        best = [i for i in drawn if values[i, by] == max(values[list(drawn), by])]
        found += [values[i, other] for i in best for _ in range(60 // len(best))]  # ties: each of them equally often
    assert small.best_of(count)["cifar100_test"] == pytest.approx((statistics.fmean(found), statistics.pstdev(found)))


def test_the_best_of_one_random_cell_is_a_random_cell_and_of_very_many_the_best(table: Nb201Table) -> None:
    one, chance = table.best_of(1), table.chance()
    assert all(one[column] == pytest.approx(chance[column]) for column in COLUMNS)
    assert table.best_of(10**7)["cifar10_valid"][0] == pytest.approx(table.optimum()["cifar10_valid"])
    with pytest.raises(ValueError, match="count=0"):
        table.best_of(0)


def test_best_accuracy_goes_through_all_completions(table: Nb201Table) -> None:
    found = table.best_accuracy("cifar10_test")
    for edge, k in ((0, 0), (3, 2), (5, 4)):
        completions = itertools.product(OPERATIONS, repeat=5)
        best = max(accuracy((*rest[:edge], OPERATIONS[k], *rest[edge:]), 1) for rest in completions)
        assert found[edge][k] == best


def test_with_each_operation_one_edge_of_the_derived_cell_changes(table: Nb201Table) -> None:
    genotype = from_nb201(ARCH)
    own = [pick.op for pick in genotype.cells["cell"].picks]
    found = table.with_each(genotype, "imagenet16_valid")
    for edge, k in ((1, 3), (4, 0)):
        changed = (*own[:edge], OPERATIONS[k], *own[edge + 1 :])
        assert found[edge][k] == accuracy(changed, COLUMNS.index("imagenet16_valid"))
    assert all(
        row[OPERATIONS.index(op)] == table.lookup(genotype)["imagenet16_valid"]
        for row, op in zip(found, own, strict=True)
    )


def tau_b(x: list[float], y: list[float]) -> float:
    """Kendall's tau-b by its definition."""
    pairs = [(x[i] - x[j], y[i] - y[j]) for i in range(len(x)) for j in range(i)]
    score = sum((a * b > 0) - (a * b < 0) for a, b in pairs)
    return score / math.sqrt(sum(a != 0 for a, _ in pairs) * sum(b != 0 for _, b in pairs))


def test_kendall_is_tau_b_with_ties() -> None:
    for x, y in (([1.0, 2, 3, 4, 5], [1.0, 3, 2, 5, 4]), ([1.0, 1, 2, 3, 3], [5.0, 4, 4, 1, 2])):
        assert kendall(x, y) == pytest.approx(tau_b(x, y))
    assert math.isnan(kendall([1.0, 1.0], [1.0, 2.0]))
    assert math.isnan(kendall([1.0, 2.0], [math.nan, 2.0]))
    assert mean_tau([0.5, math.nan, 1.0]) == 0.75 and math.isnan(mean_tau([math.nan]))


def test_an_indicator_equal_to_the_accuracies_has_tau_1_and_its_negative_minus_1(table: Nb201Table) -> None:
    right = [[WORTH[op] for op in OPERATIONS] for _ in EDGES]
    wrong = [[-value for value in row] for row in right]
    for column in ("cifar10_valid", "cifar100_test"):
        for ranking in ("best", "derived"):
            assert taus(table, right, from_nb201(ARCH), column)[ranking] == pytest.approx([1.0] * 6)
            assert taus(table, wrong, from_nb201(ARCH), column)[ranking] == pytest.approx([-1.0] * 6)
    with pytest.raises(UserError, match="6 edges with 5 operations"):
        taus(table, right[:4], from_nb201(ARCH), "cifar10_valid")


def test_a_table_with_missing_rows_says_so(tmp_path: Path) -> None:
    rows = dict(itertools.islice(made_rows().items(), 7))
    write_table(tmp_path / "few.csv", rows)
    few = load_table(tmp_path / "few.csv")
    assert not few.is_complete
    with pytest.raises(UserError, match=r"has no row .* 7 of 15,625"):
        few.lookup(from_nb201(ARCH))
    assert math.isnan(few.best_accuracy("cifar10_test")[0][3])


HEADER = "arch," + ",".join(COLUMNS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arch,accuracy\n", "needs the columns cifar10_valid"),
        (HEADER + "\n", "at least one row"),
        (HEADER + "\nnonsense,1,1,1,1,1,1\n", "line 2"),
        (HEADER + f"\n{ARCH},1,1,1,1,1,101\n", "imagenet16_test must be an accuracy in percent"),
        (HEADER + f"\n{ARCH},1,1,x,1,1,1\n", "cifar100_valid must be"),
        (HEADER + f"\n{ARCH},1,1,1,1,1\n", "imagenet16_test must be"),
        (HEADER + f"\n{ARCH},1,1,1,1,1,1\n{ARCH},1,1,1,1,1,1\n", "duplicate row"),
        (HEADER + f"\n{ARCH.replace('none', 'sep_conv_3x3')},1,1,1,1,1,1\n", "line 2: .*sep_conv_3x3"),
        (HEADER + "\n|nor_conv_3x3~0|+|nor_conv_3x3~0|none~1|,1,1,1,1,1,1\n", "line 2: .* ends in 2"),
    ],
)
def test_wrong_tables_are_refused_with_what_is_wrong(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "wrong.csv"
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        load_table(file)


def test_files_that_are_no_table_are_refused(tmp_path: Path) -> None:
    for content in (b"\x1f\x8bgarbage", bytes(range(128, 256))):
        (tmp_path / "binary").write_bytes(content)
        with pytest.raises(UserError, match="cannot be read as CSV"):
            load_table(tmp_path / "binary")
    with pytest.raises(UserError, match="does not exist"):
        load_table(tmp_path / "absent.csv")
    with pytest.raises(UserError, match="is a folder"):
        load_table(tmp_path)


def test_genotypes_of_other_spaces_are_not_looked_up(table: Nb201Table) -> None:
    with pytest.raises(UserError, match="genotypes of space 'nb201' only"):
        table.lookup(Genotype("darts", {"normal": Cell((Pick(0, 2, "none"),), (2,))}))
    twice = Cell((Pick(0, 1, "none"), Pick(0, 1, "skip_connect")), (3,))
    with pytest.raises(UserError, match="several on one edge"):
        table.lookup(Genotype("nb201", {"cell": twice}))


SMALLER = "|nor_conv_3x3~0|+|nor_conv_3x3~0|none~1|"


def test_cells_of_another_shape_are_not_filled_up_with_none(table: Nb201Table) -> None:
    filled = Genotype("nb201", {"cell": Cell(from_nb201(SMALLER).cells["cell"].picks, (3,))})
    assert table.lookup(filled)["cifar10_test"] == 10 + 5 * 2 + 5 * 3, "such a row exists: node 3 gets nothing"
    larger = ARCH + "+|none~0|none~1|none~2|none~3|"
    for text in (SMALLER, larger, "|nor_conv_3x3~0|"):
        with pytest.raises(UserError, match="cells of 4 nodes that end in node 3, but this one ends in"):
            table.lookup(from_nb201(text))
    picks = from_nb201(ARCH).cells["cell"].picks
    with pytest.raises(UserError, match="ends in 2, 3"):
        table.lookup(Genotype("nb201", {"cell": Cell(picks, (2, 3))}))
    with pytest.raises(UserError, match="one cell named 'cell'"):
        table.lookup(Genotype("nb201", {"normal": Cell(picks, (3,))}))


def test_the_notation_of_a_cell_names_every_edge() -> None:
    assert notation(from_nb201(ARCH)) == ARCH
    without_none = tuple(pick for pick in from_nb201(ARCH).cells["cell"].picks if pick.op != "none")
    assert notation(Genotype("nb201", {"cell": Cell(without_none, (3,))})) == ARCH


@pytest.mark.parametrize("rule", [None, StrongestEach(("none",)), TopInputs()])
def test_searches_whose_cells_the_table_has_are_let_through(rule: Rule | None) -> None:
    check_search("darts", build_space("nb201", {}).layout(), rule)
    check_search("darts", build_space("nb201", {"candidates": ("nor_conv_3x3", "none")}).layout(), rule)


@pytest.mark.parametrize(
    ("space", "settings", "rule", "message"),
    [
        ("nb201", {}, Positive(), "dst would derive cells that the table does not have.* several on one edge"),
        ("nb201", {"nodes": 3}, None, "ends in 2"),
        ("nb201", {"nodes": 5}, None, "ends in 4"),
        ("nb201", {"candidates": ("none", "sep_conv_3x3")}, None, "this search also has sep_conv_3x3"),
        ("darts", {}, None, "genotypes of space 'nb201' only"),
    ],
)
def test_searches_whose_cells_it_lacks_are_refused_beforehand(
    space: str, settings: dict[str, Any], rule: Rule | None, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_search("dst", build_space(space, settings).layout(), rule)


def test_thresholds_that_leave_one_operation_to_an_edge_are_no_reason_to_refuse() -> None:
    check_search("dst", build_space("nb201", {"candidates": ("none", "nor_conv_3x3")}).layout(), Positive())


def info(ops: tuple[str, ...], key: str) -> dict[str, Any]:
    """One architecture in the layout of the official files, with two seeds on CIFAR-10."""
    names = {"cifar10-valid": ["x-valid", "ori-test"], "cifar10": ["ori-test"]}
    names |= {name: ["x-valid", "x-test", "ori-test"] for name in ("cifar100", "ImageNet16-120")}
    results = OrderedDict()
    for number, (name, splits) in enumerate(names.items()):
        for seed in (777, 888) if name == "cifar10" else (777,):
            shift = 1.0 if seed == 888 else 0.0
            values = {
                f"{split}@{epoch}": np.float64(50.0 + number + shift + 0.1 * k + epoch / 1000)
                for k, split in enumerate(splits)
                for epoch in (11, 199)
            }
            results[name, seed] = {"seed": seed, "eval_acc1es": values}
    return {"12": {"all_results": {}}, key: {"arch_str": text_of(ops), "all_results": results}}


EXPECTED = dict(zip(COLUMNS, (50.199, 51.699, 52.199, 52.299, 53.199, 53.299), strict=True))


def test_folders_of_nats_bench_are_converted(tmp_path: Path) -> None:
    cells = list(itertools.islice(itertools.product(OPERATIONS, repeat=6), 3))
    for number, ops in enumerate(cells):
        (tmp_path / f"{number:06d}.pickle.pbz2").write_bytes(bz2.compress(pickle.dumps(info(ops, "200"))))
    (tmp_path / "meta.pickle.pbz2").write_bytes(b"not looked at")
    found = convert(tmp_path)
    assert list(found) == [text_of(ops) for ops in cells]
    assert all(row == pytest.approx(EXPECTED) for row in found.values())
    whole = {"meta_archs": list(found), "arch2infos": {i: info(ops, "200") for i, ops in enumerate(cells)}}
    (tmp_path / "all.pickle.pbz2").write_bytes(bz2.compress(pickle.dumps(whole)))
    assert convert(tmp_path / "all.pickle.pbz2") == found
    write_table(tmp_path / "out.csv.gz", found)
    assert load_table(tmp_path / "out.csv.gz").lookup(from_nb201(text_of(cells[1]))) == pytest.approx(EXPECTED)


def test_the_file_of_nas_bench_201_is_converted(tmp_path: Path) -> None:
    ops = ("nor_conv_3x3",) * 6
    torch.save({"meta_archs": [text_of(ops)], "arch2infos": {0: info(ops, "full")}}, tmp_path / "bench.pth")
    assert convert(tmp_path / "bench.pth")[text_of(ops)] == pytest.approx(EXPECTED)


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("a pickle has run code",)


def test_files_that_would_run_code_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "000000.pickle.pbz2").write_bytes(bz2.compress(pickle.dumps({"200": Trap()})))
    with pytest.raises(UserError, match=r"builtins\.print, which is not allowed"):
        convert(tmp_path)
    torch.save({"arch2infos": {0: Trap()}}, tmp_path / "bench.pth")
    with pytest.raises(UserError, match="without running code from it"):
        convert(tmp_path / "bench.pth")
    assert "has run code" not in capsys.readouterr().out


@pytest.mark.parametrize("content", [{}, {"200": {}}, {"200": {"arch_str": ARCH, "all_results": {}}}, [1]])
def test_official_files_without_accuracies_are_refused(content: Any, tmp_path: Path) -> None:
    (tmp_path / "000000.pickle.pbz2").write_bytes(bz2.compress(pickle.dumps(content)))
    with pytest.raises(UserError, match="not where NAS-Bench-201 stores them"):
        convert(tmp_path)
    with pytest.raises(UserError, match="--convert takes"):
        convert(tmp_path / "absent")


def test_naswot_is_the_log_determinant_of_agreeing_relus() -> None:
    space = build_space("nb201", {"cells_per_stage": 1, "channels": 2, "candidates": ("nor_conv_1x1",), "nodes": 2})
    supernet, x = space.supernet((1, 4, 4), 3).double().train(), torch.randn(4, 1, 4, 4, dtype=torch.float64)
    codes: list[torch.Tensor] = []
    original = torch.relu
    mix = WeightMix(space.layout(), {"cell": torch.ones(1, 1, dtype=torch.float64)})

    def noted(value: torch.Tensor) -> torch.Tensor:
        codes.append((original(value) > 0).flatten(1).double())
        return original(value)

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch, "relu", noted)
        patch.setattr(torch.nn.functional, "relu", lambda value, inplace=False: noted(value))
        supernet(x, mix)
    kernel = sum(c @ c.T + (1 - c) @ (1 - c).T for c in codes)
    assert score("naswot", lambda x: supernet(x, mix), supernet, x, torch.arange(4)) == pytest.approx(
        float(torch.linalg.slogdet(kernel).logabsdet)
    )


def test_synflow_is_the_sum_of_weight_times_gradient_of_absolute_weights() -> None:
    space = build_space("nb201", {"cells_per_stage": 1, "channels": 2, "candidates": ("nor_conv_3x3",), "nodes": 2})
    supernet = space.supernet((1, 4, 4), 3).double().eval()
    for p in supernet.parameters():
        p.data.abs_()
    mix = WeightMix(space.layout(), {"cell": torch.ones(1, 1, dtype=torch.float64)})
    ones = torch.ones(1, 1, 4, 4, dtype=torch.float64)
    base = float(supernet(ones, mix).sum().detach())
    found = score(
        "synflow",
        lambda x: supernet(x, mix),
        supernet,
        torch.zeros(2, 1, 4, 4, dtype=torch.float64),
        torch.zeros(2).long(),
    )
    total, step = 0.0, 1e-6
    for p in supernet.parameters():  # θ · ∂R/∂θ of a whole tensor is how R answers to scaling it
        kept = p.data.clone()
        p.data.mul_(1 + step)
        total += (float(supernet(ones, mix).sum().detach()) - base) / step
        p.data.copy_(kept)
    assert found == pytest.approx(total, rel=1e-4)


def test_zero_cost_indicators_rank_a_convolution_above_nothing() -> None:
    space = build_space(
        "nb201", {"cells_per_stage": 1, "channels": 4, "candidates": ("none", "nor_conv_3x3"), "nodes": 2}
    )
    x, labels = torch.randn(8, 3, 8, 8), torch.arange(8)
    for proxy in ("naswot", "synflow"):
        found = zero_cost(space, proxy, x, labels, 10)["cell"]  # type: ignore[arg-type]
        assert found[0, 1] > found[0, 0]
        assert torch.equal(found, zero_cost(space, proxy, x, labels, 10)["cell"])  # type: ignore[arg-type]


@pytest.mark.parametrize("proxy", SUPERNET_PROXIES)
def test_an_indicator_is_the_negative_score_without_the_operation(proxy: Proxy) -> None:
    space = build_space("nb201", {"cells_per_stage": 1, "channels": 2, "nodes": 2})
    x, labels = torch.randn(8, 3, 8, 8), torch.arange(8)
    found = zero_cost(space, proxy, x, labels, 10, seed=3)["cell"]
    assert found.shape == (1, 5) and found.isfinite().all() and len(set(found[0].tolist())) > 1
    for k in range(5):
        torch.manual_seed(3)
        supernet = space.supernet((3, 8, 8), 10).double()
        weights = torch.full((1, 5), 0.25, dtype=torch.float64)
        weights[0, k] = 0.0
        mix = WeightMix(space.layout(), {"cell": weights})
        without = score(proxy, lambda images: supernet(images, mix), prepare(supernet, proxy), x.double(), labels)  # noqa: B023
        assert float(found[0, k]) == pytest.approx(-without, rel=1e-6)


def test_sizes_are_no_indicators() -> None:
    with pytest.raises(UserError, match="its params are the same under all"):
        zero_cost(build_space("nb201"), "params", torch.zeros(2, 3, 8, 8), torch.zeros(2).long(), 10)


def test_the_real_table_does_not_know_a_smaller_cell(real: Nb201Table) -> None:
    with pytest.raises(UserError, match="ends in 2"):
        real.lookup(from_nb201(SMALLER))


def test_the_real_table_has_the_published_optimum(real: Nb201Table) -> None:
    assert real.is_complete
    assert round(real.optimum()["cifar10_test"], 2) == 94.37
    assert round(real.optimum()["cifar100_test"], 2) == 73.51
    assert round(real.optimum()["imagenet16_test"], 2) == 47.31
    best = real.best_accuracy("cifar10_test")
    assert max(best[0]) == real.optimum()["cifar10_test"] and all(not math.isnan(v) for row in best for v in row)
