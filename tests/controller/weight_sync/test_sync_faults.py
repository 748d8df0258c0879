"""What goes wrong in the middle of a sync, and what is so afterwards; with real engines in real
processes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helmsman import HelmsmanError, SamplingParams, Scheduler, SupervisionPolicy
from helmsman.api.errors import CallTimeoutError, RequestsInFlightError
from helmsman.api.weights import WeightFormat
from helmsman.controller._generation.health import Health
from helmsman.controller._weight_sync.sync import SyncReport, WeightSync
from helmsman.controller._weight_sync.via_collective import ViaCollective
from helmsman.controller._weight_sync.via_storage import ViaDisk
from tests.contract.helpers import has_stopped, stop, wait_until
from tests.controller.sync_engines import KILL, STOP
from tests.controller.sync_world import (
    PROMPT,
    SUPERVISED,
    SharedWorld,
    World,
    going_on,
    way_of,
)

pytestmark = pytest.mark.slow
WAYS = ["memory", "disk", "collective"]
LONG = 2000
"""Tokens that take an instance more than a second, which is longer than a test takes to stop it."""


@pytest.fixture(scope="module")
def scheduler(engines_scheduler: Scheduler) -> Scheduler:
    return engines_scheduler


@pytest.fixture(scope="module")
def shared(scheduler: Scheduler) -> Iterator[SharedWorld]:
    shared = SharedWorld(lambda: World(scheduler, 2, 2, supervision=SUPERVISED))
    with contextlib.closing(shared):
        yield shared


@pytest.mark.parametrize("way", WAYS)
def test_push_with_a_failing_cast_releases_all_ranks(
    way: str, world: World, tmp_path: Path
) -> None:
    """Its peers are in the collectives of the other parameters by then, and the instances wait for
    the first bucket.
    """
    world.step()
    form = WeightFormat(dtype="float4_e2m1fn_x2")  # a type of torch that nothing is cast to
    with pytest.raises(HelmsmanError, match="(?i)float4"):
        world.sync(way_of(way, tmp_path), form=form).push(timeout=60)
    assert all(world.differing().values())
    assert world.sync(way_of(way, tmp_path)).push(timeout=60).updated == world.ids
    assert not any(world.differing().values())


@pytest.mark.parametrize("way", [*WAYS, "update_rollout"])
def test_push_refuses_weights_that_changed_meanwhile(
    way: str, world: World, tmp_path: Path
) -> None:
    """A step of another thread comes between the two."""
    before = world.sync().push().version
    version = world.step()
    for worker in world.trainer.workers:
        world.scheduler.call_engine(worker.id, "step_after_next_version")
    sync = world.sync(way_of(way, tmp_path)) if way in WAYS else None
    push: Callable[[], Any] = (
        sync.push if sync is not None else lambda: world.trainer.update_rollout(world.rollout)
    )
    with pytest.raises(HelmsmanError, match=f"weight version {version + 1}.*{version}"):
        push()
    assert all(world.differing().values())
    assert set(world.rollout.versions().values()) == {before}
    push()
    assert world.rollout.versions() == dict.fromkeys(world.ids, version + 1)
    assert not any(world.differing().values())


def test_via_collective_without_an_instance_that_refuses(world: World) -> None:
    able, unable = world.ids
    sync = world.sync(ViaCollective(timeout=5.0))
    world.step()
    world.scheduler.call_engine(unable, "refuse_updates", None, True)
    try:
        report = sync.push()
        assert report.updated == (able,)
        assert "this engine cannot read them" in report.failed[unable]
        assert world.health() == [Health.HEALTHY, Health.STALE]
    finally:
        world.scheduler.call_engine(unable, "refuse_updates", None, False)
    assert sync.push().updated == world.ids


def test_via_collective_after_a_timeout(world: World) -> None:
    """The trainer is free again soon, and meets no member left over from an earlier group."""
    last = world.ids[1]
    sync = world.sync(ViaCollective(timeout=300.0))
    world.step()
    sync.push()
    world.step()
    world.scheduler.call_engine(last, "fail_in_next_update", None, STOP)
    with going_on(world.pid(last)):
        with pytest.raises(HelmsmanError):
            sync.push(timeout=5)
        for worker in world.trainer.workers:
            world.scheduler.call_engine(worker.id, "get_version", rpc_timeout=100)
    num_updates = world.updates()
    assert sync.push(timeout=100).updated == world.ids
    assert world.updates() == [num + 1 for num in num_updates]
    assert not any(world.differing().values())


def test_via_collective_of_several_groups_in_turn(world: World) -> None:
    """Its rank 0 is in one group at a time, and so is an instance."""
    with World(world.scheduler, 1, 1, "-other", supervision=SUPERVISED) as other:
        syncs = [world.sync(ViaCollective(timeout=10.0)) for _ in range(2)]
        syncs.append(WeightSync(world.trainer, other.rollout, ViaCollective(timeout=10.0)))
        syncs.append(other.sync(ViaCollective(timeout=10.0)))
        for _ in range(3):
            for sync, (rollout, trainer) in zip(
                syncs, [(world, world)] * 2 + [(other, world), (other, other)], strict=True
            ):
                trainer.trainer.set_version(
                    1 + max(world.trainer.get_version(), other.trainer.get_version())
                )
                num_updates = rollout.updates()
                assert sync.push().updated == rollout.ids
                assert rollout.updates() == [num + 1 for num in num_updates]


def test_push_cancelled_leaves_no_memory(world: World) -> None:
    """Whatever became of it: the copies are those of the version that is served, and of none
    before.
    """
    sync = world.sync()
    world.step()
    sync.push()
    found: list[int] = []
    for _ in range(4):
        asyncio.run(_cancelled_push(world, sync))
        found.append(world.num_segments())
    assert found[1:] == found[:-1]
    assert sync.push().updated == world.ids
    for _ in range(4):
        version = world.trainer.get_version()
        world.trainer.set_version(version - 1)
        for push in (sync.push, lambda: world.trainer.update_rollout(world.rollout)):
            with pytest.raises(ValueError, match="weight version is"):
                push()
        world.trainer.set_version(version)
        found.append(world.num_segments())
    assert len(set(found)) == 1
    assert not any(world.differing().values())


async def _cancelled_push(world: World, sync: WeightSync) -> None:
    """Interrupt a push when the first instance has the weights and the last is in the middle of
    them.
    """
    first, last = world.ids
    pid = world.pid(last)
    version = world.step()
    world.scheduler.call_engine(last, "fail_in_next_update", None, STOP)
    pushing = asyncio.ensure_future(sync.async_push())
    with going_on(pid):
        await asyncio.to_thread(wait_until, lambda: has_stopped(pid), "it has stopped")
        await asyncio.to_thread(
            wait_until,
            lambda: world.scheduler.call_engine(first, "get_version") == version,
            "the first instance is updated",
        )
        # Its reply has arrived; the tasks that await it are done a few turns of the loop later.
        for _ in range(8):
            await world.rollout.async_stats()
        pushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pushing
    # it has answered: what it had to do with that update is over
    await asyncio.to_thread(world.rollout.versions)


def test_push_cancelled_moves_requests_elsewhere(world: World) -> None:
    last = world.ids[1]
    sync = world.sync()
    sync.push()
    num_aborts = world.scheduler.call_engine(last, "aborts")
    sampling = SamplingParams(max_new_tokens=LONG)
    futures = [world.rollout.submit(PROMPT, sampling) for _ in range(8)]
    asyncio.run(_cancelled_push(world, sync))
    assert world.health()[1] is Health.STALE
    wait_until(
        lambda: world.scheduler.call_engine(last, "aborts") > num_aborts, "it aborts requests"
    )
    assert [len(future.result(120).token_ids) for future in futures] == [LONG] * 8
    assert sync.push().updated == world.ids


def test_push_reports_requests_that_do_not_end(world: World) -> None:
    last = world.ids[1]
    pid = world.pid(last)
    stop(pid)
    with going_on(pid):
        futures = [
            world.rollout.submit(PROMPT, SamplingParams(max_new_tokens=LONG)) for _ in range(8)
        ]
        assert set(world.sync().push(timeout=1.0).failed) == {last}
        wait_until(
            lambda: not world.rollout.stats().instances[world.ids[0]].num_in_flight,
            "its requests have ended",
        )
        for in_flight in ("wait", "abort"):
            sync = world.sync(in_flight=in_flight)  # type: ignore[arg-type]
            told = (
                rf"an update of the weights with in_flight='{in_flight}' has waited 0\.\d+ s .*: "
                rf"{last} has \d. \d are queued"
            )
            with pytest.raises(RequestsInFlightError, match=told):
                sync.push(timeout=0.5)
            assert not world.rollout.stats().paused
    assert [len(future.result(120).token_ids) for future in futures] == [LONG] * 8
    assert world.sync().push().updated == world.ids


@pytest.mark.parametrize("way", WAYS)
def test_push_from_several_threads(way: str, world: World, tmp_path: Path) -> None:
    sync = world.sync(way_of(way, tmp_path))
    barrier = threading.Barrier(3)

    def push(_: int) -> SyncReport:
        barrier.wait(60)
        return sync.push(timeout=100)

    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        for _ in range(3):
            world.step()
            num_updates = world.updates()
            reports = list(threads.map(push, range(3)))
            assert [report.updated for report in reports] == [world.ids] * 3
            assert world.updates() == [num + 3 for num in num_updates]
            assert not any(world.differing().values())


def test_rebuilt_instance_without_files_waits_for_update(
    scheduler: Scheduler, tmp_path: Path
) -> None:
    """It is rebuilt once, not until its budget is spent."""
    policy = SupervisionPolicy(
        probe_every_s=0.2, suspect_s=10.0, dead_s=60.0, max_restarts=1, restart_pause_s=0.1
    )
    with World(scheduler, 1, 2, "-folder", supervision=policy) as world:
        sync = world.sync(ViaDisk(str(tmp_path / "weights")))
        world.step()
        sync.push()
        shutil.rmtree(tmp_path / "weights")
        os.kill(world.pid(world.ids[0]), KILL)
        wait_until(lambda: world.health()[0] is Health.STALE, "it is stale")
        world.step()
        report = sync.push()
        assert (report.updated, report.failed) == (world.ids, {})
        assert not any(world.differing().values())


def test_rollout_close_beside_a_hanging_trainer(scheduler: Scheduler) -> None:
    with World(scheduler, 1, 1, "-hanging", supervision=SUPERVISED) as world:
        world.sync().push()
        pid = world.pid(world.trainer.workers[0].id)
        stop(pid)
        with going_on(pid):
            world.rollout.close()
            assert world.rollout.role not in {
                status.worker_id.partition("/")[0] for status in scheduler.status()
            }


def test_via_collective_with_a_dead_trainer_rank(scheduler: Scheduler) -> None:
    """Which know it from rank 0, long before their own time-out."""
    with World(scheduler, 2, 1, "-orphaned", supervision=SUPERVISED) as world:
        sync = world.sync(ViaCollective(timeout=300.0))
        world.step()
        sync.push()
        os.kill(world.pid(world.trainer.workers[1].id), KILL)
        with pytest.raises(HelmsmanError) as caught:
            sync.push()
        assert not isinstance(caught.value, CallTimeoutError)
        world.trainer.recover()
        assert sync.push(timeout=100).updated == world.ids
        assert not any(world.differing().values())
