"""Colocated jobs on targets of several kinds, and checks of their devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helmsman.api.scheduler import Job, SchedulingSpec, SchedulingStrategy, Worker
from helmsman.controller._scheduler.ray.scheduler import RayScheduler
from tests.contract.engines import Counter
from tests.contract.helpers import Engine
from tests.multinode.conftest import Nodes

MASKS = {"GPU": "CUDA_VISIBLE_DEVICES", "NPU": "ASCEND_RT_VISIBLE_DEVICES"}


@pytest.fixture(scope="module")
def module_run(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayScheduler]:
    """One run for all tests of a module."""
    with RayScheduler(log_dir=tmp_path_factory.mktemp("logs")) as run:
        yield run


@pytest.fixture
def run(module_run: RayScheduler) -> Iterator[RayScheduler]:
    """The run of the module, whose workers are deleted after the test."""
    yield module_run
    module_run.delete_workers()


def target_job(kind: str, strategy: Any, replicas: int, gpu: int) -> Job:
    labels = {"kind": kind} if kind != "CPU" else {}
    spec = SchedulingSpec(
        cpu=1, gpu=gpu if kind != "CPU" else 0, ray_placement_strategy=strategy, node_labels=labels
    )
    return Job(role="target", replicas=replicas, tasks=[spec])


def sibling_job(replicas: int, fork: bool, **fields: Any) -> Job:
    strategy = SchedulingStrategy(type="colocation", target="target", fork=fork)
    return Job(
        role="sibling",
        replicas=replicas,
        tasks=[SchedulingSpec(cpu=1, **fields)],
        scheduling_strategy=strategy,
    )


def devices_seen(
    run: RayScheduler, workers: list[Worker], kind: str, name: str
) -> list[tuple[str, ...]]:
    """Return the devices of a kind that each worker sees, and check that it sees no other kind."""
    found = []
    for worker in workers:
        masks = Engine.create(run, worker.id, Counter, name).call("environ", *MASKS.values())
        own = masks.pop(MASKS[kind]) if kind != "CPU" else ""
        assert set(masks.values()) <= {""}
        found.append(tuple(own.split(",")) if own else ())
    return found


def assert_fork_has_devices_of_target(
    run: RayScheduler, strategy: str, fork: bool, kind: str
) -> None:
    """Check that siblings have the devices of their target, which outlives them."""
    run.create_workers(target_job(kind, strategy, replicas=2, gpu=4))
    run.create_workers(sibling_job(2, fork))
    target, siblings = run.get_workers("target"), run.get_workers("sibling")
    assert [(worker.node_id, worker.devices) for worker in siblings] == [
        (worker.node_id, worker.devices) for worker in target
    ]
    seen = devices_seen(run, siblings, kind, "there")
    assert (
        seen
        == [tuple(worker.devices) for worker in target]
        == devices_seen(run, target, kind, "here")
    )
    assert [len(ids) for ids in seen] == [0 if kind == "CPU" else 4] * 2
    pids = [
        {run.call_engine(worker.id, "pid", name) for worker in each}
        for each, name in ((target, "here"), (siblings, "there"))
    ]
    assert (pids[0] == pids[1]) is not fork
    run.delete_workers("sibling")
    assert [run.call_engine(worker.id, "add", "here") for worker in target] == [1, 1], (
        "the target is still there"
    )
