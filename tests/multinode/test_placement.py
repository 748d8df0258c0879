"""Jobs on several nodes: placed as planned, or refused at once with what exactly is missing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller._ray_backend import placement_groups
from helmsman.controller._ray_backend.scheduler import RayScheduler
from tests.contract.engines import Counter
from tests.contract.helpers import Engine
from tests.multinode.conftest import Nodes

pytestmark = pytest.mark.usefixtures("left_as_found")


def _spec(**fields: Any) -> SchedulingSpec:
    return SchedulingSpec(**{"cpu": 1, **fields})


def _devices(run: RayScheduler, role: str) -> list[tuple[str, tuple[str, ...]]]:
    return [(worker.node_id, tuple(worker.devices)) for worker in run.get_workers(role)]


# --- never ----------------------------------------------------------------------------------------


@pytest.mark.timeout(30)  # start_s is 90: what is not refused at once fails
@pytest.mark.parametrize(
    ("strategy", "fields", "replicas", "facts"),
    [
        ("shared", {"gpu": 2}, 11, ["GPU", "Job.replicas"]),
        ("separate", {"gpu": 9}, 1, ["9 GPU", "1 GPU", "SchedulingSpec.gpu"]),
        ("deferred", {"cpu": 100}, 1, ["100 CPU", "68 CPU", "SchedulingSpec.cpu"]),
        ("shared", {"mem": 65}, 1, ["65 GB", "1 GB", "SchedulingSpec.mem"]),
        ("separate", {"node_labels": {"rack": "c"}}, 1, ["rack", "'c'", "a", "b"]),
        ("deferred", {"resources": {"license": 2}}, 1, ["license", "SchedulingSpec.resources"]),
        ("shared", {"accelerator_type": "H9000"}, 1, ["H9000"]),
        ("separate", {"nodelist": ["gpu-17"]}, 1, ["gpu-17"]),
        ("deferred", {"cpu": 30, "gpu": 1}, 4, ["CPU", "Job.replicas"]),
    ],
)
def test_create_workers_infeasible(
    run: RayScheduler, strategy: Any, fields: dict[str, Any], replicas: int, facts: list[str]
) -> None:
    spec = _spec(ray_placement_strategy=strategy, **fields)
    with pytest.raises(errors.PlacementInfeasibleError) as caught:
        run.create_workers(Job(role="big", replicas=replicas, tasks=[spec]))
    for fact in ("'big'", *facts):
        assert fact in str(caught.value)
    assert run.status() == []


@pytest.mark.timeout(30)
def test_create_workers_infeasible_together(run: RayScheduler) -> None:
    half = Job(role="one", replicas=12, tasks=[_spec(gpu=1)])
    with pytest.raises(errors.PlacementInfeasibleError, match="20 GPU"):
        run.create_workers([half, msgspec.structs.replace(half, role="two")])
    assert run.status() == []


# --- where the planner says -----------------------------------------------------------------------


def test_placement_follows_plan(run: RayScheduler) -> None:
    jobs = [
        Job(role="train", replicas=4, tasks=[_spec(gpu=1)]),
        Job(role="rollout", replicas=2, tasks=[_spec(gpu=4, ray_placement_strategy="separate")]),
        Job(role="reward", replicas=2, tasks=[_spec()]),
    ]
    plan = run.plan(jobs)
    assert run.create_workers(jobs) == [
        worker.worker_id for role in plan.roles for worker in role.workers
    ]
    for role in plan.roles:
        assert [(worker.node_id, worker.devices) for worker in role.workers] == _devices(
            run, role.role
        )
    assert len({node for node, _ in _devices(run, "train")}) == 1, "the whole group on one node"
    head = {worker.node_id for worker in run.get_workers("reward")}
    assert not head & {node for role in ("train", "rollout") for node, _ in _devices(run, role)}, (
        "no CPU of a GPU node"
    )
    for worker in run.get_workers("rollout"):
        masks = Engine.create(run, worker.id, Counter).call("environ", "CUDA_VISIBLE_DEVICES")
        assert masks == {"CUDA_VISIBLE_DEVICES": ",".join(worker.devices)}, (
            "what it sees is what is told of it"
        )
    run.delete_workers()


def test_placement_rank_order(run: RayScheduler) -> None:
    # Every other device of a node is held first, so Ray hands out the rest in an order of its own.
    small = next(node.node_id for node in run.nodes() if node.num_devices == 4)
    run.create_workers(
        [Job(role=f"one-{index}", tasks=[_spec(gpu=1, nodelist=[small])]) for index in range(4)]
    )
    for index in (2, 0):
        run.delete_workers(f"one-{index}")
    run.create_workers(
        Job(role="train", replicas=10, tasks=[_spec(gpu=1, node_labels={"rack": "b"})])
    )
    placed = _devices(run, "train")
    order = [node for node, _ in placed]
    assert order == sorted(order, key=order.index), "ranks of one node are neighbours"
    for node in set(order):
        ids = [int(devices[0]) for where, devices in placed if where == node]
        assert ids == sorted(ids)
    assert len(set(placed)) == 10
    run.delete_workers()


def test_placement_selectors(nodes: Nodes, run: RayScheduler) -> None:
    import ray

    racks = {node["NodeID"]: node["Labels"].get("rack") for node in ray.nodes()}
    jobs = {
        "label": (_spec(gpu=1, node_labels={"rack": "a"}), {"a"}),
        "not": (_spec(gpu=1, node_labels={"rack": "!a"}), {"b"}),
        "either": (_spec(gpu=8, node_labels={"rack": "in(b, c)"}), {"b"}),
        "license": (_spec(resources={"license": 1}), {"b"}),
    }
    for role, (spec, expected) in jobs.items():
        run.create_workers(Job(role=role, tasks=[spec]))
        assert {racks[node] for node, _ in _devices(run, role)} == expected
        run.delete_workers(role)


@pytest.mark.parametrize(
    ("packing", "num_nodes"), [("pack", 1), ("spread", 3), ("strict_spread", 3)]
)
def test_placement_packing(run: RayScheduler, packing: Any, num_nodes: int) -> None:
    run.create_workers(Job(role="spread", replicas=3, tasks=[_spec(gpu=1, node_packing=packing)]))
    assert len({node for node, _ in _devices(run, "spread")}) == num_nodes


def test_placement_instance_over_nodes(run: RayScheduler) -> None:
    import json

    spec = _spec(cpu=4, gpu=16, ray_placement_strategy="deferred")
    (worker,) = run.create_workers(Job(role="server", tasks=[spec]))
    (place,) = run.get_workers("server")
    assert len(place.devices) == 8
    engine = Engine.create(run, worker, Counter)
    seen = engine.call("environ", "CUDA_VISIBLE_DEVICES", "HELMSMAN_INSTANCE_DEVICES")
    assert seen["CUDA_VISIBLE_DEVICES"] == ",".join(place.devices)
    instance = json.loads(seen["HELMSMAN_INSTANCE_DEVICES"])
    assert [(address, len(ids)) for address, ids in instance] == [(place.ip, 8), (place.ip, 8)]
    assert engine.call("apply", _take_devices_of_the_group) == [8, 8], (
        "the devices are the server's to take"
    )
    (sibling,) = run.fork_workers("beside", "server")
    assert Engine.create(run, sibling, Counter).call("environ", *seen) == seen


def _die() -> None:
    """A task whose process is killed, as by the system's memory killer."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_placement_instance_whose_devices_are_not_reported(
    run: RayScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement_groups, "granted_here", _die)
    spec = _spec(cpu=4, gpu=16, ray_placement_strategy="deferred")
    with pytest.raises(errors.WorkerStartError) as caught:
        run.create_workers(Job(role="server", tasks=[spec]))
    assert caught.value.worker_id == "server/0"
    assert "Ray did not report the devices that a placement group was granted" in str(caught.value)
    assert run.status() == []


