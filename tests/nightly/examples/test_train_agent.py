"""The agent of the guide is trained through OpenAI's SDK, in few lines and a short time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "train_agent.py"


def test_guide_shows_train_agent() -> None:
    """docs/agents.md has the script as it is."""
    guide = (SCRIPT.parents[1] / "docs" / "agents.md").read_text()
    assert SCRIPT.read_text().rstrip() in guide


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_train_agent_learns(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    assert sum(bool(line.strip()) for line in SCRIPT.read_text().splitlines()) <= 30
    ran = subprocess.run(
        [sys.executable, str(SCRIPT)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    summary = json.loads((tmp_path / "runs" / "grpo" / "summary.json").read_text())
    assert summary["reward_last"] > summary["reward_first"] + 0.3
