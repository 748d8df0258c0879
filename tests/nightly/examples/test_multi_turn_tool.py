"""The workflow with a tool is short, and the model learns what its reward asks for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "multi_turn_tool.py"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_multi_turn_tool_learns(tmp_path: Path) -> None:
    assert sum(bool(line.strip()) for line in SCRIPT.read_text().splitlines()) <= 40
    ran = subprocess.run(
        [sys.executable, str(SCRIPT)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rewards = [
        float(each) for each in re.findall(r"^step \d+  reward (.*)$", ran.stdout, re.MULTILINE)
    ]
    assert len(rewards) == 10
    assert rewards[-1] > rewards[0] + 0.2
