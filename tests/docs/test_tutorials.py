"""Tutorials are followed from top to bottom in an empty folder: files written, Python executed, commands run.

Only long work is shortened: see `SHORTER` and the caps on epochs. The site is built as CI builds it.
"""

from __future__ import annotations

import ast
import glob
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from softcell.app.cli.main import run as softcell
from softcell.app.pipeline import _choose as choose
from softcell.app.pipeline import _competition as competition
from softcell.app.pipeline import _run as pipeline
from tests.helpers.doc_pages import FENCE, ROOT

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
SHORTER = {
    "range(600)": "range(60)",
    "methods: [darts, snas]": "methods: [snas]",
    "seeds: 5": "seeds: 1",
    "epochs: 10": "epochs: 1, batch_size: 256, space: {channels: 2}",
    "--image-size 24": "--image-size 8 --set space.channels=2",
    "--epochs 10 --random 3": "--epochs 1 --random 1",
    "--epochs 10": "--epochs 1",
    "--max-params 100k": "--max-params 11k --random 2 --image-size 8 --threads 1",
}


def shortened(text: str) -> str:
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    return text


@pytest.mark.usefixtures("few_digits")
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_can_be_followed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"MAX_SEARCH_EPOCHS": 1, "MIN_SEARCH_EPOCHS": 1}.items():
        monkeypatch.setattr(pipeline, name, value)
    monkeypatch.setattr(choose, "MEASURING_BOUNDS", (0.01, 0.01))
    monkeypatch.setattr(choose, "MIN_EPOCHS", 0)
    for each in (pipeline, competition):
        monkeypatch.setattr(each, "MAX_TRAIN_EPOCHS", 1)
        monkeypatch.setattr(each, "MIN_EPOCHS", 0)
    before = torch.get_num_threads()
    names: dict[str, Any] = {"__name__": "tutorial"}
    try:
        torch.set_num_threads(1)
        for number, (kind, text) in enumerate(FENCE.findall(page.read_text(encoding="utf-8"))):
            where = f"{page.name}, block {number + 1}"
            follow(kind, shortened(text), where, names)
    finally:
        torch.set_num_threads(before)


def follow(kind: str, text: str, where: str, names: dict[str, Any]) -> None:
    match kind:
        case "python":
            exec(compile(text, where, "exec"), names)
        case "yaml":
            file = re.match(r"# (\S+)\n", text)
            assert file is not None, f"{where}: the first line must be the file's name"
            Path(file[1]).write_text(text, encoding="utf-8")
        case "console":
            for line in text.replace("\\\n", " ").splitlines():
                assert line.startswith("$ "), f"{where}: {line!r} is not a command"
                command(shlex.split(line[2:], comments=True), where)
        case _:
            raise AssertionError(f"{where}: blocks of kind {kind!r} are not executed; use python, yaml or console")


def command(words: list[str], where: str) -> None:
    words = [name for word in words for name in (sorted(glob.glob(word)) or [word])]
    if words[0] == "softcell":
        assert softcell([*words[1:]]) == 0, f"{where}: {shlex.join(words)}"
    else:
        assert words[0] == "python", f"{where}: only softcell and python are run, not {words[0]!r}"
        done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True)
        assert done.returncode == 0, f"{where}: {done.stderr}"
        assert "%" in done.stdout


@pytest.mark.exhaustive
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    mkdocs = Path(sys.executable).with_name("mkdocs")
    if not mkdocs.exists():
        assert shutil.which("mkdocs") is None
        pytest.skip("mkdocs-material is not installed; it is part of the extra dev")
    done = subprocess.run(
        [mkdocs, "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"NO_MKDOCS_2_WARNING": "1", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    built = {page.relative_to(tmp_path / "site").with_suffix(".md") for page in (tmp_path / "site").rglob("*.html")}
    pages = {page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")}
    assert pages <= built
    home = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    # Nothing is fetched from elsewhere when a page is opened.
    assert not re.findall(r'(?:src|href)="https?://[^"]+\.(?:js|css|woff2?)"', home)
    for paper in (ROOT / "docs" / "papers").glob("*.md"):
        assert f"papers/{paper.stem}.html" in home


NOTEBOOK = ROOT / "docs" / "tutorials" / "notebook.ipynb"


def test_the_notebook_runs_and_shows_what_its_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, without a kernel. `scripts/run_notebook.py` runs it in a real one and stores the outputs."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    kinds = []
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        shown = evaluated("".join(cell["source"]).replace("seeds=3", "seeds=2"), names)
        stored = [output["data"] for output in cell["outputs"] if output["output_type"] == "execute_result"]
        kind = "text/html" if getattr(shown, "_repr_html_", lambda: None)() is not None else "text/plain"
        assert [kind] == [one for data in stored for one in data], cell["source"]
        kinds.append(kind)
    assert kinds.count("text/html") == 4
    means = {group.name: group.summary.mean for group in names["compare"](["runs/found", "runs/random"]).groups}
    assert min(means.values()) > 0.75, "the images of the notebook must be easy to classify"


def evaluated(source: str, names: dict[str, Any]) -> Any:
    """Runs a cell and returns the value of its last line, which a notebook shows."""
    tree = ast.parse(source)
    last = tree.body.pop()
    assert isinstance(last, ast.Expr)
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)
