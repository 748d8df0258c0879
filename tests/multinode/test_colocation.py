"""Siblings and aliases on every kind of target, on nodes of both kinds of accelerators and on
CPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, SchedulingSpec, SchedulingStrategy, Worker
from helmsman.controller._ray_backend.scheduler import RayScheduler
from tests.contract.engines import Counter
from tests.contract.helpers import Engine, wait_gone
from tests.multinode.conftest import Nodes, npu_node

pytestmark = pytest.mark.usefixtures("left_as_found")

MASKS = {"GPU": "CUDA_VISIBLE_DEVICES", "NPU": "ASCEND_RT_VISIBLE_DEVICES"}


@pytest.fixture(scope="module")
def nodes(fleet: Nodes) -> Iterator[Nodes]:
    """Two nodes of each kind, told apart by a label; gpu counts whatever the chosen nodes have."""
    with fleet.added(*[npu_node(labels={"kind": "NPU"}) for _ in range(2)]):
        yield fleet


@pytest.fixture(scope="module")
def module_run(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayScheduler]:
    """One run for the whole matrix."""
    with RayScheduler(log_dir=tmp_path_factory.mktemp("logs")) as run:
        yield run


@pytest.fixture
def run(module_run: RayScheduler) -> Iterator[RayScheduler]:
    """That run, without workers at the end of the test."""
    yield module_run
    module_run.delete_workers()


def _target(kind: str, strategy: Any, replicas: int, gpu: int) -> Job:
    labels = {"kind": kind} if kind != "CPU" else {}
    spec = SchedulingSpec(
        cpu=1, gpu=gpu if kind != "CPU" else 0, ray_placement_strategy=strategy, node_labels=labels
    )
    return Job(role="target", replicas=replicas, tasks=[spec])


def _beside(replicas: int, fork: bool, **fields: Any) -> Job:
    strategy = SchedulingStrategy(type="colocation", target="target", fork=fork)
    return Job(
        role="sibling",
        replicas=replicas,
        tasks=[SchedulingSpec(cpu=1, **fields)],
        scheduling_strategy=strategy,
    )


def _seen(run: RayScheduler, workers: list[Worker], kind: str, name: str) -> list[tuple[str, ...]]:
    """What an engine in each worker sees of the devices of a kind; no other kind may be seen."""
    found = []
    for worker in workers:
        masks = Engine.create(run, worker.id, Counter, name).call("environ", *MASKS.values())
        own = masks.pop(MASKS[kind]) if kind != "CPU" else ""
        assert set(masks.values()) <= {""}
        found.append(tuple(own.split(",")) if own else ())
    return found


@pytest.mark.parametrize(
    ("strategy", "fork", "kind"),
    [
        ("shared", True, "GPU"),
        ("separate", True, "NPU"),
        ("deferred", True, "GPU"),
        ("separate", True, "CPU"),
        ("deferred", False, "NPU"),
    ],
)
def test_fork_has_devices_of_target(
    run: RayScheduler, strategy: str, fork: bool, kind: str
) -> None:
    run.create_workers(_target(kind, strategy, replicas=2, gpu=4))
    run.create_workers(_beside(2, fork))
    target, siblings = run.get_workers("target"), run.get_workers("sibling")
    assert [(worker.node_id, worker.devices) for worker in siblings] == [
        (worker.node_id, worker.devices) for worker in target
    ]
    seen = _seen(run, siblings, kind, "there")
    assert seen == [tuple(worker.devices) for worker in target] == _seen(run, target, kind, "here")
    assert [len(ids) for ids in seen] == [0 if kind == "CPU" else 4] * 2
    pids = [
        {run.call_engine(worker.id, "pid", name) for worker in each}
        for each, name in ((target, "here"), (siblings, "there"))
    ]
    assert (pids[0] == pids[1]) is not fork
    run.delete_workers("sibling")
    assert [run.call_engine(worker.id, "add", "here") for worker in target] == [1, 1], (
        "the target lives on"
    )


@pytest.mark.parametrize(
    ("strategy", "kind"), [("shared", "GPU"), ("separate", "CPU"), ("deferred", "NPU")]
)
def test_fork_failure_leaves_target(run: RayScheduler, strategy: str, kind: str) -> None:
    run.create_workers(_target(kind, strategy, replicas=2, gpu=2))
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
    assert run.create_workers(_beside(2, fork=True)) == ["sibling/0", "sibling/1"], (
        "the next one starts"
    )


def test_fork_one_for_two_targets(run: RayScheduler) -> None:
    run.create_workers(_target("GPU", "shared", replicas=8, gpu=2))
    run.create_workers(_beside(4, fork=True, gpu=4))
    target, servers = run.get_workers("target"), run.get_workers("sibling")
    for index, server in enumerate(servers):
        share = target[2 * index : 2 * index + 2]
        assert {worker.node_id for worker in share} == {server.node_id}
        assert server.devices == [device for worker in share for device in worker.devices]
    assert _seen(run, servers, "GPU", "server") == [tuple(server.devices) for server in servers]
    run.delete_workers("sibling")
    assert len(run.get_workers("target")) == 8
    for replicas, message in (
        (1, r"keeps each replica on one node.*target/0 to target/7"),
        (3, "a divisor or a multiple of the 8 workers"),
    ):
        with pytest.raises(errors.InvalidSpecError, match=message):
            run.create_workers(_beside(replicas, fork=True))


def test_fork_two_for_one_target(run: RayScheduler) -> None:
    run.create_workers(_target("GPU", "separate", replicas=2, gpu=2))
    run.create_workers(_beside(4, fork=True, gpu=1))
    target, siblings = run.get_workers("target"), run.get_workers("sibling")
    assert [worker.devices for worker in siblings] == [
        [device] for worker in target for device in worker.devices
    ]
    with pytest.raises(errors.InvalidSpecError, match=r"gpu of replica 0 is 2; expected 1"):
        run.create_workers(msgspec.structs.replace(_beside(4, fork=True, gpu=2), role="greedy"))


@pytest.mark.parametrize(("strategy", "kind"), [("deferred", "GPU"), ("separate", "CPU")])
def test_fork_workers_command(run: RayScheduler, strategy: str, kind: str) -> None:
    run.create_workers(_target(kind, strategy, replicas=2, gpu=2))
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
