"""The report as text: the same bytes for the same folder, all user text escaped, and robust to bad input."""

from __future__ import annotations

import html
import json
import re
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from softcell.app.report._sections import changed
from softcell.app.report.heatmaps import overlay, shade
from softcell.app.report.page import report, write_report
from softcell.app.report.runs import find_runs, labels, read_run, table_names
from softcell.app.report.theme import Html, el, join
from softcell.arch import derive
from softcell.engine import RunFolder
from softcell.errors import UserError
from softcell.spaces import build_space
from tests.helpers.report_runs import make_search, make_training
from tests.helpers.unsealed import unsealed

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Checker(HTMLParser):
    """Collects tags and text, and notices tags that do not match."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if not self.stack or self.stack.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parse(page: str) -> Checker:
    found = Checker()
    found.feed(page)
    assert not found.wrong and not found.stack, (found.wrong, found.stack)
    return found


def test_a_report_has_all_sections_and_no_external_resources(tmp_path: Path) -> None:
    page = report([make_search(tmp_path / "what was found"), make_training(tmp_path / "trained")])
    parsed = parse(page)
    text = "".join(parsed.text)
    for part in (
        "Runs", "Groups over seeds", "Cells", "Architecture weights", "Curves", "Decisions and collapse",
        "Confusion matrix", "Most confident mistakes", "Load the model", "Recipe and provenance", "epoch 6",
        f"load_network('{tmp_path}/trained')", f"softcell train '{tmp_path}/what was found'", "collapse.warn_above",
    ):  # fmt: skip
        assert part in text, part
    for tag, attributes in parsed.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base")
        for name in ("src", "href", "xlink:href", "action", "data"):
            assert (attributes.get(name) or "#").startswith(("#", "data:image/png")), (tag, attributes)
    assert "http" not in re.sub(r'xmlns="http://www.w3.org/2000/svg"|http-equiv', "", page)
    assert "@import" not in page and "url(" not in page


def test_the_same_folder_gives_the_same_bytes_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_training(tmp_path / "run")
    make_training(folder / "random-1", method="random", seed=7)
    first = report([folder])
    monkeypatch.chdir(tmp_path)
    assert report([Path("run")]) == first
    path = write_report(["run"], tmp_path / "page.html")
    assert path.read_text(encoding="utf-8") == first
    assert sorted(file.name for file in tmp_path.iterdir()) == ["page.html", "run"]  # nothing half-written stays


def a_whole_run(folder: Path) -> dict[str, Any]:
    """The folders of one `softcell run`, and its summary."""
    make_search(folder / "search")
    rows = {}
    for name, accuracy in (("train", 0.8), ("plain", 0.9), ("random-1", 0.7), ("random-2", 0.6)):
        make_training(folder / name, accuracy=accuracy)
        rows[name] = {"accuracy": accuracy, "parameters": 1500, "multiply_adds": 2e6, "latency": 1.25, "epochs": 18}
    random = [rows["random-1"], rows["random-2"]]
    summary = {
        "found": rows["train"],
        "plain": rows["plain"],
        "random": random,
        "count": 72,
        "verdict": ["Not <worth> it."],
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return summary


def test_a_whole_run_begins_with_its_outcome(tmp_path: Path) -> None:
    a_whole_run(tmp_path)
    text = "".join(parse(report(find_runs([tmp_path]))).text)
    begin = text.index("Was the search worth it?")
    for part in (
        "on 72 test images, all trained in the same way for 18 epochs",
        "found by search",
        "80.0 %",
        "Not <worth> it.",
    ):
        assert begin < text.index(part) < text.index("Show run"), part
    assert "1.25 ms" in text and "accuracy against latency" in text
    assert "Groups over seeds" not in text  # of one seed each: the outcome says what can be said
    assert text.index("search –") < text.index("train –") < text.index("plain –") < text.index("random-1 –")


def a_competition(folder: Path) -> dict[str, Any]:
    for name in ("search", "train", "round-1/plain-1"):
        make_training(folder / name, accuracy=0.8)
    kinds = {"plain-1": "plain", "found": "found", "random-1": "random"}
    summary = {
        "version": 2,
        "delivered": {"name": "plain-1", "accuracy": 0.8, "parameters": 1500, "multiply_adds": 2e6, "latency": 1.25}
        | {"epochs": 90, "seconds": 31.4},
        "why": "it was <best>",
        "entries": [
            {"name": name, "kind": kind, "parameters": 1500 + 10 * i, "multiply_adds": 2e6}
            for i, (name, kind) in enumerate(kinds.items())
        ],
        "rounds": [
            {
                "seconds": 3.5 * (i + 1),
                "seeds": i + 1,
                "results": [{"name": name, "accuracies": [0.5, 0.7]} for name in names],
                "kept": [],
            }
            for i, names in enumerate((("plain-1", "found"), ("plain-1",)))
        ],
        "held_out": 300,
        "count": 72,
        "verdict": ["Not <worth> it."],
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return summary


def test_a_run_with_a_competition_begins_with_the_delivered_network(tmp_path: Path) -> None:
    a_competition(tmp_path)
    text = "".join(parse(report(find_runs([tmp_path]))).text)
    begin = text.index("Result")
    for part in (
        "Delivered: plain-1, because it was <best>.",
        "80.0 % on 72 test images, which were read once, after 90 epochs in 31 s",
        "round 2",
        "60.0 %",
        "300 held-out training images; round 1: 3.5 s, 1 seed each, round 2: 7.0 s, 2 seeds each",
        "Not <worth> it.",
        "accuracy against parameters",
    ):
        assert begin < text.index(part) < text.index("Show run"), part
    assert "accuracy against latency" not in text  # measured for the delivered network only


@pytest.mark.parametrize("damage", ["delivered", "rounds", "entries", "verdict"])
def test_a_damaged_competition_removes_only_its_section(tmp_path: Path, damage: str) -> None:
    summary = a_competition(tmp_path)
    summary[damage] = 3
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    text = "".join(parse(report(find_runs([tmp_path]))).text)
    assert "Delivered" not in text and "Runs" in text


@pytest.mark.parametrize("damage", ["", "[1]", '{"found": 3}', "accuracy", "random", "verdict"])
def test_a_damaged_summary_removes_only_its_section(tmp_path: Path, damage: str) -> None:
    summary = a_whole_run(tmp_path)
    if damage == "accuracy":
        summary["found"]["accuracy"] = "high"
    elif damage in summary:
        del summary[damage]
    (tmp_path / "summary.json").write_text(json.dumps(summary) if damage.isalpha() else damage)
    text = "".join(parse(report(find_runs([tmp_path]))).text)
    assert "worth it" not in text and "Groups over seeds" in text


def test_random_architectures_are_compared_with_their_run(tmp_path: Path) -> None:
    folder = make_training(tmp_path / "run", accuracy=0.95)
    assert "random architectures" not in report([folder])
    for k, accuracy in enumerate((0.8, 0.9), start=1):
        make_training(folder / f"random-{k}", method="random", seed=k, accuracy=accuracy)
    text = "".join(parse(report([folder])).text)
    headings = ("Most confident mistakes", "Comparison with random architectures", "Load the")
    places = [text.index(heading) for heading in headings]
    assert places == sorted(places)
    assert "85.0 ± 7.1 %, n = 2" in text
    assert "cannot be compared: at least 2 runs are needed, but n = 1 for darts in nb201" in text


EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&"


def test_names_of_users_are_escaped(tmp_path: Path) -> None:
    folder = make_training(tmp_path / "a<b>'&\"", classes=[EVIL, "\u202egnp.exe", "plain"])
    search = make_search(tmp_path / "s", data=EVIL, recipe={"method_settings": {EVIL: EVIL}})
    manifest = json.loads((search / "run.json").read_text())
    manifest["command"] = [EVIL]
    (search / "run.json").write_text(json.dumps(unsealed(manifest)))
    page = report([folder, search])
    parsed = parse(page)
    assert [tag for tag, _ in parsed.tags].count("script") == 1
    assert not any(name.startswith("on") for _, attributes in parsed.tags for name in attributes)
    assert all((attributes.get("src") or "data:").startswith("data:") for _, attributes in parsed.tags)
    assert any(EVIL in text for text in parsed.text)  # shown as what it is
    assert "\u202e" not in page


def test_the_policy_allows_this_script_and_no_other(tmp_path: Path) -> None:
    import base64
    import hashlib

    page = report([make_search(tmp_path / "run")])
    script = page.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(a["content"] for t, a in parse(page).tags if t == "meta" and a.get("http-equiv"))
    assert policy is not None
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "connect-src" not in policy


def test_text_is_escaped_and_markup_is_not() -> None:
    assert el("p", "<b>", el("i", "&"), class_='"x"', hidden=True, id=None) == (
        '<p class="&quot;x&quot;" hidden>&lt;b&gt;<i>&amp;</i></p>'
    )
    assert join("a\nb", [Html("<br>"), "<"], None) == "a\nb<br>&lt;"


@pytest.mark.parametrize("half", ["", '{"epoch": 0, "train_lo', "[1, 2]\nnull\n\x00\xff", "[" * 3000])
@pytest.mark.parametrize("name", ["metrics.jsonl", "architecture.jsonl", "genotype.json", "predictions.safetensors"])
def test_half_written_files_remove_only_their_section(tmp_path: Path, name: str, half: str) -> None:
    folder = make_training(tmp_path / "run")
    make_search(tmp_path / "search")
    for place in (folder, tmp_path / "search"):
        if (place / name).exists():
            whole = (place / name).read_bytes()
            (place / name).write_bytes((whole if name.endswith("jsonl") else b"") + half.encode())
    page = report([folder, tmp_path / "search"])
    parse(page)
    assert "Recipe and provenance" in page


BROKEN: list[Any] = [None, [], {}, "text", -1, 1e308, [[None]], {"cell": 3}, {"cell": {"edges": [[0, 1]]}}, True]


@pytest.mark.parametrize("turn", range(len(BROKEN)))
def test_values_of_wrong_types_break_no_report(tmp_path: Path, turn: int) -> None:
    """Every value is replaced by something else; over all turns each is replaced by everything."""

    def broken(value: dict[str, Any]) -> dict[str, Any]:
        return {key: BROKEN[(i + turn) % len(BROKEN)] for i, key in enumerate(value)}

    search, training = make_search(tmp_path / "s"), make_training(tmp_path / "t")
    for folder in (search, training):
        manifest = unsealed(json.loads((folder / "run.json").read_text()))
        fixed = {key: manifest[key] for key in ("format", "version", "kind", "status")}
        inner = {key: broken(manifest[key]) for key in ("recipe", "results", "versions", "hardware")}
        for changed_ in (broken(manifest) | fixed, {**manifest, **inner}):
            (folder / "run.json").write_text(json.dumps(changed_))
            parse(report([folder]))
        (folder / "run.json").write_text(json.dumps(manifest))
    for name in ("metrics.jsonl", "architecture.jsonl"):
        rows = [json.loads(line) for line in (search / name).read_text().splitlines()]
        rows[2], rows[-1] = broken(rows[2]), {**broken(rows[-1]), "epoch": 5}
        (search / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    parse(report([search]))


def test_an_unfinished_search_shows_its_results_so_far(tmp_path: Path) -> None:
    page = report([make_search(tmp_path / "run", status="running")])
    text = "".join(parse(page).text)
    assert "▶ running" in text and "Not final" in text and "not measured yet" in text
    assert "Load the model" not in text
    bare = make_search(tmp_path / "bare", status="running", epochs=0)
    assert "Recipe and provenance" in report([bare])


def test_the_first_phase_of_a_search_is_shown_in_its_run(tmp_path: Path) -> None:
    folder = make_search(tmp_path / "runs" / "found", method="fullattention")
    first = make_search(folder / "phase-1", method="fullattention", epochs=2)
    assert "Context auto-regression" in report([folder])  # curves, before there is a picture
    picture = first / "reconstructions.png"
    Image.new("RGB", (3000, 900), (1, 2, 3)).save(picture)
    parsed = parse(report([folder]))
    (shown,) = [attributes for tag, attributes in parsed.tags if tag == "img"]
    assert (shown["width"], shown["height"]) == ("1600", "480") and str(shown["src"]).startswith("data:image/png")
    assert "phase 1: L1 distance" in "".join(parsed.text)
    assert find_runs([tmp_path / "runs"]) == [folder]  # the phase is not a separate run
    picture.write_bytes(picture.read_bytes()[:50])
    assert all(tag != "img" for tag, _ in parse(report([folder])).tags)


def test_a_retrieval_is_reported_by_its_recall(tmp_path: Path) -> None:
    folder = make_training(tmp_path / "trained")
    run = RunFolder.open(folder)
    recalls = {f"recall_at_{k}": 0.1 * k for k in (1, 2, 4, 8)}
    run.update(recipe={**run.manifest["recipe"], "task": "retrieve"})
    run.finish("finished", **recalls, accuracy=None, split="unseen classes", count=60)
    score = read_run(folder).score
    assert score is not None and score.value == 0.1 and score.measure == "retrieval (Recall@1), unseen classes"
    text = "".join(parse(report([folder])).text)
    assert all(part in text for part in ("recall@1", "recall@8", "80.0 %", "cosine similarities", "60 images"))


def test_headings_name_method_space_and_data(tmp_path: Path) -> None:
    """Method, space and data may have the same name."""
    text = "".join(parse(report([make_search(tmp_path / "search")])).text)
    assert "Search with darts in the nb201 space on digits" in text
    text = "".join(parse(report([make_training(tmp_path / "train")])).text)
    assert "Network of the nb201 space trained on digits, found by darts" in text
    text = "".join(parse(report([make_training(tmp_path / "drawn", method="random")])).text)
    assert "trained on digits, drawn at random" in text


def test_runs_on_two_datasets_have_a_chart_each(tmp_path: Path) -> None:
    folders = []
    for data in ("digits", "cifar10"):
        for seed in range(2):
            folders.append(make_training(tmp_path / f"{data}-{seed}", seed=seed, accuracy=0.9 - seed / 10))
            manifest = unsealed(json.loads((folders[-1] / "run.json").read_text()))
            manifest["recipe"]["data"] = data
            (folders[-1] / "run.json").write_text(json.dumps(manifest))
    text = "".join(parse(report(folders)).text)
    for data in ("digits", "cifar10"):
        assert text.count(f"accuracy on {data} against parameters") == 1
    assert text.count(", n = 2") == 4  # in each chart of two datasets and two costs only its own group
    assert "accuracy against parameters" not in text
    assert "accuracy against parameters" in "".join(parse(report(folders[:2])).text)


@pytest.mark.parametrize("part", ["example", "again"])
def test_code_of_a_report_runs_unchanged(tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any folder: the loading example gives probabilities, and the command for a repetition finds its recipe."""
    from softcell.api import train
    from softcell.app.cli.main import run as softcell

    folder = tmp_path / "my run"
    cell = "|nor_conv_1x1~0|+|none~0|skip_connect~1|+|none~0|none~1|skip_connect~2|"
    train(cell, data="digits", epochs=1, out=folder, batch_size=256, space_settings={"channels": 2})
    page = report([folder])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    codes = [html.unescape(code) for code in re.findall(r"<pre[^>]*><code>(.*?)</code></pre>", page, re.DOTALL)]
    if part == "example":
        space: dict[str, Any] = {"pixels": torch.rand(2, 1, 8, 8)}
        exec(codes[0], space)
        assert space["probabilities"].shape == (2, 10)
    else:
        assert softcell(shlex.split(codes[1])[1:]) == 0
        assert (tmp_path / "elsewhere" / "again" / "run.json").exists()


