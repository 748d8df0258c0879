"""What was written for other libraries trains here: reward functions, rows and environments."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def output(folder: Path, script: str, *flags: str) -> str:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *flags],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_rewards_of_verl_and_openrlhf(tmp_path: Path) -> None:
    output(tmp_path, "port_rewards.py")
    summary = json.loads((tmp_path / "runs" / "grpo" / "summary.json").read_text())
    assert summary["reward_last"] > summary["reward_first"] + 0.3


@pytest.mark.parametrize("env", ["skyrl", "nemo_rl"])
def test_environments_of_skyrl_and_nemo_rl(tmp_path: Path, env: str) -> None:
    text = output(tmp_path, "port_environments.py", "--env", env)
    rewards = [float(each) for each in re.findall(r"^step \d+  reward (.*)$", text, re.MULTILINE)]
    assert len(rewards) == 10
    assert rewards[-1] > rewards[0] + 0.2
