"""The Python functions: the names of settings, data in memory, progress, and what a notebook shows."""

from __future__ import annotations

import inspect
import io
import re
import sys
import types
import typing
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from rich.console import Console

from softcell import api
from softcell.app import progress
from softcell.app.baseline import draw_random, random_baseline
from softcell.app.cli.search import search as search_command
from softcell.app.cli.train import train as train_command
from softcell.app.pipeline import Plan
from softcell.arch import Genotype
from softcell.engine.task import EpochEnded, Event, Finished, Note, Started, Stepped
from softcell.errors import UserError
from softcell.evaluate import TrainRecipe
from softcell.recipes import SearchSettings, TrainSettings, from_options, search_recipe
from softcell.search import SearchRecipe
from softcell.search.recipe import WeightOptimiser
from softcell.spaces import build_space

SIZES: dict[str, Any] = {"channels": 2, "batch_size": 64, "epochs": 1, "threads": 1}
TINY: dict[str, Any] = {**SIZES, "set": {"space.cells_per_stage": 1}}


def images_in_memory(count: int = 80) -> tuple[torch.Tensor, torch.Tensor]:
    """Grey images float32 [n, 1, 8, 8] in 0..1, brighter in the second class, and labels int64 [n]."""
    labels = torch.arange(count) % 2
    noise = torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return noise * 0.5 + labels[:, None, None, None] * 0.4, labels


class Made(typing.NamedTuple):
    """A search on images in memory with a training run of its result, and the events of the search."""

    found: api.SearchResult
    trained: api.TrainResult
    events: list[Event]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder, events = tmp_path_factory.mktemp("api"), []  # type: ignore[var-annotated]
    found = api.search(
        "darts",
        space="nb201",
        data=images_in_memory(),
        scale="small",
        out=folder / "search",
        on_event=events.append,
        **TINY,
    )
    return Made(found, api.train(found, recipe="small", out=folder / "train", **TINY), events)


def test_search_train_and_baseline_in_python(made: Made, tmp_path: Path) -> None:
    found, trained = made.found, made.trained
    assert found.genotype is not None
    assert trained.split == "test" and trained.genotype == found.genotype
    baseline = random_baseline(draw_random(found.genotype, trained.recipe, 1), trained.recipe, tmp_path)
    assert baseline.accuracies == [baseline.mean]
    network = api.load_network(trained.folder)
    assert sum(p.numel() for p in network.parameters()) == trained.cost.parameters
    again = api.train(found.folder, resume=True, out=trained.folder)
    assert again.accuracy == trained.accuracy


def test_settings_are_strict(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'epochs'"):
        api.search(epoch=3, out=tmp_path / "run")
    with pytest.raises(UserError, match="needs the folder"):
        api.search(resume=True)


def test_every_public_name_exists() -> None:
    for name in api.__all__:
        assert getattr(api, name) is not None


def test_images_in_memory_are_kept_next_to_the_run_and_a_resumed_run_needs_no_arrays(made: Made) -> None:
    recipe, images = made.found.recipe, images_in_memory()
    kept = list(made.found.folder.parent.glob("*.npz"))
    assert [Path(recipe.data_root or "") / recipe.data] == kept
    assert made.trained.recipe.data == recipe.data  # one file for the search and the training
    assert api.search(resume=True, out=made.found.folder).genotype == made.found.genotype
    assert api.search(data=images, resume=True, out=made.found.folder).genotype == made.found.genotype
    with pytest.raises(UserError, match="a resumed run keeps its recipe"):
        api.search(data=(1 - images[0], images[1]), resume=True, out=made.found.folder)
    with pytest.raises(UserError, match="did you mean 'epochs'"):
        api.search(data=(1 - images[0], images[1]), epoch=3, out=made.found.folder.parent / "never")
    assert [*made.found.folder.parent.glob("*.npz")] == kept, "a refused call leaves nothing"


def test_images_in_memory_give_the_same_search_as_their_file(made: Made, tmp_path: Path) -> None:
    (kept,) = made.found.folder.parent.glob("*.npz")
    again = api.search("darts", space="nb201", data=kept, scale="small", out=tmp_path / "again", **TINY)
    timed = ("seconds",)
    rows = [[{k: v for k, v in row.items() if k not in timed} for row in one.metrics] for one in (made.found, again)]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("--max-params 1M --max-flops 5M --at-size 32", {"max_params": "1M", "max_flops": "5M", "at_size": 32}),
        ("--resource mild --select perturbation", {"resource": "mild", "select": "perturbation"}),
        ("--set space.cells=5 --set weights.lr=0.1", {"set": {"space.cells": 5, "weights.lr": 0.1}}),
        ("--set space.cells=5", {"space_settings": {"cells": 5}}),
        ("--epochs 3 --seed 2 --deterministic", {"epochs": 3, "seed": 2, "deterministic": True}),
        ("--guide teacher", {"guide": Path("teacher")}),
    ],
)
def test_python_accepts_the_names_of_the_command_line(
    line: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "teacher").mkdir()
    monkeypatch.chdir(tmp_path)
    given: list[dict[str, Any]] = []
    monkeypatch.setattr("softcell.app.cli.search.run_search", lambda found, *_, **__: given.append(found))
    from softcell.app.cli.main import run

    assert run(["search", *line.split()]) == 0
    assert given == [from_options(settings)]


