"""Every registered space and candidate, exported and compared with the network; found by discovery."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
import types
from math import lcm
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from softcell.app.export import _python as python
from softcell.app.export import graph
from softcell.app.export._tree import Expression
from softcell.app.export.model import Model
from softcell.arch import Genotype, Layout, derive, sample
from softcell.arch.notation import from_darts, from_nb201
from softcell.nn.candidates import Spec, get_candidate, known_candidates
from softcell.spaces import SPACES, Shape, Space, build_space
from softcell.testing import ALIKE, RaggedSpace, tiny_space
from tests.reference.published_genotypes import DARTS_V2

SHAPE: Shape = (3, 9, 7)
WIDTH = lcm(4, *(get_candidate(name).multiple for name in known_candidates()))
"""A width that every candidate is built for."""
CLASSES = ("a", "b", "quote \" ' \\ \n", "d", "e")


def subjects() -> dict[str, Space]:
    # A kernel per image is a product per tap in ONNX, so one block of NOS is enough of them.
    few = {name: build_space(name, {"cells": 3, "channels": 4, "nodes": 1}) for name in ("nos", "s4")}
    return {**{name: tiny_space(name) for name in SPACES}, "ragged": RaggedSpace(), **few}


CASES = [
    # Noise is S4's alone; of the others every part is in a space that is not left to `exhaustive`.
    pytest.param(name, marks=[pytest.mark.exhaustive] if name in ALIKE - {"s4"} else [])
    for name in subjects()
]


ELSEWHERE = {"s4", "ragged", "nb201", "nb1shot1-2"}


SMALLER = {"nodes": 2, "layers": 1, "depths": (1, 1, 1, 1, 1, 1), "dynamics": ("dynamic_conv_3x3",)}


def smaller(space: Space) -> Space:
    """With fewer nodes, layers or taps: graphs are translated node by node, and the kinds of nodes are the same."""
    names = {field.name for field in dataclasses.fields(space)}  # type: ignore[arg-type]
    return dataclasses.replace(space, **{k: v for k, v in SMALLER.items() if k in names and getattr(space, k) > v})  # type: ignore[type-var]


def model_of(network: nn.Module, shape: Shape = SHAPE) -> Model:
    """With running statistics that matter."""
    network.train()
    with torch.no_grad():
        for _ in range(2):
            network(torch.randn(4, *shape))
    return Model(network.eval(), shape, CLASSES, (0.4, 0.5, 0.6), (0.2, 0.3, 0.1), {"data": 'a """ b'})  # type: ignore[arg-type]


def ops(genotype: Genotype) -> set[str]:
    return {pick.op for cell in genotype.cells.values() for pick in cell.picks}


def most_varied(layout: Layout) -> Genotype:
    """Of some random architectures the one with the most different operations."""
    return max((sample(layout, seed) for seed in range(50)), key=lambda genotype: len(ops(genotype)))


def one_for_each_candidate(layout: Layout) -> list[Genotype]:
    """Architectures that together use every candidate which can be picked."""
    found = []
    for name in sorted({op for table in layout.tables for choice in table.choices for op in choice.candidates}):
        scores = {}
        for table in layout.tables:
            scores[table.name] = torch.zeros(table.shape, dtype=torch.float64)
            for row, choice in enumerate(table.choices):
                for column, op in enumerate(choice.candidates):
                    scores[table.name][row, column] = 1.0 if op == name else 0.1
        found.append(derive(layout, scores))
    return found


def written(model: Model, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.network.state_dict(), folder / "model.safetensors")
    (folder / "model.py").write_text(python.to_python(model), encoding="utf-8")
    (folder / "predict.py").write_text(python.to_predict(model), encoding="utf-8")
    return folder / "predict.py"


