"""From layers of settings to a complete recipe, and what is refused on the way."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from softcell.errors import UserError
from softcell.methods import METHODS, Method, UntrainedSampler
from softcell.search import read_config, resolve, search, stored_recipe
from softcell.spaces import SPACES
from softcell.testing import ALIKE
from tests.helpers.search_toys import settings, write_data

EVERYTHING = [(method, space) for method in METHODS for space in SPACES]


def test_later_layers_win_setting_by_setting() -> None:
    recipe = resolve(
        {"weights": {"lr": 0.3, "momentum": 0.5}, "epochs": 7},
        {"weights": {"lr": 0.2}, "space": {"cells": 5}},
        {"weights": {"momentum": 0.1}},
    )
    assert (recipe.weights.lr, recipe.weights.momentum, recipe.epochs) == (0.2, 0.1, 7)
    assert recipe.space_settings["cells"] == 5
    assert recipe.weights.weight_decay == 3e-4, "untouched"


def test_the_order_is_defaults_then_scale_then_what_is_given() -> None:
    small, paper = resolve({}), resolve({"scale": "paper"})
    assert small.epochs == METHODS.get("darts").recipes["small"]["epochs"]
    assert small.space_settings["cells"] == SPACES.get("darts").small["cells"]
    assert (paper.epochs, paper.batch_size, paper.weights.lr) == (50, 64, 0.025)
    assert (paper.space_settings["cells"], paper.space_settings["channels"]) == (8, 16)
    assert (paper.architecture.lr, paper.architecture.beta1, paper.architecture.weight_decay) == (3e-4, 0.5, 1e-3)
    assert (small.validate_every, paper.validate_every) == (1, 6)
    assert resolve({"scale": "paper", "validate_every": 1}).validate_every == 1
    assert resolve({"epochs": 99}).epochs == 99


def test_data_other_than_digits_asks_for_the_papers_scale() -> None:
    assert resolve({"data": "cifar10"}).scale == "paper"
    assert resolve({"data": "digits"}).scale == "small"


def test_nothing_given_leaves_lower_layers_alone() -> None:
    assert resolve({"epochs": 5}, {"epochs": None, "seed": None}) == resolve({"epochs": 5})


@pytest.mark.parametrize(
    ("regime", "validation"), [("bilevel", 0.5), ("unrolled", 0.5), ("single-level", 0.1), ("auto", 0.5)]
)
def test_the_split_follows_the_regime_unless_given(regime: str, validation: float) -> None:
    assert resolve({"regime": regime}).split["validation"] == validation
    assert resolve({"regime": regime}).regime == ("bilevel" if regime == "auto" else regime)
    assert resolve({"regime": regime, "split": {"weights": 10, "validation": 20}}).split["validation"] == 20


@pytest.mark.parametrize(("method", "space"), EVERYTHING)
@pytest.mark.parametrize("scale", ["small", "paper"])
def test_a_resolved_recipe_resolves_to_itself_also_through_json(method: str, space: str, scale: str) -> None:
    recipe = resolve({"method": method, "space": space, "scale": scale})
    assert (recipe.method, recipe.space, recipe.scale) == (method, space, scale)
    assert resolve(recipe.to_dict()) == recipe
    assert resolve(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert "auto" not in (recipe.regime,)
    assert recipe.split


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"epoch": 3}, "did you mean 'epochs'"),
        ({"method": "dart"}, "did you mean 'darts'"),
        ({"space": "nb20"}, "did you mean 'nb201'"),
        ({"method": 3}, "must be text"),
        ({"weights": {"lrr": 1}}, "did you mean 'lr'"),
        ({"space": {"cell": 4}}, "did you mean 'cells'"),
        ({"space": {"candidates": ["skip_conect"]}}, "did you mean 'skip_connect'"),
        ({"method_settings": {"samples": 4}}, "no setting 'samples'"),
        ({"epochs": 0}, "`epochs >= 1` must hold"),
        ({"epochs": 2.5}, "a whole number"),
        ({"epochs": True}, "a whole number"),
        ({"weights": {"lr": 0}}, r"`weights.lr > 0` must hold"),
        ({"weights": {"lr": float("nan")}}, r"recipe\.weights\.lr must be a finite number"),
        ({"weights": {"lr": 0.1, "lr_min": 0.2}}, "lr_min <= weights.lr"),
        ({"weights": 3}, "a mapping"),
        ({"architecture": {"beta1": 1.0}}, "beta1 < 1"),
        ({"architecture": {"after": 1.0}}, "after < 1"),
        ({"scale": "huge"}, "small, paper"),
        ({"regime": "trilevel"}, "single-level, bilevel, unrolled"),
        ({"split": {"weights": 0.5}}, "`weights` and `validation`"),
        ({"collapse": {"patience": 0}}, "patience >= 1"),
        ({"unrolled": {"epsilon": -1}}, "epsilon > 0"),
        ({"precision": "float16"}, "float32, bfloat16, float64"),
        ({"seed": -1}, r"`0 <= seed < 2\*\*63` must hold, but got seed=-1"),
        ({"image_size": 3}, "image_size >= 4"),
    ],
)
def test_bad_settings_are_refused_with_rule_and_fix(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve(given)


def test_config_files_are_yaml_or_json_and_a_run_json_is_its_recipe(tmp_path: Path) -> None:
    given = {"epochs": 4, "weights": {"lr": 0.2}}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(given))
    (tmp_path / "a.json").write_text(json.dumps(given))
    (tmp_path / "empty.yaml").write_text("")
    assert read_config(tmp_path / "a.yaml") == read_config(tmp_path / "a.json") == given
    assert read_config(tmp_path / "empty.yaml") == {}
    (tmp_path / "bad.yaml").write_text("a: [")
    (tmp_path / "list.json").write_text("[1]")
    for name, message in (("bad.yaml", "YAML"), ("list.json", "mapping"), ("none.yaml", "can be read")):
        with pytest.raises(UserError, match=message):
            read_config(tmp_path / name)


def test_a_run_is_described_by_its_run_json(tmp_path: Path) -> None:
    recipe = resolve(settings("nb201", write_data(tmp_path / "data.npz"), epochs=1))
    first = search(recipe, tmp_path / "run")
    stored = resolve(read_config(tmp_path / "run"))
    assert stored == first.recipe == stored_recipe(tmp_path / "run", {})
    assert stored_recipe(tmp_path / "run", {"epochs": 1}) == stored, "settings that agree may be repeated"
    with pytest.raises(UserError, match=r"epochs: 1 -> 2"):
        stored_recipe(tmp_path / "run", {"epochs": 2})
    with pytest.raises(UserError, match="space: nb201 -> darts"):
        stored_recipe(tmp_path / "run", {"space": "darts", "space_settings": {"cells": 3}})
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (manifest["kind"], manifest["status"], manifest["seed"]) == ("search", "finished", 0)
    assert set(manifest["results"]["splits"]) == {"weights", "validation"}
    assert manifest["results"]["val_split"] == "validation"


def marks(method: str, space: str) -> list[pytest.MarkDecorator]:
    """A method at home, every space that is nobody's home under DARTS; other pairs in the exhaustive run."""
    own = space == (METHODS.get(method).home or "darts")
    homes = {METHODS.get(name).home for name in METHODS}
    if issubclass(METHODS.get(method), UntrainedSampler):
        return [pytest.mark.exhaustive]  # has no epochs; its own tests are quicker
    if method in ("darts-minus", "edge-normalised"):  # recipes of DARTS and PC-DARTS
        return [pytest.mark.exhaustive]
    return [] if own or (method == "darts" and space not in ALIKE | homes) else [pytest.mark.exhaustive]