def test_paths_without_runs_are_refused_by_name(tmp_path: Path) -> None:
    for path, message in ((tmp_path, "holds no run"), (tmp_path / "nowhere", "no such folder")):
        with pytest.raises(UserError, match=message):
            find_runs([path])
    make_search(tmp_path / "a" / "one")
    make_search(tmp_path / "a" / "two")
    found = find_runs([tmp_path / "a", tmp_path / "a" / "two"])
    assert [path.name for path in found] == ["one", "two"]
    assert labels([tmp_path / "a" / "one", tmp_path / "b" / "one"]) == ["a/one", "b/one"]


def test_weights_have_the_names_of_their_space_or_numbers(tmp_path: Path) -> None:
    folder = make_search(tmp_path / "run")
    assert "nor_conv_3x3" in report([folder])
    manifest = json.loads((folder / "run.json").read_text())
    manifest["recipe"]["space"] = "somebody's plugin"
    (folder / "run.json").write_text(json.dumps(unsealed(manifest)))
    text = "".join(parse(report([folder])).text)
    assert "candidate 5" in text and "choice 6" in text


def darts_search(folder: Path) -> Path:
    """A search in the DARTS space whose `none` has the most weight everywhere, with what the space's rule derives."""
    make_search(folder, epochs=1)
    layout = build_space("darts", {}).layout()
    weights = {
        table.name: [
            [0.20 if op == "none" else 0.14 if op == "skip_connect" else 0.11 for op in choice.candidates]
            for choice in table.choices
        ]
        for table in layout.tables
    }
    genotype = derive(layout, {name: torch.tensor(rows) for name, rows in weights.items()})
    line = {"epoch": 0, "tables": weights, "genotype": genotype.to_dict()["cells"]}
    (folder / "architecture.jsonl").write_text(json.dumps(line) + "\n")
    manifest = unsealed(json.loads((folder / "run.json").read_text()))
    manifest["recipe"] |= {"space": "darts", "space_settings": {}}
    (folder / "run.json").write_text(json.dumps(manifest))
    return folder


