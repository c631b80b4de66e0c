"""Guided searches: any method in any space, teachers from anywhere, resumed bit for bit, messages for mismatches."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.data import Batch
from softcell.engine.task import Event, Note, Stepped
from softcell.errors import UserError
from softcell.evaluate.teacher import resolve_teacher, stored_teacher, train_teacher
from softcell.kernels.backend import runs_triton
from softcell.methods import METHODS
from softcell.nn.classifiers import PyramidNet, ResNet18, Tapped
from softcell.nn.objective import CrossEntropy, Guided, attention_vector, transfer_loss
from softcell.search import resolve, search
from softcell.search.guide import TRIED, Guide, _pair, drowned, probe, supernet_maps
from softcell.settings import build
from softcell.spaces import Bound
from softcell.spaces.execution import is_modules_only
from softcell.spaces.teacher import find_teacher, load_classifier, register_teacher
from softcell.testing import tiny_space
from softcell.trust import UntrustedError, trusting
from tests.helpers.search_toys import ALONE, batch, settings, step_state, write_data
from tests.helpers.unsealed import unsealed


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data and a teacher trained on it."""
    folder = tmp_path_factory.mktemp("guided")
    data = write_data(folder / "data.npz")
    recipe = teacher_recipe(data)
    assert train_teacher(recipe, folder / "teacher").exit_code == 0
    return folder


def teacher_recipe(data: Any, **more: Any) -> Any:
    small = {"classifier": {"width": 4}, "recipe": "small", "epochs": 1, "device": "cpu", "threads": 1}
    return resolve_teacher("resnet18", {"data": str(data), **small, "precision": "float32"}, more)


def guided(place: Path, method: str = "darts", space: str = "nb201", **more: Any) -> Any:
    chain = {"width": 0.1, "depths": [1] * 6, "head": 8}
    own = {"nos": {"cells": 3, "channels": 2, "nodes": 1}, "proxyless": chain}.get(space)
    base = {**settings("nb201", place / "data.npz", epochs=1, method=method), "space": space}
    if own is not None:
        base["space_settings"] = own
    guide = {"teacher": str(place / "teacher"), "weight": 10.0}
    return resolve(base, {"guide": {**guide, **more.pop("guide", {})}}, more)


@pytest.mark.parametrize(
    ("method", "space"), [("nos", "nos"), ("snas", "nos"), ("entrannas", "nos"), ("random", "nos"), ("darts", "nb201")]
)
def test_any_method_in_any_space_is_guided(method: str, space: str, place: Path, tmp_path: Path) -> None:
    recipe = guided(place, method, space)
    result = search(recipe, tmp_path / "run")
    assert result.genotype is not None and result.genotype.space == space
    row = result.metrics[0]
    assert row["guide_loss"] > 0
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    assert len(manifest["results"]["guide"]["digest"]) == 64
    of_architecture = () if method == "random" else ("task_architecture", "guide_architecture")
    for name in ("task", "guide", *of_architecture):
        assert row[f"gradient_norm_{name}"] > 0


def test_guidance_changes_what_is_learnt_and_measuring_it_does_not(place: Path, tmp_path: Path) -> None:
    alone = {"guide": {"teacher": None, "weight": Guide().weight}}
    plain = search(resolve(guided(place).to_dict(), alone), tmp_path / "plain").metrics[-1]
    weak = search(guided(place, guide={"weight": 1e-30}), tmp_path / "weak").metrics[-1]
    strong = search(guided(place, guide={"weight": 100.0}), tmp_path / "strong").metrics[-1]
    assert "guide_loss" not in plain and "gradient_norm_task" not in plain
    assert weak["val_loss"] == pytest.approx(plain["val_loss"], rel=1e-5)
    assert strong["val_loss"] != pytest.approx(plain["val_loss"], rel=1e-4)


