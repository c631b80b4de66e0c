"""The repository's metadata is correct: versions, badges, the workflow and the first commands."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

import softcell

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_one_version_everywhere() -> None:
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"]
    assert newest is not None
    assert {PROJECT["version"], newest[1], cited} == {softcell.__version__}


def test_badges_are_true() -> None:
    badges = dict(re.findall(r"!\[([^\]]+)\]\(https://img\.shields\.io/badge/([^)]+)\)", README))
    assert set(badges) == {"Python", "Licence", "Types"}
    assert badges["Python"].startswith(f"python-{PROJECT['requires-python'].removeprefix('>=')}%2B-")
    assert badges["Licence"].replace("--", "-").startswith(f"licence-{PROJECT['license']}-")
    strict = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]["strict"]
    assert strict is True and badges["Types"].startswith("types-mypy%20strict-")


def test_the_workflow_runs_the_command_that_the_readme_names() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["test"]
    systems = {entry["os"].partition("-")[0]: entry["torch-index"] for entry in job["strategy"]["matrix"]["include"]}
    assert set(systems) == {"ubuntu", "macos"} and systems["macos"] == ""
    assert [step["run"] for step in job["steps"] if "run" in step] == ["make test"]
    assert "$ make test" in README and re.search(r"^test:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (python,) = [step["with"]["python-version"] for step in job["steps"] if "python-version" in step.get("with", {})]
    assert f">={python}" == PROJECT["requires-python"]


def test_issue_templates_are_valid_forms() -> None:
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) >= 2
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= set(form), path.name
        asked = [part for part in form["body"] if part["type"] != "markdown"]
        assert asked and all(part["id"] and part["attributes"]["label"] for part in asked), path.name


def test_make_targets_that_the_documents_name_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        named = set(re.findall(r"(?:`|\$ |&& )make ([a-z]+)", page.read_text(encoding="utf-8")))
        assert named <= targets, f"{page.name}: {named - targets}"


def test_the_release_checklist_and_the_changelog_exist() -> None:
    checklist = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("\n## Release checklist\n")[2]
    steps = re.findall(r"^\d+\. ", checklist, re.MULTILINE)
    assert len(steps) >= 5 and "make test" in checklist and "CHANGELOG.md" in checklist
    versions = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ \((unreleased|\d{4}-\d{2}-\d{2})\)", version) for version in versions)
