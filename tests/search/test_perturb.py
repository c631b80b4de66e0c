"""Selection by perturbation (DARTS-PT): a literal twin, planted candidates, resuming, and what is refused."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.arch import Choice, Genotype, Layout, Mix, Rule, StrongestEach, Table, TopInputs, WeightMix
from softcell.data.batches import Batch
from softcell.data.hashing import permutation
from softcell.engine import checkpoint
from softcell.engine.task import Event, Note
from softcell.errors import UserError
from softcell.methods import METHODS
from softcell.nn.objective import CrossEntropy
from softcell.search import resolve, search
from softcell.search.perturb import FILE, PerturbationSelection, num_inputs, questions
from softcell.search.supernet import batch_statistics, measure_child, restore
from softcell.settings import SEEDS
from softcell.spaces import Supernet, build_space
from tests.helpers.search_toys import ALONE, THREE_EDGES, settings, write_data

HALVES = {"weights": 0.5, "validation": 0.5}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("perturb") / "data.npz")


def recipe(data: Path, space: str = "nb201", **changes: Any) -> dict[str, Any]:
    select = {"by": "perturbation", "epochs": 1, **changes.pop("select", {})}
    sizes = {"space_settings": THREE_EDGES} if space == "nb201" else {}
    own = {"method": "darts", "epochs": 1, "split": HALVES, "select": select, **sizes}
    return settings(space, data, **{**own, **changes})


def selection_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())["results"]["perturbation"]
    return found


@pytest.mark.parametrize("measure", ["accuracy", "loss"])
def test_a_selection_matches_the_literal_algorithm(data: Path, tmp_path: Path, measure: str) -> None:
    """Algorithm 1 with nothing but tables of weights and torch's own SGD, from the checkpoint of the search."""
    epochs, lr = 2, 0.02
    given = recipe(data, precision="float64", select={"epochs": epochs, "lr": lr, "measure": measure, "images": 24})
    result = search(resolve(given), tmp_path / "run")
    found = restore(tmp_path / "run", device="cpu")
    supernet, layout = found.supernet, found.supernet.layout
    table = found.method.probabilities()["cell"].detach().clone()
    own = found.parts["validation"]
    own = own[permutation(found.recipe.seed, 0, len(own), "select")][:24]
    images = list(found.feeds().plain(found.dataset.train, own[:16]).epoch(0))  # the last batch would be short
    assert [len(batch.labels) for batch in images] == [16]
    training = found.feeds().training(found.parts["weights"], replace(found.dataset.augment, cutout=0))
    w = found.recipe.weights
    optimiser = torch.optim.SGD(supernet.parameters(), lr, momentum=w.momentum, weight_decay=w.weight_decay)

    def measured(weights: Tensor) -> tuple[float, float]:
        state = {name: value.clone() for name, value in supernet.state_dict().items()}
        supernet.train()
        with torch.no_grad():
            logits = torch.cat([supernet(b.images, WeightMix(layout, {"cell": weights})) for b in images])
        supernet.load_state_dict(state)
        labels = torch.cat([b.labels for b in images])
        return float((logits.argmax(1) == labels).double().mean()), float(F.cross_entropy(logits, labels))

    edges, kept = selection_of(tmp_path / "run")["edges"], {}
    assert sorted(row["edge"] for row in edges) == sorted(map(str, layout.tables[0].choices))
    for number, row in enumerate(edges):
        edge = [str(choice) for choice in layout.tables[0].choices].index(row["edge"])
        candidates = layout.tables[0].choices[edge].candidates
        assert (row["supernet"]["accuracy"], row["supernet"]["loss"]) == pytest.approx(measured(table))
        values = []
        for k, op in enumerate(candidates):
            without = table.clone()
            without[edge, k] = 0
            values.append(measured(without))
            assert (row["without"][op]["accuracy"], row["without"][op]["loss"]) == pytest.approx(values[-1])
        by_loss = [loss for _, loss in values]
        if measure == "loss":
            best = by_loss.index(max(by_loss))
        else:
            lowest = min(accuracy for accuracy, _ in values)
            best = max((k for k in range(5) if values[k][0] == lowest), key=lambda k: by_loss[k])
        assert row["kept"] == candidates[best]
        kept[row["edge"]] = candidates[best]
        table[edge] = F.one_hot(torch.tensor(best), 5).to(table)
        for epoch in range(number * epochs, (number + 1) * epochs if number < len(edges) - 1 else 0):
            fallen = min(w.lr_min, lr)
            rate = (
                fallen
                + (lr - fallen) * (1 + torch.cos(torch.tensor(torch.pi * epoch / ((len(edges) - 1) * epochs)))) / 2
            )
            optimiser.param_groups[0]["lr"] = float(rate)
            supernet.train()
            for batch in training.epoch(found.recipe.epochs + epoch):
                optimiser.zero_grad()
                mix = WeightMix(layout, {"cell": table})
                F.cross_entropy(supernet(batch.images, mix), batch.labels).backward()
                nn.utils.clip_grad_norm_(supernet.parameters(), w.clip)
                optimiser.step()
    assert result.genotype is not None
    assert {f"{p.source}->{p.target}": p.op for p in result.genotype.cells["cell"].picks} == kept
    last = selection_of(tmp_path / "run")
    assert (last["accuracy"], last["loss"]) == pytest.approx(measured(table)), "the selected cell, tuned"
    assert last["images"] == 16


