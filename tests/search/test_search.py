"""Running a search: its files, its errors and the data it may read."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from softcell.arch import Genotype
from softcell.data import Dataset, Images, load, split
from softcell.engine import DivergedError
from softcell.engine.checkpoint import load_latest
from softcell.engine.metrics import Measured
from softcell.engine.session import open_session
from softcell.engine.task import Note
from softcell.errors import UserError
from softcell.methods import METHODS, Method, UntrainedSampler
from softcell.search import resolve, search
from softcell.search.build import build_task
from softcell.search.steps import Unrolling, bilevel, single_level, unrolled
from softcell.search.supernet import Validation
from tests.helpers.method_kinds import ALIKE, one_of_each_kind
from tests.helpers.search_forks import forks
from tests.helpers.search_toys import THREE_EDGES, TINY, same, settings, state_of, write_data

RECIPE = sys.modules["softcell.search.recipe"]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "data.npz")


@pytest.mark.parametrize("regime", ["single-level", "bilevel", "unrolled"])
def test_a_search_leaves_a_complete_folder(regime: str, data: Path, tmp_path: Path) -> None:
    result = search(resolve(settings("nb201", data, regime=regime, epochs=2)), tmp_path / "run")
    assert result.exit_code == 0
    assert Genotype.load(tmp_path / "run") == result.genotype
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows == result.metrics
    assert [row["epoch"] for row in rows] == [0, 1]
    records = [json.loads(line) for line in (tmp_path / "run" / "architecture.jsonl").read_text().splitlines()]
    for record in records:
        table = torch.tensor(record["tables"]["cell"])
        torch.testing.assert_close(table.sum(1), torch.ones(6))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"


def test_seeds_decide_everything(data: Path, tmp_path: Path) -> None:
    runs = {
        name: search(resolve(settings("nb201", data, epochs=1, seed=seed)), tmp_path / name).metrics[0]
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    }
    times = {name: row.pop("seconds") for name, row in runs.items()}
    assert len(times) == 3
    assert runs["a"] == runs["b"] != runs["c"]


def test_a_folder_that_is_in_use_is_refused_unless_asked(data: Path, tmp_path: Path) -> None:
    recipe = resolve(settings("nb201", data, epochs=1))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    search(recipe, tmp_path / "run")
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    for folder in ("run", "mine"):
        with pytest.raises(UserError, match="empty folder"):
            search(recipe, tmp_path / folder)
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()} == before
    with pytest.raises(UserError, match="not a run"):
        search(recipe, tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "precious"
    assert search(recipe, tmp_path / "run", overwrite=True).exit_code == 0


def test_data_that_cannot_be_found_leaves_no_folder_behind(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="existing path"):
        search(resolve(settings("nb201", tmp_path / "none.npz")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "method",
    one_of_each_kind(name for name in METHODS if not issubclass(METHODS.get(name), UntrainedSampler)),
)
def test_a_loss_that_is_not_finite_stops_with_step_value_and_advice(method: str, data: Path, tmp_path: Path) -> None:
    """The first epoch is calm, the rest explodes: the learning rate is raised behind the search's back."""
    given = {"method": method, "weights": {"lr": 0.01, "lr_min": 0.0, "clip": 0.0}, "space_settings": THREE_EDGES}
    recipe = resolve(settings("nb201", data, **given))
    calls: list[float] = []

    def explode(epoch: float, num_epochs: int, first: float, *_: Any, **__: Any) -> float:
        calls.append(epoch)
        return 1e30 if len(calls) > 1 else first

    with pytest.MonkeyPatch.context() as patch:
        for name in ("task", "samplers"):
            patch.setattr(sys.modules[f"softcell.search.{name}"], "rate_at", explode)
        with pytest.raises(
            DivergedError, match=r"(nan|inf) in epoch 2 at step \d+.*[Ll]ower the learning rate"
        ) as caught:
            search(recipe, tmp_path / "run")
    assert caught.value.epoch == 1
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    assert manifest["status"] == "failed"
    loaded = load_latest(tmp_path / "run")
    assert loaded is not None
    assert loaded.note is None
    assert (loaded.state["epoch"], loaded.state["step"]) == (1, 0)
    assert all(torch.isfinite(x).all() for x in tensors(loaded.state["task"]) if x.is_floating_point())
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    # The last good state is good: with a sane rate the run resumes from it.
    assert search(recipe, tmp_path / "run", resume=True).exit_code == 0


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [x for item in value.values() for x in tensors(item)]
    return [x for item in value for x in tensors(item)] if isinstance(value, list | tuple) else []


