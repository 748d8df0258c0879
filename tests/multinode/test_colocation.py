"""Tests of siblings and aliases on several nodes."""

from __future__ import annotations

import msgspec
import pytest

from helmsman.api import errors
from helmsman.controller._scheduler.ray.scheduler import RayScheduler
from tests.multinode.siblings import (
    assert_fork_has_devices_of_target,
    devices_seen,
    module_run,
    run,
    sibling_job,
    target_job,
)

__all__ = ["module_run", "run"]

pytestmark = pytest.mark.usefixtures("left_as_found")


@pytest.mark.parametrize(("strategy", "kind"), [("shared", "GPU"), ("separate", "CPU")])
def test_fork_has_devices_of_target(run: RayScheduler, strategy: str, kind: str) -> None:
    assert_fork_has_devices_of_target(run, strategy, True, kind)


def test_fork_one_for_two_targets(run: RayScheduler) -> None:
    run.create_workers(target_job("GPU", "shared", replicas=8, gpu=2))
    run.create_workers(sibling_job(4, fork=True, gpu=4))
    target, servers = run.get_workers("target"), run.get_workers("sibling")
    for index, server in enumerate(servers):
        share = target[2 * index : 2 * index + 2]
        assert {worker.node_id for worker in share} == {server.node_id}
        assert server.devices == [device for worker in share for device in worker.devices]
    assert devices_seen(run, servers, "GPU", "server") == [
        tuple(server.devices) for server in servers
    ]
    run.delete_workers("sibling")
    assert len(run.get_workers("target")) == 8
    for replicas, message in (
        (1, r"keeps each replica on one node.*target/0 to target/7"),
        (3, "a divisor or a multiple of the 8 workers"),
    ):
        with pytest.raises(errors.InvalidSpecError, match=message):
            run.create_workers(sibling_job(replicas, fork=True))


def test_fork_two_for_one_target(run: RayScheduler) -> None:
    run.create_workers(target_job("GPU", "separate", replicas=2, gpu=2))
    run.create_workers(sibling_job(4, fork=True, gpu=1))
    target, siblings = run.get_workers("target"), run.get_workers("sibling")
    assert [worker.devices for worker in siblings] == [
        [device] for worker in target for device in worker.devices
    ]
    with pytest.raises(errors.InvalidSpecError, match=r"gpu of replica 0 is 2; expected 1"):
        run.create_workers(msgspec.structs.replace(sibling_job(4, fork=True, gpu=2), role="greedy"))
