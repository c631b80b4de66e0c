"""Traced code compared with the modules it was traced from."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.app.export._trace import Untraceable, trace
from softcell.app.export._tree import Expression, Functions


class Arithmetic(nn.Module):
    """Operators whose parentheses matter, indices, attributes and methods."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0, 5.0]).view(3, 1, 1))
        self.parts = nn.ModuleDict({"0_1": nn.Conv2d(3, 3, 1), "a b": nn.Sequential(nn.ReLU(), nn.Tanh())})

    def forward(self, x: Tensor, others: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        a, b = others
        y = x - (a - b) * self.scale / (a * (b + 2)).abs().clamp(min=0.5)
        n, c, height, width = y.shape
        z = -(y + 1) @ a.transpose(-1, -2)
        pooled = F.avg_pool2d(self.parts["0_1"](y)[:, :, 1:, ::2], 2)
        nested = a - (b - x) / (y / (2 + x.abs()))
        return self.parts["a b"](y).reshape(n, c * height, width), [
            z,
            torch.cat([pooled, pooled], dim=1),
            y[..., 0] - (nested[..., 0] - x[..., 1]),
        ]


def run(module: nn.Module, lines: tuple[str, ...], *arguments: Any) -> Any:
    space: dict[str, Any] = {"torch": torch, "F": F}
    exec("\n".join(lines), space)
    return space["forward"](module, *arguments)


def test_traced_code_computes_what_the_module_computes() -> None:
    torch.manual_seed(0)
    module = Arithmetic().eval()
    found = trace(module, (None, [None, None]))
    assert found.lines[0] == "def forward(self, x, others):"
    assert {path for path, _ in found.calls} == {"parts.0_1", "parts.a b"} and found.tensors == {"scale"}
    assert found.result == (None, [None, None, None])
    for batch in (1, 3):
        x, a, b = torch.randn(3, batch, 3, 4, 4)
        expected, got = module(x, [a, b]), run(module, found.lines, x, [a, b])
        torch.testing.assert_close(got[0], expected[0])
        for one, other in zip(got[1], expected[1], strict=True):
            torch.testing.assert_close(one, other)


class BySize(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.shape[-1] % 2 else x + 1


class ByValue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


class OwnTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [torch.ones(3)]  # in a list: not registered

    def forward(self, x: Tensor) -> Tensor:
        return x + self.hidden[0]


@pytest.mark.parametrize("module", [BySize(), ByValue(), OwnTensor()], ids=["size", "value", "tensor"])
def test_code_that_depends_on_more_than_settings_is_not_traced(module: nn.Module) -> None:
    with pytest.raises(Untraceable):
        trace(module.eval(), (None,))


def test_parts_that_differ_in_numbers_become_one_function() -> None:
    def block(width: int, out: int, kernel: int) -> Expression:
        numbers = tuple(("", Expression(str(v), hint=h)) for v, h in ((width, "in_channels"), (out, "out_channels")))
        conv = Expression("Convolution(", (*numbers, ("kernel=", Expression(str(kernel)))), ")")
        norm = Expression("Normalisation(", (("", Expression(str(out), hint="num_features")),), ")")
        return Expression("BlockOfTheNetwork(", (("", conv), ("", norm)), ")", "block")

    parts = tuple(("", block(*sizes)) for sizes in ((16, 32, 3), (32, 64, 3), (64, 64, 3)))
    root = Expression("[", (*parts, ("", Expression("3"))), "]")
    made, rest = Functions(root).write()
    ((name, arguments, body),) = made
    assert (name, arguments) == ("make_block", ["channels", "outputs"])
    assert rest.line() == "[make_block(16, 32), make_block(32, 64), make_block(64, 64), 3]"
    text = re.sub(r"\bchannels\b", "16", re.sub(r"\boutputs\b", "32", body.line()))
    assert text == block(16, 32, 3).line()  # the kernel is the same everywhere and stays a number
