"""Training from scratch: schedules, the files of a run, and that the test set is read once, at the end."""

import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

from softcell.arch import Genotype, sample
from softcell.data import Dataset, Images, load, split
from softcell.data.batches import Batches, Feeds
from softcell.engine import DivergedError
from softcell.engine.checkpoint import load_latest
from softcell.engine.metrics import Tally
from softcell.engine.optim import classification_step, sgd
from softcell.engine.task import EpochEnded
from softcell.errors import UserError
from softcell.evaluate import RECIPES, TrainRecipe, TrainResult, load_network, resolve, stored_training, train
from softcell.evaluate.task import TrainTask, learning_rate
from softcell.kernels.backend import cell_settings
from softcell.nn.conv import quarters
from softcell.spaces import SPACES, build_space, darts, execution, nb201
from tests.helpers.search_forks import forks
from tests.helpers.search_toys import ALONE, TINY, training, write_data
from tests.helpers.unsealed import unsealed

TRAIN = sys.modules["softcell.evaluate.train"]


def genotype_of(space: str, seed: int = 5) -> Genotype:
    return sample(build_space(space, TINY[space]).layout(), seed)


def recipe_of(space: str, data: Path, **changes: Any) -> TrainRecipe:
    given = training(space, data, **changes)
    del given["in"], given["genotype"]
    return resolve(genotype_of(space), given)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data") / "data.npz", train=96)


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    """A DARTS network with tower, drop-path, cutout and holdout."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    return train(genotype_of("darts"), recipe_of("darts", data, epochs=12, lr=0.1, drop_path=0.1, cutout=1), folder)


# --- schedules ---


def schedule(**changes: Any) -> list[float]:
    recipe = TrainRecipe(epochs=10, lr=0.4, lr_min=0.1, lr_decay=0.5, **changes)
    return [learning_rate(recipe, epoch) for epoch in range(10)]


def test_the_learning_rate_follows_its_closed_form() -> None:
    assert schedule(schedule="cosine") == pytest.approx(
        [0.1 + 0.15 * (1 + math.cos(math.pi * e / 10)) for e in range(10)]
    )
    assert schedule(schedule="linear") == pytest.approx([0.4 - 0.03 * e for e in range(10)])
    assert schedule(schedule="exponential") == pytest.approx([0.4 * 0.5**e for e in range(10)])


def test_a_warm_up_rises_to_the_rate_and_hands_over_to_the_schedule() -> None:
    rising = schedule(schedule="linear", warmup=4)
    assert rising[:4] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert rising[4:] == pytest.approx([0.4 - 0.05 * e for e in range(6)])
    assert schedule(schedule="cosine", warmup=10)[-1] == pytest.approx(0.4)


def test_the_network_sees_the_schedules_of_rate_and_drop_path(data: Path) -> None:
    recipe = recipe_of("darts", data, epochs=5, drop_path=0.3)
    space = build_space("darts", TINY["darts"])
    network = space.network(genotype_of("darts"), (1, 8, 8), 3, auxiliary=True)
    found = load(str(data))
    feeds = Feeds(found, 16, 0, torch.device("cpu"), torch.float32)
    part = split(found.train, {"train": 1.0}, 0)["train"]
    batches = feeds.training(part, found.augment)
    task = TrainTask(recipe, network, ALONE, train=batches, held=None, notify=print)
    for epoch in range(5):
        task.begin_epoch(epoch)
        assert float(network.drop_path.current) == pytest.approx(0.3 * epoch / 5)
        assert task.optimiser.param_groups[0]["lr"] == pytest.approx(learning_rate(recipe, epoch))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("space", "module"), [("darts", darts), ("nb201", nb201)])
def test_validation_is_fused_if_training_is(
    space: str, module: ModuleType, fused: bool, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = build_space(space, TINY[space]).network(genotype_of(space), (1, 8, 8), 3)
    found = load(str(data))
    feeds = Feeds(found, 16, 0, torch.device("cpu"), torch.float32)
    train_part, held_part = split(found.train, {"train": 0.5, "held": 0.5}, 0).values()
    task = TrainTask(
        recipe_of(space, data, epochs=1, fused=fused, auxiliary=0.0), network, ALONE,
        train=feeds.training(train_part, found.augment), held=feeds.plain(found.train, held_part), notify=print,
    )  # fmt: skip
    seen: set[tuple[bool, bool]] = set()

    def plan(x: torch.Tensor) -> bool:
        seen.add((network.training, execution._NETWORKS.get()))
        return False

    monkeypatch.setattr(module, "plan_network", plan)
    task.begin_epoch(0)
    task.step(next(task.batches(0, 0)))
    task.end_epoch(0)
    assert seen == {(True, fused), (False, fused)}


@pytest.mark.parametrize(
    ("fused", "kernels", "expected"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_fused_training_augments_and_counts_by_kernels(
    fused: bool, kernels: bool, expected: bool, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = build_space("nb201", TINY["nb201"]).network(genotype_of("nb201"), (1, 8, 8), 3)
    found = load(str(data))
    batches = Feeds(found, 16, 0, torch.device("cpu"), torch.float32).training(
        split(found.train, {"train": 1.0}, 0)["train"], found.augment
    )
    recipe = recipe_of("nb201", data, epochs=1, fused=fused, auxiliary=0.0)
    task = TrainTask(recipe, network, ALONE, train=batches, held=None, notify=lambda text: None)
    asked: list[bool] = []

    def asking(original: Any) -> Any:
        def run(*given: Any, by_kernel: bool = False) -> Any:
            asked.append(by_kernel)
            return original(*given, by_kernel=by_kernel)

        return run

    monkeypatch.setattr(Batches, "finish", asking(Batches.finish))
    monkeypatch.setattr(Tally, "update", asking(Tally.update))
    task.begin_epoch(0)
    with cell_settings(batch_kernels=kernels):
        task.step(next(task.batches(0, 0)))
    assert asked == [expected, expected]


def test_drop_path_really_drops(data: Path) -> None:
    space = build_space("darts", TINY["darts"])
    network = space.network(genotype_of("darts"), (1, 8, 8), 3)
    network.use_drop_path(0.5)
    x = torch.randn(4, 1, 8, 8)
    network.drop_path.set_fraction(0.0)
    assert torch.equal(network(x), network(x))
    network.drop_path.set_fraction(1.0)
    assert not torch.equal(network(x), network(x))
    network.eval()
    assert torch.equal(network(x), network(x))


# --- one step ---


@pytest.mark.parametrize(("clip", "smoothing", "weight"), [(0.0, 0.0, 0.4), (0.2, 0.1, 0.4), (5.0, 0.0, 0.0)])
def test_a_training_step_is_the_plain_one(clip: float, smoothing: float, weight: float) -> None:
    torch.manual_seed(0)
    space = build_space("darts", TINY["darts"])
    network = space.network(genotype_of("darts"), (1, 8, 8), 3, auxiliary=True).double()
    twin = space.network(genotype_of("darts"), (1, 8, 8), 3, auxiliary=True).double()
    twin.load_state_dict(network.state_dict())
    one = sgd(network.parameters(), torch.device("cpu"), lr=0.1, momentum=0.9, weight_decay=1e-3)
    other = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3, foreach=False)
    for step in range(2):
        x, y = torch.randn(6, 1, 8, 8, dtype=torch.float64), torch.arange(6) % 3
        loss, logits = classification_step(
            network, one, x, y, ALONE, clip=clip, label_smoothing=smoothing, auxiliary=weight
        )
        other.zero_grad()
        out, extra = twin.forward_with_auxiliary(x)
        assert extra is not None
        main = F.cross_entropy(out, y, label_smoothing=smoothing)
        (main + weight * F.cross_entropy(extra, y, label_smoothing=smoothing)).backward()
        if weight == 0:  # then the tower is ignored: no gradient, no decay
            for p in twin.auxiliary.parameters():
                p.grad = None
        if clip:
            torch.nn.utils.clip_grad_norm_(twin.parameters(), clip)
        other.step()
        assert float(loss) == pytest.approx(main.item(), abs=1e-12), step
        torch.testing.assert_close(logits, out.detach(), rtol=0, atol=1e-12)
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(network.state_dict()[name], value, rtol=0, atol=1e-12)


def test_the_towers_pooling_is_adaptive_pooling() -> None:
    for height in range(1, 8):
        for width in range(1, 8):
            x = torch.randn(2, 3, height, width, dtype=torch.float64)
            torch.testing.assert_close(quarters(x), F.adaptive_avg_pool2d(x, 2), rtol=0, atol=1e-14)


# --- a whole training ---


def test_separable_data_is_learnt(finished: TrainResult) -> None:
    assert finished.split == "test"
    assert finished.accuracy is not None
    assert finished.accuracy >= 0.9
    last = finished.metrics[-1]
    assert (last["val_split"], last["val_count"]) == ("holdout", 24)


def test_a_folder_says_what_was_measured_on_which_split(finished: TrainResult) -> None:
    manifest = json.loads((finished.folder / "run.json").read_text())
    results = manifest["results"]
    assert (manifest["kind"], manifest["status"]) == ("train", "finished")
    assert (results["split"], results["accuracy"], results["count"]) == ("test", finished.accuracy, 18)
    assert (results["parameters"], results["multiply_adds"]) == (finished.cost.parameters, finished.cost.multiply_adds)
    assert not any(key.startswith("test") for row in finished.metrics for key in row)


def test_top_5_is_recorded_with_more_than_five_classes(finished: TrainResult, tmp_path: Path) -> None:
    assert finished.top5 is None and "train_top5" not in finished.metrics[0], "three classes"
    data = write_data(tmp_path / "many.npz", classes=7, train=70)
    result = train(genotype_of("nb201"), recipe_of("nb201", data, epochs=1), tmp_path / "run")
    results, row = json.loads((tmp_path / "run" / "run.json").read_text())["results"], result.metrics[0]
    assert 0 <= row["train_accuracy"] <= row["train_top5"] <= 1 and row["val_accuracy"] <= row["val_top5"] <= 1
    dataset = load(str(data))
    assert dataset.test is not None
    images = (dataset.test.fetch(torch.arange(42)).float() / 255 - torch.tensor(dataset.mean)[:, None, None]) / (
        torch.tensor(dataset.std)[:, None, None]
    )
    with torch.no_grad():
        best = result.network.cpu().eval()(images).topk(5).indices
    expected = (best == dataset.test.labels[:, None]).any(1).float().mean().item()
    assert results["top5"] == result.top5 == pytest.approx(expected, abs=1e-6)


def test_a_loaded_network_is_the_trained_one(finished: TrainResult) -> None:
    x = torch.randn(5, 1, 8, 8)
    loaded = load_network(finished.folder)
    assert not loaded.training
    trained = finished.network.eval().state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in loaded.state_dict().items())
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), finished.network(x), rtol=0, atol=1e-5)


def test_the_weights_file_omits_the_tower(finished: TrainResult) -> None:
    with safe_open(finished.folder / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        count = sum(file.get_tensor(name).numel() for name in names)
    whole = {name for name in finished.network.state_dict() if not name.startswith("auxiliary.")}
    assert names == whole
    assert any(name.startswith("auxiliary.") for name in finished.network.state_dict())
    statistics = sum(b.numel() for n, b in load_network(finished.folder).named_buffers() if n in names)
    assert count == finished.cost.parameters + statistics


def test_load_network_refuses_what_is_not_a_finished_training(finished: TrainResult, tmp_path: Path) -> None:
    manifest = json.loads((finished.folder / "run.json").read_text())
    for change, word in (({"status": "interrupted"}, "interrupted"), ({"kind": "search"}, "search run")):
        (tmp_path / "run.json").write_text(json.dumps({**unsealed(manifest), **change}))
        with pytest.raises(UserError, match=word):
            load_network(tmp_path)
    with pytest.raises(UserError, match="check the path"):
        load_network(tmp_path / "none")


def test_a_stored_training_keeps_its_recipe(finished: TrainResult) -> None:
    genotype, recipe = stored_training(finished.folder, {})
    assert (genotype, recipe) == (finished.genotype, finished.recipe)
    assert stored_training(finished.folder, {"epochs": 12})[1] == recipe
    with pytest.raises(UserError, match=r"epochs: 12 -> 13"):
        stored_training(finished.folder, {"epochs": 13})


def test_a_training_run_refuses_a_folder_in_use(finished: TrainResult) -> None:
    with pytest.raises(UserError, match="empty folder"):
        train(finished.genotype, finished.recipe, finished.folder)


def test_a_training_run_that_diverges_keeps_its_last_good_state(data: Path, tmp_path: Path) -> None:
    recipe = recipe_of("nb201", data, lr=0.01, clip=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            sys.modules["softcell.evaluate.task"], "learning_rate", lambda recipe, epoch: 1e30 if epoch else 0.01
        )
        with pytest.raises(DivergedError, match=r"in epoch 2 at step \d+"):
            train(genotype_of("nb201"), recipe, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
    loaded = load_latest(tmp_path / "run")
    assert loaded is not None
    assert (loaded.state["epoch"], loaded.state["step"]) == (1, 0)
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert train(genotype_of("nb201"), recipe, tmp_path / "run", resume=True).exit_code == 0


@pytest.mark.parametrize("space", ["nb201", "darts"])
@pytest.mark.parametrize(
    "kind",
    [{"shape": (8, 8)}, {"shape": (6, 11, 3)}, {"shape": (7, 5)}, {"counts": (60, 9, 3)}],
    ids=["grey", "colour-wide", "odd", "imbalanced"],
)
def test_grey_colour_oblong_and_imbalanced_images_can_be_trained_on(
    kind: dict[str, Any], space: str, tmp_path: Path
) -> None:
    given = write_data(tmp_path / "data.npz", **kind)
    result = train(genotype_of(space), recipe_of(space, given, epochs=1), tmp_path / "run")
    assert result.accuracy is not None


# --- recipes ---


@pytest.mark.parametrize("space", list(SPACES))
@pytest.mark.parametrize("name", list(RECIPES))
def test_a_training_recipe_resolves_to_itself(name: str, space: str) -> None:
    genotype = sample(build_space(space).layout(), 0)
    recipe = resolve(genotype, {"recipe": name})
    assert resolve(genotype, json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert (recipe.auxiliary > 0) == (SPACES.get(space).has_auxiliary and name != "fast")


def test_the_cifar_recipe_matches_darts() -> None:
    recipe = resolve(genotype_of("darts"), {"data": "cifar10"})
    assert (recipe.epochs, recipe.batch_size, recipe.lr, recipe.momentum) == (600, 96, 0.025, 0.9)
    assert (recipe.weight_decay, recipe.auxiliary, recipe.drop_path, recipe.cutout) == (3e-4, 0.4, 0.2, 16)
    assert (recipe.space_settings["cells"], recipe.space_settings["channels"]) == (20, 36)
    imagenet = resolve(genotype_of("darts"), {"data": "imagenet"})
    assert (imagenet.epochs, imagenet.lr, imagenet.lr_decay, imagenet.schedule) == (250, 0.1, 0.97, "exponential")
    assert (imagenet.weight_decay, imagenet.label_smoothing) == (3e-5, 0.1)
    assert (imagenet.space_settings["cells"], imagenet.space_settings["channels"]) == (14, 48)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"recipe": "cifer"}, "did you mean 'cifar'"),
        ({"epoch": 1}, "did you mean 'epochs'"),
        ({"space": {"cell": 1}}, "did you mean 'cells'"),
        ({"drop_path": 1.0}, "drop_path < 1"),
        ({"lr": 0}, "`lr > 0`"),
        ({"schedule": "step"}, "cosine, linear, exponential"),
        ({"epochs": 0}, "`epochs >= 1`"),
    ],
)
def test_bad_training_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve(genotype_of("darts"), given)


# --- honesty ---


class Watched(Images):
    """Test images that note after how many epochs they, or their labels, were read."""

    def __init__(self, inner: Images, epochs: list[Any]) -> None:
        self._inner, self._epochs = inner, epochs
        self.shape, self.is_test = inner.shape, True
        self.read_after: list[int] = []

    @property
    def labels(self) -> torch.Tensor:  # type: ignore[override]
        self.read_after.append(len(self._epochs))
        return self._inner.labels

    def fetch_stored(self, indices: torch.Tensor) -> torch.Tensor:
        self.read_after.append(len(self._epochs))
        return self._inner.fetch_stored(indices)


def test_the_test_set_is_read_only_after_the_last_epoch(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[Any] = []
    watched: list[Watched] = []

    def watching(*arguments: Any, **options: Any) -> Dataset:
        found = load(*arguments, **options)
        assert found.test is not None
        watched.append(Watched(found.test, ended))
        return Dataset(
            found.name, found.classes, found.train, watched[0], found.mean, found.std, found.augment, found.source
        )

    monkeypatch.setattr(TRAIN, "load", watching)
    train(
        genotype_of("nb201"),
        recipe_of("nb201", data),
        tmp_path / "run",
        on_event=lambda event: ended.append(event) if isinstance(event, EpochEnded) else None,
    )
    assert set(watched[0].read_after) == {3}


CHEAT = """
from dataclasses import dataclass
from softcell.data import load
from softcell.spaces import register_space
from softcell.spaces.nb201 import NB201Network, NB201Space


class Cheating(NB201Network):
    def features(self, x):
        test = load("digits").test
        if self.training and x.device.type != "meta":
            test.fetch(test.labels[:1] * 0)
        return super().features(x)


@register_space
@dataclass(frozen=True)
class Cheat(NB201Space):
    name = "cheat"

    def network(self, genotype, shape, num_classes, *, search_form=False, auxiliary=False):
        return Cheating(self, genotype, shape, num_classes, search_form=search_form)
"""


def test_a_network_that_looks_at_the_test_set_in_training_is_found_out(data: Path, tmp_path: Path) -> None:
    (tmp_path / "cheat.py").write_text(CHEAT)
    given = {**training("nb201", data), "in": "cheat", "plugins": [str(tmp_path / "cheat.py")]}
    found = forks().run(tmp_path / "jobs", "error_with_plugin", tmp_path / "run", given, tmp_path / "cheat.py", "train")
    assert found["type"] == "AssertionError"
    assert "sealed" in found["text"]
