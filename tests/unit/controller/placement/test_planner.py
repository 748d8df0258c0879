"""The planner against an exhaustive search on small clusters, and its rules on examples."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helmsman.api import errors
from helmsman.api.plan import Plan, PlannedRole
from helmsman.api.scheduler import Job, SchedulingSpec, SchedulingStrategy
from helmsman.controller._placement.bundles import Demand, splits
from helmsman.controller._placement.planner import plan_jobs
from helmsman.controller._placement.resources import (
    ACCELERATORS,
    ClusterSnapshot,
    NodeState,
    Resources,
)


def node(
    name: str, *, cpu: float = 64, gpu: int = 8, free: Resources | None = None, **fields: Any
) -> NodeState:
    """A node of GPUs, all free but for what ``free`` says."""
    total: Resources = {
        "CPU": cpu,
        "memory": 100e9,
        **({"GPU": float(gpu)} if gpu else {}),
        **fields.pop("extra", {}),
    }
    return NodeState(
        node_id=name, address=name, total=total, available={**total, **(free or {})}, **fields
    )


def cluster(*nodes: NodeState) -> ClusterSnapshot:
    """These nodes."""
    return ClusterSnapshot(nodes=nodes)


def job(role: str, replicas: int, strategy: Any = "shared", **spec: Any) -> Job:
    """A job of replicas that are alike."""
    tasks = [SchedulingSpec(**{"cpu": 1, **spec}, ray_placement_strategy=strategy)]
    return Job(role=role, replicas=replicas, tasks=tasks)


def planned(snapshot: ClusterSnapshot, *jobs: Job, **options: Any) -> dict[str, PlannedRole]:
    """The roles of the plan, which there must be."""
    plan = plan_jobs(snapshot, jobs, **options)
    assert isinstance(plan, Plan), str(plan)
    return {role.role: role for role in plan.roles}


def where(role: PlannedRole) -> list[tuple[str, tuple[str, ...]]]:
    """Node and devices of each rank."""
    return [(worker.node_id, worker.devices) for worker in role.workers]


def nodes_of(role: PlannedRole) -> set[str]:
    """All nodes that a role uses."""
    return {bundle.node_id for instance in role.instances for bundle in instance.bundles}


STRATEGIES = ("shared", "separate", "deferred")
NPU = node("n", gpu=0, extra={"NPU": 8.0})

# --- against all possibilities --------------------------------------------------------------------


def exists(snapshot: ClusterSnapshot, jobs: Sequence[Job]) -> bool:
    """Whether any assignment of bundles to nodes would do, by trying them all."""
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
    """Up to four nodes of mixed shapes, partly held."""
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
    """Up to three jobs of at most seven bundles together."""
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
    given: list[tuple[str, str]] = []
    largest = max(state.total.get(name, 0) for state in snapshot.nodes for name in ACCELERATORS)
    for asked, role in zip(jobs, plan.roles, strict=True):
        assert [worker.worker_id for worker in role.workers] == [
            f"{asked.role}/{rank}" for rank in range(asked.replicas)
        ]
        for instance in role.instances:
            for bundle in instance.bundles:
                used[bundle.node_id].update(
                    {name: round(amount * 1000) for name, amount in bundle.resources.items()}
                )
                given += [(bundle.node_id, device) for device in bundle.devices]
            if len(instance.workers) == 1 and len(instance.bundles) > 1:
                assert len({bundle.node_id for bundle in instance.bundles}) == len(instance.bundles)
                assert (
                    asked.spec(instance.index).gpu > largest
                    or asked.spec(instance.index).node_labels
                )
        for rank, worker in enumerate(role.workers):
            spec, rack = asked.spec(rank), states[worker.node_id].labels["rack"]
            assert worker.num_devices == spec.gpu or len(role.instances[rank].bundles) > 1
            assert {"a": rack == "a", "!a": rack != "a", "": True}[spec.node_labels.get("rack", "")]
        if len(asked.tasks) == 1:
            order = [
                (position[worker.node_id], list(map(int, worker.devices)))
                for worker in role.workers
            ]
            assert order == sorted(order), (
                "ranks in the order of nodes and devices, those of one node together"
            )
        if asked.spec(0).node_packing == "strict_spread":
            places = [bundle.node_id for instance in role.instances for bundle in instance.bundles]
            assert len(places) == len(set(places))
    assert len(given) == len(set(given)), "no device twice"
    for name, amounts in used.items():
        free = states[name].available
        assert all(
            amount <= round(free.get(resource, 0.0) * 1000) + 1e-3
            for resource, amount in amounts.items()
        )


def outcome(seed: int) -> bool:
    """Plan random jobs, compare with the exhaustive search and check the plan; returns whether
    there is one.
    """
    rng = random.Random(seed)
    snapshot, jobs = random_cluster(rng), random_jobs(rng)
    plan = plan_jobs(snapshot, jobs)
    assert isinstance(plan, Plan) is exists(snapshot, jobs)
    if isinstance(plan, Plan):
        check(snapshot, jobs, plan)
    return isinstance(plan, Plan)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.integers(0, 10**9))
def test_plan_jobs_finds_a_plan_if_one_exists(seed: int) -> None:
    outcome(seed)


@pytest.mark.slow
def test_plan_jobs_finds_plans_in_three_thousand_clusters() -> None:
    assert 300 < sum(map(outcome, range(3000))) < 2700, (
        "both outcomes are met often enough to mean something"
    )


# --- packing --------------------------------------------------------------------------------------

HALVES = [node("a", free={"GPU": 4}), node("b", free={"GPU": 4})]
MIXED = [node("f", free={"CPU": 0}), node("s", gpu=4), node("h", gpu=0)]
IN_USE = [node("a"), node("b", free={"GPU": 5}), node("c", free={"GPU": 2})]
PIECES = [node(f"n{index}", free={"GPU": 5.0}) for index in range(100)]
PARTLY_HELD = [node("a", free={"GPU": 4}), node("b"), node("c", free={"GPU": 4}), node("d")]


@pytest.mark.parametrize(
    ("nodes", "jobs", "expected"),
    [
        (PARTLY_HELD, [job("train", 8, gpu=1)], ["b"]),  # not in two halves
        (PARTLY_HELD, [job("train", 4, gpu=1)], ["a"]),  # no whole node is broken
        (PARTLY_HELD, [job("train", 12, gpu=1)], ["ab"]),
        (PARTLY_HELD, [job("train", 16, gpu=1)], ["bd"]),
        # single instances fill nodes in use before whole ones
        (
            IN_USE,
            [job("small", 2, "separate", gpu=2), job("large", 1, "separate", gpu=8)],
            ["bc", "a"],
        ),
        # workers without accelerators keep away from nodes with some
        (
            [node("a", cpu=8), node("h", gpu=0)],
            [job("reward", 2, cpu=8), job("train", 8, gpu=1)],
            ["h", "a"],
        ),
        (
            MIXED,
            [job("train", 8, cpu=0, gpu=1), job("server", 1, "separate", cpu=4, gpu=4)],
            ["f", "s"],
        ),
        *[
            ([node(n) for n in "abc"], [job("r", 5, s, gpu=1, node_packing="spread")], ["abc"])
            for s in ("shared", "separate")
        ],
        *[
            (
                [node(n) for n in "abc"],
                [job("r", 3, s, gpu=1, node_packing="strict_spread")],
                ["abc"],
            )
            for s in STRATEGIES
        ],
        *[
            ([node(n) for n in "abc"], [job("r", 4, s, gpu=1, node_packing="strict_spread")], None)
            for s in STRATEGIES
        ],
        # never straddles
        *[(HALVES, [job("server", 1, s, gpu=8)], None) for s in ("separate", "deferred")],
        (HALVES, [job("train", 8, gpu=1)], ["ab"]),
        # 60 + 60 bundles that fit in sum but not in pieces: the search ends without a plan
        (PIECES, [job("three", 60, "separate", gpu=3), job("four", 60, "separate", gpu=4)], None),
        (
            [node("g", gpu=4), NPU],
            [job("train", 8, gpu=1), job("server", 1, "separate", gpu=4)],
            ["n", "g"],
        ),
        # one job, one kind of accelerator
        (
            [node("g", gpu=4), NPU],
            [job("train", 12, gpu=1)],
            None,
        ),
    ],
)
def test_plan_jobs_packing(
    nodes: list[NodeState], jobs: list[Job], expected: list[str] | None
) -> None:
    plan = plan_jobs(cluster(*nodes), jobs)
    found = [nodes_of(role) for role in plan.roles] if isinstance(plan, Plan) else None
    assert found == (expected and list(map(set, expected)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gpu", "shapes", "parts"),
    [
        (8, [8, 8], [8]),
        (16, [8, 8], [8, 8]),
        (12, [8, 8], [6, 6]),
        (20, [8, 8, 8], [8, 8, 4]),
        (16, [8, 4, 4, 4, 4], [4, 4, 4, 4]),
        (9, [8, 8, 8], [3, 3, 3]),
        (4, [8], [4]),
    ],
)
def test_plan_jobs_cuts_instances_larger_than_a_node(
    gpu: int, shapes: list[int], parts: list[int]
) -> None:
    snapshot = cluster(*[node(f"n{index}", gpu=size) for index, size in enumerate(shapes)])
    role = planned(snapshot, job("server", 1, "deferred", cpu=4, mem=2, gpu=gpu))["server"]
    bundles = role.instances[0].bundles
    assert [bundle.resources for bundle in bundles] == [
        {"CPU": 4, "GPU": parts[0], "memory": 2e9},
        *({"GPU": part} for part in parts[1:]),
    ]
    assert [len(bundle.devices) for bundle in bundles] == parts
    assert len(nodes_of(role)) == len(parts)


# --- selectors ------------------------------------------------------------------------------------

RACKS = cluster(
    node(
        "10.0.0.1",
        hostname="gpu-1.cluster",
        labels={"rack": "a", "ray.io/accelerator-type": "H100"},
    ),
    node(
        "10.0.0.2",
        hostname="gpu-2.cluster",
        labels={"rack": "b"},
        extra={"accelerator_type:A100": 1.0},
    ),
    node("10.0.0.3", hostname="gpu-3.cluster", labels={"rack": "c"}, extra={"license": 1.0}),
)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"node_labels": {"rack": "b"}}, {"10.0.0.2"}),
        ({"node_labels": {"rack": "!b"}}, {"10.0.0.1", "10.0.0.3"}),
        ({"node_labels": {"rack": "in(a, c)"}}, {"10.0.0.1", "10.0.0.3"}),
        ({"node_labels": {"rack": "!in(a, c)"}}, {"10.0.0.2"}),
        ({"accelerator_type": "H100"}, {"10.0.0.1"}),
        ({"accelerator_type": "A100"}, {"10.0.0.2"}),
        ({"resources": {"license": 1}}, {"10.0.0.3"}),
        ({"nodelist": ["10.0.0.1", "gpu-2"]}, {"10.0.0.1", "10.0.0.2"}),
        ({"exclude": ["gpu-1.cluster"]}, {"10.0.0.2", "10.0.0.3"}),
    ],
)
def test_plan_jobs_selectors(spec: dict[str, Any], expected: set[str]) -> None:
    jobs = [
        job("r", len(expected) + more, gpu=8 if "resources" not in spec else 1, **spec)
        for more in (0, 1)
    ]
    assert nodes_of(planned(RACKS, jobs[0])["r"]) == expected
    assert not isinstance(plan_jobs(RACKS, jobs[1:]), Plan)


# --- ranks, devices, colocation -------------------------------------------------------------------


def test_plan_jobs_keeps_specs_of_ranks() -> None:
    tasks = [SchedulingSpec(gpu=1, mem=50 if rank % 2 else 0) for rank in range(8)]
    role = planned(
        cluster(*[node(name, gpu=4) for name in "abcd"]), Job(role="r", replicas=8, tasks=tasks)
    )["r"]
    for rank, bundle in enumerate(role.instances[0].bundles):
        assert bundle.resources.get("memory", 0) == tasks[rank].mem * 1e9
    assert [worker.bundle for worker in role.workers] == list(range(8))
    assert [worker.node_id for worker in role.workers] == list("aaaabbbb"), (
        "neighbouring ranks share nodes"
    )


def test_plan_jobs_assigns_free_devices() -> None:
    known = node("a", free={"GPU": 3}, free_devices=("1", "4", "GPU-7"))
    unknown = node("b", free={"GPU": 2})
    role = planned(cluster(known, unknown), job("r", 5, gpu=1))["r"]
    assert where(role) == [("a", ("1",)), ("a", ("4",)), ("a", ("GPU-7",)), ("b", ()), ("b", ())]
    assert [worker.num_devices for worker in role.workers] == [1] * 5


def beside(role: str, replicas: int, target: str) -> Job:
    """A job that is forked beside its target."""
    strategy = SchedulingStrategy(type="colocation", target=target, fork=True)
    return Job(role=role, replicas=replicas, scheduling_strategy=strategy)


def test_plan_jobs_colocation() -> None:
    snapshot = cluster(node("a", gpu=4), node("b", gpu=4))
    jobs = [beside("last", 2, "server"), beside("server", 2, "train"), job("train", 8, gpu=1)]
    roles = planned(snapshot, *jobs)
    assert (
        where(roles["last"])
        == where(roles["server"])
        == [("a", ("0", "1", "2", "3")), ("b", ("0", "1", "2", "3"))]
    )
    running = planned(snapshot, job("train", 8, gpu=1))["train"]
    held = cluster(node("a", gpu=4, free={"GPU": 0}), node("b", gpu=4, free={"GPU": 0}))
    assert where(planned(held, beside("late", 8, "train"), running=[running])["late"]) == where(
        running
    )
    with pytest.raises(errors.RoleNotFoundError, match="missing"):
        plan_jobs(snapshot, [beside("lost", 1, "missing")])
    with pytest.raises(errors.RoleNotFoundError):
        plan_jobs(snapshot, [beside("one", 1, "two"), beside("two", 1, "one")])


def test_plan_jobs_of_the_total() -> None:
    held = cluster(node("a", free={"GPU": 0}))
    assert not isinstance(plan_jobs(held, [job("r", 8, gpu=1)]), Plan)
    assert isinstance(plan_jobs(held, [job("r", 8, gpu=1)], of="total"), Plan)


def test_plan_table() -> None:
    snapshot = cluster(*[node(f"gpu-{index}") for index in range(4)], node("head", gpu=0))
    jobs = [
        job("train", 12, gpu=1, port_count=2),
        job("rollout", 1, "separate", gpu=4),
        job("server", 1, "deferred", gpu=16),
        job("reward", 2),
        beside("ref", 12, "train"),
    ]
    plan = plan_jobs(snapshot, jobs)
    assert isinstance(plan, Plan)
    rows = [line.split("  ") for line in plan.table().splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert cells[0] == ["role", "ranks", "node", "devices", "ports"]
    assert ["train", "0-3", "gpu-2", "0-3", "8"] in cells
    assert ["train", "4-11", "gpu-3", "0-7", "16"] in cells
    assert ["rollout", "0", "gpu-2", "4-7", "-"] in cells
    assert ["server", "0", "gpu-0 + gpu-1", "0-7 + 0-7", "-"] in cells
    assert ["reward", "0-1", "head", "-", "-"] in cells
    assert ["ref (beside train)", "4-11", "gpu-3", "0-7", "-"] in cells
