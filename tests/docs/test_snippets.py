"""Every Python snippet of README and documentation runs; code of other libraries parses."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs.snippets import OTHERS, PAGES, ROOT, Snippet, python_of, snippets

ELSEWHERE = {
    "docs/recipes.md": "tests/examples/test_quickstart.py",
    "docs/testing.md": "tests/testing/test_contract.py",
}
"""Pages whose snippets another test runs."""

HERE = [page for page in PAGES if python_of(page) and str(page.relative_to(ROOT)) not in ELSEWHERE]
SCRIPTS = [
    each
    for page in HERE
    for each in python_of(page)
    if each.is_script and not (ROOT / "examples" / each.title).is_file()
]
"""Scripts to run here; tests/examples runs those of the folder examples."""
RUN = [page for page in HERE if page.name != "README.md"]
YAML = [each for page in PAGES for each in snippets(page) if each.language == "yaml"]
PRINTS = {
    "class Counter": "[42, 42]\n",
    "GRPO(": "model:   runs/grpo/model",
    "samples_of": "step 9  reward 0.",
}
"""Part of a script -> part of its output."""


def run(folder: Path, *command: str) -> str:
    path = f"{ROOT}{os.pathsep}{folder}"
    env = {**os.environ, "PYTHONPATH": path, "HELMSMAN_PLATFORM": "cpu"}
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda each: each.name)
def test_scripts_run(script: Snippet, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(script.code)
    (expected,) = [printed for part, printed in PRINTS.items() if part in script.code]
    assert expected in run(tmp_path, "script.py")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_pages_run(tmp_path: Path) -> None:
    printed = run(tmp_path, "-m", "tests.docs.snippets", *map(str, RUN))
    for page in RUN:
        assert all(f"--- {each.name}\n" in printed for each in python_of(page)), page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_parses(page: Path) -> None:
    for each in snippets(page):
        if each.language == "python":
            compile(each.code, each.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    assert {each.title for each in snippets(page)} & set(OTHERS) <= (
        set(OTHERS) if page.name == "coming_from.md" else set()
    )


def test_elsewhere_run_by_other_tests() -> None:
    for page, test in ELSEWHERE.items():
        assert page in (ROOT / test).read_text()


@pytest.mark.parametrize("snippet", YAML, ids=lambda each: each.name)
def test_yaml_parses(snippet: Snippet) -> None:
    assert all(yaml.safe_load_all(snippet.code))


@pytest.mark.parametrize(
    "snippet",
    [each for each in YAML if each.title.startswith("Helmsman")],
    ids=lambda each: each.name,
)
def test_yaml_of_helmsman_has_known_settings(snippet: Snippet, tmp_path: Path) -> None:
    from helmsman.recipes import GRPOSettings
    from helmsman.recipes.config import load

    (tmp_path / "run.yaml").write_text(snippet.code)
    assert load(GRPOSettings, tmp_path / "run.yaml")
