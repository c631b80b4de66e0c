"""Every method in every space on a CUDA device: steps never wait and are recorded; exceptions are listed here."""

import dataclasses
from typing import Any

import pytest
import torch
from test_gpu_steps import search_task, session, step_without_waiting

from softcell.engine.capture import CapturedStep
from softcell.methods import METHODS
from softcell.methods.base import Sampler
from softcell.search import resolve
from softcell.spaces import SPACES
from softcell.testing import tiny_space
from tests.helpers.search_toys import settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch finds none"),
]
SEARCHING = [name for name in METHODS if not issubclass(METHODS.get(name), Sampler)]  # a sampler has no supernet
SINGLE = {"method_settings": {"paths": "single"}}
"""IT-NAS on one drawn path per step."""
CASES = [
    *((method, space, {}) for method in SEARCHING for space in SPACES),
    *(("itnas", space, SINGLE) for space in SPACES if not any(t.contests for t in tiny_space(space).layout().tables)),
]
DRAWN = "rarely repeat"


def draws_paths(method: str, settings: dict[str, Any]) -> bool:
    """Those that draw one of many paths per step: nothing else may go unrecorded."""
    return method == "spos" or (method == "itnas" and settings == SINGLE)


@pytest.mark.parametrize(
    ("method", "space", "own"), CASES, ids=[f"{m}{'-single' if own else ''}-{s}" for m, s, own in CASES]
)
def test_a_step_of_every_pair_is_recorded_and_never_waits(method: str, space: str, own: dict[str, Any]) -> None:
    tiny: Any = tiny_space(space)
    sizes = {field.name: getattr(tiny, field.name) for field in dataclasses.fields(tiny) if field.init}
    given: dict[str, Any] = {**settings("nb201", "digits", device="cuda", threads=0), "space": space, "method": method}
    given |= {"space_settings": sizes, "engine": "graph", "split": {"weights": 240, "validation": 240}}
    given |= own
    given["architecture"] = {"lr": 1e-6}  # a derivation that rests, for methods that record one step per derivation
    notes: list[Any] = []
    with session() as opened:
        task = search_task(resolve(given), opened, notes)
        step_without_waiting(task)
        reasons = [str(event) for event in notes if "record" in str(event) or "CUDA graph" in str(event)]
        if draws_paths(method, own):
            assert len(reasons) == 1 and DRAWN in reasons[0]
        else:
            assert reasons == [], "nothing else may go unrecorded"
            assert isinstance(task._run, CapturedStep) and task._run._graphs
        assert all(bool(value.isfinite().all()) for value in task.supernet.state_dict().values())
        assert task.failed() is None
