"""Tests of `helmsman clean` and `helmsman doctor` on the nodes of a live cluster."""

from __future__ import annotations

import re

import pytest

from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller._scheduler.ray.scheduler import RayScheduler
from tests.multinode.command_line import Helmsman, helmsman
from tests.multinode.conftest import Nodes

__all__ = ["helmsman"]
pytestmark = pytest.mark.usefixtures("left_as_found")


def test_clean_on_every_node(helmsman: Helmsman, nodes: Nodes, run: RayScheduler) -> None:
    run.create_workers(Job(role="lives", tasks=[SchedulingSpec(cpu=0, gpu=1)]))
    ended = helmsman("clean", "--dry-run", "--address", nodes.address)
    assert ended.returncode == 0, ended.stderr
    assert run.run_id not in ended.stdout, "a live run is not a leftover"
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
    assert ended.stdout.count("8 are expected") == 4, "the devices of this cluster are only numbers"
