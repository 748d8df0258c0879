"""Test of `helmsman plan` on a live cluster."""

from __future__ import annotations

import pytest

from tests.multinode.command_line import Helmsman, helmsman, jobs

__all__ = ["helmsman", "jobs"]

pytestmark = pytest.mark.usefixtures("left_as_found")


def test_plan_on_a_live_cluster(helmsman: Helmsman, jobs: str) -> None:
    ended = helmsman("plan", jobs)
    assert ended.returncode == 0, ended.stderr
    assert "12 devices on 2 of 4 nodes; 1 other nodes" in ended.stdout
    assert len([line for line in ended.stdout.splitlines() if line.startswith("rollout")]) == 3
