"""The studies of NOS: counting by addition is counting, and the comparison resumes where it stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from softcell.arch import sample
from softcell.errors import UserError
from softcell.nn.calibrate import DynamicKernel
from softcell.spaces.costs import count_genotype
from softcell.spaces.nos import NosSpace
from studies import nos_dynamic, nos_guidance, runs
from studies.nos_parameters import ParameterCount
from tests.helpers.search_toys import write_data


@pytest.mark.parametrize("space", [NosSpace(cells=4, channels=6, nodes=2), NosSpace(cells=3, channels=8, nodes=3)])
def test_parameters_add_up(space: NosSpace) -> None:
    counted = ParameterCount(space, (3, 16, 16), 7)
    for seed in range(4):
        genotype = sample(space.layout(), seed)
        assert counted(genotype) == count_genotype(space, genotype, (3, 16, 16), 7).parameters


def test_two_and_a_half_million_is_within_the_range_of_cifar_networks() -> None:
    space = NosSpace(cells=20, channels=36)
    counted, layout = ParameterCount(space, (3, 32, 32), 10), space.layout()
    found = [counted(sample(layout, seed)) for seed in range(100)]
    assert min(found) < 2.4e6 and max(found) > 2.6e6
    assert any(2.4e6 < number < 2.6e6 for number in found)


def test_the_comparison_is_made_in_parts_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(48) % 3
    images = rng.integers(0, 255, (48, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", x_train=images, y_train=labels, x_test=images[:12], y_test=labels[:12])
    monkeypatch.chdir(tmp_path)
    sizes = ["space.cells=3", "space.channels=2", "space.nodes=1", "threads=1", "batch_size=12"]
    arguments = [
        "--data",
        "data.npz",
        "--scale",
        "small",
        "--seeds",
        "1",
        "2",
        "--device",
        "cpu",
        "--teacher",
        "resnet18",
    ]
    arguments += ["--teacher-epochs", "1", "--search-epochs", "1", "--train-epochs", "1", "--precision", "float32"]
    arguments += [
        item for value in ("classifier.width=2", "threads=1", "batch_size=12") for item in ("--teacher-set", value)
    ]
    arguments += [item for value in sizes for item in ("--search-set", value)]
    arguments += [item for value in (*sizes, "auxiliary=0") for item in ("--train-set", value)]

    def nothing(*_: object, **__: object) -> Iterator[None]:
        return
        yield

    for part in ("teacher", "search", "train"):
        with pytest.raises(UserError, match="epochs must be a whole number"):
            nos_guidance.main([*arguments, f"--{part}-set", "epochs=x"])
    assert not (tmp_path / "runs").exists(), "wrong settings are refused before the first run"

    with monkeypatch.context() as halted:
        halted.setattr(runs, "train_steps", nothing)
        nos_guidance.main(arguments)
    file = tmp_path / "results/nos/guidance-data.json"
    record = json.loads(file.read_text())
    assert isinstance(record["teacher"]["test_accuracy"], float)
    assert record["summary"]["guided"]["search_accuracy"]["n"] == 2
    assert record["summary"]["guided"]["test_accuracy"] == "not measured"
    assert record["guided_less_unguided"]["test_accuracy"] == "not measured"
    assert record["teacher"]["recipe"]["lr_every"] == 1
    for row in record["rows"]:
        assert bool(row["gradient_norms"]) == (row["arm"] == "guided")
        assert {"train_accuracy", "val_accuracy"} <= row["curves"].keys()
        assert ("guide_loss" in row["curves"]) == (row["arm"] == "guided")

    before = (tmp_path / "runs/nos-study/guided-data-1/metrics.jsonl").read_text()
    nos_guidance.main(arguments)
    assert (tmp_path / "runs/nos-study/guided-data-1/metrics.jsonl").read_text() == before
    record = json.loads(file.read_text())
    for arm in ("guided", "unguided"):
        assert record["summary"][arm]["test_accuracy"]["n"] == 2
    assert all(row["trained"]["recipe"]["epochs"] == 1 for row in record["rows"])
    assert "<svg" in (tmp_path / "results/nos/guidance-data.svg").read_text()
    assert "<svg" in (tmp_path / "results/nos/guided-data-1.svg").read_text()

    # What lies there was made otherwise: refused, also where there is no time to resume anything.
    made, pyramid = file.read_text(), [word.replace("classifier.width=2", "classifier.depth=11") for word in arguments]
    for other in (
        [*arguments, "--teacher-epochs", "2"],
        [*pyramid, "--teacher", "pyramidnet"],
        [*arguments, "--search-epochs", "2"],
        [*arguments, "--train-epochs", "2"],
    ):
        with pytest.raises(UserError, match="a resumed run keeps its recipe"):
            nos_guidance.main([*other, "--minutes", "0"])
    assert file.read_text() == made
    for value in ("-1", "nan", "soon"):
        with pytest.raises(SystemExit) as ended:
            nos_guidance.main([*arguments, "--minutes", value])
        assert ended.value.code == 2

    # The runs are gone, and one training was never recorded: it alone is made again, without a teacher.
    left = json.loads(file.read_text())
    left["rows"][1]["trained"], left["rows"][1]["epochs_done"][1] = "not measured", 9
    file.write_text(json.dumps(left))
    (tmp_path / "runs").rename(tmp_path / "gone")
    nos_guidance.main([*arguments, "--searched", str(file)])
    again = json.loads(file.read_text())
    for row, was in zip(again["rows"], record["rows"], strict=True):
        assert row["trained"].pop("seconds") > 0 and was["trained"].pop("seconds") > 0
        assert row == was
    assert again["teacher"] == record["teacher"]
    made = {path.name: [entry.name for entry in path.iterdir()] for path in (tmp_path / "runs/nos-study").iterdir()}
    assert made == {"guided-data-1": ["training"]}
    with pytest.raises(UserError, match=r"guided with seed 1 by another recipe: guide differ"):
        nos_guidance.main([*arguments, "--searched", str(file), "--teacher", "pyramidnet"])


def test_arms_are_compared_at_seeds_where_both_are_measured() -> None:
    accuracies = {
        ("guided", 0): 0.9,
        ("unguided", 0): 0.7,
        ("guided", 1): 0.8,
        ("unguided", 1): 0.7,
        ("guided", 2): 0.1,
    }
    rows: list[dict[str, Any]] = [
        {"arm": arm, "seed": seed, "search": {"val_accuracy": value}, "trained": "not measured"}
        for (arm, seed), value in accuracies.items()
    ]
    rows.append({"arm": "unguided", "seed": 2, "search": "not measured", "trained": "not measured"})
    found = nos_guidance.differences(rows)
    assert found["test_accuracy"] == "not measured"
    assert found["search_accuracy"]["by_seed"] == pytest.approx({0: 0.2, 1: 0.1})
    assert (found["search_accuracy"]["n"], found["search_accuracy"]["mean"]) == (2, pytest.approx(0.15))


def test_kernels_of_the_study_of_dynamic_convolutions_are_what_they_are_called() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 16, 9, 9, dtype=torch.float64)
    for size in (3, 5):
        box, identity = nos_dynamic.BoxKernel(16, size).double(), nos_dynamic.IdentityKernel(16, size).double()
        mean = torch.nn.functional.avg_pool2d(x, size, 1, size // 2, count_include_pad=True)
        torch.testing.assert_close(box.applied(x, box(x)), mean)
        kernel = identity(x)
        torch.testing.assert_close(kernel.sum((2, 3)), torch.ones(2, 16, dtype=torch.float64))
        assert kernel[:, :, size // 2, size // 2].min() > 0.9
        plain = DynamicKernel(16, size).double()
        plain.load_state_dict(identity.state_dict())
        shifted = plain(x).log()
        shifted[:, :, size // 2, size // 2] += nos_dynamic.IDENTITY
        torch.testing.assert_close(kernel, torch.softmax(shifted.flatten(2), 2).view_as(kernel))


def test_the_study_of_dynamic_convolutions_measures_kernels_weights_and_picks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_data(tmp_path / "toys.npz", train=32)
    monkeypatch.chdir(tmp_path)
    sizes = ["space.channels=2", "space.nodes=1", "batch_size=16", "scale=small"]
    arguments = ["--data", str(data), "--epochs", "1", "--seeds", "1", "--device", "cpu", "--precision", "float32"]
    arguments += [word for one in sizes for word in ("--set", one)]
    nos_dynamic.main([*arguments, "--arms", "box", "paper", "--minutes", "0"])

    def record() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(Path("results/nos/dynamic-toys.json").read_text())
        return found

    assert {row["search"] for row in record()["rows"]} == {"not measured"}
    nos_dynamic.main([*arguments, "--arms", "box", "paper"])
    found = record()
    box, paper = (row["search"] for row in found["rows"])
    assert max(box["uneven"].values()) < 1e-6 < min(paper["uneven"].values())
    for one, names in ((box, ("box_3x3", "box_5x5")), (paper, ("dynamic_conv_3x3", "dynamic_conv_5x5"))):
        assert sum(one["picks"].values()) == 6 and set(names) < set(one["weights"]["tier 2"])
        assert sum(one["weights"]["tier 1"].values()) == pytest.approx(1.0)
        assert one["dynamic_picks"] == sum(one["picks"].get(name, 0) for name in names)
    assert found["summary"]["paper"]["picks"] == 6 and found["start"]["uneven"]["3x3"] < 0.5
    assert {"features", "attentions", "dynamic kernel, decode"} < set(found["start"]["gradient_over_weight"])
    assert 0.4 < found["start"]["added_over_base"]["channel_attention"] < 0.6


def test_the_pages_table_of_dynamic_convolutions_is_the_record() -> None:
    root = Path(__file__).parents[2]
    record = json.loads((root / "results/nos/dynamic-digits.json").read_text())
    page = (root / "docs/papers/nos.md").read_text(encoding="utf-8")
    rows = {
        "Appendix A.1": "paper",
        "box filters": "box",
        "initialised as the identity": "identity",
        "Appendix A.1, initial logits with standard deviation 1": "normal",
    }
    for label, arm in rows.items():
        found = record["summary"][arm]
        shown = [f"{one['mean']:.3f} ± {one['std']:.3f}" for one in found["weights"].values()]
        line = " | ".join(["", label, *shown, f"{found['dynamic_picks']} of {found['picks']}", ""]).strip()
        assert line in page, line
        assert {one["n"] for one in found["weights"].values()} == {3}