@pytest.mark.parametrize("name", CASES)
def test_python_file_gives_the_networks_logits_for_every_candidate(name: str, tmp_path: Path) -> None:
    space = subjects()[name]
    torch.manual_seed(0)
    for number, genotype in enumerate([*one_for_each_candidate(space.layout()), most_varied(space.layout())]):
        model = model_of(space.network(genotype, SHAPE, len(CLASSES)))
        assert python.check_python(written(model, tmp_path / str(number)), model) < 1e-6


def test_python_file_has_the_zeros_of_vanished_nodes_and_norms_behind_pools(tmp_path: Path) -> None:
    """A cell of which only node 2 is left, as the authors of SNAS evaluate it."""
    space = build_space("darts", {"cells": 3, "channels": 4, "nodes": 2, "vanished": "zeros", "pool_norm": True})
    edges = "[('max_pool_3x3', 0), ('none', 1), ('none', 0), ('none', 1)]"
    cell = f"normal={edges}, normal_concat=[2, 3], reduce={edges}, reduce_concat=[2, 3]"
    model = model_of(space.network(from_darts(f"Genotype({cell})"), SHAPE, len(CLASSES)))
    assert python.check_python(written(model, tmp_path), model) < 1e-6


ALONE = """
import sys, json, pathlib, runpy
for name in ('softcell', 'safetensors', 'numpy', 'yaml', 'PIL', 'scipy'): sys.modules[name] = None
import torch; torch.set_num_threads(1)
pixels, found = torch.tensor(json.load(open('pixels.json'))), {}
for file in sorted(pathlib.Path().glob('*/predict.py')):
    model = runpy.run_path(str(file))
    with torch.no_grad(): logits = model['load']()(model['normalise'](pixels))
    found[file.parent.name] = [logits.tolist(), list(model['CLASSES'])]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def alone(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, tuple[Tensor, dict[str, Tensor]]], dict[str, Any]]:
    """Files of every space asked for, what their networks give and hold, and what a process with torch alone gets."""
    folder, pixels, expected = tmp_path_factory.mktemp("alone"), torch.rand(3, *SHAPE), {}
    (folder / "pixels.json").write_text(json.dumps(pixels.tolist()))
    wanted = {
        item.callspec.params["name"] for item in request.session.items if "alone" in getattr(item, "fixturenames", ())
    }
    for name, space in subjects().items():
        if name in wanted:
            model = model_of(space.network(most_varied(space.layout()), SHAPE, len(CLASSES)))
            written(model, folder / name)
            with torch.no_grad():
                expected[name] = model.normalised()(pixels), model.network.state_dict()
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", ALONE], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, expected, json.loads(done.stdout)


@pytest.mark.parametrize("name", CASES)
def test_python_file_needs_only_torch_and_loads_exactly_its_weights(name: str, alone: Any) -> None:
    folder, expected, found = alone
    logits, classes = found[name]
    right, state = expected[name]
    torch.testing.assert_close(torch.tensor(logits), right, rtol=1e-5, atol=1e-6)
    assert classes == list(CLASSES)
    loaded = python.import_file(folder / name / "model.py")
    assert loaded.make_network().state_dict().keys() == state.keys()
    state.pop(next(iter(state)))
    with pytest.raises(RuntimeError, match="Missing key"):
        loaded.make_network().load_state_dict(state)


def test_python_file_holds_no_candidate_that_is_not_used(tmp_path: Path) -> None:
    space = tiny_space("nb201")
    genotype = one_for_each_candidate(space.layout())[0]
    text = python.to_python(model_of(space.network(genotype, SHAPE, 5)))
    assert ops(genotype) == {"avg_pool_3x3"}
    assert "nn.AvgPool2d" in text and "nn.MaxPool2d" not in text and "groups=" not in text
    assert "softcell" not in text.replace("`softcell export`", "")


SIX_EDGES = {
    "convolutions": "|nor_conv_3x3~0|+|nor_conv_1x1~0|nor_conv_3x3~1|+|nor_conv_1x1~0|nor_conv_3x3~1|nor_conv_1x1~2|",
    "mixed": "|nor_conv_3x3~0|+|avg_pool_3x3~0|skip_connect~1|+|nor_conv_1x1~0|avg_pool_3x3~1|nor_conv_3x3~2|",
    "plain": "|nor_conv_3x3~0|+|none~0|none~1|+|skip_connect~0|nor_conv_3x3~1|none~2|",
    "pools": "|avg_pool_3x3~0|+|nor_conv_3x3~0|avg_pool_3x3~1|+|nor_conv_1x1~0|nor_conv_1x1~1|avg_pool_3x3~2|",
}


def architectures() -> dict[str, tuple[Space, Genotype]]:
    """NAS-Bench-201 with its 15 cells and the DARTS space with its 8, as they are without further settings."""
    nb201, darts = build_space("nb201", {}), build_space("darts", {})
    cells = {name: (nb201, from_nb201(text)) for name, text in SIX_EDGES.items()}
    random = {f"random-darts-{seed}": (darts, sample(darts.layout(), seed)) for seed in range(5)}
    return {**cells, "darts-v2": (darts, from_darts(DARTS_V2)), **random}


@pytest.mark.parametrize("name", architectures())
def test_model_file_is_the_network_alone_in_less_than_200_lines(name: str, tmp_path: Path) -> None:
    space, genotype = architectures()[name]
    model = model_of(space.network(genotype, SHAPE, len(CLASSES)))
    file = written(model, tmp_path)
    text = (tmp_path / "model.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) < 200
    assert max(map(len, text.splitlines())) <= 120
    for word in ("checkpoint", "Calibration", "Runner", "bottleneck", "dataclass", "drop_path", "is_cuda"):
        assert word not in text, word
    for word in ("Path", "argparse", "safetensors", "MEAN", "CLASSES", "ABOUT", "def load", "__main__"):
        assert word not in text, word
    # One class for all widths, also with a node that has no inputs; reduction cells have their own.
    assert text.count("class Cell") == len(genotype.cells)
    assert python.check_python(file, model) < 1e-6


def test_lists_of_equal_parts_are_written_as_a_loop_with_separate_modules() -> None:
    call = Expression("make_cell(16)")
    parts = [call] * 6 + [Expression(f"make_cell({channels})") for channels in range(100, 112)]
    lines = Expression("nn.ModuleList([", tuple(("", part) for part in parts), "])").lines(60)
    assert lines[1].startswith("    *(make_cell(16) for _ in range(6)), make_cell(100)")
    assert max(map(len, lines)) <= 60
    made = eval("\n".join(lines), {"nn": nn, "make_cell": nn.Flatten})
    assert len({id(module) for module in made}) == 18
    assert [module.start_dim for module in made] == [16] * 6 + list(range(100, 112))


def test_a_tuple_of_one_item_that_needs_several_lines_has_one_comma() -> None:
    item = "x" * 60
    for part in (Expression(repr(item)), Expression("str(", (("", Expression(repr(item))),), ")")):
        assert eval("\n".join(Expression("(", (("", part),), ",)").lines(40))) == (item,)


def test_python_files_can_be_loaded_by_their_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As users load them, without an entry in `sys.modules`; also with copied classes that hold plain values."""
    monkeypatch.setitem(sys.modules, "model", types.ModuleType("model"))  # of the user, with the same name
    for name in ("nb201", "darts", "fullattention", "s4"):
        space = subjects()[name]
        model = model_of(space.network(most_varied(space.layout()), SHAPE, len(CLASSES)))
        loaded = {}
        for file in (written(model, tmp_path / name), tmp_path / name / "model.py"):
            spec = importlib.util.spec_from_file_location(f"somewhere.{file.stem}", file)
            assert spec is not None and spec.loader is not None
            loaded[file.stem] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded[file.stem])
            assert f"somewhere.{file.stem}" not in sys.modules
        network, used = loaded["model"].make_network().eval(), loaded["predict"]
        network.load_state_dict(model.network.state_dict())
        with torch.no_grad():
            x = torch.rand(2, *SHAPE)
            for one in (network, used.load()):
                torch.testing.assert_close(one(used.normalise(x)), model.normalised()(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        # Their modules are in the other spaces and in `test_onnx_holds_candidates_of_every_kind`; `test_export_runs.py`
        # exports a network of NAS-Bench-201.
        pytest.param(name, marks=[pytest.mark.exhaustive] if name in {*ALIKE, *ELSEWHERE} else [])
        for name in subjects()
    ],
)
def test_onnx_of_every_space_runs_at_any_batch(name: str, tmp_path: Path) -> None:
    space = smaller(subjects()[name])
    model = model_of(space.network(most_varied(space.layout()), SHAPE, len(CLASSES)))
    graph.write_onnx(model, tmp_path / "model.onnx")
    assert graph.check_onnx(tmp_path / "model.onnx", model) < 1e-5


