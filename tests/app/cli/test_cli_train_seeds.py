"""`train --seeds`: each seed equals a separate run. `train --from`: weights of an earlier training run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from softcell import api
from softcell.engine.task import Event, Stepped
from softcell.errors import UserError
from softcell.evaluate import TrainResult
from softcell.recipes import train_seeds_recipe
from softcell.search.genotypes import read_genotype
from softcell.search.supernet import restore
from softcell.seeds import train_seeds
from softcell.spaces.pretrained import load_initial
from tests.helpers.cli_calls import CELL, TINY_TRAIN, Softcell
from tests.helpers.search_toys import write_data

SMALL = {"space_settings": {"channels": 2}, "batch_size": 128, "epochs": 1, "threads": 1, "device": "cpu"}


def content(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / name).read_text())
    return found


def test_every_seed_equals_a_separate_training_run(call: Softcell, tmp_path: Path) -> None:
    answer = call("train", CELL, *TINY_TRAIN, "--seed", "3", "--seeds", "2", "--out", "out")
    assert answer.code == 0
    assert call("train", CELL, *TINY_TRAIN, "--seed", "4", "--out", "alone", "-q").code == 0
    weights = "model.safetensors"
    assert (tmp_path / "alone" / weights).read_bytes() == (tmp_path / "out" / "seed-4" / weights).read_bytes()
    reached = [content(tmp_path / "out" / f"seed-{seed}", "run.json")["results"]["accuracy"] for seed in (3, 4)]
    mean, std = statistics.fmean(reached), statistics.stdev(reached)
    assert f"{100 * mean:.2f} ± {100 * std:.2f}%  mean ± std (n=2)" in answer.out
    found = content(tmp_path / "out", "seeds.json")
    assert found["kind"] == "train" and found["best"] is None
    assert found["together"]["accuracy"] == {"mean": mean, "std": std, "n": 2}
    assert [(row["seed"], row["status"], row["accuracy"]) for row in found["seeds"]] == [
        (3, "finished", reached[0]),
        (4, "finished", reached[1]),
    ]
    compared = call("compare", "out")
    assert compared.code == 0 and "3, 4" in compared.out

    again = call("train", "--resume", "out")
    assert again.code == 0 and f"{100 * mean:.2f} ± {100 * std:.2f}%" in again.out
    assert call("train", "--resume", "out", "--seeds", "3").code == 2
    assert "softcell train --resume" in call("search", "--resume", "out").error
    assert "name one of the folders" in call("info", "out").error


def test_interrupted_seeds_are_resumed_bit_for_bit(tmp_path: Path) -> None:
    chosen, wanted, recipe, _ = train_seeds_recipe(CELL, {**SMALL, "epochs": 2}, seeds=2, out=tmp_path)
    train_seeds(wanted, recipe, tmp_path / "whole", chosen)

    def strike(seed: int) -> Any:
        def listen(event: Event) -> None:
            if seed == 1 and isinstance(event, Stepped) and (event.epoch, event.step) == (1, 2):
                os.kill(os.getpid(), signal.SIGTERM)

        return listen

    broken = train_seeds(wanted, recipe, tmp_path / "broken", chosen, on_event=strike)
    assert broken.exit_code and broken.results[1].exit_code
    assert [row["status"] for row in content(tmp_path / "broken", "seeds.json")["seeds"]] == ["finished", "open"]
    before = (tmp_path / "broken" / "seed-0" / "run.json").stat().st_mtime_ns
    resumed = api.train_seeds(seeds=2, out=tmp_path / "broken", resume=True)
    assert resumed.exit_code == 0
    assert (tmp_path / "broken" / "seed-0" / "run.json").stat().st_mtime_ns == before, "nothing is repeated"
    for seed in (0, 1):
        whole, own = (tmp_path / name / f"seed-{seed}" / "model.safetensors" for name in ("whole", "broken"))
        assert whole.read_bytes() == own.read_bytes()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--seeds", "2", "--random", "1"), "softcell compare"),
        (("--at-once", "2"), "--at-once 2 requires --seeds K or --random N"),
        (("--seeds", "0"), "--seeds must be at least 1"),
        (("--seeds", "2", "--at-once", "0"), "--at-once must be at least 1"),
    ],
)
def test_nonsensical_seeds_are_rejected(words: tuple[str, ...], said: str, call: Softcell, tmp_path: Path) -> None:
    answer = call("train", CELL, *TINY_TRAIN, *words)
    assert answer.code == 2 and said in answer.error
    assert not list(tmp_path.iterdir())


# --- from the weights of an earlier training ---


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    return api.train(CELL, out=tmp_path_factory.mktemp("first") / "run", **SMALL)


def test_all_layers_that_fit_are_taken_over(first: TrainResult, call: Softcell, tmp_path: Path) -> None:
    """A learning rate of next to nothing leaves the weights where they begin."""
    data = write_data(tmp_path / "three.npz", classes=3)
    words = (
        "--data",
        data,
        "--recipe",
        "small",
        *TINY_TRAIN,
        "--set",
        "lr=1e-30",
        "--set",
        "weight_decay=0",
        "--from",
        first.folder,
    )
    answer = call("train", CELL, *words, "--out", "second")
    assert answer.code == 0 and f"starting from {first.folder}" in answer.out
    before, after = (load_file(folder / "model.safetensors") for folder in (first.folder, tmp_path / "second"))
    learned = [name for name, _ in first.network.named_parameters()]
    kept = [
        name for name in learned if before[name].shape == after[name].shape and torch.equal(before[name], after[name])
    ]
    assert set(learned) - set(kept) == {"skeleton.classifier.weight", "skeleton.classifier.bias"}
    run = content(tmp_path / "second", "run.json")
    assert run["recipe"]["init"] == str(first.folder)
    known = run["results"]["init"]
    assert known["run"] == str(first.folder) and len(known["sha256"]) == 64
    assert known["left_out"] == ["skeleton.classifier.weight", "skeleton.classifier.bias"]
    assert known["parameters"] == sum(after[name].numel() for name in kept) < known["of"]


def test_a_run_that_starts_from_another_is_resumed_without_it(first: TrainResult, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    for file in first.folder.iterdir():
        (gone / file.name).write_bytes(file.read_bytes())
    given = {**SMALL, "epochs": 2, "init": str(gone)}
    whole = api.train(CELL, out=tmp_path / "whole", **given)

    def strike(event: Event) -> None:
        if isinstance(event, Stepped) and (event.epoch, event.step) == (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)

    assert api.train(CELL, out=tmp_path / "broken", on_event=strike, **given).exit_code
    for file in gone.iterdir():
        file.unlink()
    resumed = api.train(out=tmp_path / "broken", resume=True)
    for name, value in whole.network.state_dict().items():
        assert torch.equal(value, resumed.network.state_dict()[name]), name
    assert content(tmp_path / "broken", "run.json")["results"]["init"]["run"] == str(gone)


def test_weights_that_fit_no_layer_are_rejected(
    first: TrainResult, call: Softcell, searched: Path, tmp_path: Path
) -> None:
    wide = ("--batch-size", "128", "--epochs", "1", "--channels", "3", "--from", first.folder, "--out", "out")
    answer = call("train", CELL, *wide)
    assert (
        answer.code == 2
        and "no weight of" in answer.error
        and "[3, 1, 3, 3] here and [2, 1, 3, 3] there" in answer.error
    )
    answer = call("train", CELL, *TINY_TRAIN, "--channels", "3", "--from", searched, "--out", "out")
    assert answer.code == 2 and "start from a search run of the same architecture and size" in answer.error
    assert not (tmp_path / "out").exists()
    assert call("teacher", "resnet18", "--set", f"init={first.folder}").code == 2


def test_a_layer_is_taken_as_a_whole(first: TrainResult) -> None:
    """The classifier of as many classes but of other features keeps no bias of the old one."""
    network = torch.nn.ModuleDict({"skeleton": torch.nn.ModuleDict({"classifier": torch.nn.Linear(3, 10)})})
    with pytest.raises(UserError, match="no weight of"):
        load_initial(network, first.folder)


# --- from the supernet of a search ---


def test_a_network_starts_from_the_weights_of_the_supernet(searched: Path, call: Softcell, tmp_path: Path) -> None:
    """Those of the supernet's child, at a learning rate of next to nothing; scales and shifts of BatchNorm are new."""
    still = ("--set", "lr=1e-30", "--set", "weight_decay=0", "--set", "ema=0")
    answer = call("train", searched, *TINY_TRAIN, *still, "--from", searched, "--out", "out")
    assert answer.code == 0 and f"starting from the supernet of {searched}" in answer.out
    assert "the search may have learned from images that are held out now" in " ".join(answer.out.split())
    found = restore(searched)
    child = found.supernet.child(read_genotype(searched))
    after, known = load_file(tmp_path / "out" / "model.safetensors"), dict(child.named_parameters())
    assert known and all(torch.equal(after[name], tensor) for name, tensor in known.items())
    record = content(tmp_path / "out", "run.json")["results"]["init"]
    assert (record["kind"], record["left_out"]) == ("search", [])
    assert record["parameters"] == sum(tensor.numel() for tensor in known.values()) < record["of"]
    new = {name for name, _ in api.Network.from_pretrained(tmp_path / "out").named_parameters()} - known.keys()
    for name in new:
        torch.testing.assert_close(after[name], torch.full_like(after[name], name.endswith("weight")))
    assert new


def test_a_search_without_a_supernet_has_no_weights_to_start_from(
    searched: Path, call: Softcell, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    shutil.copytree(searched, kept)
    for file in kept.glob("checkpoint*"):
        file.unlink()
    answer = call("train", CELL, *TINY_TRAIN, "--from", kept, "--out", "out")
    assert answer.code == 2 and "needs the checkpoint of the search" in answer.error
    run = content(kept, "run.json")
    stated = {key: value for key, value in run.items() if key != "digest"}
    (kept / "run.json").write_text(json.dumps({**stated, "status": "interrupted"}))
    answer = call("train", CELL, *TINY_TRAIN, "--from", kept, "--out", "out")
    assert answer.code == 2 and "finish it with `softcell search --resume" in answer.error
    proposed = call("search", "random", "--space", "nb201", "--set", "method.samples=1", "--set", "space.channels=2")
    assert proposed.code == 0
    answer = call("train", CELL, *TINY_TRAIN, "--from", next((tmp_path / "runs").iterdir()), "--out", "out")
    assert answer.code == 2 and "random trains architectures one by one" in answer.error
    assert not (tmp_path / "out").exists()