# Planted candidates: every edge carries the logit of one class in one of its candidates.


@dataclass(frozen=True)
class Toy:
    """A space of one node with an edge for each class."""

    rule: Rule
    choices: int = 4

    def layout(self) -> Layout:
        edges = tuple(Choice(i, 4, ("none", "a", "b", "c")) for i in range(self.choices))
        return Layout("toy", (Table("cell", edges, (4,)),), ("cell",), self.rule)


class ToySupernet(Supernet):
    """Edge i's candidate `planted[i]` hands on channel i of the image, the others nothing but a constant."""

    def __init__(self, space: Toy, planted: Sequence[int]) -> None:
        super().__init__(space, (4, 1, 1), 4)  # type: ignore[arg-type]
        self.planted = planted
        self.scale = nn.Parameter(torch.ones(()))

    def features(self, x: Tensor, mix: Mix) -> list[Tensor]:
        total, live = torch.zeros_like(x), mix.live(0)
        for i, planted in enumerate(self.planted):
            outputs: dict[int, Tensor | None] = {0: None}
            for k in (1, 2, 3):
                outputs[k] = torch.zeros_like(x)
                outputs[k][:, i] = x[:, i] * self.scale if k == planted else 0.01
            shown = {k: v for k, v in outputs.items() if live is None or k in live[i]}
            total = total + (0 if (y := mix.combine(0, i, shown)) is None else y)
        return [total]

    def head(self, features: Tensor) -> Tensor:
        return features.flatten(1)


class ToyBatches:
    """One batch with `counts` images of the classes, each bright in the channel of its class."""

    batch_size = draft_size = 2

    def __init__(self, counts: Sequence[int]) -> None:
        self.labels = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))

    def epoch(self, epoch: int) -> list[Batch]:
        return [self.finish()]

    def drafts(self, epoch: int) -> list[tuple[Tensor, ...]]:
        return [()]

    def finish(self, *draft: Tensor) -> Batch:
        images = F.one_hot(self.labels, 4)[:, :, None, None].float()
        return Batch(images, self.labels, torch.arange(len(self.labels)))


def select_toy(rule: Rule, planted: Sequence[int], folder: Path, measure: str, epochs: int) -> tuple[Genotype, Any]:
    supernet = ToySupernet(Toy(rule), planted)
    kind = METHODS.get("darts")
    method = kind(supernet.layout, kind.Settings())  # type: ignore[call-arg]
    with torch.no_grad():  # the logits all say `none`, and after it candidates that are worth nothing
        method.alpha["cell"].copy_(torch.tensor([2.0, 1.0, 1.0, 1.0]).repeat(4, 1))
        for i, k in enumerate(planted):
            method.alpha["cell"][i, k] = 0.5
    batches: Any = ToyBatches((10, 40, 20, 30))
    own = resolve({"method": "darts", "device": "cpu", "precision": "float32"})
    own = replace(own, select=replace(own.select, by="perturbation", measure=measure, epochs=epochs))
    selection = PerturbationSelection(
        own,
        supernet,
        method,
        CrossEntropy(),
        ALONE,
        weights=batches,
        judged=batches,
        in_step=lambda: torch.enable_grad() if torch.is_grad_enabled() else torch.no_grad(),
        notify=lambda text: None,
    )
    assert method.derive() != selection(folder)[0], "the logits say something else"
    return selection(folder)


