"""Tests of shortfalls: the reason why jobs do not fit, and the smallest change that helps."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from helmsman._base.event_loop import Deadline
from helmsman.api import errors
from helmsman.api.plan import Plan, Shortfall
from helmsman.api.scheduler import Job, SchedulingSpec
from helmsman.controller._placement.admission import advise, busy, require_feasible
from helmsman.controller._placement.planner import plan_jobs
from helmsman.controller._placement.resources import ClusterSnapshot
from tests.unit.controller.placement.builders import beside, cluster, job, node

SMALL = node("10.0.0.1", cpu=4, gpu=1, labels={"rack": "a"})
LARGE = node("10.0.0.2", hostname="big", cpu=64, gpu=4, labels={"rack": "b"})
TWO = cluster(SMALL, LARGE)
WHOLE = [node(f"n{index}") for index in range(4)]
RACKS = [
    node("a", gpu=4, labels={"rack": "a"}),
    *[node(f"b{index}", labels={"rack": "b"}) for index in range(3)],
]
SERVERS = msgspec.structs.replace(beside("servers", 8, "train"), tasks=[SchedulingSpec(gpu=8)])
MIXED = Job(
    role="r",
    replicas=3,
    tasks=[SchedulingSpec(gpu=9), SchedulingSpec(gpu=1), SchedulingSpec(gpu=10)],
)


def shortfall(snapshot: ClusterSnapshot, *jobs: Job) -> Shortfall:
    """Return the reason and the advice for jobs that do not fit."""
    outcome = plan_jobs(snapshot, jobs, of="total")
    assert isinstance(outcome, Shortfall)
    return advise(outcome, snapshot, jobs)


@pytest.mark.parametrize(
    ("spec", "missing", "change"),
    [
        ({"gpu": 6}, "2 GPU", "Set SchedulingSpec.gpu to 4"),
        ({"cpu": 100, "gpu": 1}, "36 CPU", "Set SchedulingSpec.cpu to 64"),
        ({"mem": 120}, "20 GB memory", "Set SchedulingSpec.mem to 100"),
        (
            {"resources": {"license": 2}},
            "2 license",
            "Set SchedulingSpec.resources to {'license': 0}",
        ),
        (
            {"gpu": 5, "cpu": 65},
            "1 GPU, 1 CPU",
            "Set SchedulingSpec.cpu to 64 and set SchedulingSpec.gpu to 4",
        ),
    ],
)
@pytest.mark.parametrize("strategy", ["shared", "separate"])
def test_shortfall_worker_larger_than_any_node(
    strategy: str, spec: dict[str, Any], missing: str, change: str
) -> None:
    found = shortfall(TWO, job("r", 1, strategy, **spec))
    assert (found.kind, found.missing_text) == ("bundle", missing)
    assert found.change.startswith(change)
    if "license" not in missing and "memory" not in missing:
        assert found.best_node == "big (10.0.0.2)"
        assert "on the best-fitting of 2 nodes, big (10.0.0.2)" in found.observed
    assert "a worker with" in found.requested


@pytest.mark.parametrize(
    ("nodes", "jobs", "kind", "change"),
    [
        # one worker or instance
        (
            WHOLE[:2],
            [job("server", 1, "separate", gpu=16)],
            "bundle",
            ".*to 'deferred', whose instances may span nodes",
        ),
        (
            WHOLE[:2],
            [job("r", 5, "separate", gpu=9)],
            "bundle",
            "Set SchedulingSpec.gpu to 8 and set Job.replicas to 2$",
        ),
        (WHOLE[:3], [MIXED], "bundle", "Set SchedulingSpec.gpu to 8$"),  # every spec is reduced
        (
            WHOLE,
            [job("s", 1, "deferred", gpu=40)],
            "together",
            "Set SchedulingSpec.gpu to 32, or add 1 node like n0",
        ),
        (
            [node("a", gpu=0)],
            [job("r", 1, gpu=1)],
            "bundle",
            (
                "Add nodes with accelerators; the nodes that 'r' may use have none, or set "
                "SchedulingSpec.gpu to 0$"
            ),
        ),
        ([], [job("r", 1, gpu=1)], "selector", "Add nodes$"),
        # one job
        (WHOLE[:2], [job("r", 17, gpu=1)], "together", "Set Job.replicas to 16, or add 1 node"),
        (WHOLE[:2], [job("r", 33, gpu=1)], "together", "Set Job.replicas to 16, or add 3 node"),
        (WHOLE[:2], [job("r", 56, gpu=1)], "together", "Set Job.replicas to 16, or add 5 node"),
        (
            WHOLE,
            [job("r", 5, "separate", gpu=5)],
            "pieces",
            r"Set Job.replicas to 4, or add 1 node like n0 \(8 GPU, 64 CPU, 100 GB memory\)",
        ),
        (
            RACKS,
            [job("r", 3, "separate", gpu=4, node_labels={"rack": "a"})],
            "together",
            r".*add 2 nodes like a \(4 GPU",
        ),
        # new nodes are not in a nodelist
        (
            WHOLE,
            [job("r", 3, "separate", gpu=8, nodelist=["n0", "n1"])],
            "together",
            "Set Job.replicas to 2$",
        ),
        # several jobs: one is reduced, with its colocated jobs, so that most replicas remain
        (
            WHOLE,
            [job("train", 16, gpu=1), job("rollout", 5, "separate", gpu=4)],
            "together",
            "Set Job.replicas of 'rollout' to 4, or add 1 node",
        ),
        (
            WHOLE,
            [job("train", 64, gpu=1), SERVERS],
            "together",
            "Set Job.replicas of 'train' to 32 and of 'servers' to 4, or add 4 nodes",
        ),
    ],
)
def test_advise_names_the_smallest_change(
    nodes: list[Any], jobs: list[Job], kind: str, change: str
) -> None:
    found = shortfall(cluster(*nodes), *jobs)
    assert found.kind == kind
    assert re.match(change, found.change), found.change


def test_shortfall_facts() -> None:
    assert shortfall(cluster(*WHOLE[:2]), job("r", 33, gpu=1)).missing_text == "17 GPU"
    assert isinstance(plan_jobs(cluster(*WHOLE[:2]), [job("r", 16, gpu=1)]), Plan)
    assert "5 of 5 GPU" in shortfall(cluster(*WHOLE), job("r", 5, "separate", gpu=5)).requested
    together = shortfall(
        cluster(*WHOLE), job("train", 16, gpu=1), job("rollout", 5, "separate", gpu=4)
    )
    assert together.role == "train and rollout"
    assert shortfall(cluster(), job("r", 1, gpu=1)).requested == "a node"


@pytest.mark.parametrize(
    ("snapshot", "spec", "facts"),
    [
        (
            TWO,
            {"node_labels": {"rack": "c"}},
            ["rack='c'", "values of 'rack' there: a, b", "SchedulingSpec.node_labels"],
        ),
        (
            TWO,
            {"node_labels": {"zone": "x"}},
            ["zone='x'", "no node has the label 'zone'", "SchedulingSpec.node_labels"],
        ),
        (
            TWO,
            {"accelerator_type": "H9000"},
            ["accelerator_type:H9000", "there: none", "SchedulingSpec.accelerator_type"],
        ),
        (
            TWO,
            {"nodelist": ["gpu-17"]},
            ["nodelist gpu-17", "10.0.0.1, big (10.0.0.2)", "SchedulingSpec.nodelist"],
        ),
        (
            TWO,
            {"node_labels": {"rack": "a"}, "exclude": ["10.0.0.1"]},
            [
                "exclude 10.0.0.1",
                "rack='a'",
                "SchedulingSpec.exclude or SchedulingSpec.node_labels",
            ],
        ),
        (cluster(), {}, ["the cluster has no nodes"]),
    ],
)
def test_shortfall_selectors(
    snapshot: ClusterSnapshot, spec: dict[str, Any], facts: list[str]
) -> None:
    text = str(shortfall(snapshot, job("r", 1, **spec)))
    assert [fact for fact in facts if fact not in text] == []


def test_errors_contain_the_reason() -> None:
    with pytest.raises(errors.PlacementInfeasibleError) as caught:
        require_feasible(TWO, [job("r", 1, gpu=6)], ())
    assert str(caught.value) == (
        "role 'r' cannot be placed on this cluster, now or later: requested a worker with 6 GPU, "
        "1 CPU; observed at most 4 "
        "GPU, 64 CPU on the best-fitting of 2 nodes, big (10.0.0.2); short of 2 GPU. Set "
        "SchedulingSpec.gpu to 4."
    )
    require_feasible(TWO, [job("r", 5, gpu=1)], ())
    held = cluster(msgspec.structs.replace(LARGE, available={"GPU": 1.0, "CPU": 64.0}))
    error = busy(
        [job("one", 2, gpu=1), job("two", 1, gpu=2)], held, "another run (3 GPU)", Deadline(0.0)
    )
    for fact in (
        "'one and two'",
        "requested 4 GPU, 3 CPU",
        "free now 1 GPU, 64 CPU",
        "another run (3 GPU)",
        "Timeouts.start_s",
    ):
        assert fact in str(error)
