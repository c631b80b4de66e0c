"""Attention transfer by hand-computed values, and a teacher that is frozen, shared and run once per batch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from softcell.errors import UserError
from softcell.nn.classifiers import ResNet18, Tapped
from softcell.nn.objective import (
    CrossEntropy,
    Evaluated,
    Features,
    Guided,
    Objective,
    attention_vector,
    pair_stages,
    transfer_loss,
)


def data(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Toy(nn.Module):
    """Two stages, the second half as large."""

    def __init__(self, seed: int, width: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one, self.two = nn.Conv2d(2, width, 3, padding=1), nn.Conv2d(width, width, 3, 2, 1)
        self.norm, self.last = nn.BatchNorm2d(width), nn.Linear(width, 4)
        self.double()
        self.passes = 0

    def features(self, x: Tensor) -> list[Tensor]:
        self.passes += 1
        first = self.norm(self.one(x))
        return [first, self.two(torch.relu(first))]

    def head(self, features: Tensor) -> Tensor:
        return self.last(features.mean((2, 3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x)[-1])


def equation_6(students: list[Tensor], teachers: list[Tensor], literal: bool) -> float:
    """Position by position in Python numbers."""
    total = 0.0
    for mine, theirs in zip(students, teachers, strict=True):
        n, _, height, width = mine.shape
        over_batch = []
        for sample in range(n):
            rows = []
            for maps in (mine, theirs):
                x = [
                    sum(float(v) ** 2 for v in maps[sample, :, i, j].detach())
                    for i in range(height)
                    for j in range(width)
                ]
                length = math.sqrt(sum(v * v for v in x))
                rows.append([v / length for v in x])
            squares = sum((a - b) ** 2 for a, b in zip(*rows, strict=True))
            over_batch.append(math.sqrt(squares) if literal else squares / (height * width))
        total += sum(over_batch) / n
    return total / 2


@pytest.mark.parametrize("form", ["mean-square", "norm"])
def test_the_loss_is_equation_6(form: str) -> None:
    students = [data(3, 4, 5, 4), data(3, 2, 3, 2, seed=1)]
    teachers = [data(3, 7, 5, 4, seed=2), data(3, 1, 3, 2, seed=3)]
    vectors = [[attention_vector(m) for m in maps] for maps in (students, teachers)]
    found = transfer_loss(*vectors, form)  # type: ignore[arg-type]
    assert float(found) == pytest.approx(equation_6(students, teachers, form == "norm"))


def test_equal_attention_costs_nothing_for_any_number_of_channels() -> None:
    x = data(2, 3, 4, 4)
    twice = torch.cat([x, x, x], dim=1) * 5.0
    assert float(transfer_loss([attention_vector(x)], [attention_vector(twice)], "mean-square")) < 1e-30


def test_the_objective_adds_the_weighted_loss_and_keeps_the_logits() -> None:
    student, teacher = Toy(0), Tapped(Toy(1))
    x, labels = data(4, 2, 6, 6), torch.tensor([0, 1, 2, 3])
    guided = Guided(CrossEntropy(), teacher, (0, 1), weight=7.0)
    result = guided(student, x, labels)
    maps = student.features(x)
    task = F.cross_entropy(student.head(maps[-1]), labels)
    expected = task + 7.0 * equation_6(maps, teacher(x), literal=False)
    torch.testing.assert_close(result.loss, expected)
    assert result.logits is not None and result.logits.shape == (4, 4)
    total, number = guided.gauges()["guide_loss"].tolist()
    assert number == 1 and total == pytest.approx(equation_6(maps, teacher(x), literal=False))


def test_student_and_teacher_run_once_per_batch() -> None:
    student, inner = Toy(0), Toy(1)
    guided = Guided(CrossEntropy(), Tapped(inner), (0, 1), weight=1.0)
    first, second, labels = data(2, 2, 4, 4), data(2, 2, 4, 4, seed=1), torch.tensor([0, 1])
    guided(student, first, labels)
    assert (student.passes, inner.passes) == (1, 1)
    guided(student, second, labels)
    guided(student, first, labels)  # second order comes back to a batch within one step
    assert inner.passes == 2
    with torch.no_grad():
        first.add_(1.0)  # the same tensor with other values is another batch
    guided(student, first, labels)
    assert inner.passes == 3


def test_the_teacher_is_frozen_in_eval_mode_and_no_part_of_the_objective() -> None:
    inner = Toy(1)
    teacher = Tapped(inner)
    guided = Guided(CrossEntropy(), teacher, (0, 1), weight=1.0)
    before = {name: tensor.clone() for name, tensor in inner.state_dict().items()}
    guided.train()
    teacher.train()
    result = guided(Toy(0), data(3, 2, 4, 4), torch.tensor([0, 1, 2]))
    result.loss.backward()
    assert not inner.training and all(p.grad is None and not p.requires_grad for p in inner.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in inner.state_dict().items())
    assert not list(guided.parameters()) and not guided.state_dict()


class Masked(Objective):
    """Looks at other images than it is given, as a reconstruction does."""

    def forward(self, network: Features, images: Tensor, labels: Tensor) -> Evaluated:
        return Evaluated(network.features(images * 0.0)[-1].square().mean(), None)


def test_any_objective_can_be_guided_on_the_images_themselves() -> None:
    student, teacher = Toy(0), Tapped(Toy(1))
    student.eval()
    x = data(2, 2, 4, 4)
    guided = Guided(Masked(), teacher, (0, 1), weight=1.0)
    _, guide = guided.parts(student, x, torch.zeros(2))
    assert float(guide.detach()) == pytest.approx(equation_6(student.features(x), teacher(x), literal=False))


def test_stages_are_paired_by_resolution() -> None:
    assert pair_stages([(32, 32), (16, 16), (8, 8)], [(32, 32), (16, 16), (8, 8), (4, 4)]) == (0, 1, 2)
    assert pair_stages([(16, 16), (8, 8)], [(32, 32), (16, 16), (16, 16), (8, 8)]) == (2, 3)
    with pytest.raises(UserError, match=r"none of 8x8: stages of the searched network are 16x16, 8x8"):
        pair_stages([(16, 16), (8, 8)], [(16, 16), (7, 7)])


def test_of_a_built_in_teacher_only_the_stages_that_are_compared_run() -> None:
    network = ResNet18(width=2).build(2, 4).double()
    ran: list[int] = []
    for number, stage in enumerate(network.stages):
        stage.register_forward_hook(lambda module, given, output, n=number: ran.append(n))  # type: ignore[misc]
    teacher, x = Tapped(network), data(2, 2, 8, 8)
    for mine, whole in zip(teacher(x, 3), teacher(x)[:3], strict=True):
        torch.testing.assert_close(mine, whole)
    assert ran == [0, 1, 2, 0, 1, 2, 3]


def test_any_module_is_a_teacher_by_its_layers() -> None:
    module = nn.Sequential(nn.Conv2d(2, 3, 1), nn.MaxPool2d(2), nn.Conv2d(3, 5, 1), nn.Flatten()).double()
    x = data(2, 2, 4, 4)
    maps = Tapped(module, ("0", "2"))(x)
    torch.testing.assert_close(maps[0], module[0](x))
    assert [tuple(m.shape) for m in maps] == [(2, 3, 4, 4), (2, 5, 2, 2)]
    assert len(Tapped(module, ("0", "2"))(x, 1)) == 1
    assert not any(part._forward_hooks for part in module.modules()), "a user's module is left as it was"
    with pytest.raises(UserError, match="must return feature maps"):
        Tapped(module, ("3",))(x)
    with pytest.raises(UserError, match="no layer 'conv9'"):
        Tapped(module, ("conv9",))
    with pytest.raises(UserError, match="must return feature maps"):
        Tapped(module)(x)
