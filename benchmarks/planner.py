"""How long planning takes on large clusters, and how often a plan is found that is hard to find.

python benchmarks/planner.py
"""

from __future__ import annotations

import random
import time
from collections import Counter
from typing import Any

from helmsman.api.plan import Plan
from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller.cluster_snapshot import ClusterSnapshot, NodeState
from helmsman.controller.planner import plan_jobs


def cluster(num_nodes: int) -> ClusterSnapshot:
    """Nodes of eight GPUs."""
    total = {"CPU": 128.0, "GPU": 8.0, "memory": 1e12}
    nodes = [
        NodeState(node_id=f"n{index}", address=f"10.0.{index // 256}.{index % 256}", total=dict(total), available=dict(total))
        for index in range(num_nodes)
    ]
    return ClusterSnapshot(nodes=tuple(nodes))


def job(role: str, replicas: int, gpu: int, strategy: Any = "separate", **fields: Any) -> Job:
    """A job of replicas that are alike."""
    tasks = [SchedulingSpec(cpu=4, gpu=gpu, mem=10, ray_placement_strategy=strategy, **fields)]
    return Job(role=role, replicas=replicas, tasks=tasks)


SIZES: list[tuple[str, int, list[Job]]] = [
    ("2,000 instances of 4", 1250, [job("rollout", 2000, 4)]),
    ("three jobs", 1250, [job("train", 2000, 1, "shared"), job("rollout", 1500, 4), job("server", 100, 16, "deferred")]),
    ("full: one group of 1", 12500, [job("train", 100_000, 1, "shared")]),
    ("full: instances of 1", 12500, [job("rollout", 100_000, 1)]),
    ("full: instances of 16", 12500, [job("server", 6250, 16, "deferred")]),
    ("full: spread", 12500, [job("train", 100_000, 1, node_packing="spread")]),
    (
        "full: three jobs",
        12500,
        [job("train", 40_000, 1, "shared"), job("rollout", 10_000, 4), job("server", 1250, 16, "deferred")],
    ),
    ("one too many", 12500, [job("train", 100_001, 1)]),
]


def planted(rng: random.Random, num_nodes: int) -> tuple[ClusterSnapshot, list[Job]]:
    """Nodes cut at random into bundles without a remainder, and the jobs that ask for just these bundles."""
    nodes, bundles = [], Counter[tuple[int, int]]()
    for index in range(num_nodes):
        gpu, cpu = rng.choice([4, 8, 8]), rng.choice([32, 64])
        total = {"GPU": float(gpu), "CPU": float(cpu)}
        nodes.append(NodeState(node_id=f"n{index}", address=f"n{index}", total=total, available=total))
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


def timed(snapshot: ClusterSnapshot, jobs: list[Job]) -> tuple[bool, float]:
    """Whether a plan was found, and in how many seconds."""
    started = time.perf_counter()
    outcome = plan_jobs(snapshot, jobs)
    return isinstance(outcome, Plan), time.perf_counter() - started


def main() -> None:
    """Print both tables."""
    print(f"{'nodes':>6}  {'jobs':<24}{'plan':<7}seconds")
    for name, num_nodes, jobs in SIZES:
        found, seconds = timed(cluster(num_nodes), jobs)
        print(f"{num_nodes:>6}  {name:<24}{'yes' if found else 'no':<7}{seconds:.2f}")
    print(f"\n{'nodes':>6}  found of 100 that exist and leave nothing over; slowest, seconds")
    for num_nodes in (4, 8, 12, 20, 40):
        results = [timed(*planted(random.Random(seed), num_nodes)) for seed in range(100)]
        print(f"{num_nodes:>6}  {sum(found for found, _ in results):<5}{max(seconds for _, seconds in results):.2f}")


if __name__ == "__main__":
    main()
