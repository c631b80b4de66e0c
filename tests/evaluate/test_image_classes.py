from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from softcell.data import Files
from softcell.errors import UserError
from softcell.evaluate import classify
from softcell.spaces import Inputs


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("scaled_to", [None, (12, 14)])
def test_a_network_sees_files_as_a_dataset_of_files_shows_them(
    tmp_path: Path, whole: bool, scaled_to: tuple[int, int] | None
) -> None:
    rng = np.random.default_rng(0)
    names = [f"{number}.png" for number in range(5)]
    for name in names:
        Image.fromarray(rng.integers(0, 256, (30, 21, 3), dtype=np.uint8)).save(tmp_path / name)
    data = Files(
        tmp_path, names, torch.zeros(5).long(), channels=3, size=(8, 10), stored=scaled_to or (8, 10), whole=whole
    )
    seen: list[Tensor] = []

    def forward(pixels: Tensor) -> Tensor:
        seen.append(pixels)
        return torch.eye(5)[: len(pixels)]

    inputs = Inputs(tuple("abcde"), (0.5,) * 3, (0.5,) * 3, scaled_to, whole)
    files = [tmp_path / names[0], tmp_path / "lost.png", *(tmp_path / name for name in names[1:])]
    found = list(classify(forward, files, (3, 8, 10), inputs, top=9, batch_size=4))
    assert [len(pixels) for pixels in seen] == [3, 2]  # the lost file leaves its place empty
    assert torch.equal(torch.cat(seen), data.fetch(torch.arange(5)).float() / 255)
    assert [one.classes[:1] for one in found] == [("a",), (), ("b",), ("c",), ("a",), ("b",)]
    assert found[0].probabilities == pytest.approx(torch.eye(5)[0].softmax(0).tolist())


def test_images_that_no_file_can_have_and_wrong_outputs_are_refused(tmp_path: Path) -> None:
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    inputs = Inputs(("a", "b"), (0.5,), (0.5,))
    for shape, top, outputs, reason in (
        ((4, 8, 8), 1, 2, "image files have 1 or 3 channels"),
        ((1, 8, 8), 0, 2, "`top >= 1` must hold"),
        ((1, 8, 8), 1, 3, "one output per class"),
    ):
        with pytest.raises(UserError, match=reason):
            list(classify(lambda x, n=outputs: torch.zeros(1, n), [tmp_path / "a.png"], shape, inputs, top=top))
