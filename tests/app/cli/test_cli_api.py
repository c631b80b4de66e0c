"""The same from Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from softcell import api
from softcell.app.baseline import random_baseline
from softcell.errors import UserError

SIZES = {"space_settings": {"channels": 2}, "batch_size": 128, "epochs": 1, "threads": 1}


def test_search_train_and_baseline_in_python(tmp_path: Path) -> None:
    found = api.search("darts", space="nb201", out=tmp_path / "search", **SIZES)
    assert found.genotype is not None
    trained = api.train(found.genotype, data="digits", out=tmp_path / "train", **SIZES)
    assert trained.split == "test"
    baseline = random_baseline(found.genotype, trained.recipe, tmp_path / "train", count=1)
    assert baseline.accuracies == [baseline.mean]
    network = api.load_network(tmp_path / "train")
    assert sum(p.numel() for p in network.parameters()) == trained.cost.parameters
    again = api.train(found.folder, resume=True, out=tmp_path / "train")
    assert again.accuracy == trained.accuracy


def test_settings_are_strict(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'epochs'"):
        api.search(epoch=3, out=tmp_path / "run")
    with pytest.raises(UserError, match="needs the folder"):
        api.search(resume=True)


def test_every_public_name_exists() -> None:
    for name in api.__all__:
        assert getattr(api, name) is not None
