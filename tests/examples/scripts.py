"""Runs scripts of the folder `examples` as a user does, and reads the rewards that they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def output(folder: Path, script: str, *flags: str) -> str:
    """Run a script from a folder that is not the checkout; returns its output.

    Args:
        folder: Working directory of the script.
        script: Name of the script.
        flags: Arguments of the script.

    Returns:
        The text of stdout, without Ray's own warnings: a busy machine gets one about the number
        of workers that start.
    """
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *flags],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return re.sub(r"^\S*\(raylet\).*\n", "", ran.stdout, flags=re.MULTILINE)


def step_rewards(text: str) -> list[float]:
    """Return the rewards in lines such as "step  3  reward 0.5"."""
    return [float(each) for each in re.findall(r"^step +\d+  reward ([\d.]+)", text, re.MULTILINE)]
