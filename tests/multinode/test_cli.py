"""Test of `helmsman plan` on a live cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.multinode.command_line import Helmsman, helmsman

__all__ = ["helmsman"]

pytestmark = pytest.mark.usefixtures("left_as_found")

JOBS = "- {role: rollout, replicas: 3, tasks: [{gpu: 4, ray_placement_strategy: separate}]}"


def test_plan_on_a_live_cluster(helmsman: Helmsman, tmp_path: Path) -> None:
    (tmp_path / "jobs.yaml").write_text(JOBS)
    ended = helmsman("plan", str(tmp_path / "jobs.yaml"))
    assert ended.returncode == 0, ended.stderr
    assert "12 devices on 2 of 4 nodes; 1 other nodes" in ended.stdout
    assert len([line for line in ended.stdout.splitlines() if line.startswith("rollout")]) == 3
