"""Trust in files that run code: the store, the prompt, and loading plugins."""

from __future__ import annotations

import json
import os
import py_compile
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from softcell import trust
from softcell.errors import UserError
from softcell.registry import load_plugin, load_plugins, refused
from softcell.trust import UntrustedError, allow, asking, is_trusted, store, trusting


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SOFTCELL_STATE", str(tmp_path / "state"))
    monkeypatch.delenv("SOFTCELL_TRUSTED", raising=False)
    monkeypatch.setattr(trust, "_agreed", set())
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("softcell_plugin_"):
            del sys.modules[name]


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A Python file that leaves a mark where it is run."""
    file = tmp_path / "marking.py"
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('x')\n")
    return file


def ran(plugin: Path) -> bool:
    return (plugin.parent / "ran").exists()


def forget_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process: only the store remembers."""
    monkeypatch.setattr(trust, "_agreed", set())
    sys.modules.pop("softcell_plugin_marking", None)


def test_a_file_that_a_recipe_names_does_not_run_and_the_message_says_which(plugin: Path) -> None:
    with pytest.raises(UntrustedError) as caught:
        load_plugins([plugin], "the run in foreign")
    assert not ran(plugin)
    text = str(caught.value)
    assert str(plugin) in text and "the run in foreign" in text and "--trust" in text and "--plugin" in text