# --- which images teach what ---


@pytest.mark.parametrize("regime", ["single-level", "bilevel", "unrolled"])
def test_weights_and_architecture_learn_from_their_own_halves(regime: str, data: Path) -> None:
    recipe = resolve(settings("nb201", data, regime=regime, split={"weights": 40, "validation": 24}))
    dataset = load(recipe.data)
    parts = split(dataset.train, recipe.split, recipe.seed)
    with open_session(device="cpu", seed=0, precision="float32", deterministic=False, threads=1) as session:
        task = build_task(recipe, dataset, parts, session, None)
    seen: list[torch.Tensor] = []
    for epoch in range(3):
        pairs = [task.pair(draft) for draft in task.batches(epoch, 0)]
        assert len(pairs) == task.steps_in(epoch) == 2
        for train, validation in pairs:
            assert set(train.index.tolist()) <= set(parts["weights"].tolist())
            if regime == "single-level":
                assert validation is None
            else:
                assert set(validation.index.tolist()) <= set(parts["validation"].tolist())
                seen.append(validation.index)
        late = [task.pair(draft) for draft in task.batches(epoch, 1)]
        assert torch.equal(late[0][0].images, pairs[1][0].images)
        if regime != "single-level":
            assert torch.equal(late[0][1].images, pairs[1][1].images), "a resumed epoch continues with the next batch"
    if seen:  # the validation half has one batch per pass, so every step begins a new, newly shuffled pass
        assert len({tuple(index.tolist()) for index in seen}) == len(seen)


def test_images_can_be_held_back_from_all_learning(data: Path, tmp_path: Path) -> None:
    """Two searches of different kinds hold out the same images, and measure only on them."""
    shares = {"single-level": {"weights": 40, "held": 12}, "bilevel": {"weights": 20, "validation": 20, "held": 12}}
    kept = []
    for regime, share in shares.items():
        recipe = resolve(settings("nb201", data, regime=regime, split=share, epochs=1, child_every=1))
        result = search(recipe, tmp_path / regime)
        dataset = load(recipe.data)
        parts = split(dataset.train, recipe.split, recipe.seed)
        assert next(iter(recipe.split)) == "held" and recipe.measured_split == "held"
        learned = torch.cat([part for name, part in parts.items() if name != "held"])
        assert not set(parts["held"].tolist()) & set(learned.tolist())
        kept.append(parts["held"])
        row = result.metrics[-1]
        assert (row["val_split"], row["val_count"]) == ("held", 12)
        results = json.loads((tmp_path / regime / "run.json").read_text())["results"]
        assert (results["val_split"], results["child_split"]) == ("held", "held")
    assert torch.equal(*kept)
    with pytest.raises(UserError, match="may have `held`"):
        resolve(settings("nb201", data, regime="bilevel", split={"weights": 20, "held": 12}))