@pytest.mark.parametrize("measure", ["accuracy", "loss"])
@pytest.mark.parametrize("epochs", [0, 2])
def test_the_planted_candidates_are_kept(tmp_path: Path, measure: str, epochs: int) -> None:
    planted = [3, 1, 2, 1]
    genotype, about = select_toy(StrongestEach(), planted, tmp_path, measure, epochs)
    assert [pick.op for pick in genotype.cells["cell"].picks] == ["none abc"[4 + k] if k else "" for k in planted]
    assert about["perturbation"]["accuracy"] == 1.0 and about["perturbation"]["nodes"] == []


@pytest.mark.parametrize("measure", ["accuracy", "loss"])
def test_a_node_keeps_the_edges_of_the_most_frequent_classes(tmp_path: Path, measure: str) -> None:
    genotype, about = select_toy(TopInputs(2), [3, 1, 2, 1], tmp_path, measure, 1)
    assert [str(pick) for pick in genotype.cells["cell"].picks] == ["a(1->4)", "a(3->4)"]
    (node,) = about["perturbation"]["nodes"]
    assert node["kept"] == ["1->4", "3->4"] and node["node"] == 4
    falls = {edge: round(1 - value["accuracy"], 6) for edge, value in node["without"].items()}
    assert max(falls, key=lambda edge: falls[edge]) == "1->4" and len(set(falls.values())) == 4


def test_every_edge_is_decided_once_in_an_order_of_the_seed() -> None:
    layout = build_space("darts", {"cells": 3, "channels": 2, "nodes": 3}).layout()
    rounds = questions(layout, 0)
    assert rounds == questions(layout, 0) and rounds != questions(layout, 1)
    edges = [q for r in rounds for q in r if not q.is_node]
    assert sorted((q.table, q.number) for q in edges) == [(t, i) for t in ("normal", "reduce") for i in range(9)]
    assert all({q.table for q in r} == {"normal", "reduce"} for r in rounds), "one edge of either cell, then tuning"
    nodes = [q for r in rounds for q in r if q.is_node]
    assert sorted((q.table, q.number) for q in nodes) == [(t, n) for t in ("normal", "reduce") for n in (3, 4)]
    assert len(rounds) == 9 + 2
    assert [num_inputs(layout, layout.tables[0], target) for target in (2, 3, 4)] == [2, 2, 2]


class Killed(BaseException):
    pass


def kill_at(text: str) -> Callable[[Event], None]:
    def listen(event: Event) -> None:
        if isinstance(event, Note) and text in event.text:
            raise Killed

    return listen


@pytest.mark.parametrize("method", ["darts", "itnas"])
def test_an_interrupted_selection_continues_after_its_latest_round_bit_for_bit(
    data: Path, tmp_path: Path, method: str
) -> None:
    given = resolve(recipe(data, method=method, epochs=2, drop_path=0.4))
    whole = search(given, tmp_path / "whole")
    with pytest.raises(Killed):
        search(given, tmp_path / "killed", on_event=kill_at("3 of 3"))
    state = checkpoint.load_file(tmp_path / "killed" / FILE)
    assert state is not None and state["round"] == 2 and "supernet" in state
    torch.manual_seed(99)
    notes: list[str] = []
    listen = lambda event: notes.append(event.text) if isinstance(event, Note) else None  # noqa: E731
    resumed = search(given, tmp_path / "killed", resume=True, on_event=listen)
    assert resumed.genotype == whole.genotype
    assert selection_of(tmp_path / "killed") == selection_of(tmp_path / "whole")
    assert any("continuing after 2 of 3" in note for note in notes) and not any(": 2 of 3" in note for note in notes)


