"""Every method in every space on a CUDA device: steps are recorded and never wait, or a plain reason is given once."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "search"))

from search_toys import settings
from test_gpu_steps import search_task, session, step_without_waiting

from softcell.engine.capture import CapturedStep
from softcell.methods import METHODS
from softcell.spaces import SPACES
from softcell.testing import tiny_space

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
]
SEARCHING = [name for name in METHODS if name != "random"]  # which trains networks one by one
DRAWN = "hardly one comes twice"


@pytest.mark.parametrize("space", list(SPACES))
@pytest.mark.parametrize("method", SEARCHING)
def test_a_step_of_every_pair_is_recorded_and_never_waits(method: str, space: str) -> None:
    tiny: Any = tiny_space(space)
    sizes = {field.name: getattr(tiny, field.name) for field in dataclasses.fields(tiny) if field.init}
    given: dict[str, Any] = {**settings("nb201", "digits", device="cuda", threads=0), "space": space, "method": method}
    given |= {"space_settings": sizes, "engine": "graph", "split": {"weights": 240, "validation": 240}}
    given["architecture"] = {"lr": 1e-6}  # a derivation that rests, for methods that record one step per derivation
    told: list[Any] = []
    with session() as opened:
        task = search_task(given, opened, told)
        step_without_waiting(task)
        reasons = [str(event) for event in told if "record" in str(event)]
        if method == "spos" or reasons:
            assert len(reasons) == 1 and DRAWN in reasons[0]
        else:
            assert isinstance(task._run, CapturedStep) and task._run._graphs, "recorded, with nothing said"