def test_options_stand_for_these_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("table.yaml", "mine.py", "weights.safetensors"):
        Path(name).touch()
    budgets = {"max_params": 1, "max_flops": "2M", "max_latency": 3.0, "at_size": 32, "latency_table": "table.yaml"}
    expected = {"max_params": 1, "max_flops": "2M", "max_latency": 3.0, "image_size": 32}
    expected["latency_table"] = str(tmp_path / "table.yaml")
    assert from_options({"resource": "mild", **budgets}) == {"resource": {"preset": "mild", **expected}}
    assert from_options({"select": "perturbation", "guide": "resnet", "epochs": None}) == {
        "select": {"by": "perturbation"},
        "guide": {"teacher": "resnet"},
    }
    assert from_options({"plugin": "mine.py", "init": Path("weights.safetensors")}) == {
        "plugins": [str(tmp_path / "mine.py")],
        "init": str(tmp_path / "weights.safetensors"),
    }
    assert from_options({"cells": 5, "channels": 8, "set": ["space.nodes=2"]}) == {
        "space_settings": {"cells": 5, "channels": 8, "nodes": 2}
    }


def test_objects_replace_a_part_and_mappings_change_it() -> None:
    mapped = search_recipe(from_options({"method": "snas", "weights": {"lr": 0.2}}))
    replaced = search_recipe(from_options({"method": "snas", "weights": WeightOptimiser(lr=0.2)}))
    assert replaced.weights == WeightOptimiser(lr=0.2)
    assert mapped.weights.lr == 0.2 and mapped.weights.weight_decay != 0.0
    own = search_recipe(from_options({"method": "snas"})).weights
    assert mapped.weights == WeightOptimiser(**{**vars(own), "lr": 0.2})
    space = build_space("nb201", {"channels": 4})
    made = search_recipe(from_options({"space": space}))
    assert (made.space, made.space_settings["channels"]) == ("nb201", 4)


@pytest.mark.parametrize(
    ("typed", "recipe", "command", "own"),
    [
        (SearchSettings, SearchRecipe, search_command, {"method", "space", "data"}),
        (TrainSettings, TrainRecipe, train_command, {"recipe", "data"}),
    ],
)
def test_typed_settings_match_recipe_and_command(typed: Any, recipe: Any, command: Any, own: set[str]) -> None:
    """`own` and the parameters of the functions that are no settings are declared in the functions themselves."""
    known = set(typed.__annotations__)
    for base in typing.get_type_hints(typed):
        known.add(base)
    missing = {field.name for field in fields(recipe)} - own - known
    assert not missing, f"add {missing} to {typed.__name__} in softcell/recipes.py"
    # Options that Python has as other functions, as parameters of its own, or under another name.
    elsewhere = {"seeds", "keep", "at_once", "random", "genotype", "from_", "set_", "method", "space", "data", "recipe"}
    function = api.search if recipe is SearchRecipe else api.train
    parameters = set(inspect.signature(function).parameters)
    lost = set(inspect.signature(command).parameters) - known - elsewhere - parameters
    assert not lost, f"`{function.__name__}` lacks {lost} of the command line"