def test_every_seed_of_a_search_can_select(data: Path, tmp_path: Path) -> None:
    for seed in (2**55, SEEDS - 1):
        result = search(resolve(recipe(data, seed=seed)), tmp_path / str(seed))
        assert result.genotype is not None and selection_of(result.folder)["edges"]


def test_the_state_of_another_search_is_not_continued(data: Path, tmp_path: Path) -> None:
    given = resolve(recipe(data))
    with pytest.raises(Killed):
        search(given, tmp_path / "run", on_event=kill_at("3 of 3"))
    other = resolve(recipe(data, seed=1))
    (tmp_path / "kept").write_bytes((tmp_path / "run" / FILE).read_bytes())
    plain = search(other, tmp_path / "plain")
    with pytest.raises(Killed):
        search(other, tmp_path / "run", overwrite=True, on_event=kill_at("1 of 3"))
    assert not (tmp_path / "run" / FILE).exists(), "overwriting removes it"
    (tmp_path / "run" / FILE).write_bytes((tmp_path / "kept").read_bytes())
    found = search(other, tmp_path / "run", resume=True)
    assert found.genotype == plain.genotype and selection_of(tmp_path / "run") == selection_of(tmp_path / "plain")
    (tmp_path / "run" / FILE).write_bytes(b"damaged")
    assert checkpoint.load_file(tmp_path / "run" / FILE) is None


SHOWN = [
    ("batch", "snas", "nb201", None),
    ("batch", "darts", "nb1shot1-1", {"cells_per_stack": 1, "channels": 2}),
    ("batch", "darts", "proxyless", {"width": 0.25, "depths": (1,) * 6, "kernels": (3, 5), "head": 16}),
    ("recalibrated", "spos", "nb201", None),
]
OTHERS = [
    (norms, method, space, sizes)
    for norms in ("batch", "recalibrated")
    for method, space, sizes in (
        ("entrannas-dst", "nb201", None),
        ("itnas", "nb201", None),
        ("entrannas", "darts", None),
        ("fullattention", "fullattention", {}),
        ("spos", "nb201", None),
    )
    if (norms, method, space, sizes) not in SHOWN
]


@pytest.mark.parametrize(
    ("norms", "method", "space", "sizes"),
    [*SHOWN, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in OTHERS)],
)
def test_it_selects_after_any_method_in_any_space(
    data: Path, tmp_path: Path, method: str, space: str, sizes: dict[str, Any] | None, norms: str
) -> None:
    if norms == "recalibrated" and (method, space) not in (("snas", "nb201"), ("itnas", "nb201")):
        pytest.skip("how norms are measured does not depend on the rest")
    tiny = {**build_space_class(space).small, **build_space_class(space).tiny} if sizes == {} else sizes
    changes = {} if tiny is None else {"space_settings": tiny}
    select = {"epochs": 1, "images": 16, "norms": norms}
    given = resolve(recipe(data, space, method=method, evolution={"generations": 0}, select=select, **changes))
    result = search(given, tmp_path / "run")
    genotype, found = result.genotype, selection_of(tmp_path / "run")
    assert genotype is not None
    built = build_space(given.space, given.space_settings)
    network = built.network(genotype, (1, 8, 8), 3)
    assert network.eval()(torch.zeros(2, 1, 8, 8)).shape == (2, 3)
    taken = {(t, str(Choice(p.source, p.target, (p.op,))), p.op) for t, c in genotype.cells.items() for p in c.picks}
    removed = {(row["table"], edge) for row in found["nodes"] for edge in row["without"] if edge not in row["kept"]}
    for row in found["edges"]:
        is_there = (row["table"], row["edge"], row["kept"]) in taken
        assert is_there != ((row["table"], row["edge"]) in removed), "an edge is what was decided, or removed"
    for row in found["nodes"]:
        for edge in row["without"]:
            assert any((t, e) == (row["table"], edge) for t, e, _ in taken) == (edge in row["kept"])
    state = checkpoint.load_file(tmp_path / "run" / FILE)
    assert state is not None and "supernet" not in state, "of a finished selection the decisions alone are kept"


