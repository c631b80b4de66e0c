"""Text and names are plain English: phrases that were misused before do not return.

A phrase is listed only if correct English never needs it. `tell apart`, `tell from` and `file.tell()` are allowed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SEARCHED = (
    "src", "tests", "docs", "studies", "benchmarks", "examples", "scripts", ".github", "mkdocs.yml", "README.md",
    "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md",
)  # fmt: skip
SUFFIXES = (".py", ".md", ".yaml", ".yml", ".toml", ".html", ".css", ".js", ".sh", ".ipynb")

WORDS = {
    # pattern, in which a blank matches any white space: what to write instead
    r"(tell(?!\(\))|tells|telling|told)(?!.{0,60}?(apart|from))": "notify, warn, log, say; is given",
    r"tellers?": "notifier",
    r"anew": "again, new; recalibrated (BatchNorm)",
    r"(go|goes|going|gone|went) on(?! (the|a|an|each|every|this|top|one)\b)": "resume, continue",
    r"(go|goes|going|gone|went) without": "ignores, has no",
    r"(is|are|was|were|be|been) had": "there is; is available",
    r"of which hardly": "few of which; rarely",
    r"hardly (one|a|any) .{0,20}comes? twice": "rarely repeats",
    r"(comes?|stands?) twice": "repeats; is a duplicate",
    r"would not do": "is not enough",
    r"who gives": "a caller that passes",
    r"press(es|ed)? down": "reduce; penalty strength",
    r"by modules": "module by module; with one module per operation",
    r"(?<!\")wish(es|ed)?(?!\")": "request, option, target",
    r"(?<!in.)doubts?": "warning; overfit_warning",
    r"arrivals": "node_inputs",
    r"departures?(?! from)": "node_outputs",
    r"players?": "StepState; participant",
    r"hosted": "run_in_folder",
    r"of one's own": "your own; custom",
    r"(is|are|was|were) no result": "is not a result",
    r"(rules?|recipes?|settings?) of today": "the current rules",
    r"(faults?|bugs?) of others": "upstream bugs",
    r"how far (it|they|that) ha(s|ve) come": "progress",
    r"(?<![.`\"])trainings(?!\s*[=:(]|[`\"])": "training runs; training",
    r"in the mean": "on average",
    r"(ms|µs|seconds?|images|kernels|launches|operations) a (step|second|launch|kernel|hop|pass)": "ms per step",
    r"(runs?|steps?|timed|searches|modules) in turns": "alternate; interleaved",
    r"(edges?|candidates|features|operations|convolutions) that leaves? a node": "outgoing edges of a node",
    r"along a cosine": "with cosine decay",
    r"by heart": "memorise",
    r"drawn by (the|a) seed": "sampled from the seed",
    r"(process(es)?|modules?|folders?|files?|streams?|threads?|columns?|runs?) of (its|their) own": "separate process",
    r"takes? no part": "is ignored; is excluded",
    r"(called|written|deleted?|removed?) by hand": "manually; hand-written",
    r"(ours|numbers) beside": "next to; compared with",
    r"other reading": "alternative",
    r"give (another|at least|either)": "choose another; use at least; pass either",
    r"commonest|likeliest": "most frequent; most likely",
    r"for (people|a person)( to read)?": "human-readable",
    r"least\s(seconds|epochs|share|images)": "minimum",
    r"the (best|largest|smallest|newest|latest|longest|strongest) first(?=[,;.:])": "best first",
    r"makes the (listener|manifest|run|network) of": "creates",
    r"seconds of (a|the) (CPU|device|GPU)": "device seconds; timed on a CPU",
    r"(a|each|every|longer) training (with|would|of|has|measures|chooses)": "training run",
    r"as far as (it|they|this|these) (fits?|shows?|goes?)": "where it matches",
    r"results? as alone": "the same result as on its own",
    r"made side by side": "computed together",
    r"settled (here|points?)": "our choice; open point",
    r"at the latest": "latest; before",
    r"asked between": "called between",
}
"""The key `"wishes"` of plan.json is part of the format of run folders, hence the quotes in its pattern. Records of
results have a key `"trainings"`."""

FILE_NAMES = {
    "arrivals", "departures", "runner", "several", "within", "hosted", "enough", "early", "wishes", "doubt", "teller",
}  # fmt: skip
"""Names of modules that explained nothing."""


def _compiled(pattern: str) -> re.Pattern[str]:
    # An underscore separates words too: test names and identifiers are searched as well.
    spaced = pattern.replace(" ", r"[\s#_]+")
    return re.compile(rf"(?<![A-Za-z])(?:{spaced})(?![A-Za-z])", re.IGNORECASE | re.DOTALL)


def findings(text: str) -> Iterator[tuple[int, str, str]]:
    """Line number, phrase found, what to write instead."""
    for pattern, instead in WORDS.items():
        for match in _compiled(pattern).finditer(text):
            yield text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), instead


def _files() -> Iterator[Path]:
    for name in SEARCHED:
        start = ROOT / name
        for path in [start] if start.is_file() else sorted(start.rglob("*")):
            if path.suffix in SUFFIXES and path != Path(__file__).resolve():
                yield path


def test_text_and_names_use_plain_words() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {words!r}; say: {instead}"
        for path in _files()
        for line, words, instead in findings(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(["phrases to replace:", *found])


def test_module_names_explain_themselves() -> None:
    named = [path for path in _files() if path.suffix == ".py" and path.stem.removeprefix("test_") in FILE_NAMES]
    assert not [str(path.relative_to(ROOT)) for path in named]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("the search is told of it", 1),
        ("def test_user_is_told_once(): ...", 1),
        ("they can be told apart", 0),
        ("nothing tells one seed\nfrom another", 0),
        ("statistics are measured anew", 1),
        ("the same command goes\n    # on with it", 1),
        ("the label goes on the left", 0),
        ("Plan(wishes)", 1),
        ('data["wishes"]', 0),
        ("marked `Deviation:`, a departure from the paper", 0),
        ("retold, bestow, swish", 0),
        ("searches and trainings of a table", 1),
        ("table.trainings, Table(trainings={})", 0),
        ("27 ms a step in a\nprocess of its own", 2),
        ("one seed is no result", 1),
        ("the file exists; give another name", 1),
        ("the best first, then the others", 1),
        ("the best first step", 0),
        ("a training set has labels", 0),
    ],
)
def test_patterns_find_only_the_misuse(text: str, count: int) -> None:
    assert len(list(findings(text))) == count
