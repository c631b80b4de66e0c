"""A checkpoint is restored exactly, or known to be damaged."""

import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from softcell.engine import checkpoint
from softcell.engine.checkpoint import CURRENT, PREVIOUS, load_latest, save
from softcell.errors import UserError

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner) | st.tuples(inner, inner),
    max_leaves=10,
)


def two_states(folder: Path) -> None:
    save(folder, {"number": 1, "w": torch.arange(5.0)})
    save(folder, {"number": 2, "w": torch.arange(6.0)})


def number(folder: Path) -> tuple[int, str | None]:
    loaded = load_latest(folder)
    assert loaded is not None
    return loaded.state["number"], loaded.note


@settings(max_examples=50, deadline=None)
@given(state=st.dictionaries(st.text(), plain))
def test_plain_values_come_back_as_they_were(state: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        save(folder, state)
        loaded = load_latest(folder)
        assert loaded is not None
        assert loaded.note is None
        assert loaded.state == state


def test_tensors_come_back_bit_by_bit(tmp_path: Path) -> None:
    tensors = [
        torch.tensor([float("nan"), -0.0, 1e-310], dtype=torch.float64),
        torch.randn(3, 4).to(torch.bfloat16),
        torch.tensor(True),
        torch.zeros(0, 3, dtype=torch.int8),
    ]
    save(tmp_path, {"tensors": tensors, "net": torch.nn.Linear(2, 2).state_dict()})
    loaded = load_latest(tmp_path)
    assert loaded is not None
    for before, after in zip(tensors, loaded.state["tensors"], strict=True):
        assert before.dtype == after.dtype
        assert before.shape == after.shape
        assert before.reshape(-1).view(torch.uint8).tolist() == after.reshape(-1).view(torch.uint8).tolist()
    assert type(loaded.state["net"]) is dict


def test_a_view_does_not_drag_its_storage_along(tmp_path: Path) -> None:
    save(tmp_path, {"row": torch.zeros(1000, 1000)[0]})
    assert (tmp_path / CURRENT).stat().st_size < 20_000


@pytest.mark.parametrize("value", [numpy.float64(1.0), {1, 2}, Path("x"), torch.device("cpu"), object()])
def test_what_could_not_be_loaded_is_not_saved(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match=r"state\['a'\]\[0\]"):
        save(tmp_path, {"a": [value]})
    assert load_latest(tmp_path) is None


def test_an_empty_folder_has_none(tmp_path: Path) -> None:
    assert load_latest(tmp_path) is None


def test_the_newest_is_loaded_and_the_one_before_is_kept(tmp_path: Path) -> None:
    two_states(tmp_path)
    assert number(tmp_path) == (2, None)
    (tmp_path / CURRENT).unlink()
    found, note = number(tmp_path)
    assert found == 1
    assert note is not None
    assert CURRENT in note
    assert PREVIOUS in note
    assert "missing" in note


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_is_noticed(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        two_states(folder)
        content = bytearray((folder / CURRENT).read_bytes())
        # The first 52 bytes are the header, which a uniform choice would seldom hit.
        last = data.draw(st.sampled_from([51, len(content) - 1]))
        content[data.draw(st.integers(0, last))] ^= 1 << data.draw(st.integers(0, 7))
        (folder / CURRENT).write_bytes(content)
        found, note = number(folder)
        assert found == 1
        assert note is not None
        assert CURRENT in note


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_truncation_is_noticed(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        two_states(folder)
        content = (folder / CURRENT).read_bytes()
        (folder / CURRENT).write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
        assert number(folder)[0] == 1


def test_bytes_added_at_the_end_are_noticed(tmp_path: Path) -> None:
    two_states(tmp_path)
    with open(tmp_path / CURRENT, "ab") as stream:
        stream.write(b"x")
    assert number(tmp_path)[0] == 1


def test_two_damaged_files_are_an_error_that_names_both(tmp_path: Path) -> None:
    two_states(tmp_path)
    (tmp_path / CURRENT).write_bytes(b"")
    (tmp_path / PREVIOUS).write_bytes(b"nonsense" * 20)
    with pytest.raises(UserError, match=rf"{CURRENT} is truncated.*{PREVIOUS} does not begin"):
        load_latest(tmp_path)


def test_a_damaged_current_file_does_not_replace_the_good_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_states(tmp_path)
    (tmp_path / CURRENT).write_bytes(b"spoilt")
    save(tmp_path, {"number": 3})
    (tmp_path / CURRENT).unlink()
    assert number(tmp_path)[0] == 1


def test_a_newer_version_is_refused_and_not_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, {"number": 1})
    monkeypatch.setattr(checkpoint, "VERSION", 2)
    save(tmp_path, {"number": 2})
    monkeypatch.undo()
    with pytest.raises(UserError, match="version 2"):
        load_latest(tmp_path)


def test_a_checkpoint_cannot_run_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_plain", lambda value, where: value)
    save(tmp_path, {"number": 1, "path": Path("x")})
    with pytest.raises(UserError, match="cannot be unpacked"):
        load_latest(tmp_path)


def test_a_full_disk_is_explained_and_harms_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    two_states(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match="No space left"):
        save(tmp_path, {"number": 3})
    monkeypatch.undo()
    assert number(tmp_path) == (2, None)
    assert sorted(file.name for file in tmp_path.iterdir()) == [CURRENT, PREVIOUS]


def test_ordered_dicts_are_saved_as_dicts(tmp_path: Path) -> None:
    save(tmp_path, OrderedDict(b=1, a=2))
    loaded = load_latest(tmp_path)
    assert loaded is not None
    assert list(loaded.state) == ["b", "a"]