def test_frames_are_explained_by_the_rule_that_the_search_follows(tmp_path: Path) -> None:
    text = "".join(parse(report([darts_search(tmp_path / "darts")])).text)
    assert "for every node its 2 strongest edges, each with its strongest candidate other than “none”" in text
    assert "is never derived, even where its weight is the largest" in text
    text = "".join(parse(report([make_search(tmp_path / "other")])).text)  # its architectures are drawn at random
    assert "the method may have its own rule" in text


def test_rows_of_weights_have_the_names_of_the_drawing(tmp_path: Path) -> None:
    names = table_names(read_run(darts_search(tmp_path / "darts")))["normal"]
    assert '<th scope="row">c<sub>k−2</sub> → 2</th>' in report([tmp_path / "darts"])
    assert names.choices[:3] == ("cₖ₋₂ → 2", "cₖ₋₁ → 2", "cₖ₋₂ → 3") and names.choices[-1] == "4 → 5"
    names = table_names(read_run(make_search(tmp_path / "cell")))["cell"]
    assert names.choices == ("in → 1", "in → 2", "1 → 2", "in → out", "1 → out", "2 → out")


def test_frames_mark_the_derived_edges(tmp_path: Path) -> None:
    folder = make_search(tmp_path / "run")
    names = table_names(read_run(folder))["cell"]
    box = next(a for t, a in parse(report([folder])).tags if t == "figure" and "data-picked" in a)
    picked = json.loads(box["data-picked"] or "")
    for line, numbers in zip((folder / "architecture.jsonl").read_text().splitlines(), picked, strict=True):
        edges = json.loads(line)["genotype"]["cell"]["edges"]
        found = [[*names.ends[i // 5], names.candidates[i // 5][i % 5]] for i in numbers]
        assert sorted(found) == sorted(edges)


def test_shades_and_changes_and_confusions_are_counted_right(tmp_path: Path) -> None:
    assert [shade(v) for v in (0, 9, 10, 99, 100)] == [0, 0, 1, 9, 9]
    assert [shade(v, 20) for v in (0, 10, 20)] == [0, 5, 9]
    edges = [[[0, 1, "a"], [0, 2, "a"]], [[0, 1, "b"], [0, 2, "a"]], [[0, 1, "c"], [0, 2, "c"]]]
    rows = [{"epoch": e, "tables": {}, "genotype": {"t": {"edges": part}}} for e, part in enumerate(edges)]
    assert changed(rows, "t") == [(2, 1.0), (3, 2.0)]
    page = report([make_training(tmp_path / "run", accuracy=0.9)])
    for i in range(5):  # 40 images each; of the last 20 all are classified as the next class
        assert f"36 of 40 images of class {i} were classified as class {i}" in page
        assert f"4 of 40 images of class {i} were classified as class {(i + 1) % 5}" in page
    run = read_run(tmp_path / "run")
    assert run.predictions is not None
    assert int((run.predictions["labels"] != run.predictions["predicted"]).sum()) == 20


def test_many_classes_become_lists(tmp_path: Path) -> None:
    text = "".join(parse(report([make_training(tmp_path / "run", classes=[f"kind {i}" for i in range(60)])])).text)
    assert "the hardest classes" in text
    assert "kind 11" in text and "75.0 %" in text and "predicted class" in text  # 3 of 4 are right


def test_a_network_without_mistakes_is_reported_so(tmp_path: Path) -> None:
    text = "".join(parse(report([make_training(tmp_path / "run", accuracy=1.0)])).text)
    assert "No mistakes." in text
    assert "Most confident mistakes" not in text


def test_the_overlay_is_brightest_where_the_map_is_largest() -> None:
    image = torch.full((1, 8, 8), 128, dtype=torch.uint8)
    heat = torch.zeros(2, 2)
    heat[0, 0] = 1.0
    picture = overlay(image, heat).float().mean(0)
    assert picture[:8, :8].mean() > picture[-8:, -8:].mean() + 50  # in lightness, not only in colour
