"""Test of commands that find a run by the address of its Ray cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from tests.desk.staged_runs import Staged


def test_commands_through_cluster(stage: Callable[[str], Staged]) -> None:
    """A process that is not part of the run finds it by the address of its Ray cluster."""
    staged = stage("placement")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "helmsman", *arguments, "--address", staged.address]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    status = run("status", staged.run_id)
    assert f"run {staged.run_id}  RayScheduler" in status.stdout, status.stderr
    logs = run("logs", staged.run_id)
    assert f"run {staged.run_id} begins" in logs.stdout, logs.stderr
    missing = run("status", "ffff")
    assert missing.returncode == 2
    assert "no run ffff of this user on the nodes of the cluster" in missing.stderr