def test_representations_are_short(made: Made) -> None:
    found, trained = made.found, made.trained
    data = re.escape(found.recipe.data)
    assert re.fullmatch(rf"SearchRecipe\(darts in space nb201 on {data}, 1 epoch, seed 0\)", repr(found.recipe))
    assert re.fullmatch(rf"TrainRecipe\(small on {data}, 1 epoch, seed 0\)", repr(trained.recipe))
    assert repr(found.genotype) == "Genotype(nb201: cell 6 edges)"
    assert re.fullmatch(r"SearchResult\(.*search: darts in space .*, 1 epoch, validation [\d.]+%\)", repr(found))
    accuracy = f"{100 * (trained.accuracy or 0):.1f}%" if trained.accuracy != 1 else "100%"
    assert f"test {accuracy}, {trained.cost.parameters:,} parameters" in repr(trained)


def test_results_show_themselves_in_a_notebook(made: Made, tmp_path: Path) -> None:
    picture = '<img src="data:image/svg+xml;base64,'
    assert made.found.genotype is not None
    shown = made.found.genotype._repr_html_()
    assert shown is not None and shown.startswith(picture)
    for result in (made.found, made.trained, api.draw(made.found), api.draw(made.found.genotype)):
        assert picture in (result._repr_html_() or "")
    assert f"<td>{made.trained.cost.parameters:,}</td>" in (made.trained._repr_html_() or "")
    page = api.report([made.found, made.trained], tmp_path / "both.html")
    assert page.path.read_text().startswith("<!doctype html>")
    assert '<iframe srcdoc="&lt;!doctype html&gt;' in (page._repr_html_() or "")
    with pytest.raises(UserError, match="already exists"):
        api.report([made.found, made.trained], tmp_path / "both.html")
    compared = api.compare([made.found, made.trained.folder])
    assert [group.summary.n for group in compared.groups] == [1, 1]
    assert "<table" in (compared._repr_html_() or "") and str(compared).startswith("| group |")


def test_a_result_predicts_the_classes_of_files(made: Made, tmp_path: Path) -> None:
    Image.new("L", (8, 8), 255).save(tmp_path / "bright.png")
    (found,) = api.predict(made.trained, tmp_path / "bright.png")
    network = api.load_network(made.trained.folder).eval()
    inputs = network.inputs
    assert inputs is not None
    pixels = (torch.ones(1, 1, 8, 8) - inputs.mean[0]) / inputs.std[0]
    expected = network(pixels).softmax(1)[0].sort(descending=True)
    assert made.trained.network.inputs == inputs, "a network knows its images without being loaded again"
    assert found.classes == tuple(inputs.classes[i] for i in expected.indices)
    assert torch.allclose(torch.tensor(found.probabilities), expected.values, atol=1e-5)


def test_the_core_alone_shows_text() -> None:
    class Unknown(Genotype):
        pass

    assert Unknown("nb201", {})._repr_html_() is None


