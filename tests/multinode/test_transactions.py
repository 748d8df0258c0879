"""Several jobs and several controllers: a start is atomic, and no job waits for
ever.
"""

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
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from helmsman.api import errors
from helmsman.api.scheduler import Job, SchedulingSpec, SchedulingStrategy, Timeouts
from helmsman.controller._aio.event_loop import submit
from helmsman.controller._ray_backend.scheduler import RayScheduler
from tests.contract import engines
from tests.contract.helpers import wait_until
from tests.multinode.conftest import TIMEOUTS, Nodes
from tests.multinode.contender import LIMIT_S as CONTENDER_LIMIT_S
from tests.multinode.contender import admit_and_free

pytestmark = pytest.mark.usefixtures("left_as_found")
NUM_ROUNDS = int(os.environ.get("HELMSMAN_SOAK_ROUNDS", "20"))


def _job(role: str, replicas: int, gpu: int, strategy: Any = "separate", **fields: Any) -> Job:
    spec = SchedulingSpec(cpu=0, gpu=gpu, ray_placement_strategy=strategy, **fields)
    return Job(role=role, replicas=replicas, tasks=[spec])


def _beside(role: str, target: str) -> Job:
    return Job(
        role=role,
        scheduling_strategy=SchedulingStrategy(type="colocation", target=target, fork=True),
    )


def _groups() -> list[str]:
    from helmsman.controller._ray_backend import cluster_state

    return [row.name for row in cluster_state.group_rows()]


def test_create_workers_many_jobs(run: RayScheduler) -> None:
    ids = run.create_workers(
        [_beside("rollout", "train"), _job("train", 2, 1, "shared"), _job("reference", 1, 2)]
    )
    assert ids == ["rollout/0", "train/0", "train/1", "reference/0"]
    (rollout,), train = run.get_workers("rollout"), run.get_workers("train")
    assert rollout.devices == [device for worker in train for device in worker.devices]
    run.delete_workers("train")
    with pytest.raises(errors.RoleNotFoundError):
        run.get_workers("rollout")


def test_create_workers_all_or_nothing(run: RayScheduler) -> None:
    failing = _job("second", 2, 1, env_vars={}, port_count=100_000)
    with pytest.raises(errors.WorkerStartError, match="second"):
        run.create_workers([_job("first", 2, 1), failing])
    assert run.status() == []
    assert _groups() == []
    for wrong in (
        [_job("new", 1, 1), _beside("lost", "missing")],
        [_job("train", 1, 1), _beside("one", "two"), _beside("two", "one")],
    ):
        with pytest.raises(errors.RoleNotFoundError):
            run.create_workers(wrong)
        assert run.status() == []
    assert _groups() == []


def test_create_workers_names_holders(make_run: Callable[..., RayScheduler]) -> None:
    import ray

    holder, other = make_run(), make_run(timeouts=Timeouts(start_s=0.5))
    holder.create_workers([_job("trainer", 2, 4)])
    foreign = ray.remote(num_gpus=8, num_cpus=0)(engines.Counter).options(name="foreign").remote()
    ray.get(foreign.add.remote(1))  # type: ignore[attr-defined]
    with pytest.raises(errors.PlacementTimeoutError) as caught:
        other.create_workers([_job("one", 1, 8), _job("two", 1, 8)])
    assert caught.value.elapsed_s >= 0.5
    for fact in (
        "'one and two'",
        "requested 16 GPU",
        "free now 4 GPU",
        f"helmsman/{holder.run_id}/trainer/0",
        "(8 GPU)",
        "actor foreign",
        "pid",
        "limit 0.5 s",
        "Timeouts.start_s",
    ):
        assert fact in str(caught.value)
    assert not [name for name in _groups() if other.run_id in name], "its groups are removed"
    ray.kill(foreign)  # type: ignore[arg-type]


def test_create_workers_waits(
    make_run: Callable[..., RayScheduler], caplog: pytest.LogCaptureFixture
) -> None:
    holder, other = make_run(), make_run()
    holder.create_workers(_job("holder", 5, 4))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.create_workers, _job("waits", 2, 8))
        told = wait_until(
            lambda: [record for record in caplog.records if "still waiting" in record.message],
            "it says so",
        )
        for fact in (
            "'waits'",
            f"of at most {TIMEOUTS.start_s:g} s",
            "requested 16 GPU",
            "free now 0 GPU",
            f"{holder.run_id}/holder",
        ):
            assert fact in told[0].getMessage()
        holder.delete_workers()
        assert waiting.result(TIMEOUTS.start_s) == ["waits/0", "waits/1"]


def test_remove_group_in_flight(nodes: Nodes, run: RayScheduler) -> None:
    """Or the node would keep the bundle for ever: the head tells it nothing of a removal that
    overtakes its question.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    from helmsman.controller._ray_backend import cluster_state
    from helmsman.controller._ray_backend import placement_groups as ours

    large = next(each.node_id for each in run.nodes() if each.num_devices == 8)
    node = next(each for each in nodes.cluster.worker_nodes if each.node_id == large)
    raylet = node.all_processes["raylet"][0].process.pid
    bundle, selector = [{"GPU": 8.0}], [{cluster_state.NODE_ID_LABEL: node.node_id}]

    def stopped_while_asked() -> tuple[Any, float]:
        """The head sees what is freed 0.1 s later and tries again within a second; in between the
        node is stopped.
        """
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
            request = ours._Request(None, None, waiting, asked_at)  # type: ignore[arg-type]
            removing = pool.submit(ours._remove_in_order, [request])
            with pytest.raises(concurrent.futures.TimeoutError):
                removing.result(1.0)
            assert _progress(waiting).phase.value == "in flight"
            os.kill(raylet, signal.SIGCONT)
            removing.result(30)
    finally:
        os.kill(raylet, signal.SIGCONT)
    assert _groups() == []


def _progress(group: Any) -> Any:
    from helmsman.controller._ray_backend import cluster_state

    return cluster_state.group_progress([group.id.hex()])[group.id.hex()]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_create_workers_many_groups(make_run: Callable[..., RayScheduler]) -> None:
    """Two controllers that want twenty groups together, and there is room for one of them at a
    time.
    """
    runs = [make_run(timeouts=Timeouts(start_s=240.0)) for _ in range(2)]

    def start_and_end(run: RayScheduler) -> int:
        started = len(run.create_workers(_job("rollout", 10, 2)))
        run.delete_workers()
        return started

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert [each.result(280) for each in [pool.submit(start_and_end, run) for run in runs]] == [
            10,
            10,
        ]
    assert _groups() == []


@pytest.mark.slow
@pytest.mark.timeout(300 + 10 * NUM_ROUNDS)
def test_admission_of_contending_controllers(nodes: Nodes, run: RayScheduler) -> None:
    """Each round two processes admit jobs of a random shape at once, up to all devices each; groups
    without workers.
    """
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
            assert _groups() == []
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
    jobs = [_job("first", first, gpu, random_.choice(["shared", "separate", "deferred"]))]
    if rest >= 2 and random_.random() < 0.7:
        jobs.append(_job("second", random_.randint(1, rest // 2), 2, "separate"))
    return jobs
