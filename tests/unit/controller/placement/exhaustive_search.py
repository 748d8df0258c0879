"""Exhaustive search for placements on small random clusters, to compare the planner with."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from helmsman.api.plan import Plan
from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller._placement.bundles import Demand, splits
from helmsman.controller._placement.planner import plan_jobs
from helmsman.controller._placement.resources import ACCELERATORS, ClusterSnapshot
from tests.unit.controller.placement.builders import STRATEGIES, cluster, node


def exists(snapshot: ClusterSnapshot, jobs: Sequence[Job]) -> bool:
    """Return whether any assignment of bundles to nodes fits, by trying them all."""
    free = [
        {name: round(amount * 1000) for name, amount in node.available.items()}
        for node in snapshot.nodes
    ]
    return any(
        _exists(
            [(demand, replica) for demand in split.demands for replica in demand.replicas],
            free,
            frozenset(),
        )
        for split in splits(jobs, snapshot.nodes)
    )


def _exists(
    items: list[tuple[Demand, int]], free: list[dict[str, int]], used: frozenset[Any]
) -> bool:
    if not items:
        return True
    demand, replica = items[0]
    for index in demand.nodes:
        mark = (index, demand.job) if demand.apart else (index, demand.job, replica)
        left = {
            name: free[index].get(name, 0) - round(amount * 1000) for name, amount in demand.bundle
        }
        taken = mark in used and (demand.apart or demand.num_parts > 1)
        rest = [*free[:index], {**free[index], **left}, *free[index + 1 :]]
        if not taken and min(left.values()) >= 0 and _exists(items[1:], rest, used | {mark}):
            return True
    return False


def random_cluster(rng: random.Random) -> ClusterSnapshot:
    """Return up to four nodes of mixed shapes, some partly in use."""
    nodes = []
    for index in range(rng.randint(1, 4)):
        gpu, cpu = rng.choice([0, 2, 4, 4]), rng.choice([0, 2, 4, 8])
        free = (
            {"CPU": float(rng.randint(0, cpu)), "GPU": float(rng.randint(0, gpu))}
            if rng.random() < 0.6
            else None
        )
        nodes.append(
            node(f"n{index}", cpu=cpu, gpu=gpu, free=free, labels={"rack": rng.choice("ab")})
        )
    return cluster(*nodes)


def random_jobs(rng: random.Random) -> list[Job]:
    """Return up to three jobs with at most seven bundles in total."""
    jobs: list[Job] = []
    left = 7
    for index in range(rng.randint(1, 3)):
        replicas = rng.randint(1, min(3, left))
        strategy = rng.choice(STRATEGIES)
        tasks = [
            SchedulingSpec(
                cpu=rng.choice([0, 1, 2, 3]),
                gpu=rng.choice(
                    [0, 1, 2, 3, 4, 6, 8] if strategy == "deferred" else [0, 1, 2, 3, 4]
                ),
                mem=rng.choice([0, 0, 30, 60]),
                node_labels={"rack": rng.choice(["a", "!a"])} if rng.random() < 0.2 else {},
                node_packing=rng.choice(["pack", "pack", "spread", "strict_spread"]),
                ray_placement_strategy=strategy,  # type: ignore[arg-type]
            )
            for _ in range(rng.choice([1, replicas]))
        ]
        jobs.append(Job(role=f"r{index}", replicas=replicas, tasks=tasks))
        left -= replicas
        if left < 1:
            break
    return jobs


def check(snapshot: ClusterSnapshot, jobs: Sequence[Job], plan: Plan) -> None:
    """Check the promises that hold for every plan."""
    states = {state.node_id: state for state in snapshot.nodes}
    position = {name: index for index, name in enumerate(states)}
    used: dict[str, Counter[str]] = {name: Counter() for name in states}
    assigned: list[tuple[str, str]] = []
    largest = max(state.total.get(name, 0) for state in snapshot.nodes for name in ACCELERATORS)
    for job, role in zip(jobs, plan.roles, strict=True):
        assert [worker.worker_id for worker in role.workers] == [
            f"{job.role}/{rank}" for rank in range(job.replicas)
        ]
        for instance in role.instances:
            for bundle in instance.bundles:
                used[bundle.node_id].update(
                    {name: round(amount * 1000) for name, amount in bundle.resources.items()}
                )
                assigned += [(bundle.node_id, device) for device in bundle.devices]
            if len(instance.workers) == 1 and len(instance.bundles) > 1:
                assert len({bundle.node_id for bundle in instance.bundles}) == len(instance.bundles)
                assert (
                    job.spec(instance.index).gpu > largest or job.spec(instance.index).node_labels
                )
        for rank, worker in enumerate(role.workers):
            spec, rack = job.spec(rank), states[worker.node_id].labels["rack"]
            assert worker.num_devices == spec.gpu or len(role.instances[rank].bundles) > 1
            assert {"a": rack == "a", "!a": rack != "a", "": True}[spec.node_labels.get("rack", "")]
        if len(job.tasks) == 1:
            order = [
                (position[worker.node_id], list(map(int, worker.devices)))
                for worker in role.workers
            ]
            assert order == sorted(order), "ranks do not follow the order of nodes and devices"
        if job.spec(0).node_packing == "strict_spread":
            places = [bundle.node_id for instance in role.instances for bundle in instance.bundles]
            assert len(places) == len(set(places))
    assert len(assigned) == len(set(assigned)), "a device is assigned twice"
    for name, amounts in used.items():
        free = states[name].available
        assert all(
            amount <= round(free.get(resource, 0.0) * 1000) + 1e-3
            for resource, amount in amounts.items()
        )


def check_seed(seed: int) -> bool:
    """Plan random jobs and compare the plan with the exhaustive search.

    Returns:
        Whether the jobs fit.
    """
    rng = random.Random(seed)
    snapshot, jobs = random_cluster(rng), random_jobs(rng)
    plan = plan_jobs(snapshot, jobs)
    assert isinstance(plan, Plan) is exists(snapshot, jobs)
    if isinstance(plan, Plan):
        check(snapshot, jobs, plan)
    return isinstance(plan, Plan)


def check_seeds(seeds: range) -> None:
    """Check random clusters, of which between a tenth and nine tenths must have a plan."""
    share = sum(map(check_seed, seeds)) / len(seeds)
    assert 0.1 < share < 0.9