def _take_devices_of_the_group() -> list[int]:
    """What a server does that starts workers of its own in the group of its instance."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = ray.util.get_current_placement_group()

    @ray.remote(num_cpus=0, num_gpus=8)
    def num_devices() -> int:
        return len(ray.get_runtime_context().get_accelerator_ids()["GPU"])

    strategies = [PlacementGroupSchedulingStrategy(group, index) for index in range(2)]  # type: ignore[arg-type]
    return list(
        ray.get(
            [num_devices.options(scheduling_strategy=each).remote() for each in strategies],
            timeout=60,
        )
    )


def test_placement_deferred_devices_distinct(run: RayScheduler) -> None:
    spec = _spec(gpu=4, ray_placement_strategy="deferred", node_labels={"rack": "a"})
    run.create_workers(Job(role="server", replicas=2, tasks=[spec]))
    one, two = _devices(run, "server")
    assert one[0] == two[0]
    assert sorted((*one[1], *two[1])) == [str(index) for index in range(8)]


def test_placement_without_cpus(run: RayScheduler) -> None:
    run.create_workers(
        Job(role="cpus", replicas=3, tasks=[_spec(cpu=32, node_packing="strict_spread")])
    )
    run.create_workers(
        Job(role="gpus", replicas=5, tasks=[_spec(cpu=0, gpu=4, ray_placement_strategy="separate")])
    )
    assert len(set(_devices(run, "gpus"))) == 5


def test_scheduler_nodes_missing(make_run: Callable[..., RayScheduler]) -> None:
    from helmsman.api.scheduler import Timeouts

    with pytest.raises(errors.NodesMissingError) as caught:
        make_run(num_nodes=9, timeouts=Timeouts(start_s=0.1))
    assert caught.value.num_expected == 9
    assert len(caught.value.present) == 4
    assert "8 GPU" in str(caught.value)
