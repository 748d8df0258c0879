"""Fixtures: the command line on a live cluster, and a file of jobs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.helpers import ROOT
from tests.multinode.conftest import Nodes

Helmsman = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def helmsman(nodes: Nodes) -> Helmsman:
    """Run the command line in a process of its own, which finds the cluster by RAY_ADDRESS."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "helmsman", *arguments],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
            cwd=ROOT,
            env={**os.environ, "RAY_ADDRESS": nodes.address},
        )

    return run


@pytest.fixture
def jobs(tmp_path: Path) -> str:
    """A job with three replicas of four devices."""
    path = tmp_path / "jobs.yaml"
    path.write_text(
        "- {role: rollout, replicas: 3, tasks: [{gpu: 4, ray_placement_strategy: separate}]}"
    )
    return str(path)
