"""What is said of jobs that do not fit, and that the change it names is the smallest that would do."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from helmsman.api import errors
from helmsman.api.plan import Plan, Shortfall
from helmsman.api.scheduler import Job, SchedulingSpec, SchedulingStrategy
from helmsman.controller._aio.deadline import Deadline
from helmsman.controller._placement.admission import advise, busy, require_feasible
from helmsman.controller._placement.planner import plan_jobs
from helmsman.controller._placement.snapshot import ClusterSnapshot
from tests.controller.placement.test_planner import cluster, job, node

SMALL = node("10.0.0.1", cpu=4, gpu=1, labels={"rack": "a"})
LARGE = node("10.0.0.2", hostname="big", cpu=64, gpu=4, labels={"rack": "b"})
TWO = cluster(SMALL, LARGE)


def told(snapshot: ClusterSnapshot, *jobs: Job) -> Shortfall:
    """What is said of jobs that do not fit."""
    outcome = plan_jobs(snapshot, jobs, of="total")
    assert isinstance(outcome, Shortfall)
    return advise(outcome, snapshot, jobs)


@pytest.mark.parametrize(
    ("spec", "missing", "change"),
    [
        ({"gpu": 6}, "2 GPU", "Set SchedulingSpec.gpu to 4"),
        ({"cpu": 100, "gpu": 1}, "36 CPU", "Set SchedulingSpec.cpu to 64"),
        ({"mem": 120}, "20 GB memory", "Set SchedulingSpec.mem to 100"),
        ({"resources": {"license": 2}}, "2 license", "Set SchedulingSpec.resources to {'license': 0}"),
        ({"gpu": 5, "cpu": 65}, "1 GPU, 1 CPU", "Set SchedulingSpec.cpu to 64 and set SchedulingSpec.gpu to 4"),
    ],
)
@pytest.mark.parametrize("strategy", ["shared", "separate"])
def test_a_worker_larger_than_any_node(strategy: str, spec: dict[str, Any], missing: str, change: str) -> None:
    shortfall = told(TWO, job("r", 1, strategy, **spec))
    assert (shortfall.kind, shortfall.missing_text) == ("bundle", missing)
    assert shortfall.change.startswith(change)
    if "license" not in missing and "memory" not in missing:
        assert shortfall.best_node == "big (10.0.0.2)"
        assert "on the best-fitting of 2 nodes, big (10.0.0.2)" in shortfall.observed
    assert "a worker with" in shortfall.requested


def test_an_instance_that_could_span_nodes() -> None:
    snapshot = cluster(*[node(f"n{index}") for index in range(2)])
    shortfall = told(snapshot, job("server", 1, "separate", gpu=16))
    assert "to 'deferred', whose instances may span nodes" in shortfall.change


def test_a_smaller_worker_that_is_still_too_many() -> None:
    shortfall = told(cluster(node("a"), node("b")), job("r", 5, "separate", gpu=9))
    assert shortfall.change == "Set SchedulingSpec.gpu to 8 and set Job.replicas to 2"


@pytest.mark.parametrize(("replicas", "fits", "more"), [(17, 16, 1), (33, 16, 3), (16 + 8 * 5, 16, 5)])
def test_more_together_than_there_is(replicas: int, fits: int, more: int) -> None:
    snapshot = cluster(node("a"), node("b"))
    shortfall = told(snapshot, job("r", replicas, gpu=1))
    assert shortfall.kind == "together"
    assert shortfall.missing_text == f"{replicas - 16} GPU"
    assert f"Set Job.replicas to {fits}, or add {more} node" in shortfall.change
    assert isinstance(plan_jobs(snapshot, [job("r", fits, gpu=1)]), Plan)


def test_room_in_pieces_that_are_too_small() -> None:
    snapshot = cluster(*[node(f"n{index}") for index in range(4)])
    shortfall = told(snapshot, job("r", 5, "separate", gpu=5))
    assert shortfall.kind == "pieces"
    assert "5 of 5 GPU" in shortfall.requested
    assert shortfall.change.startswith("Set Job.replicas to 4, or add 1 node like n0 (8 GPU, 64 CPU, 100 GB memory)")


def test_several_jobs_are_cut_where_it_hurts_least() -> None:
    snapshot = cluster(*[node(f"n{index}") for index in range(4)])
    shortfall = told(snapshot, job("train", 16, gpu=1), job("rollout", 5, "separate", gpu=4))
    assert shortfall.role == "train and rollout"
    assert shortfall.change.startswith("Set Job.replicas of 'rollout' to 4, or add 1 node")


def test_a_role_and_those_colocated_with_it_are_cut_together() -> None:
    snapshot = cluster(*[node(f"n{index}") for index in range(4)])
    servers = Job(
        role="servers",
        replicas=8,
        tasks=[SchedulingSpec(gpu=8)],
        scheduling_strategy=SchedulingStrategy(type="colocation", target="train", fork=True),
    )
    shortfall = told(snapshot, job("train", 64, gpu=1), servers)
    assert shortfall.change.startswith("Set Job.replicas of 'train' to 32 and of 'servers' to 4, or add 4 nodes")


def test_more_nodes_are_like_one_that_the_job_may_use() -> None:
    snapshot = cluster(node("a", gpu=4, labels={"rack": "a"}), *[node(f"b{index}", labels={"rack": "b"}) for index in range(3)])
    shortfall = told(snapshot, job("r", 3, "separate", gpu=4, node_labels={"rack": "a"}))
    assert "add 2 nodes like a (4 GPU" in shortfall.change


def test_a_nodelist_is_not_met_by_new_nodes() -> None:
    snapshot = cluster(*[node(f"n{index}") for index in range(4)])
    assert told(snapshot, job("r", 3, "separate", gpu=8, nodelist=["n0", "n1"])).change == "Set Job.replicas to 2"


def test_specs_that_differ_are_each_cut() -> None:
    specs = [SchedulingSpec(gpu=9), SchedulingSpec(gpu=1), SchedulingSpec(gpu=10)]
    snapshot = cluster(*[node(f"n{index}") for index in range(3)])
    assert told(snapshot, Job(role="r", replicas=3, tasks=specs)).change == "Set SchedulingSpec.gpu to 8"


def test_an_instance_over_more_nodes_than_there_are() -> None:
    snapshot = cluster(*[node(f"n{index}") for index in range(4)])
    change = told(snapshot, job("s", 1, "deferred", gpu=40)).change
    assert change.startswith("Set SchedulingSpec.gpu to 32, or add 1 node like n0")


def test_no_accelerator_anywhere() -> None:
    change = told(cluster(node("a", gpu=0)), job("r", 1, gpu=1)).change
    assert change == "Add nodes with accelerators, of which those that 'r' may use have none, or set SchedulingSpec.gpu to 0"


def test_a_cluster_without_nodes() -> None:
    shortfall = told(cluster(), job("r", 1, gpu=1))
    assert (shortfall.requested, shortfall.change) == ("a node", "Add nodes")


@pytest.mark.parametrize(
    ("spec", "facts"),
    [
        ({"node_labels": {"rack": "c"}}, ["rack='c'", "values of 'rack' there: a, b", "SchedulingSpec.node_labels"]),
        ({"node_labels": {"zone": "x"}}, ["zone='x'", "no node has the label 'zone'", "SchedulingSpec.node_labels"]),
        ({"accelerator_type": "H9000"}, ["accelerator_type:H9000", "types there: none", "SchedulingSpec.accelerator_type"]),
        ({"nodelist": ["gpu-17"]}, ["nodelist gpu-17", "10.0.0.1, big (10.0.0.2)", "SchedulingSpec.nodelist"]),
        (
            {"node_labels": {"rack": "a"}, "exclude": ["10.0.0.1"]},
            ["exclude 10.0.0.1", "rack='a'", "SchedulingSpec.exclude or SchedulingSpec.node_labels"],
        ),
    ],
)
def test_selectors_that_no_node_meets(spec: dict[str, Any], facts: list[str]) -> None:
    text = str(told(TWO, job("r", 1, **spec)))
    for fact in facts:
        assert fact in text


def test_an_empty_cluster() -> None:
    assert "the cluster has no nodes" in str(told(cluster(), job("r", 1)))


def test_the_errors_say_it() -> None:
    with pytest.raises(errors.PlacementInfeasibleError) as caught:
        require_feasible(TWO, [job("r", 1, gpu=6)], ())
    assert str(caught.value) == (
        "role 'r' cannot be placed on this cluster, now or later: requested a worker with 6 GPU, 1 CPU; observed at most 4 "
        "GPU, 64 CPU on the best-fitting of 2 nodes, big (10.0.0.2); short of 2 GPU. Set SchedulingSpec.gpu to 4."
    )
    require_feasible(TWO, [job("r", 5, gpu=1)], ())
    held = cluster(msgspec.structs.replace(LARGE, available={"GPU": 1.0, "CPU": 64.0}))
    error = busy([job("one", 2, gpu=1), job("two", 1, gpu=2)], held, "somebody (3 GPU)", Deadline(0.0))
    for fact in ("'one and two'", "requested 4 GPU, 3 CPU", "free now 1 GPU, 64 CPU", "somebody (3 GPU)", "Timeouts.start_s"):
        assert fact in str(error)