def test_a_call_is_quiet_outside_of_terminals_and_calls_the_listener(
    made: Made, capfd: pytest.CaptureFixture[str]
) -> None:
    assert progress.python_console(None)[1] and not progress.python_console(False)[1]
    assert [type(event) for event in made.events if not isinstance(event, Stepped | Note)] == [
        Started, EpochEnded, Finished,
    ]  # fmt: skip
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind", ["terminal", "notebook"])
def test_progress_is_on_in_terminals_and_notebooks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=kind == "terminal", force_jupyter=kind == "notebook", width=100)
    monkeypatch.setattr(progress, "Console", lambda **_: console)
    cells = notebook(monkeypatch)
    found, quiet = progress.python_console(None)
    assert not quiet
    with progress.Display(found, "a search: runs/1") as display:
        display(Started(0, 0, 2))
        display(Stepped(0, 5, 10, 0.25, 7.0))
        display(EpochEnded(0, {"epoch": 0, "train_loss": 0.5}))
        if kind == "notebook":
            display._notebook._next = 0.0  # type: ignore[union-attr]
        display(Stepped(1, 2, 10, 0.6, 7.0))
        display(Note("<b>"))
    if kind == "terminal":
        assert "a search: runs/1" in written.getvalue() and "loss 0.500" in written.getvalue() and not cells
        return
    assert "━" * 6 + "┄" * 24 + " epoch 2/2  step 2/10  0:07 left" in cells[-2]["text/plain"]
    assert cells[-1]["text/plain"].splitlines() == ["a search: runs/1", "epoch 1/2  loss 0.500  0:07 left", "note: <b>"]
    assert "&lt;b&gt;" in cells[-1]["text/html"] and written.getvalue() == ""


def notebook(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """Every content that the output of a notebook's cell is set to."""
    shown: list[dict[str, str]] = []

    class Handle:
        def update(self, content: dict[str, str], raw: bool) -> None:
            shown.append(content)

    def display(content: dict[str, str], raw: bool, display_id: bool) -> Handle:
        shown.append(content)
        return Handle()

    module = types.ModuleType("IPython.display")
    module.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return shown


def test_run_passes_its_request_to_the_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []

    def stop(plan: Plan, screen: Any) -> Any:
        plans.append(plan)
        screen.print("not shown")
        return api.RunResult(plan.folder, None, (), 130)

    monkeypatch.setattr(api.pipeline, "run", stop)
    monkeypatch.chdir(tmp_path)
    Path("mine.onnx").touch()
    given: dict[str, Any] = {"seed": 3, "beside": Path("mine.onnx")}
    ended = api.run(images_in_memory(), time="6m", max_params=200_000, out=tmp_path / "run", **given)
    asked = plans[0].request
    assert (asked.time, asked.max_params, asked.seed) == (360.0, "200000", 3)
    assert asked.beside == str(tmp_path / "mine.onnx")
    assert (Path(asked.data_root or "") / asked.data).is_file()
    assert repr(ended) == f"RunResult({tmp_path / 'run'}: interrupted)" and ended.exit_code == 130
    assert api.run(out=tmp_path / "run", resume=True).summary is None
    with pytest.raises(UserError, match="must be in increasing order, but got 200000,5e4; pass 5e4,200000"):
        api.run("digits", max_params=[200_000, "5e4"], out=tmp_path / "other")
    assert plans[1].request == asked
    with pytest.raises(UserError, match="keeps its settings"):
        api.run(out=tmp_path / "run", resume=True, seed=4)
    with pytest.raises(UserError, match="did you mean 'seed'"):
        api.run("digits", out=tmp_path / "other", sead=4)
    with pytest.raises(UserError, match="`data` must name the images"):
        api.run()


def test_a_finished_run_is_shown_with_its_verdict_and_report(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("<!doctype html>page", encoding="utf-8")
    result = api.RunResult(tmp_path, summary=None, verdict=("It was <worth> it.",), exit_code=0)
    shown = result._repr_html_() or ""
    assert "It was &lt;worth&gt; it." in shown and "&lt;!doctype html&gt;page" in shown


def test_wrong_types_are_rejected_with_what_is_expected() -> None:
    with pytest.raises(UserError, match="a genotype must be a Genotype, a result, a path or notation, but got int"):
        api.train(5)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="images must be files or folders, but got int"):
        api.predict("run", 5)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no run has an accuracy to compare: no runs were given"):
        api.compare([])


def test_set_accepts_one_assignment_as_a_string() -> None:
    assert from_options({"set": "weights.lr=0.1"}) == from_options({"set": ["weights.lr=0.1"]})
    with pytest.raises(UserError, match=r"--set takes key=value .*, got 'weights.lr'"):
        from_options({"set": "weights.lr"})
