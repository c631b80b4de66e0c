"""The documentation works: Python blocks run, commands and their options exist, links lead to files."""

from __future__ import annotations

import glob
import importlib
import re
import shlex
from pathlib import Path

import pytest

from softcell.app.cli.main import run as softcell
from softcell.arch import Genotype, notation, sample
from softcell.engine import RunFolder
from softcell.spaces import build_space
from tests.helpers.doc_pages import FENCE, ROOT
from tests.helpers.report_runs import make_search, make_training
from tests.reference.published_genotypes import DARTS_V2

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def blocks(language: str) -> list[tuple[str, str]]:
    return [
        (f"{page.relative_to(ROOT)}:{number}", text)
        for page in PAGES
        for number, (kind, text) in enumerate(FENCE.findall(page.read_text(encoding="utf-8")))
        if kind == language
    ]


@pytest.mark.usefixtures("few_digits")
@pytest.mark.parametrize(
    ("where", "code"),
    [block for block in blocks("python") if not block[0].startswith("docs/tutorials/")],  # those run as whole pages
    ids=lambda value: value if ".md" in value else "",
)
def test_python_block_runs(where: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, where, "exec"), {"__name__": "documentation"})


@pytest.mark.usefixtures("few_digits")
def test_the_teacher_of_the_documentation_guides_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = [code for where, code in blocks("python") if "nos.md" in where and "register_teacher" in code]
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(code)
    sizes = ("--epochs", "1", "--set", "space.channels=2", "--set", "space.nodes=1", "--set", "batch_size=256")
    assert softcell(["search", "nos", "--plugin", "mine.py", "--guide", "mine", *sizes, "--out", "run", "--quiet"]) == 0


def command_lines() -> list[tuple[str, str]]:
    lines = []
    for where, text in blocks("console"):
        joined = text.replace("\\\n", " ")
        lines += [(where, line[2:].split("#")[0].strip()) for line in joined.splitlines() if line.startswith("$ ")]
    return [(where, line) for where, line in lines if "softcell" in line]


@pytest.mark.parametrize(("where", "line"), command_lines())
def test_command_line_names_existing_options(where: str, line: str) -> None:
    """Every command in the documentation exists and has the options shown."""
    from softcell.app.cli.main import COMMANDS, load_command

    words = shlex.split(line)
    arguments = words[words.index("softcell") + 1 :]
    if not arguments:
        return
    assert arguments[0] in COMMANDS, f"{where}: no command {arguments[0]!r}"
    # The parser itself: options, their values and what must be given.
    load_command(arguments[0]).make_context(arguments[0], [*arguments[1:]], resilient_parsing="--help" in arguments)


QUICK = ("show", "info", "convert", "list", "compare", "report")
"""Quick commands: their lines are run on every page. Long ones are run in the tutorials."""


def save_in(run: Path, genotype: Genotype) -> None:
    """Puts an architecture into a finished run, as if the run had written it."""
    genotype.save(run / "genotype.json")
    RunFolder.open(run).finish("finished")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs that the documentation mentions."""
    root = tmp_path_factory.mktemp("documentation")
    genotype = notation.parse(DARTS_V2)
    genotype.save(root / "genotype.json")
    save_in(make_search(root / "runs" / "darts-darts-digits-1"), genotype)
    for name in ("train", "comparison/", "my-sweep/", "sweep/"):
        for seed in range(2):
            for method in ("darts", "snas"):
                make_training(
                    root / "runs" / f"{name}-{method}-{seed}", method=method, seed=seed, accuracy=0.8 + seed / 9
                )
    return root


@pytest.mark.parametrize(
    ("where", "line"),
    [
        (where, line)
        for where, line in command_lines()
        if line.split()[:1] == ["softcell"] and line.split()[1] in QUICK and not where.startswith("docs/tutorials/")
    ],
)
def test_quick_command_line_runs(where: str, line: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    words = [name for word in shlex.split(line)[1:] for name in (sorted(glob.glob(word)) or [word])]
    for made in ("results.md", "sweep.html", "comparison.html", "all.html"):
        (place / made).unlink(missing_ok=True)
    assert softcell(words) == 0, f"{where}: {line}"


class Reached(BaseException):
    """A command has reached its long work."""


# Commands import these when they run; imported first under a patch, they would keep what it put there.
importlib.import_module("softcell.app.cli.run")
LONG = tuple(f"softcell.app.jobs.{name}" for name in ("search", "search_seeds", "train", "train_seeds"))
SPACES = {"docs/papers/full-attention.md": "fullattention", "docs/papers/nos.md": "nos"}
"""Spaces whose architectures a page mentions; DARTS's on other pages."""


@pytest.mark.parametrize(
    ("where", "line"),
    [
        (where, line)
        for where, line in command_lines()
        if re.search(r"softcell (search|train|teacher)", line) and "--plugin" not in line
    ],
)
def test_long_command_line_gets_to_its_work(
    where: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long commands resolve settings, recipes, budgets and architectures; only data and training are left out."""

    if "--tensorboard" in line:
        pytest.importorskip("tensorboard", reason="an extra")

    def stop(*_: object, **__: object) -> None:
        raise Reached

    for function in (*LONG, "softcell.app.cli.train.train_teacher"):
        monkeypatch.setattr(function, stop)
    monkeypatch.chdir(tmp_path)
    Path("my-recipe.yaml").write_text("method: snas\nepochs: 2\n")
    words = shlex.split(line)
    arguments = words[words.index("softcell") + 1 :]
    space = build_space(SPACES.get(where.split(":")[0], "nb201" if "tutorials" in where else "darts"))
    found = sample(space.layout(), 0)
    found.save(tmp_path / "genotype.json")
    if arguments[0] == "train" or "--config" in arguments:
        for word in arguments[1:]:
            if word.startswith("runs/") and arguments[arguments.index(word) - 1] != "--out":
                save_in(make_search(tmp_path / word), found)
    with pytest.raises(Reached):
        softcell(arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
