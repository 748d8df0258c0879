"""Duration of planning on large clusters, and the share of hard plans that are found."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from benchmarks.harness import Pair, case
from benchmarks.world import World
from helmsman.api.plan import Plan
from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller._placement.planner import plan_jobs
from helmsman.controller._placement.resources import ClusterSnapshot, NodeState

DEVICES = 8
NUM_PLANTED = 60


def cluster(num_nodes: int) -> ClusterSnapshot:
    """Make a cluster of nodes with eight GPUs."""
    total = {"CPU": 128.0, "GPU": float(DEVICES), "memory": 1e12}
    nodes = [
        NodeState(
            node_id=f"n{index}",
            address=f"10.0.{index // 256}.{index % 256}",
            total=dict(total),
            available=dict(total),
        )
        for index in range(num_nodes)
    ]
    return ClusterSnapshot(nodes=tuple(nodes))


def job(role: str, replicas: int, gpu: int, strategy: Any = "separate", **fields: Any) -> Job:
    """Make a job of equal replicas."""
    tasks = [SchedulingSpec(cpu=4, gpu=gpu, mem=10, ray_placement_strategy=strategy, **fields)]
    return Job(role=role, replicas=replicas, tasks=tasks)


SIZES: dict[str, tuple[int, list[Job]]] = {
    "1250.instances_of_4": (1250, [job("rollout", 2000, 4)]),
    "1250.three_jobs": (
        1250,
        [
            job("train", 2000, 1, "shared"),
            job("rollout", 1500, 4),
            job("server", 100, 16, "deferred"),
        ],
    ),
    "12500.one_group": (12500, [job("train", 100_000, 1, "shared")]),
    "12500.instances_of_1": (12500, [job("rollout", 100_000, 1)]),
    "12500.instances_of_16": (12500, [job("server", 6250, 16, "deferred")]),
    "12500.spread": (12500, [job("train", 100_000, 1, node_packing="spread")]),
    "12500.three_jobs": (
        12500,
        [
            job("train", 40_000, 1, "shared"),
            job("rollout", 10_000, 4),
            job("server", 1250, 16, "deferred"),
        ],
    ),
    "12500.one_too_many": (12500, [job("train", 100_001, 1)]),
}


def first_fit(num_nodes: int, jobs: list[Job]) -> list[tuple[str, int, int]]:
    """Return (role, replica, node) for each device, by a loop that considers only the number of
    free devices.
    """
    free = [DEVICES] * num_nodes
    placed, node = [], 0  # type: ignore[var-annotated]
    for each in jobs:
        for replica in range(each.replicas):
            for _ in range(int(each.tasks[0].gpu)):
                while node < num_nodes and not free[node]:
                    node += 1
                if node == num_nodes:
                    return placed
                free[node] -= 1
                placed.append((each.role, replica, node))
    return placed


def _declare(name: str, num_nodes: int, jobs: list[Job]) -> None:
    @case(
        f"planner.{name}",
        unit="s",
        floor="a first-fit loop over free devices, which knows no other constraint",
    )
    def planned(world: World) -> Pair:
        snapshot = cluster(num_nodes)
        return Pair(
            ours=lambda: plan_jobs(snapshot, jobs),
            floor=lambda: first_fit(num_nodes, jobs),
            rounds=3,
            warm_up=0,
        )


for _name, (_num_nodes, _jobs) in SIZES.items():
    _declare(_name, _num_nodes, _jobs)


def planted(rng: random.Random, num_nodes: int) -> tuple[ClusterSnapshot, list[Job]]:
    """Divide nodes at random into bundles without a remainder.

    Returns the nodes, and the jobs that request exactly these bundles.
    """
    nodes, bundles = [], Counter[tuple[int, int]]()
    for index in range(num_nodes):
        gpu, cpu = rng.choice([4, 8, 8]), rng.choice([32, 64])
        total = {"GPU": float(gpu), "CPU": float(cpu)}
        nodes.append(
            NodeState(node_id=f"n{index}", address=f"n{index}", total=total, available=total)
        )
        while gpu:
            size = rng.choice([size for size in (1, 2, 3, 4, 5, 6, 8) if size <= gpu])
            cores = rng.randint(0, cpu) // 4 * 4 if rng.random() < 0.5 else 0
            bundles[size, cores] += 1
            gpu, cpu = gpu - size, cpu - cores
    jobs = [
        Job(
            role=f"{gpu}-{cpu}",
            replicas=count,
            tasks=[SchedulingSpec(cpu=cpu, gpu=gpu, ray_placement_strategy="separate")],
        )
        for (gpu, cpu), count in bundles.items()
    ]
    return ClusterSnapshot(nodes=tuple(nodes)), jobs


def _declare_planted(num_nodes: int) -> None:
    @case(
        f"planner.found.{num_nodes}",
        unit="plans",
        floor=f"{NUM_PLANTED} plans that exist and leave nothing over",
    )
    def found(world: World) -> Pair:
        puzzles = [planted(random.Random(seed), num_nodes) for seed in range(NUM_PLANTED)]
        return Pair(
            ours=lambda: sum(isinstance(plan_jobs(*puzzle), Plan) for puzzle in puzzles),
            floor=float(NUM_PLANTED),
            rounds=1,
            returns_figure=True,
            warm_up=0,
        )


for _num_nodes in (4, 12, 40):
    _declare_planted(_num_nodes)
