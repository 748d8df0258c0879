"""Tests of siblings and aliases on nodes of both kinds of accelerators, by other strategies."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, SchedulingSpec, SchedulingStrategy
from helmsman.controller._scheduler.ray.scheduler import RayScheduler
from tests.contract.engines import Counter
from tests.contract.helpers import Engine, wait_gone
from tests.multinode.conftest import Nodes, npu_node
from tests.multinode.siblings import (
    assert_fork_has_devices_of_target,
    module_run,
    run,
    sibling_job,
    target_job,
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
    run.create_workers(target_job(kind, strategy, replicas=2, gpu=2))
    engines = [Engine.create(run, f"target/{index}", Counter) for index in range(2)]
    failing = Job(
        role="sibling",
        replicas=2,
        tasks=[SchedulingSpec(), SchedulingSpec(port_count=100_000)],
        scheduling_strategy=SchedulingStrategy(type="colocation", target="target", fork=True),
    )
    with pytest.raises(errors.WorkerStartError, match="sibling/1"):
        run.create_workers(failing)
    assert [engine.call("add") for engine in engines] == [1, 1]
    assert len(run.status()) == 2
    assert run.create_workers(sibling_job(2, fork=True)) == ["sibling/0", "sibling/1"], (
        "the next siblings start"
    )


def test_fork_workers_command(run: RayScheduler) -> None:
    run.create_workers(target_job("GPU", "deferred", replicas=2, gpu=2))
    ids = run.fork_workers("server", "target", command="http.server --bind 127.0.0.1 {port}")
    pids = {worker_id: run.call_engine(worker_id, "pid", "command") for worker_id in ids}
    ports = [worker.engine_ports[0] for worker in run.get_workers("server")]
    assert len(set(ports)) == 2
    for pid, worker in zip(pids.values(), run.get_workers("target"), strict=True):
        with open(f"/proc/{pid}/environ") as file:
            environment = dict(
                each.split("=", 1) for each in file.read().split("\0") if "=" in each
            )
        assert environment["CUDA_VISIBLE_DEVICES"] == ",".join(worker.devices)
        with open(f"/proc/{pid}/cmdline") as file:
            assert file.read().split("\0")[-2] in ports
    run.delete_workers("server")
    wait_gone(pids)
    assert len(run.get_workers("target")) == 2
