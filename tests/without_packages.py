"""Run a script as if packages were not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CREATE = """
import asyncio
from helmsman import Job, make_scheduler
with make_scheduler("inline") as scheduler:
    scheduler.create_workers(Job(role="a"))
    try:
        asyncio.run(scheduler.create_engine("a/0", "helmsman.engines.train.FSDPTrainEngine"))
    except Exception as error:
        print(type(error).__name__, error)
"""
"""A script that prints the error of an engine."""


def run_without(packages: list[str], code: str) -> str:
    """Run a driver that cannot import these packages, and return its output."""
    script = f"import sys; sys.modules.update(dict.fromkeys({packages!r}))\n{code}"
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=90,
        cwd=ROOT,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
