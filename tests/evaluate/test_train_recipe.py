"""Settings that a genotype decides: networks are recorded with the nodes and layers that they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from softcell.app.cli.main import run
from softcell.arch import Cell, Genotype, Pick, sample
from softcell.engine import RunFolder, new_manifest
from softcell.errors import UserError
from softcell.evaluate import resolve, stored_training
from softcell.spaces import build_space
from softcell.spaces.base import fixed_by

CASES = [
    ("fullattention", {"layers": 1}),
    ("fullattention", {"layers": 2, "tied": True}),
    ("darts", {"nodes": 3}),
    ("nos", {"nodes": 2}),
    ("nos", {"nodes": 5}),
    ("nb201", {"nodes": 3}),
    ("s1", {"nodes": 2}),
]


def made(space: str, settings: dict[str, Any]) -> tuple[Genotype, str, int]:
    """A genotype of the space, and the setting that it decides."""
    name = "layers" if "layers" in settings else "nodes"
    return sample(build_space(space, settings).layout(), 1), name, settings[name]


@pytest.mark.parametrize(("space", "settings"), CASES)
def test_a_recipe_has_what_the_genotype_has(space: str, settings: dict[str, Any]) -> None:
    genotype, name, value = made(space, settings)
    assert resolve(genotype).space_settings[name] == value
    assert resolve(genotype, {"space": {name: value + 1}}, {}).space_settings[name] == value, "of another run"
    assert resolve(genotype, {"space": {name: value}}).space_settings[name] == value
    other = value - 1 if value > 2 else value + 1
    with pytest.raises(UserError, match=f"{name} must be that of the genotype, {value}, but got {name}={other}; leave"):
        resolve(genotype, {"space": {name: other}})


def test_parts_that_a_genotype_does_not_decide_are_unchanged() -> None:
    genotype = sample(build_space("nos", {"attentions": (), "dynamics": (), "nodes": 2}).layout(), 1)
    assert fixed_by(genotype, build_space("nos", {})) == {}, "a space of two tiers cannot describe one"
    assert fixed_by(genotype, build_space("nos", {"attentions": (), "dynamics": ()})) == {"nodes": 2}
    chain = sample(build_space("proxyless", {}).layout(), 1)
    assert fixed_by(chain, build_space("proxyless", {})) == {}


def test_nodes_that_are_no_outputs_count() -> None:
    """As in the published cells of NASNet, whose outputs are the nodes without successors."""
    picks = tuple(Pick(source, target, "skip_connect") for target in range(2, 7) for source in (0, target - 1))
    genotype = Genotype("darts", {name: Cell(picks, (5, 6)) for name in ("normal", "reduce")})
    assert fixed_by(genotype, build_space("darts", {})) == {"nodes": 5}


def test_info_and_train_refuse_a_contradiction_and_say_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    genotype, _, _ = made("fullattention", {"layers": 1})
    file = tmp_path / "cell.json"
    genotype.save(file)
    for command in (("train", "--out", str(tmp_path / "run")), ("info",), ("latency", "--device", "cpu")):
        assert run([command[0], str(file), *command[1:], "--set", "space.layers=3"]) == 2
        assert "layers must be that of the genotype, 1, but got layers=3" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()
    assert run(["info", str(file)]) == 0
    assert "layers 1" in " ".join(capsys.readouterr().out.split())
    made("nos", {"nodes": 2})[0].save(file)
    assert run(["info", str(file)]) == 0
    assert "nodes 2" in " ".join(capsys.readouterr().out.split())


def test_runs_that_recorded_another_number_can_be_resumed(tmp_path: Path) -> None:
    genotype, name, value = made("nos", {"nodes": 2})
    recipe = resolve(genotype).to_dict()
    recipe["space_settings"][name] = 4
    manifest = {**new_manifest("train", recipe, 0), "results": {"genotype": genotype.to_dict()}}
    RunFolder.create(tmp_path / "run", manifest)
    assert stored_training(tmp_path / "run", {})[1].space_settings[name] == value
    with pytest.raises(UserError, match=f"of the genotype, {value}, but got {name}=4"):
        stored_training(tmp_path / "run", {"space": {name: 4}})
