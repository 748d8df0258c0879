"""Tests that jobs on several nodes are placed as planned, or refused with the missing resources."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job
from helmsman.controller._scheduler.ray.scheduler import RayScheduler
from tests.contract.engines import Counter
from tests.contract.helpers import Engine
from tests.multinode.conftest import Nodes
from tests.multinode.jobs import cpu_spec, devices_of

pytestmark = pytest.mark.usefixtures("left_as_found")


# --- refusals -------------------------------------------------------------------------------------


INFEASIBLE: list[tuple[Any, dict[str, Any], int, list[str]]] = [
    ("shared", {"gpu": 2}, 11, ["GPU", "Job.replicas"]),
    ("separate", {"gpu": 9}, 1, ["9 GPU", "1 GPU", "SchedulingSpec.gpu"]),
    ("deferred", {"cpu": 100}, 1, ["100 CPU", "68 CPU", "SchedulingSpec.cpu"]),
    ("shared", {"mem": 65}, 1, ["65 GB", "1 GB", "SchedulingSpec.mem"]),
    ("separate", {"node_labels": {"rack": "c"}}, 1, ["rack", "'c'", "a", "b"]),
    ("deferred", {"resources": {"license": 2}}, 1, ["license", "SchedulingSpec.resources"]),
    ("shared", {"accelerator_type": "H9000"}, 1, ["H9000"]),
    ("separate", {"nodelist": ["gpu-17"]}, 1, ["gpu-17"]),
    ("deferred", {"cpu": 30, "gpu": 1}, 4, ["CPU", "Job.replicas"]),
]


@pytest.mark.timeout(30)  # start_s is 180, so a job that waits fails
def test_create_workers_infeasible(run: RayScheduler) -> None:
    for strategy, fields, replicas, facts in INFEASIBLE:
        spec = cpu_spec(ray_placement_strategy=strategy, **fields)
        with pytest.raises(errors.PlacementInfeasibleError) as caught:
            run.create_workers(Job(role="big", replicas=replicas, tasks=[spec]))
        for fact in ("'big'", *facts):
            assert fact in str(caught.value)
    half = Job(role="one", replicas=12, tasks=[cpu_spec(gpu=1)])
    with pytest.raises(errors.PlacementInfeasibleError, match="20 GPU"):
        run.create_workers([half, msgspec.structs.replace(half, role="two")])
    assert run.status() == []


# --- placements --------------------------------------------------------------------------------


def test_placement_follows_plan(run: RayScheduler) -> None:
    jobs = [
        Job(role="train", replicas=4, tasks=[cpu_spec(gpu=1)]),
        Job(role="rollout", replicas=2, tasks=[cpu_spec(gpu=4, ray_placement_strategy="separate")]),
        Job(role="reward", replicas=2, tasks=[cpu_spec()]),
    ]
    plan = run.plan(jobs)
    assert run.create_workers(jobs) == [
        worker.worker_id for role in plan.roles for worker in role.workers
    ]
    for role in plan.roles:
        assert [(worker.node_id, worker.devices) for worker in role.workers] == devices_of(
            run, role.role
        )
    assert len({node for node, _ in devices_of(run, "train")}) == 1, "the whole group on one node"
    head = {worker.node_id for worker in run.get_workers("reward")}
    assert not head & {
        node for role in ("train", "rollout") for node, _ in devices_of(run, role)
    }, "workers without GPU use no CPU of a GPU node"
    for worker in run.get_workers("rollout"):
        masks = Engine.create(run, worker.id, Counter).call("environ", "CUDA_VISIBLE_DEVICES")
        assert masks == {"CUDA_VISIBLE_DEVICES": ",".join(worker.devices)}, (
            "the worker sees the reported devices"
        )
    run.delete_workers()


def test_placement_rank_order(run: RayScheduler) -> None:
    # Every other device of a node is held first, so Ray assigns the rest in an order of its own.
    small = next(node.node_id for node in run.nodes() if node.num_devices == 4)
    run.create_workers(
        [Job(role=f"one-{index}", tasks=[cpu_spec(gpu=1, nodelist=[small])]) for index in range(4)]
    )
    for index in (2, 0):
        run.delete_workers(f"one-{index}")
    run.create_workers(
        Job(role="train", replicas=10, tasks=[cpu_spec(gpu=1, node_labels={"rack": "b"})])
    )
    placed = devices_of(run, "train")
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
        "label": (cpu_spec(gpu=1, node_labels={"rack": "a"}), {"a"}),
        "not": (cpu_spec(gpu=1, node_labels={"rack": "!a"}), {"b"}),
        "either": (cpu_spec(gpu=8, node_labels={"rack": "in(b, c)"}), {"b"}),
        "license": (cpu_spec(resources={"license": 1}), {"b"}),
    }
    for role, (spec, expected) in jobs.items():
        run.create_workers(Job(role=role, tasks=[spec]))
        assert {racks[node] for node, _ in devices_of(run, role)} == expected
        run.delete_workers(role)


def test_placement_packing(run: RayScheduler) -> None:
    packings: dict[Any, int] = {"pack": 1, "spread": 3, "strict_spread": 3}
    for packing, num_nodes in packings.items():
        job = Job(role="packed", replicas=3, tasks=[cpu_spec(gpu=1, node_packing=packing)])
        run.create_workers(job)
        assert len({node for node, _ in devices_of(run, "packed")}) == num_nodes
        run.delete_workers("packed")


def test_placement_instance_over_nodes(run: RayScheduler) -> None:
    import json

    spec = cpu_spec(cpu=4, gpu=16, ray_placement_strategy="deferred")
    (worker,) = run.create_workers(Job(role="server", tasks=[spec]))
    (place,) = run.get_workers("server")
    assert len(place.devices) == 8
    engine = Engine.create(run, worker, Counter)
    seen = engine.call("environ", "CUDA_VISIBLE_DEVICES", "HELMSMAN_INSTANCE_DEVICES")
    assert seen["CUDA_VISIBLE_DEVICES"] == ",".join(place.devices)
    instance = json.loads(seen["HELMSMAN_INSTANCE_DEVICES"])
    assert [(address, len(ids)) for address, ids in instance] == [(place.ip, 8), (place.ip, 8)]
    assert engine.call("apply", _take_devices_of_the_group) == [8, 8], (
        "the server may use these devices"
    )
    (sibling,) = run.fork_workers("beside", "server")
    assert Engine.create(run, sibling, Counter).call("environ", *seen) == seen


def _take_devices_of_the_group() -> list[int]:
    """Start a worker in each bundle of the group of this instance, and count its devices."""
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


def test_scheduler_nodes_missing(make_run: Callable[..., RayScheduler]) -> None:
    from helmsman.api.scheduler import Timeouts

    with pytest.raises(errors.NodesMissingError) as caught:
        make_run(num_nodes=9, timeouts=Timeouts(start_s=0.1))
    assert caught.value.num_expected == 9
    assert len(caught.value.present) == 4
    assert "8 GPU" in str(caught.value)
