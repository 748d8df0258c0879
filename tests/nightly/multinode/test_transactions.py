"""Tests of contending controllers, and of the removal of a group in flight."""

from __future__ import annotations

import concurrent.futures
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import msgspec
import pytest

from helmsman._base.event_loop import submit
from helmsman.api.scheduler import Job
from helmsman.controller._scheduler.ray.scheduler import RayScheduler
from tests.contract.helpers import wait_until
from tests.multinode.conftest import Nodes
from tests.multinode.contender import LIMIT_S as CONTENDER_LIMIT_S
from tests.multinode.contender import admit_and_free
from tests.multinode.jobs import make_job, placement_groups

pytestmark = pytest.mark.usefixtures("left_as_found")


NUM_ROUNDS = int(os.environ.get("HELMSMAN_SOAK_ROUNDS", "20"))


def test_remove_group_in_flight(nodes: Nodes, run: RayScheduler) -> None:
    """A removal waits for the request in flight: otherwise the node would keep the bundle."""
    from ray.util.placement_group import placement_group, remove_placement_group

    from helmsman.controller._scheduler.ray import cluster_state
    from helmsman.controller._scheduler.ray import placement_groups as ours

    large = next(each.node_id for each in run.nodes() if each.num_devices == 8)
    node = next(each for each in nodes.cluster.worker_nodes if each.node_id == large)
    raylet = node.all_processes["raylet"][0].process.pid
    bundle, selector = [{"GPU": 8.0}], [{cluster_state.NODE_ID_LABEL: node.node_id}]

    def stopped_while_asked() -> tuple[Any, float]:
        """Stop the node after it is freed, and before the head tries again within a second."""
        holder = placement_group(bundle, bundle_label_selector=selector)
        wait_until(lambda: _progress(holder).phase.value == "created", "the holder is created")
        asked_at = time.monotonic()
        waiting = placement_group(bundle, bundle_label_selector=selector)
        wait_until(
            lambda: _progress(waiting).phase.value == "waiting", "there is no room for the other"
        )
        remove_placement_group(holder)
        wait_until(
            lambda: (
                nodes.free()[node.node_id].get("GPU") == 8
                or _progress(waiting).phase.value != "waiting"
            ),
            "room",
        )
        os.kill(raylet, signal.SIGSTOP)
        wait_until(lambda: _progress(waiting).phase.value != "waiting", "the head has tried again")
        return waiting, asked_at

    try:
        for _ in range(20):
            waiting, asked_at = stopped_while_asked()
            if asked := _progress(waiting).phase.value == "in flight":
                break
            os.kill(raylet, signal.SIGCONT)
            remove_placement_group(waiting)
            wait_until(lambda: nodes.free()[node.node_id].get("GPU") == 8, "free for another round")
        assert asked
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            request = ours._GroupRequest(None, None, waiting, asked_at)  # type: ignore[arg-type]
            removing = pool.submit(ours._remove_in_order, [request])
            with pytest.raises(concurrent.futures.TimeoutError):
                removing.result(1.0)
            assert _progress(waiting).phase.value == "in flight"
            os.kill(raylet, signal.SIGCONT)
            removing.result(30)
    finally:
        os.kill(raylet, signal.SIGCONT)
    assert placement_groups() == []


def _progress(group: Any) -> Any:
    from helmsman.controller._scheduler.ray import cluster_state

    return cluster_state.group_progress([group.id.hex()])[group.id.hex()]


@pytest.mark.timeout(300 + 10 * NUM_ROUNDS)
def test_admission_of_contending_controllers(nodes: Nodes, run: RayScheduler) -> None:
    """In each round two processes admit random jobs at once, each with up to all devices."""
    random_ = random.Random(20)
    outcomes: Counter[str] = Counter()
    other = subprocess.Popen(
        [sys.executable, "-m", "tests.multinode.contender", nodes.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdin is not None
    assert other.stdout is not None
    try:
        assert json.loads(other.stdout.readline()) == "ready"
        for _ in range(NUM_ROUNDS):
            ours, theirs = _random_jobs(random_), _random_jobs(random_)
            other.stdin.write(msgspec.json.encode(theirs).decode() + "\n")
            other.stdin.flush()
            outcomes[
                submit(admit_and_free(f"helmsman/{run.run_id}", ours)).result(2 * CONTENDER_LIMIT_S)
            ] += 1
            outcomes[json.loads(other.stdout.readline())] += 1
            assert placement_groups() == []
        other.stdin.close()
        assert other.wait(60) == 0
    finally:
        other.kill()
        other.wait()
    wait_until(lambda: nodes.free() == nodes.total(), "everything is free again")
    assert outcomes == {"placed": 2 * NUM_ROUNDS}


def _random_jobs(random_: random.Random) -> list[Job]:
    gpu = random_.choice([1, 2, 4])
    first = random_.randint(1, 20 // gpu)
    rest = 20 - first * gpu
    jobs = [make_job("first", first, gpu, random_.choice(["shared", "separate", "deferred"]))]
    if rest >= 2 and random_.random() < 0.7:
        jobs.append(make_job("second", random_.randint(1, rest // 2), 2, "separate"))
    return jobs