def test_a_guided_search_resumes_bit_for_bit(place: Path, tmp_path: Path) -> None:
    recipe = guided(place, epochs=2)
    whole = search(recipe, tmp_path / "whole")

    def stop(event: Event) -> None:
        if isinstance(event, Stepped):
            os.kill(os.getpid(), signal.SIGTERM)

    first = search(recipe, tmp_path / "run", on_event=stop)
    assert first.genotype is None
    again = search(recipe, tmp_path / "run", resume=True)
    for mine, theirs in zip(whole.metrics, again.metrics, strict=True):
        assert {k: v for k, v in mine.items() if k != "seconds"} == {k: v for k, v in theirs.items() if k != "seconds"}
    assert again.genotype == whole.genotype


@pytest.mark.parametrize("form", ["mean-square", "norm"])
def test_the_gradient_norms_are_measured_for_both_terms_over_four_batches(form: Any) -> None:
    """Each part differentiated by itself; and nothing is left behind: no statistics, no random numbers."""
    one = step_state("nb201")
    teacher = Tapped(ResNet18(width=2).build(1, 3).double())
    guided = Guided(CrossEntropy(), teacher, (0, 1, 2), 7.0, form)
    batches = [Batch(*batch(seed), torch.arange(6)) for seed in range(5)]
    expected = dict.fromkeys(("task", "guide", "task_architecture", "guide_architecture"), 0.0)
    before, state = copy.deepcopy(one.supernet.state_dict()), torch.get_rng_state()
    twin = copy.deepcopy(one.supernet)
    for each in batches[:4]:
        for part in ("task", "guide"):
            twin.zero_grad()
            one.method.zero_grad()
            maps = twin.features(each.images, one.method.relax())
            if part == "task":
                loss = F.cross_entropy(twin.head(maps[-1]), each.labels)
            else:
                vectors = [[attention_vector(m) for m in found] for found in (maps, teacher(each.images, 3))]
                loss = 7.0 * transfer_loss(*vectors, form)
            loss.backward()
            for module, name in ((twin, part), (one.method, f"{part}_architecture")):
                squares = [float(p.grad.square().sum()) for p in module.parameters() if p.grad is not None]
                expected[name] += math.sqrt(sum(squares)) / 4
    found = probe(
        guided,
        one.supernet,
        lambda: Bound(one.supernet, one.method.relax()),
        list(one.method.parameters()),
        batches,
        ALONE,
        print,
    )
    assert found == pytest.approx({f"gradient_norm_{name}": value for name, value in expected.items()})
    assert all(torch.equal(before[name], value) for name, value in one.supernet.state_dict().items())
    assert torch.equal(state, torch.get_rng_state()) and float(guided.sums[1]) == 0