class ManyCandidates(nn.Module):
    """Candidates with stride 1 and others with stride 2, on one map."""

    def __init__(self, kept: list[str], halved: list[str]) -> None:
        super().__init__()
        self.kept = nn.ModuleDict({name: get_candidate(name).build(Spec(WIDTH)) for name in kept})
        self.halved = nn.ModuleDict({name: get_candidate(name).build(Spec(WIDTH, 2)) for name in halved})
        self.stem = nn.Conv2d(3, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        outputs = [module(x).mean((2, 3)) for group in (self.kept, self.halved) for module in group.values()]
        return torch.cat(outputs, 1)


def kinds() -> list[list[str]]:
    """Everything that is registered, by the modules it is made of: what differs in a kind is a size."""
    list(SPACES)  # spaces bring their candidates
    found: dict[tuple[type, ...], list[str]] = {}
    for name in known_candidates():
        if not get_candidate(name).zero:
            parts = tuple(type(part) for part in get_candidate(name).build(Spec(WIDTH)).modules())
            found.setdefault(parts, []).append(name)
    return list(found.values())


@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["kinds", "candidates"]
)
def test_onnx_holds_candidates_of_every_kind(every: bool, tmp_path: Path) -> None:
    """One of each kind at stride 2, since networks have most at stride 1; exhaustively all at both."""
    torch.manual_seed(0)
    names = [sorted(name for kind in kinds() for name in kind)] * 2
    network = ManyCandidates(*(names if every else ([], [kind[-1] for kind in kinds()])))
    assert len(network.halved) >= 17
    model = model_of(network, (3, 6, 5))
    graph.write_onnx(model, tmp_path / "model.onnx")
    assert graph.check_onnx(tmp_path / "model.onnx", model) < 1e-5