@pytest.mark.parametrize("regime", ["single-level", "bilevel"])
def test_both_levels_can_learn_from_all_training_images(regime: str, data: Path, tmp_path: Path) -> None:
    recipe = resolve(settings("nb201", data, regime=regime, split={"validation": 0}, epochs=1, child_every=1))
    assert recipe.split == {"validation": 0, "weights": 1.0}
    dataset, everything = load(recipe.data), set(range(64))
    with open_session(device="cpu", seed=0, precision="float32", deterministic=False, threads=1) as session:
        task = build_task(recipe, dataset, recipe.parts(dataset.train), session, None)
    seen: dict[str, list[list[int]]] = {"weights": [], "validation": []}
    for epoch in range(2):
        for train, validation in map(task.pair, task.batches(epoch, 0)):
            seen["weights"].append(train.index.tolist())
            if validation is not None:
                seen["validation"].append(validation.index.tolist())
    for batches in seen.values() if regime == "bilevel" else [seen["weights"]]:
        assert {index for batch in batches[: len(batches) // 2] for index in batch} == everything
    assert seen["validation"] != seen["weights"], "the two levels have orders of their own"
    messages: list[str] = []
    result = search(
        recipe, tmp_path / "run", on_event=lambda e: messages.append(e.text) if isinstance(e, Note) else None
    )
    assert (result.metrics[-1]["val_split"], result.metrics[-1]["val_count"]) == ("weights", 64)
    assert any("same images" in text for text in messages)
    results = json.loads((tmp_path / "run" / "run.json").read_text())["results"]
    assert (results["val_split"], results["child_split"]) == ("weights", "weights")
    assert results["splits"]["weights"] == results["splits"]["validation"]


def test_all_images_but_those_held_back_can_serve_both_levels(data: Path) -> None:
    recipe = resolve(settings("nb201", data, regime="bilevel", split={"validation": 0, "held": 0.25}))
    parts = recipe.parts(load(recipe.data).train)
    assert recipe.measured_split == "held" and len(parts["weights"]) == 48
    assert torch.equal(parts["weights"], parts["validation"])
    assert not set(parts["held"].tolist()) & set(parts["weights"].tolist())
    with pytest.raises(UserError, match=r"split\.weights must be a count too"):
        resolve(settings("nb201", data, split={"validation": 0, "held": 12}))
    with pytest.raises(UserError, match="leaves none"):
        resolve(settings("nb201", data, method="random", split={"validation": 0}))
    with pytest.raises(UserError, match="leaves none"):
        resolve(settings("nb201", data, method="spos", split={"validation": 0}, evolution={"generations": 1}))


@pytest.mark.parametrize("regime", ["single-level", "bilevel", "unrolled"])
def test_a_step_of_the_search_matches_its_regime(regime: str, data: Path) -> None:
    recipe = resolve(settings("nb201", data, regime=regime, precision="float64", weights={"clip": 0.5}))
    dataset = load(recipe.data)
    parts = split(dataset.train, recipe.split, recipe.seed)
    with open_session(device="cpu", seed=0, precision="float64", deterministic=False, threads=1) as session:
        task = build_task(recipe, dataset, parts, session, None)
    task.begin_epoch(0)
    twin = copy.deepcopy(task.step_state)
    draft, *_ = task.batches(0, 0)
    task.step(draft)
    train, validation = task.pair(draft)
    taught = (train.images, train.labels)
    if regime == "single-level":
        result = single_level(twin, *taught)
    elif regime == "bilevel":
        result, _ = bilevel(twin, taught, (validation.images, validation.labels))
    else:
        result, _ = unrolled(twin, taught, (validation.images, validation.labels), Unrolling())
    for mine, other in ((task.supernet, twin.supernet), (task.method, twin.method)):
        for name, value in mine.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name
    assert task.end_epoch(0)["train_loss"] == float(result.loss)


# --- collapse ---


def test_a_collapse_is_warned_about_and_stops_the_search_when_asked(data: Path, tmp_path: Path) -> None:
    """With skip connections as the only candidate every cell has collapsed from the start."""
    given = settings("nb201", data, space_settings={**TINY["nb201"], "candidates": ["skip_connect"]})
    notes: list[Any] = []
    result = search(resolve(given), tmp_path / "warned", on_event=notes.append)
    assert len(result.metrics) == 3
    assert sum("skip connections" in getattr(note, "text", "") for note in notes) == 1, "messages once"
    stopped = search(resolve(given, {"collapse": {"stop": True}}), tmp_path / "stopped")
    assert len(stopped.metrics) == 2, "the first epoch is not judged"
    reason = json.loads((tmp_path / "stopped" / "run.json").read_text())["results"]["stopped"]
    assert "100%" in reason


def test_an_accuracy_far_below_the_training_accuracy_warns_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for held, messages in ((0.0, 1), (1.0, 0)):
        monkeypatch.setattr(Validation, "__call__", lambda self, mix, held=held: Measured(2.0, held, 10))
        notes: list[Any] = []
        search(resolve(settings("nb201", data)), tmp_path / f"{held}", on_event=notes.append)
        assert sum("running statistics" in getattr(note, "text", "") for note in notes) == messages


@pytest.mark.parametrize("method", ["darts", "snas"])
def test_a_low_first_accuracy_does_not_warn(
    method: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = iter([0.0])
    monkeypatch.setattr(Validation, "__call__", lambda self, mix: Measured(2.0, next(held, 1.0), 10))
    notes: list[Any] = []
    search(resolve(settings("nb201", data, method=method)), tmp_path / "run", on_event=notes.append)
    assert not any("in training" in getattr(note, "text", "") for note in notes)


# --- honesty ---


class Forbidden(Images):
    """Test images that must not be read, not even their labels."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self.shape, self.is_test = shape, True

    @property
    def labels(self) -> torch.Tensor:  # type: ignore[override]
        raise RuntimeError("the labels of the test set were read")

    def fetch_stored(self, indices: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the test set was read")


def forbidden(*arguments: Any) -> Dataset:
    found = load(*arguments)
    return Dataset(
        found.name,
        found.classes,
        found.train,
        Forbidden(found.shape),
        found.mean,
        found.std,
        found.augment,
        found.source,
    )


def in_each_regime() -> list[Any]:
    """Every method, and every regime with a method of each kind; samplers have no regimes."""
    found = []
    for regime in ("bilevel", "single-level", "unrolled"):
        for name in METHODS:
            is_default = regime == "bilevel" or (name not in ALIKE and issubclass(METHODS.get(name), Method))
            found.append(pytest.param(name, regime, marks=[] if is_default else [pytest.mark.exhaustive]))
    return found


@pytest.mark.parametrize(("method", "regime"), in_each_regime())
def test_no_search_looks_at_the_test_set(
    method: str, regime: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RECIPE, "load", forbidden)
    given = {"method": method, "regime": regime, "epochs": 1, "space_settings": THREE_EDGES}
    assert search(resolve(settings("nb201", data, **given)), tmp_path / "run").genotype is not None


CHEAT = """
from softcell.data import load
from softcell.methods import register_method
from softcell.methods.darts import Darts


@register_method
class Cheat(Darts):
    name = "cheat"

    def {hook}:
        test = load("digits").test
        test.fetch(test.labels[:1] * 0)
        return super().{call}
"""
HOOKS = {
    "relax": ("relax(self)", "relax()"),
    "derive": ("derive(self)", "derive()"),
    "begin_epoch": ("begin_epoch(self, progress)", "begin_epoch(progress)"),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_method_that_looks_at_the_test_set_is_found_out(hook: str, data: Path, tmp_path: Path) -> None:
    plugin = tmp_path / "cheat.py"
    plugin.write_text(CHEAT.format(hook=HOOKS[hook][0], call=HOOKS[hook][1]))
    # In a separate process, so that the cheat is not known to the tests after this one.
    given = settings("nb201", data, epochs=1, method="cheat", plugins=[str(plugin)])
    found = forks().run(tmp_path / "jobs", "error_with_plugin", tmp_path / "run", given, plugin, "search")
    assert found["type"] == "AssertionError"
    assert "sealed" in found["text"]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
    assert not (tmp_path / "run" / "genotype.json").exists()


def test_the_same_reading_works_when_no_search_is_on() -> None:
    test = load("digits").test
    assert test is not None
    assert test.fetch(test.labels[:1] * 0).shape == (1, 1, 8, 8)


# --- users' data ---

SHAPES = {
    "grey": {"shape": (8, 8)},
    "one-channel": {"shape": (8, 8, 1)},
    "colour-wide": {"shape": (6, 11, 3)},
    "odd": {"shape": (7, 5)},
    "imbalanced": {"counts": (50, 9, 2)},
}


@pytest.mark.parametrize("space", ["nb201", "darts"])
@pytest.mark.parametrize("kind", SHAPES)
def test_grey_colour_oblong_and_imbalanced_images_can_be_searched_on(kind: str, space: str, tmp_path: Path) -> None:
    given = write_data(tmp_path / "data.npz", **SHAPES[kind])  # type: ignore[arg-type]
    result = search(resolve(settings(space, given, epochs=1)), tmp_path / "run")
    assert result.genotype is not None
    assert result.metrics[0]["val_count"] > 0


@pytest.mark.parametrize("method", one_of_each_kind(name for name in METHODS if issubclass(METHODS.get(name), Method)))
def test_a_search_does_not_depend_on_how_often_it_is_validated(method: str, data: Path, tmp_path: Path) -> None:
    often, rarely = (
        search(
            resolve(settings("nb201", data, method=method, space_settings=THREE_EDGES, validate_every=every)),
            tmp_path / str(every),
        )
        for every in (1, 3)
    )
    assert often.genotype == rarely.genotype
    states = [state_of(tmp_path / every) for every in ("1", "3")]
    for part in ("supernet", "weight_optimiser", "architecture_optimiser"):
        assert same(states[0][part], states[1][part])
    rows = [(tmp_path / every / "metrics.jsonl").read_text().splitlines() for every in ("1", "3")]
    losses = [[json.loads(row)["train_loss"] for row in found] for found in rows]
    assert losses[0] == losses[1]
    assert ["val_loss" in json.loads(row) for row in rows[1]] == [False, False, True]
