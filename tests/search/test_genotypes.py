"""The architecture of an epoch is what the search had derived then, and a line that names none is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from softcell.api import read_genotype, search
from softcell.arch import Genotype, sample
from softcell.engine.session import Interrupt
from softcell.engine.task import EpochEnded, Event
from softcell.errors import UserError
from softcell.recipes import train_recipe
from softcell.search import resolve
from softcell.search.genotypes import FILE, about_of, best_so_far, genotype_of, line, named_epoch
from softcell.spaces import build_space
from tests.helpers.unsealed import unseal

TINY = {"batch_size": 256, "threads": 1, "space_settings": {"cells": 3, "channels": 2, "nodes": 1}}


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search with NOS, whose genotypes have settings, of two epochs; its architecture moves quickly."""
    out = tmp_path_factory.mktemp("runs") / "nos"
    search("nos", data="digits", epochs=2, out=out, architecture={"lr": 0.5}, **TINY)
    return out


@pytest.mark.parametrize("space", ["nos", "darts", "nb201", "fullattention"])
def test_a_line_is_read_back_as_the_same_genotype(space: str) -> None:
    genotype = sample(build_space(space, {}).layout(), 3)
    written = json.loads(json.dumps(line(4, genotype, val_accuracy=0.5)))
    assert written["epoch"] == 4
    assert written["val_accuracy"] == 0.5
    assert genotype_of(written, space) == genotype


def test_every_epoch_has_its_architecture_and_the_last_is_the_one_found(searched: Path) -> None:
    first, last = (read_genotype(f"{searched}@{epoch}") for epoch in (1, 2))
    assert last == Genotype.load(searched) == read_genotype(f"{searched}@last")
    assert first != last, "at this rate"
    assert first.settings == last.settings == {"tiers": 2}
    said = {"method": "nos", "data": "digits", "seed": 0, "epochs": 1, "epoch": 1}
    assert said.items() <= first.about.items() and "epoch" not in Genotype.load(searched).about


def test_a_genotype_records_settings_that_differ_from_the_recipe(searched: Path, tmp_path: Path) -> None:
    expected = {"architecture.lr": 0.5, "batch_size": 256, "epochs": 2, "space_settings.channels": 2}
    assert Genotype.load(searched).about["settings"] == {**expected, "space_settings.nodes": 1}
    plain = resolve({"method": "nos", "data": "digits", "seed": 3, "threads": 2, "device": "cpu"}).to_dict()
    assert about_of(plain) == {"method": "nos", "data": "digits", "seed": 3}
    guided = {**plain, "guide": {**plain["guide"], "teacher": str(tmp_path / "teacher")}}
    assert about_of(guided)["settings"] == {"guide.teacher": "teacher"}
    assert about_of(resolve({"method": "nos", "data": "digits", "scale": "paper"}).to_dict())["settings"] == {
        "scale": "paper"
    }
    assert "settings" not in about_of({**plain, "space": "nobody's"}), "of a plugin that is not there"


def test_of_architectures_trained_one_by_one_it_is_the_best_so_far() -> None:
    drawn = [{"epoch": n, "val_accuracy": value} for n, value in enumerate((0.2, 0.5, 0.5, 0.3))]
    assert [best_so_far(drawn[:n])["epoch"] for n in (1, 2, 3, 4)] == [0, 1, 1, 1]
    derived = [{**row, "tables": {}} for row in drawn]
    assert [best_so_far(derived[:n])["epoch"] for n in (1, 2, 3, 4)] == [0, 1, 2, 3]
    assert best_so_far([{"epoch": 0, "val_accuracy": "damaged"}])["epoch"] == 0


def test_a_line_that_was_cut_off_is_no_line(searched: Path, tmp_path: Path) -> None:
    for name in ("run.json", FILE):
        (tmp_path / name).write_text((searched / name).read_text())
    unseal(tmp_path)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"epoch": 2, "tab')
    assert read_genotype(f"{tmp_path}@last") == read_genotype(f"{searched}@2")


def test_lines_written_without_settings_take_those_of_the_genotype(searched: Path, tmp_path: Path) -> None:
    for name in ("run.json", "genotype.json"):
        (tmp_path / name).write_text((searched / name).read_text())
    unseal(tmp_path)
    rows = [json.loads(text) for text in (searched / FILE).read_text().splitlines()]
    (tmp_path / FILE).write_text(
        "".join(json.dumps({k: v for k, v in r.items() if k != "settings"}) + "\n" for r in rows)
    )
    assert read_genotype(f"{tmp_path}@1") == read_genotype(f"{searched}@1")


def test_a_stopped_search_is_not_lost(tmp_path: Path) -> None:
    out = tmp_path / "stopped"

    def stop(event: Event) -> None:
        if isinstance(event, EpochEnded):
            raise KeyboardInterrupt

    with Interrupt(), pytest.raises(KeyboardInterrupt):
        search("nos", data="digits", epochs=3, out=out, on_event=stop, **TINY)
    assert not (out / "genotype.json").exists()
    with pytest.raises(UserError, match=r"stopped@last, its architecture after epoch 1"):
        read_genotype(out)
    assert read_genotype(f"{out}@last") == read_genotype(f"{out}@1")
    chosen, recipe = train_recipe(f"{out}@last", {"data": "digits"})
    assert chosen.about["epochs"] == 1
    assert recipe.space_settings["nodes"] == 1, "taken over from the search"


@pytest.mark.parametrize("wanted", ["0", "3", "first", "²"])
def test_an_epoch_that_is_not_there_is_refused_with_those_that_are(searched: Path, wanted: str) -> None:
    with pytest.raises(UserError, match=rf"@{wanted} must name an epoch.* it has 1 to 2"):
        read_genotype(f"{searched}@{wanted}")


def test_names_with_an_at_sign_are_names(searched: Path, tmp_path: Path) -> None:
    (tmp_path / "cell").mkdir()
    (tmp_path / "cell@2").write_text((searched / "genotype.json").read_text())
    assert named_epoch(tmp_path / "cell@2") is None
    assert read_genotype(tmp_path / "cell@2") == Genotype.load(searched)
    with pytest.raises(UserError, match="no genotype at"):
        read_genotype(tmp_path / "nowhere@2")


@pytest.mark.parametrize("content", ["{\n", "[]\n", '{"epoch": "x"}\n', "{}\n", '{"epoch": 0, "genotype": 3}\n'])
def test_damaged_lines_are_an_error_in_words(searched: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text((searched / "run.json").read_text())
    (tmp_path / FILE).write_text(content)
    with pytest.raises(UserError, match=FILE):
        read_genotype(f"{tmp_path}@last")


def test_a_run_without_epochs_says_so(searched: Path, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text((searched / "run.json").read_text())
    with pytest.raises(
        UserError, match="no epoch of this search is finished yet; resume it with `softcell search --resume"
    ):
        read_genotype(f"{tmp_path}@last")
