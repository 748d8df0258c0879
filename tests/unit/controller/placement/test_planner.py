"""Tests of plan_jobs: completeness, packing, selectors, ranks and colocation."""

from __future__ import annotations

from typing import Any

import pytest

from helmsman.api import errors
from helmsman.api.plan import Plan
from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller._placement.planner import plan_jobs
from helmsman.controller._placement.resources import NodeState
from tests.unit.controller.placement.builders import (
    STRATEGIES,
    beside,
    cluster,
    job,
    node,
    nodes_of,
    planned,
    where,
)
from tests.unit.controller.placement.exhaustive_search import check_seeds

NPU = node("n", gpu=0, extra={"NPU": 8.0})


def test_plan_jobs_finds_a_plan_if_one_exists() -> None:
    check_seeds(range(300))


# --- packing --------------------------------------------------------------------------------------

HALVES = [node("a", free={"GPU": 4}), node("b", free={"GPU": 4})]
MIXED = [node("f", free={"CPU": 0}), node("s", gpu=4), node("h", gpu=0)]
IN_USE = [node("a"), node("b", free={"GPU": 5}), node("c", free={"GPU": 2})]
PIECES = [node(f"n{index}", free={"GPU": 5.0}) for index in range(100)]
PARTLY_HELD = [node("a", free={"GPU": 4}), node("b"), node("c", free={"GPU": 4}), node("d")]


@pytest.mark.parametrize(
    ("nodes", "jobs", "expected"),
    [
        (PARTLY_HELD, [job("train", 8, gpu=1)], ["b"]),  # one node is better than two halves
        (PARTLY_HELD, [job("train", 4, gpu=1)], ["a"]),  # whole nodes stay free
        (PARTLY_HELD, [job("train", 12, gpu=1)], ["ab"]),
        (PARTLY_HELD, [job("train", 16, gpu=1)], ["bd"]),
        # single instances fill nodes in use before whole ones
        (
            IN_USE,
            [job("small", 2, "separate", gpu=2), job("large", 1, "separate", gpu=8)],
            ["bc", "a"],
        ),
        # workers without accelerators avoid nodes with accelerators
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
        # an instance never spans nodes
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
def test_plan_jobs_splits_instances_larger_than_a_node(
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


def test_plan_jobs_spec_of_each_rank() -> None:
    tasks = [SchedulingSpec(gpu=1, mem=50 if rank % 2 else 0) for rank in range(8)]
    role = planned(
        cluster(*[node(name, gpu=4) for name in "abcd"]), Job(role="r", replicas=8, tasks=tasks)
    )["r"]
    for rank, bundle in enumerate(role.instances[0].bundles):
        assert bundle.resources.get("memory", 0) == tasks[rank].mem * 1e9
    assert [worker.bundle for worker in role.workers] == list(range(8))
    assert [worker.node_id for worker in role.workers] == list("aaaabbbb"), (
        "neighbouring ranks share a node"
    )


def test_plan_jobs_assigns_free_devices() -> None:
    known = node("a", free={"GPU": 3}, free_devices=("1", "4", "GPU-7"))
    unknown = node("b", free={"GPU": 2})
    role = planned(cluster(known, unknown), job("r", 5, gpu=1))["r"]
    assert where(role) == [("a", ("1",)), ("a", ("4",)), ("a", ("GPU-7",)), ("b", ()), ("b", ())]
    assert [worker.num_devices for worker in role.workers] == [1] * 5


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


def test_plan_jobs_of_total_resources() -> None:
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
