"""The quickstart does as it says: a reward of one's own on a tiny model, in few lines and a short
time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "quickstart_grpo.py"


def test_guide_shows_quickstart() -> None:
    """docs/recipes.md has the script as it is."""
    guide = (SCRIPT.parents[1] / "docs" / "recipes.md").read_text()
    assert SCRIPT.read_text().rstrip() in guide


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_quickstart_grpo_learns(tmp_path: Path) -> None:
    assert sum(bool(line.strip()) for line in SCRIPT.read_text().splitlines()) <= 20
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
