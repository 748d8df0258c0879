"""The command line on a live cluster, from a process that is not part of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller._ray_backend.scheduler import RayScheduler
from tests.contract.helpers import ROOT
from tests.multinode.conftest import Nodes

pytestmark = pytest.mark.usefixtures("left_as_found")

Helmsman = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def helmsman(nodes: Nodes) -> Helmsman:
    """Run the command line, which finds the cluster by RAY_ADDRESS."""

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
    """Twelve devices in three pieces."""
    path = tmp_path / "jobs.yaml"
    path.write_text(
        "- {role: rollout, replicas: 3, tasks: [{gpu: 4, ray_placement_strategy: separate}]}"
    )
    return str(path)


def test_plan_on_a_live_cluster(helmsman: Helmsman, jobs: str) -> None:
    ended = helmsman("plan", jobs)
    assert ended.returncode == 0, ended.stderr
    assert "12 devices on 2 of 4 nodes; 1 other nodes" in ended.stdout
    assert len([line for line in ended.stdout.splitlines() if line.startswith("rollout")]) == 3


def test_plan_names_holder(helmsman: Helmsman, run: RayScheduler, jobs: str) -> None:
    spec = SchedulingSpec(cpu=0, gpu=5, ray_placement_strategy="separate")
    run.create_workers(Job(role="holder", replicas=2, tasks=[spec]))
    ended = helmsman("plan", jobs)
    assert ended.returncode == 1, ended.stderr
    for fact in (
        "does not fit now, but would if the cluster were empty",
        f"helmsman/{run.run_id}/holder/0",
        "5 GPU",
    ):
        assert fact in ended.stdout


def test_clean_on_every_node(helmsman: Helmsman, nodes: Nodes, run: RayScheduler) -> None:
    run.create_workers(Job(role="lives", tasks=[SchedulingSpec(cpu=0, gpu=1)]))
    ended = helmsman("clean", "--dry-run", "--address", nodes.address)
    assert ended.returncode == 0, ended.stderr
    assert run.run_id not in ended.stdout, "a live run is no leftover"
    ended = helmsman("clean", "--run", run.run_id, "--address", nodes.address)
    assert ended.returncode == 1
    assert "is alive; end its script" in ended.stderr
    assert len(run.get_workers("lives")) == 1


def test_doctor_on_every_node(helmsman: Helmsman, nodes: Nodes) -> None:
    ended = helmsman("doctor", "--address", nodes.address, "--all", "--gpus", "8")
    assert ended.returncode == 1
    for fact in ("4 nodes", "between the nodes:", "clocks"):
        assert fact in ended.stdout, ended.stdout + ended.stderr
    assert len(re.findall(r"accelerators +none", ended.stdout)) == 4
    assert ended.stdout.count("8 are expected") == 4, "those of this cluster are numbers only"