def test_a_file_that_the_user_names_runs_and_is_trusted_from_then_on(
    plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_plugin(plugin)
    forget_process(monkeypatch)
    (plugin.parent / "ran").unlink()
    load_plugins([plugin])
    assert ran(plugin)


def test_changed_content_and_another_path_are_not_trusted(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_plugin(plugin)
    forget_process(monkeypatch)
    copy = plugin.with_name("elsewhere.py")
    copy.write_bytes(plugin.read_bytes())
    with pytest.raises(UntrustedError, match="not trusted here before"):
        load_plugins([copy])
    plugin.write_text(plugin.read_text() + "# edited\n")
    with pytest.raises(UntrustedError, match="has changed since"):
        load_plugins([plugin])


def test_an_agreement_holds_for_its_context_and_is_remembered(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    with asking(notify=said.append):
        allow()
        load_plugins([plugin])
    assert ran(plugin) and str(plugin) in said[0] and str(store()) in said[0]
    other = plugin.with_name("other.py")
    other.write_text("")
    with pytest.raises(UntrustedError):
        load_plugins([other])
    forget_process(monkeypatch)
    load_plugins([plugin])  # asked once


@pytest.mark.parametrize("answer", [True, False])
def test_a_user_decides_once_per_file(answer: bool, plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def ask(text: str) -> bool:
        asked.append(text)
        return answer

    with asking(ask):
        if answer:
            load_plugins([plugin])
            forget_process(monkeypatch)
            load_plugins([plugin])
        else:
            with pytest.raises(UntrustedError):
                load_plugins([plugin])
    assert ran(plugin) is answer and len(asked) == 1 and str(plugin) in asked[0]


def test_in_python_a_context_agrees_and_false_changes_nothing(plugin: Path) -> None:
    with trusting(False), pytest.raises(UntrustedError):
        load_plugins([plugin])
    with trusting():
        load_plugins([plugin])
    assert ran(plugin)


def test_to_agree_to_programs_is_not_to_agree_to_plugins(plugin: Path) -> None:
    with asking():
        allow("program")
        with pytest.raises(UntrustedError):
            load_plugins([plugin])


def test_a_copy_replaces_a_missing_file(plugin: Path) -> None:
    gone = Path("/another/machine/marking.py")
    with pytest.raises(UserError, match=r"no such file here; name your copy with --plugin marking.py"):
        load_plugins([gone], "the run in foreign")
    assert refused([gone, plugin]) == [str(gone), str(plugin)]
    load_plugin(plugin)
    load_plugins([gone])
    assert refused([gone, plugin]) == []


def test_a_plugin_is_compiled_as_a_separate_module(plugin: Path) -> None:
    """And not with the `from __future__` imports of the file that compiles it."""
    plugin.write_text("def f(x: int): ...\n")
    load_plugin(plugin)
    assert sys.modules["softcell_plugin_marking"].f.__annotations__ == {"x": int}


@pytest.mark.parametrize("text", ["raise SystemExit(3)", "import sys; sys.exit()"])
def test_a_plugin_that_exits_is_an_error(text: str, plugin: Path) -> None:
    plugin.write_text(text)
    with pytest.raises(UserError, match="failed: SystemExit"):
        load_plugin(plugin)


def test_only_its_owner_may_write_the_store(plugin: Path) -> None:
    before = os.umask(0)
    try:
        load_plugin(plugin)
    finally:
        os.umask(before)
    assert store().stat().st_mode & 0o777 == 0o600


def test_jobs_trust_what_their_sweep_was_allowed(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTCELL_TRUSTED", trust.digests([plugin]))
    load_plugins([plugin])
    assert ran(plugin) and not store().exists()


def test_a_compiled_file_next_to_the_source_is_not_run(plugin: Path) -> None:
    evil = plugin.parent / "evil.py"
    evil.write_text(f"open({str(plugin.parent / 'evil-ran')!r}, 'w')\n")
    cached = plugin.parent / "__pycache__" / f"marking.{sys.implementation.cache_tag}.pyc"
    py_compile.compile(
        str(evil), cfile=str(cached), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH, doraise=True
    )
    load_plugin(plugin)
    assert ran(plugin) and not (plugin.parent / "evil-ran").exists()


def test_what_is_run_is_what_was_looked_at(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = f"open({str(plugin.parent / 'evil-ran')!r}, 'w')\n"
    real = trust.trusted

    def swapped(*given: object) -> object:
        content = real(*given)  # type: ignore[arg-type]
        plugin.write_text(evil)
        return content

    trust.trust(plugin)
    monkeypatch.setattr("softcell.registry.trusted", swapped)
    load_plugins([plugin])
    assert ran(plugin) and not (plugin.parent / "evil-ran").exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"format": "softcell-trust", "files": {"/a": "b"}}', "[" * 100_000])
def test_a_damaged_store_trusts_nothing_and_is_replaced(
    content: str, plugin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store().parent.mkdir(parents=True)
    store().write_text(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert not is_trusted(plugin)
        load_plugin(plugin)
    forget_process(monkeypatch)
    assert is_trusted(plugin) and json.loads(store().read_text())["format"] == "softcell-trust"


def test_a_store_that_cannot_be_written_is_said_and_stops_nothing(plugin: Path, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where a folder should be")
    with pytest.warns(UserWarning, match="trusted for this process only"):
        load_plugin(plugin)
    assert ran(plugin)


def test_the_store_follows_xdg_and_is_never_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SOFTCELL_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg"))
    assert store() == tmp_path / "xdg" / "softcell" / "trust.json"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert store() == Path.home() / ".local" / "state" / "softcell" / "trust.json"
    monkeypatch.setenv("SOFTCELL_STATE", "relative")
    with pytest.raises(UserError, match="absolute"):
        store()


def test_processes_that_agree_at_once_lose_nothing(tmp_path: Path) -> None:
    files = [tmp_path / f"plugin{k}.py" for k in range(6)]
    for k, file in enumerate(files):
        file.write_text(f"x = {k}\n")
    source = str(Path(trust.__file__).parents[1])
    code = "import sys; from softcell.trust import trust; [trust(p) for p in sys.argv[1:]]"
    started = [
        subprocess.Popen([sys.executable, "-c", code, *map(str, files[k::3])], env={**os.environ, "PYTHONPATH": source})
        for k in range(3)
    ]
    assert [process.wait() for process in started] == [0, 0, 0]
    assert all(is_trusted(file) for file in files)
    assert sorted(path.name for path in store().parent.iterdir()) == [".trust.lock", "trust.json"]