class KernelPerImage(nn.Module):
    """A kernel that each image makes for itself, as one convolution with a group per image."""

    def __init__(self, inner: int, stride: int, dilation: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.inner, self.stride, self.dilation, self.size = inner, stride, dilation, size
        self.make = nn.Linear(4, 4 * inner * size[0] * size[1])
        self.stem = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        n, c, height, width = x.shape
        kernel = self.make(x.mean((2, 3))).reshape(n * 4, self.inner, *self.size)
        y = nn.functional.conv2d(
            x.reshape(1, n * c, height, width),
            kernel,
            padding=self.dilation,
            stride=self.stride,
            dilation=self.dilation,
            groups=n * c // self.inner,
        )
        return y.reshape(n, 4, *y.shape[-2:]).mean((2, 3))


class SeveralPerImage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(KernelPerImage(*case) for case in ((1, 1, 1, (1, 2)), (2, 2, 2, (2, 3))))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], 1)


def test_onnx_computes_kernels_per_image_at_any_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = model_of(SeveralPerImage())
    graph.write_onnx(model, tmp_path / "model.onnx")
    assert graph.check_onnx(tmp_path / "model.onnx", model) < 1e-5


def test_a_convolution_with_constant_groups_is_left_alone() -> None:
    assert graph.grouped_by_image(torch.rand(1, 4, 3, 3), torch.rand(4, 1, 3, 3), groups=4) is NotImplemented
