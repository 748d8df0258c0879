"""Tests that the public contract suite runs as documented, and finds a broken scheduler."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = re.search(r"```python\n(.*?)```", (ROOT / "docs/testing.md").read_text(), re.DOTALL)[1]  # type: ignore[index]


def run_suite(folder: Path, my_package: str, *options: str) -> str:
    (folder / "my_package.py").write_text(my_package)
    (folder / "test_my_scheduler.py").write_text(EXAMPLE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rs",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:langsmith_plugin",  # imports torch
        *options,
        "test_my_scheduler.py",
    ]
    path = f"{ROOT}{os.pathsep}{folder}"
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    return done.stdout + done.stderr


def test_contract_documented_example(tmp_path: Path) -> None:
    assert len(EXAMPLE.splitlines()) <= 20
    output = run_suite(tmp_path, "from helmsman import InlineScheduler as MyScheduler\n")
    assert re.search(r"\d+ passed, \d+ skipped in", output), output


BROKEN = """
from helmsman import InlineScheduler

class MyScheduler(InlineScheduler):
    def call_engine(self, worker_id, method, *args, **kwargs):
        super().call_engine(worker_id, method, *args, **kwargs)
        return super().call_engine(worker_id, method, *args, **kwargs)
"""


def test_contract_finds_call_sent_twice(tmp_path: Path) -> None:
    output = run_suite(tmp_path, BROKEN, "-k", "arguments_and_results")
    assert "1 failed" in output, output
    assert "assert 8 == 4" in output, output