@pytest.mark.parametrize("method", ["nos", "random"])
def test_norms_are_measured_as_steps_are_made(
    method: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the run's precision and by its kernels: others would first have to be compiled, for half a minute on a GPU."""
    seen: list[tuple[bool, bool]] = []

    def watched(*given: Any) -> dict[str, float]:
        seen.append((torch.is_autocast_enabled("cpu"), is_modules_only()))
        return probe(*given)

    module = "_meters" if method == "nos" else "samplers"
    monkeypatch.setattr(f"softcell.search.{module}.probe", watched)
    for precision in ("bfloat16", "float32"):
        for fused in (True, False):
            search(guided(place, method, "nos", precision=precision, fused=fused), tmp_path / f"{precision}-{fused}")
    plain = method == "nos"  # derived networks have no fused cells
    assert seen == [(True, False), (True, plain), (False, False), (False, plain)]


@pytest.mark.parametrize("space", ["nos", "fullattention"])
def test_sizes_of_maps_are_found_without_kernels(space: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be compiled for one image, and never be used again."""
    supernet = tiny_space(space).supernet((3, 8, 8), 3)
    method = METHODS.get("darts").for_supernet(build(METHODS.get("darts").Settings, {}), supernet)
    expected = [tuple(m.shape[1:]) for m in supernet.features(torch.zeros(2, 3, 8, 8), method.relax())]
    forward, seen = supernet.features, list[tuple[bool, bool]]()
    monkeypatch.setattr("softcell.kernels.backend.has_triton", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # so that kernels would be asked for on a CPU

    def watched(image: Tensor, mix: Any) -> Any:
        seen.append((is_modules_only(), runs_triton(image)))
        return forward(image, mix)

    monkeypatch.setattr(supernet, "features", watched)
    assert supernet_maps(supernet, method) == expected
    assert seen == [(True, False)]
    assert runs_triton(torch.ones(1)) and not is_modules_only(), "only there"


def test_second_order_searches_are_guided_too(place: Path, tmp_path: Path) -> None:
    result = search(guided(place, regime="unrolled"), tmp_path / "run")
    assert result.genotype is not None and result.metrics[0]["guide_loss"] > 0


def test_a_resumed_search_needs_the_teacher_it_began_with(place: Path, tmp_path: Path) -> None:
    search(guided(place), tmp_path / "run")
    manifest = json.loads((tmp_path / "run" / "run.json").read_text())
    manifest["results"]["guide"]["digest"] = "0" * 64
    manifest["status"] = "interrupted"
    (tmp_path / "run" / "run.json").write_text(json.dumps(unsealed(manifest)))
    with pytest.raises(UserError, match="keeps its teacher"):
        search(guided(place), tmp_path / "run", resume=True)


def test_a_teacher_that_does_not_fit_is_refused_before_the_run(place: Path, tmp_path: Path) -> None:
    register_teacher("flat", nn.Conv2d(1, 2, 3, padding=1))
    with pytest.raises(UserError, match="guidance compares maps of the same size"):
        search(guided(place, guide={"teacher": "flat"}), tmp_path / "run")
    register_teacher("wide", nn.Conv2d(9, 2, 3, padding=1))
    with pytest.raises(UserError, match="cannot read batches of 1x8x8 images"):
        search(guided(place, guide={"teacher": "wide"}), tmp_path / "run")
    with pytest.raises(UserError, match=r"no teacher at 'nowhere\.pt'"):
        find_teacher("nowhere.pt", classifier="resnet18")
    with pytest.raises(UserError, match="no teacher at 'nowhere'"):
        search(guided(place, guide={"teacher": "nowhere"}), tmp_path / "run")
    with pytest.raises(UserError, match=r"no teacher at 'resnet18'.*first `softcell teacher resnet18"):
        search(guided(place, guide={"teacher": "resnet18"}), tmp_path / "run")
    register_teacher("broken", ResNet18(width=2).build(1, 3))
    find_teacher("broken").module.module.stages[1][0].first.weight.fill_(torch.nan)  # type: ignore
    with pytest.raises(UserError, match="map 2 of 4 of the teacher broken is not"):
        search(guided(place, guide={"teacher": "broken"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("maps", "message"),
    [
        (lambda x: [], "returns none; name submodules"),
        (lambda x: [x, x.mean(0, keepdim=True)], "map 2 of 2 of the teacher odd has 1 for 2 images"),
        (lambda x: [torch.complex(x, x)], "map 1 of 1 of the teacher odd is of torch.complex64"),
        (lambda x: [x > 0], "is of torch.bool"),
    ],
)
def test_a_teacher_whose_maps_cannot_be_compared_is_refused(
    maps: Callable[[Tensor], list[Tensor]], message: str, place: Path, tmp_path: Path
) -> None:
    class Odd(nn.Module):
        def features(self, x: Tensor) -> list[Tensor]:
            return maps(x)

    register_teacher("odd", Odd())
    with pytest.raises(UserError, match=message):
        search(guided(place, guide={"teacher": "odd"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_of_a_teacher_only_the_stages_that_are_compared_run_in_a_search(place: Path, tmp_path: Path) -> None:
    network, ran = ResNet18(width=2).build(1, 3), list[int]()
    for number, stage in enumerate(network.stages):
        stage.register_forward_hook(lambda module, given, output, n=number: ran.append(n))  # type: ignore[misc]
    register_teacher("counted", network)
    search(guided(place, guide={"teacher": "counted"}), tmp_path / "run")
    assert ran.count(3) == len(TRIED), "all stages where sizes are found, three in steps"
    assert ran.count(0) == ran.count(2) > ran.count(3)


@pytest.mark.parametrize("method", ["darts", "random"])
def test_a_teacher_that_outweighs_the_task_is_warned_about(method: str, place: Path, tmp_path: Path) -> None:
    def said(weight: float) -> tuple[list[str], dict[str, Any]]:
        notes: list[str] = []
        recipe = guided(place, method, guide={"weight": weight})
        out = tmp_path / f"{weight}"
        found = search(recipe, out, on_event=lambda e: notes.append(e.text) if isinstance(e, Note) else None)
        return [note for note in notes if "outweighs" in note], found.metrics[0]

    assert said(1e-3)[0] == []
    (note,), row = said(1e6)
    task, guide = row["gradient_norm_task"], row["gradient_norm_guide"]
    equal = re.search(r"guide\.weight=(\S+) ", note)
    assert equal is not None
    assert float(equal[1]) == pytest.approx(1e6 * task / guide, rel=0.06)
    assert drowned({"gradient_norm_task": 1.0, "gradient_norm_guide": 5.0}, 7.0) is None
    assert drowned({"gradient_norm_task": 0.0, "gradient_norm_guide": 5.0}, 7.0) is None, "equal to nothing at all"
    assert drowned({"gradient_norm_task": 1.0, "gradient_norm_guide": 5.1}, 7.0) is not None


def test_a_teacher_brings_its_plugins(place: Path, tmp_path: Path) -> None:
    """A network of a user's operations can be read wherever it was trained with them."""
    name = f"own_attention_{tmp_path.name}"
    (tmp_path / "own.py").write_text(
        "from softcell.nn.calibrate import ChannelAttention\n"
        "from softcell.nn.candidates import candidate\n\n"
        f"@candidate({name!r}, kind='attention')\n"
        "def own(spec):\n"
        "    return ChannelAttention(spec.channels)\n"
    )
    plugin = str(tmp_path / "own.py")
    code = (
        "import json, sys\n"
        "from softcell.evaluate.teacher import resolve_teacher, train_teacher\n"
        "from softcell.registry import load_plugin\n"
        f"load_plugin({plugin!r})\n"
        f"given = {{'data': {str(place / 'data.npz')!r}, 'classifier': {{'width': 4, 'operation': {name!r}}}, "
        f"'recipe': 'small', 'epochs': 1, 'device': 'cpu', 'threads': 1, 'plugins': [{plugin!r}]}}\n"
        f"train_teacher(resolve_teacher('resnet18', given), {str(tmp_path / 'teacher')!r})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)  # another process: here the plugin is not loaded yet
    assert len(find_teacher(str(tmp_path / "teacher")).module(torch.randn(2, 1, 8, 8))) == 4


def test_teachers_come_from_runs_weights_programs_and_python(place: Path, tmp_path: Path) -> None:
    from_run = find_teacher(str(place / "teacher"))
    file = place / "teacher" / "model.safetensors"
    from_file = find_teacher(str(file))
    assert from_run.about["digest"] == from_file.about["digest"]
    x = torch.randn(2, *json.loads((place / "teacher" / "run.json").read_text())["results"]["data"]["shape"])
    network = load_classifier(file)
    for found in (from_run, from_file):
        for mine, theirs in zip(found.module(x), network.features(x), strict=True):
            torch.testing.assert_close(mine, theirs)

    class Maps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
            return self.network.features(x)

    batch = torch.export.Dim("batch", min=1, max=1024)
    torch.export.save(torch.export.export(Maps(), (x,), dynamic_shapes=({0: batch},)), tmp_path / "maps.pt2")
    with pytest.raises(UntrustedError, match="--trust"):
        find_teacher(str(tmp_path / "maps.pt2"))
    from_program = find_teacher(str(tmp_path / "maps.pt2"), trust=True)
    assert from_program.about["digest"] == hashlib.sha256((tmp_path / "maps.pt2").read_bytes()).hexdigest()
    program = from_program.module
    for n in (1, 3):
        y = torch.randn(n, *x.shape[1:])
        for mine, theirs in zip(program(y), network.features(y), strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(
    ("exported", "message"),
    [(2, "reads 2 and not 3.*with a dynamic batch dimension"), (5, "for images of this size, with a dynamic batch")],
)
def test_a_program_for_one_size_of_batches_is_refused(exported: int, message: str, place: Path, tmp_path: Path) -> None:
    program = torch.export.export(nn.Conv2d(1, 2, 3, padding=1), (torch.randn(exported, 1, 8, 8),))
    torch.export.save(program, tmp_path / "fixed.pt2")
    given = {"teacher": str(tmp_path / "fixed.pt2")}
    with trusting(), pytest.raises(UserError, match=message):
        search(guided(place, guide=given), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_teacher_may_divide_by_the_deviation_of_its_images(place: Path, tmp_path: Path) -> None:
    class Whitened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = ResNet18(width=2).build(1, 3)

        def features(self, x: torch.Tensor) -> list[torch.Tensor]:
            return self.network.features(x / x.std(dim=(1, 2, 3), keepdim=True))

    register_teacher("whitened", Whitened())
    assert search(guided(place, guide={"teacher": "whitened"}), tmp_path / "run").genotype is not None


def test_a_built_in_teacher_that_would_fit_is_named(place: Path, tmp_path: Path) -> None:
    """PyramidNet has three resolutions, a chain four; no built-in teacher has five."""
    register_teacher("pyramid", PyramidNet(depth=11, alpha=3).build(1, 3))
    recipe = guided(place, "darts", "proxyless", guide={"teacher": "pyramid"})
    with pytest.raises(UserError, match=r"none of 1x1.*`softcell teacher resnet18` trains one that fits"):
        search(recipe, tmp_path / "run")
    with pytest.raises(UserError, match=r"or other images$"):
        _pair([(8, 8), (4, 4), (2, 2), (1, 1), (9, 9)], [(8, 8)], (1, 8, 8))


def test_checkpoints_of_users_fill_registered_networks(place: Path, tmp_path: Path) -> None:
    network = load_classifier(place / "teacher" / "model.safetensors")
    register_teacher("narrow", ResNet18(width=4).build(1, 3))
    layouts = {"whole.pt": "state_dict", "whole.pth.tar": "net", "whole.ckpt": "model", "WHOLE.PTH": "network"}
    for name, key in layouts.items():
        torch.save({"epoch": 3, key: network.state_dict()}, tmp_path / name)
        found = find_teacher(str(tmp_path / name), classifier="narrow")
        assert found.about["digest"] == find_teacher(str(place / "teacher")).about["digest"]
    (tmp_path / "whole.bin").touch()
    with pytest.raises(UserError, match=r"is not one by its ending \(.*\.ckpt\).*rename the file"):
        find_teacher(str(tmp_path / "whole.bin"), classifier="narrow")

    def own() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.MaxPool2d(2), nn.Conv2d(2, 3, 1), nn.Flatten())

    register_teacher("own", own(), layers=["0", "2"])
    trained, x = own(), torch.randn(2, 1, 8, 8)
    torch.save(
        {f"module.{k}": v for k, v in trained.state_dict().items()}, tmp_path / "own.pth"
    )  # DataParallel's names
    maps = find_teacher(str(tmp_path / "own.pth"), classifier="own").module(x)
    for mine, theirs in zip(maps, (trained[0](x), trained[:3](x)), strict=True):  # type: ignore[index]
        torch.testing.assert_close(mine, theirs)
    assert not torch.equal(find_teacher("own").module(x)[0], maps[0]), "the registered module keeps its own weights"


@pytest.mark.parametrize(
    ("content", "classifier", "message"),
    [
        (nn.Linear(2, 2), "resnet18", "cannot be read as weights alone"),
        ({"weights": [1, 2]}, "resnet18", "maps names to tensors, or a checkpoint with one under state_dict, "),
        ({"weight": torch.zeros(2)}, None, "does not say which network"),
        ({"weight": torch.zeros(2)}, "resnet18", "not the weights of a built-in 'resnet18'"),
        ({"weight": torch.zeros(2)}, "resnet19", "no built-in classifier 'resnet19'"),
    ],
)
def test_checkpoints_that_cannot_be_used_are_refused(
    content: object, classifier: str | None, message: str, tmp_path: Path
) -> None:
    torch.save(content, tmp_path / "file.pth")
    with pytest.raises(UserError, match=message):
        find_teacher(str(tmp_path / "file.pth"), classifier=classifier)


@pytest.mark.parametrize(
    ("name", "message"),
    [("junk.pt", "cannot be read as weights alone"), ("junk.pt2", "cannot be read as an exported program")],
)
@pytest.mark.parametrize("content", [b"hello", b"x", b""])
def test_files_of_something_else_are_refused(
    content: bytes, name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(content)
    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = logged.append  # type: ignore[method-assign]
    monkeypatch.setattr(logging.getLogger("torch.export"), "handlers", [handler])
    with pytest.raises(UserError, match=message):
        find_teacher(str(tmp_path / name), trust=True)
    assert not logged, "one line of ours, no traceback of torch's beside it"
    assert not logging.getLogger("torch.export").disabled


def test_weights_of_another_network_are_refused(place: Path, tmp_path: Path) -> None:
    file = place / "teacher" / "model.safetensors"
    with pytest.raises(UserError, match="not the weights of 'pyramidnet'"):
        find_teacher(str(file), classifier="pyramidnet")
    with pytest.raises(UserError, match=r"guide\.classifier names the network of a file"):
        find_teacher(str(file.parent), classifier="pyramidnet")
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        find_teacher(str(tmp_path / "broken.safetensors"))


def test_a_teachers_run_is_resumed_with_its_own_recipe(place: Path) -> None:
    recipe = stored_teacher(place / "teacher", {})
    assert recipe.classifier == "resnet18" and recipe.classifier_settings["width"] == 4
    with pytest.raises(UserError, match="keeps its recipe"):
        stored_teacher(place / "teacher", {"epochs": 9})


def test_the_papers_recipe_of_teachers() -> None:
    recipe = resolve_teacher("pyramidnet", {"data": "cifar10"})
    assert (recipe.epochs, recipe.batch_size, recipe.lr, recipe.weight_decay) == (300, 32, 0.025, 1e-4)
    from softcell.evaluate.task import learning_rate

    rates = [learning_rate(recipe, epoch) for epoch in (0, 29, 30, 60)]
    assert rates == pytest.approx([0.025, 0.025, 0.0025, 0.00025])
    assert recipe.classifier_settings == {"depth": 110, "alpha": 84}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"classifier": "resnet18"}, r"guide\.classifier says how a teacher is read, but there is none"),
        ({"trust": True}, r"guide\.trust says how a teacher is read, but there is none"),
        ({"weight": 10.0}, r"guide\.weight says how a teacher guides, but there is none"),
        ({"form": "norm"}, r"guide\.form says how a teacher guides, but there is none"),
        ({"teacher": ""}, r"guide\.teacher must name a teacher, got ''"),
        ({"teacher": " "}, r"guide\.teacher must name a teacher, got ' '"),
    ],
)
def test_settings_of_guidance_need_a_teacher(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve({"guide": given})


def test_defaults_of_guidance_need_none() -> None:
    assert resolve({"guide": {"weight": 1e3, "form": "mean-square", "layers": []}}).guide == Guide()