def build_space_class(name: str) -> Any:
    from softcell.spaces import SPACES

    return SPACES.get(name)


def test_batch_statistics_leave_running_statistics_and_random_numbers_alone() -> None:
    supernet = build_space("nb201", {"cells_per_stage": 1, "channels": 2}).supernet((1, 8, 8), 3)
    supernet.use_drop_path(0.5)
    supernet.drop_path.set_fraction(1.0)
    supernet.eval()
    weights = {"cell": torch.full((6, 5), 0.2)}
    before = {name: value.clone() for name, value in supernet.state_dict().items()}
    drawn = torch.get_rng_state()
    x = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), batch_statistics(supernet):
        first, second = (supernet(x, WeightMix(supernet.layout, weights)) for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    for name, value in supernet.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), drawn) and not supernet.training
    assert float(supernet.drop_path.current) == 0.5


def test_a_search_from_before_there_was_a_selection_can_still_be_resumed(data: Path, tmp_path: Path) -> None:
    given = resolve(recipe(data, select={"by": "method", "epochs": 5}))
    search(given, tmp_path / "run")
    loaded = checkpoint.load_latest(tmp_path / "run")
    assert loaded is not None
    kept = loaded.state["identity"]["recipe"]
    old = {key: value for key, value in kept.items() if not key.startswith("select.")}
    assert len(old) < len(kept)
    checkpoint.save(tmp_path / "run", {**loaded.state, "identity": {**loaded.state["identity"], "recipe": old}})
    restore(tmp_path / "run", device="cpu")
    changed = {**kept, "select.by": "perturbation"}
    checkpoint.save(tmp_path / "run", {**loaded.state, "identity": {**loaded.state["identity"], "recipe": changed}})
    with pytest.raises(UserError, match=r"select.by is 'perturbation' in the checkpoint"):
        restore(tmp_path / "run", device="cpu")


def test_the_search_s_own_weights_are_put_back(data: Path, tmp_path: Path) -> None:
    """The child is measured with the supernet that the checkpoint has, not with the tuned one."""
    with_, without = (
        search(resolve({**recipe(data, child_every=1), "select": select}), tmp_path / name)
        for name, select in (("with", {"by": "perturbation", "epochs": 1}), ("without", {"by": "method"}))
    )
    assert [{**row, "seconds": 0} for row in with_.metrics] == [{**row, "seconds": 0} for row in without.metrics]
    found = restore(tmp_path / "with", device="cpu")
    held = found.feeds().plain(found.dataset.train, found.parts["validation"])
    assert with_.genotype is not None
    child = measure_child(found.supernet, with_.genotype, held.epoch(0), ALONE)
    results = json.loads((tmp_path / "with" / "run.json").read_text())["results"]
    assert results["child_loss"] == pytest.approx(child.loss, rel=1e-6)
    before = restore(tmp_path / "without", device="cpu")
    for name, value in found.supernet.state_dict().items():
        torch.testing.assert_close(value, before.supernet.state_dict()[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"method": "random"}, "trains architectures one by one"),
        ({"evolution": {"generations": 2}}, "both select the architecture"),
        ({"resource": {"max_params": "1M"}}, "cannot meet a budget, but got"),
        ({"objective": "context"}, "objective=context has none"),
        ({"split": {"validation": 0}}, "split.validation=0 leaves none"),
        ({"space": "nos", "method": "nos", "space_settings": None}, "picks operations of several edges together"),
        ({"method": "itnas", "method_settings": {"paths": "single"}}, "trains single paths"),
        ({"method": "itnas", "method_settings": {"paths": "pairwise"}}, "trains single paths"),
        ({"select": {"epochs": -1}}, "select.epochs"),
        ({"select": {"lr": 0.0}}, "select.lr"),
        ({"select": {"by": "magic"}}, "select.by"),
    ],
)
def test_what_cannot_be_selected_by_perturbation_is_refused(
    data: Path, tmp_path: Path, changes: dict[str, Any], match: str
) -> None:
    with pytest.raises(UserError, match=match):
        search(resolve(recipe(data, **changes)), tmp_path / "run")
    assert not (tmp_path / "run").exists()
