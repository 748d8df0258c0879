"""Test that the code of README and documentation parses, and that guides show the examples."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml

from helmsman.recipes import GRPOSettings
from helmsman.recipes.config import load
from tests.docs.snippets import OTHERS, PAGES, ROOT, Snippet, python_of, snippets

YAML = [each for page in PAGES for each in snippets(page) if each.language == "yaml"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_parses(page: Path) -> None:
    for each in snippets(page):
        if each.language == "python":
            compile(each.code, each.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        assert each.title not in OTHERS or page.name == "coming_from.md"


@pytest.mark.parametrize("snippet", YAML, ids=lambda each: each.name)
def test_yaml_parses(snippet: Snippet, tmp_path: Path) -> None:
    assert all(yaml.safe_load_all(snippet.code))
    if snippet.title.startswith("Helmsman"):
        (tmp_path / "run.yaml").write_text(snippet.code)
        assert load(GRPOSettings, tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("script", "page", "num_lines"),
    [
        ("quickstart_grpo.py", "docs/recipes.md", 20),
        ("train_agent.py", "docs/agents.md", 30),
        ("multi_turn_tool.py", None, 40),
    ],
)
def test_examples_are_short_and_shown(script: str, page: str | None, num_lines: int) -> None:
    text = (ROOT / "examples" / script).read_text().rstrip()
    assert sum(bool(line.strip()) for line in text.splitlines()) <= num_lines
    assert page is None or text in (ROOT / page).read_text()


def test_readme_and_home_page_show_the_same_fifteen_lines() -> None:
    (script,) = python_of(ROOT / "README.md")
    assert [each.code for each in python_of(ROOT / "docs/index.md")] == [script.code]
    assert sum(bool(line) for line in script.code.splitlines()) == 15


def test_page_about_testing_runs_in_its_own_test() -> None:
    tests = (ROOT / "tests").rglob("test_contract.py")
    assert any("docs/testing.md" in test.read_text() for test in tests)