@pytest.mark.parametrize(("method", "space"), [pytest.param(m, s, marks=marks(m, s)) for m, s in EVERYTHING])
def test_the_small_recipe_runs_an_epoch_on_digits(method: str, space: str, tmp_path: Path) -> None:
    split = {"weights": 0.075, "validation": 0.075}  # a few of the digits show that a pair works
    given = {"method": method, "space": space, "epochs": 1, "device": "cpu", "threads": 1, "split": split}
    recipe = resolve(given, {"evolution": {"generations": 0}})  # selecting is no part of an epoch
    result = search(recipe, tmp_path / "run")
    assert result.genotype is not None
    assert result.genotype.space == space
    last = result.metrics[-1]
    if issubclass(METHODS.get(method), UntrainedSampler):
        assert last["best_score"] > 0  # nothing is trained, so there is no accuracy
        return
    assert last["val_split"] == "validation"
    assert 0.0 <= last["val_accuracy"] <= 1.0
    if issubclass(METHODS.get(method), Method):
        assert last["entropy"] > 0
        assert any(key.startswith("skip_share_") for key in last)


@pytest.mark.parametrize("layer", [{"engine": "compile"}, {"method": "itnas", "engine": "compile"}], ids=str)
def test_an_engine_that_was_removed_is_refused_with_the_one_to_use(layer: dict[str, Any]) -> None:
    with pytest.raises(
        UserError, match=r"engine must be one of auto, eager, graph, got 'compile'; it was removed.*use auto"
    ):
        resolve(layer)
