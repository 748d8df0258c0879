"""Tests of siblings and aliases on nodes of both kinds of accelerators, by other strategies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helmsman.controller._ray_backend.scheduler import RayScheduler
from tests.multinode.conftest import Nodes, npu_node
from tests.multinode.siblings import (
    assert_fork_failure_leaves_target,
    assert_fork_has_devices_of_target,
    assert_fork_workers_command,
    module_run,
    run,
)

__all__ = ["module_run", "run"]
pytestmark = pytest.mark.usefixtures("left_as_found")


@pytest.fixture(scope="module")
def nodes(fleet: Nodes) -> Iterator[Nodes]:
    """The fleet with two nodes of NPUs."""
    with fleet.added(*[npu_node(labels={"kind": "NPU"}) for _ in range(2)]):
        yield fleet


@pytest.mark.parametrize(
    ("strategy", "fork", "kind"),
    [("separate", True, "NPU"), ("deferred", True, "GPU"), ("deferred", False, "NPU")],
)
def test_fork_has_devices_of_target(
    run: RayScheduler, strategy: str, fork: bool, kind: str
) -> None:
    assert_fork_has_devices_of_target(run, strategy, fork, kind)


@pytest.mark.parametrize(
    ("strategy", "kind"), [("shared", "GPU"), ("separate", "CPU"), ("deferred", "NPU")]
)
def test_fork_failure_leaves_target(run: RayScheduler, strategy: str, kind: str) -> None:
    assert_fork_failure_leaves_target(run, strategy, kind)


def test_fork_workers_command(run: RayScheduler) -> None:
    assert_fork_workers_command(run, "deferred", "GPU")
