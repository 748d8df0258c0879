"""Test that every Python snippet of README and documentation runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.snippets import ELSEWHERE, PAGES, ROOT, Snippet, python_of

HERE = [page for page in PAGES if python_of(page) and str(page.relative_to(ROOT)) not in ELSEWHERE]
SCRIPTS = {
    each.code: each
    for page in HERE
    for each in python_of(page)
    if each.is_script and not (ROOT / "examples" / each.title).is_file()
}
"""Scripts to run here, each once; tests/nightly/examples runs those of the folder examples."""
RUN = [page for page in HERE if page.name != "README.md"]
PRINTS = {
    "class Counter": "[42, 42]\n",
    "GRPO(": "model:   runs/grpo/model",
    "samples_of": "step 9  reward 0.",
}
"""Part of a script -> part of its output."""

pytestmark = pytest.mark.timeout(600)


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


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=lambda each: each.name)
def test_script_runs(script: Snippet, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(script.code)
    (expected,) = [printed for part, printed in PRINTS.items() if part in script.code]
    assert expected in run(tmp_path, "script.py")


def test_pages_run(tmp_path: Path) -> None:
    printed = run(tmp_path, "-m", "tests.docs.snippets", *map(str, RUN))
    for page in RUN:
        assert all(f"--- {each.name}\n" in printed for each in python_of(page)), page
